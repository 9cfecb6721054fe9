"""One real run of the mock engines, as Prometheus, Grafana and Perfetto see it."""

import json
import stat
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import promql_parser
import psutil
import pytest
import yaml
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TracePacket, TrackDescriptor, TrackEvent
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families

from commands import stretto
from patience import patience
from stretto.bus.messages.events import CAUSES
from stretto.observe.prometheus import gauge_of
from stretto.records.run_folder import RunFolder

DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana" / "stretto.json"
STEPS, BATCH, SAMPLES = 6, 4, 4

pytestmark = pytest.mark.slow  # all of one run of real processes

SLOW = """
import time

def score(prompt, completion, answer):
    time.sleep(0.4 if "+2=" in prompt else 0)  # so that scrapes fall into the last evaluation
    right = float(completion == answer)
    return {"reward": right, "accuracy": right}
"""


class Scrape:
    def __init__(self, text: str) -> None:
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self.samples = [sample for family in self.families.values() for sample in family.samples]

    def values(self, name: str) -> list[float]:
        return [sample.value for sample in self.samples if sample.name == f"stretto_{name}"]

    def __call__(self, name: str) -> float:
        [value] = self.values(name)
        return value

    def by(self, name: str, label: str) -> dict[str, float]:
        found = [sample for sample in self.samples if sample.name == f"stretto_{name}"]
        return {sample.labels[label]: sample.value for sample in found}


def read(url: str, accept: str = "") -> tuple[str, str]:
    request = urllib.request.Request(url, headers={"Accept": accept} if accept else {})
    with urllib.request.urlopen(request, timeout=patience()) as answer:
        return answer.read().decode(), answer.headers["Content-Type"]


class Watched:
    """A finished run, and the scrapes from its beginning to its end."""

    def __init__(self, run: Any) -> None:
        self.run = run
        self.folder: Path = run.folder
        self.scrapes: list[Scrape] = []
        self.open_metrics = ""
        url = run.until(self._url)
        trainer = run.until(lambda: run.worker("trainer-0"))
        while run.process.poll() is None:
            try:
                self.scrapes.append(last := Scrape(read(url)[0]))
                self.open_metrics, self.open_type = read(url, "application/openmetrics-text; version=1.0.0")
            except OSError:  # the kernel closes its port at the end
                break
            # While the trainer stands still after its last step, the kernel waits for it, and still answers.
            if last("steps_total") == STEPS:
                is_over = last.values("evaluation_version") == [STEPS]
                with suppress(psutil.NoSuchProcess):
                    trainer.resume() if is_over else trainer.suspend()
            run.look()
        self.summary = run.assert_completed(STEPS)
        self.lines = {line["step"]: line for line in run.metrics()}

    def _url(self) -> str:
        status = self.folder / "status.json"
        return json.loads(status.read_bytes())["metrics_url"] if status.exists() else ""


@pytest.fixture(scope="module")
def watched(module_start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Watched:
    rows = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n}+2=", "answer": str(n)}) + "\n" for n in range(9)))
    reward = rows.with_name("slow.py")
    reward.write_text(SLOW)
    run = module_start(
        *("metrics.port=0", f"steps={STEPS}", "checkpoint.every=4", "evaluation.every=3"),
        f"evaluation.dataset={{use: jsonl, path: {rows}}}",
        f"reward={{use: function, function: {reward}:score}}",
    )
    return Watched(run)


# ------------------------------------------------------------------------------------- Prometheus


def test_every_scrape_is_of_one_moment(watched: Watched) -> None:
    for scrape in watched.scrapes:
        accounts = scrape.by("tickets_retired_total", "account")
        assert scrape("tickets_issued_total") == sum(accounts.values()) + scrape("tickets_in_flight")
        assert accounts["trained"] == BATCH * scrape("steps_total")
        assert scrape("staleness_steps_count") == SAMPLES * accounts["trained"]
        assert 0 <= scrape("queue_finished_groups") <= scrape("tickets_in_flight")
        assert scrape("tickets_in_flight") <= max(scrape("tickets_in_flight_limit"), BATCH)
    for before, after in pairwise(watched.scrapes):
        for name in ("steps_total", "tickets_issued_total", "trained_tokens_total", "generated_tokens_total"):
            assert before(name) <= after(name)


