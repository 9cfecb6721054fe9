"""The figures of steps that end a run: gradients that are not finite, and a collapse of the reward. Advice
uses the collapse rule too.

The *spread* is a standard deviation of the rewards of single answers in a batch: the largest mean over 10
steps so far. A difference of rewards is compared with the spread, so the rule works at any scale of reward.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from stretto.bus.messages.events import Evaluation, Measure
from stretto.kernel.schedule.commands import Fail

HOLDS = 3
"""The reward has collapsed when the collapse rule has held at this many steps in a row."""
CLEARS = 20
"""The collapse is over after this many steps in a row at which the rule did not hold."""
_LONGEST = 10
"""Number of steps of the longest window."""
_MOST_SKIPPED = 5
"""The run ends after this many steps in a row with a gradient that is not finite."""


class HeldOutScore(NamedTuple):
    """The score of a version in a held-out evaluation."""

    version: int
    score: float
    """The mean accuracy of the samples, or their mean reward; see `held_out`."""
    samples: int
    deviation: float | None = None
    """Standard deviation of the samples' rewards; None for an accuracy, which is a share of the samples."""

    @property
    def measure(self) -> Measure:
        return "accuracy" if self.deviation is None else "reward"

    @property
    def largest_error(self) -> float:
        """Standard error of the score. For an accuracy, the largest possible one (a share of 0.5)."""
        return (0.5 if self.deviation is None else self.deviation) / math.sqrt(self.samples)


def held_out(evaluations: Iterable[Evaluation]) -> list[HeldOutScore]:
    """Return the evaluations' results in order: accuracies if all have one, else rewards; never both."""
    valid = [each for each in evaluations if (each.accuracy, each.reward) != (None, None)]
    accuracies = [
        HeldOutScore(each.version, each.accuracy, each.samples) for each in valid if each.accuracy is not None
    ]
    if len(accuracies) == len(valid):
        return accuracies
    return [
        HeldOutScore(each.version, each.reward, each.samples, each.reward_std)
        for each in valid
        if each.reward is not None
    ]


class Window(msgspec.Struct, frozen=True):
    """The mean of a figure over some steps."""

    mean: float
    error: float
    """Standard error of the mean, from the spread between steps."""
    since: int
    until: int

    @classmethod
    def of(cls, known: Sequence[tuple[int, float]], count: int) -> Window | None:
        """Return the window of the last `count` (step, figure) pairs; None if there are fewer."""
        newest = known[-count:]
        if len(newest) < count:
            return None
        values = np.array([value for _, value in newest])
        error = float(values.std(ddof=1)) / math.sqrt(count) if count > 1 else 0.0
        return cls(float(values.mean()), error, newest[0][0], newest[-1][0])

    def rise(self, earlier: Window) -> tuple[float, float]:
        """Return the difference of the means, and its standard error."""
        return self.mean - earlier.mean, math.hypot(self.error, earlier.error)


class Fall(msgspec.Struct, frozen=True):
    """A large fall of the reward or of the held-out score."""

    since: int
    """First of the steps with the low mean, or the version with the low score."""
    message: str


