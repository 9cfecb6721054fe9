"""`stretto ui`: a server that reads the folders of runs, and the page that it serves.

```
server.py      the server, and its answers as JSON
access.py      token, cookie, Host check, headers
runs.py        the runs below a folder
overview.py    what the first view of a run shows
curves.py      curves in a window, smoothed
lanes.py       the timeline in a window, as lanes of spans
samples.py     kept samples as JSON
token_text.py  the text of each token
static/        the page itself: plain JavaScript modules, and uPlot in static/vendor
```
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


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
