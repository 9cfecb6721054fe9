"""`stretto runs`: all runs below a folder, by the last status that their kernels wrote."""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
from rich.table import Table

from stretto.errors import ConfigError, printable
from stretto.records.charts import FIGURES, SCORE, duration_text
from stretto.records.run_folder import RunFolder, find_runs


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """One run, as the table shows it."""

    name: str
    state: str
    verdict: str = ""
    """The verdict's first word, such as `learning`."""
    step: int | None = None
    """Number of finished steps; None without a status."""
    steps: int | None = None
    reward: float | None = None
    score: float | None = None
    measure: str = "accuracy"
    """The measure of the scores: `accuracy` or `reward`."""
    best: float | None = None
    started: float
    duration_s: float | None = None
    folder: str
    fault: str = ""


def runs_below(folder: Path) -> list[RunRow]:
    """Return the runs in and below a folder, the newest first. A run that cannot be read has a `fault`."""
    return sorted(map(_row, find_runs(folder)), key=lambda row: -row.started)


def _row(run: RunFolder) -> RunRow:
    row_of = partial(RunRow, started=run.started, folder=str(run.folder))
    try:
        status = run.status
        if status is None:
            return row_of(name=run.name, state=run.state)
        newest = status.evaluations[-1] if status.evaluations else None
        return row_of(
            name=status.name,
            state=run.state,
            verdict=status.verdict.state if status.verdict else "",
            step=status.version,
            steps=status.steps,
            reward=status.recent.get("reward"),
            score=newest.score if newest else None,
            measure=newest.measure if newest else "accuracy",
            best=status.best.score if status.best else None,
            duration_s=run.wall_s,
        )
    except ConfigError as error:
        return row_of(name=run.folder.name, state="unreadable", fault=str(error))


def runs_table(rows: Sequence[RunRow], root: Path) -> Table:
    """Return the table of runs. Folders are relative to `root`."""
    table = Table(box=None, pad_edge=False)
    reward = FIGURES["reward"]
    measures = {row.measure for row in rows if row.score is not None}
    comparable = len(measures) < 2
    held_out = f"held-out {min(measures, default='accuracy')}" if comparable else "held out"
    numbers = ("step", reward.label, held_out, "best", "duration")
    for column in ("name", "state", "verdict", *numbers[:-1], "started", "duration", "folder"):
        table.add_column(
            column,
            justify="right" if column in numbers else "left",
            no_wrap=column not in ("name", "folder"),
            overflow="fold",
        )
    for row in rows:
        step = "-" if row.step is None else f"{row.step}/{row.steps}"
        measure = "" if comparable or row.score is None else f"{row.measure} "
        figures = (reward.text(row.reward), measure + SCORE.text(row.score), SCORE.text(row.best))
        started = time.strftime("%Y-%m-%d %H:%M", time.localtime(row.started))
        duration = duration_text(row.duration_s)
        folder = f"{Path(row.folder).relative_to(root)}{f': {row.fault}' if row.fault else ''}"
        cells = (row.name, row.state, row.verdict, step, *figures, started, duration, folder)
        table.add_row(*map(printable, cells))
    return table
