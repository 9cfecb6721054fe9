"""Curves for drawing: smooth them, and thin them out to what a picture can show."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["Numbers", "Points", "smooth", "thin", "thin_points"]

Numbers = NDArray[np.float64]
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


def thin(xs: Numbers, ys: Numbers, most: int) -> tuple[Numbers, Numbers]:
    """Return at most `most` of the points, which draw nearly the same line: the smallest and the largest
    value of equal parts of the x-axis, and the first and the last point. No peak is lost. `xs` ascends."""
    if len(xs) <= most:
        return xs, ys
    parts = max(1, (most - 2) // 2)
    bounds = np.searchsorted(xs, np.linspace(xs[0], xs[-1], parts + 1)[1:-1])
    kept = {0, len(xs) - 1}
    for first, last in zip([0, *bounds], [*bounds, len(xs)], strict=True):
        if last > first:
            kept |= {first + int(ys[first:last].argmin()), first + int(ys[first:last].argmax())}
    chosen = np.array(sorted(kept))
    return xs[chosen], ys[chosen]


def thin_points(points: Points, most: int) -> list[tuple[float, float]]:
    """Return at most `most` of the points, as `thin` chooses them."""
    every_x, every_y = np.array(points, np.float64).reshape(-1, 2).T
    xs, ys = thin(every_x, every_y, most)
    return list(zip(xs.tolist(), ys.tolist(), strict=True))
