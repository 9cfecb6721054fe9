"""The only code by which events change a scheduler: state = fold(initial state, events)."""

from collections.abc import Iterable, Iterator

from stretto.bus.messages import events
from stretto.bus.messages.tickets import GroupDone, Progress, TicketStarted
from stretto.kernel.schedule.commands import Command, Issue, StartBatch
from stretto.kernel.schedule.outcomes import Outcome, refs_of
from stretto.kernel.schedule.scheduler import Scheduler

_LONGEST_NAME = 80
"""Maximum number of characters of a rollout worker's name, which the worker writes into its groups."""


def apply(scheduler: Scheduler, event: events.Input, outcome: Outcome | None = None) -> None:
    """Let a scheduler take in an event. `outcome` is for `OutcomeRead`, as `admit` returned it."""
    match event:
        case events.RunOwned():
            scheduler.owned(event.attempts_from)
        case events.ScheduleStarted(held):
            scheduler.start(held)
        case TicketStarted(worker, purpose, ticket, attempt):
            scheduler.ticket_started(purpose, ticket, attempt, worker)
        case Progress(_, oldest):
            for ticket, attempt, version in oldest:
                scheduler.first_token(ticket, attempt, version)
        case events.OutcomeRead(sequence):
            if outcome is None:
                raise ValueError(f"the outcome at {sequence} of the log is missing")
            if isinstance(outcome, GroupDone):
                scheduler.group_done(outcome)
            else:
                scheduler.group_failed(outcome)
        case events.WorkerGone(worker, drained):
            scheduler.worker_gone(worker, drained=drained)
        case events.StepTrained(_, hold, divergence, skipped):
            scheduler.step_finished(hold=hold, divergence=divergence, skipped=skipped)
        case events.BatchExpired(version):
            scheduler.expire_batch(f"its batch was expired at version {version} (--expire-batch)")
        case events.BatchesReleased():
            scheduler.release()
        case events.RunClosing():
            scheduler.close()
        case events.RunEnded(_, reason):
            scheduler.failure = "" if reason == scheduler.failure else scheduler.failure


def decisions(commands: Iterable[Command]) -> Iterator[events.Decision]:
    """Yield the decisions that the journal records for these commands."""
    issued: list[events.IssuedTicket] = []
    retired: list[events.RetiredTicket] = []
    for command in commands:
        match command:
            case Issue(ticket):
                fields = ticket.purpose, ticket.id, ticket.attempt, ticket.row, ticket.min_version
                issued.append(events.IssuedTicket(*fields))
            case events.RetiredTicket():
                retired.append(command)
            case StartBatch(version, groups):
                yield events.BatchStarted(version, tuple(group.ticket for group in groups), refs_of(groups))
            case events.RowsDrawn() | events.EvaluationEnded():
                yield command
            case _:
                pass
    if retired:
        yield events.TicketsRetired(tuple(retired))
    if issued:
        yield events.TicketsIssued(tuple(issued))


def outcome_read(sequence: int, outcome: Outcome) -> events.OutcomeRead:
    """Return the event for an outcome at this sequence number of the log."""
    if not isinstance(outcome, GroupDone):
        return events.OutcomeRead(sequence)
    rewards = [member.reward for member in outcome.members if not member.part]
    return events.OutcomeRead(
        sequence,
        events.GroupFigures(
            *(outcome.purpose, outcome.ticket, outcome.attempt, outcome.worker[:_LONGEST_NAME]),
            seconds=round(outcome.seconds, 4),
            generate_s=round(outcome.generate_s, 4),
            score_s=round(outcome.score_s, 4),
            samples=len(rewards),
            reward=round(sum(rewards) / max(1, len(rewards)), 6),
            tokens=sum(member.sampled for member in outcome.members),
            oldest=min(member.oldest for member in outcome.members),
        ),
    )
