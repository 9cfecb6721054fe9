"""A traced run: what a collector gets of it."""

from __future__ import annotations

import json
import textwrap
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from fixture_types import Start

STEPS = 6
WORKFLOW = """
from opentelemetry import trace
from stretto import Component, hookimpl
from stretto.tools import ToolsConfig
from stretto.workflow import Trajectory

class Config(ToolsConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass

class Flow:
    def __init__(self, config, context): pass
    async def run(self, prompt, session):
        n = prompt.row["n"]
        if n % 9 == 4: raise RuntimeError("no luck")
        with trace.get_tracer("mine").start_as_current_span("preparation"):
            await session.call("add" if n % 2 else "nothing", {"a": n})
        chat = session.conversation(prompt.row["prompt"])
        await chat.reply()
        answers = await session.generate(prompt.ids, n=session.group_size)
        scores = await session.score(prompt, answers)
        return [Trajectory.of(prompt.ids, answer, score) for answer, score in zip(answers, scores)]

@hookimpl
def stretto_workflow():
    yield Component("flow", Flow, Config, "calls a tool and samples twice")
"""
PARTS = """
def add(a: int) -> int:
    "One more."
    return a + 1
"""


@dataclass
class Spans:
    """The spans of a run, as the collector has received them."""

    all: list[Any]
    service: dict[bytes, str]
    """Span id -> service."""

    def named(self, name: str) -> list[Any]:
        return [span for span in self.all if span.name == name]

    @property
    def traces(self) -> dict[bytes, list[Any]]:
        traces: dict[bytes, list[Any]] = defaultdict(list)
        for span in self.all:
            traces[span.trace_id].append(span)
        return traces


def facts(span: Any) -> dict[str, Any]:
    """The attributes of a span."""
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


class Collector(ThreadingHTTPServer):
    """An OTLP/HTTP collector that keeps what it gets."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[ExportTraceServiceRequest] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def spans(self) -> Spans:
        spans, services = list[Any](), dict[bytes, str]()
        for resource_spans in (each for request in self.requests for each in request.resource_spans):
            service = next(
                each for each in resource_spans.resource.attributes if each.key == "service.name"
            ).value.string_value
            for span in (span for scope in resource_spans.scope_spans for span in scope.spans):
                spans.append(span)
                services[span.span_id] = service
        return Spans(spans, services)


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert isinstance(self.server, Collector)
        self.server.requests.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        del format, arguments


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    server = Collector()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def run(module_start: Start, collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A completed run with evaluations, whose workflow calls a tool and samples twice."""
    folder = tmp_path_factory.mktemp("code")
    (folder / "flow.py").write_text(textwrap.dedent(WORKFLOW))
    (folder / "parts.py").write_text(PARTS)
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1), "n": n} for n in range(5)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = module_start(
        f"plugins=[{folder}/flow.py]",
        f"workflow={{use: flow, tools: ['{folder}/parts.py:add']}}",
        f"evaluation.dataset={{use: jsonl, path: {folder}/rows.jsonl}}",
        "evaluation.every=3",
        f"tracing.endpoint={collector.endpoint}/",
        f"steps={STEPS}",
        "queue.max_failures=1000",
    )
    run.assert_completed(STEPS)
    return run


@pytest.fixture(scope="module")
def spans(run: Any, collector: Collector) -> Spans:
    del run
    return collector.spans()


def test_every_span_has_its_parent_and_only_tickets_steps_and_evaluations_have_none(spans: Spans) -> None:
    for trace in spans.traces.values():
        by_id = {span.span_id: span for span in trace}
        assert len(by_id) == len(trace)
        [root] = [span for span in trace if not span.parent_span_id]
        assert root.name in ("ticket", "step", "evaluation")
        for span in trace:
            assert span is root or span.parent_span_id in by_id, span.name
            assert span.start_time_unix_nano <= span.end_time_unix_nano


