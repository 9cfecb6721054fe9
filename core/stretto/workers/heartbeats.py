"""A worker's heartbeats. A thread with a connection of its own sends them, so they come even while the event
loop stands still, for example because it imports a library. Each says how long it has stood still."""

import faulthandler
import sys

import msgspec
import structlog

from stretto.bus.client import connect
from stretto.bus.health import sleep_and_measure_delay
from stretto.bus.messages.membership import Heartbeat
from stretto.bus.messages.subjects import Subjects
from stretto.bus.server import Bootstrap
from stretto.errors import BusError
from stretto.launcher import Role
from stretto.machine import clock

log = structlog.get_logger()

BEAT_S = 1.0
_STACKS_S = 60.0
"""After the event loop has stood still this long, the thread writes all stacks to stderr, once."""


class Heartbeats:
    """The newest heartbeat of a worker, and the thread's loop that sends it."""

    def __init__(self, bootstrap: Bootstrap, role: Role, first: Heartbeat) -> None:
        self._bootstrap = bootstrap
        self._subject = Subjects(bootstrap.run).kernel(role, "heartbeat")
        self._newest = first
        self._updated_at = clock.now()
        self._wrote_stacks = False

    def update(self, heartbeat: Heartbeat) -> None:
        """Set the heartbeat to send. The event loop calls this every `BEAT_S`, to show that it runs."""
        self._newest, self._updated_at = heartbeat, clock.now()
        self._wrote_stacks = False

    async def send(self) -> None:
        """Send heartbeats until cancelled. The thread runs it."""
        while True:
            try:
                async with connect(self._bootstrap) as bus:
                    while True:
                        await bus.publish(self._subject, self._stamped())
                        late = await sleep_and_measure_delay(BEAT_S)
                        # The whole process was suspended for that time, not its event loop alone. Not in one
                        # statement with the await: the sum would forget an update during the sleep.
                        self._updated_at += late
            except BusError as error:
                log.warning("no connection for heartbeats", error=str(error))

    def _stamped(self) -> Heartbeat:
        blocked_s = clock.now() - self._updated_at
        if blocked_s > _STACKS_S and not self._wrote_stacks:
            self._wrote_stacks = True
            log.warning(
                "the event loop stands still; the stacks are in the worker's output", seconds=blocked_s
            )
            faulthandler.dump_traceback(sys.stderr)
        if blocked_s < 2 * BEAT_S:
            return self._newest
        return msgspec.structs.replace(self._newest, blocked_s=blocked_s)
