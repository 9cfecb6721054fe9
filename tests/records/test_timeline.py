"""The reader of timelines: windows of large files, and files that a killed kernel left."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from stretto.errors import ConfigError
from stretto.records.timeline import FILE, Event, KernelStarted, TicketTaken, newest_event, read_timeline

EVENTS: list[Event] = [
    KernelStarted(1000.0, lease_epoch=1, version=0),
    # As many share a moment as one message of the bus brings.
    *(
        TicketTaken(1000.5 + number // 3, "train", number, 1, f"rollout-{number % 7}")
        for number in range(3000)
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a timeline of 130 kB."""
    folder = tmp_path_factory.mktemp("run")
    (folder / FILE).write_bytes(msgspec.json.Encoder().encode_lines(EVENTS))
    return folder


@pytest.mark.parametrize("since", [None, 0.0, 1000.0, 1000.5, 1001.0, 1500.5, 1500.6, 1999.5, 1999.6])
@pytest.mark.parametrize("until", [None, 999.0, 1000.0, 1300.5, 1500.5, 1500.7, 5000.0])
def test_a_window_has_the_events_of_its_time(folder: Path, since: float | None, until: float | None) -> None:
    expected = [
        event
        for event in EVENTS
        if (since is None or event.time >= since) and (until is None or event.time <= until)
    ]
    assert list(read_timeline(folder, since, until)) == expected


def test_a_window_at_the_end_reads_little_of_the_file(folder: Path, tmp_path: Path) -> None:
    """What comes before is not even decoded: half of it is no JSON."""
    lines = (folder / FILE).read_bytes().splitlines(keepends=True)
    damaged = [line.replace(b"taken", b"?????") for line in lines[:1500]]
    (tmp_path / FILE).write_bytes(b"".join([*damaged, *lines[1500:]]))
    assert list(read_timeline(tmp_path, 1999.5)) == EVENTS[-3:]


def test_a_run_that_has_not_begun_has_no_events(tmp_path: Path) -> None:
    assert list(read_timeline(tmp_path)) == []


@pytest.mark.parametrize("since", [None, 1900.0])
def test_a_last_line_that_is_not_whole_does_not_count(
    folder: Path, tmp_path: Path, since: float | None
) -> None:
    (tmp_path / FILE).write_bytes((folder / FILE).read_bytes() + b'["taken",2001.25,"tra')
    assert list(read_timeline(tmp_path, since)) == list(read_timeline(folder, since))


def test_the_newest_event_is_that_of_the_last_whole_line(folder: Path, tmp_path: Path) -> None:
    whole = (folder / FILE).read_bytes()
    for text, expected in ((whole, (EVENTS[-1].time, len(whole))), (b"", (0.0, 0))):
        (tmp_path / FILE).write_bytes(text + b'["taken",2001.25,"tra')
        with (tmp_path / FILE).open("rb") as file:
            assert newest_event(file) == expected


def test_another_line_that_is_no_event_is_named(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b'["kernel",1.0,1,0]\n["later",2.0]\n')
    with pytest.raises(ConfigError, match=r"timeline\.jsonl: b'\[\"later\",2\.0\].*is not an event"):
        list(read_timeline(tmp_path))
