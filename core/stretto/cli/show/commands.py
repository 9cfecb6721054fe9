"""Commands that look at runs."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from stretto.cli.arguments import (
    ElsewhereCertificate,
    ElsewhereLogin,
    ElsewhereUrl,
    RunOrViewer,
    Runs,
)
from stretto.cli.output import print_table
from stretto.errors import ConfigError, printable

if TYPE_CHECKING:
    from stretto.records.run import RunRecord

__all__ = ["app"]

app = typer.Typer()


@app.command()
def status(
    source: RunOrViewer,
    url: ElsewhereUrl = None,
    credentials: ElsewhereLogin = None,
    certificate: ElsewhereCertificate = None,
) -> None:
    """Show what a run does now: its step, its workers, and who waits for whom since when."""
    from stretto.assembly.logs import log_nothing
    from stretto.cli.show.status import status_lines, status_lines_over_bus

    _require_begun(source)
    if source.is_file():
        log_nothing()
        typer.echo("\n".join(status_lines_over_bus(source, url, credentials, certificate)))
        return
    _refuse_viewer_options(url, credentials, certificate)
    typer.echo("\n".join(status_lines(source)))


@app.command()
def logs(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")],
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Continue with new lines until the run has ended.")
    ] = False,
    worker: Annotated[
        str, typer.Option(help="Whose log: the kernel's, or that of a worker such as rollout-0.")
    ] = "kernel",
    lines: Annotated[
        int | None, typer.Option("--lines", "-n", min=0, help="Begin this many lines before the end.")
    ] = None,
) -> None:
    """Print the log of a run's kernel, or of one of its workers."""
    from stretto.cli.show.logs import log_lines

    for line in log_lines(folder, worker, newest=lines, follow=follow):
        print(line, flush=follow)


@app.command()
def watch(
    source: RunOrViewer,
    url: ElsewhereUrl = None,
    credentials: ElsewhereLogin = None,
    certificate: ElsewhereCertificate = None,
) -> None:
    """Show the live view of a run that another process owns. `q` ends the view; the run continues."""
    from stretto.cli.show.watch import watch_bus, watch_folder

    _require_begun(source)
    if source.is_dir():
        _refuse_viewer_options(url, credentials, certificate)
        raise typer.Exit(watch_folder(source))
    raise typer.Exit(watch_bus(source, url, credentials, certificate))


@app.command()
def runs(
    folder: Annotated[
        Path, typer.Argument(metavar="[FOLDER]", help="A folder with runs, at any depth.")
    ] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list instead of a table.")] = False,
) -> None:
    """List all runs below a folder, the newest first."""
    from stretto.cli.show.runs import runs_below, runs_table

    rows = runs_below(folder)
    if as_json:
        typer.echo(msgspec.json.encode(rows))
    elif rows:
        print_table(runs_table(rows, folder.absolute()))
    else:
        typer.echo(f"no run in {folder}")


@app.command()
def plot(
    folders: Runs,
    keys: Annotated[
        str,
        typer.Option(
            "--key", metavar="KEY,…", help="Keys of metrics.jsonl, such as reward,loss,evaluation/accuracy."
        ),
    ] = "",
    window: Annotated[
        int, typer.Option("--smooth", min=1, metavar="STEPS", help="Draw means over this many steps.")
    ] = 1,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Draw into an .svg file.")
    ] = None,
) -> None:
    """Draw the curves of one run, or of several over each other, in the terminal or into a file."""
    from stretto.cli.show.plot import draw_file, draw_text, panels_of

    wanted = [key.strip() for key in keys.split(",") if key.strip()]
    panels = panels_of(_runs_in(folders), wanted, window)
    if out is not None:
        draw_file(panels, out)
        typer.echo(f"drawn: {out}")
        return
    coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    typer.echo(draw_text(panels, shutil.get_terminal_size((100, 24)).columns, coloured=coloured))


@app.command()
def ui(
    folder: Annotated[
        Path, typer.Argument(metavar="[FOLDER]", help="A run's folder, or a folder of runs.")
    ] = Path("runs"),
    host: Annotated[
        str, typer.Option(help="Address to listen on. Others than loopback let other machines in.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 is any free one.")] = 0,
    certificate: Annotated[
        Path | None,
        typer.Option(help="Certificate for https, beside its key NAME.key.", metavar="NAME.pem"),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen off loopback without TLS: others may read along.")
    ] = False,
) -> None:
    """Show runs in a browser, live or ended: curves, timeline, samples, configuration."""
    import anyio

    from stretto.ui.server import serve

    anyio.run(partial(serve, folder, host, port, typer.echo, certificate=certificate, insecure=insecure))


@app.command()
def trace(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Default RUN/trace.pftrace.")
    ] = None,
) -> None:
    """Write what happened when into a file for Perfetto (https://ui.perfetto.dev)."""
    from stretto.cli.show.trace import write_trace

    file = out or folder / "trace.pftrace"
    write_trace(folder, file)
    typer.echo(f"wrote {file}; open it at https://ui.perfetto.dev, which reads it in your browser")


