"""Spans as lines of OTLP JSON in a file, which collectors and Jaeger read.

The SDK's own file exporter is a beta that pins betas of other packages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import Link, SpanContext

__all__ = ["FileExporter"]

_HAS_REMOTE, _IS_REMOTE = 0x100, 0x200
"""Flags of a span or a link: the process knows whether the parent, or the other end, is in another process;
it is."""


class FileExporter(SpanExporter):
    """Appends each batch of spans to a file, as one line."""

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(exist_ok=True)
        self._file = file.open("ab", buffering=0)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Append spans of one process, and return whether that succeeded.

        Raises:
            OSError: if the file cannot be written. The SDK logs it and continues.
        """
        scopes: dict[str, list[dict[str, Any]]] = {}
        for span in spans:
            scope = span.instrumentation_scope
            scopes.setdefault(scope.name if scope else "", []).append(_span(span))
        line = {
            "resourceSpans": [
                {
                    "resource": {"attributes": _attributes(spans[0].resource.attributes)},
                    "scopeSpans": [
                        {"scope": {"name": name}, "spans": found} for name, found in scopes.items()
                    ],
                }
            ]
        }
        self._file.write(msgspec.json.encode(line) + b"\n")
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Close the file."""
        self._file.close()


def _span(span: ReadableSpan) -> dict[str, Any]:
    context, parent = span.get_span_context(), span.parent
    assert context is not None
    found: dict[str, Any] = {
        **_ids(context),
        "name": span.name,
        "kind": span.kind.value + 1,
        "startTimeUnixNano": str(span.start_time),
        "endTimeUnixNano": str(span.end_time),
        "flags": _flags(parent),
        "status": {"code": span.status.status_code.value, "message": span.status.description or ""},
    }
    if parent is not None:
        found["parentSpanId"] = f"{parent.span_id:016x}"
    if span.attributes:
        found["attributes"] = _attributes(span.attributes)
    if span.events:
        found["events"] = [_event(event) for event in span.events]
    if span.links:
        found["links"] = [_link(link) for link in span.links]
    return found


def _event(event: Event) -> dict[str, Any]:
    return {
        "name": event.name,
        "timeUnixNano": str(event.timestamp),
        "attributes": _attributes(event.attributes or {}),
    }


def _link(link: Link) -> dict[str, Any]:
    return {
        **_ids(link.context),
        "attributes": _attributes(link.attributes or {}),
        "flags": _flags(link.context),
    }


def _flags(other: SpanContext | None) -> int:
    return _HAS_REMOTE | (_IS_REMOTE if other is not None and other.is_remote else 0)


def _ids(context: SpanContext) -> dict[str, Any]:
    return {"traceId": f"{context.trace_id:032x}", "spanId": f"{context.span_id:016x}"}


def _attributes(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in attributes.items()]


def _value(value: Any) -> dict[str, Any]:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float() if math.isfinite(value):
            return {"doubleValue": value}
        case list() | tuple():
            return {"arrayValue": {"values": [_value(each) for each in value]}}
        case _:
            return {"stringValue": str(value)}