def test_figures_are_those_of_the_newest_line_of_metrics(watched: Watched) -> None:
    figures = ["step_s", "reward", "loss", "lr", "staleness_max", "tokens", "swap_pause_s", "wait/overhead_s"]
    compared = [(scrape, step) for scrape in watched.scrapes if (step := int(scrape("steps_total")))]
    assert compared
    for scrape, step in compared:
        line = watched.lines[step]
        assert {key: scrape(gauge_of(key)) for key in figures} == {key: line[key] for key in figures}
        trained = sum(watched.lines[each]["tokens"] for each in range(1, step + 1))
        assert scrape("trained_tokens_total") == trained


def test_the_last_figures_are_those_of_the_summary(watched: Watched) -> None:
    """The kernel still answers while it dismisses the workers."""
    last, summary = watched.scrapes[-1], watched.summary
    ledger = {name: summary["ledger"][name] for name in ("trained", "filtered", "expired", "failed")}
    assert last.by("tickets_retired_total", "account") == ledger
    assert last("steps_total") == last("planned_steps") == STEPS
    assert last("generated_tokens_total") >= summary["tokens"]["trained"]
    assert last("trained_tokens_total") == summary["tokens"]["trained"]
    assert last("swaps_total") == summary["swaps"]["count"]
    assert last("evaluations_total") == len(summary["evaluation"])
    assert last("evaluation_version") == STEPS
    assert last("evaluation_accuracy") == summary["evaluation"][-1]["accuracy"]
    assert last("evaluation_reward") == summary["evaluation"][-1]["reward"]
    assert last("evaluation_best_version") == summary["best"]["version"]
    buckets = last.by("staleness_steps_bucket", "le")
    for bound in range(3):
        expected = sum(count for age, count in summary["staleness"].items() if int(age) <= bound)
        assert buckets[f"{bound}.0"] == expected
    assert last("staleness_steps_sum") == sum(int(age) * n for age, n in summary["staleness"].items())
    given = {advice["rule"] for advice in summary["advice"] if advice["until"] is None}
    assert {rule for rule, value in last.by("advice_open", "rule").items() if value} == given


def test_the_text_is_open_metrics_for_those_who_ask(watched: Watched) -> None:
    assert watched.open_type.startswith("application/openmetrics-text")
    families = list(openmetrics_parser.text_string_to_metric_families(watched.open_metrics))
    names = {name.removesuffix("_info") for name in watched.scrapes[-1].families}
    assert {family.name for family in families} == names


def test_the_dashboard_asks_for_figures_that_exist(watched: Watched) -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    known = labels_by_name(watched.scrapes)
    used: set[str] = set()
    expressions = [
        target["expr"].replace("$__rate_interval", "1m")
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
    ]
    assert len(expressions) > 40
    alerts = yaml.safe_load(DASHBOARD.with_name("alerts.yml").read_text())["groups"][0]["rules"]
    assert len(alerts) == 5
    expressions += [alert["expr"] for alert in alerts]
    for expression in expressions:
        for selector in selectors(promql_parser.parse(expression)):
            assert selector.name in known, expression
            wanted = {matcher.name for matcher in selector.matchers.matchers}
            assert wanted <= known[selector.name], expression
            used.add(selector.name)
    [variable] = [each for each in dashboard["templating"]["list"] if each["name"] == "run"]
    assert variable["definition"] == "label_values(stretto_run_info, run)"
    assert {"stretto_run_info"} | used <= set(known)


def labels_by_name(scrapes: list[Scrape]) -> dict[str, set[str]]:
    """Name of each series -> names of its labels, also of families that the mock engines leave empty."""
    known = {family.name: {"run"} for family in scrapes[-1].families.values() if not family.samples}
    for scrape in scrapes:
        for sample in scrape.samples:
            known.setdefault(sample.name, set()).update(sample.labels)
    return known


def selectors(expression: Any) -> Iterator[Any]:
    if isinstance(expression, promql_parser.VectorSelector):
        yield expression
        return
    for name in ("lhs", "rhs", "expr", "vector_selector"):
        if (part := getattr(expression, name, None)) is not None:
            yield from selectors(part)
    for part in getattr(expression, "args", ()):
        yield from selectors(part)


# -------------------------------------------------------------------------------------- the timeline


