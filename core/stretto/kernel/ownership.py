"""A kernel takes the lease of a run, and owns the run for as long as one bus is open."""

from __future__ import annotations

from contextlib import suppress

import anyio
import structlog

from stretto.bus.client import Bus
from stretto.errors import BusError
from stretto.kernel.durable.checkpoint import checkpoints_in
from stretto.kernel.durable.journal import newest_epoch, own_journal
from stretto.kernel.ending import Ending
from stretto.kernel.kernel import Kernel
from stretto.kernel.setup import RunSetup

log = structlog.get_logger()

_REDELIVER_S = 20.0
"""A ticket with no news from a rollout worker for so long is delivered again: it may have been lost."""
_LOOK_S = 5.0
"""Deadline for the look whether another kernel owns the run."""


async def own_run(setup: RunSetup, bus: Bus, ending: Ending) -> None:
    """Take the lease and own the run until `ending.over` is set. Errors come in an exception group."""
    names = setup.names
    tickets = [names.ticket("train"), names.ticket("eval")]
    await bus.store.make_queue(names.tickets_stream, tickets, redeliver_s=_REDELIVER_S)
    former_tickets = await bus.store.end(names.tickets_stream)  # before the lease: a later owner's come later
    journal = await own_journal(bus, names, str(setup.folder))
    if setup.checkpoints != checkpoints_in(setup.folder):  # of another kernel, which owned the run until now
        log.warning("the run has a new checkpoint since this kernel chose one; it begins again")
        ending.end("repeated", "")
        return
    await bus.store.make_log(names.log_stream, names.of_log)
    try:
        async with anyio.create_task_group() as tasks:
            kernel = Kernel(setup, bus, journal, ending, tasks)
            await kernel.run(former_tickets.sequence)
            tasks.cancel_scope.cancel()
    finally:
        if ending.status in ("running", "failed") and bus.connected:  # another may have taken the workers
            with anyio.CancelScope(shield=True), anyio.move_on_after(_LOOK_S), suppress(BusError):
                ending.replaced |= await newest_epoch(bus, names) > journal.epoch