@app.command()
def compare(
    folders: Runs,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Compare runs: figures, values that differ, curves at equal steps, accuracies with 95 % intervals."""
    from stretto.cli.show.compare import comparison_tables
    from stretto.records.comparison import compare_runs

    comparison = compare_runs(_runs_in(folders))
    if as_json:
        typer.echo(msgspec.json.encode(comparison))
        return
    for title, table in comparison_tables(comparison):
        typer.echo(f"\n{printable(title)}")
        print_table(table)


@app.command()
def report(
    folders: Runs,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="The HTML file to write; default report.html."),
    ] = None,
) -> None:
    """Write one HTML file that shows a run, or several: curves, evaluations, ledger, advice, values.

    The file needs no network and no other file.
    """
    from stretto.cli.show.report import write_report

    if out is None and (out := Path("report.html")).exists():
        raise ConfigError(f"{out} exists; name the file to write, or to replace, with --out")
    write_report(_runs_in(folders), out)
    typer.echo(f"written: {out}")


@app.command()
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
        str | None, typer.Option(help="trained, filtered, expired, failed, evaluated or pending.")
    ] = None,
    failed: Annotated[bool, typer.Option("--failed", help="The same as --outcome failed.")] = False,
    purpose: Annotated[str | None, typer.Option(help="Only those of `train`, or of `eval`.")] = None,
    worker: Annotated[str | None, typer.Option(help="Rollout or inference worker.")] = None,
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
    format: Annotated[str, typer.Option(help="text, jsonl or parquet.")] = "text",
    output: Annotated[Path | None, typer.Option(help="Write to this file.", metavar="FILE")] = None,
) -> None:
    """Show the samples that a run has kept, also while it runs: prompts, answers, rewards, outcomes."""
    from rich.console import Console

    from stretto.cli.show.samples import (
        bounds_of,
        open_samples,
        print_groups,
        print_samples,
        sample_filter,
        why_none,
        write_lines,
        write_parquet,
    )

    if format not in ("text", "jsonl", "parquet"):
        raise ConfigError(f"--format {format!r}: expected text, jsonl or parquet")
    if format == "parquet" and output is None:
        raise ConfigError("--format parquet needs --output FILE")
    if tokens and format == "text":
        raise ConfigError("--tokens goes with --format jsonl or --format parquet")
    wanted = sample_filter(
        ticket=ticket,
        step=bounds_of(step, "--step"),
        reward=bounds_of(reward, "--reward"),
        length=bounds_of(length, "--length"),
        staleness=bounds_of(staleness, "--staleness"),
        finish=finish,
        text=text,
        outcome="failed" if failed else outcome,
        purpose=purpose or (None if ticket is None else "train"),
        worker=worker,
    )
    store = open_samples(folder)
    rows = store.find(wanted, limit=limit, offset=offset, order=order, tokens=tokens)
    if format == "parquet":
        assert output is not None
        write_parquet(rows, output)
        return
    with output.open("w") if output else nullcontext(sys.stdout) as file:
        if format == "jsonl":
            write_lines(rows, lambda line: print(line, file=file))
            return
        console = Console(file=file, markup=False, emoji=False, highlight=False, soft_wrap=not group)
        if group:
            print_groups(store, rows, console)
        else:
            print_samples(rows, console)
    if not rows:
        typer.echo(why_none(store, wanted), err=True)


@app.command()
def mirror(
    invitation: Annotated[
        Path, typer.Argument(metavar="FILE", help="The file that `stretto invite RUN operator` wrote.")
    ],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder for the copy, or the copy.")],
    url: ElsewhereUrl = None,
    credentials: ElsewhereLogin = None,
    certificate: ElsewhereCertificate = None,
) -> None:
    """Keep a copy of the records of a run that is elsewhere, until the run ends. `ui`, `runs`, `watch`,
    `status`, `logs`, `samples`, `stop` and `scale` take the copy in place of the run's folder."""
    from stretto.bus.server import OPERATOR
    from stretto.cli.show.mirror import mirror_run
    from stretto.cli.show.watch import bootstrap_elsewhere

    bootstrap = bootstrap_elsewhere(invitation, OPERATOR, url, credentials, certificate)
    typer.echo(mirror_run(bootstrap, folder.absolute()))


def _refuse_viewer_options(url: str | None, credentials: str | None, certificate: Path | None) -> None:
    if url is not None or credentials is not None or certificate is not None:
        options = "--url, --credentials and --certificate"
        raise ConfigError(f"{options} go with a viewer file, not with a run's folder")


def _require_begun(source: Path) -> None:
    """Refuse a path that does not exist. A submitted run makes its folder when the cluster starts it.

    Raises:
        ConfigError: if nothing is there.
    """
    if not source.exists():
        raise ConfigError(
            f"{source} does not exist: the run has not begun (a submitted run may still be waiting for the "
            "cluster), or it has another folder"
        )


def _runs_in(folders: list[Path]) -> list[RunRecord]:
    """Return the runs in these folders, and below those that are no runs.

    Raises:
        ConfigError: if a folder holds no run.
    """
    from stretto.records.run import find_runs

    found: list[RunRecord] = []
    for folder in folders:
        if not (runs := find_runs(folder)):
            raise ConfigError(f"{folder} holds no run")
        found += runs
    return found
