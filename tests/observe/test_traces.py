"""The traces that a kernel begins and ends: the share, a resumed run, and collectors that do not answer."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import textwrap
import time
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from google.protobuf import json_format
from opentelemetry import trace as trace_api
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Link, StatusCode

from kernel_events import step_measured
from stretto import tracing
from stretto.bus.messages.events import Event, KernelBegan
from stretto.bus.messages.tickets import GroupDone, Member, Ticket
from stretto.config import TracingConfig
from stretto.kernel.contexts import UNTRACED, TraceContexts
from stretto.kernel.schedule.commands import Command, Issue, Retire, StartBatch
from stretto.kernel.schedule.fold import decisions
from stretto.observe.traces import RunTraces
from stretto.tracing.files import FileExporter

TICKETS = 2000


def spans_in(folder: Path) -> list[dict[str, Any]]:
    """All spans in the files of a run."""
    lines = [line for file in (folder / "traces").iterdir() for line in file.read_text().splitlines()]
    return [
        span
        for line in lines
        for resource in json.loads(line)["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]


def ticket(id: int, attempt: int = 1) -> Ticket:
    return Ticket(id, attempt, "train", row=id, min_version=0, samples=1)


def done(ticket: Ticket) -> GroupDone:
    member = Member(f"{ticket.name}/0", 1, 0, 9, 5, 0, 0, 1.0, {}, "stop")
    return GroupDone("train", ticket.id, ticket.attempt, "rollout-0", (member,), 0.1)


class TracedKernel:
    """What a kernel does for its traces: it gives out contexts, and its events end the traces."""

    def __init__(self, lease_epoch: int) -> None:
        self.contexts = TraceContexts("run-1", lease_epoch)
        self.traces = RunTraces("run-1")
        self.hear(KernelBegan(lease_epoch, 0, 0.0))

    def hear(self, *events: Event) -> None:
        for event in events:
            self.traces.take(time.time(), event)

    def decide(self, *commands: Command) -> None:
        self.hear(*decisions(commands))

    def issue(self, ticket: Ticket) -> Ticket:
        """The ticket as the rollout workers get it."""
        self.decide(Issue(ticket))
        return self.contexts.issued(ticket)

    def train(self, start: StartBatch) -> None:
        """The step of a batch is complete."""
        self.hear(step_measured(start.version + 1, time.time(), tuple(each.ticket for each in start.groups)))


def facts(span: dict[str, Any]) -> dict[str, Any]:
    return {each["key"]: next(iter(each["value"].values())) for each in span["attributes"]}


def test_a_quarter_of_the_tickets_is_traced_and_of_the_others_nothing(tmp_path: Path) -> None:
    with tracing.traced(TracingConfig(share=0.25), "rollout-0", "run-1", "test", tmp_path):
        tracer = trace_api.get_tracer("a plugin")
        kernel = TracedKernel(1)
        issued = [kernel.issue(ticket(id)) for id in range(TICKETS)]
        start = StartBatch(0, tuple(done(each) for each in issued), (0,) * len(issued))
        kernel.decide(start)
        trace = kernel.contexts.step(start)
        for each in issued:
            with tracing.within(tracing.span("rollout", each.traceparent)):
                tracer.start_span("of a plugin").end()
        kernel.train(start)
        trace.span.end()
    traced = {each.traceparent for each in issued} - {""}
    assert 0.21 * TICKETS < len(traced) < 0.29 * TICKETS
    assert set(trace.tickets) == traced
    spans = spans_in(tmp_path)
    names = [span["name"] for span in spans]
    assert {name: names.count(name) for name in names} == {
        "step": 1,
        **dict.fromkeys(("ticket", "rollout", "of a plugin", "trained"), len(traced)),
    }
    assert {span["traceId"] for span in spans if span["name"] != "step"} == {
        context.split("-")[1] for context in traced
    }
    [step] = [span for span in spans if span["name"] == "step"]
    assert len(step["links"]) == len(traced)
    for span in spans:
        if span["name"] == "trained":
            assert [link["spanId"] for link in span["links"]] == [step["spanId"]]


def test_a_step_ends_its_own_tickets_although_the_next_batch_has_begun(tmp_path: Path) -> None:
    with tracing.traced(TracingConfig(), "kernel", "run-1", "test", tmp_path):
        kernel = TracedKernel(1)
        batches = [
            StartBatch(version, (done(kernel.issue(ticket(version))),), (version,)) for version in (0, 1)
        ]
        for batch in batches:
            kernel.decide(batch)
        for batch in batches:
            kernel.train(batch)
    trained = [span for span in spans_in(tmp_path) if span["name"] == "trained"]
    contexts = [ticket_context_of(version) for version in (0, 1)]
    assert [span["traceId"] for span in trained] == contexts
    assert [facts(span)["step"] for span in trained] == ["1", "2"]


def test_the_ticket_of_an_evaluation_has_the_name_that_workers_log(tmp_path: Path) -> None:
    with tracing.traced(TracingConfig(), "kernel", "run-1", "test", tmp_path):
        kernel = TracedKernel(1)
        issued = kernel.issue(msgspec.structs.replace(ticket(7), purpose="eval"))
        kernel.decide(Retire("eval", 7, 1, "failed", "no luck"))
    [span] = spans_in(tmp_path)
    assert facts(span)["ticket"] == issued.name == "eval-7/1"


def ticket_context_of(id: int) -> str:
    """The id of the trace of a training ticket."""
    return tracing.root_context("run-1", "train", id).split("-")[1]


def test_a_resumed_kernel_ends_the_traces_that_the_former_one_began(tmp_path: Path) -> None:
    config = TracingConfig()
    with tracing.traced(config, "kernel", "run-1", "test", tmp_path):
        kernel = TracedKernel(1)
        first, second = kernel.issue(ticket(7)), kernel.issue(ticket(8))
        with tracing.span("rollout", first.traceparent):
            pass
    with tracing.traced(config, "kernel", "run-1", "test", tmp_path):
        kernel = TracedKernel(2)
        again = kernel.issue(ticket(7, 1001))
        kernel.decide(Retire("train", 7, 1001, "failed", "\x1b[31mno luck"))
        kernel.decide(Retire("train", 8, 1, "expired", "late"))
    assert again.traceparent == first.traceparent != second.traceparent
    rollout, seven, eight = spans_in(tmp_path)
    assert rollout["traceId"] == seven["traceId"]
    assert rollout["parentSpanId"] == seven["spanId"]
    assert "parentSpanId" not in seven
    assert facts(seven)["ticket"] == "7/1001"
    assert seven["status"] == {"code": 2, "message": r"\x1b[31mno luck"}
    assert facts(eight)["outcome"] == "expired"
    assert eight["status"]["code"] == 0


def test_without_tracing_nothing_is_recorded_and_messages_have_no_context(tmp_path: Path) -> None:
    with tracing.traced(None, "kernel", "run-1", "test", tmp_path):
        kernel = TracedKernel(1)
        assert kernel.issue(ticket(1)) == ticket(1)
        start = StartBatch(0, (done(ticket(1)),), (0,))
        kernel.decide(start)
        assert kernel.contexts.step(start) is UNTRACED
        kernel.train(start)
        with tracing.span("rollout", f"00-{'a' * 32}-{'b' * 16}-01") as span:
            assert span is tracing.NO_SPAN
            assert tracing.current() == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "traceparent",
    ["x", "00-" + "a" * 32 + "-" + "b" * 16 + "-01\n", "00-" + "A" * 32 + "-" + "b" * 16 + "-01"],
)
def test_a_message_with_another_text_in_place_of_a_context_is_refused(traceparent: str) -> None:
    message = msgspec.structs.replace(ticket(1), traceparent=traceparent)
    with pytest.raises(msgspec.ValidationError, match="matching regex"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Ticket)


SENDER = """
import sys, time
from pathlib import Path
from stretto import tracing
from stretto.assembly.logs import log_to
from stretto.config import TracingConfig

