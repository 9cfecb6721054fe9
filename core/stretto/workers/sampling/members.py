"""The samples of one ticket: they run apart from each other, and those that fail are tried again."""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import TypeVar

import anyio
import structlog

from stretto.bus.messages.scoring import ScoringFault
from stretto.bus.messages.tickets import FaultKind, Missing
from stretto.errors import (
    BusError,
    EngineError,
    MembersError,
    RewardError,
    StrettoError,
    foreign_frames,
    leaves,
    one_error,
    place_of,
    printable,
)
from stretto.workflow import Score, Trajectory, sample_numbers

log = structlog.get_logger()

T = TypeVar("T")

member_number: ContextVar[int | None] = ContextVar("member_number", default=None)
"""Number of the sample that the current task makes; None outside of `Members.run`."""
_LONGEST = 500
"""Characters of a reason."""
_INFRASTRUCTURE = (BusError, EngineError, OSError)
_PLACE = re.compile(r"^(.*?)(?: raised (\w+))?:.*\((\S+:\d+)\)$", re.DOTALL)
"""What `stretto.children.protocol.reason_of` writes: what raised, the exception, and its file and line."""


class Members:
    """The samples of one ticket that have failed.

    Args:
        size: number of samples that the ticket is to have.
        least: number of samples that are left at least, else the ticket fails.
        retries: how often a sample is tried again.
    """

    def __init__(self, size: int, *, least: int, retries: int) -> None:
        self._size = size
        self._least = least
        self._retries = retries
        self._lost: list[Missing] = []
        """Samples that have failed in `run`."""
        self._unscored: list[Missing] = []
        """Answers whose scoring has failed."""
        self.retried = 0
        """Number of samples that have succeeded after a failure."""

    async def run(self, sample: Callable[[int], Awaitable[T]]) -> list[T]:
        """Do what `stretto.workflow.Session.members` promises."""
        attempts = _Attempts(self._size)
        results: dict[int, T] = {}

        async def run_one(number: int) -> None:
            member_number.set(number)
            for tries in range(1, self._retries + 2):
                try:
                    results[number] = await sample(number)
                except Exception as error:  # noqa: BLE001 - user code may raise anything
                    attempts.note(number, error)
                    if tries > self._retries or not await attempts.may_try_again():
                        self._lost.append(Missing(_kind_of(error), _reason_of(error)[:_LONGEST], tries))
                        return
                else:
                    attempts.mixed.set()
                    self.retried += tries > 1
                    return

        with one_error():
            async with anyio.create_task_group() as tasks:
                for number in range(self._size):
                    tasks.start_soon(run_one, number)
        if not results:
            raise attempts.errors[0]
        self._check(len(results), self._lost)
        return [results[number] for number in sorted(results)]

    def may_score_again(self, faults: Sequence[ScoringFault], *, of: int, tries: int) -> bool:
        """Return whether answers whose scoring failed are to be scored again.

        Args:
            of: number of all answers. If all have failed in the same way, nothing is to be gained; one answer
                alone is scored twice at most.

        Raises:
            RewardError: if all answers have failed, and are not to be scored again.
        """
        is_over = tries > (self._retries if of > 1 else min(1, self._retries))
        if len(faults) == of and (
            is_over or (of > 1 and len({_site_in(each.error) for each in faults}) == 1)
        ):
            raise RewardError(faults[0].error, lost=faults[0].lost)
        return not is_over

    def score_of(self, result: Score | ScoringFault, tries: int) -> Score:
        """Return the score of an answer, with the reward NaN if its scoring has failed."""
        if isinstance(result, Score):
            return result
        kind: FaultKind = "infrastructure" if result.lost else "environment"
        self._unscored.append(Missing(kind, printable(result.error[:_LONGEST]), tries))
        return Score(math.nan)

    def complete(self, trajectories: Sequence[Trajectory]) -> tuple[list[Trajectory], tuple[Missing, ...]]:
        """Return the trajectories of the samples that have a reward, and the missing samples.

        Raises:
            MembersError: if too few samples are left.
        """
        numbers = sample_numbers(trajectories)
        unscored = {
            number
            for number, each in zip(numbers, trajectories, strict=True)
            if math.isnan(each.score.reward)
        }
        unnamed = Missing("environment", "the workflow gave the reward NaN", 1)
        faults = [*self._unscored, *[unnamed] * len(unscored)]
        missing = [*self._lost, *faults[: len(unscored)]]
        self._check(len({*numbers} - unscored), missing)
        kept = [each for number, each in zip(numbers, trajectories, strict=True) if number not in unscored]
        return kept, tuple(missing)

    def _check(self, left: int, missing: Sequence[Missing]) -> None:
        if missing and left < self._least:
            raise MembersError(
                f"{len(missing)} of {self._size} samples failed, and at least {self._least} must be left "
                f"(queue.min_members); the first: {missing[0].reason}"
            )


class _Attempts:
    """The failures of a ticket's samples, by which they are tried again or not."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._sites: dict[int, str] = {}
        """Where each sample has failed first."""
        self.errors: list[Exception] = []
        self.mixed = anyio.Event()
        """Set when it is known whether all samples fail in the same way."""

    def note(self, number: int, error: Exception) -> None:
        """A sample has failed."""
        log.warning("sample failed", error=_reason_of(error), exc_info=error)
        self.errors.append(error)
        self._sites.setdefault(number, _site_of(error))
        if self._differ or len(self._sites) == self._size:
            self.mixed.set()

    async def may_try_again(self) -> bool:
        """Wait until a sample has succeeded, or two have failed in different ways, or all have failed. Return
        whether a sample may be tried again: not if all have failed in the same way."""
        await self.mixed.wait()
        return self._differ or len(self._sites) < self._size

    @property
    def _differ(self) -> bool:
        return len(set(self._sites.values())) > 1


def _kind_of(error: Exception) -> FaultKind:
    """Return what has failed, from what was raised."""
    first = leaves(error)[0]
    lost = isinstance(first, _INFRASTRUCTURE) or (isinstance(first, RewardError) and first.lost)
    return "infrastructure" if lost else "environment"


def _reason_of(error: Exception) -> str:
    """Return what was raised, and where."""
    first = leaves(error)[0]
    text = f"{type(first).__name__}: {first}" if isinstance(first, StrettoError) else place_of(first)
    return printable(text)


def _site_of(error: Exception) -> str:
    """Return the type of what was raised and its file and line, without the message."""
    first = leaves(error)[0]
    if isinstance(first, StrettoError):
        return f"{type(first).__name__} {_site_in(str(first))}"
    frames = [f"{frame.filename}:{frame.lineno}" for frame in foreign_frames(first)[-1:]]
    return f"{type(first).__name__} {''.join(frames)}"


def _site_in(reason: str) -> str:
    """Return exception, file and line of what a child process has reported; all of it if it names none."""
    return " ".join(map(str, found.groups())) if (found := _PLACE.match(reason)) else reason
