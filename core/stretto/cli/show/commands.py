"""Commands that look at runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stretto.cli.arguments import ElsewhereCertificate, ElsewhereLogin, ElsewhereUrl, RunOrViewer
from stretto.errors import ConfigError

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
