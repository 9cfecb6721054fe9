"""The kernel's side of the worker groups: load models, run the calls of a step, save."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeVar

import anyio
import msgspec

from stretto.assembly.placement import Placement, WorkerGroup
from stretto.base import clock
from stretto.bus.client import Bus
from stretto.bus.gathered import Gathered
from stretto.bus.messages.base import Message
from stretto.bus.messages.events import CallEnded, CallTime
from stretto.bus.messages.subjects import Subjects
from stretto.bus.messages.training import (
    AskPublished,
    AskSaved,
    AskState,
    CallDone,
    Copied,
    EndStep,
    LoadCheckpoint,
    Loaded,
    Prefetch,
    Published,
    RowRef,
    RunCall,
    Save,
    Saved,
    StepEnded,
    TrainerState,
)
from stretto.errors import BusError, one_job
from stretto.kernel.durable.checkpoint import Draft, place_of
from stretto.kernel.durable.journal import JournalWriter
from stretto.weights import WeightsNote

A = TypeVar("A", bound=Message)
T = TypeVar("T")

_DEADLINE_S = 24 * 3600.0
"""Deadline of one call, load or save. The fleet notices a dead trainer long before."""
_TOGETHER_S = 0.02
"""Seconds for which rows wait for others that trainers are to fetch."""
NOTICED_S = 10.0
"""A rank whose partner has died may say so this many seconds before the fleet notices the death."""


class TrainersLost(BusError):
    """A trainer is lost, and others take the place of all."""


@dataclass(frozen=True)
class StepResult:
    """The result of one step's calls."""

    statistics: dict[str, float]
    """Statistics of the calls. Names of a model other than the lead model begin with its name and a slash."""
    times: list[CallTime]
    version: int
    """Version of the weights after the step."""
    began: float
    """Unix time at which the step began."""
    divergence: float | None = None
    """KL(behaviour || policy at the start of the step) in nats per token, with the engines' error. None if it was
    not measured."""

    @property
    def skipped(self) -> list[str]:
        """The models that the step did not change, because their gradient was not finite: empty for the lead
        model, else the name and a slash."""
        names = [name for name, value in self.statistics.items() if value == 1]
        return [name.removesuffix("skipped") for name in names if name.rpartition("/")[2] == "skipped"]

    @property
    def seconds(self) -> float:
        """Seconds in which at least one call ran."""
        total, covered = 0.0, 0.0
        for each in sorted(self.times, key=lambda each: each.start_s):
            total += max(0.0, each.end_s - max(each.start_s, covered))
            covered = max(covered, each.end_s)
        return total


