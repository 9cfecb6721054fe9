"""Recovery after a restart: train the journal's batches since the checkpoint again, to the same digests.

A kernel repeats only batches with its own set of values: those up to the next change that the journal
records.

`read_store` first compares what the checkpoint, the journal and the log still hold. If the store is damaged,
the run continues without the steps and groups that are lost, and their tickets are issued again. If nothing
is left to continue from, it refuses the resume before anything is changed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec
import structlog

from stretto.bus.client import Bus
from stretto.bus.messages.journal import (
    Evaluation,
    JournalBatch,
    JournalChange,
    JournalDraws,
    JournalEntry,
    JournalEvaluation,
    JournalStep,
)
from stretto.bus.messages.subjects import Subjects
from stretto.bus.messages.tickets import GroupDone, Purpose
from stretto.bus.messages.training import RowRef
from stretto.bus.store import Extent
from stretto.errors import ConfigError, RunError
from stretto.kernel.calls.trainers import StepResult
from stretto.kernel.durable.checkpoint import KernelState, LostData
from stretto.kernel.durable.journal import JournalWriter
from stretto.kernel.schedule.commands import StartBatch
from stretto.kernel.schedule.draws import RecordedDraw
from stretto.kernel.schedule.outcomes import Outcome, follow_outcomes
from stretto.kernel.schedule.scheduler import Scheduler, Snapshot
from stretto.weights import WeightsNote

log = structlog.get_logger()

Name = tuple[Purpose, int, int]
"""(purpose, ticket, attempt) of an outcome."""


class _Steps(Protocol):
    """The part of `Trainers` that a repetition needs."""

    async def load(
        self, folder: Path | None, version: int, needed: tuple[WeightsNote, ...]
    ) -> tuple[WeightsNote, ...]: ...

    async def step(self, incarnation: int, version: int, rows: tuple[RowRef, ...]) -> StepResult: ...

    async def end(self, version: int, needed: tuple[int, ...]) -> None: ...

    async def published(self, version: int) -> WeightsNote: ...


@dataclass
class Journal:
    """The journal's entries of a checkpoint's incarnation, for a kernel with one set of values."""

    batches: dict[int, JournalBatch] = field(default_factory=dict[int, JournalBatch])
    """Batches by version: from the checkpoint's version without a gap, up to the next change."""
    steps: dict[int, JournalStep] = field(default_factory=dict[int, JournalStep])
    """Complete steps, by the version that they led to."""
    evaluations: list[Evaluation] = field(default_factory=list[Evaluation])
    evaluated: set[int] = field(default_factory=set[int])
    """Versions whose evaluation the journal records, of any incarnation."""
    draws: dict[int, RecordedDraw] = field(default_factory=dict[int, RecordedDraw])
    """Draws of a curriculum, by ticket, of those tickets that the checkpoint does not know."""
    change: JournalChange | None = None
    """The change to this kernel's values, if the journal records it at the checkpoint's version."""
    next: JournalChange | None = None
    """The first change to later values."""
    newest_incarnation: int = 0
    """Highest incarnation of all entries, also of those that do not belong to the checkpoint's."""


@dataclass(frozen=True)
class Stored:
    """What checkpoint, journal and log still hold of a run."""

    snapshot: Snapshot
    """The checkpoint's ledger. Tickets whose trajectories are gone are unfinished in it."""
    journal: Journal
    """Its batches can all be repeated."""
    outcomes: tuple[tuple[int, Outcome], ...]
    """(sequence number, outcome) of the tickets that ended after the checkpoint and can be used."""
    last: int
    """Sequence number of the last outcome in the log; that of the checkpoint if there is no later one."""
    log_is_short: bool
    """Whether the log ends before the checkpoint's place in it, so that none of its messages can be used."""
    lost: LostData
    lost_from: int | None
    """Version from which steps are lost, which may be one that was not complete. A new incarnation begins
    there. None if no step is lost."""

    def incarnation_at(self, version: int, former: int) -> int:
        """Return the incarnation that continues at a version: `former`, or a new one where steps are lost."""
        return self.next_incarnation if version == self.lost_from else former

    @property
    def next_incarnation(self) -> int:
        """Number of an incarnation that has no entry in the journal yet."""
        return self.journal.newest_incarnation + 1


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


