"""The timeline in a window, as lanes."""

import json
from itertools import chain
from pathlib import Path

import pytest

from kernel_events import done, issued, retired, served, step_measured, write_events
from stretto.bus.messages.events import CallEnded, Cause, KernelBegan, RunEnded
from stretto.bus.messages.tickets import TicketStarted
from stretto.records.run_folder import RunFolder, TimedEvent
from stretto_ui.lanes import Lane, Lanes, lanes

GROUPS_5_S = Cause("groups"), 5.0
BEGAN = 0.0, KernelBegan(1, 0, 0.0)


def _done(time: float, ticket: int, seconds: float, score_s: float = 0.0) -> list[TimedEvent]:
    return [(time - seconds, issued(ticket)), (time, done(ticket, seconds=seconds, score_s=score_s))]


def _write(folder: Path, events: list[TimedEvent]) -> None:
    write_events(folder, sorted(events, key=lambda each: each[0]))


def _run(folder: Path) -> RunFolder:
    (folder / "config.yaml").touch()
    return RunFolder(folder)


def _lanes(folder: Path, start: float | None = None, end: float | None = None, width: int = 1000) -> Lanes:
    found = lanes(_run(folder), start, end, width)
    assert found is not None
    return found


def _lane(found: Lanes, name: str) -> Lane:
    return next(lane for lane in found.lanes if lane.name == name)


def test_a_run_without_a_timeline_has_no_lanes(tmp_path: Path) -> None:
    assert lanes(_run(tmp_path), None, None, 1000) is None


def test_steps_and_what_they_waited_for(tmp_path: Path) -> None:
    waits = (Cause("evaluation", 1), 2.0), (Cause("late_ticket", 3), 1.0), (Cause("publication"), 0.5)
    _write(
        tmp_path,
        [
            (100.0, KernelBegan(1, 0, 0.0)),
            (110.0, step_measured(1, 105.0, (0, 1), (GROUPS_5_S,))),
            (120.0, step_measured(2, 113.0, (2, 3), waits)),
            (130.0, step_measured(3, 120.0, (4, 5))),
            (131.0, RunEnded("completed", "")),
        ],
    )

    found = _lanes(tmp_path, 100.0, 131.0)

    spans = [(span.text.partition(": ")[2], span.start, span.end) for span in _lane(found, "steps").spans]
    assert spans == [
        ("groups", 100, 105),
        ("2 tickets", 105, 110),
        ("evaluation of version 1", 110, 112),
        ("ticket 3", 112, 113),
        ("2 tickets", 113, 119.5),
        ("publication of its weights", 119.5, 120),
        ("2 tickets", 120, 130),
    ]
    assert found.parts == [
        ("train_s", "training time 22 s · 72 %", 21.5),
        ("wait/groups_s", "wait for groups 5.0 s · 17 %", 5.0),
        ("wait/evaluation_s", "wait for evaluations 2.0 s · 7 %", 2.0),
        ("wait/late_ticket_s", "wait for late tickets 1.0 s · 3 %", 1.0),
        ("wait/publication_s", "wait for publication 500 ms · 2 %", 0.5),
    ]
    assert (found.begun, found.ended) == (100, 131)
    marks = [mark.text for mark in found.marks]
    assert marks == ["a kernel began at version 0 (lease epoch 1)", "the run ended: completed"]


def test_the_time_between_two_kernels_is_no_wait(tmp_path: Path) -> None:
    steps = (110.0, step_measured(1, 105.0, (0,))), (520.0, step_measured(2, 515.0, (1,), (GROUPS_5_S,)))
    _write(tmp_path, [(100.0, KernelBegan(1, 0, 0.0)), steps[0], (500.0, KernelBegan(2, 1, 9.0)), steps[1]])

    assert [part for part, _, _ in _lanes(tmp_path, 100.0, 520.0).parts] == ["train_s", "wait/groups_s"]


def test_tickets_at_once_have_rows_of_their_own(tmp_path: Path) -> None:
    filtered = 10.0, retired(9, "filtered", "all rewards are equal")
    _write(tmp_path, [BEGAN, *_done(5, 7, 4, 1), *_done(6, 8, 4), *_done(9, 9, 2), filtered])

    lane = _lane(_lanes(tmp_path, 0.0, 10.0), "rollout-0")

    spans = [(span.ticket, span.start, span.end, span.row) for span in lane.spans]
    assert spans == [(7, 1, 5, 0), (8, 2, 6, 1), (9, 7, 9, 0)]
    assert lane.rows == 2
    assert lane.spans[0].score == 0.25
    assert lane.spans[2].text.endswith("filtered: all rewards are equal")


