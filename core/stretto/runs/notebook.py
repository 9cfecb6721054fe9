"""A run as a piece of HTML, for the output of a notebook's cell. Private.

Its style applies to this HTML alone. As in reports, all text from a run is escaped.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from stretto.charts import COLOURS, figure, line_chart, panels_of, safe
from stretto.records.metrics import ACCURACY, is_figure
from stretto.run_folder import RunFolder, is_run

_FIGURES = ("reward", "loss", "entropy", "grad_norm", "length", "staleness", "step_s", "step_tokens_per_s")
"""Keys of `metrics.jsonl` whose newest value the piece shows."""
_STYLE = Path(__file__).with_name("notebook.css")
_COLOURS = (
    f".stretto-run polyline{{fill:none;stroke:{COLOURS[0].light};stroke-width:1.5;stroke-linejoin:round}}"
    f".stretto-run circle{{fill:{COLOURS[1].light}}}"
)


def run_html(folder: Path, *, running: bool) -> str:
    """Return the run in a folder as it is now: how far it is, its newest figures, and its curves.

    Args:
        folder: need not exist yet.
        running: whether its kernel runs.

    Raises:
        ConfigError: if the run's files are damaged.
    """
    parts = list(_parts(RunFolder(folder), running)) if is_run(folder) else ["<p>the run is starting</p>"]
    return f'<div class="stretto-run"><style>{_STYLE.read_text()}{_COLOURS}</style>{"".join(parts)}</div>'


def _parts(run: RunFolder, running: bool) -> Iterator[str]:
    yield f"<p><b>{safe(run.name)}</b> {safe(_now(run, running))}</p>"
    reason = (run.summary or {}).get("reason") if not running else ""
    if reason:
        yield f'<p class="reason">{safe(reason)}</p>'
    if figures := list(_newest(run)):
        names = "".join(f"<th>{safe(figure(key).name)}</th>" for key, _ in figures)
        values = "".join(f"<td>{figure(key).text(value)}</td>" for key, value in figures)
        yield f"<table><tr>{names}</tr><tr>{values}</tr></table>"
        charts = (
            f"<figure><figcaption>{safe(figure(panel.key).title)}</figcaption>{line_chart(panel.curves)}</figure>"
            for panel in panels_of([run])
        )
        yield f'<div class="charts">{"".join(charts)}</div>'
    yield f'<p class="folder">{safe(str(run.folder))}</p>'


def _now(run: RunFolder, running: bool) -> str:
    """Describe how far the run is, and what it does."""
    how_far = f"step {len(run.steps)} of {run.config['steps']}"
    now = run.status.now if run.status is not None else "starting"
    return f"{how_far}, {now if running else run.state}"


def _newest(run: RunFolder) -> Iterator[tuple[str, float]]:
    newest = run.steps[-1] if run.steps else {}
    yield from ((key, value) for key in _FIGURES if is_figure(value := newest.get(key)))
    if accuracy := run.series(ACCURACY):
        yield ACCURACY, accuracy[-1][1]
