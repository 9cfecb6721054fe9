"""After a restart: the journal's batches since the checkpoint, trained again to the same digests.

A kernel repeats the batches of one set of values: those up to the first change that the journal records.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import structlog

from stretto.bus.client import Bus
from stretto.bus.messages import (
    Evaluation,
    GroupDone,
    GroupFailed,
    JournalBatch,
    JournalChange,
    JournalEvaluation,
    JournalStep,
    RowRef,
    Subjects,
)
from stretto.errors import RunError
from stretto.kernel.checkpoint import KernelState
from stretto.kernel.scheduler import Scheduler, StartBatch
from stretto.kernel.trainers import StepResult
from stretto.weights import WeightsNote

__all__ = ["Journal", "Recovered", "read_journal", "repeat_journal"]

log = structlog.get_logger()


class _Steps(Protocol):
    """As much of `Trainers` as a repetition needs."""

    async def load(
        self, folder: Path | None, version: int, needed: tuple[WeightsNote, ...]
    ) -> tuple[WeightsNote, ...]: ...

    async def step(
        self, incarnation: int, version: int, rows: tuple[RowRef, ...], *, needed: tuple[int, ...]
    ) -> StepResult: ...


@dataclass
class Journal:
    """What the journal holds of a checkpoint's incarnation, for a kernel with values of a certain number."""

    batches: dict[int, JournalBatch] = field(default_factory=dict[int, JournalBatch])
    """By version: from the checkpoint's on without a gap, up to the next change."""
    steps: dict[int, JournalStep] = field(default_factory=dict[int, JournalStep])
    """Complete ones, by the version that they led to."""
    evaluations: list[Evaluation] = field(default_factory=list[Evaluation])
    change: JournalChange | None = None
    """The one at the checkpoint with which these values begin."""
    next: JournalChange | None = None
    """The first one to later values."""


@dataclass(frozen=True)
class Recovered:
    """Where a repetition has led."""

    notes: tuple[WeightsNote, ...]
    """Of the versions that evaluations still need, and of the last one, which comes last."""
    incarnation: int
    log_sequence: int
    """Last message of the log that the scheduler has taken in."""
    repeated: int
    """Steps that were trained again."""
    next_values: int | None
    """Number of the values with which the journal goes on from here; None where this is its end."""


