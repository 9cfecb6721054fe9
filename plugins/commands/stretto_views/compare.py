"""`stretto compare`: the comparison of runs as tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table

from stretto.charts import FIGURES, duration_text, figure
from stretto.run_folder import ACCURACY, Comparison, Estimate, RunFigures, SeedGroup
from stretto_views.tables import add_row, figure_table


def comparison_tables(comparison: Comparison) -> list[tuple[str, Table]]:
    """Return the comparison as tables, each with its title."""
    runs, accuracy = comparison.runs, FIGURES[ACCURACY]
    tables: list[tuple[str, Table]] = []
    if comparison.differences:
        table = figure_table("key", *(run.label for run in runs))
        for key, values in comparison.differences.items():
            add_row(table, key, *("-" if value is None else value for value in values))
        tables.append(("values that differ", table))
    if comparison.paired:
        table = figure_table("run", "minus", "version", "rows", "difference, paired by row")
        for each in comparison.paired:
            add_row(table, each.run, each.minus, str(each.version), str(each.rows), _signed(each.difference))
        tables.append((f"differences of {accuracy.label}", table))
    tables += [_seeds_table(group, comparison.groups[0]) for group in comparison.groups]
    tables.append(("figures (of steps: means of the last 10)", _figures_table(runs)))
    for key, curve in comparison.curves.items():
        table = figure_table("step", *(run.label for run in runs))
        for step, values in curve:
            add_row(table, str(step), *map(figure(key).text, values))
        tables.append((f"{figure(key).name} at equal steps (means of 10)", table))
    if comparison.accuracies:
        table = figure_table("version", *(run.label for run in runs))
        for version, values in comparison.accuracies:
            add_row(table, str(version), *map(accuracy.text, values))
        tables.append((accuracy.label, table))
    return tables


def _seeds_table(group: SeedGroup, first: SeedGroup) -> tuple[str, Table]:
    accuracy, table = FIGURES[ACCURACY], figure_table("figure", "mean over runs", "standard deviation")
    for shown, mean, spread in (
        (accuracy, group.accuracy, group.accuracy_sd),
        (FIGURES["reward"], group.reward, group.reward_sd),
    ):
        if mean is not None:
            add_row(table, shown.label, shown.text(mean), shown.text(spread))
    if group.difference is not None:
        paired = f"paired by {group.paired} seeds" if group.paired else "seeds not paired"
        minus = f"{accuracy.label} minus {', '.join(first.runs)}"
        add_row(table, f"{minus} ({paired})", _signed(group.difference), "")
    return f"{len(group.runs)} runs that differ in their seed: {', '.join(group.runs)}", table


def _figures_table(runs: Sequence[RunFigures]) -> Table:
    table = figure_table("figure", *(run.label for run in runs))
    for name, values in figure_rows(runs).items():
        add_row(table, name, *values)
    return table


def figure_rows(runs: Sequence[RunFigures]) -> dict[str, Iterable[str]]:
    """Return the figures of each run as texts, by the name of their row."""

    def of(key: str, values: Iterable[float | None]) -> tuple[str, Iterable[str]]:
        return figure(key).name, map(figure(key).text, values)

    accuracy = FIGURES[ACCURACY].label
    return dict(
        [
            ("state", (run.state for run in runs)),
            ("seed", (str(run.seed) for run in runs)),
            ("steps", (str(run.steps) for run in runs)),
            of("reward", (run.reward for run in runs)),
            (accuracy, (text_of(run.last) for run in runs)),
            (f"best {accuracy}", (text_of(run.best) for run in runs)),
            of("length", (run.length for run in runs)),
            of("staleness", (run.staleness for run in runs)),
            of("step_s", (run.step_s for run in runs)),
            of("step_tokens_per_s", (run.tokens_per_s for run in runs)),
            ("duration", (duration_text(run.wall_s) for run in runs)),
            ("tickets trained", (str(run.trained) for run in runs)),
            ("tickets not trained", (str(run.not_trained) for run in runs)),
        ]
    )


def text_of(value: object) -> str:
    """Return a value as a cell shows it."""
    return "-" if value is None else str(value)


def _signed(difference: Estimate) -> str:
    return f"{'+' if difference.mean >= 0 else ''}{difference}"
