"""The live view draws any status, and the status of a kernel has everything that the view draws."""

import io
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from kernel_setup import make_setup
from statuses import make_status
from stretto.observe.newest_lines import Curve
from stretto.observe.observers import Observers
from stretto.observe.view import drawing, sparkline
from stretto.records.status import (
    AdviceStatus,
    EvaluationProgress,
    EvaluationStatus,
    Stall,
    Status,
    Verdict,
    WorkerStatus,
    decode_status,
    read_status,
)


def draw(status: Status, *, stopped: bool = False) -> str:
    shown = io.StringIO()
    console = Console(file=shown, width=120, force_terminal=True, color_system=None)
    console.print(drawing(status, stopped=stopped))
    return shown.getvalue()


def test_the_view_shows_what_the_status_says() -> None:
    shown = draw(make_status())
    ends = time.strftime("%H:%M", time.localtime(time.time() + 600))
    for text in (
        "step 60/200   1 h 2 min   10 min left",
        f"(until {ends})",
        "/runs/one",
        "0.500     ▁▅█",
        "no signal  44.0 %",
        "1.2500",
        "mean 1.50   max 2",
        "2.0 s, of which training 500 ms, evaluation 1.2 s, groups 250 ms",
        "version 100: 10 of 40 rows   waiting: version 150",
        "held-out accuracy  0.500 (version 50)   best so far",
        "generating 1,234   training 4,000",
        "issued 64 = trained 60 + filtered 0 + expired 0 + failed 1 + in flight 3 (2 finished)",
        "1 x failed: reward raised",
        "since step 40: half of the answers",
        "2 ready   inference-0 loading   restarts 1   trainer-0 stands still for 33 s",
        "rollout-0 waits for verifier-0 (score) since 94 s",
        "verdict  learning: reward +0.250 in 60 steps; bound by generation",
        "now  training",
    ):
        assert text in shown, text
    assert "late ticket" not in shown  # a small part of the step
    end = draw(make_status(state="completed"), stopped=True)
    for text in ("left", "now", "workers"):
        assert text not in end
    assert "loss" not in end
    assert "-0.0312   ▁" in draw(make_status(recent={"loss": -0.0312}), stopped=True)
    assert "0.500 (version 50)" in end


texts = st.text() | st.sampled_from(["\x1b]0;x\x07", "\x1b[2J", "[link=file:///etc]x", "\x9b2J", "x" * 5000])
numbers = st.floats(allow_nan=False, allow_infinity=False)
counts = st.integers(0, 2**53)
measures = st.sampled_from(["accuracy", "reward"])
evaluations = st.builds(EvaluationStatus, counts, st.none() | numbers, measures, counts, counts)
hostile = st.builds(
    make_status,
    written=numbers,
    name=texts,
    folder=texts,
    version=counts,
    steps=counts,
    wall_s=numbers,
    left_s=st.none() | numbers,
    now=texts,
    verdict=st.none() | st.builds(Verdict, st.just("flat"), texts),
    newest=st.dictionaries(
        st.sampled_from(["reward", "loss", "staleness", "step_s", "x"]), st.none() | numbers
    ),
    recent=st.dictionaries(st.sampled_from(["reward", "loss", "x"]), numbers),
    curves=st.dictionaries(st.sampled_from(["reward", "loss", "x"]), st.lists(numbers)),
    evaluations=st.lists(evaluations),
    best=st.none() | evaluations,
    evaluating=st.none() | st.builds(EvaluationProgress, counts, counts, counts, st.none() | counts),
    ledger=st.dictionaries(texts, counts),
    reasons=st.dictionaries(texts, counts),
    generate_tokens_per_s=numbers,
    advice=st.lists(st.builds(AdviceStatus, texts, counts, texts)),
    starting=st.dictionaries(texts, texts),
    workers=st.lists(st.builds(WorkerStatus, texts, st.booleans(), numbers, numbers)),
    waits=st.lists(st.builds(Stall, texts, texts, texts, numbers)),
)


@settings(max_examples=150)
@given(status=hostile, stopped=st.booleans())
def test_no_status_breaks_the_terminal(status: Status, stopped: bool) -> None:
    decoded = decode_status(msgspec.json.encode(status))
    shown = draw(decoded, stopped=stopped)
    assert not any(control in shown for control in ("\x1b", "\x07", "\x9b", "\r", "\x00"))
    assert len(shown) < 500_000


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff",
        b"[" * 100_000,
        msgspec.json.encode(make_status()).replace(b'"version":60', b'"version":-1'),
        msgspec.json.encode(make_status()).replace(b'"version":60', b'"version":1' + b"0" * 400),
        msgspec.json.encode(make_status()).replace(b'"quickstart"', b'"\xff"'),
    ],
)
def test_what_is_no_status_is_refused(content: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_status(content)


def test_a_sparkline_shows_any_figures() -> None:
    assert sparkline([]) == ""
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([-1e308, 0.0, 1e308]) == "▁▅█"


def test_a_curve_of_any_length_has_at_most_64_points() -> None:
    curve = Curve()
    for number in range(10_001):
        curve.add(float(number))
        assert len(curve.points()) <= 64
    points = curve.points()
    assert points == sorted(points)
    width = 256  # 64 means over 128 steps are 32 over 256
    assert points[0] == sum(range(width)) / width
    assert points[-1] == sum(range(10_001 // width * width, 10_001)) / (10_001 % width)


def test_the_status_of_a_kernel_is_small_and_complete(tmp_path: Path) -> None:
    setup = make_setup(tmp_path, name="small", steps=2000)
    observers = Observers(setup)
    for curve in observers.report.adviser.history.curves.values():
        for number in range(2000):
            curve.add(number / 3)
    observers.status.write_end()
    status = read_status(tmp_path)
    assert status is not None
    assert (status.name, status.steps, status.state, status.now) == ("small", 2000, "running", "running")
    assert status.ledger["issued"] == 0
    assert len(status.curves["loss"]) > 30
    assert (tmp_path / "status.json").stat().st_size < 4000
