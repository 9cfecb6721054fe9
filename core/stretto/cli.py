"""The command line: `stretto run | resume | check | plugins | schema | worker`.

Exit status: 0 done; 1 a run failed; 2 refused before anything was started; 130 interrupted.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.errors import ConfigError, PluginError, StrettoError

if TYPE_CHECKING:
    from stretto.component import Kind
    from stretto.config import Composed

__all__ = ["main"]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Asynchronous reinforcement learning of language models, composed from plugins.",
)

RunFile = Annotated[Path, typer.Argument(metavar="FILE", help="The run file (YAML).")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Dotted overrides, such as queue.max_staleness=0."),
]


def main() -> None:
    """Entry point of the `stretto` command."""
    signal.signal(signal.SIGINT, lambda number, frame: sys.exit(130))  # until a run takes it over
    try:
        app()
    except (ConfigError, PluginError) as error:
        _fail(error, 2)
    except StrettoError as error:
        _fail(error, 1)


@app.command()
def run(file: RunFile, overrides: Overrides = None) -> None:
    """Train: compose the run, start its processes, and follow it to the end."""
    composed = _accepted(file, overrides, starting=True)
    from stretto.kernel.kernel import run_to_end

    raise typer.Exit(run_to_end(composed))


@app.command()
def resume(folder: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")]) -> None:
    """Go on with a run from its newest checkpoint and its journal."""
    from stretto.kernel.kernel import resume_to_end

    raise typer.Exit(resume_to_end(folder))


@app.command()
def check(
    file: RunFile,
    overrides: Overrides = None,
    graph: Annotated[bool, typer.Option("--graph", help="Draw the algorithm's dataflow instead.")] = False,
    mermaid: Annotated[bool, typer.Option("--mermaid", help="The same as a Mermaid flowchart.")] = False,
) -> None:
    """Validate a run and print what it would be, without starting anything."""
    from stretto import plan

    composed = _accepted(file, overrides, starting=False)
    if mermaid:
        typer.echo(plan.graph(composed).mermaid())
    elif graph:
        typer.echo(plan.graph(composed).text())
    else:
        typer.echo(plan.describe(composed))


@app.command()
def plugins(
    kind: Annotated[str | None, typer.Argument(help="Show only this kind.")] = None,
    name: Annotated[str | None, typer.Argument(help="Show the config of this component.")] = None,
    path: Annotated[list[Path] | None, typer.Option(help="Also load this plugin file.")] = None,
) -> None:
    """List components, or show the config of one with types, defaults and meanings."""
    from stretto.errors import nearest
    from stretto.plugins import KINDS, Plugins

    installed = Plugins()
    for file in path or []:
        installed.add_path(file.resolve())
    if kind is not None and kind not in KINDS:
        raise PluginError(f"no kind {kind!r}{nearest(kind, KINDS)}; kinds: {', '.join(KINDS)}")
    if kind is not None and name is not None:
        _show_component(installed, kind, name)
    else:
        _list_components(installed, kind)


@app.command()
def schema() -> None:
    """Print one JSON schema of run files, with every installed component, for an editor to use."""
    from stretto.plugins import Plugins
    from stretto.schema import json_schema

    typer.echo(json.dumps(json_schema(Plugins()), indent=2))


@app.command(hidden=True)
def worker(
    bootstrap: Annotated[Path, typer.Argument(help="File with the bus address and credentials of a role.")],
    id: Annotated[str, typer.Option(help="Id of the worker, unique in the run.")],
) -> None:
    """Run one worker process; launchers start it, and it can be started by hand."""
    from stretto.roles.worker import main as work

    raise typer.Exit(work(bootstrap, id))


# ----------------------------------------------------------------------------------------- helpers


def _accepted(file: Path, overrides: list[str] | None, *, starting: bool) -> Composed:
    """The composed run, once nothing stands against it. Warnings are printed."""
    from stretto.config import compose
    from stretto.plan import problems

    composed = compose(file, overrides or ())
    for notice in composed.notices:
        typer.echo(f"note: {notice}", err=True)
    fatal: list[str] = []
    for problem in problems(composed):
        if problem.severity == "error" or (problem.severity == "machine" and starting):
            fatal.append(f"{composed.place(problem.path)}: {problem.message}")
        else:
            typer.echo(f"warning: {composed.place(problem.path)}: {problem.message}", err=True)
    if fatal:
        raise ConfigError("\n".join(fatal))
    return composed


def _list_components(installed: Any, kind: str | None) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("kind", "name", "distribution", "version", "summary"):
        table.add_column(column, overflow="fold", no_wrap=column in ("kind", "name"))
    for line in installed.listing():
        if kind in (None, line.kind):
            summary = f"[red]unusable: {line.error}[/red]" if line.error else line.summary
            table.add_row(line.kind, line.name, line.distribution, line.version, summary)
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _show_component(installed: Any, kind: Kind, name: str) -> None:
    from stretto.schema import fields_of

    component = installed.get(kind, name)
    typer.echo(f"{kind} {component.name}: {component.summary}\n")
    for field in fields_of(component.config):
        typer.echo(f"{field.name}: {field.type} = {field.default}")
        if field.meaning:
            typer.echo(f"    {field.meaning}")


def _fail(error: Exception, status: int) -> None:
    lines = str(error).splitlines() or [type(error).__name__]
    for line in lines:
        typer.echo(f"error: {line}", err=True)
    sys.exit(status)
