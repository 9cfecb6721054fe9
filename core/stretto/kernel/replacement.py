"""Replaces lost trainers while generation, scoring and evaluation continue. The trainers of all groups start
again: the others could wait for the lost trainer for ever, and all models need the same version. The new
trainers load the newest checkpoint and train the later batches again. The scheduler's state does not change.
The newest version is published again with the same digest, for engines that start later."""

from collections import Counter
from dataclasses import dataclass
from heapq import nlargest

import anyio
import msgspec
import structlog

from stretto.bus.messages.events import Replaced
from stretto.errors import BusError
from stretto.kernel.calls.engines import Engines
from stretto.kernel.calls.trainers import NOTICED_S, Trainers
from stretto.kernel.durable.checkpointer import Checkpointer
from stretto.kernel.durable.journal import JournalWriter
from stretto.kernel.ending import Ending
from stretto.kernel.fleet.admission import Admission
from stretto.kernel.setup import RunSetup
from stretto.kernel.steps import Steps
from stretto.weights import WeightsNote

log = structlog.get_logger()

_NAMED = 3
"""Number of the longest sequences of a batch that an error message names."""


@dataclass(eq=False)
class TrainerReplacement:
    """Replaces one kernel's trainers. If they cannot restore the lost weights, the run begins again."""

    _setup: RunSetup
    _journal: JournalWriter
    _ending: Ending
    _admission: Admission
    _trainers: Trainers
    _engines: Engines
    _checkpointer: Checkpointer
    _steps: Steps

    def __post_init__(self) -> None:
        self._scheduler = self._setup.scheduler
        self._deaths = Counter[int]()
        """Version -> number of times that trainers were lost while its batch was trained."""
        self._setup.fleet.explain = self._explain
        self._are_lost = False
        """Set while the fleet marks all trainers as lost because of one."""
        self._news = anyio.Event()
        self._loss = "", "", 0.0
        """The lost worker, how it was lost, and the Unix time of the loss."""
        self._replacing = anyio.CancelScope()

    def lost(self, worker: str, how: str) -> None:
        """Mark all trainers as lost because one was lost, and end the requests to them."""
        if self._are_lost:
            return
        self._loss = worker, how, self._journal.now()
        if self._scheduler.training:
            self._deaths[self._scheduler.version] += 1
        self._are_lost = True
        self._setup.fleet.lose_all("trainer", f"{worker} was lost")
        self._are_lost = False
        self._trainers.lose()
        self._engines.trainer = None
        self._replacing.cancel()
        self._news.set()

    async def run(self) -> None:
        """Replace the trainers whenever one is lost, until cancelled."""
        while True:
            await self._news.wait()
            self._news = anyio.Event()
            with anyio.CancelScope() as self._replacing:
                await self._replace()
                self._setup.facts.loss = ""

    async def _replace(self) -> None:
        worker, how, began = self._loss
        self._setup.facts.loss = f"{worker} was lost ({how}) and starts again{self._meanwhile}"
        await self._setup.fleet.end_all("trainer")
        nonces = self._trainers.nonces = await self._admission.until_trainers_ready()
        try:
            async with self._engines.making_room():
                repeated = await self._restore()
        except (OSError, BusError, msgspec.DecodeError) as error:
            if len(nonces) > 1:
                await anyio.sleep(NOTICED_S)
            self._begin_again(str(error))
            return
        if repeated is None:
            return
        self._engines.trainer = self._trainers.lead
        self._journal.hear(Replaced(began, worker, how, self._steps.reached, repeated))
        log.info("trainers replaced", lost=worker, version=self._steps.reached, repeated=repeated)
        self._trainers.replaced()

    async def _restore(self) -> int | None:
        """Restore the lost weights. Return the number of repeated batches; None if the run begins again."""
        folder, state = self._checkpointer.newest()
        self._steps.published_again.clear()
        rounds = self._scheduler.evaluation
        needed = tuple(note for note in state.needed if note.version in rounds.needed_versions)
        notes = await self._trainers.load(folder, state.version, needed)
        if folder is not None and notes[-1].digest != state.digest:
            self._begin_again(f"the checkpoint of version {state.version} has other weights than were saved")
            return None
        for note in notes:
            self._remember(note)
        version = state.version
        while version < self._steps.reached:
            step, checkpoint = version + 1, f"from the checkpoint of {state.version}"
            self._setup.facts.loss = f"repeating step {step} {checkpoint}{self._meanwhile}"
            if (rows := self._steps.rows.get(version)) is None:
                self._begin_again(f"the batch of version {version} is not known any more")
                return None
            await self._trainers.step(self._journal.incarnation, version, rows)
            await self._trainers.end(version, rounds.needed_versions)
            version += 1
            note = await self._trainers.published(version)
            if self._steps.digests.get(version, note.digest) != note.digest:
                self._begin_again(f"version {version} has other weights than before")
                return None
            self._remember(note)
        return version - state.version

    @property
    def _meanwhile(self) -> str:
        return "; generation goes on" if self._setup.facts.started else ""

    def _remember(self, note: WeightsNote) -> None:
        """Pass the new note of a version to the engines, if they need the version."""
        newest = self._engines.note
        self._steps.published_again[note.version] = note
        if newest is not None and newest.version == note.version:
            self._engines.publish_again(note)
        elif note.version in self._scheduler.evaluation.needed_versions:
            self._engines.remember([note])

    def _explain(self, worker: str) -> str:
        """Return an explanation with the longest rows if this batch lost trainers twice; else empty."""
        version = self._scheduler.version
        if not worker.startswith("trainer") or self._deaths[version] < 2 or self._steps.under_way is None:
            return ""
        tickets = self._scheduler.tickets.open
        longest = ", ".join(
            f"{row.id} (row {tickets[row.group].row} of the dataset, {row.length} tokens)"
            for row in nlargest(_NAMED, self._steps.under_way, key=lambda row: row.length)
        )
        return (
            f"; trainers were lost {self._deaths[version]} times in the batch of step {version + 1}, whose "
            f"longest sequences are {longest}; to leave it out: stretto resume {self._setup.folder} "
            "--expire-batch"
        )

    def _begin_again(self, why: str) -> None:
        log.warning("the run begins again with its newest checkpoint", why=why)
        if self._setup.replays is None:
            self._ending.end("repeated", "")
        else:
            self._ending.end("failed", why)
