"""The samples of one ticket that fail: tried again, left out, or the end of the ticket."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Callable

import anyio
import numpy as np
import pytest

from stretto.bus.messages.scoring import ScoringFault
from stretto.bus.messages.tickets import Missing
from stretto.config import QueueConfig
from stretto.errors import EngineError, MembersError, RewardError
from stretto.workers.sampling.members import Members
from stretto.workflow import Score, Trajectory, parts_of_sample


def group(size: int = 4, *, least: int = 2, retries: int = 2) -> Members:
    return Members(size, least=least, retries=retries)


def failing(times: dict[int, int], error: Callable[[int], Exception]) -> Callable[[int], Awaitable[int]]:
    """A sample with a number fails so many times before it succeeds."""
    tried: Counter[int] = Counter()

    async def sample(number: int) -> int:
        tried[number] += 1
        await anyio.lowlevel.checkpoint()
        if tried[number] <= times.get(number, 0):
            raise error(number)
        return number

    return sample


def trajectory(reward: float) -> Trajectory:
    ids = np.array([1, 2], np.int32)
    mask = np.array([False, True])
    return Trajectory(ids, mask, np.zeros(2, np.float32), ids, Score(reward), "stop", "inference-0")


async def test_a_sample_that_fails_is_tried_again_in_its_place() -> None:
    members = group()
    assert await members.run(failing({1: 2}, lambda number: EngineError("lost"))) == [0, 1, 2, 3]
    kept, missing = members.complete([trajectory(1.0)] * 4)
    assert (len(kept), missing, members.retried) == (4, (), 1)


async def test_a_sample_that_still_fails_is_missing() -> None:
    members = group()
    sample = failing({1: 9, 2: 9}, lambda number: ZeroDivisionError() if number == 1 else EngineError("lost"))
    assert await members.run(sample) == [0, 3]
    kept, missing = members.complete([trajectory(1.0)] * 2)
    assert len(kept) == 2
    assert {(each.kind, each.tries) for each in missing} == {("environment", 3), ("infrastructure", 3)}
    assert any("ZeroDivisionError" in each.reason and "test_members.py" in each.reason for each in missing)


async def test_what_fails_in_the_same_way_for_all_is_tried_once() -> None:
    members, calls = group(), list[int]()

    async def sample(number: int) -> int:
        calls.append(number)
        raise RewardError(f"environment raised KeyError: {number} (env.py:3)")

    with pytest.raises(RewardError, match=r"env\.py:3"):
        await members.run(sample)
    assert sorted(calls) == [0, 1, 2, 3]


async def test_what_fails_for_all_in_different_ways_is_tried_again() -> None:
    members = group()
    different = {0: KeyError("a"), 1: ValueError("b")}
    sample = failing(dict.fromkeys(range(4), 1), lambda number: different.get(number, EngineError("lost")))
    assert await members.run(sample) == [0, 1, 2, 3]
    assert members.retried == 4


async def test_with_too_few_samples_the_ticket_fails() -> None:
    members = group(least=3)
    with pytest.raises(
        MembersError, match=r"2 of 4 samples failed, and at least 3 must be left .*: EngineEr"
    ):
        await members.run(failing({0: 9, 1: 9}, lambda number: EngineError("lost")))


def test_a_sample_without_a_score_is_missing_with_all_its_parts() -> None:
    members = group(3)
    faults = [ScoringFault("reward raised KeyError: 'gold' (mine.py:4)")]
    assert members.may_score_again(faults, of=3, tries=2)
    assert not members.may_score_again(faults, of=3, tries=3)
    unscored = members.score_of(faults[0], 3)
    assert math.isnan(unscored.reward)
    split = parts_of_sample([trajectory(unscored.reward), trajectory(unscored.reward)])
    kept, missing = members.complete([trajectory(1.0), *split, trajectory(0.5)])
    assert [each.score.reward for each in kept] == [1.0, 0.5]
    assert missing == (Missing("environment", "reward raised KeyError: 'gold' (mine.py:4)", 3),)


def test_answers_that_all_fail_alike_are_not_scored_again() -> None:
    faults = [ScoringFault(f"reward raised KeyError: {number} (mine.py:4)") for number in range(3)]
    with pytest.raises(RewardError):
        group(3).may_score_again(faults, of=3, tries=1)
    others = [*faults[:2], ScoringFault("reward took longer than reward.timeout_s=1", lost=True)]
    assert group(3).may_score_again(others, of=3, tries=1)
    assert group(1).may_score_again(faults[:1], of=1, tries=1), "one answer tells nothing about others"
    with pytest.raises(RewardError):
        group(1).may_score_again(faults[:1], of=1, tries=2)


def test_a_reward_nan_of_the_workflow_itself_is_missing_too() -> None:
    kept, missing = group(3).complete([trajectory(1.0), trajectory(math.nan), trajectory(0.0)])
    assert len(kept) == 2
    assert missing[0].reason == "the workflow gave the reward NaN"


@pytest.mark.parametrize(
    ("chosen", "samples", "least"),
    [(None, 8, 4), (None, 4, 2), (None, 3, 2), (None, 1, 1), ("all", 8, 8), (6, 8, 6), (6, 4, 4)],
)
def test_the_least_number_of_samples(chosen: int | None, samples: int, least: int) -> None:
    assert QueueConfig(min_members=chosen).least_members(samples) == least
