"""Curves for the page: smoothed, and with as many points as the window has pixels.

A curve of a long run has more points than a screen. Each pixel keeps the smallest and the largest value below
it, so that no spike is lost; a smaller window shows all points again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

__all__ = ["ShownCurve", "curve", "decimate", "smooth"]

Numbers = NDArray[np.float64]


class ShownCurve(msgspec.Struct):
    """One figure of one run in a window."""

    x: list[float]
    y: list[float]
    smooth_x: list[float]
    """Empty, like `smooth_y`, without smoothing."""
    smooth_y: list[float]
    total: int
    """Number of points in the window before any was left out."""


def curve(
    lines: Sequence[dict[str, Any]],
    key: str,
    *,
    x: str,
    start: float | None,
    end: float | None,
    points: int,
    smoothing: float,
) -> ShownCurve:
    """Return the figure `key` of the lines of a run over their figure `x`.

    Args:
        start, end: the window; None is the first or last point.
        points: the most points to return.
        smoothing: weight of the past, 0 (no smoothing) to below 1. The mean at a window's start includes the
            points before the window.
    """
    known = [(line[x], line[key]) for line in lines if _is_number(line.get(key)) and _is_number(line.get(x))]
    xs, ys = np.array(known, np.float64).reshape(-1, 2).T
    window = _window(xs, start, end)
    shown_x, shown_y = decimate(xs[window], ys[window], points)
    smooth_x, smooth_y = np.empty(0), np.empty(0)
    if smoothing:
        smooth_x, smooth_y = decimate(xs[window], smooth(ys, smoothing)[window], points)
    return ShownCurve(
        shown_x.tolist(), shown_y.tolist(), smooth_x.tolist(), smooth_y.tolist(), len(xs[window])
    )


def smooth(values: Numbers, weight: float) -> Numbers:
    """Return the exponential moving average (N,) of the values (N,). Like TensorBoard's, it is divided by the
    sum of the weights so far, so that it does not start at 0."""
    smoothed = np.empty_like(values)
    mean, total = 0.0, 0.0
    for index, value in enumerate(values.tolist()):
        mean = weight * mean + (1 - weight) * value
        total = weight * total + (1 - weight)
        smoothed[index] = mean / total
    return smoothed


def decimate(xs: Numbers, ys: Numbers, points: int) -> tuple[Numbers, Numbers]:
    """Return at most `points` of the points: the smallest and the largest value of equal parts of the x-axis,
    and the first and the last point. `xs` ascends."""
    if len(xs) <= points:
        return xs, ys
    parts = max(1, (points - 2) // 2)
    bounds = np.searchsorted(xs, np.linspace(xs[0], xs[-1], parts + 1)[1:-1])
    kept = {0, len(xs) - 1}
    for first, last in zip([0, *bounds], [*bounds, len(xs)], strict=True):
        if last > first:
            kept |= {first + int(ys[first:last].argmin()), first + int(ys[first:last].argmax())}
    chosen = np.array(sorted(kept))
    return xs[chosen], ys[chosen]


def _window(xs: Numbers, start: float | None, end: float | None) -> slice:
    """Return the points in the window, and the nearest one on each side of it, to which lines lead."""
    first = 0 if start is None else max(0, int(np.searchsorted(xs, start)) - 1)
    last = len(xs) if end is None else int(np.searchsorted(xs, end, "right")) + 1
    return slice(first, last)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
