"""The samples of one ticket that fail: tried again, left out, penalized, or the end of the ticket."""

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace

import anyio
import numpy as np
import pytest

from stretto.bus.messages.tickets import FailedSample
from stretto.config import QueueConfig
from stretto.errors import EngineError, MembersError, PolicyError, RewardError, StrettoError
from stretto.user_code.faults import SampleFault
from stretto.workers.sampling.members import Members
from stretto.workflow import FailureReward, Score, Trajectory, parts_of_sample


def trajectory(reward: float, *tokens: int) -> Trajectory:
    ids = np.array([1, *(tokens or (2,))], np.int32)
    mask = np.arange(len(ids)) > 0
    return Trajectory(ids, mask, np.zeros(len(ids), np.float32), ids, Score(reward), "stop", "inference-0")


def group(
    size: int = 4,
    *,
    least: int = 2,
    failure_reward: FailureReward = None,
    sampled: Callable[[int], list[Trajectory]] = lambda number: [],
) -> Members:
    return Members(size, least=least, retries=2, failure_reward=failure_reward, sampled=sampled)


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


class Scorer:
    """Answers fail so many times before they have the reward 1; each is asked for as often as it says."""

    def __init__(self, times: dict[int, int], fault: Callable[[int], SampleFault]) -> None:
        self.asked: Counter[int] = Counter()
        self._times, self._fault = times, fault

    async def __call__(self, indices: list[int]) -> Iterable[Score | SampleFault]:
        self.asked.update(indices)
        return [self._of(index) for index in indices]

    def _of(self, index: int) -> Score | SampleFault:
        return self._fault(index) if self.asked[index] <= self._times.get(index, 0) else Score(1.0)


def raised(index: int) -> SampleFault:
    return SampleFault(f"reward raised KeyError: {index} (mine.py:4)", "environment", "KeyError mine.py:4")


def late(index: int) -> SampleFault:
    return SampleFault("reward took longer than reward.timeout_s=1", "infrastructure", "late")


# ------------------------------------------------------------------------------- samples that run


async def test_a_sample_that_fails_is_tried_again_in_its_place() -> None:
    members = group()
    assert await members.run(failing({1: 2}, lambda number: EngineError("lost"))) == [0, 1, 2, 3]
    assert len(members.complete([trajectory(1.0)] * 4)) == 4
    assert (members.missing, members.retried, members.redrawn) == ([], {"infrastructure": 1}, 0)


async def test_a_sample_that_still_fails_is_missing() -> None:
    members = group()
    sample = failing({1: 9, 2: 9}, lambda number: ZeroDivisionError() if number == 1 else EngineError("lost"))
    assert await members.run(sample) == [0, 3]
    assert len(members.complete([trajectory(1.0)] * 2)) == 2
    assert {(each.kind, each.tries) for each in members.missing} == {
        ("environment", 3),
        ("infrastructure", 3),
    }
    [broken] = [each.reason for each in members.missing if each.kind == "environment"]
    assert "ZeroDivisionError" in broken
    assert "test_members.py" in broken


async def test_what_fails_in_the_same_way_for_all_is_tried_once() -> None:
    members, calls = group(), list[int]()

    async def sample(number: int) -> int:
        calls.append(number)
        raise RewardError(f"environment raised KeyError: {number} (env.py:3)", site="KeyError env.py:3")

    with pytest.raises(RewardError, match=r"env\.py:3"):
        await members.run(sample)
    assert sorted(calls) == [0, 1, 2, 3]


async def test_what_fails_for_all_in_different_ways_is_tried_again() -> None:
    members = group()
    different = {0: KeyError("a"), 1: ValueError("b")}
    sample = failing(dict.fromkeys(range(4), 1), lambda number: different.get(number, EngineError("lost")))
    assert await members.run(sample) == [0, 1, 2, 3]
    assert members.retried == {"environment": 2, "infrastructure": 2}


async def test_with_too_few_samples_the_ticket_fails() -> None:
    members = group(least=3)
    with pytest.raises(
        MembersError, match=r"2 of 4 samples failed, and at least 3 must be left .*: EngineEr"
    ):
        await members.run(failing({0: 9, 1: 9}, lambda number: EngineError("lost")))


# ------------------------------------------------------------------- samples that their answers ended


