"""The scheduler's settings, and the commands that it gives to the kernel."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from stretto.bus.messages.events import EvaluationEnded, RetiredTicket, RowsDrawn
from stretto.bus.messages.tickets import GroupDone, Purpose, Ticket


@dataclass(frozen=True)
class SchedulerSettings:
    """The settings of a run that the scheduler needs."""

    steps: int
    batch_size: int
    """Number of groups in a batch, B."""
    max_staleness: int
    """η."""
    rows: int
    alternates: bool = False
    """Whether generation and training take turns on one device (`InferenceConfig.sleep`)."""
    max_divergence: float | None = None
    """Bound of the divergence gate, in nats per token; None turns the gate off."""
    group_size: int = 1
    on_late: Literal["wait", "drop"] = "wait"
    max_attempts: int = 3
    max_failures: int = 64
    max_filtered: int = 512
    shuffle: bool = True
    seed: int = 0
    evaluation_rows: int = 0
    """Number of rows in a held-out evaluation; 0 turns evaluation off."""
    evaluation_every: int = 0
    evaluation_samples: int = 1
    evaluation_pace: float = 0.0
    """Rows of an evaluation that begin for each finished training group; 0 begins all rows at once."""
    stops_on_collapse: bool = False
    variants: Mapping[str, float] = field(default_factory=dict[str, float])
    """Weight of each variant of the A/B test; empty without a test."""


class Issue(msgspec.Struct, frozen=True):
    """Put this ticket into the work queue."""

    ticket: Ticket


class Withdraw(msgspec.Struct, frozen=True):
    """Remove this attempt from the queue and stop its worker: the scheduler will not use its group."""

    purpose: Purpose
    ticket: int
    attempt: int


class StartBatch(msgspec.Struct, frozen=True):
    """Train this batch; then pass `StepTrained` to the scheduler."""

    version: int
    groups: tuple[GroupDone, ...]
    """In the order of their tickets."""
    rows: tuple[int, ...]
    """Dataset row of each group."""


class HeldBack(msgspec.Struct, frozen=True):
    """Log that a batch is ready but waits: its step would make an evaluation due while another one waits."""

    evaluating: int
    """Version of the evaluation under way."""
    waiting: int
    """Version of the evaluation that waits for the one under way."""


class Finish(msgspec.Struct, frozen=True):
    """Nothing is left to do: end the run."""


class Fail(msgspec.Struct, frozen=True):
    """The run cannot continue."""

    reason: str


Command = (
    RowsDrawn | Issue | Withdraw | StartBatch | RetiredTicket | EvaluationEnded | HeldBack | Finish | Fail
)
"""What the kernel has to do. An event, or a part of one, has to be recorded in the journal."""
