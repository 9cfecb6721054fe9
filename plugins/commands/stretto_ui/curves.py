"""Curves for the page: smoothed, and with as many points as the window has pixels.

A curve of a long run has more points than a screen, which shows the extremes; a smaller window shows all
points again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from stretto.charts import Numbers, thin
from stretto.run_folder import is_figure


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
    known = [(line[x], line[key]) for line in lines if is_figure(line.get(key)) and is_figure(line.get(x))]
    xs, ys = np.array(known, np.float64).reshape(-1, 2).T
    window = _window(xs, start, end)
    shown_x, shown_y = thin(xs[window], ys[window], points)
    smooth_x, smooth_y = np.empty(0), np.empty(0)
    if smoothing:
        smooth_x, smooth_y = thin(xs[window], smooth(ys, smoothing)[window], points)
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


def _window(xs: Numbers, start: float | None, end: float | None) -> slice:
    """Return the points in the window, and the nearest one on each side of it, to which lines lead."""
    first = 0 if start is None else max(0, int(np.searchsorted(xs, start)) - 1)
    last = len(xs) if end is None else int(np.searchsorted(xs, end, "right")) + 1
    return slice(first, last)
