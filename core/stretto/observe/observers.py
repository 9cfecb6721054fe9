"""All observers of one kernel: they follow its events and the state of scheduler and fleet."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskGroup

from stretto.bus.client import Bus
from stretto.bus.messages.events import Event, EventBatch, KernelBegan
from stretto.kernel.setup import RunSetup
from stretto.observe.advice import Adviser
from stretto.observe.event_log import EventLog
from stretto.observe.report import Report
from stretto.observe.status import StatusWriter
from stretto.observe.trackers import Trackers


class Observers:
    """The observers of one kernel. They begin with its first event."""

    def __init__(self, setup: RunSetup) -> None:
        self._setup = setup
        self._began = anyio.Event()
        self._events = EventLog(setup.folder, setup.facts)
        adviser = Adviser(setup.composed.document, quiet=setup.replays is not None)
        self.report = Report(setup, adviser)
        self.status = StatusWriter(setup, self.report)
        self.trackers = Trackers(setup.folder, setup.config.trackers, setup.facts.problems)
        setup.on_stored = self._take

    @asynccontextmanager
    async def beside(self, bus: Bus) -> AsyncGenerator[None]:
        """Write, serve and publish during the block, from the kernel's first event on."""
        setup, ending = self._setup, self._setup.facts.ending
        async with anyio.create_task_group() as tasks:
            if setup.config.metrics is not None:
                from stretto.observe.prometheus import serve_metrics  # imported here: it needs an extra

                figures = setup.config.metrics, setup, self.report, bus
                self.status.metrics_url = await tasks.start(serve_metrics, *figures)
            tasks.start_soon(self._begin, bus, tasks)
            try:
                yield
                if self._began.is_set() and not ending.replaced:
                    await self._events.complete(bus, setup.names, ending)
            finally:
                self._events.close()
            tasks.cancel_scope.cancel()

    def _take(self, sequence: int, message: EventBatch, events: Sequence[Event]) -> None:
        self._events.append(sequence, message)
        for time, event in zip(message.times, events, strict=True):
            self.report.add(time, event)
            if isinstance(event, KernelBegan):
                self._began.set()
                if self._setup.replays is None:
                    self.trackers.start()

    async def _begin(self, bus: Bus, tasks: TaskGroup) -> None:
        await self._began.wait()
        setup = self._setup
        tasks.start_soon(self._events.keep, bus, setup.names)
        tasks.start_soon(self.status.publish, bus, setup.names)
