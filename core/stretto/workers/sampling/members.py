"""The samples of one ticket: they run independently, and failed samples are tried again."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import TypeVar

import anyio
import msgspec
import numpy as np
import structlog

from stretto.bus.messages.tickets import FailedSample
from stretto.errors import MembersError, one_job
from stretto.user_code.faults import FaultKind, SampleFault
from stretto.workflow import FailureReward, Score, Trajectory, parts_of_sample, sample_numbers

log = structlog.get_logger()

T = TypeVar("T")

member_number: ContextVar[int | None] = ContextVar("member_number", default=None)
"""Number of the sample that the current task makes; None outside of `Members.run`."""
_LONGEST = 500  # characters of a reason
_MISTAKES = ("TypeError ", "AttributeError ", "NameError ", "UnboundLocalError ", "ImportError ")
"""Exceptions of code that is wrong, whatever the answer was."""


class Members:
    """The samples of one ticket, and their failures.

    A sample is *missing* if the environment or the infrastructure failed: it has no reward, and no token of
    it is trained. It is *penalized* if its own answer is at fault: then it is trained with the failure
    reward, because a policy that can end a bad sample at no cost learns to.

    Args:
        least: number of samples that must be left; with fewer, the ticket fails.
        sampled: returns what the policy has sampled for a sample of `run` since its last try began.
        smallest: number of token ids that all models of the run have, and the model that has no more.
    """

    def __init__(
        self,
        size: int,
        *,
        least: int,
        retries: int,
        failure_reward: FailureReward,
        sampled: Callable[[int], list[Trajectory]],
        smallest: tuple[float, str] = (math.inf, ""),
    ) -> None:
        self._size = size
        self._least = least
        self._retries = retries
        self._failure_reward = failure_reward
        self._sampled = sampled
        self._smallest = smallest
        self._ended: list[list[Trajectory]] = []
        """The trajectories of each sample that failed in `run` because of its own answer."""
        self._unscored: list[FailedSample] = []
        self.missing: list[FailedSample] = []
        self.penalized: list[FailedSample] = []
        self.retried: Counter[FaultKind] = Counter()
        """Number of samples that have succeeded after a failure, by the kind of the last fault."""
        self.redrawn = 0
        """Number of retried samples whose new answer differs from the failed one."""

    async def run(self, sample: Callable[[int], Awaitable[T]]) -> list[T]:
        """Make the samples, as `stretto.workflow.Session.members` promises."""
        attempts = _Attempts(self._size)
        results: dict[int, T] = {}

        async def run_one(number: int) -> None:
            member_number.set(number)
            for tries in range(1, self._retries + 2):
                try:
                    results[number] = await sample(number)
                except Exception as error:  # noqa: BLE001 - user code may raise anything
                    fault = attempts.note(number, error, self._sampled(number))
                    if fault.kind == "policy" or tries > self._retries:
                        return
                    if not await attempts.may_try_again():
                        return
                else:
                    attempts.succeeded()
                    if faults := attempts.faults.get(number):
                        self.retried[faults[-1].kind] += 1
                        self.redrawn += attempts.answered_differently(number, self._sampled(number))
                    return

        async with one_job() as tasks:
            for number in range(self._size):
                tasks.start_soon(run_one, number)
        failed = [number for number in range(self._size) if number not in results]
        for number in failed:
            self._count(attempts, number)
        if len(self.missing) == self._size:
            raise attempts.errors[0]
        self._check()
        return [results[number] for number in sorted(results)]

    async def score(
        self, lengths: Sequence[int], score: Callable[[list[int]], Awaitable[Iterable[Score | SampleFault]]]
    ) -> list[Score]:
        """Score answers of these lengths (tokens; 0: unknown), and retry those that fail. An answer without a
        score gets the reward NaN; an answer that is itself at fault gets the failure reward."""
        scores: dict[int, Score] = {}
        faults: defaultdict[int, list[SampleFault]] = defaultdict(list)
        left = list(range(len(lengths)))
        retries = self._retries if len(lengths) > 1 else min(1, self._retries)  # one alone tells little
        while left:
            for index, result in zip(left, await score(left), strict=True):
                if isinstance(result, SampleFault):
                    faults[index].append(result)
                else:
                    scores[index] = result
                    if index in faults:
                        self.retried[faults[index][-1].kind] += 1
            left = [
                index
                for index in left
                if index not in scores
                and faults[index][-1].kind != "policy"
                and len(faults[index]) <= retries
            ]
            if len(left) == len(lengths) > 1 and len({faults[index][-1].likeness for index in left}) == 1:
                break  # all have failed in the same way: retries do not help
        failure_score, others_scored = self._failure_score(list(scores.values())), bool(scores)
        for index in sorted(set(range(len(lengths))) - scores.keys()):
            last = faults[index][-1]
            of_policy = last.kind == "policy" or (others_scored and _repeats(faults[index]))
            failed = _failed_sample(last, len(faults[index]), lengths[index], of_policy=of_policy)
            if of_policy and self._failure_reward != "missing":
                self.penalized.append(failed)
                scores[index] = failure_score
            else:
                self._unscored.append(failed)
                scores[index] = Score(math.nan)
        if lengths and all(math.isnan(each.reward) for each in scores.values()):
            raise faults[0][-1].raised()
        return [scores[index] for index in range(len(lengths))]

    def complete(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Return the trajectories of the samples that have a reward: those of the workflow, then those of
        samples that failed because of their own answer. This completes `missing` and `penalized`."""
        samples: defaultdict[int, list[Trajectory]] = defaultdict(list)
        for number, trajectory in zip(sample_numbers(trajectories), trajectories, strict=True):
            samples[number].append(trajectory)
        scored: list[Trajectory] = []
        no_reason = FailedSample("environment", "the workflow gave the reward NaN", 1)
        faults = iter([*self._unscored, *[no_reason] * len(samples)])
        for parts in samples.values():
            if any(math.isnan(trajectory.score.reward) for trajectory in parts):
                self.missing.append(msgspec.structs.replace(next(faults), sampled=_tokens_in(parts)))
            elif (id := max(int(np.max(part.tokens, initial=0)) for part in parts)) >= self._smallest[0]:
                reason = f"token id {id}: {self._smallest[1]!r} has a vocabulary of {self._smallest[0]}"
                self.missing.append(FailedSample("environment", reason, 1, _tokens_in(parts)))
            else:
                scored += parts
        failure_score = self._failure_score([trajectory.score for trajectory in scored])
        scored += [replace(trajectory, score=failure_score) for parts in self._ended for trajectory in parts]
        self._check()
        return scored

    def _count(self, attempts: _Attempts, number: int) -> None:
        trajectories = self._sampled(number)
        of_policy = attempts.are_of_policy(number) and bool(trajectories)
        faults = attempts.faults[number]
        failed = _failed_sample(faults[-1], len(faults), _tokens_in(trajectories), of_policy=of_policy)
        if of_policy and self._failure_reward != "missing":
            self.penalized.append(failed)
            self._ended.append(parts_of_sample(trajectories))
        else:
            self.missing.append(failed)

    def _failure_score(self, others: Sequence[Score]) -> Score:
        chosen = self._failure_reward
        lowest = chosen if isinstance(chosen, float) else min((0.0, *(each.reward for each in others)))
        return Score(lowest, {"accuracy": 0.0} if any("accuracy" in each.metrics for each in others) else {})

    def _check(self) -> None:
        num_left = self._size - len(self.missing)
        if self.missing and num_left < self._least:
            raise MembersError(
                f"{len(self.missing)} of {self._size} samples failed, and at least {self._least} must be "
                f"left (queue.min_members); the first: {self.missing[0].reason}"
            )