async def read_store(
    bus: Bus,
    names: Subjects,
    checkpoint: tuple[Path | None, KernelState],
    *,
    values: int,
    samples: bool,
    reached: int,
) -> Stored:
    """Read what journal and log hold for a run that continues from a checkpoint. Nothing is changed.

    Args:
        values: number of the kernel's values.
        samples: whether the run trains on trajectories in the log, and not on rows of a dataset.
        reached: the newest version that the run has reported. If the journal does not lead to it, the steps
            in between are lost.

    Raises:
        ConfigError: if there is no intact checkpoint, and the store does not hold the run's first step.
    """
    folder, state = checkpoint
    journal = await _read_journal(bus, names, state, values)
    extent = await bus.store.extent(names.log_stream)
    short = extent.last < state.log_sequence
    outcomes = [] if short else await _outcomes(bus, names, state.log_sequence, samples=samples)
    groups = [ticket.done for ticket in state.snapshot.open if ticket.done]
    groups += [each for _, each in outcomes if isinstance(each, GroupDone) and each.purpose == "train"]
    gone: set[int] = set()
    if samples:
        named = {sequence for group in groups for sequence in _messages_of(group)}
        named |= {row.sequence for batch in journal.batches.values() for row in batch.rows}
        gone = named if short else await _gone(bus, names, extent, named)
    lost = {_name(group) for group in groups if not gone.isdisjoint(_messages_of(group))}
    is_cut = _cut_at_loss(journal, state.version, {_name(group) for group in groups} - lost, gone, reached)
    end = state.version + len(journal.batches)
    lost_steps = max(reached, *journal.steps, end) - end if is_cut else 0
    if lost_steps and folder is None and not end:
        raise ConfigError(
            f"the run was at version {lost_steps}, but it has no intact checkpoint, and the store does not "
            "hold its first steps: nothing is left to continue from, and nothing was changed; put back "
            "`checkpoints` or `bus/store` from a copy and resume again, or start a new run"
        )
    last = outcomes[-1][0] if outcomes else state.log_sequence
    if is_cut:
        lost |= {_name(group) for group in groups if any(each.newest > end for each in group.members)}
        # A failed ticket may be one of those that the lost steps had made room for.
        outcomes = [each for each in outcomes if isinstance(each[1], GroupDone)]
    return Stored(
        snapshot=_without(state.snapshot, lost),
        journal=journal,
        outcomes=tuple(each for each in outcomes if _name(each[1]) not in lost),
        last=last,
        log_is_short=short,
        lost=LostData(lost_steps, len(lost), sum(each > state.log_sequence for each in extent.missing)),
        lost_from=end if is_cut else None,
    )


async def repeat_journal(
    writer: JournalWriter,
    scheduler: Scheduler,
    trainers: _Steps,
    checkpoint: tuple[Path | None, KernelState],
    stored: Stored,
    *,
    values: int,
    on_change: Callable[[tuple[WeightsNote, ...], int, JournalChange | None], Awaitable[object]],
    on_repeated: Callable[[StartBatch, StepResult, float | None], object],
) -> Recovered:
    """Load a checkpoint, or the initial model if there is none, and train the journal's later batches again.

    The scheduler has restored the stored snapshot. The function reports the groups in the log to it, up to
    the next change of values. Afterwards `scheduler.start()` continues the run. Of the scheduler's commands
    before that, only the retirements matter: the attempts that it withdraws are of a previous kernel, whose
    workers leave.

    The trainers publish the versions again that still have to be evaluated. The checkpoint holds the weights
    of versions before it; the repeated steps produce those of later versions.

    If a repeated step does not reach its recorded digest, a new incarnation begins there. All finished groups
    then expire, because weights of the previous incarnation sampled them. A new incarnation also begins where
    steps are lost; the groups that remain were sampled by weights from before that.

    Args:
        values: number of the values of the scheduler and the trainers. If the checkpoint has previous values,
            the change is made at the checkpoint.
        on_change: called when the ledger is in the state of the change, with three arguments: the notes as in
            `Recovered.notes`, the sequence number of the last log message in the ledger, and the journal's
            record of the change, if there is one.
        on_repeated: called after each repeated step, with the batch, its result, and the divergence that the
            journal records.

    Raises:
        BusError: if the server cannot store a step's digest, also because another kernel has taken the run.
        RunError: if the loaded weights do not have the digest that the checkpoint records.
    """
    folder, state = checkpoint
    journal, outcomes, last = stored.journal, stored.outcomes, stored.last
    notes = [*await trainers.load(folder, state.version, state.needed)]
    note = notes[-1]
    if folder is not None and note.digest != state.digest:
        raise RunError(f"the weights loaded from {folder} differ from those that were saved there")
    done = {  # the first one counts
        _name(group): group for _, group in reversed(outcomes) if isinstance(group, GroupDone)
    }
    done |= {_name(ticket.done): ticket.done for ticket in stored.snapshot.open if ticket.done}
    if values != state.values:
        change_at = journal.change.log_sequence if journal.change else last
        _take_in(scheduler, (outcome for sequence, outcome in outcomes if sequence <= change_at))
        outcomes = tuple((sequence, outcome) for sequence, outcome in outcomes if sequence > change_at)
        scheduler.fit()
        await on_change(tuple(notes), change_at, journal.change)
    scheduler.evaluation.recall(journal.evaluations)
    incarnation, differs = state.incarnation, False
    for result in scheduler.evaluation.results:
        if result.version not in journal.evaluated:  # the former kernel ended before it recorded the result
            await writer.append(JournalEvaluation(incarnation, result), "evaluation", result.version)
    for batch in journal.batches.values():
        start = scheduler.replay(batch.tickets, [done[name] for name in _names(batch)])
        result = await trainers.step(incarnation, batch.version, batch.rows)
        await trainers.end(batch.version, scheduler.evaluation.needed_versions)
        note = await trainers.published(result.version)
        record = journal.steps.get(batch.version + 1)
        divergence = record.divergence if record else None
        scheduler.step_finished(divergence=divergence)
        on_repeated(start, result, divergence)
        notes.append(note)
        if record is None:
            entry = JournalStep(incarnation, note.version, note.digest)
            await writer.append(entry, "step/again", note.version)
        elif record.digest != note.digest:
            log.error("repetition differs", version=note.version, digest=note.digest, expected=record.digest)
            differs = True
            break
        log.info("step repeated", version=note.version)
    repeated = note.version - state.version
    next_change = journal.next
    if differs:
        incarnation, next_change = stored.next_incarnation, None
        scheduler.expire_finished(f"sampled by weights of incarnation {state.incarnation}")
    else:
        incarnation = stored.incarnation_at(note.version, incarnation)
        last = next_change.log_sequence if next_change else last  # later messages belong to later values
        _take_in(scheduler, (outcome for sequence, outcome in outcomes if sequence <= last))
        if stored.lost:  # without the outcomes that are lost, more tickets may be open than can be trained
            scheduler.fit()
    needed = tuple(each for each in notes[:-1] if each.version in scheduler.evaluation.needed_versions)
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
    last = await bus.store.last_sequence(names.log_stream, names.groups)
    outcomes: list[tuple[int, Outcome]] = []
    if last > after:
        async for sequence, outcome in follow_outcomes(bus, names, start=after + 1, samples=samples):
            outcomes.append((sequence, outcome))
            if sequence >= last:
                break
    return outcomes


