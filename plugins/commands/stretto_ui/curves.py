"""Curves for the page: smoothed, and reduced to the pixels of the window, with extremes."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from stretto.records.charts import Numbers, thin
from stretto.records.run_folder import HELD_OUT, estimate_score, is_figure


class ShownCurve(msgspec.Struct):
    """One figure in a window, of one run or as the mean of several."""

    x: list[float]
    y: list[float]
    smooth_x: list[float]
    """Without smoothing, this and `smooth_y` are empty."""
    smooth_y: list[float]
    total: int
    ci95: list[float | None]
    """Held-out scores of one run: half-widths of 95 % intervals, for independent answers; else empty."""
    sd: list[float]
    """Of several runs: standard deviation at each point of `smooth_y`, or of `y` without smoothing."""


def curve(
    runs: Sequence[Sequence[dict[str, Any]]],
    key: str,
    *,
    x: str,
    start: float | None,
    end: float | None,
    points: int,
    smoothing: float,
) -> ShownCurve:
    """Return the figure `key` over `x` in a window; for several runs, the mean at common steps. `smoothing`:
    weight of earlier points, 0 to below 1, including points before the window."""
    tables = [{line["step"]: (line[x], line[key]) for line in lines if _has(line, x, key)} for lines in runs]
    steps = sorted(set.intersection(*map(set, tables)))
    known = np.array([[table[step] for step in steps] for table in tables], np.float64)
    known = known.reshape(len(runs), -1, 2)
    xs, ys = known.mean(0).T
    sd = known[..., 1].std(0, ddof=1) if len(runs) > 1 else np.empty(0)
    window = _window(xs, start, end)
    shown = _shown(xs[window], ys[window], points)
    smooth_shown = _shown(xs[window], smooth(ys, smoothing)[window], points) if smoothing else ([], [])
    if len(sd):
        indices = np.searchsorted(xs, smooth_shown[0] if smoothing else shown[0])
        sd = (smooth(sd, smoothing) if smoothing else sd)[indices]
    ci95 = _intervals(runs[0], x, key, shown[0]) if key in HELD_OUT and len(runs) == 1 else []
    return ShownCurve(*shown, *smooth_shown, total=len(xs[window]), ci95=ci95, sd=sd.tolist())


def _has(line: dict[str, Any], *keys: str) -> bool:
    return all(is_figure(line.get(key)) for key in keys)


def _shown(xs: Numbers, ys: Numbers, points: int) -> tuple[list[float], list[float]]:
    shown_x, shown_y = thin(xs, ys, points)
    return shown_x.tolist(), shown_y.tolist()


def _intervals(
    lines: Sequence[dict[str, Any]], x: str, key: str, shown: Sequence[float]
) -> list[float | None]:
    half_widths = {
        line[x]: estimate_score(
            line[key],
            line["evaluation/samples"],
            None if key == HELD_OUT[0] else line.get("evaluation/reward_std"),
        ).ci95
        for line in lines
        if _has(line, x, key, "evaluation/samples")
    }
    return [half_widths.get(value) for value in shown]


def smooth(values: Numbers, weight: float) -> Numbers:
    """Return the exponential moving average (N,), divided by the sum of its weights, as in TensorBoard."""
    smoothed = np.empty_like(values)
    mean, total = 0.0, 0.0
    for index, value in enumerate(values.tolist()):
        mean = weight * mean + (1 - weight) * value
        total = weight * total + (1 - weight)
        smoothed[index] = mean / total
    return smoothed


def _window(xs: Numbers, start: float | None, end: float | None) -> slice:
    """Return the indices of points in the window, and of the next point on each side, for the lines."""
    first = 0 if start is None else max(0, int(np.searchsorted(xs, start)) - 1)
    last = len(xs) if end is None else int(np.searchsorted(xs, end, "right")) + 1
    return slice(first, last)
