"""`stretto report`: a run, or several, as one HTML file that needs no network and has no script.

Everything that comes from a run is escaped, and control characters are shown as escapes. The page's policy
forbids scripts and every address, so text that were taken for markup could not do anything either.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stretto.charts import (
    COLOURS,
    SCORE,
    bar_chart,
    chart_style,
    figure,
    line_chart,
    panels_of,
    part_class,
    part_texts,
    safe,
    step_time_chart,
    step_times,
)
from stretto.errors import ConfigError
from stretto.run_folder import Comparison, RunFolder, compare_runs, labels_of
from stretto_views.compare import figure_rows, text_of
from stretto_views.report_samples import samples_html

_CURVES = (
    *("reward", "loss", "entropy", "grad_norm", "length", "staleness", "behaviour_kl", "truncated", "step_s"),
    "step_tokens_per_s",
)
"""Keys of the figures that have a chart. That of the reward has held-out accuracies as points."""
_STYLE = Path(__file__).with_name("report.css")


def write_report(runs: Sequence[RunFolder], file: Path) -> None:
    """Write the report of runs."""
    text = report_html(runs)
    try:
        file.write_text(text)
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error}") from error


def report_html(runs: Sequence[RunFolder]) -> str:
    """Return the report of runs as one HTML page."""
    labels = labels_of(runs)
    comparison = compare_runs(runs)
    several = len(runs) > 1
    title = f"{', '.join(dict.fromkeys(run.name for run in runs))}: report"
    sections = [
        f"<h1>{safe(title)}</h1>",
        f'<p class="dim">written {time.strftime("%Y-%m-%d %H:%M")}</p>',
        _legend(labels) if several else "",
        _section("Summary", _summary(comparison)),
        _section("Curves", _charts(runs)),
        _section("Evaluations", _evaluations(comparison)),
        _section("Staleness of trained samples", _staleness(runs, labels)),
        _section("Values that differ", _differences(comparison, labels)) if several else "",
        *(
            _section(f"{name} of {label}" if several else name, draw(run))
            for name, draw in _OF_EACH_RUN.items()
            for run, label in zip(runs, labels, strict=True)
        ),
    ]
    style = chart_style() + _STYLE.read_text()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; form-action 'none'; base-uri 'none'"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{safe(title)}</title><style>{style}</style></head><body>{''.join(sections)}</body></html>\n"
    )


# ---------------------------------------------------------------------------------------- sections


def _section(title: str, content: str) -> str:
    return f"<section><h2>{safe(title)}</h2>{content}</section>" if content else ""


def _legend(labels: Sequence[str]) -> str:
    keys = (f'<span class="key run{n % len(COLOURS)}"></span>{safe(label)}' for n, label in enumerate(labels))
    return f"<p>{' &emsp; '.join(keys)}</p>"


def _summary(comparison: Comparison) -> str:
    runs = comparison.runs
    left_out = {figure("length").name, figure("staleness").name, "tickets trained", "tickets not trained"}
    texts: dict[str, Iterable[str]] = {
        "run": (run.label for run in runs),
        "verdict": (run.verdict for run in runs),
        **{name: cells for name, cells in figure_rows(comparison).items() if name not in left_out},
        "folder": (run.folder for run in runs),
    }
    rows = (
        f"<tr><th>{name}</th>{''.join(f'<td>{safe(text)}</td>' for text in cells)}</tr>"
        for name, cells in texts.items()
    )
    groups = "".join(
        f"<p>{len(group.runs)} runs that differ in their seed: {safe(', '.join(group.runs))}: "
        f"{comparison.measure} {SCORE.text(group.score)}, "
        f"standard deviation {SCORE.text(group.score_sd)}</p>"
        for group in comparison.groups
    )
    means = '<p class="dim">Figures of steps are means of the last 10.</p>'
    return f'<div class="wide"><table>{"".join(rows)}</table></div>{means}{groups}'


def _charts(runs: Sequence[RunFolder]) -> str:
    charts: list[str] = []
    for panel in panels_of(runs, _CURVES):
        known = figure(panel.key)
        head = f'<h3 title="{safe(known.meaning)}">{safe(known.title)}</h3>'
        charts.append(f'<div class="card" id="curve-{panel.key}">{head}{line_chart(panel.curves)}</div>')
    return f'<div class="grid-of-charts">{"".join(charts)}</div>' if charts else ""


def _evaluations(comparison: Comparison) -> str:
    if not any(run.last for run in comparison.runs):
        return ""
    labels = [run.label for run in comparison.runs]
    rows = ((str(version), *map(SCORE.text, values)) for version, values in comparison.scores)
    table = _table(("version", *labels), rows, "n")
    caution = f"<p>Caution: {safe(comparison.caution)}.</p>" if comparison.caution else ""
    paired = caution + "".join(
        f"<p>{safe(each.run)} minus {safe(each.minus)} at version {each.version}, paired by {each.rows} "
        f"rows: {safe(str(each.difference))}</p>"
        for each in comparison.paired
    )
    return table + paired


def _staleness(runs: Sequence[RunFolder], labels: Sequence[str]) -> str:
    counts = [
        {int(key): int(count) for key, count in (run.summary or {}).get("staleness", {}).items()}
        for run in runs
    ]
    known = [(each, label) for each, label in zip(counts, labels, strict=True) if each]
    if not known:
        return ""
    chart = bar_chart([each for each, _ in known], [label for _, label in known])
    return f'<div class="card" id="staleness">{chart}</div>'


def _step_times(run: RunFolder) -> str:
    """Draw where the time of the steps went."""
    times = step_times(run)
    if times is None:
        return ""
    keys = " &emsp; ".join(
        f'<span class="key {part_class(part)}"></span>{safe(text)}'
        for part, text, _ in part_texts(times.parts)
    )
    chart = f'<div class="card wide times">{step_time_chart(times)}<p>{keys}</p></div>'
    return f'<p class="dim">{times.head}</p>{chart}'


def _ledger(run: RunFolder) -> str:
    summary: Mapping[str, Any] = run.summary or {}
    ledger: Mapping[str, int] = summary.get("ledger") or (run.steps[-1]["ledger"] if run.steps else {})
    if not ledger:
        return ""
    issued, *accounts = ledger.items()
    sums = " + ".join(f"{name.replace('_', ' ')} {count}" for name, count in accounts)
    reasons: Mapping[str, int] = summary.get("reasons") or (run.status.reasons if run.status else {})
    rows = "".join(
        f'<tr><td class="n">{count} ×</td><td>{safe(reason)}</td></tr>'
        for reason, count in sorted(reasons.items(), key=lambda item: -item[1])[:20]
    )
    return f"<p>{issued[0]} {issued[1]} = {safe(sums)}</p>" + (f"<table>{rows}</table>" if rows else "")


def _advice(run: RunFolder) -> str:
    summary: Mapping[str, Any] | None = run.summary
    if summary is not None:
        items = [
            f"since step {each['since']}: {each['message']}"
            + ("" if each["until"] is None else f" (until {each['until']})")
            for each in summary.get("advice", [])
        ]
        items += summary.get("problems", [])
    else:
        items = [
            f"since step {each.since}: {each.message}" for each in (run.status.advice if run.status else [])
        ]
    return f"<ul>{''.join(f'<li>{safe(item)}</li>' for item in items)}</ul>" if items else ""


def _differences(comparison: Comparison, labels: Sequence[str]) -> str:
    if not comparison.differences:
        return ""
    return _table(
        ("key", *labels), ((key, *map(text_of, values)) for key, values in comparison.differences.items())
    )


def _configuration(run: RunFolder) -> str:
    rows = "".join(
        f"<tr><td>{safe(key)}</td><td>{safe(text)}</td></tr>" for key, text in run.values().items()
    )
    return f"<details><summary>all keys</summary><table>{rows}</table></details>"


# ----------------------------------------------------------------------------------------- helpers


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """Return a table.

    Args:
        kind: class of all columns but the first.
    """

    def row(tag: str, cells: Sequence[str]) -> str:
        first, *others = map(safe, cells)
        begin = f'<{tag} class="{kind}">' if kind else f"<{tag}>"
        return f"<tr><{tag}>{first}</{tag}>{''.join(f'{begin}{each}</{tag}>' for each in others)}</tr>"

    body = "".join(row("td", cells) for cells in rows)
    return f'<div class="wide"><table>{row("th", heads)}{body}</table></div>'


_OF_EACH_RUN = {
    "Time of a step": _step_times,
    "Tickets": _ledger,
    "Advice": _advice,
    "Samples": samples_html,
    "Configuration": _configuration,
}
"""Title -> the function that draws this section of one run."""