async def repeat_journal(
    bus: Bus,
    names: Subjects,
    scheduler: Scheduler,
    trainers: _Steps,
    checkpoint: tuple[Path | None, KernelState],
    *,
    values: int,
    attempts_from: int,
    on_change: Callable[[tuple[WeightsNote, ...], int, JournalChange | None], Awaitable[object]],
    on_repeated: Callable[[StartBatch, StepResult, float | None], object],
) -> Recovered:
    """Load a checkpoint, or the initial model where there is none, train the journal's batches from there on,
    and tell the scheduler of every group that the log holds. Afterwards `scheduler.start()` goes on.

    Versions that were being evaluated, or were to be, are published again: those from before the checkpoint
    lie in it, the others are come by.

    A step that does not reach the digest of its first time begins a new incarnation there: what older
    weights of the former one sampled since then expires.

    Args:
        values: number of the values that the scheduler and the trainers have. Where the checkpoint is of
            former ones, the change is made at the checkpoint.
        on_change: called when the ledger is that of the change, with the weights as in `Recovered.notes`, the
            last message of the log that it has taken in, and the journal's record, if it has one already.

    Raises:
        RunError: if the checkpoint does not load to the weights it was made of.
    """
    folder, state = checkpoint
    notes = [*await trainers.load(folder, state.version, state.needed)]
    note = notes[-1]
    if folder is not None and note.digest != state.digest:
        raise RunError(f"{folder} does not load to the weights it was saved from")
    scheduler.restore(state.snapshot, attempts_from=attempts_from)
    outcomes = await _outcomes(bus, names, state.log_sequence)
    done = {(group.ticket, group.attempt): group for _, group in outcomes if isinstance(group, GroupDone)}
    done |= {(ticket.id, ticket.done.attempt): ticket.done for ticket in state.snapshot.open if ticket.done}
    journal = await read_journal(bus, names, state, values)
    last = outcomes[-1][0] if outcomes else state.log_sequence
    if values != state.values:
        taken = journal.change.log_sequence if journal.change else last
        _take_in(scheduler, (outcome for sequence, outcome in outcomes if sequence <= taken))
        outcomes = [(sequence, outcome) for sequence, outcome in outcomes if sequence > taken]
        scheduler.fit()
        await on_change(tuple(notes), taken, journal.change)
    scheduler.recall(journal.evaluations)
    incarnation = state.incarnation
    for version, batch in journal.batches.items():
        attempts = {(row.group, int(row.id.split("/")[1])) for row in batch.rows}
        start = scheduler.replay(batch.tickets, [done[key] for key in attempts])
        result = await trainers.step(incarnation, version, batch.rows, needed=scheduler.needed_versions)
        first_time = journal.steps.get(version + 1)
        divergence = first_time.divergence if first_time else None
        scheduler.step_finished(divergence=divergence)
        on_repeated(start, result, divergence)
        note = result.note
        notes.append(note)
        if first_time is None:
            await bus.append(
                names.journal,
                JournalStep(incarnation, note.version, note.digest),
                id=f"{incarnation}/{note.version}/step/again",
            )
        elif first_time.digest != note.digest:
            log.error(
                "repetition differs", version=note.version, digest=note.digest, expected=first_time.digest
            )
            incarnation += 1
            break
        log.info("step repeated", version=note.version)
    repeated = note.version - state.version
    ahead = journal.next
    if incarnation != state.incarnation:
        scheduler.expire_finished(f"sampled by weights of incarnation {state.incarnation}")
        ahead = None
    else:
        last = ahead.log_sequence if ahead else last  # what came later is of later values
        _take_in(scheduler, (outcome for sequence, outcome in outcomes if sequence <= last))
    scheduler.commands()  # withdrawals of attempts that nobody works on any more
    needed = tuple(each for each in notes[:-1] if each.version in scheduler.needed_versions)
    return Recovered((*needed, note), incarnation, last, repeated, ahead.values if ahead else None)


def _take_in(scheduler: Scheduler, outcomes: Iterable[GroupDone | GroupFailed]) -> None:
    for outcome in outcomes:
        if isinstance(outcome, GroupDone):
            scheduler.group_done(outcome)
        else:
            scheduler.group_failed(outcome)


async def _outcomes(bus: Bus, names: Subjects, after: int) -> list[tuple[int, GroupDone | GroupFailed]]:
    """What the log holds of groups beyond a sequence number."""
    last = await bus.last_sequence(names.log_stream, names.groups)
    outcomes: list[tuple[int, GroupDone | GroupFailed]] = []
    if last > after:
        kinds = GroupDone | GroupFailed
        async for sequence, outcome in bus.follow(names.log_stream, names.groups, kinds, start=after + 1):
            outcomes.append((sequence, outcome))
            if sequence >= last:
                break
    return outcomes


async def read_journal(bus: Bus, names: Subjects, state: KernelState, values: int) -> Journal:
    """What a kernel with the values of this number goes on with from a checkpoint."""
    journal, found = Journal(), dict[int, JournalBatch]()
    last = await bus.last_sequence(names.journal_stream, names.journal)
    if last:
        kinds = JournalBatch | JournalStep | JournalEvaluation | JournalChange
        async for sequence, entry in bus.follow(names.journal_stream, names.journal, kinds, start=1):
            if entry.incarnation == state.incarnation:
                if isinstance(entry, JournalBatch):
                    found[entry.version] = entry
                elif isinstance(entry, JournalStep):
                    journal.steps[entry.version] = entry
                elif isinstance(entry, JournalEvaluation):
                    journal.evaluations.append(entry.result)
                elif entry.values == values and entry.version == state.version:
                    journal.change = entry
                elif entry.values > values and journal.next is None:
                    journal.next = entry
            if sequence >= last:
                break
    version = state.version
    while version in found and (journal.next is None or version < journal.next.version):
        journal.batches[version] = found[version]
        version += 1
    return journal