class RewardHistory(msgspec.Struct):
    """The rewards of a run's steps that the collapse rule needs."""

    newest: list[tuple[int, float]] = []
    """(step, mean reward) of the newest steps."""
    deviations: list[tuple[int, float]] = []
    """(step, standard deviation of the rewards) of the newest steps."""
    start: Window | None = None
    """Mean reward of the first 3 steps; see `_start`."""
    best: Window | None = None
    """The 10 steps in a row with the highest mean reward."""
    spread: float = 0.0

    def add(self, step: int, reward: float, deviation: float | None) -> None:
        """Take in the mean and the deviation of the rewards of a step's batch."""
        self.newest = [*self.newest, (step, reward)][-_LONGEST:]
        if deviation is not None:
            self.deviations = [*self.deviations, (step, deviation)][-_LONGEST:]
        window, spread = Window.of(self.newest, _LONGEST), Window.of(self.deviations, _LONGEST)
        if self.start is None and window:
            self.start = self._start()
        if window and (self.best is None or window.mean > self.best.mean):
            self.best = window
        if spread:
            self.spread = max(self.spread, spread.mean)

    def fall(self, evaluations: Sequence[HeldOutScore]) -> Fall | None:
        """Return a fall if the rule holds at the newest step. `evaluations` are complete, and in order."""
        return (
            self._fall(self.best, 8, spreads=0.5, errors=5)
            or self._fall(self.start, 10, spreads=0.2, errors=3.5)
            or _lower(evaluations)
        )

    def _start(self) -> Window:
        """Return the window of the first 3 of 10 steps. Its error uses half of the mean squared difference of
        successive steps (von Neumann 1941) as variance: a fall within the 10 steps hardly raises that."""
        steps, rewards = zip(*self.newest, strict=True)
        error = math.sqrt(float(np.square(np.diff(rewards)).mean()) / 2 / 3)
        return Window(math.fsum(rewards[:3]) / 3, error, steps[0], steps[2])

    def _fall(self, before: Window | None, count: int, *, spreads: float, errors: float) -> Fall | None:
        """Return a fall if the mean of the newest `count` steps is below the mean of `before` by more than
        `spreads` times the spread and by more than `errors` standard errors."""
        now = Window.of(self.newest, count)
        if before is None or now is None or now.since <= before.until:
            return None
        rise, error = now.rise(before)
        if -rise <= max(spreads * self.spread, errors * error):
            return None
        return Fall(
            now.since,
            f"mean reward fell from {before.mean:.3g} (steps {before.since}-{before.until}) to "
            f"{now.mean:.3g} (steps {now.since}-{now.until})",
        )


class Collapse(msgspec.Struct):
    """Applies the collapse rule at each step, to find whether the reward of a run has collapsed."""

    rewards: RewardHistory = msgspec.field(default_factory=RewardHistory)
    held: int = 0
    """Number of newest steps in a row at which the rule has held."""
    clear: int = 0
    """Number of newest steps in a row at which the rule has not held."""
    found: bool = False
    """Whether a collapse has been reported that is not over."""

    def observe(
        self, step: int, rewards: Sequence[float], evaluations: Sequence[HeldOutScore]
    ) -> Fall | None:
        """Take in the rewards of a step's batch. Return the fall if the reward collapses with this step."""
        if rewards:
            self.rewards.add(step, float(np.mean(rewards)), float(np.std(rewards)))
        fall = self.rewards.fall(evaluations)
        self.held, self.clear = (0, self.clear + 1) if fall is None else (self.held + 1, 0)
        if self.clear >= CLEARS:
            self.found = False
        if self.found or self.held < HOLDS:
            return None
        self.found = True
        return fall


class Health(msgspec.Struct):
    """Checks the steps of a run for skipped updates and a collapse of the reward."""

    skipped: int = 0
    """Number of newest steps in a row that left at least one model unchanged."""
    collapse: Collapse = msgspec.field(default_factory=Collapse)

    def observe(
        self,
        step: int,
        rewards: Sequence[float],
        evaluations: Iterable[Evaluation],
        *,
        skipped: bool,
        stops_on_collapse: bool,
    ) -> Fail | None:
        """Take in a step's rewards, and all evaluations in order. Return `Fail` if the run has to end."""
        fall = self.collapse.observe(step, rewards, held_out(evaluations))
        self.skipped = self.skipped + 1 if skipped else 0
        if self.skipped == _MOST_SKIPPED:
            return Fail(f"the gradients of {_MOST_SKIPPED} steps in a row were not finite")
        if fall is not None and stops_on_collapse:
            return Fail(f"reward collapse (on_collapse: stop): {fall.message}")
        return None


def _lower(evaluations: Sequence[HeldOutScore]) -> Fall | None:
    if len(evaluations) < 2:
        return None
    first, now = evaluations[0], evaluations[-1]
    if first.score - now.score <= 5 * math.hypot(first.largest_error, now.largest_error):
        return None
    return Fall(
        now.version,
        f"held-out {now.measure} fell from {first.score:.3g} (version {first.version}) to {now.score:.3g} "
        f"(version {now.version})",
    )
