"""The scheduler's settings, and the commands that it gives to the kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from stretto.bus.messages.events import Account, Evaluation
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
    """Number of rows in the dataset."""
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
    """Rows of an evaluation that begin for each group of training that ends; 0 begins all at once."""
    stops_on_collapse: bool = False
    """Whether the run ends when its reward has collapsed."""
    variants: Mapping[str, float] = field(default_factory=dict[str, float])
    """Weight of each variant of the A/B test; empty without one."""

    @property
    def window(self) -> int:
        """Tickets that may be in flight at once, (η + 1)·B."""
        return (self.max_staleness + 1) * self.batch_size


@dataclass(frozen=True)
class RecordDraws:
    """The curriculum has chosen these rows. The journal has them before the tickets are issued."""

    version: int
    """Training version at the draws."""
    draws: tuple[tuple[int, int], ...]
    """(ticket, row)."""


@dataclass(frozen=True)
class Issue:
    """Put this ticket into the work queue."""

    ticket: Ticket


@dataclass(frozen=True)
class Withdraw:
    """Take this attempt out of the queue and stop its worker: nobody waits for it any more."""

    purpose: Purpose
    ticket: int
    attempt: int


@dataclass(frozen=True)
class StartBatch:
    """Train this batch; then call `step_finished`."""

    version: int
    groups: tuple[GroupDone, ...]
    """In the order of their tickets."""
    rows: tuple[int, ...]
    """Row of the dataset of each group."""


@dataclass(frozen=True)
class Retire:
    """Record that this ticket will not be trained, or that its row of an evaluation has no result."""

    purpose: Purpose
    ticket: int
    attempt: int
    account: Account
    reason: str


@dataclass(frozen=True)
class EvaluationDone:
    """A held-out evaluation is complete."""

    evaluation: Evaluation


@dataclass(frozen=True)
class HeldBack:
    """A batch is ready but has to wait: its step would make an evaluation due while another one waits."""

    evaluating: int
    """Version of the evaluation under way."""
    waiting: int
    """Version of the evaluation that waits for it."""


@dataclass(frozen=True)
class Finish:
    """Nothing is left to do: end the run."""


@dataclass(frozen=True)
class Fail:
    """The run cannot continue."""

    reason: str


Command = RecordDraws | Issue | Withdraw | StartBatch | Retire | EvaluationDone | HeldBack | Finish | Fail
