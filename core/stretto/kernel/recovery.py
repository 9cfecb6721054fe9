"""After a restart: the journal's batches since the checkpoint, trained again to the same digests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import structlog

from stretto.bus.client import Bus
from stretto.bus.messages import (
    Evaluation,
    GroupDone,
    GroupFailed,
    JournalBatch,
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

__all__ = ["Recovered", "repeat_journal"]

log = structlog.get_logger()


class _Steps(Protocol):
    """As much of `Trainers` as a repetition needs."""

    async def load(self, folder: Path | None, version: int) -> WeightsNote: ...

    async def step(self, incarnation: int, version: int, rows: tuple[RowRef, ...]) -> StepResult: ...


@dataclass(frozen=True)
class Recovered:
    """Where a repetition has led."""

    note: WeightsNote
    incarnation: int
    log_sequence: int
    """Last message of the log that the scheduler has taken in."""
    repeated: int
    """Steps that were trained again."""


async def repeat_journal(
    bus: Bus,
    names: Subjects,
    scheduler: Scheduler,
    trainers: _Steps,
    checkpoint: tuple[Path | None, KernelState],
    *,
    attempts_from: int,
    on_repeated: Callable[[StartBatch, StepResult], object],
) -> Recovered:
    """Load a checkpoint, or the initial model where there is none, train the journal's batches from there on,
    and tell the scheduler of every group that the log holds. Afterwards `scheduler.start()` goes on.

    A step that does not reach the digest of its first time begins a new incarnation there: what older
    weights of the former one sampled since then expires.

    Raises:
        RunError: if the checkpoint does not load to the weights it was made of.
    """
    folder, state = checkpoint
    note = await trainers.load(folder, state.version)
    if folder is not None and note.digest != state.digest:
        raise RunError(f"{folder} does not load to the weights it was saved from")
    scheduler.restore(state.snapshot, attempts_from=attempts_from)
    outcomes = await _outcomes(bus, names, state.log_sequence)
    done = {(group.ticket, group.attempt): group for _, group in outcomes if isinstance(group, GroupDone)}
    done |= {(ticket.id, ticket.done.attempt): ticket.done for ticket in state.snapshot.open if ticket.done}
    batches, digests, evaluations = await _journal(bus, names, state)
    incarnation = state.incarnation
    for version in range(state.version, state.version + len(batches)):
        batch = batches[version]
        attempts = {(row.group, int(row.id.split("/")[1])) for row in batch.rows}
        start = scheduler.replay(batch.tickets, [done[key] for key in attempts])
        result = await trainers.step(incarnation, version, batch.rows)
        scheduler.step_finished()
        on_repeated(start, result)
        note = result.note
        expected = digests.get(version + 1)
        if expected is None:
            await bus.append(
                names.journal,
                JournalStep(incarnation, note.version, note.digest),
                id=f"{incarnation}/{note.version}/step/again",
            )
        elif expected != note.digest:
            log.error("repetition differs", version=note.version, digest=note.digest, expected=expected)
            incarnation += 1
            break
        log.info("step repeated", version=note.version)
    repeated = note.version - state.version
    scheduler.recall(each for each in evaluations if each.version <= note.version)
    if incarnation == state.incarnation:
        for _, outcome in outcomes:
            if isinstance(outcome, GroupDone):
                scheduler.group_done(outcome)
            else:
                scheduler.group_failed(outcome)
    else:
        scheduler.expire_finished(f"sampled by weights of incarnation {state.incarnation}")
    scheduler.commands()  # withdrawals of attempts that nobody works on any more
    last = outcomes[-1][0] if outcomes else state.log_sequence
    return Recovered(note, incarnation, last, repeated)


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


async def _journal(
    bus: Bus, names: Subjects, state: KernelState
) -> tuple[dict[int, JournalBatch], dict[int, str], list[Evaluation]]:
    """Of the checkpoint's incarnation: the batches from its version on, without a gap, the digests, and the
    evaluations."""
    last = await bus.last_sequence(names.journal_stream, names.journal)
    found: dict[int, JournalBatch] = {}
    digests: dict[int, str] = {}
    evaluations: list[Evaluation] = []
    if last:
        kinds = JournalBatch | JournalStep | JournalEvaluation
        async for sequence, entry in bus.follow(names.journal_stream, names.journal, kinds, start=1):
            if entry.incarnation == state.incarnation:
                if isinstance(entry, JournalBatch):
                    found[entry.version] = entry
                elif isinstance(entry, JournalStep):
                    digests[entry.version] = entry.digest
                else:
                    evaluations.append(entry.result)
            if sequence >= last:
                break
    batches: dict[int, JournalBatch] = {}
    version = state.version
    while version in found:
        batches[version] = found[version]
        version += 1
    return batches, digests, evaluations
