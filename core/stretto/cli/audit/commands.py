"""Commands that verify a run: audit and replay."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from stretto.cli.arguments import Overrides, TrustPlugins, WithOverrides
from stretto.errors import ConfigError, StrettoError, printable
from stretto.records.figures import add_row, figure_table, print_table

if TYPE_CHECKING:
    from stretto.cli.audit.audit import AuditReport

app = typer.Typer()


_MOST_VIOLATIONS = 20  # of one check, in the table's text


@app.command()
def audit(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of a table.")
    ] = False,
) -> None:
    """Check that a run that has ended lost no ticket, trained none twice and kept its bounds.

    The audit reads journal, kept samples and checkpoints by itself. Exit status: 0 clean, 1 violations, 2 the
    run cannot be audited.
    """
    from stretto.cli.audit.audit import audit_run

    try:
        report = audit_run(folder)
    except StrettoError as error:
        raise ConfigError(str(error)) from error  # whatever the reason: the run cannot be audited
    if as_json:
        typer.echo(msgspec.json.encode(report))
    else:
        _show_audit(report)
    raise typer.Exit(0 if report.status == "clean" else 1)


@app.command(cls=WithOverrides)
def replay(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run that has ended.")],
    overrides: Overrides = None,
    start: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="N", help="Begin at the checkpoint of version N; default the initial models."
        ),
    ] = None,
    stop: Annotated[
        int | None, typer.Option("--to", min=1, metavar="N", help="The last step to train; default the last.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="A folder to make; default RUN-replay.", metavar="FOLDER")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
    trust_plugins: TrustPlugins = False,
) -> None:
    """Train the recorded steps of a run again from its kept samples, and compare the weights.

    Nothing is generated. Without overrides the weights are the same bit for bit, on the same machine. Exit
    status: 0 the replay is complete, and without overrides identical; 1 it differs, or failed.
    """
    from stretto.assembly.trust import require_trust
    from stretto.cli.audit.replay import ReplayOptions, replay_run
    from stretto.cli.audit.replay_report import report_lines, report_tables

    require_trust(folder.absolute(), trusted=trust_plugins)
    replayed = replay_run(folder, ReplayOptions(start, stop, out), overrides or ())
    if replayed.report is None:
        from stretto.observe.view import final_lines
        from stretto.runs.life import exit_status

        typer.echo(final_lines(replayed.summary, replayed.folder), err=True)
        raise typer.Exit(exit_status(replayed.summary))
    if as_json:
        typer.echo(msgspec.json.encode(replayed.report))
    else:
        for title, table in report_tables(replayed.report):
            typer.echo(title)
            print_table(table)
        typer.echo("\n".join(map(printable, [*report_lines(replayed.report), f"see {replayed.folder}"])))
    raise typer.Exit(0 if overrides or replayed.report.difference is None else 1)


def _show_audit(report: AuditReport) -> None:
    table = figure_table("check", "result", "checked", "not checked", justify="left")
    for check in report.checks:
        without_violations = "nothing to check" if check.empty else "ok"
        result = f"{len(check.violations)} violations" if check.violations else without_violations
        add_row(table, check.name, result, check.checked, check.unchecked)
    print_table(table)
    for check in report.checks:
        for violation in check.violations[:_MOST_VIOLATIONS]:
            typer.echo(printable(f"{check.name}: {violation}"))
        if len(check.violations) > _MOST_VIOLATIONS:
            typer.echo(
                f"{check.name}: {len(check.violations) - _MOST_VIOLATIONS} more; --json lists them all"
            )
    typer.echo(
        f"{report.status}: {report.lost} tickets lost, {report.doubled} trained twice, in {report.folder}"
    )