def test_the_timeline_has_every_ticket_and_step(watched: Watched) -> None:
    run = RunFolder(watched.folder)
    times = [time for time, _ in run.events()]
    assert times == sorted(times)
    steps = run.history.steps
    assert [step.version for step in steps] == list(range(1, STEPS + 1))
    trained = [ticket for step in steps for ticket in step.figures.tickets]
    assert len(set(trained)) == len(trained) == watched.summary["ledger"]["trained"]
    found = [each for each in run.history.attempts if each.outcome == "trained"]
    assert sorted(each.ticket for each in found) == sorted(trained)
    for step in steps:
        line = watched.lines[step.version]
        own = [each for each in found if each.step is step]
        assert sum(each.done.tokens for each in own if each.done) == line["tokens"]
        assert all(each.issued_at < each.start < each.ended for each in own if each.issued_at and each.ended)
        assert step.ended - step.began >= line["train_s"] - 0.01


def test_the_events_are_printed_as_lines_of_json(watched: Watched) -> None:
    events = [json.loads(line) for line in stretto("events", str(watched.folder)).stdout.splitlines()]
    [began] = [event for event in events if event["event"] == "KernelBegan"]
    assert (began["version"], began["time"]) == (0, RunFolder(watched.folder).history.kernels[0].began)
    assert events[-1]["event"] == "RunEnded"


def test_every_step_says_what_training_waited_for(watched: Watched) -> None:
    """The same figures in the metrics and in the timeline: with one engine, evaluations take it away."""
    waited: Counter[str] = Counter()
    for step in RunFolder(watched.folder).history.steps:
        line = watched.lines[step.version]
        in_line = {kind: line[f"wait/{kind}_s"] for kind in CAUSES}
        assert sum(in_line.values()) == pytest.approx(line["step_s"] - line["train_s"], abs=1e-3)
        in_events: Counter[str] = Counter()
        for cause, seconds in step.figures.waits:
            in_events[cause.kind] += seconds  # pyright: ignore[reportArgumentType]
        del in_line["overhead"], in_events["overhead"]  # that of the step itself is in the line alone
        assert {**dict.fromkeys(in_line, 0.0), **in_events} == pytest.approx(in_line, abs=1e-3)
        waited.update(in_events)
    assert waited["evaluation"] > 0
    assert waited["checkpoint"] > 0


# ------------------------------------------------------------------------------------------ Perfetto


@pytest.fixture(scope="module")
def trace(watched: Watched) -> Trace:
    file = watched.folder / "shown.pftrace"
    done = stretto("trace", str(watched.folder), "-o", str(file))
    assert done.returncode == 0, done.stderr
    assert str(file) in done.stdout
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    trace = Trace.FromString(file.read_bytes())
    assert trace.IsInitialized()
    return trace


class Slice:
    def __init__(self, packet: TracePacket) -> None:
        event = packet.track_event
        self.start, self.end = packet.timestamp, 0
        self.track, self.name = event.track_uuid, event.name
        self.category = event.categories[0]
        notes: Any = event.debug_annotations
        self.facts = {each.name: getattr(each, each.WhichOneof("value")) for each in notes}
        self.flows, self.ends = list(event.flow_ids), list(event.terminating_flow_ids)


def tracks_of(trace: Trace) -> dict[int, TrackDescriptor]:
    found = [packet.track_descriptor for packet in trace.packet if packet.HasField("track_descriptor")]
    assert len({track.uuid for track in found}) == len(found)
    return {track.uuid: track for track in found}


def slices_of(trace: Trace) -> list[Slice]:
    """All spans. Those of a track follow each other, each ends, and none begins before its track exists."""
    tracks, under_way, slices = set[int](), dict[int, Slice](), list[Slice]()
    free: dict[int, int] = {}
    for packet in trace.packet:
        if packet.HasField("track_descriptor"):
            tracks.add(packet.track_descriptor.uuid)
        event = packet.track_event
        if packet.HasField("track_event"):
            assert event.track_uuid in tracks
        if event.type == TrackEvent.TYPE_SLICE_BEGIN:
            assert event.track_uuid not in under_way
            begun = under_way[event.track_uuid] = Slice(packet)
            assert begun.start >= free.get(begun.track, 0), begun.name
        elif event.type == TrackEvent.TYPE_SLICE_END:
            ended = under_way.pop(event.track_uuid)
            ended.end = free[ended.track] = packet.timestamp
            assert ended.end >= ended.start, ended.name
            slices.append(ended)
    assert not under_way
    return slices


def test_the_trace_has_no_unknown_field_and_no_track_without_its_parent(trace: Trace) -> None:
    assert Trace.FromString(trace.SerializeToString(deterministic=True)) == trace
    tracks = tracks_of(trace)
    for track in tracks.values():
        assert not track.HasField("parent_uuid") or track.parent_uuid in tracks
    assert all(packet.trusted_packet_sequence_id for packet in trace.packet)


