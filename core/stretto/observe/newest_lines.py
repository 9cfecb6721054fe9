"""What advice, verdict and views know of a run: the newest lines of steps, and a few figures of older steps.

The kernel keeps it in memory. `stretto.records.events.history` has the history of a whole run by its events.
"""

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from stretto.kernel.schedule.health import HeldOutScore, RewardHistory, Window
from stretto.observe.bottleneck import number
from stretto.records.figures import recent
from stretto.records.metrics import MAIN_FIGURES

KEPT = 200  # newest lines
_POINTS = 64  # most means of a curve


class History:
    """The newest lines of a run, its curves, and its evaluations."""

    def __init__(self) -> None:
        self.lines: deque[Mapping[str, Any]] = deque(maxlen=KEPT)
        self._figures: dict[str, deque[tuple[int, float]]] = {}
        """Name -> the newest (step, figure) pairs; only finite figures."""
        self.curves = {name: Curve() for name in (*MAIN_FIGURES, "zero_variance_groups")}
        self.evaluations: list[HeldOutScore] = []
        """Evaluations with a result, in order; see `held_out`."""
        self.first: dict[str, Window] = {}
        """Name -> the first 10 steps with that figure, for `reward`, `loss` and `entropy`."""
        self.rewards = RewardHistory()
        self.lr = 0.0
        """Largest learning rate so far."""
        self.limit = -math.inf
        """Largest reward of an answer so far."""
        self.varied = False
        """True once two answers of one batch have had different rewards."""

    def add(self, line: Mapping[str, Any]) -> None:
        """Add the line of the next step."""
        self.lines.append(line)
        for name in line:
            if (value := number(line, name)) is not None:
                self._figures.setdefault(name, deque(maxlen=KEPT)).append((line["step"], value))
                if name in self.curves:
                    self.curves[name].add(value)
        self.lr = max(self.lr, number(line, "lr") or 0.0)
        if (largest := number(line, "reward_max")) is not None:  # 0 is a limit too
            self.limit = max(self.limit, largest)
        self.varied = self.varied or bool(number(line, "reward_std"))
        for name in ("reward", "loss", "entropy"):
            if name not in self.first and (window := self.window(name, 10)):
                self.first[name] = window
        if (reward := number(line, "reward")) is not None:
            self.rewards.add(line["step"], reward, number(line, "reward_std"))

    def known(self, name: str) -> list[tuple[int, float]]:
        """Return the newest (step, figure) pairs of the lines that have a finite figure of this name."""
        return list(self._figures.get(name, ()))

    def recent(self, name: str) -> float | None:
        """Return the mean of a figure over the newest steps that have it; None without such a step."""
        return recent([value for _, value in self.known(name)])

    def window(self, name: str, count: int, *, back: int = 0) -> Window | None:
        """Return the newest `count` figures of a name before the last `back`; None if there are fewer."""
        figures = self.known(name)
        return Window.of(figures[: len(figures) - back], count)

    def has_room(self) -> bool:
        """Return whether answers are still of mixed quality: rewards vary nearly as much as they ever did."""
        spread = self.window("reward_std", 10)
        return spread is not None and self.rewards.spread > 0 and spread.mean >= 0.7 * self.rewards.spread

    def rises(self, name: str, count: int) -> bool:
        """Return whether `name` rose by two standard errors from the previous `count` steps to the newest."""
        now, before = self.window(name, count), self.window(name, count, back=count)
        if now is None or before is None:
            return False
        rise, error = now.rise(before)
        return rise > 2 * error

    def gain(self, name: str) -> float | None:
        """Return the mean reward or loss of the newest 20 steps − that of the first 10, if the newest are
        clearly better: by more than 3.3 standard errors and a tenth of the rewards' spread; otherwise None.
        The spread of the newest, enlarged by a fifth, also counts as that of the first: a fast start is no
        noise."""
        first, now = self.first.get(name), self.window(name, 20)
        if first is None or now is None:
            return None
        rise, error = now.rise(first)
        error = min(error, 1.2 * now.error * math.sqrt(1 + 20 / 10))
        better = rise if name == "reward" else -rise
        least = max(3.3 * error, 0.1 * self.rewards.spread, 1e-9 * abs(first.mean))
        return rise if better > least else None

    def broken(self) -> list[str]:
        """Return signs that the policy is broken, as clauses; empty if there are no signs."""
        entropy, first = self.window("entropy", 3), self.first.get("entropy")
        norm, truncated = self.window("grad_norm", 3), self.window("truncated", 3)
        is_certain = entropy and first and entropy.mean < max(0.02, 0.1 * first.mean)
        clauses = [
            f"its answers are nearly certain (entropy {entropy.mean:.2g} nats per token)"
            if entropy and is_certain
            else "",
            f"{truncated.mean:.0%} of the answers end at the limit of tokens"
            if truncated and truncated.mean > 0.9
            else "",
            "the gradient is 0, so no step changes it any more" if norm and norm.mean < 1e-6 else "",
        ]
        return [clause for clause in clauses if clause]


class Curve:
    """Means of a figure over equal numbers of steps. At 64 means, each pair of means becomes one mean."""

    def __init__(self) -> None:
        self._means: list[float] = []
        self._width = 1
        """Number of figures in one mean."""
        self._begun: list[float] = []
        """Newest figures, not yet in a mean."""

    def add(self, value: float) -> None:
        """Add the figure of the next step."""
        self._begun.append(value)
        if len(self._begun) < self._width:
            return
        self._means.append(sum(self._begun) / self._width)
        self._begun.clear()
        if len(self._means) == _POINTS:
            self._means = [(one + two) / 2 for one, two in zip(*[iter(self._means)] * 2, strict=True)]
            self._width *= 2

    def points(self) -> list[float]:
        """Return the means, in order; at most 64. The last one may be over fewer steps."""
        partial_mean = [sum(self._begun) / len(self._begun)] if self._begun else []
        return [*self._means, *partial_mean]
