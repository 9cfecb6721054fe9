"""The one way by which events change a scheduler: state = fold(state at the start, events)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from stretto.bus.messages.events import (
    BatchesReleased,
    BatchStarted,
    Decision,
    EvaluationEnded,
    Input,
    OutcomeRead,
    RowsDrawn,
    RunClosing,
    RunEnded,
    RunOwned,
    ScheduleStarted,
    StepTrained,
    WorkerGone,
)
from stretto.bus.messages.tickets import GroupDone, Progress, TicketStarted
from stretto.kernel.schedule.commands import Command, EvaluationDone, RecordDraws, StartBatch
from stretto.kernel.schedule.outcomes import Outcome, refs_of
from stretto.kernel.schedule.scheduler import Scheduler


def apply(scheduler: Scheduler, event: Input, outcome: Outcome | None = None) -> None:
    """Let a scheduler take in an event. Its commands then say what follows.

    Args:
        outcome: for `OutcomeRead`: the outcome at that place of the log, as `admit` returns it.

    Raises:
        ValueError: if it is missing.
    """
    match event:
        case RunOwned():
            scheduler.owned(event.attempts_from)
        case ScheduleStarted():
            scheduler.start()
        case TicketStarted(worker, purpose, ticket, attempt):
            scheduler.ticket_started(purpose, ticket, attempt, worker)
        case Progress(_, oldest):
            for ticket, attempt, version in oldest:
                scheduler.first_token(ticket, attempt, version)
        case OutcomeRead(sequence):
            if outcome is None:
                raise ValueError(f"the outcome at {sequence} of the log is missing")
            if isinstance(outcome, GroupDone):
                scheduler.group_done(outcome)
            else:
                scheduler.group_failed(outcome)
        case WorkerGone(worker, drained):
            scheduler.worker_gone(worker, drained=drained)
        case StepTrained(_, hold, divergence, skipped):
            scheduler.step_finished(hold=hold, divergence=divergence, skipped=skipped)
        case BatchesReleased():
            scheduler.release()
        case RunClosing():
            scheduler.close()
        case RunEnded(_, reason):
            scheduler.failure = "" if reason == scheduler.failure else scheduler.failure


def decisions(commands: Iterable[Command]) -> Iterator[Decision]:
    """Yield what the journal records of commands, in order."""
    for command in commands:
        match command:
            case StartBatch(version, groups):
                yield BatchStarted(version, tuple(group.ticket for group in groups), refs_of(groups))
            case RecordDraws(version, draws):
                yield RowsDrawn(version, draws)
            case EvaluationDone(result):
                yield EvaluationEnded(result)
            case _:
                pass