def test_every_worker_has_a_track_that_spans_its_work(trace: Trace) -> None:
    tracks, slices = tracks_of(trace), slices_of(trace)
    lives = {
        name: [each for each in slices if tracks[each.track].name == name and each.category == "worker"]
        for name in ("trainer-0", "inference-0", "rollout-0", "verifier-0")
    }
    for name, spans in lives.items():
        assert [span.name for span in spans] == ["loading", "ready"], name
    checked = Counter[str]()
    for each in slices:
        if each.category in ("ticket", "evaluation ticket", "swap", "weights"):
            parent = tracks[tracks[each.track].parent_uuid].name
            loading, ready = lives[parent]
            assert loading.start <= each.start <= each.end <= ready.end
            checked[each.category] += 1
    assert min(checked.values()) >= 4
    assert len(checked) == 4


def test_every_ticket_is_there_with_its_outcome_and_leads_to_its_step(watched: Watched, trace: Trace) -> None:
    slices = slices_of(trace)
    tickets = [each for each in slices if each.category == "ticket"]
    assert len({each.name for each in tickets}) == len(tickets)
    outcomes = Counter(each.facts["outcome"] for each in tickets)
    assert outcomes["trained"] == watched.summary["ledger"]["trained"]
    steps = {each.facts["step"]: each for each in slices if each.category == "step"}
    waiting = {each.name: each for each in slices if each.category == "waiting"}
    for each in tickets:
        if each.facts["outcome"] == "trained":
            step = steps[each.facts["trained_at_step"]]
            [flow] = each.flows
            assert flow in step.ends
            assert waiting[each.name].flows == [flow]
            assert each.start <= each.end <= waiting[each.name].end <= step.end
            assert str(each.facts["ticket"]) in step.facts["tickets"].split(", ")
            assert each.facts["worker"] == "rollout-0"
            assert each.facts["samples"] == SAMPLES
    for step, line in watched.lines.items():
        rewards = [each.facts["reward"] for each in tickets if each.facts.get("trained_at_step") == step]
        assert sum(rewards) / BATCH == pytest.approx(line["reward"], abs=1e-5)


def test_calls_swaps_and_evaluations_are_those_of_the_metrics(watched: Watched, trace: Trace) -> None:
    slices, tracks = slices_of(trace), tracks_of(trace)
    calls = [(tracks[each.track].name, each.name) for each in slices if each.category == "call"]
    measured = [call for line in watched.lines.values() for call in line["calls"]]
    assert sorted(calls) == sorted((f"worker group {call['group']}", call["call"]) for call in measured)
    evaluations = [each for each in slices if each.category == "evaluation"]
    assert [each.facts["version"] for each in evaluations] == [0, 3, 6]
    points = watched.summary["evaluation"]
    for figure in ("accuracy", "reward"):
        assert [each.facts[figure] for each in evaluations] == [point[figure] for point in points]
    evaluated = Counter(each.facts["min_version"] for each in slices if each.category == "evaluation ticket")
    assert evaluated == {0: 9, 3: 9, 6: 9}
    swaps = {each.facts["version"] for each in slices if each.category == "swap"}
    assert {0, STEPS} <= swaps


def test_counters_have_the_figures_of_the_steps(watched: Watched, trace: Trace) -> None:
    tracks = tracks_of(trace)
    series: dict[str, list[float]] = {}
    for packet in trace.packet:
        if packet.track_event.type == TrackEvent.TYPE_COUNTER:
            track = tracks[packet.track_event.track_uuid]
            assert track.HasField("counter")
            series.setdefault(track.name, []).append(packet.track_event.double_counter_value)
    names = {"reward": "reward", "staleness": "staleness", "staleness_max": "largest staleness"}
    for figure, name in names.items():
        assert series[name] == [watched.lines[step][figure] for step in range(1, STEPS + 1)]
    assert len(series["generated tokens"]) == STEPS
    assert max(series["tickets in flight"]) == 3 * BATCH
    assert series["tickets in flight"][-1] == series["finished groups"][-1] == 0


def test_a_run_without_a_timeline_has_no_trace(watched: Watched, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes((watched.folder / "config.yaml").read_bytes())
    done = stretto("trace", str(tmp_path))
    assert done.returncode == 2
    assert "has no events" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
