"""Charts of runs: names, units, digits, colours and reduced curves, the same in every view."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stretto.bus.messages.events import CAUSES
from stretto.records.comparison import labels_of
from stretto.records.figures import (
    FIGURES,
    RECENT_STEPS,
    SCORE,
    VERDICT_STEPS,
    Figure,
    change,
    duration_text,
    figure,
    recent,
)
from stretto.records.metrics import HELD_OUT, MAIN_FIGURES, is_figure

if TYPE_CHECKING:
    from stretto.records.run_folder import RunFolder

__all__ = [
    "COLOURS",
    "FIGURES",
    "RECENT_STEPS",
    "SCORE",
    "STEP_PARTS",
    "Colour",
    "Figure",
    "Numbers",
    "Panel",
    "Points",
    "RunCurve",
    "StepTimes",
    "change",
    "duration_text",
    "figure",
    "panels_of",
    "part_texts",
    "recent",
    "smooth",
    "step_times",
    "thin",
    "thin_points",
]

Numbers = NDArray[np.float64]
Points = Sequence[tuple[float, float]]
"""(x, y) with ascending x."""


@dataclass(frozen=True)
class Colour:
    """A colour that tells runs apart."""

    light: str
    dark: str
    terminal: int
    """One of the terminal's 256 colours."""


COLOURS = (
    Colour("#2f66cf", "#7aa2f2", 33),
    Colour("#c8641b", "#e79a5d", 208),
    Colour("#23845c", "#66bf95", 40),
    Colour("#ae3f63", "#e0839f", 161),
    Colour("#7653b8", "#ad92e6", 141),
    Colour("#86690f", "#cbb04e", 136),
    Colour("#1f8197", "#62bfd2", 37),
    Colour("#70757a", "#a3a8ae", 245),
)
"""Run n has colour n modulo their number."""
_MOST_COLUMNS = 100
STEP_PARTS = ("train_s", *(f"wait/{cause}_s" for cause in reversed(CAUSES)))
"""Keys of the parts of a step's time, from the bottom of a chart upwards."""


@dataclass(frozen=True)
class RunCurve:
    """The figures of one run in one panel."""

    label: str
    run: int
    line: Points
    points: Points
    """Held-out scores."""
    measure: str


@dataclass(frozen=True)
class Panel:
    """One panel: the curves of all runs that have figures of its key."""

    key: str
    curves: tuple[RunCurve, ...]


def panels_of(runs: Sequence[RunFolder], keys: Sequence[str] = MAIN_FIGURES, window: int = 1) -> list[Panel]:
    """Return a panel for each key with figures in some run. Held-out scores are points in the panel of the
    reward, or a panel in its place if no run has a reward.

    Lines are smoothed over `window` steps. Raises ConfigError if metrics are damaged.
    """
    known = {key for run in runs for key in run.figures()}
    if "reward" in keys and "reward" not in known:
        held_out = list(dict.fromkeys(run.held_out for run in runs if run.evaluations))
        keys = [
            each for key in keys if key not in held_out for each in (held_out if key == "reward" else [key])
        ]
    labels = labels_of(runs)
    return [
        Panel(
            key,
            tuple(
                curve
                for number, (label, run) in enumerate(zip(labels, runs, strict=True))
                if (curve := _curve(run, number, label, key, window)) is not None
            ),
        )
        for key in keys
        if key in known
    ]


def _curve(run: RunFolder, number: int, label: str, key: str, window: int) -> RunCurve | None:
    line = [] if key in HELD_OUT else smooth(run.series(key), window)
    of_points = key if key in HELD_OUT else run.held_out
    points = run.series(of_points) if key in ("reward", of_points) else []
    return RunCurve(label, number, line, points, FIGURES[of_points].label) if line or points else None


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


@dataclass(frozen=True)
class StepTimes:
    """Where the time of a run's steps went. The first step is left out: it waits for the first groups."""

    steps: int
    """Number of newest steps in `parts`: those of the verdict."""
    parts: tuple[tuple[str, float], ...]
    """(key, mean seconds in the newest steps) of parts that took time in any step."""
    columns: tuple[tuple[int, int, dict[str, float]], ...]
    """Equal numbers of steps: the first, the last, and mean seconds of each part that took some."""

    @property
    def head(self) -> str:
        """The mean time of a step, in words."""
        all_s = math.fsum(seconds for _, seconds in self.parts)
        return f"{duration_text(all_s)} in the mean of the newest {self.steps} steps"


def part_texts(parts: Sequence[tuple[str, float]]) -> list[tuple[str, str, float]]:
    """Return (key, text with share, seconds) for parts of `STEP_PARTS` with seconds."""
    all_s = math.fsum(seconds for _, seconds in parts) or 1.0
    return [
        (part, f"{FIGURES[part].label} {duration_text(seconds)} · {100 * seconds / all_s:.0f} %", seconds)
        for part, seconds in parts
    ]


def step_times(run: RunFolder) -> StepTimes | None:
    """Return where the time went; None before the second step. Raise ConfigError for damaged metrics."""
    lines = [line for line in run.steps if line["step"] > 1]
    if not lines:
        return None
    every = math.ceil(len(lines) / _MOST_COLUMNS)
    columns = tuple(
        (
            some[0]["step"],
            some[-1]["step"],
            {part: mean for part in STEP_PARTS if (mean := _mean(some, part)) > 0},
        )
        for some in (lines[first : first + every] for first in range(0, len(lines), every))
    )
    newest = lines[-VERDICT_STEPS:]
    drawn = {part for _, _, seconds in columns for part in seconds}
    parts = tuple((part, _mean(newest, part)) for part in STEP_PARTS if part in drawn)
    return StepTimes(len(newest), parts, columns)


def _mean(lines: Sequence[Mapping[str, Any]], key: str) -> float:
    values = [line.get(key) for line in lines]
    return math.fsum(value for value in values if is_figure(value)) / len(lines)