class Trainers:
    """Sends the kernel's requests to rank 0 of every worker group."""

    def __init__(self, bus: Bus, names: Subjects, placement: Placement, journal: JournalWriter) -> None:
        self._bus = bus
        self._names = names
        self._lease_epoch = journal.epoch
        self.placement = placement
        self.nonces: Mapping[str, str] = {}
        """Worker -> nonce; set when all trainers have joined."""
        self.journal = journal
        self._present = anyio.Event()
        """Set while no trainer is lost."""
        self._present.set()
        self._work: list[anyio.CancelScope] = []
        self.ahead = Gathered[tuple[RowRef, ...]](self._prefetch_all, _TOGETHER_S)
        """Rows that every rank is asked to fetch, together with those of the next moment."""

    # ------------------------------------------------------------------------------------- losses

    async def attempt(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do work with the trainers. If one is lost meanwhile, do it again with those that take their
        place."""
        return await self.until_not_lost(partial(self.once, work))

    async def until_not_lost(self, work: Callable[[], Awaitable[T]]) -> T:
        """Repeat what raises `TrainersLost` if a trainer is lost."""
        while True:
            await self._present.wait()
            with suppress(TrainersLost):
                return await work()

    async def once(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do work with the present trainers."""
        if self._present.is_set():
            with anyio.CancelScope() as scope:
                self._work.append(scope)
                try:
                    return await work()
                except BusError:
                    if len(self.nonces) > 1:
                        await anyio.sleep(NOTICED_S)
                    raise
                finally:
                    self._work.remove(scope)
        raise TrainersLost("a trainer was lost")

    def lose(self) -> None:
        """End all work, until `replaced`."""
        if self._present.is_set():
            self._present = anyio.Event()
        for scope in list(self._work):
            scope.cancel()

    def replaced(self) -> None:
        """Let work go on with the trainers that have taken the place of lost ones."""
        self._present.set()

    # ----------------------------------------------------------------------------------- requests

    async def load(
        self, folder: Path | None, version: int, needed: tuple[WeightsNote, ...] = ()
    ) -> tuple[WeightsNote, ...]:
        """Load a checkpoint in all groups, or the initial models if `folder` is None. Return the notes of the
        published weights: first the `needed` older versions, then `version`."""
        place, manifest = place_of(folder)
        request = LoadCheckpoint(self._lease_epoch, place, version, needed, manifest)
        answers = await self._ask_all("load", request, Loaded)
        again = [note for answer in answers for note in answer.needed]
        return (*again, _note_of([answer.note for answer in answers]))

    async def step(
        self,
        incarnation: int,
        version: int,
        rows: tuple[RowRef, ...],
        ahead: tuple[RowRef, ...] = (),
    ) -> StepResult:
        """Run the calls of one train step on a batch; `end` has to follow.

        Args:
            ahead: rows that the next batches will probably need. The trainers fetch them while the current
                rows train.
        """
        request = RunCall(self._lease_epoch, incarnation, version, "", rows)
        step = _Step(self, request, ahead)
        async with one_job() as tasks:
            for group in self.placement.groups.values():
                tasks.start_soon(step.run_group, group)
        divergence = step.statistics.pop("divergence", None)
        return StepResult(step.statistics, step.times, version + 1, step.began, divergence)

    async def end(self, version: int, needed: tuple[int, ...] = ()) -> None:
        """End the step that began at a version: the trainers are ready for the next one, have begun to
        publish, and keep the `needed` published versions."""
        await self._ask_all("end", EndStep(self._lease_epoch, version, needed), StepEnded)

    async def published(self, version: int) -> WeightsNote:
        """Wait until the weights after the last step that ended are published, and return their note."""
        request = AskPublished(self._lease_epoch, version)
        return (await self.ask(self.placement.lead, "published", request, Published)).note

    async def states(self) -> list[TrainerState]:
        """Return the states of the groups, with that of the lead model's group first."""
        groups = [self.placement.lead, *self.placement.groups.values()]
        asked = [each for number, each in enumerate(groups) if each not in groups[:number]]
        request = AskState(self._lease_epoch)
        return [await self.ask(group, "state", request, TrainerState) for group in asked]

    async def save(self, draft: Draft, version: int, needed: tuple[int, ...] = ()) -> None:
        """Let all groups copy their models and optimizers for a draft, and write the `needed` older versions.
        The groups are then ready for the next step; `saved` has to follow."""
        await self._ask_all("save", Save(self._lease_epoch, draft.place, version, needed), Copied)

    async def saved(self, draft: Draft, version: int) -> None:
        """Wait until all groups have written what they copied."""
        for saved in await self._ask_all("saved", AskSaved(self._lease_epoch, version), Saved):
            draft.uploaded.update(saved.uploaded)

    async def prefetch(self, rows: tuple[RowRef, ...], *, complete: bool) -> None:
        """Ask every rank to fetch these rows and, if they are `complete`, to drop all others but those of the
        current batch."""
        message = Prefetch(rows, complete)
        for group in self.placement.groups.values():
            for worker in group.workers:
                await self._bus.publish(self._subject(worker, "prefetch"), message)

    async def ask(self, group: WorkerGroup, verb: str, message: Message, answer: type[A]) -> A:
        """Send a request to rank 0 of one group, and return its answer."""
        worker = group.workers[0]
        subject = self._subject(worker, verb)
        return await self._bus.request(subject, message, answer, who=worker, deadline_s=_DEADLINE_S)

    async def _prefetch_all(self, parts: tuple[tuple[RowRef, ...], ...]) -> None:
        await self.prefetch(tuple(chain.from_iterable(parts)), complete=False)

    def _subject(self, worker: str, verb: str) -> str:
        return self._names.worker("trainer", worker, self.nonces[worker], verb)

    async def _ask_all(self, verb: str, message: Message, answer: type[A]) -> list[A]:
        answers: list[A] = []

        async def ask(group: WorkerGroup) -> None:
            answers.append(await self.ask(group, verb, message, answer))

        async with one_job() as tasks:
            for group in self.placement.groups.values():
                tasks.start_soon(ask, group)
        return answers


class _Step:
    def __init__(self, trainers: Trainers, request: RunCall, ahead: tuple[RowRef, ...]) -> None:
        self._trainers = trainers
        self._placement = trainers.placement
        self._request = request
        self._ahead = ahead
        self.began = trainers.journal.now()
        self._began = clock.now()
        self._done = {call.name: anyio.Event() for call in self._placement.graph.step_calls}
        self.statistics: dict[str, float] = {}
        self.times: list[CallTime] = []

    async def run_group(self, group: WorkerGroup) -> None:
        graph = self._placement.graph
        for call in graph.step_calls:
            if self._placement.group_of(call) is not group:
                continue
            for earlier in graph.before(call):
                if earlier in self._done:
                    await self._done[earlier].wait()
            if call.op == "train" and call.model == graph.lead and self._ahead:
                await self._trainers.prefetch((*self._request.rows, *self._ahead), complete=True)
            start_s, start = clock.now() - self._began, self._trainers.journal.now()
            request = msgspec.structs.replace(self._request, name=call.name)
            done = await self._trainers.ask(group, "call", request, CallDone)
            prefix = "" if call.model in (None, graph.lead) else f"{call.model}/"
            self.statistics |= {f"{prefix}{name}": value for name, value in done.statistics.items()}
            self.times.append(CallTime(call.name, group.path, start_s, start_s + done.seconds))
            ended = CallEnded(start, group.path, call.name, self._request.version, round(done.seconds, 4))
            self._trainers.journal.hear(ended)
            self._done[call.name].set()


def _note_of(notes: Sequence[WeightsNote | None]) -> WeightsNote:
    [note] = [note for note in notes if note is not None]
    return note