class _Attempts:
    """The failures of a ticket's samples. They decide whether a sample is tried again."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._has_succeeded = False
        """Whether the services that the samples need have worked for at least one sample."""
        self._answers: defaultdict[int, set[bytes]] = defaultdict(set)
        """Number of a sample -> what the policy had sampled at each failure."""
        self.faults: defaultdict[int, list[SampleFault]] = defaultdict(list)
        self.errors: list[Exception] = []
        self._mixed = anyio.Event()
        """Set when it is known whether all samples fail in the same way."""

    def note(self, number: int, error: Exception, trajectories: Sequence[Trajectory]) -> SampleFault:
        fault = SampleFault.of(error)
        log.warning("sample failed", error=fault.error, exc_info=error)
        self.errors.append(error)
        self.faults[number].append(fault)
        self._answers[number].add(_sampled_in(trajectories))
        if fault.kind == "policy":
            self.succeeded()
        elif self._differ or len(self.faults) == self._size:
            self._mixed.set()
        return fault

    def succeeded(self) -> None:
        self._has_succeeded = True
        self._mixed.set()

    async def may_try_again(self) -> bool:
        """Wait until it is known whether all samples fail in one way; if so, return False: no retry helps."""
        await self._mixed.wait()
        return self._differ or self._has_succeeded

    def are_of_policy(self, number: int) -> bool:
        """Return whether its answer is at fault: same place and answer each time; another got through."""
        if self.faults[number][-1].kind == "policy":
            return True
        is_same_answer = len(self._answers[number]) == 1
        return is_same_answer and self._has_succeeded and _repeats(self.faults[number])

    def answered_differently(self, number: int, trajectories: Sequence[Trajectory]) -> bool:
        answer = _sampled_in(trajectories)
        return not all(answer.startswith(failed) for failed in self._answers[number])

    @property
    def _differ(self) -> bool:
        return len({faults[0].likeness for faults in self.faults.values()}) > 1


def _repeats(faults: Sequence[SampleFault]) -> bool:
    """Return whether user code raised repeatedly at one place, and no service or slip is the cause."""
    is_of_code = all(
        fault.kind == "environment" and fault.site and not fault.site.startswith(_MISTAKES)
        for fault in faults
    )
    return len(faults) > 1 and is_of_code and len({fault.site for fault in faults}) == 1


def _failed_sample(fault: SampleFault, tries: int, sampled: int, *, of_policy: bool) -> FailedSample:
    return FailedSample("policy" if of_policy else fault.kind, fault.error[:_LONGEST], tries, sampled)


def _tokens_in(trajectories: Iterable[Trajectory]) -> int:
    return sum(int(np.count_nonzero(each.loss_mask)) for each in trajectories)


def _sampled_in(trajectories: Iterable[Trajectory]) -> bytes:
    return b"".join(each.tokens[each.loss_mask].tobytes() for each in trajectories)
