"""The tracer of a process, made of OpenTelemetry's SDK. Only a traced run imports it.

The SDK batches ended spans and exports them in a thread of its own. When it cannot export them as fast as
they come, it drops spans: neither the run nor its end waits for a collector.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import (
    ALWAYS_OFF,
    ALWAYS_ON,
    ParentBased,
    Sampler,
    SamplingResult,
    TraceIdRatioBased,
)
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, TraceFlags

from stretto.tracing.files import FileExporter
from stretto.tracing.spans import Attribute, Span

if TYPE_CHECKING:
    from stretto.config import TracingConfig

__all__ = ["Tracer"]

log = structlog.get_logger()

_CLOSE_S = 2.0
"""Time for the last spans of a process."""
_PATH = "/v1/traces"
_LIMITS = SpanLimits(max_links=1 << 16, max_attribute_length=1000)
"""A step links to every traced ticket of its batch. Some attributes are texts from tools and rewards."""


class Tracer:
    """The tracer of this process. Make it once and close it at the end of the process's work."""

    def __init__(self, config: TracingConfig, process: str, run: str, name: str, folder: Path | None) -> None:
        self._ids = _Ids()
        self._ratio = TraceIdRatioBased(config.share)
        self._complaints = _Complaints()
        logger = logging.getLogger("opentelemetry")
        logger.handlers, logger.propagate = [self._complaints], False
        resource = Resource.create(
            {
                "service.name": f"stretto-{process.partition('-')[0]}",
                "service.namespace": name,
                "service.instance.id": process,
                "stretto.run": run,
            }
        )
        self._provider = TracerProvider(
            ParentBased(_OwnRoots(self._ids)),
            resource,
            shutdown_on_exit=False,
            id_generator=self._ids,
            span_limits=_LIMITS,
        )
        self._provider.add_span_processor(BatchSpanProcessor(_exporter(config, process, folder)))
        self._tracer = self._provider.get_tracer("stretto")
        if process != "kernel":
            # For the spans of plugins. A process has this provider for its life, but may run several kernels.
            trace.set_tracer_provider(self._provider)

    def is_sampled(self, root_context: str) -> bool:
        """Return whether the trace of this root is in the traced share. It follows from the trace id."""
        return self._ratio.should_sample(None, _parsed(root_context).trace_id, "").decision.is_sampled()

    def current(self) -> str:
        """Return the context of the current span; empty if there is none."""
        context = trace.get_current_span().get_span_context()
        return _formatted(context) if context.is_valid else ""

    def begin(
        self,
        name: str,
        parent: str,
        links: Iterable[str],
        start_ns: int | None,
        attributes: Mapping[str, Attribute],
    ) -> Span:
        """Begin a span below another one."""
        below = trace.set_span_in_context(NonRecordingSpan(_parsed(parent)))
        span = self._tracer.start_span(
            name, below, attributes=attributes, links=_links(links), start_time=start_ns
        )
        return Span(span, _formatted(span.get_span_context()))

    def begin_root(
        self,
        name: str,
        context: str,
        links: Iterable[str],
        start_ns: int | None,
        attributes: Mapping[str, Attribute],
    ) -> Span:
        """Begin the root span with this context."""
        with self._ids.given(_parsed(context)):
            nowhere = trace.set_span_in_context(trace.INVALID_SPAN)
            span = self._tracer.start_span(
                name, nowhere, attributes=attributes, links=_links(links), start_time=start_ns
            )
        return Span(span, context)

    def made_current(self, span: Span) -> AbstractContextManager[Any]:
        """Make a span the current one in a block."""
        assert span.sdk_span is not None
        return trace.use_span(span.sdk_span, record_exception=False, set_status_on_exception=False)

    def close(self) -> None:
        """Export the spans that are left, for at most `_CLOSE_S` seconds; at once give up a collector that
        does not answer."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        deadline = time.monotonic() + _CLOSE_S
        while closing.is_alive() and time.monotonic() < deadline and not self._complaints.unreachable:
            closing.join(0.02)


class _Ids(RandomIdGenerator):
    """Random ids, and given ones for root spans."""

    def __init__(self) -> None:
        self._given: ContextVar[SpanContext | None] = ContextVar("given", default=None)

    @contextmanager
    def given(self, context: SpanContext) -> Generator[None]:
        """Give the root span that is begun in the block the ids of a context."""
        token = self._given.set(context)
        try:
            yield
        finally:
            self._given.reset(token)

    @property
    def are_given(self) -> bool:
        """Whether this is inside a block of `given`."""
        return self._given.get() is not None

    def generate_trace_id(self) -> int:
        given = self._given.get()
        return super().generate_trace_id() if given is None else given.trace_id

    def generate_span_id(self) -> int:
        given = self._given.get()
        return super().generate_span_id() if given is None else given.span_id


class _OwnRoots(Sampler):
    """Samples the root spans of stretto. A plugin's span without a parent, as in a ticket that is not traced,
    is none of them."""

    def __init__(self, ids: _Ids) -> None:
        self._ids = ids

    def should_sample(self, *arguments: Any, **options: Any) -> SamplingResult:
        return (ALWAYS_ON if self._ids.are_given else ALWAYS_OFF).should_sample(*arguments, **options)

    def get_description(self) -> str:
        return "roots of stretto"


class _Complaints(logging.Handler):
    """Passes the SDK's first warning on to the log. Later ones would follow every few seconds."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.unreachable = False
        """The exporter has failed to send spans."""
        self._said = False

    def emit(self, record: logging.LogRecord) -> None:
        if not self._said:
            self._said = True
            log.warning(
                "traces are incomplete; this is logged once",
                reason=record.getMessage()[:500],
                logger=record.name,
            )
        # After the line: once it is set, the process may end.
        self.unreachable |= record.name.startswith("opentelemetry.exporter")


def _exporter(config: TracingConfig, process: str, folder: Path | None) -> SpanExporter:
    if config.endpoint is None:
        assert folder is not None, "`traced` has looked"
        return FileExporter(folder / "traces" / f"{process}.jsonl")
    return OTLPSpanExporter(config.endpoint.rstrip("/").removesuffix(_PATH) + _PATH)


def _parsed(traceparent: str) -> SpanContext:
    _, trace_id, span_id, _ = traceparent.split("-")
    return SpanContext(int(trace_id, 16), int(span_id, 16), True, TraceFlags(TraceFlags.SAMPLED))


def _formatted(context: SpanContext) -> str:
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-01"


def _links(contexts: Iterable[str]) -> list[Link]:
    return [Link(_parsed(context)) for context in contexts]
