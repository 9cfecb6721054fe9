"""The report of a sweep: the figures of every run, and of every combination over its seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import stdev

import msgspec
from rich.table import Table

from stretto.base.private_file import write_private
from stretto.cli.output import add_row, figure_table
from stretto.cli.sweep.sweep import ManifestRun
from stretto.records.comparison import RunFigures, measure_of_all, run_figures
from stretto.records.figures import FIGURES, Figure, duration_text
from stretto.records.intervals import Estimate, Moments, mean_of
from stretto.run_folder import RunFolder

_FIGURES = ("score", "best", "reward", "seconds")
"""Held-out score of the last evaluation, highest held-out score, mean reward of the last 10 steps, duration
of the run in seconds."""


class SweptRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a sweep."""

    name: str
    combination: str
    values: dict[str, str]
    seed: str | None
    figures: RunFigures | None
    """As in `stretto compare`; None if the run has not begun."""

    @property
    def shown(self) -> dict[str, float | None]:
        """The figures that the report shows."""
        figures = self.figures
        if figures is None:
            return dict.fromkeys(_FIGURES)
        last, best = (each and each.score.mean for each in (figures.last, figures.best))
        return {"score": last, "best": best, "reward": figures.reward, "seconds": figures.wall_s}


class Spread(msgspec.Struct, frozen=True):
    """A figure over the seeds of a combination."""

    estimate: Estimate
    sd: float | None
    """Standard deviation between the runs; None for a single run."""


class CombinationFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one combination, over its complete runs."""

    combination: str
    values: dict[str, str]
    runs: int
    completed: int
    figures: dict[str, Spread]
    """By the names in `_FIGURES`."""


class SweepReport(msgspec.Struct, frozen=True):
    """The content of `sweep.json`."""

    runs: list[SweptRun]
    combinations: list[CombinationFigures]
    """The highest score first; without evaluations, the highest reward."""


def report_of(folder: Path, runs: Mapping[str, ManifestRun]) -> SweepReport:
    """Return the report of a sweep from the folders of its runs.

    Raises:
        ConfigError: if the files of a run are damaged.
    """
    swept = [_swept(folder / name, run) for name, run in runs.items()]
    members: dict[str, list[SweptRun]] = {}
    for run in swept:
        members.setdefault(run.combination, []).append(run)
    return SweepReport(swept, sorted(map(_combined, members.values()), key=_rank, reverse=True))


def write_report(folder: Path, report: SweepReport) -> None:
    """Write `sweep.json` into the sweep's folder."""
    write_private(folder / "sweep.json", msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


def _swept(folder: Path, run: ManifestRun) -> SweptRun:
    begun = (folder / "config.yaml").exists()
    return SweptRun(
        name=folder.name,
        combination=run.combination,
        values=run.values,
        seed=run.seed,
        figures=run_figures(RunFolder(folder), folder.name) if begun else None,
    )


def _combined(runs: list[SweptRun]) -> CombinationFigures:
    complete = [run.shown for run in runs if run.figures is not None and run.figures.state == "completed"]
    return CombinationFigures(
        combination=runs[0].combination,
        values=runs[0].values,
        runs=len(runs),
        completed=len(complete),
        figures={
            name: Spread(mean_of(Moments.of(values)), stdev(values) if len(values) > 1 else None)
            for name in _FIGURES
            if (values := [value for shown in complete if (value := shown[name]) is not None])
        },
    )


def _rank(combination: CombinationFigures) -> tuple[float, float]:
    figures = combination.figures
    mean = {name: figures[name].estimate.mean for name in figures}
    return mean.get("score", float("-inf")), mean.get("reward", float("-inf"))


# ----------------------------------------------------------------------------------------- as text


def report_tables(report: SweepReport) -> Iterable[tuple[str, Table]]:
    """Yield the tables of the report, each with its title."""
    if any(each.runs > 1 for each in report.combinations):
        title = "combinations (mean over complete runs ± 95 % interval; sd: between the runs)"
        yield title, _combinations(report)
    yield "runs (reward: mean of the last 10 steps)", _runs(report)


def _combinations(report: SweepReport) -> Table:
    shown = FIGURES["reward"]
    heads = (_measure(report), "sd", "best", shown.label, "sd", "duration")
    table = figure_table("combination", "runs", *heads)
    for each in report.combinations:
        last, best, rewards, seconds = (each.figures.get(name) for name in _FIGURES)
        add_row(
            table,
            each.combination or "all",
            f"{each.completed}/{each.runs}",
            _mean(shown, last),
            shown.text(last and last.sd),
            _mean(shown, best),
            _mean(shown, rewards),
            shown.text(rewards and rewards.sd),
            duration_text(seconds and seconds.estimate.mean),
        )
    return table


def _runs(report: SweepReport) -> Table:
    shown = FIGURES["reward"]
    table = figure_table("run", "state", "step", _measure(report), "best", shown.label, "duration")
    for run in report.runs:
        state, step = ("waiting", 0) if run.figures is None else (run.figures.state, run.figures.steps)
        last, best, rewards, seconds = run.shown.values()
        cells = (shown.text(last), shown.text(best), shown.text(rewards), duration_text(seconds))
        add_row(table, run.name, state, str(step), *cells)
    return table


def _measure(report: SweepReport) -> str:
    return measure_of_all(run.figures for run in report.runs)


def _mean(figure: Figure, spread: Spread | None) -> str:
    if spread is None:
        return "-"
    width = "" if spread.estimate.ci95 is None else f" ± {figure.text(spread.estimate.ci95)}"
    return f"{figure.text(spread.estimate.mean)}{width}"
