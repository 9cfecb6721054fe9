"""Recovery after a restart: train the journal's batches since the checkpoint again, to the same digests.

A kernel repeats only batches with its own set of values: those up to the next change that the journal
records.
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
    JournalBatch,
    JournalChange,
    JournalEvaluation,
    JournalStep,
    RowRef,
    Subjects,
)
from stretto.errors import RunError
from stretto.kernel.checkpoint import KernelState
from stretto.kernel.outcomes import Outcome, follow_outcomes
from stretto.kernel.scheduler import Scheduler, StartBatch
from stretto.kernel.trainers import StepResult
from stretto.weights import WeightsNote

__all__ = ["Journal", "Recovered", "read_journal", "repeat_journal"]

log = structlog.get_logger()


class _Steps(Protocol):
    """The part of `Trainers` that a repetition needs."""

    async def load(
        self, folder: Path | None, version: int, needed: tuple[WeightsNote, ...]
    ) -> tuple[WeightsNote, ...]: ...

    async def step(
        self, incarnation: int, version: int, rows: tuple[RowRef, ...], *, needed: tuple[int, ...]
    ) -> StepResult: ...


@dataclass
class Journal:
    """The journal's entries of a checkpoint's incarnation, for a kernel with one set of values."""

    batches: dict[int, JournalBatch] = field(default_factory=dict[int, JournalBatch])
    """Batches by version: from the checkpoint's version without a gap, up to the next change."""
    steps: dict[int, JournalStep] = field(default_factory=dict[int, JournalStep])
    """Complete steps, by the version that they led to."""
    evaluations: list[Evaluation] = field(default_factory=list[Evaluation])
    change: JournalChange | None = None
    """The change to this kernel's values, if the journal records it at the checkpoint's version."""
    next: JournalChange | None = None
    """The first change to later values."""


@dataclass(frozen=True)
class Recovered:
    """The result of a repetition."""

    notes: tuple[WeightsNote, ...]
    """Notes of the versions that evaluations still need, and last the note of the newest version."""
    incarnation: int
    log_sequence: int
    """Sequence number of the last log message that the scheduler has taken in."""
    repeated: int
    """Number of steps that were trained again."""
    next_values: int | None
    """Number of the values with which the journal continues; None if it records no later change that still
    applies."""


