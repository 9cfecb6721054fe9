"""Join the messages of the log to rows: trajectories, records and outcomes of attempts; no I/O.

An attempt's trajectories and its record come before its outcome. With the outcome the attempt is complete,
and its rows wait until they are written. Attempts without an outcome, of workers that died, are forgotten
after a while.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import structlog

from stretto.bus.messages.tickets import (
    GroupDone,
    GroupFailed,
    Purpose,
    RetiredTickets,
    TicketRecord,
    TrainedRow,
    TrainedRows,
    TrajectoryBundle,
    WireTrajectory,
)
from stretto.errors import printable
from stretto.records.kept.kept_sample import KeptSample, digest_of, kept_samples
from stretto.records.kept.sample_files import SegmentKind, Table, schema_of

log = structlog.get_logger()

Attempt = tuple[Purpose, int, int]
"""(purpose, ticket, attempt)."""
Outcome = GroupDone | GroupFailed

_FORGET_S = 600.0
"""Seconds after which an attempt without an outcome is forgotten. The outcome follows at once, but the store
may not answer for a while (`bus.outage_s`)."""


class Joiner:
    """Takes in the messages of the log in order, and returns the rows that are complete.

    Args:
        start: sequence number of the first message.
        written: attempts whose rows are on disk already.
        recorded: (sequence number, version) of the trainers' messages whose rows are on disk already.
    """

    def __init__(
        self, start: int, written: Collection[Attempt] = (), recorded: Collection[tuple[int, int]] = ()
    ) -> None:
        self.following = start
        """Sequence number after the last message that was taken in."""
        self._written = set(written)
        self._recorded = set(recorded)
        self._waiting: dict[Attempt, _Waiting] = {}
        self._rows = _Rows()
        self.newest_step = 0
        """Number of the newest step that the trainers have reported."""

    @property
    def position(self) -> int:
        """Sequence number of the first message that is needed once the complete rows are on disk."""
        return min((waiting.first for waiting in self._waiting.values()), default=self.following)

    @property
    def size(self) -> int:
        """Bytes, about, of the complete rows."""
        return self._rows.size

    @property
    def images(self) -> set[str]:
        """Names of the added images of the complete rows."""
        return self._rows.images

    def images_of(self, message: Any) -> list[str]:
        """Return the names of the added images of the rows that a message will complete, each once."""
        waiting = self._to_keep(message) if isinstance(message, GroupDone | GroupFailed) else None
        return waiting.images if waiting is not None else []

    def add(self, sequence: int, message: Any) -> None:
        """Take in the next message."""
        self.following = sequence + 1
        match message:
            case TrajectoryBundle(trajectories=trajectories) if trajectories:
                if attempt := _attempt_of(trajectories[0]):
                    self._wait(attempt, sequence).trajectories += trajectories
            case TicketRecord(purpose, ticket, attempt):
                self._wait((purpose, ticket, attempt), sequence).record = message
            case GroupDone() | GroupFailed():
                self._complete(sequence, message)
            case TrainedRows():
                self._add_trained(sequence, message)
            case RetiredTickets(tickets):
                for ticket, account, reason in tickets:
                    self._rows.retired.append((ticket, sequence, account, reason))
            case _:
                pass

    def take(self) -> dict[SegmentKind, Table]:
        """Return the complete rows, and forget them. Also forget attempts that will not be completed."""
        now = time.monotonic()
        for attempt, waiting in list(self._waiting.items()):
            if now - waiting.since > _FORGET_S:
                log.info("an attempt has no outcome", attempt=attempt)
                del self._waiting[attempt]
        rows, self._rows = self._rows, _Rows()
        return rows.tables()

    # ------------------------------------------------------------------------------------ private

    def _wait(self, attempt: Attempt, sequence: int) -> _Waiting:
        return self._waiting.setdefault(attempt, _Waiting(sequence))

    def _complete(self, sequence: int, outcome: Outcome) -> None:
        attempt = _attempt_with(outcome)
        waiting = self._to_keep(outcome)
        self._waiting.pop(attempt, None)
        if waiting is None or waiting.record is None:
            return
        self._written.add(attempt)
        try:
            kept = kept_samples(waiting.record, waiting.trajectories)
        except (ValueError, TypeError) as error:
            log.warning("malformed samples", attempt=attempt, reason=printable(str(error)))
            return
        digest = digest_of(kept)
        if isinstance(outcome, GroupDone) and outcome.digest != digest:
            log.warning("the samples of a group differ from its digest", attempt=attempt)
        for sample in kept:
            self._rows.add(sample, waiting.record, outcome, sequence)
        self._rows.images.update(waiting.images)

    def _to_keep(self, outcome: Outcome) -> _Waiting | None:
        """Return the attempt that an outcome completes; None if it was written before a restart, or if it is
        not to be kept."""
        attempt = _attempt_with(outcome)
        waiting = self._waiting.get(attempt)
        is_new = attempt not in self._written
        return waiting if is_new and waiting is not None and waiting.record is not None else None

    def _add_trained(self, sequence: int, message: TrainedRows) -> None:
        self.newest_step = max(self.newest_step, message.version + 1)
        if (sequence, message.version) in self._recorded:
            return
        for row in message.rows:
            try:
                self._rows.add_trained(row, message, sequence)
            except (ValueError, TypeError) as error:
                log.warning("malformed record of a trainer", row=printable(row.id), reason=str(error))


@dataclass
class _Waiting:
    """An attempt without its outcome."""

    first: int
    """Sequence number of its first message."""
    since: float = field(default_factory=time.monotonic)
    trajectories: tuple[WireTrajectory, ...] = ()
    record: TicketRecord | None = None

    @property
    def images(self) -> list[str]:
        """Names of the added images, each once."""
        return list(dict.fromkeys(name for each in self.trajectories for name in each.added_images))


def _attempt_with(outcome: Outcome) -> Attempt:
    return outcome.purpose, outcome.ticket, outcome.attempt


def _attempt_of(trajectory: WireTrajectory) -> Attempt | None:
    """Return the attempt that a trajectory's id names; None if it names none."""
    ticket, _, rest = trajectory.id.removeprefix("eval-").partition("/")
    attempt, _, index = rest.partition("/")
    if not (ticket.isdecimal() and attempt.isdecimal() and index.isdecimal()):
        log.warning("malformed id of a trajectory", id=printable(trajectory.id[:100]))
        return None
    return ("eval" if trajectory.id.startswith("eval-") else "train"), int(ticket), int(attempt)


