"""Entries of the journal, and the kernel's lease."""

from __future__ import annotations

import msgspec

from stretto.bus.messages.base import Message
from stretto.bus.messages.training import RowRef


class JournalBatch(Message, frozen=True):
    """Kernel to the journal, before a batch is trained."""

    incarnation: int
    version: int
    rows: tuple[RowRef, ...]
    """The rows of the batch, in order. With the weights of `version` they determine the next weights."""
    tickets: tuple[int, ...]
    layout: str
    """Training engines, processes and threads. With another layout, a repeated step may differ in some
    bits."""
    seed: int


class JournalStep(Message, frozen=True):
    """Kernel to the journal, when a step is complete: the digest that a repetition of the step must reach."""

    incarnation: int
    version: int
    digest: str
    divergence: float | None = None
    """Divergence of the batch, in nats per token; None if it is unknown. When the step is repeated, the
    divergence gate uses this figure."""


class Evaluation(msgspec.Struct, frozen=True):
    """Result of one held-out evaluation."""

    version: int
    """Version of the weights that sampled every token of the evaluation."""
    accuracy: float | None
    """Mean of the samples' `accuracy` metric. A sample without this metric counts with its reward. None if no
    row has a result."""
    samples: int
    """Number of samples with a result."""
    failed: int
    """Number of rows without a result."""
    sources: dict[str, float] = msgspec.field(default_factory=dict)
    """Accuracy on the rows of each source, if the dataset is made of several."""


class JournalEvaluation(Message, frozen=True, tag="JournalEvaluation/2"):
    """Kernel to the journal: a held-out evaluation is complete."""

    incarnation: int
    result: Evaluation


class JournalChange(Message, frozen=True):
    """Kernel to the journal, when a resumed run changes to new values. It comes before the first batch with
    the new values."""

    incarnation: int
    version: int
    """Training version from which the new values are in force."""
    values: int
    """Number of the values: 1 at the run's start, and one more with each change."""
    log_sequence: int
    """Sequence number of the last log message that the ledger had taken in. With it, a repetition expires the
    same tickets."""
    changed: dict[str, tuple[str, str]]
    """Dotted key -> (previous value, new value), both as JSON."""


class JournalDraws(Message, frozen=True):
    """Kernel to the journal: the rows that a curriculum chose for new tickets. The kernel issues them when
    the server has stored this. All tickets that are admitted at once are in one entry."""

    incarnation: int
    version: int
    """Training version when the rows were drawn."""
    draws: tuple[tuple[int, int], ...]
    """(ticket, row). A dataset made of several has their rows one after the other."""


JournalEntry = JournalBatch | JournalStep | JournalEvaluation | JournalChange | JournalDraws
"""Everything that the journal holds."""


class KernelLease(Message, frozen=True):
    """Kernel to the journal's stream, at its start: it owns the run, and from here on it alone writes the
    journal. The sequence number is the lease epoch."""

    place: str
    """The run's folder."""
