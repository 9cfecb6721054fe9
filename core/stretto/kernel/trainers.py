"""The worker groups, as the kernel speaks to them: load, run the calls of a step, save.

Calls begin as soon as those they wait for are done; those of one group run in order, those of different
groups at the same time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import anyio
import msgspec

from stretto.assembly.placement import Placement, WorkerGroup, model_folder
from stretto.bus.client import Bus
from stretto.bus.messages import (
    CallDone,
    EndStep,
    LoadCheckpoint,
    Loaded,
    Message,
    Prefetch,
    RowRef,
    RunCall,
    Save,
    Saved,
    StepEnded,
    Subjects,
)
from stretto.errors import one_error
from stretto.weights import WeightsNote

__all__ = ["CallTime", "StepResult", "Trainers"]

A = TypeVar("A", bound=Message)

_DEADLINE_S = 24 * 3600.0
"""Of one call, a load or a save. A trainer that dies is noticed by other means, and long before."""


@dataclass(frozen=True)
class CallTime:
    """When a call ran, in seconds from the start of its step."""

    call: str
    group: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class StepResult:
    """What the calls of one step came to."""

    statistics: dict[str, float]
    """Those of models other than the lead one begin with the model's name and a slash."""
    times: list[CallTime]
    note: WeightsNote
    """The weights they led to."""
    divergence: float | None = None
    """KL(behaviour || policy at the start of the step) of the batch, the engines' error included, in nats a
    token; None where it was not measured."""

    @property
    def seconds(self) -> float:
        """Time in which at least one call ran."""
        total, covered = 0.0, 0.0
        for each in sorted(self.times, key=lambda each: each.start_s):
            total += max(0.0, each.end_s - max(each.start_s, covered))
            covered = max(covered, each.end_s)
        return total


class Trainers:
    """Rank 0 of every worker group."""

    def __init__(self, bus: Bus, names: Subjects, placement: Placement, lease_epoch: int) -> None:
        self._bus = bus
        self._names = names
        self._lease_epoch = lease_epoch
        self.placement = placement

    async def load(
        self, folder: Path | None, version: int, needed: tuple[WeightsNote, ...] = ()
    ) -> tuple[WeightsNote, ...]:
        """Have all begin at a checkpoint, or at the initial models. Returns the notes of what was published:
        the older versions that were `needed` and lie in the checkpoint, and then `version`."""
        request = LoadCheckpoint(self._lease_epoch, str(folder or ""), version, needed)
        answers = await self._ask_all("load", request, Loaded)
        again = [note for answer in answers for note in answer.needed]
        return (*again, _note_of([answer.note for answer in answers]))

    async def step(
        self,
        incarnation: int,
        version: int,
        rows: tuple[RowRef, ...],
        ahead: tuple[RowRef, ...] = (),
        needed: tuple[int, ...] = (),
    ) -> StepResult:
        """Run the dataflow's calls after the ticket on a batch.

        Args:
            ahead: rows that will probably be wanted next, to be fetched while the present ones train.
            needed: published versions that are kept, because evaluations need them.
        """
        step = _Step(self, RunCall(self._lease_epoch, incarnation, version, "", rows), ahead)
        with one_error():
            async with anyio.create_task_group() as tasks:
                for group in self.placement.groups.values():
                    tasks.start_soon(step.run_group, group)
        answers = await self._ask_all("end", EndStep(self._lease_epoch, version, needed), StepEnded)
        divergence = step.statistics.pop("divergence", None)
        return StepResult(
            step.statistics, step.times, _note_of([answer.note for answer in answers]), divergence
        )

    async def save(self, folder: Path, version: int, needed: tuple[int, ...] = ()) -> None:
        """Have all write models and optimizers into a folder, and the published weights of `needed` older
        versions, for evaluations.

        Raises:
            OSError: if the folders cannot be made.
        """
        graph = self.placement.graph
        for model in graph.models:
            if graph.models[model].trainable:
                model_folder(folder, model, graph).mkdir(parents=True, exist_ok=True)
        await self._ask_all("save", Save(self._lease_epoch, str(folder), version, needed), Saved)

    async def prefetch(self, rows: tuple[RowRef, ...]) -> None:
        """Announce rows to every rank."""
        for group in self.placement.groups.values():
            for worker in group.workers:
                await self._bus.publish(self._names.worker("trainer", worker, "prefetch"), Prefetch(rows))

    async def ask(self, group: WorkerGroup, verb: str, message: Message, answer: type[A]) -> A:
        """Ask rank 0 of one group."""
        worker = group.workers[0]
        subject = self._names.worker("trainer", worker, verb)
        return await self._bus.request(subject, message, answer, who=worker, deadline_s=_DEADLINE_S)

    async def _ask_all(self, verb: str, message: Message, answer: type[A]) -> list[A]:
        answers: list[A] = []

        async def ask(group: WorkerGroup) -> None:
            answers.append(await self.ask(group, verb, message, answer))

        with one_error():
            async with anyio.create_task_group() as tasks:
                for group in self.placement.groups.values():
                    tasks.start_soon(ask, group)
        return answers


class _Step:
    """The calls of one step under way."""

    def __init__(self, trainers: Trainers, request: RunCall, ahead: tuple[RowRef, ...]) -> None:
        self._trainers = trainers
        self._placement = trainers.placement
        self._request = request
        self._ahead = ahead
        self._began = time.monotonic()
        self._done = {call.name: anyio.Event() for call in self._placement.graph.step_calls}
        self.statistics: dict[str, float] = {}
        self.times: list[CallTime] = []

    async def run_group(self, group: WorkerGroup) -> None:
        """Run one group's calls in the graph's order, each when those before it are done."""
        graph = self._placement.graph
        for call in graph.step_calls:
            if self._placement.group_of(call) is not group:
                continue
            for earlier in graph.before(call):
                if earlier in self._done:
                    await self._done[earlier].wait()
            if call.op == "train" and call.model == graph.lead and self._ahead:
                await self._trainers.prefetch((*self._request.rows, *self._ahead))
            start_s = time.monotonic() - self._began
            request = msgspec.structs.replace(self._request, name=call.name)
            done = await self._trainers.ask(group, "call", request, CallDone)
            prefix = "" if call.model in (None, graph.lead) else f"{call.model}/"
            self.statistics |= {f"{prefix}{name}": value for name, value in done.statistics.items()}
            self.times.append(CallTime(call.name, group.path, start_s, start_s + done.seconds))
            self._done[call.name].set()


def _note_of(notes: Sequence[WeightsNote | None]) -> WeightsNote:
    [note] = [note for note in notes if note is not None]
    return note