class _Rows:
    """Complete rows, as lists of columns' values."""

    def __init__(self) -> None:
        self._samples: list[tuple[KeptSample, dict[str, Any]]] = []
        self._trained: list[dict[str, Any]] = []
        self.retired: list[tuple[int, int, str, str]] = []
        """(ticket, sequence number, account, reason)."""
        self.images: set[str] = set()
        self.size = 0

    def add(self, kept: KeptSample, record: TicketRecord, outcome: Outcome, sequence: int) -> None:
        sampled = kept.versions[kept.loss_mask]
        facts = {
            "purpose": outcome.purpose,
            "ticket": outcome.ticket,
            "attempt": outcome.attempt,
            "sequence": sequence,
            "outcome": _outcome_text(outcome),
            "reason": outcome.reason if isinstance(outcome, GroupFailed) else None,
            "length": len(kept.tokens),
            "sampled": len(sampled),
            "oldest": int(sampled.min()) if len(sampled) else None,
            "newest": int(sampled.max()) if len(sampled) else None,
            "worker": outcome.worker,
            "seconds": record.seconds,
            "generate_s": record.generate_s,
            "score_s": record.score_s,
            "digest": outcome.digest if isinstance(outcome, GroupDone) else None,
        }
        self._samples.append((kept, facts))
        texts = (kept.prompt_text, kept.text, kept.messages, kept.dataset_row)
        drawn_from = 0 if kept.kept_ids is None else 4 * len(kept.kept_ids)
        self.size += 13 * len(kept.tokens) + drawn_from + sum(map(len, texts)) + 500

    def add_trained(self, row: TrainedRow, message: TrainedRows, sequence: int) -> None:
        """Add what a trainer computed for one trajectory.

        Raises:
            ValueError: if its id is none, or its arrays are none.
        """
        self._trained.append(
            {
                "id": row.id,
                "ticket": int(row.id.partition("/")[0]),
                "sequence": sequence,
                "step": message.version + 1,
                "incarnation": message.incarnation,
                "advantages": row.advantages.numpy().astype(np.float32).ravel(),
                "importance_weights": row.importance_weights.numpy().astype(np.float32).ravel(),
            }
        )
        self.size += len(row.advantages.data) + len(row.importance_weights.data) + 100

    def tables(self) -> dict[SegmentKind, Table]:
        samples = [
            {
                **{name: getattr(kept, name) for name in schema_of("samples").names if hasattr(kept, name)},
                **facts,
            }
            for kept, facts in self._samples
        ]
        retired: list[dict[str, Any]] = [
            dict(zip(("ticket", "sequence", "outcome", "reason"), each, strict=True)) for each in self.retired
        ]
        return {
            "samples": _table("samples", samples),
            "trained": _table("trained", self._trained),
            "retired": _table("retired", retired),
        }


def _outcome_text(outcome: Outcome) -> str:
    if isinstance(outcome, GroupDone):
        return "done"
    return "filtered" if outcome.filtered else "failed"


def _table(kind: SegmentKind, rows: Sequence[Mapping[str, Any]]) -> Table:
    schema = schema_of(kind)
    columns = [_column(field.type, [row[field.name] for row in rows]) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)


def _column(type: Any, values: list[Any]) -> Any:
    if not pa.types.is_list(type):
        return pa.array(values, type)
    known = [np.empty(0) if each is None else each for each in values]
    offsets = np.concatenate([[0], np.cumsum([len(each) for each in known], dtype=np.int32)])
    joined = np.concatenate(known) if known else np.empty(0)
    return pa.ListArray.from_arrays(
        pa.array(offsets, pa.int32()),
        pa.array(joined.astype(type.value_type.to_pandas_dtype(), copy=False)),
        mask=pa.array([each is None for each in values], pa.bool_()),
    )
