"""The contexts of a run's traces: one for each ticket in the traced share, each step and each evaluation.

The ids of a ticket's trace follow from the run and the ticket's number: the trace continues when the kernel
issues the ticket again, also after a resume. So whoever knows the ticket names its trace, and the observer of
the events ends it (`stretto.observe.traces`). A step that `resume` repeats has no trace of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from stretto import tracing
from stretto.bus.messages.tickets import Purpose, Ticket
from stretto.kernel.schedule.commands import StartBatch


@dataclass(frozen=True)
class StepTrace:
    """The trace of one step."""

    span: tracing.Span
    tickets: Sequence[str]
    """Contexts of the traced tickets of the batch."""


UNTRACED = StepTrace(tracing.NO_SPAN, ())


def ticket_context(run: str, purpose: Purpose, ticket: int) -> str:
    """Return the context of a ticket; empty if it is not traced."""
    context = tracing.root_context(run, purpose, ticket) if tracing.is_on() else ""
    return context if context and tracing.is_sampled(context) else ""


def evaluation_context(run: str, version: int) -> str:
    """Return the context of a held-out evaluation."""
    return tracing.root_context(run, "evaluation", version)


def step_context(run: str, lease_epoch: int, step: int) -> str:
    """Return the context of a step of a kernel. The number of a step is the version that it produces."""
    return tracing.root_context(run, "step", lease_epoch, step)


class TraceContexts:
    """The contexts that one kernel puts into its messages. Without tracing they are empty."""

    def __init__(self, run: str, lease_epoch: int) -> None:
        self._run = run
        self._lease_epoch = lease_epoch
        self._newest_step = (0, "")
        """Number of the newest step that this kernel has begun, and its context."""

    def issued(self, ticket: Ticket) -> Ticket:
        """Return a ticket that the kernel is about to issue, with its context if it is traced."""
        context = ticket_context(self._run, ticket.purpose, ticket.id)
        return msgspec.structs.replace(ticket, traceparent=context) if context else ticket

    def step(self, start: StartBatch) -> StepTrace:
        """Begin the trace of a step, with links to the traced tickets of its batch. The caller ends its
        span."""
        if not tracing.is_on():
            return UNTRACED
        step = start.version + 1
        context = step_context(self._run, self._lease_epoch, step)
        every = [ticket_context(self._run, group.purpose, group.ticket) for group in start.groups]
        traced = [each for each in every if each]
        self._newest_step = (step, context)
        return StepTrace(tracing.root("step", context, links=traced, step=step, tickets=len(every)), traced)

    def cause_of_swap(self, version: int, *, exact: bool) -> str:
        """Return the context of what needs a version in the engines: its evaluation if it is for that alone,
        else the step that produced it. Empty for the version that the run begins or resumes with."""
        if exact:
            return evaluation_context(self._run, version) if tracing.is_on() else ""
        step, context = self._newest_step
        return context if step == version else ""
