"""Charts as inline SVG, for reports, and as files. They have no script; colours come from `report.css`.

Classes: `axis` and `grid` lines, `label` texts, and `run0` to `run6` for what belongs to a run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from stretto.errors import printable
from stretto.records.curves import Points, thin_points
from stretto.run_folder import ACCURACY, FIGURES

__all__ = ["STYLE", "Bar", "Curve", "bar_chart", "chart_file", "lane_chart", "line_chart"]

Curve = tuple[int, str, Points, Points]
"""Number of a run, its label, its line, and its held-out accuracies as single points."""
STYLE = Path(__file__).with_name("report.css")

_WIDTH, _HEIGHT = 400, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 10, 10, 26
_MOST_POINTS = 800
"""More points than a chart has pixels across would not show."""
_RUNS = 7
_NAMESPACE = "http://www.w3.org/2000/svg"
_LANE = 18
_LANE_NAMES = 120
_LINE_OF_TEXT = 22


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


def line_chart(curves: Sequence[Curve]) -> str:
    """Return a chart of curves over steps. At least one of them has a point."""
    return _svg(_WIDTH, _HEIGHT, _line_parts(curves))


def chart_file(charts: Sequence[tuple[str, Sequence[Curve]]]) -> str:
    """Return charts with their titles, two beside each other, below the names of the runs: a file that other
    programs show without a style sheet."""
    labels = {number: label for _, curves in charts for number, label, _, _ in curves}
    top, cell = _LINE_OF_TEXT * len(labels) + 8, _HEIGHT + _LINE_OF_TEXT
    parts = [f"<style>{_literal_style()}</style>"]
    for row, (number, label) in enumerate(sorted(labels.items())):
        up = _LINE_OF_TEXT * (row + 1)
        parts.append(f'<circle class="run{number % _RUNS}" cx="12" cy="{up - 4}" r="4"/>')
        parts.append(_text(22, up, label, "start"))
    for place, (title, curves) in enumerate(charts):
        x, y = _WIDTH * (place % 2), top + cell * (place // 2)
        drawn = "".join([_text(_LEFT, -4, title, "start"), *_line_parts(curves)])
        parts.append(f'<g transform="translate({x},{y + _LINE_OF_TEXT})">{drawn}</g>')
    width, height = _WIDTH * min(2, len(charts)), top + cell * ((len(charts) + 1) // 2)
    return _svg(width, height, parts).replace("<svg", f'<svg xmlns="{_NAMESPACE}" width="{width}"', 1) + "\n"


def _literal_style() -> str:
    """Return the style of charts with the light colours in place of variables, which many programs ignore."""
    css = STYLE.read_text()
    colours = dict(re.findall(r"(--\w+):(#\w+)", css.partition("@media")[0]))
    rules = re.findall(r"(?:polyline|circle|rect\.run|\.grid|\.label)[^{}]*\{[^}]*\}", css)
    return re.sub(r"var\((--\w+)\)", lambda match: colours[match[1]], "".join(rules))


def _line_parts(curves: Sequence[Curve]) -> list[str]:
    every = [point for _, _, line, points in curves for point in (*line, *points)]
    across = _scale([x for x, _ in every], _LEFT, _WIDTH - _RIGHT)
    up = _scale([y for _, y in every], _HEIGHT - _BOTTOM, _TOP)
    parts = [_frame(across, up)]
    for number, label, line, points in curves:
        shown = thin_points(line, _MOST_POINTS)
        if shown:
            pairs = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in shown)
            parts.append(
                f'<polyline class="run{number % _RUNS}" points="{pairs}">'
                f"<title>{_safe(label)}</title></polyline>"
            )
        parts += [
            f'<circle class="run{number % _RUNS}" cx="{across(x):.1f}" cy="{up(y):.1f}" r="4">'
            f"<title>{_safe(label)}: {FIGURES[ACCURACY].text(y)} at version {x:g}</title></circle>"
            for x, y in points
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
                f'<rect class="run{number % _RUNS}" x="{left:.1f}" y="{up(share):.1f}" width="{width:.1f}" '
                f'height="{up(0) - up(share):.1f}">'
                f"<title>{_safe(label)}: {share:.1%} at {value}</title></rect>"
            )
    return _svg(_WIDTH, _HEIGHT, parts)


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
                f'height="{_LANE - 4}"><title>{_safe(bar.text)}</title></rect>'
            )
    return _svg(width, height, parts)


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


def _horizontal_lines(up: _Scale, form: str) -> str:
    return "".join(
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{up(tick):.1f}" y2="{up(tick):.1f}"/>'
        + _text(_LEFT - 6, up(tick) + 4, form.format(tick), "end")
        for tick in up.ticks(5)
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text class="label" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{_safe(text)}</text>'


def _safe(text: str) -> str:
    return escape(printable(text))


def _svg(width: int, height: int, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img">{"".join(parts)}</svg>'
