"""Commands that look at runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stretto.cli.arguments import ElsewhereCertificate, ElsewhereLogin, ElsewhereUrl, RunOrViewer
from stretto.errors import ConfigError

if TYPE_CHECKING:
    from stretto.bus.server import Bootstrap

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

    viewer = _viewer(source, url, credentials, certificate)
    if viewer is not None:
        log_nothing()
    typer.echo("\n".join(status_lines_over_bus(viewer) if viewer is not None else status_lines(source)))


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
def events(folder: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")]) -> None:
    """Print what has happened in a run as lines of JSON: the events of its journal in order."""
    import msgspec

    from stretto.records.run_folder import RunFolder

    for time, event in RunFolder(folder).events():
        values = {name: getattr(event, name) for name in event.__struct_fields__}
        print(msgspec.json.encode({"time": time, "event": type(event).__name__, **values}).decode())


@app.command()
def watch(
    source: RunOrViewer,
    url: ElsewhereUrl = None,
    credentials: ElsewhereLogin = None,
    certificate: ElsewhereCertificate = None,
) -> None:
    """Show the live view of a run that another process owns. Ctrl-C ends the view; the run continues."""
    from stretto.cli.show.watch import watch_bus, watch_folder

    viewer = _viewer(source, url, credentials, certificate)
    raise typer.Exit(watch_bus(viewer) if viewer is not None else watch_folder(source))


def _viewer(
    source: Path, url: str | None, credentials: str | None, certificate: Path | None
) -> Bootstrap | None:
    from stretto.cli.show.watch import bootstrap_elsewhere

    if not source.exists():  # a submitted run makes its folder when the cluster starts it
        raise ConfigError(
            f"{source} does not exist: the run has not begun (a submitted run may still be waiting for the "
            "cluster), or it has another folder"
        )
    if source.is_file():
        return bootstrap_elsewhere(source, url, credentials, certificate)
    if url is not None or credentials is not None or certificate is not None:
        options = "--url, --credentials and --certificate"
        raise ConfigError(f"{options} go with a viewer file, not with a run's folder")
    return None
