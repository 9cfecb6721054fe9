"""Ends the run after a long outage of the bus or its store, and this kernel if another one owns the run."""

import anyio
import structlog

from stretto.bus.client import Bus
from stretto.bus.messages.membership import SERVER, Beacon
from stretto.bus.messages.subjects import Subjects
from stretto.bus.server import restart_server
from stretto.kernel.ending import Ending
from stretto.kernel.fleet.fleet import Fleet
from stretto.kernel.setup import RunSetup

log = structlog.get_logger()

_STORE_S = 30.0
"""Restart a nats-server that answers pings, but no request to its store, after this many seconds."""


async def watch_owner(bus: Bus, names: Subjects, lease_epoch: int, ending: Ending) -> None:
    """End this kernel when the beacon of a newer kernel arrives. The server refuses the old kernel's events,
    but it would still deliver the old kernel's answers to the new kernel's workers."""

    def hear(beacon: Beacon) -> None:
        if beacon.lease_epoch > lease_epoch:
            ending.replaced = True
            ending.end("failed", f"it heard the beacon of the kernel of lease {beacon.lease_epoch}")

    await bus.subscribe(names.beacon, Beacon, hear)


async def watch_bus(setup: RunSetup, bus: Bus, ending: Ending) -> None:
    """End the run after `bus.outage_s` without a connection, less the time while this process is stopped."""
    outage_s = setup.config.bus.outage_s
    disconnected_s, poll_s = 0.0, min(1.0, outage_s / 4)
    while disconnected_s <= outage_s:
        await anyio.sleep(poll_s)
        disconnected_s = 0.0 if bus.connected else disconnected_s + poll_s
    ending.end(
        "failed",
        f"no connection to nats-server at {bus.url} for {outage_s:g} s (bus.outage_s); "
        f"`stretto resume {setup.folder}` continues the run",
    )


async def watch_store(setup: RunSetup, bus: Bus, ending: Ending) -> None:
    """Restart the bundled nats-server when it answers pings, but no request to its store: after a failed
    write, the server never writes to that stream again, even if its disk has room again. End the run after
    90% of `bus.outage_s`, a little before workers end by themselves."""
    folder, config = setup.folder, setup.config.bus
    next_restart_s = _STORE_S
    while (waited_s := _waited_for_store_s(bus, setup.fleet)) < 0.9 * config.outage_s:
        if waited_s < _STORE_S:
            next_restart_s = _STORE_S
        elif waited_s >= next_restart_s and config.url is None:
            next_restart_s = waited_s + _STORE_S
            log.warning("the store does not answer; starting nats-server again", seconds=waited_s)
            restart_server(folder / "bus")
        await anyio.sleep(1)
    ending.end(
        "failed",
        f"no answer from the store of nats-server at {bus.url} for {waited_s:.0f} s (bus.outage_s "
        f"is {config.outage_s:g}); see {folder / 'bus' / 'nats.log'}, then `stretto resume {folder}`",
    )


def _waited_for_store_s(bus: Bus, fleet: Fleet) -> float:
    waits = [bus.unanswered.longest(), *(member.beat.wait for member in fleet.members.values())]
    return max((wait.seconds for wait in waits if wait is not None and wait.who == SERVER), default=0.0)
