"""The traces of a run: one for each ticket in the traced share, one for each step and each evaluation.

The kernel begins and ends them; the other processes add spans below. The ids of a ticket's trace follow from
the run and the ticket's number: the trace continues when the kernel issues the ticket again, also after a
resume. A step that `resume` repeats has no trace of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from stretto import tracing
from stretto.base import clock
from stretto.bus.messages.events import Evaluation
from stretto.bus.messages.tickets import GroupDone, Purpose, Ticket
from stretto.kernel.schedule.commands import Retire, StartBatch


@dataclass(frozen=True)
class StepTrace:
    """The trace of one step."""

    span: tracing.Span
    step: int
    """Number of the step: the version that it produces."""
    groups: Mapping[str, GroupDone]
    """Context -> group of each traced ticket of the batch."""


UNTRACED = StepTrace(tracing.NO_SPAN, 0, {})


class RunTraces:
    """The traces that one kernel begins and ends. Without tracing it does nothing."""

    def __init__(self, run: str, lease_epoch: int) -> None:
        self._run = run
        self._lease_epoch = lease_epoch
        self._began_ns = round(clock.wall() * 1e9)
        self._open: dict[str, tuple[Ticket, int]] = {}
        """Context -> the newest attempt of an open ticket that is traced, and when the kernel first issued
        the ticket."""
        self._evaluations: dict[int, int] = {}
        """Version -> when its evaluation began."""
        self._newest_step = (0, "")
        """Number of the newest step that this kernel has begun, and its context."""

    def issued(self, ticket: Ticket) -> Ticket:
        """Return a ticket that the kernel is about to issue, with its context if it is traced."""
        if not tracing.is_on():
            return ticket
        now = round(clock.wall() * 1e9)
        if ticket.exact_version is not None:
            self._evaluations.setdefault(ticket.exact_version, now)
        context = self._of_ticket(ticket.purpose, ticket.id)
        if not tracing.is_sampled(context):
            return ticket
        _, since = self._open.get(context, (ticket, now))
        ticket = msgspec.structs.replace(ticket, traceparent=context)
        self._open[context] = (ticket, since)
        return ticket

    def step(self, start: StartBatch) -> StepTrace:
        """Begin the trace of a step, with links to the traced tickets of its batch. The caller ends its
        span."""
        if not tracing.is_on():
            return UNTRACED
        step = start.version + 1
        context = tracing.root_context(self._run, "step", self._lease_epoch, step)
        every = {self._of_ticket(group.purpose, group.ticket): group for group in start.groups}
        groups = {ticket: group for ticket, group in every.items() if tracing.is_sampled(ticket)}
        span = tracing.root("step", context, links=groups, step=step, tickets=len(every))
        self._newest_step = (step, context)
        return StepTrace(span, step, groups)

    def trained(self, trace: StepTrace, began: float) -> None:
        """End the traces of a step's tickets. Each one gets a span with the number of the step, from the
        step's beginning to now.

        Args:
            began: Unix time at which the step began.
        """
        links, start_ns = [trace.span.traceparent], int(began * 1e9)
        for context, group in trace.groups.items():
            tracing.span("trained", context, links=links, start_ns=start_ns, step=trace.step).end()
            self._end_ticket(context, "trained", group.attempt)

    def retired(self, retired: Retire) -> None:
        """End the trace of a ticket that is not trained, or of an evaluation's row without a result."""
        if tracing.is_on():
            context = self._of_ticket(retired.purpose, retired.ticket)
            if tracing.is_sampled(context):
                self._end_ticket(context, retired.account, retired.attempt, retired.reason)

    def evaluated(self, group: GroupDone) -> None:
        """End the trace of a ticket of an evaluation, unless another attempt has ended it."""
        if tracing.is_on():
            context = self._of_ticket(group.purpose, group.ticket)
            if context in self._open:
                self._end_ticket(context, "evaluated", group.attempt)

    def evaluation_ended(self, evaluation: Evaluation) -> None:
        """End the trace of an evaluation."""
        if tracing.is_on():
            span = tracing.root(
                "evaluation",
                self._of_evaluation(evaluation.version),
                start_ns=self._evaluations.pop(evaluation.version, self._began_ns),
                version=evaluation.version,
                samples=evaluation.samples,
                failed=evaluation.failed,
            )
            if evaluation.accuracy is not None:
                span.set(accuracy=evaluation.accuracy)
            span.end()

    def cause_of_swap(self, version: int, *, exact: bool) -> str:
        """Return the context of what needs a version in the engines: its evaluation if it is for that alone,
        else the step that produced it. Empty for the version that the run begins or resumes with."""
        if exact:
            return self._of_evaluation(version) if tracing.is_on() else ""
        step, context = self._newest_step
        return context if step == version else ""

    def _end_ticket(self, context: str, outcome: str, attempt: int, reason: str = "") -> None:
        """End the root span of a ticket. If a previous kernel issued the ticket, the span begins with this
        kernel."""
        ticket, since = self._open.pop(context, (None, self._began_ns))
        version = ticket.exact_version if ticket is not None else None
        links = [] if version is None else [self._of_evaluation(version)]
        span = tracing.root("ticket", context, links=links, start_ns=since, outcome=outcome, attempt=attempt)
        if ticket is not None:
            span.set(
                ticket=ticket.name, purpose=ticket.purpose, row=ticket.row, min_version=ticket.min_version
            )
        if reason:
            span.set(reason=reason)
        if outcome == "failed":
            span.fail(reason)
        span.end()

    def _of_ticket(self, purpose: Purpose, ticket: int) -> str:
        return tracing.root_context(self._run, purpose, ticket)

    def _of_evaluation(self, version: int) -> str:
        return tracing.root_context(self._run, "evaluation", version)
