"""The kernel's writer of the timeline."""

from __future__ import annotations

import resource
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import anyio
import msgspec
import pytest
from structlog.testing import capture_logs

from stretto.bus.messages.events import Evaluation
from stretto.bus.messages.tickets import GroupDone, Member, Ticket, TicketStarted
from stretto.kernel.observe.timeline import Timeline
from stretto.records.timeline import (
    FILE,
    Cause,
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


async def test_events_are_on_disk_about_a_second_later(tmp_path: Path) -> None:
    before = round(time.time(), 4)
    timeline = Timeline(tmp_path)
    timeline.begin(3, 0)
    events: list[Event] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(timeline.keep)
        timeline.issued(Ticket(7, 2, "train", row=5, min_version=4, samples=2))
        timeline.taken(TicketStarted("rollout-0", "train", 7, 2))
        timeline.done(group())
        with anyio.fail_after(30):
            while len(events) < 4:
                await anyio.sleep(0.05)
                events = list(read_timeline(tmp_path))
        tasks.cancel_scope.cancel()
    started, issued, taken, done = events
    assert before <= started.time <= issued.time <= taken.time <= done.time <= time.time() + 0.001
    assert started == KernelStarted(started.time, 3, 0)
    assert issued == TicketIssued(issued.time, "train", 7, 2, row=5, min_version=4)
    assert taken == TicketTaken(taken.time, "train", 7, 2, "rollout-0")
    assert done == TicketDone(
        done.time,
        *("train", 7, 2, "rollout-0"),
        *(1.2346, 1.0, 0.2),
        samples=2,
        reward=0.5,
        tokens=60,
        oldest=1,
    )


def test_an_evaluation_lasts_from_its_first_ticket_on(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path)
    timeline.begin(1, 0)
    timeline.issued(Ticket(0, 1, "eval", 0, min_version=4, samples=1))
    timeline.issued(Ticket(1, 1, "eval", 1, min_version=4, samples=1))
    timeline.evaluation(Evaluation(4, 0.25, 2, 0))
    timeline.end("completed")
    _, first, second, span, end = read_timeline(tmp_path)
    assert span == EvaluationSpan(span.time, first.time, 4, 0.25, 2, 0)
    assert first.time <= second.time <= span.time
    assert end == KernelEnded(end.time, "completed")


def test_a_resumed_kernel_goes_on_behind_the_last_whole_line(tmp_path: Path) -> None:
    former = Timeline(tmp_path)
    former.begin(1, 0)
    former.worker("rollout-0", "joined")
    former.end("interrupted")
    with (tmp_path / FILE).open("a") as file:
        file.write('["taken",20')  # the kernel was killed here
    timeline = Timeline(tmp_path)
    timeline.begin(2, 5)
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
    timeline.begin(2, 0)
    timeline.end("completed")
    assert [event.time for event in read_timeline(tmp_path)] == [ahead] * 3


def test_a_full_disk_is_logged_once_and_leaves_whole_lines(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path)
    timeline.begin(1, 0)
    timeline.worker("rollout-0", "joined")
    timeline._write()  # pyright: ignore[reportPrivateUsage] - `keep` calls it every second
    with capture_logs() as logs, no_file_larger_than((tmp_path / FILE).stat().st_size + 10):
        for _ in range(3):
            timeline.worker("rollout-1", "joined")
            timeline._write()  # pyright: ignore[reportPrivateUsage]
    assert [entry["event"] for entry in logs] == ["timeline not written; events are missing"]
    timeline.end("completed")
    events = list(read_timeline(tmp_path))
    assert [type(event) for event in events] == [KernelStarted, WorkerChanged, KernelEnded]


@contextmanager
def no_file_larger_than(size: int) -> Generator[None]:
    """A write beyond this size ends there, and the next one fails, as on a full disk."""
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, former[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)


def test_a_hostile_name_of_a_worker_stays_short(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path)
    timeline.begin(1, 0)
    timeline.done(group(worker="w" * 10**6))
    timeline.end("completed")
    assert (tmp_path / FILE).stat().st_size < 1000


def test_a_folder_that_cannot_be_written_ends_no_run(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "missing")
    with capture_logs() as logs:
        timeline.begin(1, 0)
        timeline.end("completed")
    assert len(logs) == 1


@pytest.mark.parametrize("content", [b"", b'["kernel",10'])
def test_a_file_without_a_whole_line_begins_anew(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    timeline = Timeline(tmp_path)
    timeline.begin(1, 0)
    timeline.end("completed")
    assert [type(event) for event in read_timeline(tmp_path)] == [KernelStarted, KernelEnded]


def test_a_long_run_stays_small(tmp_path: Path) -> None:
    """What 10,000 steps with 125,000 tickets write, from the size of 8 late steps with 100 tickets."""
    timeline = Timeline(tmp_path)
    timeline.begin(1, 0)
    for step in range(9_992, 10_000):
        start = timeline.now()
        tickets = range(12 * step, 12 * step + 12 + step % 2)
        for number in tickets:
            ticket = Ticket(number, 1, "train", number % 50_000, step, 8)
            timeline.issued(ticket)
            timeline.taken(TicketStarted("rollout-12", "train", number, 1))
            timeline.done(msgspec.structs.replace(group("rollout-12"), ticket=number))
        for call in ("reference", "old_logprobs", "train"):
            timeline.call(start, "training", call, step, 1.23456)
        for engine in range(2):
            timeline.swap(start, f"inference-{engine}", step, 0.123456, exact=False)
        timeline.step(start, step + 1, ((Cause("groups"), 0.123456),), tuple(tickets))
    timeline.end("completed")
    size = (tmp_path / FILE).stat().st_size
    assert size * 10_000 / 8 < 40e6, size
