"""Charts of runs: names, units, digits, colours and reduced curves, the same in every view."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    add_row,
    change,
    duration_text,
    figure,
    figure_table,
    print_table,
    recent,
)
from stretto.records.metrics import HELD_OUT, MAIN_FIGURES, is_figure
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
    "add_row",
    "change",
    "duration_text",
    "figure",
    "figure_table",
    "panels_of",
    "part_texts",
    "print_table",
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
    Colour("#5a7d1a", "#a5c95c", 106),
)
"""Run n has the colour n modulo the number of colours. Each part of a step's time has one of its own."""
_MOST_COLUMNS = 100  # in the chart of step times
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
    """The curves of one key, for all runs that have figures of this key."""

    key: str
    curves: tuple[RunCurve, ...]


def panels_of(runs: Sequence[RunFolder], keys: Sequence[str] = MAIN_FIGURES, window: int = 1) -> list[Panel]:
    """Return a panel for each key of which some run has figures. Held-out scores are points in the panel of
    the reward; if no run has a reward, they have a panel in place of the reward's.

    Lines are smoothed over `window` steps. Raises ConfigError if metrics are damaged.
    """
    known_keys = {key for run in runs for key in run.figures()}
    if "reward" in keys and "reward" not in known_keys:
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
        if key in known_keys
    ]


def _curve(run: RunFolder, number: int, label: str, key: str, window: int) -> RunCurve | None:
    line = [] if key in HELD_OUT else smooth(run.series(key), window)
    points_key = key if key in HELD_OUT else run.held_out
    points = run.series(points_key) if key in ("reward", points_key) else []
    return RunCurve(label, number, line, points, FIGURES[points_key].label) if line or points else None


def smooth(points: Points, count: int) -> list[tuple[float, float]]:
    """Return the points, with each value replaced by the mean of it and the `count` − 1 values before it."""
    window: deque[float] = deque(maxlen=count)
    means: list[tuple[float, float]] = []
    for x, y in points:
        window.append(y)
        means.append((x, sum(window) / len(window)))
    return means


def thin(xs: Numbers, ys: Numbers, most: int) -> tuple[Numbers, Numbers]:
    """Return at most `most` of the points, whose line looks nearly the same: the first and the last point,
    and the lowest and the highest point in each of the equal parts of the x-axis. `xs` ascends."""
    if len(xs) <= most:
        return xs, ys
    parts = max(1, (most - 2) // 2)
    bounds = np.searchsorted(xs, np.linspace(xs[0], xs[-1], parts + 1)[1:-1])
    indices = {0, len(xs) - 1}
    for first, last in zip([0, *bounds], [*bounds, len(xs)], strict=True):
        if last > first:
            indices |= {first + int(ys[first:last].argmin()), first + int(ys[first:last].argmax())}
    ascending = np.array(sorted(indices))
    return xs[ascending], ys[ascending]


def thin_points(points: Points, most: int) -> list[tuple[float, float]]:
    """Return at most `most` of the points, as `thin` chooses them."""
    all_x, all_y = np.array(points, np.float64).reshape(-1, 2).T
    xs, ys = thin(all_x, all_y, most)
    return list(zip(xs.tolist(), ys.tolist(), strict=True))


@dataclass(frozen=True)
class StepTimes:
    """Where the time of a run's steps went. The first step is left out: it waits for the first groups."""

    steps: int
    """Number of newest steps over which `parts` has means; the verdict uses the same steps."""
    parts: tuple[tuple[str, float], ...]
    """(key, mean seconds in the newest steps) of parts that took time in any step."""
    columns: tuple[tuple[int, int, dict[str, float]], ...]
    """(first step, last step, part -> mean seconds) of each column in the chart."""

    @property
    def head(self) -> str:
        """The mean time of a step, in words."""
        total_s = math.fsum(seconds for _, seconds in self.parts)
        return f"{duration_text(total_s)} in the mean of the newest {self.steps} steps"


def part_texts(parts: Sequence[tuple[str, float]]) -> list[tuple[str, str, float]]:
    """Return (key, text with duration and share, seconds) for each (key, seconds) of `STEP_PARTS`."""
    total_s = math.fsum(seconds for _, seconds in parts) or 1.0
    return [
        (part, f"{FIGURES[part].label} {duration_text(seconds)} · {100 * seconds / total_s:.0f} %", seconds)
        for part, seconds in parts
    ]


def step_times(run: RunFolder) -> StepTimes | None:
    """Return where the time of steps went; None before the second step. ConfigError for damaged metrics."""
    lines = [line for line in run.steps if line["step"] > 1]
    if not lines:
        return None
    per_column = math.ceil(len(lines) / _MOST_COLUMNS)
    columns = tuple(
        (
            column[0]["step"],
            column[-1]["step"],
            {part: mean for part in STEP_PARTS if (mean := _mean(column, part)) > 0},
        )
        for column in (lines[first : first + per_column] for first in range(0, len(lines), per_column))
    )
    newest = lines[-VERDICT_STEPS:]
    shown_parts = {part for _, _, seconds in columns for part in seconds}
    parts = tuple((part, _mean(newest, part)) for part in STEP_PARTS if part in shown_parts)
    return StepTimes(len(newest), parts, columns)


def _mean(lines: Sequence[Mapping[str, Any]], key: str) -> float:
    values = [line.get(key) for line in lines]
    return math.fsum(value for value in values if is_figure(value)) / len(lines)
