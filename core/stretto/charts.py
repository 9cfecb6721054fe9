"""Charts of runs: how every view shows figures. One place has names, units, digits, colours and the curves,
reduced to what a picture can show; here they also become SVG, for reports and files.

A chart has no script. Its classes are `grid` for lines, `label` for texts, and `run0` to `run7` for what
belongs to a run; `chart_style` has their rules.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stretto.bus.messages.events import CAUSES
from stretto.errors import printable
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
    from stretto.run_folder import RunFolder

__all__ = [
    "COLOURS",
    "FIGURES",
    "RECENT_STEPS",
    "SCORE",
    "STEP_PARTS",
    "Bar",
    "Colour",
    "Figure",
    "Numbers",
    "Panel",
    "Points",
    "RunCurve",
    "StepTimes",
    "bar_chart",
    "change",
    "chart_file",
    "chart_style",
    "duration_text",
    "figure",
    "lane_chart",
    "line_chart",
    "panels_of",
    "part_class",
    "part_texts",
    "recent",
    "safe",
    "smooth",
    "step_time_chart",
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
    """On a light ground."""
    dark: str
    """On a dark ground."""
    terminal: int
    """Number of the terminal's 256 colours."""


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
_THEME = {
    "back": ("#fff", "#14171c"),
    "dim": ("#667", "#9aa3ad"),
    "line": ("#dde", "#2c323a"),
    **{f"c{number}": (colour.light, colour.dark) for number, colour in enumerate(COLOURS)},
}
"""Name of a colour in the style -> on a light and on a dark ground."""
_RULES = (
    ".grid{stroke:var(--line);stroke-width:1}"
    ".label{fill:var(--dim);font-size:12px;font-family:system-ui,sans-serif}"
    "polyline{fill:none;stroke-width:1.5;stroke-linejoin:round}"
    "circle{stroke:var(--back);stroke-width:1.5}"
) + "".join(
    f"polyline.run{n}{{stroke:var(--c{n})}}circle.run{n},rect.run{n}{{fill:var(--c{n})}}"
    f".key.run{n}{{background:var(--c{n})}}"
    for n in range(len(COLOURS))
)

_WIDTH, _HEIGHT = 400, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 10, 10, 26
_MOST_POINTS = 800
"""More points than a chart has pixels across would not show."""
_MOST_CHARACTERS = 4000
"""Of one foreign text."""
_LANE = 18
_LANE_NAMES = 120
_LINE_OF_TEXT = 22
_MOST_COLUMNS = 100
STEP_PARTS = ("train_s", *(f"wait/{cause}_s" for cause in reversed(CAUSES)))
"""Keys of the parts of a step's time, from the bottom of a chart upwards."""


@dataclass(frozen=True)
class RunCurve:
    """The figures of one run in one panel."""

    label: str
    run: int
    """Number of the run."""
    line: Points
    points: Points
    """Held-out scores."""
    measure: str
    """What these are."""


@dataclass(frozen=True)
class Panel:
    """One panel: the curves of all runs that have figures of its key."""

    key: str
    curves: tuple[RunCurve, ...]


def panels_of(runs: Sequence[RunFolder], keys: Sequence[str] = MAIN_FIGURES, window: int = 1) -> list[Panel]:
    """Return a panel for each key of which some run has figures. Held-out scores are points in the panel
    of the reward; where no run has a reward, they have a panel of their own in its place.

    Args:
        keys: keys of `metrics.jsonl`.
        window: number of steps over which lines are smoothed.

    Raises:
        ConfigError: if a run's metrics are damaged.
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
    """Number of newest steps that `parts` is about: those of the verdict."""
    parts: tuple[tuple[str, float], ...]
    """Each part that took some time in any step: its key, and its mean seconds in the newest steps."""
    columns: tuple[tuple[int, int, dict[str, float]], ...]
    """Equal numbers of steps: the first and the last, and the mean seconds of each part that took some."""

    @property
    def head(self) -> str:
        """The mean time of a step, in words."""
        all_s = math.fsum(seconds for _, seconds in self.parts)
        return f"{duration_text(all_s)} in the mean of the newest {self.steps} steps"


def part_texts(parts: Sequence[tuple[str, float]]) -> list[tuple[str, str, float]]:
    """Return parts of the time of steps, each with its words and share: key, text, seconds.

    Args:
        parts: keys of `STEP_PARTS`, with seconds.
    """
    all_s = math.fsum(seconds for _, seconds in parts) or 1.0
    return [
        (part, f"{FIGURES[part].label} {duration_text(seconds)} · {100 * seconds / all_s:.0f} %", seconds)
        for part, seconds in parts
    ]


def step_times(run: RunFolder) -> StepTimes | None:
    """Return where the time of a run's steps went; None before the second step.

    Raises:
        ConfigError: if the run's metrics are damaged.
    """
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


# ------------------------------------------------------------------------------------------- drawing


@dataclass(frozen=True)
class Bar:
    """One bar of a lane."""

    start: float
    end: float
    kind: str
    """Class in the style sheet."""
    text: str
    """Shown when the pointer is on it."""


@dataclass(frozen=True)
class _Scale:
    """A linear scale from values to pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self, count: int) -> list[float]:
        """Return round values inside the scale, about `count` of them."""
        rough = (self.high - self.low) / count
        power = 10 ** math.floor(math.log10(rough))
        step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough)
        first = math.ceil(self.low / step)
        return [step * number for number in range(first, math.floor(self.high / step) + 1)]