def test_tickets_in_flight_are_open_until_now(tmp_path: Path) -> None:
    events: list[TimedEvent] = [BEGAN]
    for ticket in (1, 2, 3):
        events += [(0.5, issued(ticket)), (float(ticket), TicketStarted("rollout-0", "train", ticket, 1))]
    over = [(5.0, done(1, seconds=4)), (6.0, retired(2, "failed", "")), (9.0, step_measured(1, 8.0, (1,)))]
    _write(tmp_path, [*events, *over])

    lane = _lane(_lanes(tmp_path), "rollout-0")

    assert [(span.ticket, span.start, span.end) for span in lane.spans] == [(1, 1, 5), (3, 3, 9)]
    assert lane.spans[1].text == "ticket 3: in flight"


def test_of_very_many_tickets_the_lane_counts_those_in_flight(tmp_path: Path) -> None:
    # Every ticket takes 2 s, and one begins every 0.01 s: 200 are in flight at once.
    _write(tmp_path, [BEGAN, *chain.from_iterable(_done(2 + place / 100, place, 2) for place in range(3000))])

    lane = _lane(_lanes(tmp_path, 5.0, 25.0, width=10), "rollout-0")

    assert lane.spans == []
    assert lane.values == pytest.approx([200] * 10, abs=1)


def test_spans_below_a_pixel_become_one_that_counts_them(tmp_path: Path) -> None:
    swaps = [(place + 0.5, served(float(place), "inference-0", place, 0.1)) for place in range(1000)]
    _write(tmp_path, [BEGAN, *swaps])

    lane = _lane(_lanes(tmp_path, 0.0, 1000.0, width=100), "inference-0")

    assert len(lane.spans) < 100
    assert sum(span.count for span in lane.spans) == 1000
    assert sum(span.busy_s for span in lane.spans) == pytest.approx(500)


def test_a_span_that_is_over_after_the_window_is_in_it(tmp_path: Path) -> None:
    call = CallEnded(10.0, "training", "train(actor)", 1, 79.0)
    _write(tmp_path, [BEGAN, (90.0, call), (200.0, RunEnded("completed", ""))])

    [span] = _lane(_lanes(tmp_path, 40.0, 50.0), "training").spans

    assert (span.start, span.end) == (10, 90)


def test_at_first_the_newest_steps_are_shown(tmp_path: Path) -> None:
    steps = [(float(place), step_measured(place, place - 0.5, (place,))) for place in range(1, 101)]
    _write(tmp_path, [BEGAN, *steps])
    lines = [{"step": step, "time": float(step)} for step in range(1, 101)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    found = _lanes(tmp_path)

    assert (found.start, found.end) == (88, 100)


def test_a_wait_that_began_before_the_window_is_in_it(tmp_path: Path) -> None:
    waited = Cause("groups"), 15.0
    steps = (10.0, step_measured(1, 5.0, (0,))), (30.0, step_measured(2, 25.0, (1,), (waited,)))
    _write(tmp_path, [BEGAN, *steps])

    parts = {part: seconds for part, _, seconds in _lanes(tmp_path, 20.0, 30.0).parts}
    assert parts == {"wait/groups_s": 5.0, "train_s": 5.0}


def test_narrow_steps_are_a_stack_of_the_parts_of_their_time(tmp_path: Path) -> None:
    waited = Cause("groups"), 0.25
    steps = [
        (place, step_measured(int(place), place - 0.75, (int(place),), (waited,)))
        for place in map(float, range(1, 101))
    ]
    _write(tmp_path, [BEGAN, *steps])

    lane = _lane(_lanes(tmp_path, 0.0, 100.0, width=299), "steps")

    assert lane.spans == []
    assert len(lane.times["train_s"]) == 99
    assert lane.times["train_s"] == pytest.approx([0.75] * 99, abs=0.02)
    assert lane.times["wait/groups_s"] == pytest.approx([0.25] * 99, abs=0.02)
    assert _lane(_lanes(tmp_path, 0.0, 100.0, width=300), "steps").kind == "steps"
    column = _lane(_lanes(tmp_path, 0.0, 100.0, width=1), "steps").times["train_s"]
    assert column == pytest.approx([0.75], abs=0.02)


def test_shares_have_lanes_with_the_figure_of_the_step_at_each_moment(tmp_path: Path) -> None:
    _write(
        tmp_path,
        [
            BEGAN,
            (10.0, step_measured(1, 5.0, (0,))),
            (30.0, step_measured(2, 25.0, (1,))),
            (40.0, RunEnded("completed", "")),
        ],
    )
    lines = [{"step": 1, "time": 10.0, "slots_used": 0.5}, {"step": 2, "time": 30.0, "slots_used": 0.25}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    found = _lanes(tmp_path, 0.0, 40.0, width=4)

    assert _lane(found, "slots_used").values == [0.5, 0.25, 0.25, 0.0]
    assert [lane.name for lane in found.lanes if lane.kind == "share"] == ["slots_used"]
