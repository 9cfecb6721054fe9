"""Join the messages of the log to complete rows; no I/O.

An attempt's trajectories and record come before its outcome. The outcome completes evaluations and failed
attempts. A finished training group waits for its fate: the trainers' figures of all its trajectories, or the
retirement of its ticket.

The joiner holds at most the queue's (η + 1)·B finished groups and those of the last step. A group without a
fate expires when no later step may train it. Attempts of dead workers, without an outcome, are forgotten.
"""

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import structlog

from stretto.bus.messages import tickets
from stretto.errors import printable
from stretto.records.samples.files import Table, schema
from stretto.records.samples.kept_sample import KeptSample, digest_of, kept_samples

log = structlog.get_logger()

Attempt = tuple[tickets.Purpose, int, int]
"""(purpose, ticket, attempt)."""
Outcome = tickets.GroupDone | tickets.GroupFailed

_FORGET_S = 600.0
"""Seconds after which an attempt without an outcome is forgotten; an outage may last `bus.outage_s`."""
_LATE_STEPS = 8
"""Steps after which figures count as lost: each trainer publishes its figures while it trains the next steps,
and drops figures that the store does not accept in time."""


@dataclass
class _UnfinishedAttempt:
    first: int
    """Sequence number of its first message."""
    since: float = field(default_factory=time.monotonic)
    trajectories: tuple[tickets.WireTrajectory, ...] = ()
    record: tickets.TicketRecord | None = None

    @property
    def images(self) -> list[str]:
        return list(dict.fromkeys(name for sample in self.trajectories for name in sample.added_images))


@dataclass
class _FinishedGroup:
    first: int
    images: list[str]
    """`first` and `images` are those of the unfinished attempt."""
    oldest: int
    rows: list[dict[str, Any]]
    """Rows without their outcome."""
    step: int | None = None
    figures: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    """Id of a row -> the figures that a trainer computed."""


