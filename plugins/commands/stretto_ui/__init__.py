"""`stretto ui`: a server that reads the folders of runs, and the page that it serves. `stretto report`: the
same page as a file.

```
server.py      the server, and its answers as JSON
access.py      token, cookie, Host check, headers
runs.py        the runs below a folder
overview.py    the data of a run's first view
curves.py      curves in a window, smoothed
lanes.py       the timeline in a window, as lanes of spans
samples.py     kept samples as JSON
token_text.py  the text of each token
saved.py       `stretto report`: the page and the server's answers in one file
static/        the page itself: plain JavaScript modules, and uPlot in static/vendor
```
"""

from pathlib import Path
from typing import Annotated

import typer

from stretto.errors import ConfigError


def ui(
    folder: Annotated[
        Path | None,
        typer.Argument(
            help="A run's folder, or a folder of runs; if absent, `runs`, and your living runs anywhere."
        ),
    ] = None,
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
    from functools import partial

    import anyio

    from stretto_ui.server import serve

    anyio.run(partial(serve, folder, host, port, typer.echo, certificate=certificate, insecure=insecure))


def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, or folders that hold runs.")
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="The HTML file to write; default report.html."),
    ] = None,
) -> None:
    """Write one HTML file that shows a run, or several, as `stretto ui` does, without a server.

    The file needs no network and no other file.
    """
    from stretto_ui.saved import save_report

    if out is None and (out := Path("report.html")).exists():
        raise ConfigError(f"{out} exists; name the file to write, or to replace, with --out")
    without = save_report(folders, out)
    typer.echo(f"written: {out} ({out.stat().st_size / 1e6:.1f} MB)")
    if without:
        typer.echo(f"no room for: {without}")
