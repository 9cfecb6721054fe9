"""Which kept samples a tracker gets, and when."""

from pathlib import Path
from typing import Any

import pytest

from kept_samples import Kept
from stretto.observe.tracked_samples import settled_samples


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path)


def settled(
    kept: Kept, due: list[int], number: int = 2, purpose: Any = "train", *, complete: bool = False
) -> list[tuple[int, list[str]]]:
    kept.flush()
    found = settled_samples(kept.folder, purpose, due, number, complete=complete)
    return [(step, [row["id"] for row in rows]) for step, rows in found]


def test_a_step_waits_for_its_samples(kept: Kept) -> None:
    assert settled(kept, [4]) == []
    kept.group(4, version=3)  # finished, and not trained yet
    assert settled(kept, [4]) == []
    kept.trained_group(4)
    assert settled(kept, [4, 8]) == [(4, ["4/1/0", "4/1/1"])]


def test_a_step_with_fewer_samples_waits_for_a_later_step_or_the_end(kept: Kept) -> None:
    kept.trained_group(4)
    assert settled(kept, [2, 4], number=3) == [(2, [])]
    assert settled(kept, [4, 8], number=3, complete=True) == [(4, ["4/1/0", "4/1/1"]), (8, [])]
    kept.trained_group(5)
    assert settled(kept, [4, 8], number=3) == [(4, ["4/1/0", "4/1/1"])]


def test_samples_of_evaluations_are_those_of_the_version(kept: Kept) -> None:
    kept.trained_group(7)
    kept.group(3, purpose="eval", version=6)
    assert settled(kept, [3, 6], purpose="eval") == [(3, []), (6, ["eval-3/1/0", "eval-3/1/1"])]


def test_samples_reach_from_the_lowest_reward_to_the_highest(kept: Kept) -> None:
    for ticket in (1, 2, 3, 4, 5):
        kept.group(ticket, purpose="eval", version=1, reward=ticket % 3)
    found = settled(kept, [1], number=3, purpose="eval")
    assert found == [(1, ["eval-3/1/0", "eval-4/1/0", "eval-5/1/1"])]  # rewards 0, 1 and 2


def test_texts_are_printable_and_short(kept: Kept) -> None:
    kept.trained_group(4, text=f"first\n\x1b[2J\u202e{'x' * 30_000}last")
    kept.flush()
    [(_, rows)] = settled_samples(kept.folder, "train", [4], 1, complete=True)
    [row] = rows
    assert row["text"].startswith("first\n\\x1b[2J\\u202exxx")
    assert row["text"].endswith("xlast")
    assert "… 10015 characters …" in row["text"]
    assert len(row["text"]) < 20_100
    assert (row["step"], row["staleness"], row["metrics"]) == (4, 0, {"accuracy": 1.0})
    assert "tokens" not in row
