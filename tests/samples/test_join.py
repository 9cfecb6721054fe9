"""What became of groups, by the messages of the log in any order: each is complete once, with its fate."""

from typing import Any

import pytest

from sample_messages import done, failed, record, retired, trained, trajectories
from stretto.records.samples.join import Joiner

Row = tuple[str, str, int | None, str | None]
"""(id, outcome, step, reason)."""


class Log:
    def __init__(self) -> None:
        self.joiner = Joiner(1, staleness=1)

    def add(self, *messages: Any) -> list[Row]:
        """Add messages, and return the rows that are complete now."""
        for message in messages:
            self.joiner.add(self.joiner.following, message)
        rows = [row for table in self.joiner.pop_rows().values() for row in table.to_pylist()]
        return [(row["id"], row["outcome"], row["step"], row["reason"]) for row in rows]

    def group(self, ticket: int, attempt: int = 1, purpose: Any = "train", version: int = 0) -> list[Row]:
        bundle, kept = (
            trajectories(ticket, attempt, purpose, version=version),
            record(ticket, attempt, purpose),
        )
        return self.add(bundle, kept, done(bundle, kept))


@pytest.fixture
def log() -> Log:
    return Log()


def rows(name: str, outcome: str, step: int | None = None, reason: str | None = None) -> list[Row]:
    return [(f"{name}/{index}", outcome, step, reason) for index in (0, 1)]


def test_a_group_of_training_waits_for_its_fate(log: Log) -> None:
    assert log.group(1) == []
    assert log.group(2) == []
    assert log.joiner.position == 1
    assert log.add(retired(1, "filtered", "all equal")) == rows("1/1", "filtered", None, "all equal")
    assert log.joiner.position == 4, "that of the first message of ticket 2"
    assert log.add(trained(["2/1/0", "2/1/1"], 3)) == rows("2/1", "trained", 4)
    assert log.add(trained(["2/1/0", "2/1/1"], 3)) == [], "a step that was repeated"
    assert log.joiner.position == log.joiner.following


def test_evaluations_and_failures_are_complete_with_their_outcome(log: Log) -> None:
    assert log.group(7, purpose="eval", version=5) == rows("eval-7/1", "evaluated", 5)
    assert log.add(record(8), failed(8, "no reward")) == [("8/1", "failed", None, "no reward")]


def test_a_group_is_complete_when_all_its_trainers_have_reported(log: Log) -> None:
    log.group(1)
    assert log.add(trained(["1/1/1"], 0)) == []
    assert log.add(trained(["1/1/0"], 0)) == rows("1/1", "trained", 1)


def test_of_several_attempts_one_is_trained_and_the_others_expire(log: Log) -> None:
    log.group(1)
    log.group(1, attempt=2)
    both = log.add(trained(["1/2/0", "1/2/1"], 0))
    assert sorted(both) == [*rows("1/1", "expired"), *rows("1/2", "trained", 1)]


def test_figures_that_do_not_come_hold_nothing_for_ever(log: Log) -> None:
    log.group(1)
    log.group(2)
    assert log.add(trained(["1/1/0"], 0)) == []
    assert log.add(*(trained(["9/1/0"], version) for version in range(1, 9))) == []
    assert log.add(trained(["9/1/0"], 9)) == rows("1/1", "trained", 1)
    [lost, _] = log.add(trained(["9/1/0"], 10))
    assert lost[:2] == ("2/1/0", "expired")
    assert lost[3] == "not trained up to step 11, as far as the log says"
    assert log.joiner.position == log.joiner.following


def test_at_the_end_of_the_log_trained_groups_are_complete_and_others_are_left(log: Log) -> None:
    log.group(1)
    log.group(2)
    log.add(trained(["1/1/0"], 0))
    log.joiner.finish()
    assert log.add() == rows("1/1", "trained", 1)
    assert log.joiner.position == 4


def test_what_is_on_disk_is_not_written_again(log: Log) -> None:
    log.joiner = Joiner(1, staleness=1, written={("train", 1, 1)})
    log.group(1)
    log.group(2)
    assert log.add(trained(["1/1/0", "1/1/1", "2/1/0", "2/1/1"], 0)) == rows("2/1", "trained", 1)
