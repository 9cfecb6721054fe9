"""Curves for drawing: smooth them, and thin them out to what a picture can show."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise

__all__ = ["Points", "smooth", "thin"]

Points = Sequence[tuple[float, float]]
"""(x, y) with ascending x."""


def smooth(points: Points, count: int) -> list[tuple[float, float]]:
    """Return each point with the mean of the last `count` values up to it in place of its own."""
    window: deque[float] = deque(maxlen=count)
    means: list[tuple[float, float]] = []
    for x, y in points:
        window.append(y)
        means.append((x, sum(window) / len(window)))
    return means


def thin(points: Points, most: int) -> list[tuple[float, float]]:
    """Return at most `most` points that draw nearly the same line: of each stretch of x, the first, lowest,
    highest and last point. No peak is lost."""
    if len(points) <= most or not points:
        return list(points)
    stretches = max(1, most // 4)
    bounds = [len(points) * number // stretches for number in range(stretches + 1)]
    kept: list[tuple[float, float]] = []
    for start, end in pairwise(bounds):
        indices = range(start, end)
        low = min(indices, key=lambda index: points[index][1])
        high = max(indices, key=lambda index: points[index][1])
        kept.extend(points[index] for index in sorted({start, low, high, end - 1}))
    return kept
