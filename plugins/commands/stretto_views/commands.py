"""The commands `runs`, `samples`, `compare` and `plot`. The list of all commands imports this
module, so each function imports what it needs."""

from __future__ import annotations

import json
import os
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stretto.errors import ConfigError, printable

if TYPE_CHECKING:
    from stretto.records.run_folder import RunFolder

_Runs = Annotated[
    list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, or folders that hold runs.")
]


def runs(
    folder: Annotated[
        Path, typer.Argument(metavar="[FOLDER]", help="A folder with runs, at any depth.")
    ] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list instead of a table.")] = False,
) -> None:
    """List all runs below a folder, the newest first."""
    import msgspec

    from stretto.records.charts import print_table
    from stretto_views.runs import runs_below, runs_table

    rows = runs_below(folder)
    if as_json:
        typer.echo(msgspec.json.encode(rows))
    elif rows:
        print_table(runs_table(rows, folder.absolute()))
    else:
        typer.echo(f"no run in {folder}")


def samples(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")],
    ticket: Annotated[
        int | None, typer.Option(min=0, help="Number of the ticket; with --purpose eval, of an evaluation's.")
    ] = None,
    step: Annotated[str | None, typer.Option(metavar="A:B", help="Steps in which they were trained.")] = None,
    reward: Annotated[str | None, typer.Option(metavar="A:B", help="Lowest and highest reward.")] = None,
    length: Annotated[
        str | None, typer.Option(metavar="A:B", help="Number of tokens with the prompt.")
    ] = None,
    staleness: Annotated[str | None, typer.Option(metavar="A:B", help="Staleness at the train step.")] = None,
    finish: Annotated[str | None, typer.Option(help="Why sampling ended: stop or length.")] = None,
    text: Annotated[str | None, typer.Option(help="A text in the prompt or in the answer.")] = None,
    outcome: Annotated[
        str | None, typer.Option(help="trained, filtered, expired, failed or evaluated.")
    ] = None,
    failed: Annotated[bool, typer.Option("--failed", help="The same as --outcome failed.")] = False,
    purpose: Annotated[str | None, typer.Option(help="Only those of `train`, or of `eval`.")] = None,
    worker: Annotated[str | None, typer.Option(help="Rollout or inference worker.")] = None,
    source: Annotated[str | None, typer.Option(help="Part of the dataset.")] = None,
    variant: Annotated[str | None, typer.Option(help="Variant of an A/B test.")] = None,
    order: Annotated[
        str, typer.Option(help="For example reward; -reward begins with the highest.")
    ] = "sequence",
    limit: Annotated[int, typer.Option(min=1, help="Most samples to show.")] = 20,
    offset: Annotated[int, typer.Option(min=0, help="Leave out this many samples first.")] = 0,
    group: Annotated[
        bool, typer.Option("--group", help="Show the whole groups, their samples side by side.")
    ] = False,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="With jsonl and parquet: also tokens, logprobs, versions, …")
    ] = False,
    format: Annotated[str, typer.Option(help="text, jsonl, parquet, training-trace or atif.")] = "text",
    output: Annotated[Path | None, typer.Option(help="Write to this file.", metavar="FILE")] = None,
) -> None:
    """Show the samples that a run has kept, also while it runs: prompts, answers, rewards, outcomes."""
    from rich.console import Console

    from stretto.records.run_folder import RunFolder, is_run, open_samples
    from stretto_views import samples as sample_views

    if format not in (formats := ("text", "jsonl", "parquet", "training-trace", "atif")):
        raise ConfigError(f"--format {format!r}: expected {', '.join(formats[:-1])} or {formats[-1]}")
    if format == "parquet" and output is None:
        raise ConfigError("--format parquet needs --output FILE")
    if tokens and format not in ("jsonl", "parquet"):
        raise ConfigError("--tokens goes with --format jsonl or --format parquet")
    wanted = sample_views.sample_filter(
        {"step": step, "reward": reward, "length": length, "staleness": staleness},
        ticket=ticket,
        finish=finish,
        text=text,
        outcome="failed" if failed else outcome,
        purpose=purpose or (None if ticket is None else "train"),
        worker=worker,
        source=source,
        variant=variant,
    )
    store = open_samples(folder)
    tokens = tokens or format in ("training-trace", "atif")
    rows = store.find(wanted, limit=limit, offset=offset, order=order, tokens=tokens)
    if format == "training-trace" or format == "atif":
        rows = sample_views.trace_rows(store, rows, format, folder.absolute().name)
    if format == "parquet":
        assert output is not None
        sample_views.write_parquet(rows, output)
        return
    with output.open("w") if output else nullcontext(sys.stdout) as file:
        if format != "text":
            for row in rows:
                print(json.dumps(row), file=file)
            return
        console = Console(file=file, markup=False, emoji=False, highlight=False, soft_wrap=not group)
        if ticket is not None and is_run(folder):  # a copy of the samples alone has no history
            history = RunFolder(folder).history
            for line in sample_views.ticket_story(history, ticket, wanted.purpose or "train"):
                console.print(printable(line))
        if group:
            sample_views.print_groups(store, rows, console)
        else:
            sample_views.print_samples(rows, console)
    if not rows:
        typer.echo(sample_views.why_none(store, wanted), err=True)


def compare(
    folders: _Runs,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Compare runs: figures, values that differ, curves at equal steps, accuracies with 95 % intervals."""
    import msgspec

    from stretto.records.charts import print_table
    from stretto.records.comparison import compare_runs
    from stretto_views.compare import comparison_tables

    comparison = compare_runs(_runs_in(folders))
    if as_json:
        typer.echo(msgspec.json.encode(comparison))
        return
    if comparison.caution:
        typer.echo(f"caution: {printable(comparison.caution)}")
    for title, table in comparison_tables(comparison):
        typer.echo(f"\n{printable(title)}")
        print_table(table)


def plot(
    folders: _Runs,
    keys: Annotated[
        str,
        typer.Option(
            "--key", metavar="KEY,…", help="Keys of metrics.jsonl, such as reward,loss,evaluation/accuracy."
        ),
    ] = "",
    window: Annotated[
        int, typer.Option("--smooth", min=1, metavar="STEPS", help="Draw means over this many steps.")
    ] = 1,
) -> None:
    """Draw the curves of one run, or of several over each other, in the terminal."""
    from stretto_views.plot import draw_text, wanted_panels

    wanted = [key.strip() for key in keys.split(",") if key.strip()]
    panels = wanted_panels(_runs_in(folders), wanted, window)
    coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    typer.echo(draw_text(panels, shutil.get_terminal_size((100, 24)).columns, coloured=coloured))


def _runs_in(folders: list[Path]) -> list[RunFolder]:
    from stretto.records.run_folder import find_runs

    all_runs: list[RunFolder] = []
    for folder in folders:
        if not (runs := find_runs(folder)):
            raise ConfigError(f"{folder} holds no run")
        all_runs += runs
    return all_runs