@pytest.mark.parametrize(
    ("failure_reward", "others", "expected"),
    [(None, (1.0, 0.5), 0.0), (None, (-2.0, 0.5), -2.0), (-1.0, (1.0, 0.5), -1.0)],
)
async def test_a_sample_that_its_own_answer_ends_has_the_failure_reward(
    failure_reward: float | None, others: tuple[float, ...], expected: float
) -> None:
    crash = trajectory(math.nan, 7, 8, 9)
    members = group(3, failure_reward=failure_reward, sampled=lambda number: [crash] if number == 1 else [])
    sample = failing({1: 9}, lambda number: RewardError("environment raised", site="KeyError env.py:3"))
    assert await members.run(sample) == [0, 2]
    kept = members.complete([trajectory(reward) for reward in others])
    assert [each.score.reward for each in kept] == [*others, expected]
    assert kept[2].tokens.tolist() == [1, 7, 8, 9]
    assert members.missing == []
    assert members.penalized == [FailedSample("policy", "RewardError: environment raised", 3, 3)]


async def test_a_sample_whose_answer_is_at_fault_is_not_tried_again() -> None:
    members = group(3, sampled=lambda number: [trajectory(math.nan, number)])
    sample = failing({0: 1, 1: 1, 2: 1}, lambda number: PolicyError("called rm -rf"))
    assert await members.run(sample) == []
    kept = members.complete([])
    assert [each.score.reward for each in kept] == [0.0, 0.0, 0.0]
    assert {each.tries for each in members.penalized} == {1}


async def test_the_answer_is_not_at_fault_if_it_differed_or_a_service_failed() -> None:
    asked: Counter[int] = Counter()

    def other_each_time(number: int) -> list[Trajectory]:
        asked[number] += 1
        return [trajectory(math.nan, asked[number])]

    def same(number: int) -> list[Trajectory]:
        return [trajectory(math.nan, 5)]

    kinds = []
    for error, sampled in (
        (KeyError("a"), other_each_time),
        (ConnectionError("refused"), same),
        (EngineError("lost"), same),
    ):
        members = group(3, sampled=sampled)
        assert await members.run(failing({1: 9}, lambda number, error=error: error)) == [0, 2]
        kinds += [each.kind for each in members.missing]
        assert not members.penalized
    assert kinds == ["environment", "infrastructure", "infrastructure"]


async def test_such_samples_may_be_left_out() -> None:
    members = group(3, failure_reward="missing", sampled=lambda number: [trajectory(math.nan, 5, 6)])
    assert await members.run(failing({1: 9}, lambda number: PolicyError("bad"))) == [0, 2]
    assert len(members.complete([trajectory(1.0)] * 2)) == 2
    assert members.missing == [FailedSample("policy", "PolicyError: bad", 1, 2)]


async def test_a_penalized_sample_of_an_evaluation_is_not_accurate() -> None:
    members = group(2, failure_reward=-1.0, least=1, sampled=lambda number: [trajectory(math.nan)])
    assert await members.run(failing({1: 9}, lambda number: PolicyError("bad"))) == [0]
    first = replace(trajectory(1.0), score=Score(1.0, {"accuracy": 1.0}))
    assert members.complete([first])[1].score.metrics == {"accuracy": 0.0}


async def test_a_sample_that_succeeds_with_another_answer_is_counted() -> None:
    tokens: dict[str, tuple[int, ...]] = {"now": (5, 6), "then": (7,)}
    members, tried = group(2, sampled=lambda number: [trajectory(math.nan, *tokens["now"])]), Counter[int]()

    async def sample(number: int) -> int:
        tried[number] += 1
        if (number, tried[number]) == (0, 1):
            raise EngineError("lost")
        tokens["now"] = tokens["then"]
        return number

    assert await members.run(sample) == [0, 1]
    assert (members.retried.total(), members.redrawn) == (1, 1)


# ---------------------------------------------------------------------------- answers that are scored


async def test_an_answer_whose_scoring_fails_is_scored_again() -> None:
    members, scorer = group(3), Scorer({1: 2}, late)
    assert [each.reward for each in await members.score([3, 3, 3], scorer)] == [1.0, 1.0, 1.0]
    assert scorer.asked == {0: 1, 1: 3, 2: 1}
    assert members.retried == {"infrastructure": 1}


async def test_an_answer_without_a_score_is_missing_with_all_its_parts() -> None:
    members, scorer = group(3), Scorer({1: 9}, late)
    scores = await members.score([4, 1, 4], scorer)
    assert math.isnan(scores[1].reward)
    split = parts_of_sample([trajectory(scores[1].reward), trajectory(scores[1].reward)])
    kept = members.complete([trajectory(1.0), *split, trajectory(0.5)])
    assert [each.score.reward for each in kept] == [1.0, 0.5]
    assert members.missing == [FailedSample("infrastructure", late(1).error, 3, 2)]


