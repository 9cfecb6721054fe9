"""The scheduler of today commands what that of the recorded universes did, also in what followed a crash.

Where a change is meant: `python tests/helpers/scheduler_records.py write FILE`, and the commit says
what differs.
"""

from pathlib import Path

import pytest

from scheduler_records import Record, check, read

FILE = Path(__file__).parents[1] / "golden" / "schedulers.msgpack.gz"


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return read(FILE)


def test_recorded_schedulers_command_the_same(records: list[Record]) -> None:
    assert check(records) == []
    lives = [life for record in records for life in record.lives]
    names = {call.name for life in lives for call in life.calls}
    assert {"commands", "restore", "owned", "worker_gone", "step_finished"} <= names


def test_a_call_that_is_missing_is_found(records: list[Record]) -> None:
    life = max((life for record in records for life in record.lives), key=lambda life: len(life.calls))
    index = next(index for index, call in enumerate(life.calls) if call.name == "step_finished")
    del life.calls[index]
    [difference] = check(records)
    assert "takes other commands" in difference
