"""The kernel's writer of the timeline."""

from __future__ import annotations

import time
from pathlib import Path

import anyio
import msgspec
import pytest
from structlog.testing import capture_logs

from full_disk import no_file_larger_than
from kernel_events import step_measured
from patience import SOON_S, patience
from stretto.bus.messages.events import (
    CallEnded,
    Cause,
    Evaluation,
    EvaluationEnded,
    FleetChanged,
    IssuedTicket,
    KernelBegan,
    TicketsIssued,
    WeightsServed,
)
from stretto.bus.messages.events import Event as KernelEvent
from stretto.bus.messages.tickets import GroupDone, Member, TicketStarted
from stretto.kernel.schedule.fold import outcome_read
from stretto.observe.timeline import Timeline
from stretto.records.timeline import (
    FILE,
    EvaluationSpan,
    Event,
    KernelEnded,
    KernelStarted,
    TicketDone,
    TicketIssued,
    TicketTaken,
    WorkerChanged,
    read_timeline,
)


def group(worker: str = "rollout-0") -> GroupDone:
    def member(place: int, reward: float, *, part: bool) -> Member:
        id = f"7/2/{place}"
        return Member(id, 10, place, 30, 20, 3 - place, 4, reward, {}, "stop", part=part)

    # The second is a part of the first one's sample.
    members = (member(0, 1.0, part=False), member(1, 1.0, part=True), member(2, 0.0, part=False))
    return GroupDone("train", 7, 2, worker, members, 1.23456, 1.0, 0.2)


def take(timeline: Timeline, *events: KernelEvent) -> None:
    """Let a timeline take in events that happen now."""
    for event in events:
        timeline.take(round(time.time(), 4), event)


async def test_events_are_on_disk_about_a_second_later(tmp_path: Path) -> None:
    now = round(time.time(), 4)
    timeline = Timeline(tmp_path)
    timeline.take(now, KernelBegan(3, 0, 0.0))
    events: list[Event] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(timeline.keep)
        timeline.take(now + 1, TicketsIssued((IssuedTicket("train", 7, 2, row=5, min_version=4),)))
        timeline.take(now + 2, TicketStarted("rollout-0", "train", 7, 2))
        timeline.take(now + 3, outcome_read(60, group()))
        with anyio.fail_after(patience()):
            while len(events) < 4:
                await anyio.sleep(SOON_S)
                events = list(read_timeline(tmp_path))
        tasks.cancel_scope.cancel()
    assert events == [
        KernelStarted(now, 3, 0),
        TicketIssued(now + 1, "train", 7, 2, row=5, min_version=4),
        TicketTaken(now + 2, "train", 7, 2, "rollout-0"),
        TicketDone(
            now + 3,
            *("train", 7, 2, "rollout-0"),
            *(1.2346, 1.0, 0.2),
            samples=2,
            reward=0.5,
            tokens=60,
            oldest=1,
        ),
    ]


def test_an_evaluation_lasts_from_its_first_ticket_on(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path)
    take(timeline, KernelBegan(1, 0, 0.0))
    for number in range(2):
        take(timeline, TicketsIssued((IssuedTicket("eval", number, 1, number, min_version=4),)))
    take(timeline, EvaluationEnded(Evaluation(4, 0.25, 2, 0)))
    timeline.end("completed")
    _, first, second, span, end = read_timeline(tmp_path)
    assert span == EvaluationSpan(span.time, first.time, 4, 0.25, 2, 0)
    assert first.time <= second.time <= span.time
    assert end == KernelEnded(end.time, "completed")


def test_a_resumed_kernel_goes_on_behind_the_last_whole_line(tmp_path: Path) -> None:
    former = Timeline(tmp_path)
    take(former, KernelBegan(1, 0, 0.0))
    take(former, FleetChanged("rollout-0", "joined"))
    former.end("interrupted")
    with (tmp_path / FILE).open("a") as file:
        file.write('["taken",20')  # the kernel was killed here
    timeline = Timeline(tmp_path)
    take(timeline, KernelBegan(2, 5, 0.0))
    timeline.end("completed")
    events = list(read_timeline(tmp_path))
    kinds = [KernelStarted, WorkerChanged, KernelEnded, KernelStarted, KernelEnded]
    assert [type(event) for event in events] == kinds
    assert events[3] == KernelStarted(events[3].time, 2, 5)