async def test_an_answer_that_the_reward_cannot_take_has_the_failure_reward() -> None:
    members, scorer = group(3), Scorer({1: 9}, raised)
    assert [each.reward for each in await members.score([4, 7, 4], scorer)] == [1.0, 0.0, 1.0]
    assert members.penalized == [FailedSample("policy", raised(1).error, 3, 7)]
    refused, policy = group(3), Scorer({1: 9}, lambda index: SampleFault("too bold", "policy"))
    assert [each.reward for each in await refused.score([4, 7, 4], policy)] == [1.0, 0.0, 1.0]
    assert policy.asked[1] == 1, "it is not scored again"


async def test_an_answer_for_which_the_reward_has_no_score_is_missing() -> None:
    none = SampleFault("the reward returned None for completion 1")
    members = group(3)
    scores = await members.score([4, 7, 4], Scorer({1: 9}, lambda index: none))
    assert math.isnan(scores[1].reward)
    assert not members.penalized


async def test_answers_that_all_fail_alike_are_not_scored_again() -> None:
    scorer = Scorer(dict.fromkeys(range(3), 9), raised)
    with pytest.raises(RewardError, match="KeyError: 0"):
        await group(3).score([1, 1, 1], scorer)
    assert scorer.asked == {0: 1, 1: 1, 2: 1}
    mixed = Scorer(dict.fromkeys(range(3), 9), lambda index: late(index) if index == 2 else raised(index))
    with pytest.raises(RewardError):
        await group(3).score([1, 1, 1], mixed)
    assert mixed.asked == {0: 3, 1: 3, 2: 3}
    alone = Scorer({0: 9}, raised)
    with pytest.raises(RewardError):
        await group(1).score([1], alone)
    assert alone.asked == {0: 2}, "one answer tells nothing about others"


async def test_without_an_answer_nothing_is_scored() -> None:
    assert await group().score([], Scorer({}, late)) == []


def test_a_reward_nan_of_the_workflow_itself_is_missing_too() -> None:
    members = group(3)
    assert len(members.complete([trajectory(1.0), trajectory(math.nan), trajectory(0.0)])) == 2
    assert members.missing[0].reason == "the workflow gave the reward NaN"


def test_a_sample_with_an_id_that_another_model_lacks_is_missing_by_name() -> None:
    members = Members(
        3, least=1, retries=0, failure_reward=None, sampled=lambda _: [], smallest=(97, "critic")
    )
    assert len(members.complete([trajectory(1.0, 96), trajectory(1.0, 97, 3), trajectory(1.0)])) == 2
    assert [each.reason for each in members.missing] == ["token id 97: 'critic' has a vocabulary of 97"]


@pytest.mark.parametrize(
    ("chosen", "samples", "least"),
    [(None, 8, 4), (None, 4, 2), (None, 3, 2), (None, 1, 1), ("all", 8, 8), (6, 8, 6), (6, 4, 4)],
)
def test_the_least_number_of_samples(chosen: int | None, samples: int, least: int) -> None:
    assert QueueConfig(min_members=chosen).least_members(samples) == least


# ----------------------------------------------------------------------------- what is at fault


class Status(Exception):
    """As the clients of HTTP raise it."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status_code = status


def raised_from(error: Exception, cause: Exception | None = None) -> Exception:
    try:
        raise error from cause
    except Exception as caught:  # noqa: BLE001 - any
        return caught


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (KeyError("x"), "environment"),
        (FileNotFoundError("x"), "environment"),
        (ConnectionResetError("x"), "infrastructure"),
        (TimeoutError(), "infrastructure"),
        (OSError(28, "no space"), "infrastructure"),
        (Status(503), "infrastructure"),
        (Status(429), "infrastructure"),
        (Status(400), "environment"),
        (raised_from(RuntimeError("no sandbox"), ConnectionRefusedError("x")), "infrastructure"),
        (EngineError("x"), "infrastructure"),
        (PolicyError("x"), "policy"),
        (RewardError("x"), "environment"),
        (ExceptionGroup("x", [PolicyError("y")]), "policy"),
    ],
)
def test_what_is_at_fault(error: Exception, kind: str) -> None:
    assert SampleFault.of(error, "mine").kind == kind


def test_a_fault_names_the_line_and_comes_back_as_an_exception() -> None:
    fault = SampleFault.of(raised_from(ZeroDivisionError("by zero")), "reward")
    assert fault.error.startswith("reward raised ZeroDivisionError: by zero (")
    assert fault.site.startswith("ZeroDivisionError ")
    assert "test_members.py:" in fault.site
    again = SampleFault.of(fault.raised())
    assert (again.site, again.kind) == (fault.site, fault.kind)
    bold: StrettoError = SampleFault("too bold", "policy").raised()
    assert isinstance(bold, PolicyError)
