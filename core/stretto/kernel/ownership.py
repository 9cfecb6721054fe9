"""A kernel takes the lease of a run, and owns the run while its bus connection is open."""

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
"""The server delivers a ticket again after this many seconds without news from its rollout worker."""
_LOOK_S = 5.0
"""Seconds for finding out, at the end, whether another kernel owns the run."""


async def own_run(setup: RunSetup, bus: Bus, ending: Ending) -> None:
    """Take the lease and own the run until `ending.over` is set. Errors are raised in an exception group."""
    names = setup.names
    tickets = [names.ticket("train"), names.ticket("eval")]
    await bus.store.make_queue(names.tickets_stream, tickets, redeliver_s=_REDELIVER_S)
    queue_end = await bus.store.end(names.tickets_stream)  # before the lease: a later kernel's tickets follow
    journal = await own_journal(bus, names, str(setup.folder))
    if setup.checkpoints != checkpoints_in(setup.folder):  # another kernel, the owner until now, wrote one
        log.warning("the run has a new checkpoint since this kernel chose one; it begins again")
        ending.end("repeated", "")
        return
    await bus.store.make_log(names.log_stream, names.of_log)
    try:
        async with anyio.create_task_group() as tasks:
            kernel = Kernel(setup, bus, journal, ending, tasks)
            await kernel.run(queue_end.sequence)
            tasks.cancel_scope.cancel()
    finally:
        if ending.status in ("running", "failed") and bus.connected:  # another kernel may own the run
            with anyio.CancelScope(shield=True), anyio.move_on_after(_LOOK_S), suppress(BusError):
                ending.replaced |= await newest_epoch(bus, names) > journal.epoch
