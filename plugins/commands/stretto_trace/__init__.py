"""`stretto trace`: the timeline of a run as a file for Perfetto's viewer."""

from pathlib import Path
from typing import Annotated

import typer


def trace(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Default RUN/trace.pftrace.")
    ] = None,
) -> None:
    """Write what happened when into a file for Perfetto (https://ui.perfetto.dev)."""
    from stretto_trace.drawing import write_trace

    file = out or folder / "trace.pftrace"
    write_trace(folder, file)
    typer.echo(f"wrote {file}; open it at https://ui.perfetto.dev, which reads it in your browser")
