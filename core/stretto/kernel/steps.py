"""The train steps of a kernel: train a batch, announce the new weights, write a checkpoint if one is due."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import anyio
from anyio.abc import TaskGroup

from stretto.bus.messages import events
from stretto.bus.messages.inference import SwapDone
from stretto.bus.messages.training import RowRef
from stretto.errors import one_job
from stretto.kernel.calls.engine_errors import EngineErrors
from stretto.kernel.calls.engines import Engines
from stretto.kernel.calls.trainers import StepResult, Trainers
from stretto.kernel.durable.checkpointer import Checkpointer
from stretto.kernel.durable.journal import JournalWriter
from stretto.kernel.schedule.commands import StartBatch
from stretto.kernel.schedule.outcomes import refs_of
from stretto.kernel.setup import RunSetup
from stretto.kernel.step_meter import StepMeter
from stretto.machine import clock
from stretto.weights import WeightsNote


@dataclass(eq=False)
class Steps:
    """The train steps of one kernel. `_hear` passes on an event, then records the figures of its step."""

    _setup: RunSetup
    _journal: JournalWriter
    _tasks: TaskGroup
    _trainers: Trainers
    _engines: Engines
    _checkpointer: Checkpointer
    _hear: Callable[[events.Input, Callable[[], events.StepMeasured] | None], None]

    def __post_init__(self) -> None:
        self._scheduler = self._setup.scheduler
        self._meter = StepMeter(self._setup)
        self.reached = self._setup.resumed[1].version if self._setup.resumed else 0
        """Version of the trainers' weights, or, after a loss, the version that new trainers must reach."""
        self.under_way: tuple[RowRef, ...] | None = None
        """Rows of the batch that is trained now."""
        self.rows: dict[int, tuple[RowRef, ...]] = {}
        """Version -> rows of the batch that was trained on it, since the newest checkpoint."""
        self.digests: dict[int, str] = {}
        """Published version -> digest of its weights."""
        self.published_again: dict[int, WeightsNote] = {}
        """Version -> its note from the trainers that replaced lost ones."""
        self._engine_errors = EngineErrors()
        self._ended = anyio.Event()
        """Set at the end of each step."""
        self._engines.on_swapped = self._swapped

    def begin(self, note: WeightsNote) -> None:
        """Record the weights from which this kernel trains on."""
        self.reached = note.version
        self.digests[note.version] = note.digest

    def current(self, note: WeightsNote) -> WeightsNote:
        """Return the current note of the same version: trainers that replaced others publish it again."""
        return self.published_again.get(note.version, note)

    async def until_over(self) -> None:
        """Wait until no batch is in training and the newest version is announced."""
        while self._scheduler.training:
            await self._ended.wait()
        await self._engines.until_announced(self.reached)

    async def train(self, start: StartBatch) -> None:
        """Train a batch. Publish its weights during the next step, unless samples for that step need them."""
        alternates = self._scheduler.settings.alternates
        if alternates:
            self._setup.waits.lacks(events.Cause("swap", start.version))
            await self._engines.until_asleep()
            self._setup.waits.lacks(None)
        waits = self._setup.waits.end()
        self.under_way = refs_of(start.groups)
        version, config = start.version + 1, self._setup.config
        must_save = bool(config.checkpoint.every) and version % config.checkpoint.every == 0
        must_save |= config.checkpoint.keep_best and self._scheduler.evaluation.is_due(version)
        # Rows of a dataset have no version: the next step does not wait for the weights of this step.
        publishes_later = self._scheduler.settings.max_staleness > 0 or not self._setup.graph.samples
        publishes_later &= not alternates  # engines that wake after the step must not load older weights

        async def run_step() -> tuple[StepResult, float, float, WeightsNote | None]:
            result, busy_s = await self._run_calls(start)
            ended = clock.now()
            note = None if publishes_later else await self._trainers.published(version)
            return result, busy_s, clock.now() - ended, note

        result, busy_s, published_s, note = await self._trainers.until_done(run_step)
        self._record(start)
        self._setup.fleet.lasts("trainer")
        if note is not None:
            waits += ((events.Cause("publication"), published_s),)
            await self._note(note)
        divergence = self._engine_errors.divergence(result.divergence)
        # No await from here to `announce`: all events of a step must be in one message.
        measure = partial(self._meter.measure, start, result, waits, busy_s, divergence)
        self._hear(events.StepTrained(version, must_save, divergence, bool(result.skipped)), measure)
        if note is None:
            self._tasks.start_soon(self._publish_beside, version)
        else:
            self._engines.announce(self.current(note))
        self._ended.set()
        self._ended = anyio.Event()
        if must_save:
            await self._checkpointer.save()
            self._hear(events.BatchesReleased(), None)

    def report(
        self,
        start: StartBatch,
        result: StepResult | events.StepMeasured | None,
        divergence: float | None,
        digest: str,
    ) -> None:
        """Record a step of a former kernel: with new figures if it was repeated, else with recorded ones."""
        self._record(start)
        if digest:  # trainers that replace lost ones must reach the same digest
            self.digests[start.version + 1] = digest
        if isinstance(result, StepResult):
            self._journal.hear(self._meter.measure(start, result, (), 0.0, divergence, repeated=True))
        elif result is not None:
            self._journal.hear(self._meter.recall(result))

    def _swapped(self, worker: str, done: SwapDone) -> None:
        self._engine_errors.add(worker, done)
        self._meter.received(done)

    def _record(self, start: StartBatch) -> None:
        """Remember a trained batch until a checkpoint contains its step."""
        self.rows[start.version] = refs_of(start.groups)
        self.reached = start.version + 1
        for version in [trained for trained in self.rows if trained < self._checkpointer.version]:
            del self.rows[version]
            self.digests.pop(version, None)

    async def _run_calls(self, start: StartBatch) -> tuple[StepResult, float]:
        """Run a step; end it after the previous version is announced. Return also the engines' busy time."""
        rows, ahead = refs_of(start.groups), refs_of(self._scheduler.tickets.done_groups)
        needed = self._scheduler.evaluation.needed_versions
        busy_times: list[float] = []

        async def ask_engines() -> None:
            busy_times.append(await self._engines.busy_s())

        result = await self._trainers.step(self._journal.incarnation, start.version, rows, ahead)
        await self._engines.until_announced(start.version)
        async with one_job() as tasks:
            tasks.start_soon(ask_engines)
            await self._trainers.end(start.version, needed)
        return result, busy_times[0]

    async def _note(self, note: WeightsNote) -> None:
        self._meter.published(note)
        self.digests[note.version] = note.digest
        self._journal.hear(events.VersionPublished(self._journal.incarnation, note.version, note.digest))
        await self._journal.flush()

    async def _publish_beside(self, version: int) -> None:
        note = await self._trainers.until_done(partial(self._trainers.published, version))
        await self._note(note)
        self._engines.announce(self.current(note))
