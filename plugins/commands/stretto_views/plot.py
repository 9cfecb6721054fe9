"""`stretto plot`: curves in the terminal, a panel for each key (see `stretto.records.charts.panels_of`)."""

from collections.abc import Sequence
from typing import Any

from stretto.errors import ConfigError, offer, printable
from stretto.records.charts import COLOURS, SCORE, Panel, RunCurve, figure, panels_of, thin_points
from stretto.records.run_folder import MAIN_FIGURES, RunFolder

_MOST_POINTS = 4000  # of a curve
_LINES_HIGH = 16  # of a panel
_TICKS = 6  # parts of the x-axis
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
"""Marks of the curves of several runs, without colours."""


def wanted_panels(runs: Sequence[RunFolder], keys: Sequence[str], window: int) -> list[Panel]:
    """Return a panel for each key; without keys, panels of reward, loss, entropy and gradient norm."""
    all_keys = dict.fromkeys(key for run in runs for key in run.figures())
    for key in keys:
        if key not in all_keys:
            raise ConfigError(f"no run has the key {key!r}{offer(key, all_keys, 'keys')}")
    panels = panels_of(runs, keys or MAIN_FIGURES, window)
    if not panels:
        raise ConfigError(f"no figures yet in {', '.join(str(run.folder) for run in runs)}")
    return panels


def draw_text(panels: Sequence[Panel], width: int, *, coloured: bool) -> str:
    """Return the panels as text, one below the other."""
    try:
        import plotext
    except ImportError as error:
        raise ConfigError("`stretto plot` needs plotext: pip install 'stretto[plot]'") from error
    return "\n\n".join(_draw_text(plotext, panel, width, coloured) for panel in panels)


def _draw_text(plotext: Any, panel: Panel, width: int, coloured: bool) -> str:
    plot = plotext.figure
    plot.clear()
    plot.theme("colorless")
    plot.plot_size(width, _LINES_HIGH)
    heads: list[str] = []
    several = len(panel.curves) > 1
    for curve in panel.curves:
        letter = _LETTERS[curve.run % len(_LETTERS)] if several and not coloured else "hd"
        colour = COLOURS[curve.run % len(COLOURS)].terminal if coloured else None
        for points, symbol in ((curve.line, letter), (curve.points, "●")):
            if points:
                xs, ys = zip(*thin_points(points, width if symbol == "●" else _MOST_POINTS), strict=True)
                signal = plot.signal(list(xs), list(ys), marker=plotext.marker(symbol, pixel=colour))
                signal.lines(points is curve.line)
                plot.draw(signal)
        heads.append(_head(curve, panel.key, letter if several else "", colour))
    steps = [x for curve in panel.curves for x, _ in (*curve.line, *curve.points)]
    ticks = sorted(
        {round(min(steps) + (max(steps) - min(steps)) * part / _TICKS) for part in range(_TICKS + 1)}
    )
    plot.ruler("x").ticks(ticks, list(map(str, ticks)))
    drawing = str(plot.build())
    return "\n".join([*heads, drawing.rstrip("\n") if coloured else plotext.uncolorize(drawing).rstrip("\n")])


def _head(curve: RunCurve, key: str, letter: str, colour: int | None) -> str:
    shown, parts = figure(key), list[str]()
    if curve.line:
        parts.append(f"{shown.label} {shown.text(curve.line[-1][1])} at step {curve.line[-1][0]}")
    if curve.points:
        version, value = curve.points[-1]
        parts.append(f"● {curve.measure} {SCORE.text(value)} at version {version}")
    sign = "" if colour is not None or not letter else f"{letter}  "
    text = printable(f"{sign}{curve.label}: {', '.join(parts)}")
    return text if colour is None else f"\x1b[38;5;{colour}m{text}\x1b[0m"
