"""The checkpoints of a kernel: it writes them together with the trainers, and removes old ones."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio
import structlog
from anyio.abc import TaskGroup

from stretto.bus.client import Bus
from stretto.errors import BusError, RunError
from stretto.kernel.calls.engines import Engines
from stretto.kernel.calls.trainers import Trainers, TrainersLost
from stretto.kernel.durable.checkpoint import (
    FORMAT,
    KernelState,
    checkpoint_name,
    prune,
    state_of,
    writing,
)
from stretto.kernel.durable.journal import JournalWriter
from stretto.kernel.fleet.sample_writer_supervisor import SampleWriterSupervisor
from stretto.kernel.schedule.tickets import TicketQueue
from stretto.kernel.setup import RunSetup
from stretto.records.remote_folder import RemoteFolder
from stretto.weights import WeightsNote

log = structlog.get_logger()

_PAUSES_S = (1.0, 2.0, 4.0)
"""Pauses before each further attempt to write a checkpoint that the run cannot do without."""


@dataclass(eq=False)
class Checkpointer:
    """Writes and prunes the checkpoints of one kernel."""

    _setup: RunSetup
    _bus: Bus
    _journal: JournalWriter
    _tasks: TaskGroup
    _trainers: Trainers
    _engines: Engines
    _tickets: TicketQueue
    _samples: SampleWriterSupervisor

    def __post_init__(self) -> None:
        setup = self._setup
        self._root = setup.folder / "checkpoints"
        store = setup.config.checkpoint.store
        self._store = RemoteFolder(store).below(setup.run) if store else None
        self._writing = anyio.Lock()
        resumed = setup.resumed
        self._newest = resumed[0].name if resumed and resumed[0] else ""
        self._saved = (resumed[1].version, resumed[1].incarnation) if resumed else (-1, 0)
        """Version and incarnation of the newest checkpoint."""
        if setup.config.steps == 0:
            self._saved = (0, 0)  # the run trains nothing, so it needs no checkpoint

    @property
    def version(self) -> int:
        """Version of the newest checkpoint; 0 without one."""
        return max(0, self._saved[0])

    def newest(self) -> tuple[Path | None, KernelState]:
        """Return the newest checkpoint's folder and state, or None and the initial state. See `state_of`."""
        if not self._newest:
            return None, KernelState.initial()
        return self._root / self._newest, state_of(self._root / self._newest)

    async def save(self) -> None:
        """Wait until trainers have copied their state. The checkpoint is written during the next steps."""
        copied = anyio.Event()
        self._tasks.start_soon(self._save_beside, copied)
        await copied.wait()

    async def _save_beside(self, copied: anyio.Event) -> None:
        async with self._writing:
            if not self._is_saved():
                version = self._setup.scheduler.version
                try:
                    await self._write(self._name(version), copied)
                except TrainersLost:
                    log.warning("checkpoint given up: a trainer was lost", version=version)
                except (OSError, BusError) as error:
                    log.error("checkpoint failed", version=version, error=str(error))
                    problem = f"checkpoint of version {version} not written: {error}"
                    self._setup.facts.problems.append(problem)
        copied.set()

    async def save_last(self) -> None:
        """Write the checkpoint with which the kernel ends, unless there is one of the current version."""
        async with self._writing:
            if not self._is_saved():
                await self.save_required()

    async def save_required(self, note: WeightsNote | None = None, name: str | None = None) -> None:
        """Write a checkpoint that the run needs, with retries. `note` is for weights not announced yet."""
        version = self._setup.scheduler.version
        for pause_s in (*_PAUSES_S, None):
            try:
                write = partial(self._write, name or self._name(version), anyio.Event(), note)
                await self._trainers.until_not_lost(write)
                return
            except (OSError, BusError) as error:
                log.error("checkpoint failed", version=version, error=str(error))
                if pause_s is None:
                    raise RunError(
                        f"the checkpoint of version {version} was not written: {error}; when it can be "
                        f"written: stretto resume {self._setup.folder}"
                    ) from error
            await anyio.sleep(pause_s)

    async def prune(self) -> None:
        """Remove old checkpoints, and the bus messages that only they needed and the run's folder has too."""
        config, scheduler = self._setup.config.checkpoint, self._setup.scheduler
        if not self._newest:
            return
        spared: set[int] = set()
        if config.keep_best:
            best = scheduler.evaluation.best
            spared = {*scheduler.evaluation.needed_versions, *([best.version] if best else [])}
        names, store = self._setup.names, self._bus.store
        log_below, journal_below = await anyio.to_thread.run_sync(
            prune, self._root, config.keep, self._newest, spared
        )
        if below := self._samples.purgeable(log_below):
            await store.purge(names.log_stream, below=below)
        if below := min(journal_below, self._setup.facts.events_on_disk + 1):
            await store.purge(names.journal_stream, below=below)

    def _is_saved(self) -> bool:
        return self._saved == (self._setup.scheduler.version, self._journal.incarnation)

    async def _write(self, name: str, copied: anyio.Event, note: WeightsNote | None = None) -> None:
        """Write a checkpoint, maybe of weights not announced yet. Set `copied` when trainers may continue."""
        await self._journal.settle()
        state = self._state()  # no await in between: all later events must follow this state

        async def ask_trainers() -> None:
            await self._trainers.save(draft, state.version, tuple(needed.version for needed in state.needed))
            copied.set()
            draft.digest = (note or await self._engines.until_announced(state.version)).digest
            await self._trainers.saved(draft, state.version)

        async with writing(self._root, name, state, self._store) as draft:
            await self._trainers.attempt(ask_trainers)
        self._saved, self._newest = (state.version, state.incarnation), name
        self._setup.facts.checkpoints.append(name)
        log.info("checkpoint", folder=name)
        await self.prune()

    def _name(self, version: int) -> str:
        """Return the name for a version: that of the newest checkpoint if it has the same version."""
        return self._newest if self._saved[0] == version and self._newest else checkpoint_name(version)

    def _state(self) -> KernelState:
        """Return the kernel's part of a checkpoint, without the digest of the weights."""
        setup = self._setup
        snapshot = setup.scheduler.snapshot()
        assert not snapshot.batch, "a checkpoint is written between steps"
        return KernelState(
            version=snapshot.version,
            incarnation=self._journal.incarnation,
            digest="",
            snapshot=snapshot,
            log_sequence=self._tickets.log_sequence,
            lowest_sequence=self._tickets.lowest_sequence(snapshot),
            layout=setup.layout,
            seed=setup.config.seed,
            trained_tokens=setup.facts.trained_tokens,
            generated_tokens=setup.facts.generated_tokens,
            wall_s=setup.facts.wall_s,
            values=setup.values,
            lost=setup.facts.lost,
            problems=tuple(dict.fromkeys(setup.facts.problems)),
            events_after=self._journal.events_after,
            journal=self._journal.head,
            lowest_event=min(self._journal.events_after + 1, self._journal.head_from),
            format=FORMAT,
            needed=tuple(
                self._engines.notes[version]
                for version in snapshot.evaluation.needed_versions
                if version != snapshot.version
            ),
        )
