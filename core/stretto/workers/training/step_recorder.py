"""The figures of each trajectory of a step, for people: advantages and importance weights, from the loss of
the first optimizer step that trains the trajectory. They stay on the device until the step is done, and are
sent to the log while the next step runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import anyio.to_thread
import numpy as np
import structlog
from numpy.typing import NDArray

from stretto.algorithm import Loss
from stretto.array import Array
from stretto.bus.client import Bus
from stretto.bus.messages.subjects import Subjects
from stretto.bus.messages.tickets import TrainedRow, TrainedRows, bundles_of
from stretto.errors import BusError

if TYPE_CHECKING:
    from torch import Tensor

    from stretto.rl.batch import Batch

log = structlog.get_logger()

ROW = "kept_row"
"""Sequence column with the number of the row in the batch."""
_MOST_WAITING = 64
"""Maximum number of steps that wait, and of messages that wait. Beyond it, the oldest are dropped."""
_LEAVE_S = 2.0  # the process of a worker that leaves ends soon after
_LARGEST_WEIGHT = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class _MicroBatch:
    """Figures of one micro-batch. T tokens, S sequences."""

    rows: Tensor
    """(S,)"""
    lengths: Sequence[int]
    mask: Tensor
    """(T,)"""
    weights: Tensor
    """(T,) float32."""
    advantages: Tensor | None
    """(T,) or (S,)."""


class StepFigures:
    """The figures of one step in one rank."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._parts: list[_MicroBatch] = []

    def watch(self, loss: Loss, rows: Sequence[int]) -> Loss:
        """Return a loss that also collects the figures of these rows. Its batch needs the column `ROW`."""
        self._rows += rows

        def watched(logprobs: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
            log_ratio = logprobs.detach().float() - batch["behaviour_logprobs"]
            weights = log_ratio.exp().clamp(max=_LARGEST_WEIGHT)
            advantages = batch["advantages"].detach() if "advantages" in batch else None
            self._parts.append(
                _MicroBatch(batch[ROW], batch.lengths, batch["loss_mask"], weights, advantages)
            )
            return loss.function(logprobs, batch)

        return replace(loss, function=watched)

    def rows(self, ids: Sequence[str]) -> Iterator[TrainedRow]:
        """Yield each trajectory's row, without figures if the engine computes no loss."""
        unrecorded = dict.fromkeys(self._rows)
        for part in self._parts:
            mask, weights = part.mask.cpu().numpy(), part.weights.cpu().numpy()
            advantages = None if part.advantages is None else part.advantages.float().cpu().numpy()
            per_token = advantages is not None and len(advantages) == len(mask)
            start = 0
            for place, (row, length) in enumerate(zip(part.rows.tolist(), part.lengths, strict=True)):
                span = slice(start, start + length)
                values: NDArray[Any] = np.empty(0, np.float32)
                if advantages is not None:
                    values = advantages[span][mask[span]] if per_token else advantages[place : place + 1]
                unrecorded.pop(row)
                yield TrainedRow(
                    ids[int(row)],
                    Array.of(_shortened(values), np.float32),
                    Array.of(weights[span][mask[span]], np.float32),
                )
                start += length
        for row in unrecorded:
            yield TrainedRow(ids[row], Array.of([], np.float32), Array.of([], np.float32))


@dataclass(frozen=True)
class RecordedStep:
    """A step whose figures are still on the device."""

    incarnation: int
    version: int
    figures: StepFigures
    ids: Sequence[str]
    shown: Collection[str]
    """Ids of the rows that are recorded."""

    def rows(self) -> list[TrainedRow]:
        """Return the figures of the rows that are recorded."""
        return [row for row in self.figures.rows(self.ids) if row.id in self.shown]


class StepRecorder:
    """Sends the figures of steps to the log."""

    def __init__(self, bus: Bus, names: Subjects, worker: str) -> None:
        self._bus = bus
        self._names = names
        self._worker = worker
        self._steps: deque[RecordedStep] = deque()
        self._waiting: list[tuple[str, TrainedRows]] = []
        """(id, message)."""
        self._more = anyio.Event()

    def add(self, step: RecordedStep) -> None:
        """Send a step's figures, in the background."""
        self._steps.append(step)
        if len(self._steps) > _MOST_WAITING:
            self._log_drop(self._steps.popleft().version)
        self._more.set()

    async def run(self) -> None:
        """Send figures until cancelled; then send the rest, for `_LEAVE_S` at most."""
        try:
            while True:
                await self._more.wait()
                self._more = anyio.Event()
                await self._send()
        finally:
            with anyio.move_on_after(_LEAVE_S, shield=True):
                await self._send()

    async def _send(self) -> None:
        while self._steps or self._waiting:
            if self._steps:
                await self._queue(self._steps[0])
                continue
            id, message = self._waiting[0]
            try:
                await self._bus.store.append(self._names.trained, message, id=id)
            except BusError as error:
                log.warning("the figures of a step are not in the log", error=str(error))
            if self._waiting and self._waiting[0][0] == id:
                del self._waiting[0]

    async def _queue(self, step: RecordedStep) -> None:
        rows = await anyio.to_thread.run_sync(step.rows)
        if self._steps[0] is not step:  # `add` has dropped it meanwhile
            return
        self._steps.popleft()
        for number, bundle in enumerate(bundles_of(rows)):
            id = f"trained/{step.incarnation}/{step.version}/{self._worker}/{number}"
            self._waiting.append((id, TrainedRows(step.incarnation, step.version, tuple(bundle))))
        if len(self._waiting) > _MOST_WAITING:
            self._log_drop(step.version)
            del self._waiting[:-_MOST_WAITING]

    def _log_drop(self, version: int) -> None:
        log.warning("the figures of a step are dropped: the store is too slow", version=version)


def _shortened(values: NDArray[Any]) -> NDArray[Any]:
    return values[:1] if len(values) and (values == values[0]).all() else values
