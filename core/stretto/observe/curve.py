"""A figure over a whole run in a few points, for the sparklines of the live view."""

from __future__ import annotations

from collections import deque

from stretto.records.figures import RECENT_STEPS, recent

_POINTS = 64


class Curve:
    """The means of a figure over equal numbers of steps. When there are 64 means, each two become one."""

    def __init__(self) -> None:
        self._means: list[float] = []
        self._width = 1
        """Number of figures in one mean."""
        self._begun: list[float] = []
        """The newest figures, which are not in a mean yet."""
        self._newest: deque[float] = deque(maxlen=RECENT_STEPS)

    def add(self, value: float) -> None:
        """Take in the figure of the next step."""
        self._begun.append(value)
        self._newest.append(value)
        if len(self._begun) < self._width:
            return
        self._means.append(sum(self._begun) / self._width)
        self._begun.clear()
        if len(self._means) == _POINTS:
            self._means = [(one + two) / 2 for one, two in zip(*[iter(self._means)] * 2, strict=True)]
            self._width *= 2

    def points(self) -> list[float]:
        """Return the means, in order; at most 64. The last one may be over fewer steps."""
        begun = [sum(self._begun) / len(self._begun)] if self._begun else []
        return [*self._means, *begun]

    def recent(self) -> float | None:
        """Return the mean over the newest steps; None before the first step."""
        return recent(list(self._newest))
