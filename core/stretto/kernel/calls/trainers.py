"""The kernel's side of the worker groups: load models, run the calls of a step, save."""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeVar

import anyio

from stretto.assembly.placement import Placement, WorkerGroup
from stretto.bus.client import Bus
from stretto.bus.gathered import Gathered
from stretto.bus.messages import training
from stretto.bus.messages.base import Message
from stretto.bus.messages.events import CallEnded, CallTime
from stretto.bus.messages.membership import WorkerProcess
from stretto.bus.messages.subjects import Subjects
from stretto.errors import BusError, together
from stretto.kernel.durable.checkpoint import Draft, place_of
from stretto.kernel.durable.journal import JournalWriter
from stretto.machine import clock
from stretto.weights import WeightsNote

A = TypeVar("A", bound=Message)
T = TypeVar("T")

_DEADLINE_S = 24 * 3600.0
"""Deadline of one call, load or save. The fleet notices a dead trainer long before."""
_TOGETHER_S = 0.02
"""Seconds for which rows to prefetch are collected into one message."""
NOTICED_S = 10.0
"""A rank may report the death of another rank this many seconds before the fleet notices the death."""


class TrainersLost(BusError):
    """A trainer is lost. New trainers replace all trainers."""


@dataclass(frozen=True)
class StepResult:
    """The result of one step's calls."""

    statistics: dict[str, float]
    """Statistics of the calls. Names of a model other than the lead model begin with its name and a slash."""
    times: list[CallTime]
    version: int
    began: float
    """Unix time."""
    divergence: float | None = None
    """KL(behaviour || policy at step start), nats per token, engine error included; None if not measured."""

    @property
    def skipped(self) -> list[str]:
        """Models without an update, as their gradient was not finite: `name/`, empty for the lead model."""
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
        self._journal = journal
        self._present = anyio.Event()
        """Set while no trainer is lost."""
        self._present.set()
        self._work: list[anyio.CancelScope] = []
        self.ahead = Gathered[tuple[training.RowRef, ...]](self._prefetch_all, _TOGETHER_S)
        """Collects rows for `_TOGETHER_S`, then asks every rank to fetch them."""

    @property
    def lead(self) -> WorkerProcess:
        """Rank 0 of the lead model's group."""
        worker = self.placement.lead.workers[0]
        return WorkerProcess(worker, self.nonces[worker])

    # ------------------------------------------------------------------------------------- losses

    async def until_done(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do work with the trainers; if one is lost, do the work again with the new trainers."""
        return await self.until_not_lost(partial(self.attempt, work))

    async def until_not_lost(self, work: Callable[[], Awaitable[T]]) -> T:
        """Call `work`, and again with new trainers whenever it raises `TrainersLost`."""
        while True:
            await self._present.wait()
            with suppress(TrainersLost):
                return await work()

    async def attempt(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do work with the present trainers. Raise `TrainersLost` if one is lost."""
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
        """Cancel all work. No work starts until `replaced` is called."""
        if self._present.is_set():
            self._present = anyio.Event()
        for scope in list(self._work):
            scope.cancel()

    def replaced(self) -> None:
        """Let work start again: new trainers have replaced the lost ones."""
        self._present.set()

    # ----------------------------------------------------------------------------------- requests

    async def load(
        self, folder: Path | None, version: int, needed: tuple[WeightsNote, ...] = ()
    ) -> tuple[WeightsNote, ...]:
        """Load `folder`, or the initial models, in all groups. Return the notes, that of `version` last."""
        place, manifest = place_of(folder)
        request = training.LoadCheckpoint(self._lease_epoch, place, version, needed, manifest)
        answers = await self._ask_all("load", request, training.Loaded)
        needed_notes = [note for answer in answers for note in answer.needed]
        [note] = [answer.note for answer in answers if answer.note is not None]
        return (*needed_notes, note)

    async def step(
        self,
        incarnation: int,
        version: int,
        rows: tuple[training.RowRef, ...],
        ahead: tuple[training.RowRef, ...] = (),
    ) -> StepResult:
        """Run the calls of a train step; `end` must follow. Meanwhile trainers fetch the rows `ahead`."""
        graph, journal, began_s = self.placement.graph, self._journal, clock.now()
        began, statistics, times = journal.now(), dict[str, float](), list[CallTime]()
        done = {call.name: anyio.Event() for call in graph.step_calls}

        async def run_group(group: WorkerGroup) -> None:
            for call in graph.step_calls:
                if self.placement.group_of(call) is not group:
                    continue
                for earlier in graph.before(call):
                    if earlier in done:
                        await done[earlier].wait()
                if call.op == "train" and call.model == graph.lead and ahead:
                    await self.prefetch((*rows, *ahead), complete=True)
                start_s, start = clock.now() - began_s, journal.now()
                request = training.RunCall(self._lease_epoch, incarnation, version, call.name, rows)
                answer = await self.ask(group, "call", request, training.CallDone)
                prefix = "" if call.model in (None, graph.lead) else f"{call.model}/"
                statistics.update({f"{prefix}{name}": value for name, value in answer.statistics.items()})
                times.append(CallTime(call.name, group.path, start_s, start_s + answer.seconds))
                seconds = round(answer.seconds, 4)
                journal.hear(CallEnded(start, group.path, call.name, version, seconds))
                done[call.name].set()

        await together(run_group, self.placement.groups.values())
        divergence = statistics.pop("divergence", None)
        return StepResult(statistics, times, version + 1, began, divergence)

    async def end(self, version: int, needed: tuple[int, ...] = ()) -> None:
        """End a version's step: trainers prepare the next step, publish, and keep the `needed` versions."""
        await self._ask_all("end", training.EndStep(self._lease_epoch, version, needed), training.StepEnded)

    async def published(self, version: int) -> WeightsNote:
        """Wait until the weights of the last ended step are published, and return their note."""
        request = training.AskPublished(self._lease_epoch, version)
        return (await self.ask(self.placement.lead, "published", request, training.Published)).note

    async def states(self) -> list[training.TrainerState]:
        """Return the groups' states, that of the lead model's group first."""
        groups = [self.placement.lead, *self.placement.groups.values()]
        distinct = [each for number, each in enumerate(groups) if each not in groups[:number]]
        request = training.AskState(self._lease_epoch)
        return [await self.ask(group, "state", request, training.TrainerState) for group in distinct]

    async def save(self, draft: Draft, version: int, needed: tuple[int, ...] = ()) -> None:
        """Ask all groups to copy their state for a draft and write `needed` versions; `saved` must follow."""
        await self._ask_all(
            "save", training.Save(self._lease_epoch, draft.place, version, needed), training.Copied
        )

    async def saved(self, draft: Draft, version: int) -> None:
        """Wait until all groups have written what they copied."""
        for answer in await self._ask_all(
            "saved", training.AskSaved(self._lease_epoch, version), training.Saved
        ):
            draft.uploaded.update(answer.uploaded)

    async def prefetch(self, rows: tuple[training.RowRef, ...], *, complete: bool) -> None:
        """Ask every rank to fetch rows and, if `complete`, to drop all but these and the current batch."""
        message = training.Prefetch(rows, complete)
        for group in self.placement.groups.values():
            for worker in group.workers:
                await self._bus.publish(self._subject(worker, "prefetch"), message)

    async def ask(self, group: WorkerGroup, verb: str, message: Message, answer: type[A]) -> A:
        """Send a request to rank 0 of one group, and return its answer."""
        subject = self._subject(group.workers[0], verb)
        return await self._bus.request(subject, message, answer, deadline_s=_DEADLINE_S)

    async def _prefetch_all(self, parts: tuple[tuple[training.RowRef, ...], ...]) -> None:
        await self.prefetch(tuple(chain.from_iterable(parts)), complete=False)

    def _subject(self, worker: str, verb: str) -> str:
        return self._names.worker("trainer", worker, self.nonces[worker], verb)

    async def _ask_all(self, verb: str, message: Message, answer: type[A]) -> list[A]:
        groups = self.placement.groups.values()
        return await together(lambda group: self.ask(group, verb, message, answer), groups)
