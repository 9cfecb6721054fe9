"""The command that runs a grid."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stretto.cli.arguments import RunFile, WithOverrides
from stretto.cli.output import print_table
from stretto.errors import ConfigError, printable

app = typer.Typer()


@app.command(cls=WithOverrides)
def sweep(
    file: RunFile,
    values: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE,VALUE...]...",
            help="Values of keys of the run file, for example training.lr=1e-4,3e-4. A key with one value "
            "has it in every run.",
        ),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Seeds: every combination of values runs with each.", metavar="1,2,3")
    ] = None,
    jobs: Annotated[
        str,
        typer.Option(
            help="Most runs at once; auto: as many as this machine has cores, memory and GPUs for.",
            metavar="auto|N",
        ),
    ] = "auto",
    out: Annotated[
        Path | None,
        typer.Option(help="The sweep's folder; default runs/sweep-NAME.", metavar="FOLDER"),
    ] = None,
) -> None:
    """Train with every combination of values and seeds, and compare the results.

    Each run has its own processes and its own folder. The same command again skips complete runs, resumes
    others, and begins the rest; other values extend the sweep.
    """
    from stretto.assembly.compose import compose
    from stretto.cli.sweep.sweep import Sweep
    from stretto.cli.sweep.sweep_grid import grid
    from stretto.cli.sweep.sweep_report import report_of, report_tables, write_report
    from stretto.cli.sweep.sweep_view import SweepView

    if jobs != "auto" and not (jobs.isdecimal() and int(jobs)):
        raise ConfigError(f"--jobs {jobs}: expected auto, or a number of runs of at least 1")
    runs = grid(values or (), seeds)
    # The same folder each time, so that the command can be repeated.
    out = out or Path("runs", f"sweep-{compose(file, runs[0].overrides).config.name}")
    folder = out.expanduser().absolute()
    planned = Sweep(file, runs, folder)
    for warning in planned.check():
        typer.echo(f"warning: {printable(warning)}", err=True)
    view = SweepView(folder, list(planned.runs))
    exit_status = planned.run(None if jobs == "auto" else int(jobs), view)
    report = report_of(folder, planned.planned())
    write_report(folder, report)
    for title, table in report_tables(report):
        typer.echo(title)
        print_table(table)
        typer.echo("")
    if exit_status == 130:
        typer.echo("interrupted; the same command again continues it")
    typer.echo(f"see {folder}")
    raise typer.Exit(exit_status)
