"""A run as a piece of HTML, for the output of a notebook's cell.

Its style applies to this HTML alone. As in reports, all text from a run is escaped.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from stretto.cli.show.html import safe
from stretto.cli.show.plot import RunCurve, panels_of
from stretto.cli.show.svg import line_chart
from stretto.records.figures import figure
from stretto.records.metrics import ACCURACY, is_figure
from stretto.records.run import RunRecord, is_run

__all__ = ["run_html"]

_FIGURES = ("reward", "loss", "entropy", "grad_norm", "length", "staleness", "step_s", "step_tokens_per_s")
"""Keys of `metrics.jsonl` whose newest value the piece shows."""
_STYLE = Path(__file__).with_name("notebook.css")


def run_html(folder: Path, *, running: bool) -> str:
    """Return the run in a folder as it is now: how far it is, its newest figures, and its curves.

    Args:
        folder: need not exist yet.
        running: whether its kernel runs.

    Raises:
        ConfigError: if the run's files are damaged.
    """
    parts = list(_parts(RunRecord(folder), running)) if is_run(folder) else ["<p>the run is starting</p>"]
    return f'<div class="stretto-run"><style>{_STYLE.read_text()}</style>{"".join(parts)}</div>'


def _parts(run: RunRecord, running: bool) -> Iterator[str]:
    yield f"<p><b>{safe(run.name)}</b> {safe(_now(run, running))}</p>"
    reason = (run.summary or {}).get("reason") if not running else ""
    if reason:
        yield f'<p class="reason">{safe(reason)}</p>'
    if figures := list(_newest(run)):
        names = "".join(f"<th>{safe(figure(key).name)}</th>" for key, _ in figures)
        values = "".join(f"<td>{figure(key).text(value)}</td>" for key, value in figures)
        yield f"<table><tr>{names}</tr><tr>{values}</tr></table>"
        charts = (
            f"<figure><figcaption>{safe(figure(panel.key).title)}</figcaption>{_chart(panel.curves[0])}</figure>"
            for panel in panels_of([run], (), 1)
        )
        yield f'<div class="charts">{"".join(charts)}</div>'
    yield f'<p class="folder">{safe(str(run.folder))}</p>'


def _now(run: RunRecord, running: bool) -> str:
    """Describe how far the run is, and what it does."""
    how_far = f"step {len(run.steps)} of {run.document['steps']}"
    now = run.status.now if run.status is not None else "starting"
    return f"{how_far}, {now if running else run.state}"


def _newest(run: RunRecord) -> Iterator[tuple[str, float]]:
    newest = run.steps[-1] if run.steps else {}
    yield from ((key, value) for key in _FIGURES if is_figure(value := newest.get(key)))
    if accuracy := run.series(ACCURACY):
        yield ACCURACY, accuracy[-1][1]


def _chart(curve: RunCurve) -> str:
    return line_chart([(curve.run, curve.label, curve.line, curve.points)])