def test_time_does_not_go_back_with_the_clock(tmp_path: Path) -> None:
    """The previous kernel's clock was a day ahead. Bisection needs lines in order."""
    ahead = round(time.time() + 86400, 4)
    (tmp_path / FILE).write_text(f'["kernel",{ahead},1,0]\n')
    timeline = Timeline(tmp_path)
    take(timeline, KernelBegan(2, 0, 0.0))
    timeline.end("completed")
    assert [event.time for event in read_timeline(tmp_path)] == [ahead] * 3


def test_a_full_disk_is_logged_once_and_leaves_whole_lines(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path)
    take(timeline, KernelBegan(1, 0, 0.0))
    take(timeline, FleetChanged("rollout-0", "joined"))
    timeline._write()  # pyright: ignore[reportPrivateUsage] - `keep` calls it every second
    with capture_logs() as logs, no_file_larger_than((tmp_path / FILE).stat().st_size + 10):
        for _ in range(3):
            take(timeline, FleetChanged("rollout-1", "joined"))
            timeline._write()  # pyright: ignore[reportPrivateUsage]
    assert [entry["event"] for entry in logs] == ["timeline not written; events are missing"]
    timeline.end("completed")
    events = list(read_timeline(tmp_path))
    assert [type(event) for event in events] == [KernelStarted, WorkerChanged, KernelEnded]


def test_a_hostile_name_of_a_worker_stays_short(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path)
    take(timeline, KernelBegan(1, 0, 0.0))
    take(timeline, outcome_read(60, group(worker="w" * 10**6)))
    timeline.end("completed")
    assert (tmp_path / FILE).stat().st_size < 1000


def test_a_folder_that_cannot_be_written_ends_no_run(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "missing")
    with capture_logs() as logs:
        take(timeline, KernelBegan(1, 0, 0.0))
        timeline.end("completed")
    assert len(logs) == 1


@pytest.mark.parametrize("content", [b"", b'["kernel",10'])
def test_a_file_without_a_whole_line_begins_anew(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    timeline = Timeline(tmp_path)
    take(timeline, KernelBegan(1, 0, 0.0))
    timeline.end("completed")
    assert [type(event) for event in read_timeline(tmp_path)] == [KernelStarted, KernelEnded]


def test_a_long_run_stays_small(tmp_path: Path) -> None:
    """What 10,000 steps with 125,000 tickets write, from the size of 8 late steps with 100 tickets."""
    timeline = Timeline(tmp_path)
    take(timeline, KernelBegan(1, 0, 0.0))
    for step in range(9_992, 10_000):
        start = round(time.time(), 4)
        tickets = range(12 * step, 12 * step + 12 + step % 2)
        for number in tickets:
            outcome = msgspec.structs.replace(group("rollout-12"), ticket=number)
            take(
                timeline,
                TicketsIssued((IssuedTicket("train", number, 1, number % 50_000, step),)),
                TicketStarted("rollout-12", "train", number, 1),
                outcome_read(20 * number, outcome),
            )
        for call in ("reference", "old_logprobs", "train"):
            take(timeline, CallEnded(start, "training", call, step, 1.2346))
        for engine in range(2):
            take(timeline, served(start, f"inference-{engine}", step, 0.123456))
        take(timeline, step_measured(step + 1, start, tuple(tickets), ((Cause("groups"), 0.1235),)))
    timeline.end("completed")
    size = (tmp_path / FILE).stat().st_size
    assert len(list(read_timeline(tmp_path))) == 3 * 100 + 8 * (3 + 2 + 1) + 2
    assert size * 10_000 / 8 < 40e6, size


def served(began: float, worker: str, version: int, pause_s: float) -> WeightsServed:
    return WeightsServed(
        *(began, worker, version),
        exact=False,
        are_new=True,
        pause_s=pause_s,
        drift=None,
        engine_kl=None,
        unscored="",
    )
