"""The traces of tickets and evaluations, made of events when they end (see `stretto.kernel.contexts`).

The other processes add spans below. If a previous kernel issued a ticket, its span begins with this kernel.
"""

from __future__ import annotations

from collections.abc import Mapping

from stretto import tracing
from stretto.bus.messages.events import (
    BatchStarted,
    Evaluation,
    EvaluationEnded,
    Event,
    IssuedTicket,
    KernelBegan,
    OutcomeRead,
    RetiredTicket,
    StepMeasured,
    TicketsIssued,
    TicketsRetired,
)
from stretto.bus.messages.tickets import Purpose, attempt_name
from stretto.kernel.contexts import evaluation_context, step_context, ticket_context


class RunTraces:
    """Ends the traces of one kernel. Without tracing it does nothing."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._lease_epoch = 0
        self._began = 0.0
        self._open: dict[str, tuple[IssuedTicket, float]] = {}
        """Context -> the newest attempt of an open ticket that is traced, and when the kernel first issued
        the ticket."""
        self._evaluations: dict[int, float] = {}
        """Version -> when its evaluation began."""
        self._batches: dict[int, dict[int, int]] = {}
        """Version after the step -> ticket -> attempt, of each batch that is trained."""

    def take(self, time: float, event: Event) -> None:
        """Take in an event of the kernel."""
        if not tracing.is_on():
            return
        match event:
            case KernelBegan(lease_epoch):
                self._lease_epoch, self._began = lease_epoch, time
            case TicketsIssued(tickets):
                for ticket in tickets:
                    self._issued(ticket, time)
            case BatchStarted(version, _, rows):
                self._batches[version + 1] = {row.group: row.attempt for row in rows}
            case StepMeasured(version, repeated):
                batch = self._batches.pop(version, {})
                if not repeated and not event.known:
                    self._trained(event, batch)
            case TicketsRetired(tickets):
                for ticket in tickets:
                    self._retired(ticket)
            case OutcomeRead(_, group) if group is not None and group.purpose == "eval":
                context = ticket_context(self._run, group.purpose, group.ticket)
                if context in self._open:  # else another attempt has ended it
                    self._end_ticket(context, "evaluated", group.attempt)
            case EvaluationEnded(result):
                self._evaluated(result)
            case _:
                pass

    def _issued(self, ticket: IssuedTicket, time: float) -> None:
        if ticket.purpose == "eval":
            self._evaluations.setdefault(ticket.min_version, time)
        if context := self._context(ticket.purpose, ticket.ticket):
            _, since = self._open.get(context, (ticket, time))
            self._open[context] = (ticket, since)

    def _trained(self, step: StepMeasured, batch: Mapping[int, int]) -> None:
        """End the traces of a step's tickets. Each one gets a span with the number of the step, from the
        step's beginning to now."""
        links = [step_context(self._run, self._lease_epoch, step.version)]
        for ticket, attempt in batch.items():
            if context := self._context("train", ticket):
                start_ns = _ns(step.began)
                tracing.span("trained", context, links=links, start_ns=start_ns, step=step.version).end()
                self._end_ticket(context, "trained", attempt)

    def _retired(self, ticket: RetiredTicket) -> None:
        if context := self._context(ticket.purpose, ticket.ticket):
            self._end_ticket(context, ticket.account, ticket.attempt, ticket.reason)

    def _evaluated(self, result: Evaluation) -> None:
        span = tracing.root(
            "evaluation",
            evaluation_context(self._run, result.version),
            start_ns=_ns(self._evaluations.pop(result.version, self._began)),
            version=result.version,
            samples=result.samples,
            failed=result.failed,
        )
        if result.accuracy is not None:
            span.set(accuracy=result.accuracy)
        span.end()

    def _end_ticket(self, context: str, outcome: str, attempt: int, reason: str = "") -> None:
        """End the root span of a ticket."""
        ticket, since = self._open.pop(context, (None, self._began))
        version = ticket.min_version if ticket is not None and ticket.purpose == "eval" else None
        links = [] if version is None else [evaluation_context(self._run, version)]
        span = tracing.root(
            "ticket", context, links=links, start_ns=_ns(since), outcome=outcome, attempt=attempt
        )
        if ticket is not None:
            name = attempt_name(ticket.purpose, ticket.ticket, ticket.attempt)
            span.set(ticket=name, purpose=ticket.purpose, row=ticket.row, min_version=ticket.min_version)
        if reason:
            span.set(reason=reason)
        if outcome == "failed":
            span.fail(reason)
        span.end()

    def _context(self, purpose: Purpose, ticket: int) -> str:
        return ticket_context(self._run, purpose, ticket)


def _ns(time: float) -> int:
    return round(time * 1e9)
