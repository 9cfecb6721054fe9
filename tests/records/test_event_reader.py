"""The events of a run by their times, from files that grow and that killed kernels left."""

from pathlib import Path

import pytest

from kernel_events import write_events
from stretto.bus.messages.events import FleetChanged, KernelBegan
from stretto.bus.messages.tickets import TicketStarted
from stretto.errors import ConfigError
from stretto.records.events.files import event_files
from stretto.records.events.reader import EventReader, TimedEvent

EVENTS: list[TimedEvent] = [
    (1000.0, KernelBegan(lease_epoch=1, version=0, wall_s=0.0)),
    # As many share a moment as one message of the bus brings.
    *(
        (1000.5 + number // 3, TicketStarted(f"rollout-{number % 7}", "train", number, 1))
        for number in range(600)
    ),
]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> EventReader:
    folder = tmp_path_factory.mktemp("run")
    write_events(folder, EVENTS)
    return EventReader(folder)


@pytest.mark.parametrize("since", [None, 0.0, 1000.0, 1000.5, 1001.0, 1100.5, 1100.6, 1199.5, 1199.6])
@pytest.mark.parametrize("until", [None, 999.0, 1000.0, 1050.5, 1100.5, 1100.7, 5000.0])
def test_a_window_has_the_events_of_its_time(
    reader: EventReader, since: float | None, until: float | None
) -> None:
    expected = [
        (time, event)
        for time, event in EVENTS
        if (since is None or time >= since) and (until is None or time <= until)
    ]
    assert list(reader.between(since, until)) == expected
    assert reader.time_range() == (1000.0, EVENTS[-1][0])


def test_what_a_file_gains_is_read_once_it_is_whole(tmp_path: Path) -> None:
    write_events(tmp_path, EVENTS)
    [file] = event_files(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    reader = EventReader(tmp_path)
    first = list(reader.between(None, None))
    assert first == EVENTS[: len(first)] != EVENTS
    with file.open("ab") as opened:
        opened.write(whole[len(whole) // 2 :])
    assert list(reader.between(None, None)) == EVENTS


def test_time_does_not_go_back_with_the_clock_of_the_next_kernel(tmp_path: Path) -> None:
    write_events(tmp_path, EVENTS[:3])
    reader = EventReader(tmp_path)
    assert len(list(reader.between(None, None))) == 3
    later: list[TimedEvent] = [(7.0, KernelBegan(100, 0, 0.0)), (8.0, FleetChanged("rollout-0", "joined"))]
    write_events(tmp_path, later, epoch=100, first=101)
    newest = EVENTS[2][0]
    assert [time for time, _ in reader.between(None, None)][2:] == [newest] * 3
    assert len(list(reader.between(newest, None))) == 4


def test_a_damaged_message_is_left_out(tmp_path: Path) -> None:
    write_events(tmp_path, EVENTS)
    [file] = event_files(tmp_path)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert len(EVENTS) - 7 <= len(list(EventReader(tmp_path).between(None, None))) < len(EVENTS)


def test_events_of_another_version_are_named(tmp_path: Path) -> None:
    class Later(KernelBegan, frozen=True, tag="Later"):
        pass

    write_events(tmp_path, [(1.0, Later(1, 0, 0.0))])
    with pytest.raises(ConfigError, match=r"events of the run in .* cannot be read: .*Later"):
        list(EventReader(tmp_path).between(None, None))
