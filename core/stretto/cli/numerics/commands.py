"""`stretto numerics`: whether packed rows, engine and trainer agree, on the user's own model."""

from typing import Annotated

import typer

from stretto.cli.arguments import Overrides, WithOverrides

app = typer.Typer()


@app.command(cls=WithOverrides)
def numerics(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A model's folder, a hub id, or a run file (YAML).")
    ],
    overrides: Overrides = None,
    inference: Annotated[str | None, typer.Option(metavar="ENGINE", help="The inference engine.")] = None,
    training: Annotated[str | None, typer.Option(metavar="ENGINE", help="The training engine.")] = None,
    depth: Annotated[
        int | None,
        typer.Option(min=32, help="Most tokens of a text. Default: the context, at most 1,024 on a CPU."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer texts, less deep, and not all rows.")] = False,
) -> None:
    """Compare trainer and engine on a model: packed rows, depth of context, swaps, adapters, bfloat16.

    The first line says that all is healthy, or the likely cause; the exit status is then 1. The table after
    it is explained in docs/numerics.md. With a run file, its model, sections and rows are measured.
    """
    from stretto.cli.numerics.bench import run

    parts = {"inference.use": inference, "training.use": training}
    chosen = [f"{key}={value}" for key, value in parts.items() if value is not None]
    raise typer.Exit(run(model, [*chosen, *(overrides or ())], depth, quick=quick))