def test_the_trace_of_a_trained_ticket_has_all_its_parts_and_reaches_the_step(spans: Spans) -> None:
    steps = {facts(span)["step"]: span for span in spans.named("step")}
    assert sorted(steps) == list(range(1, STEPS + 1))
    trained: Counter[int] = Counter()
    for trace in spans.traces.values():
        root = next(span for span in trace if not span.parent_span_id)
        if root.name != "ticket" or facts(root)["outcome"] != "trained":
            continue
        by_name = {span.name: span for span in trace}
        assert {"rollout", "request", "tool", "preparation", "reward"} <= by_name.keys()
        for name in ("tool", "reward", "request", "preparation"):
            assert by_name[name].parent_span_id == by_name["rollout"].span_id, name
        requests = {span.span_id for span in trace if span.name == "request"}
        assert {span.parent_span_id for span in trace if span.name == "generate"} == requests
        assert len(requests) == 2
        assert by_name["trained"].end_time_unix_nano <= by_name["ticket"].end_time_unix_nano
        step = steps[facts(by_name["trained"])["step"]]
        [link] = by_name["trained"].links
        assert (link.trace_id, link.span_id) == (step.trace_id, step.span_id)
        trained[facts(step)["step"]] += 1
        # From the step one comes back to the ticket, and so from the call that trained it.
        of_step = spans.traces[step.trace_id]
        [train] = [span for span in of_step if span.name.startswith("call train")]
        for span in (step, train):
            assert (root.trace_id, root.span_id) in {(each.trace_id, each.span_id) for each in span.links}
        [optimizer_step] = [span for span in of_step if span.name == "optimizer step"]
        assert optimizer_step.parent_span_id == train.span_id
    assert trained == dict.fromkeys(steps, 4)


def test_each_process_writes_its_own_part(spans: Spans) -> None:
    services: dict[str, set[str]] = defaultdict(set)
    for span in spans.all:
        services[spans.service[span.span_id]].add(span.name)
    of_steps = {"step", "trained", "engine figures"}
    assert services["stretto-kernel"] == {"ticket", "swap", "evaluation", *of_steps}
    assert services["stretto-rollout"] == {"rollout", "request", "preparation"}
    assert services["stretto-inference"] == {"generate", "engine swap"}
    assert services["stretto-verifier"] == {"tool", "reward"}
    assert {"optimizer step", "publish"} < services["stretto-trainer"]


def test_a_request_shows_its_engine_its_first_token_and_what_it_sampled(spans: Spans) -> None:
    for span in spans.named("request"):
        assert {event.name for event in span.events} == {"engine chosen"}
    ended = spans.named("generate")
    assert all(("dropped" in facts(span)) == (facts(span).get("finish") == "abort") for span in ended)
    finished = [span for span in ended if "dropped" not in facts(span)]
    # An engine may finish what another one continues, because it is about to be lent to an evaluation.
    assert {span.parent_span_id for span in finished} == {span.span_id for span in spans.named("request")}
    for span in finished:
        assert [event.name for event in span.events] == ["first token"]
        assert facts(span)["tokens"] >= facts(span)["samples"] >= 1
        assert 0 <= facts(span)["oldest"] <= facts(span)["newest"] <= STEPS


def test_failures_are_errors_with_their_reason(run: Any, spans: Spans) -> None:
    failed = [span for span in spans.named("ticket") if facts(span)["outcome"] == "failed"]
    ledger = run.summary()["ledger"]
    assert len([span for span in failed if facts(span)["purpose"] == "train"]) == ledger["failed"] > 0
    for span in failed:
        assert span.status.code == Status.STATUS_CODE_ERROR
        assert "no luck" in span.status.message
    for span in spans.named("tool"):
        assert (span.status.code == Status.STATUS_CODE_ERROR) == (facts(span)["tool"] == "nothing")


def test_an_evaluation_has_a_trace_and_its_tickets_link_to_it(run: Any, spans: Spans) -> None:
    evaluations = {facts(span)["version"]: span for span in spans.named("evaluation")}
    assert sorted(evaluations) == sorted(line["step"] for line in run.evaluations()) == [0, 3, 6]
    tickets = [span for span in spans.named("ticket") if facts(span)["purpose"] == "eval"]
    for version, evaluation in evaluations.items():
        linked = [span for span in tickets if span.links[0].span_id == evaluation.span_id]
        assert len(linked) == 5
        assert {facts(span)["min_version"] for span in linked} == {version}


def test_a_swap_is_in_the_trace_of_its_step(spans: Spans) -> None:
    by_id = {span.span_id: span for span in spans.all}
    for span in spans.named("engine swap"):
        swap = by_id[span.parent_span_id]
        cause = by_id[swap.parent_span_id]
        assert facts(cause)["step" if cause.name == "step" else "version"] == facts(span)["served"]
    assert {by_id[span.parent_span_id].name for span in spans.named("swap")} >= {"step"}


@pytest.mark.slow
def test_a_collector_that_is_gone_neither_slows_nor_ends_a_run(start: Start, tmp_path: Path) -> None:
    del tmp_path
    run = start("tracing.endpoint=http://127.0.0.1:1", "steps=4")
    run.assert_completed(4)
    for log in ("kernel", "rollout-0", "inference-0", "trainer-0", "verifier-0"):
        lines = (run.folder / "logs" / f"{log}.jsonl").read_text().splitlines()
        assert len([line for line in lines if "opentelemetry" in line]) == 1