async def repeat_journal(
    bus: Bus,
    names: Subjects,
    scheduler: Scheduler,
    trainers: _Steps,
    checkpoint: tuple[Path | None, KernelState],
    *,
    values: int,
    attempts_from: int,
    samples: bool,
    on_change: Callable[[tuple[WeightsNote, ...], int, JournalChange | None], Awaitable[object]],
    on_repeated: Callable[[StartBatch, StepResult, float | None], object],
) -> Recovered:
    """Load a checkpoint, or the initial model if there is none, and train the journal's later batches again.

    The function reports the groups in the log to the scheduler, up to the next change of values. Afterwards
    `scheduler.start()` continues the run.

    The trainers publish the versions again that still have to be evaluated. The checkpoint holds the weights
    of versions before it; the repeated steps produce those of later versions.

    If a repeated step does not reach its recorded digest, a new incarnation begins there. All finished groups
    then expire, because weights of the former incarnation sampled them.

    Args:
        values: number of the values of the scheduler and the trainers. If the checkpoint has former values,
            the change is made at the checkpoint.
        samples: whether the policy samples the sequences that the run trains.
        on_change: called when the ledger is in the state of the change, with three arguments: the notes as in
            `Recovered.notes`, the sequence number of the last log message in the ledger, and the journal's
            record of the change, if there is one.
        on_repeated: called after each repeated step, with the batch, its result, and the divergence that the
            journal records.

    Raises:
        RunError: if the loaded weights do not have the digest that the checkpoint records.
    """
    folder, state = checkpoint
    notes = [*await trainers.load(folder, state.version, state.needed)]
    note = notes[-1]
    if folder is not None and note.digest != state.digest:
        raise RunError(f"the weights loaded from {folder} differ from those that were saved there")
    scheduler.restore(state.snapshot, attempts_from=attempts_from)
    outcomes = await _outcomes(bus, names, state.log_sequence, samples=samples)
    done = {
        (group.ticket, group.attempt): group
        for _, group in reversed(outcomes)  # the first one counts
        if isinstance(group, GroupDone) and group.purpose == "train"
    }
    done |= {(ticket.id, ticket.done.attempt): ticket.done for ticket in state.snapshot.open if ticket.done}
    journal = await read_journal(bus, names, state, values)
    last = outcomes[-1][0] if outcomes else state.log_sequence
    if values != state.values:
        change_at = journal.change.log_sequence if journal.change else last
        _take_in(scheduler, (outcome for sequence, outcome in outcomes if sequence <= change_at))
        outcomes = [(sequence, outcome) for sequence, outcome in outcomes if sequence > change_at]
        scheduler.fit()
        await on_change(tuple(notes), change_at, journal.change)
    scheduler.recall(journal.evaluations)
    incarnation = state.incarnation
    for version, batch in journal.batches.items():
        attempts = {(row.group, int(row.id.split("/")[1])) for row in batch.rows}
        start = scheduler.replay(batch.tickets, [done[key] for key in attempts])
        result = await trainers.step(incarnation, version, batch.rows, needed=scheduler.needed_versions)
        record = journal.steps.get(version + 1)
        divergence = record.divergence if record else None
        scheduler.step_finished(divergence=divergence)
        on_repeated(start, result, divergence)
        note = result.note
        notes.append(note)
        if record is None:
            await bus.append(
                names.journal,
                JournalStep(incarnation, note.version, note.digest),
                id=f"{incarnation}/{note.version}/step/again",
            )
        elif record.digest != note.digest:
            log.error("repetition differs", version=note.version, digest=note.digest, expected=record.digest)
            incarnation += 1
            break
        log.info("step repeated", version=note.version)
    repeated = note.version - state.version
    next_change = journal.next
    if incarnation != state.incarnation:
        scheduler.expire_finished(f"sampled by weights of incarnation {state.incarnation}")
        next_change = None
    else:
        last = next_change.log_sequence if next_change else last  # later messages belong to later values
        _take_in(scheduler, (outcome for sequence, outcome in outcomes if sequence <= last))
    scheduler.commands()  # drop the withdrawals: no worker has these attempts any more
    needed = tuple(each for each in notes[:-1] if each.version in scheduler.needed_versions)
    return Recovered(
        (*needed, note), incarnation, last, repeated, next_change.values if next_change else None
    )


def _take_in(scheduler: Scheduler, outcomes: Iterable[Outcome]) -> None:
    for outcome in outcomes:
        if isinstance(outcome, GroupDone):
            scheduler.group_done(outcome)
        else:
            scheduler.group_failed(outcome)


async def _outcomes(bus: Bus, names: Subjects, after: int, *, samples: bool) -> list[tuple[int, Outcome]]:
    """Return the outcomes of tickets in the log after a sequence number, in order."""
    last = await bus.last_sequence(names.log_stream, names.groups)
    outcomes: list[tuple[int, Outcome]] = []
    if last > after:
        async for sequence, outcome in follow_outcomes(bus, names, start=after + 1, samples=samples):
            outcomes.append((sequence, outcome))
            if sequence >= last:
                break
    return outcomes


async def read_journal(bus: Bus, names: Subjects, state: KernelState, values: int) -> Journal:
    """Read the journal's entries with which a kernel with these values continues from a checkpoint."""
    journal, batches = Journal(), dict[int, JournalBatch]()
    last = await bus.last_sequence(names.journal_stream, names.journal)
    if last:
        kinds = JournalBatch | JournalStep | JournalEvaluation | JournalChange
        async for sequence, entry in bus.follow(names.journal_stream, names.journal, kinds, start=1):
            if entry.incarnation == state.incarnation:
                if isinstance(entry, JournalBatch):
                    batches[entry.version] = entry
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
    while version in batches and (journal.next is None or version < journal.next.version):
        journal.batches[version] = batches[version]
        version += 1
    return journal
