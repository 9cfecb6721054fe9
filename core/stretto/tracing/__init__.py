"""Traces of a run for OpenTelemetry: which process worked on a ticket, a step or an evaluation, and when.

A process has one tracer, as it has one log. Without `tracing` in the run file it has none; then no span costs
more than a test, and nothing imports the SDK. Core alone uses this package. Plugins use OpenTelemetry's own
API: their spans join the trace of the ticket that they work for.
"""

from stretto.tracing.spans import (
    NO_SPAN,
    Span,
    Traceparent,
    current,
    is_on,
    is_sampled,
    root,
    root_context,
    span,
    traced,
    within,
)

__all__ = [
    "NO_SPAN",
    "Span",
    "Traceparent",
    "current",
    "is_on",
    "is_sampled",
    "root",
    "root_context",
    "span",
    "traced",
    "within",
]
