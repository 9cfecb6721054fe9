"""The one way by which events change a scheduler: state = fold(state at the start, events)."""

from __future__ import annotations

from stretto.bus.messages.events import (
    BatchesReleased,
    Event,
    OutcomeRead,
    RunClosing,
    RunOwned,
    ScheduleStarted,
    StepTrained,
    WorkerGone,
)
from stretto.bus.messages.tickets import GroupDone, Progress, TicketStarted
from stretto.kernel.schedule.outcomes import Outcome
from stretto.kernel.schedule.scheduler import Scheduler


def apply(scheduler: Scheduler, event: Event, outcome: Outcome | None = None) -> None:
    """Let a scheduler take in an event. Its commands then say what follows.

    Args:
        outcome: for `OutcomeRead`: the outcome at that place of the log, as `admit` returns it.

    Raises:
        ValueError: if it is missing.
    """
    match event:
        case RunOwned(_, _, attempts_from):
            scheduler.owned(attempts_from)
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
        case StepTrained(_, hold, divergence):
            scheduler.step_finished(hold=hold, divergence=divergence)
        case BatchesReleased():
            scheduler.release()
        case RunClosing():
            scheduler.close()