def chart_style() -> str:
    """Return the style sheet of charts, light or dark as the reader's system is."""
    light, dark = (";".join(f"--{name}:{each[ground]}" for name, each in _THEME.items()) for ground in (0, 1))
    return f":root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}{_RULES}"


def line_chart(curves: Sequence[RunCurve]) -> str:
    """Return a chart of curves over steps. At least one of them has a point."""
    return _svg(_curves_of(curves), _WIDTH, _HEIGHT, _line_parts(curves))


def chart_file(panels: Sequence[Panel]) -> str:
    """Return panels with their titles, two beside each other, below the names of the runs: a file that other
    programs show without a style sheet."""
    labels = {curve.run: curve.label for panel in panels for curve in panel.curves}
    top, cell = _LINE_OF_TEXT * len(labels) + 8, _HEIGHT + _LINE_OF_TEXT
    # Many programs ignore variables.
    style = re.sub(r"var\(--(\w+)\)", lambda match: _THEME[match[1]][0], _RULES)
    parts = [f"<style>{style}</style>"]
    for row, (number, label) in enumerate(sorted(labels.items())):
        up = _LINE_OF_TEXT * (row + 1)
        parts.append(f'<circle class="{_class(number)}" cx="12" cy="{up - 4}" r="4"/>')
        parts.append(_text(22, up, label, "start"))
    for place, panel in enumerate(panels):
        x, y = _WIDTH * (place % 2), top + cell * (place // 2)
        title = _text(_LEFT, -4, figure(panel.key).title, "start")
        drawn = "".join([title, *_line_parts(panel.curves)])
        parts.append(f'<g transform="translate({x},{y + _LINE_OF_TEXT})">{drawn}</g>')
    width, height = _WIDTH * min(2, len(panels)), top + cell * ((len(panels) + 1) // 2)
    own = f' xmlns="http://www.w3.org/2000/svg" width="{width}"'
    every = [curve for panel in panels for curve in panel.curves]
    return _svg(_curves_of(every), width, height, parts, own) + "\n"


def _curves_of(curves: Sequence[RunCurve]) -> str:
    return f"curves of {', '.join(dict.fromkeys(curve.label for curve in curves))}"


def _line_parts(curves: Sequence[RunCurve]) -> list[str]:
    every = [point for curve in curves for point in (*curve.line, *curve.points)]
    across = _scale([x for x, _ in every], _LEFT, _WIDTH - _RIGHT)
    up = _scale([y for _, y in every], _HEIGHT - _BOTTOM, _TOP)
    parts = [_frame(across, up)]
    for curve in curves:
        kind, label = _class(curve.run), safe(curve.label)
        shown = thin_points(curve.line, _MOST_POINTS)
        if shown:
            pairs = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in shown)
            parts.append(f'<polyline class="{kind}" points="{pairs}"><title>{label}</title></polyline>')
        parts += [
            f'<circle class="{kind}" cx="{across(x):.1f}" cy="{up(y):.1f}" r="4">'
            f"<title>{label}: {curve.measure} {SCORE.text(y)} at version {x:g}</title></circle>"
            for x, y in curve.points
        ]
    return parts


def bar_chart(counts: Sequence[Mapping[int, int]], labels: Sequence[str]) -> str:
    """Return a histogram, a bar for each run beside each other.

    Args:
        counts: of each run, value -> number of samples. At least one run has a value.
    """
    values = sorted({value for each in counts for value in each})
    shares = [{value: count / sum(each.values()) for value, count in each.items()} for each in counts]
    up = _Scale(0, max(share for each in shares for share in each.values()), _HEIGHT - _BOTTOM, _TOP)
    across = _Scale(values[0] - 0.5, values[-1] + 0.5, _LEFT, _WIDTH - _RIGHT)
    parts = [_horizontal_lines(up, "{:.0%}")]
    every = max(1, len(values) // 12)
    parts += [_text(across(value), _HEIGHT - 8, str(value), "middle") for value in values[::every]]
    width = 0.8 * (across(1) - across(0)) / len(counts)
    for number, (each, label) in enumerate(zip(shares, labels, strict=True)):
        for value, share in sorted(each.items()):
            left = across(value) + (number - len(counts) / 2) * width
            parts.append(
                f'<rect class="{_class(number)}" x="{left:.1f}" y="{up(share):.1f}" width="{width:.1f}" '
                f'height="{up(0) - up(share):.1f}">'
                f"<title>{safe(label)}: {share:.1%} at {value}</title></rect>"
            )
    return _svg(f"histogram of {', '.join(labels)}", _WIDTH, _HEIGHT, parts)


def step_time_chart(times: StepTimes) -> str:
    """Return the time of steps as stacked bars: training at the bottom, then each wait. Each part has
    the class that `part_class` names."""
    width = 1000
    most = max(math.fsum(seconds.values()) for _, _, seconds in times.columns)
    up = _Scale(0, most or 1.0, _HEIGHT - _BOTTOM, _TOP)
    across = _Scale(0, len(times.columns), _LEFT, width - _RIGHT)
    wide = 0.9 * (across(1) - across(0))
    parts = [_horizontal_lines(up, "{:.4g} s", width)]
    for place in range(0, len(times.columns), max(1, len(times.columns) // 10)):
        parts.append(_text(across(place + 0.5), _HEIGHT - 8, str(times.columns[place][0]), "middle"))
    for place, (first, last, seconds) in enumerate(times.columns):
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        text = ", ".join(f"{FIGURES[part].label} {duration_text(each)}" for part, each in seconds.items())
        below, bars = 0.0, ""
        for part, each in seconds.items():
            top = up(below + each)
            bars += (
                f'<rect class="{part_class(part)}" x="{across(place):.1f}" y="{top:.1f}" width="{wide:.1f}" '
                f'height="{up(below) - top:.1f}"/>'
            )
            below += each
        parts.append(f"<g><title>{steps}: {text}</title>{bars}</g>")
    return _svg("time of steps", width, _HEIGHT, parts, ' xmlns="http://www.w3.org/2000/svg"')


def part_class(part: str) -> str:
    """Return the class with the colour of a part of a step's time."""
    return _class(STEP_PARTS.index(part))


def lane_chart(lanes: Mapping[str, Sequence[Bar]], start: float, end: float) -> str:
    """Return bars over time, one lane below the other. Times are in seconds; the axis counts from `start`."""
    width, height = 1000, _LANE * len(lanes) + _BOTTOM
    across = _Scale(0, end - start, _LANE_NAMES, width - _RIGHT)
    parts = [
        f'<line class="grid" x1="{across(tick):.1f}" x2="{across(tick):.1f}" y1="0" y2="{height - _BOTTOM}"/>'
        + _text(across(tick), height - 8, f"{tick:g} s", "middle")
        for tick in across.ticks(10)
    ]
    for row, (name, bars) in enumerate(lanes.items()):
        top = row * _LANE
        parts.append(_text(_LANE_NAMES - 6, top + 13, name, "end"))
        for bar in bars:
            left = across(max(bar.start, start) - start)
            right = across(min(bar.end, end) - start)
            parts.append(
                f'<rect class="{bar.kind}" x="{left:.1f}" y="{top + 2}" width="{max(0.5, right - left):.1f}" '
                f'height="{_LANE - 4}"><title>{safe(bar.text)}</title></rect>'
            )
    return _svg("timeline", width, height, parts)


# ----------------------------------------------------------------------------------------- helpers


def _scale(values: Sequence[float], start: float, end: float) -> _Scale:
    """Return a scale that shows all values. Values beyond the range of floats would have no difference."""
    low, high = max(min(values), -1e300), min(max(values), 1e300)
    if low == high == 0:
        return _Scale(0.0, 1.0, start, end)
    margin = 0.04 * (high - low) or abs(high) * 0.1
    return _Scale(low - margin, high + margin, start, end)


def _frame(across: _Scale, up: _Scale) -> str:
    ticks = [tick for tick in across.ticks(6) if tick == round(tick)]
    return _horizontal_lines(up, "{:.4g}") + "".join(
        _text(across(tick), _HEIGHT - 8, f"{tick:.0f}", "middle") for tick in ticks
    )


def _horizontal_lines(up: _Scale, form: str, width: int = _WIDTH) -> str:
    return "".join(
        f'<line class="grid" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{up(tick):.1f}" y2="{up(tick):.1f}"/>'
        + _text(_LEFT - 6, up(tick) + 4, form.format(tick), "end")
        for tick in up.ticks(5)
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text class="label" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{safe(text)}</text>'


def safe(text: str) -> str:
    """Return foreign text for HTML: escaped, with control characters as escapes, and shortened if it is very
    long."""
    cut = f"{text[:_MOST_CHARACTERS]} …" if len(text) > _MOST_CHARACTERS else text
    return escape(printable(cut))


def _class(run: int) -> str:
    return f"run{run % len(COLOURS)}"


def _svg(label: str, width: int, height: int, parts: Sequence[str], attributes: str = "") -> str:
    named = f'role="img" aria-label="{safe(label)}"'
    return f'<svg{attributes} viewBox="0 0 {width} {height}" {named}>{"".join(parts)}</svg>'