class Joiner:
    """Joins the messages of the log from `start` on to complete rows. `staleness` is η of the run; rows of
    `written` attempts are on disk already."""

    def __init__(self, start: int, *, staleness: int, written: Collection[Attempt] = ()) -> None:
        self.following = start
        """Sequence number after the last message."""
        self.newest_step = 0
        """Number of the newest reported step."""
        self.size = 0
        """Approximate bytes of the complete rows."""
        self._staleness = staleness
        self._written = frozenset(written)
        self._unfinished: dict[Attempt, _UnfinishedAttempt] = {}
        self._groups: dict[Attempt, _FinishedGroup] = {}
        """Training groups that wait for their fate."""
        self._rows: dict[tickets.Purpose, list[dict[str, Any]]] = {}
        self._images: set[str] = set()

    @property
    def position(self) -> int:
        """Sequence number of the first message that is still needed once the complete rows are on disk."""
        waiting = (*self._unfinished.values(), *self._groups.values())
        return min((entry.first for entry in waiting), default=self.following)

    @property
    def images(self) -> set[str]:
        """Names of the added images of finished attempts that are not on disk."""
        return self._images.union(*(group.images for group in self._groups.values()))

    def images_of(self, message: Any) -> list[str]:
        """Return the names of the added images of the attempt that a message finishes, each once."""
        attempt = (
            self._to_keep(message) if isinstance(message, tickets.GroupDone | tickets.GroupFailed) else None
        )
        return attempt.images if attempt is not None else []

    def add(self, sequence: int, message: Any) -> None:
        """Add the next message of the log."""
        self.following = sequence + 1
        match message:
            case tickets.TrajectoryBundle(trajectories=trajectories) if trajectories:
                if attempt := _attempt_of(trajectories[0].id):
                    self._attempt(attempt, sequence).trajectories += trajectories
            case tickets.TicketRecord(purpose, ticket, attempt):
                self._attempt((purpose, ticket, attempt), sequence).record = message
            case tickets.GroupDone() | tickets.GroupFailed():
                self._finish(sequence, message)
            case tickets.TrainedRows():
                self._train(message)
            case tickets.RetiredTickets(retired):
                self._settle({ticket: (account, reason) for ticket, account, reason in retired})
            case _:
                pass

    def pop_rows(self) -> dict[tickets.Purpose, Table]:
        """Return the complete rows, and forget them. Also forget attempts that will not be finished."""
        now = time.monotonic()
        for attempt, waiting in list(self._unfinished.items()):
            if now - waiting.since > _FORGET_S:
                log.info("an attempt has no outcome", attempt=attempt)
                del self._unfinished[attempt]
        rows, self._rows = self._rows, {}
        self.size, self._images = 0, set()
        return {purpose: pa.Table.from_pylist(dicts, schema()) for purpose, dicts in rows.items()}

    def finish(self) -> None:
        """Complete trained groups that lack figures, at the log's end. Others wait for a resumed run."""
        for attempt, group in list(self._groups.items()):
            if group.step is not None:
                self._complete("train", self._groups.pop(attempt), "trained")

    def _attempt(self, attempt: Attempt, sequence: int) -> _UnfinishedAttempt:
        return self._unfinished.setdefault(attempt, _UnfinishedAttempt(sequence))

    def _to_keep(self, outcome: Outcome) -> _UnfinishedAttempt | None:
        attempt = _attempt_with(outcome)
        waiting = None if attempt in self._written else self._unfinished.get(attempt)
        return waiting if waiting is not None and waiting.record is not None else None

    def _finish(self, sequence: int, outcome: Outcome) -> None:
        attempt, waiting = _attempt_with(outcome), self._to_keep(outcome)
        self._unfinished.pop(attempt, None)
        if waiting is None or waiting.record is None:
            return
        try:
            samples = kept_samples(waiting.record, waiting.trajectories)
        except (ValueError, TypeError) as error:
            log.warning("malformed samples", attempt=attempt, reason=printable(str(error)))
            return
        if isinstance(outcome, tickets.GroupDone) and outcome.digest != digest_of(samples):
            log.warning("the samples of a group differ from its digest", attempt=attempt)
        rows = [_row(sample, waiting.record, outcome, sequence) for sample in samples]
        oldest = min((row["oldest"] for row in rows if row["oldest"] is not None), default=0)
        group = _FinishedGroup(waiting.first, waiting.images, oldest, rows)
        if isinstance(outcome, tickets.GroupFailed):
            self._complete(attempt[0], group, "filtered" if outcome.filtered else "failed", outcome.reason)
        elif outcome.purpose == "eval":
            self._complete("eval", group, "evaluated")
        else:
            self._groups[attempt] = group

    def _train(self, message: tickets.TrainedRows) -> None:
        step = message.version + 1
        self.newest_step = max(self.newest_step, step)
        ended: dict[int, tuple[str, None]] = {}
        for row in message.rows:
            if (attempt := _attempt_of(row.id)) is None:
                continue
            ended[attempt[1]] = "expired", None  # for other attempts of the ticket
            if (group := self._groups.get(attempt)) is not None:
                group.step, group.figures[row.id] = step, _figures(row)
        self._settle(ended, step)

    def _settle(self, ended: Mapping[int, tuple[str, str | None]], step: int = 0) -> None:
        """Complete groups whose fate is known.

        `ended`: ticket -> outcome and reason of its attempts that were not trained. `step`: the step that a
        trainer has just reported; its number is lower again after the run has lost steps.
        """
        for attempt, group in list(self._groups.items()):
            if group.step is not None:
                if len(group.figures) < len(group.rows) and step <= group.step + _LATE_STEPS:
                    continue
                fate = "trained", None
            elif attempt[1] in ended:
                fate = ended[attempt[1]]
            elif step > group.oldest + self._staleness + 1 + _LATE_STEPS:
                log.info("the log does not say what became of a group", attempt=attempt)
                fate = "expired", f"not trained up to step {step}, as far as the log says"
            else:
                continue
            self._complete("train", self._groups.pop(attempt), *fate)

    def _complete(
        self, purpose: tickets.Purpose, group: _FinishedGroup, outcome: str, reason: str | None = None
    ) -> None:
        for row in group.rows:
            row |= {"outcome": outcome, "reason": reason} | group.figures.get(row["id"], {})
            row["step"] = row["newest"] if outcome == "evaluated" else group.step
            if group.step is not None and row["oldest"] is not None:
                row["staleness"] = group.step - 1 - row["oldest"]
            sized = (each for each in row.values() if isinstance(each, str | np.ndarray))
            self.size += 500 + sum(len(each) if isinstance(each, str) else each.nbytes for each in sized)
        self._rows.setdefault(purpose, []).extend(group.rows)
        self._images.update(group.images)


def _attempt_with(outcome: Outcome) -> Attempt:
    return outcome.purpose, outcome.ticket, outcome.attempt


def _attempt_of(id: str) -> Attempt | None:
    ticket, _, rest = id.removeprefix("eval-").partition("/")
    attempt, _, index = rest.partition("/")
    if not (ticket.isdecimal() and attempt.isdecimal() and index.isdecimal()):
        log.warning("malformed id of a trajectory", id=printable(id[:100]))
        return None
    return ("eval" if id.startswith("eval-") else "train"), int(ticket), int(attempt)


def _figures(row: tickets.TrainedRow) -> dict[str, Any]:
    arrays = {"advantages": row.advantages, "importance_weights": row.importance_weights}
    try:
        return {name: array.numpy().astype(np.float32).ravel() for name, array in arrays.items()}
    except (ValueError, TypeError) as error:
        log.warning("malformed record of a trainer", row=printable(row.id), reason=str(error))
        return {}


def _row(kept: KeptSample, record: tickets.TicketRecord, outcome: Outcome, sequence: int) -> dict[str, Any]:
    sampled = kept.versions[kept.loss_mask]
    return {
        **vars(kept),
        "purpose": outcome.purpose,
        "ticket": outcome.ticket,
        "attempt": outcome.attempt,
        "sequence": sequence,
        "length": len(kept.tokens),
        "sampled": len(sampled),
        "oldest": int(sampled.min()) if len(sampled) else None,
        "newest": int(sampled.max()) if len(sampled) else None,
        "source": record.source,
        "variant": record.variant,
        "worker": outcome.worker,
        "seconds": record.seconds,
        "generate_s": record.generate_s,
        "score_s": record.score_s,
        "digest": outcome.digest if isinstance(outcome, tickets.GroupDone) else None,
    }
