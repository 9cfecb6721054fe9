"""The worker group that trains, as the kernel speaks to it: load, run the calls of a step, save."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from stretto.bus.client import Bus
from stretto.bus.messages import (
    Call,
    CallDone,
    LoadCheckpoint,
    Loaded,
    Prefetch,
    RowRef,
    Save,
    Saved,
    Subjects,
)
from stretto.errors import RunError
from stretto.kernel.dataflow import Graph
from stretto.kernel.fleet import Fleet
from stretto.weights import WeightsNote

__all__ = ["StepResult", "Trainers"]

_DEADLINE_S = 24 * 3600.0
"""Of one call, a load or a save. A trainer that dies is noticed by other means, and long before."""


@dataclass(frozen=True)
class StepResult:
    """What the calls of one step came to."""

    statistics: dict[str, float]
    seconds: float
    """Spent in the calls."""
    note: WeightsNote
    """The weights they led to."""


class Trainers:
    """Rank 0 of the one worker group."""

    def __init__(self, bus: Bus, names: Subjects, fleet: Fleet, graph: Graph, fence: int) -> None:
        self._bus = bus
        self._names = names
        self._fleet = fleet
        self._graph = graph
        self._fence = fence

    async def load(self, folder: Path | None, version: int) -> WeightsNote:
        """Have it begin at a checkpoint, or at the initial model."""
        request = LoadCheckpoint(self._fence, str(folder or ""), version)
        subject = self._subject("load")
        loaded = await self._bus.request(subject, request, Loaded, who=self._worker, deadline_s=_DEADLINE_S)
        return loaded.note

    async def step(
        self, incarnation: int, version: int, rows: tuple[RowRef, ...], ahead: tuple[RowRef, ...] = ()
    ) -> StepResult:
        """Run the dataflow's calls after the ticket on a batch, in order.

        Args:
            ahead: rows that will probably be wanted next, to be fetched while the present ones train.
        """
        statistics: dict[str, float] = {}
        seconds, note = 0.0, None
        for call in self._graph.step_calls:
            last = call is self._graph.step_calls[-1]
            if last and ahead:
                await self._bus.publish(self._subject("prefetch"), Prefetch((*rows, *ahead)))
            request = Call(self._fence, incarnation, version, call.name, rows, last)
            done = await self._bus.request(
                self._subject("call"), request, CallDone, who=self._worker, deadline_s=_DEADLINE_S
            )
            statistics |= done.statistics
            seconds += done.seconds
            note = done.note
        assert note is not None, "the last call of a step publishes the weights"
        return StepResult(statistics, seconds, note)

    async def save(self, folder: Path, version: int) -> None:
        """Have it write model and optimizer into a folder."""
        request = Save(self._fence, str(folder), version)
        await self._bus.request(
            self._subject("save"), request, Saved, who=self._worker, deadline_s=_DEADLINE_S
        )

    @property
    def _worker(self) -> str:
        members = self._fleet.of("trainer")
        if not members:
            raise RunError("there is no trainer")
        return members[0].worker

    def _subject(self, verb: str) -> str:
        return self._names.worker("trainer", self._worker, verb)
