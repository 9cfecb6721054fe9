"""`stretto compare`: the comparison of runs as tables."""

from collections.abc import Iterable

from rich.table import Table

from stretto.records.charts import FIGURES, SCORE, add_row, duration_text, figure, figure_table
from stretto.records.comparison import Comparison, SeedGroup
from stretto.records.run_folder import Estimate


def comparison_tables(comparison: Comparison) -> list[tuple[str, Table]]:
    """Return (title, table) for each part of the comparison."""
    runs = comparison.runs
    tables: list[tuple[str, Table]] = []
    if comparison.differences:
        table = figure_table("key", *(run.label for run in runs))
        for key, values in comparison.differences.items():
            add_row(table, key, *("-" if value is None else value for value in values))
        tables.append(("values that differ", table))
    if comparison.between:
        table = figure_table("run", "minus", "figure", "difference", "of")
        for each in comparison.between:
            add_row(table, each.run, each.minus, each.figure, _signed(each.difference), each.of)
        tables.append(("differences", table))
    tables += [_seeds_table(group, comparison) for group in comparison.groups]
    tables.append(("figures (of steps: means of the last 10)", _figures_table(comparison)))
    for key, curve in comparison.curves.items():
        table = figure_table("step", *(run.label for run in runs))
        for step, values in curve:
            add_row(table, str(step), *map(figure(key).text, values))
        tables.append((f"{figure(key).name} at equal steps (means of 10)", table))
    if comparison.scores:
        table = figure_table("version", *(run.label for run in runs))
        for version, values in comparison.scores:
            add_row(table, str(version), *map(SCORE.text, values))
        tables.append((comparison.measure, table))
    return tables


def _seeds_table(group: SeedGroup, comparison: Comparison) -> tuple[str, Table]:
    table = figure_table("figure", "mean over runs", "standard deviation")
    for label, mean, spread in (
        (comparison.measure, group.score, group.score_sd),
        (FIGURES["reward"].label, group.reward, group.reward_sd),
    ):
        if mean is not None:
            add_row(table, label, SCORE.text(mean), SCORE.text(spread))
    if group.difference is not None:
        paired = f"paired by {group.paired} seeds" if group.paired else "seeds not paired"
        minus = f"{group.figure} minus {', '.join(comparison.groups[0].runs)}"
        add_row(table, f"{minus} ({paired})", _signed(group.difference), "")
    return f"{len(group.runs)} runs that differ in their seed: {', '.join(group.runs)}", table


def _figures_table(comparison: Comparison) -> Table:
    runs, measure = comparison.runs, comparison.measure
    table = figure_table("figure", *(run.label for run in runs))

    def add(name: str, values: Iterable[object]) -> None:
        add_row(table, name, *("-" if value is None else str(value) for value in values))

    def add_means(key: str, values: Iterable[float | None]) -> None:
        add(figure(key).name, map(figure(key).text, values))

    add("state", (run.state for run in runs))
    add("seed", (run.seed for run in runs))
    add("steps", (run.steps for run in runs))
    add_means("reward", (run.reward for run in runs))
    add(measure, (run.last for run in runs))
    add(f"best {measure}", (run.best for run in runs))
    add_means("length", (run.length for run in runs))
    add_means("staleness", (run.staleness for run in runs))
    add_means("step_s", (run.step_s for run in runs))
    add_means("step_tokens_per_s", (run.tokens_per_s for run in runs))
    add("duration", (duration_text(run.wall_s) for run in runs))
    add("tickets trained", (run.trained for run in runs))
    add("tickets not trained", (run.not_trained for run in runs))
    return table


def _signed(difference: Estimate) -> str:
    return f"{'+' if difference.mean >= 0 else ''}{difference}"