folder = Path(sys.argv[2])
log_to(folder / "log.jsonl")
began = time.monotonic()
with tracing.traced(TracingConfig(endpoint=sys.argv[1]), "rollout-0", "run-1", "test", folder):
    parent = tracing.root_context("run-1", "train", 1)
    longest = 0.0
    while time.monotonic() - began < 1.5:
        before = time.monotonic()
        with tracing.span("rollout", parent, ticket="1/1"):
            pass
        longest = max(longest, time.monotonic() - before)
        time.sleep(0.0001)
    ended = time.monotonic()
print(longest, time.monotonic() - ended)
"""


@pytest.fixture(params=["refuses", "is silent"])
def endpoint(request: pytest.FixtureRequest) -> Iterator[str]:
    """A collector that takes nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if request.param == "refuses":
            server.close()
        yield f"http://127.0.0.1:{port}"


def test_a_collector_that_takes_nothing_delays_nothing_and_is_said_once(
    endpoint: str, tmp_path: Path
) -> None:
    environment = {**os.environ, "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SENDER), endpoint, str(tmp_path)],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    longest_s, end_s = map(float, run.stdout.split())
    assert longest_s < 1.0  # a span that waited for the collector would take its timeout
    assert end_s < 2.5
    [line] = (tmp_path / "log.jsonl").read_text().splitlines()
    assert json.loads(line)["event"] == "traces are incomplete; this is logged once"
    assert run.stderr == ""


def test_a_line_of_the_file_is_what_the_official_encoder_writes(tmp_path: Path) -> None:
    memory = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    tracer = provider.get_tracer("stretto")
    with tracer.start_as_current_span("root", attributes={"a": 1, "b": True, "c": "é\n", "d": 0.5}) as root:
        root.add_event("first token", {"sample": 3})
        link = Link(root.get_span_context(), {"why": "its own"})
        with tracer.start_as_current_span("child", links=[link], attributes={"list": ["x", "y"]}) as child:
            child.set_status(StatusCode.ERROR, "no luck")
    spans = memory.get_finished_spans()
    exporter = FileExporter(tmp_path / "traces" / "kernel.jsonl")
    exporter.export(spans)
    exporter.shutdown()
    [line] = (tmp_path / "traces" / "kernel.jsonl").read_text().splitlines()
    # OTLP JSON has ids in hex, where other messages of protobuf have base64.
    in_base64 = re.sub(
        r'"(traceId|spanId|parentSpanId)":"([0-9a-f]+)"',
        lambda found: f'"{found[1]}":"{b64encode(bytes.fromhex(found[2])).decode()}"',
        line,
    )
    assert json_format.Parse(in_base64, ExportTraceServiceRequest()) == encode_spans(spans)
