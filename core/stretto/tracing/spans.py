"""Spans, as code that is traced begins and ends them. Importing this imports nothing of OpenTelemetry.

A span is begun below the context of another one. The context travels in messages as a W3C `traceparent`,
which is empty where nothing is traced. So a worker traces what the kernel has chosen, and decides nothing
itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import structlog

from stretto.errors import printable

if TYPE_CHECKING:
    from opentelemetry.trace import Span as SDKSpan

    from stretto.config import TracingConfig
    from stretto.tracing.tracer import Tracer

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

log = structlog.get_logger()

Traceparent = Annotated[str, msgspec.Meta(pattern=r"\A(?:00-[0-9a-f]{32}-[0-9a-f]{16}-01)?\Z")]
"""The W3C context of a span, `00-<trace id>-<span id>-01`. Empty: nothing is traced."""

Attribute = str | bool | int | float
_LONGEST_REASON = 300

_tracer: Tracer | None = None
"""The tracer of this process; None in a run without tracing."""


class Span:
    """A span under way, or `NO_SPAN`, which has no context and records nothing.

    A `with` block ends it. An exception marks it as failed; a cancellation sets its attribute `cancelled`.
    """

    __slots__ = ("sdk_span", "traceparent")

    def __init__(self, sdk_span: SDKSpan | None, traceparent: str) -> None:
        self.sdk_span = sdk_span
        self.traceparent = traceparent
        """Context for spans below this one; empty for `NO_SPAN`."""

    def set(self, **attributes: Attribute) -> None:
        """Add attributes. After `end` this does nothing."""
        if self.sdk_span is not None and self.sdk_span.is_recording():
            self.sdk_span.set_attributes(attributes)

    def event(self, name: str, **attributes: Attribute) -> None:
        """Record that something happened now."""
        if self.sdk_span is not None:
            self.sdk_span.add_event(name, attributes)

    def fail(self, reason: str) -> None:
        """Mark the span as failed."""
        if self.sdk_span is not None:
            from opentelemetry.trace import StatusCode

            self.sdk_span.set_status(StatusCode.ERROR, printable(reason[:_LONGEST_REASON]))

    def end(self) -> None:
        """End the span now. Ending it twice does nothing."""
        if self.sdk_span is not None and self.sdk_span.is_recording():
            self.sdk_span.end()

    def __enter__(self) -> Span:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception):
            self.fail(f"{type(error).__name__}: {error}")
        elif error is not None:
            self.set(cancelled=True)
        self.end()


NO_SPAN = Span(None, "")


@contextmanager
def traced(
    config: TracingConfig | None, process: str, run: str, name: str, folder: Path | None
) -> Generator[None]:
    """Trace this process in the block, if the run is traced. At its end, send the spans that are left; this
    takes 2 seconds at most.

    Args:
        process: id of the worker, or `kernel`.
        run: id of the run.
        name: the run's name.
        folder: the run's folder; None in a process that does not see it.
    """
    global _tracer
    if config is None:
        yield
        return
    if config.endpoint is None and folder is None:
        log.warning(
            "this process is not traced",
            reason="it does not see the run's folder; set tracing.endpoint",
        )
        yield
        return
    from stretto.tracing.tracer import Tracer

    _tracer = Tracer(config, process, run, name, folder)
    try:
        yield
    finally:
        tracer, _tracer = _tracer, None
        tracer.close()


def is_on() -> bool:
    """Return whether this process is traced."""
    return _tracer is not None


def current() -> str:
    """Return the context of the span that this task is in; empty if there is none."""
    return "" if _tracer is None else _tracer.current()


def span(
    name: str,
    parent: str | None = None,
    *,
    links: Iterable[str] = (),
    start_ns: int | None = None,
    **attributes: Attribute,
) -> Span:
    """Begin a span. End it with `end`, or use it in a `with` block.

    Args:
        parent: context that came with a message; None for the current span (see `within`).
        links: contexts of other traces that the span belongs to.
        start_ns: when it began, in nanoseconds of Unix time; None for now.
    """
    if _tracer is None:
        return NO_SPAN
    parent = _tracer.current() if parent is None else parent
    return _tracer.begin(name, parent, links, start_ns, attributes) if parent else NO_SPAN


def within(span: Span) -> AbstractContextManager[Span]:
    """Make a span the current one in the block, for plugins' spans among others, and end it with the
    block."""
    return span if _tracer is None or span is NO_SPAN else _within(_tracer, span)


@contextmanager
def _within(tracer: Tracer, span: Span) -> Generator[Span]:
    with span, tracer.made_current(span):
        yield span


def root_context(*scope: object) -> str:
    """Return the context of a root span. It follows from the scope alone, so that every kernel of a run can
    name the trace of a ticket, and a resumed run ends the trace that the previous kernel began."""
    digest = hashlib.sha256("/".join(map(str, scope)).encode()).hexdigest()
    return f"00-{digest[:32]}-{digest[32:48]}-01"


def is_sampled(root_context: str) -> bool:
    """Return whether the trace that this root begins is recorded."""
    return _tracer is not None and _tracer.is_sampled(root_context)


def root(
    name: str,
    context: str,
    *,
    links: Iterable[str] = (),
    start_ns: int | None = None,
    **attributes: Attribute,
) -> Span:
    """Begin the root span with this context (see `root_context`). The caller ends it."""
    if _tracer is None:
        return NO_SPAN
    return _tracer.begin_root(name, context, links, start_ns, attributes)