async def _gone(bus: Bus, names: Subjects, extent: Extent, sequences: set[int]) -> set[int]:
    """Return the sequence numbers whose message, or a part of it, is no longer in the log."""
    gone = {sequence for sequence in sequences if sequence not in extent}
    if extent.missing:  # a message without a gap before it has all its parts
        for sequence in sequences - gone:
            if not await bus.store.holds(names.log_stream, sequence):
                gone.add(sequence)
    return gone


async def _read_journal(bus: Bus, names: Subjects, state: KernelState, values: int) -> Journal:
    """Read the journal's entries with which a kernel with these values continues from a checkpoint."""
    journal, batches = Journal(newest_incarnation=state.incarnation), dict[int, JournalBatch]()
    last = await bus.store.last_sequence(names.journal_stream, names.journal)
    if last:
        issued = state.snapshot.ledger.issued
        async for sequence, entry in bus.store.follow(
            names.journal_stream, names.journal, JournalEntry, start=1
        ):
            journal.newest_incarnation = max(journal.newest_incarnation, entry.incarnation)
            if isinstance(entry, JournalEvaluation):
                journal.evaluated.add(entry.result.version)
            if isinstance(entry, JournalDraws):  # a new incarnation keeps the draws of the previous one
                journal.draws |= {
                    ticket: RecordedDraw(entry.version, row)
                    for ticket, row in entry.draws
                    if ticket >= issued
                }
            elif entry.incarnation == state.incarnation:
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


def _cut_at_loss(journal: Journal, version: int, finished: Set[Name], gone: Set[int], reached: int) -> bool:
    """Remove the batches from the first one on that cannot be repeated, and what followed from them. Return
    whether there is such a batch, or a complete step without one.

    Args:
        version: version of the checkpoint.
        finished: names of the groups in checkpoint and log that are complete.
        gone: sequence numbers of the messages that are not in the log any more.
    """
    end = version
    while (batch := journal.batches.get(end)) is not None and (
        _names(batch) <= finished and gone.isdisjoint(row.sequence for row in batch.rows)
    ):
        end += 1
    if journal.next is not None and end == journal.next.version:
        return False  # later steps belong to the kernel with the next values
    if end not in journal.batches and max(reached, *journal.steps, end) == end:
        return False
    journal.batches = {each: batch for each, batch in journal.batches.items() if each < end}
    journal.evaluations = [each for each in journal.evaluations if each.version <= end]
    journal.next = None
    return True


def _without(snapshot: Snapshot, lost: Set[Name]) -> Snapshot:
    """Return the ledger with the tickets of lost groups unfinished."""
    tickets = [
        msgspec.structs.replace(ticket, done=None) if ticket.done and _name(ticket.done) in lost else ticket
        for ticket in snapshot.open
    ]
    return msgspec.structs.replace(snapshot, open=tickets)


def _name(outcome: Outcome) -> Name:
    return outcome.purpose, outcome.ticket, outcome.attempt


def _messages_of(group: GroupDone) -> set[int]:
    """Return the sequence numbers of the messages with a group's trajectories and their images."""
    return {*(member.sequence for member in group.members), *group.images}


def _names(batch: JournalBatch) -> set[Name]:
    """Return the names of a batch's groups."""
    return {("train", row.group, int(row.id.split("/")[1])) for row in batch.rows}
