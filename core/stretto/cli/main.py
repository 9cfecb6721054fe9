"""The command line: `stretto COMMAND`. `stretto COMMAND --help` describes a command.

- Start: `quickstart`, `run`, `resume`, `sweep`, `evaluate`.
- Change a living run: `scale`, `stop`; `worker` joins it, `invite` writes the credentials for that.
- See one run: `status`, `watch`, `logs`, `events`, `ui`, `plot`, `report`, `samples`, `trace`.
- See several runs: `runs`, `compare`; also `ui`, `plot` and `report`.
- Verify: `check` a run file, the `numerics` of a model; `audit` a run that has ended, `replay` its training.
- For other programs: `export` writes a run's model, or its samples.
- Describe the installation: `plugins`, `schema`; `doctor` says what is wrong with it.
- Extend it: `new` writes a plugin package; `engine` installs the server of vLLM or SGLang.

Exit status: 0 the command succeeded; 1 a run failed, or an audit found violations; 2 a mistake was found
before the run started a worker, or a run cannot be audited; 130 interrupted.
"""

import os
import signal
import sys
from collections.abc import Callable
from functools import cache
from importlib.metadata import EntryPoint, entry_points, version
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from stretto.cli import sweep
from stretto.cli.audit import commands as audit
from stretto.cli.make import commands as make
from stretto.cli.numerics import commands as numerics
from stretto.cli.show import commands as show
from stretto.cli.start import commands as start
from stretto.errors import ConfigError, PluginError, StrettoError, printable
from stretto.machine.proxies import spare_this_machine

_GROUP = "stretto.command"
"""Entry point group of the commands that packages add, such as plugins/commands or a user's package."""


class _Commands(TyperGroup):
    """stretto's commands and those of entry points, which are imported only to run one or to list all."""

    def list_commands(self, ctx: Any) -> list[str]:
        built_in = super().list_commands(ctx)
        return [*built_in, *sorted(_added().keys() - {*built_in})]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        built_in = super().get_command(ctx, cmd_name)
        if built_in is not None:
            return built_in
        entry = _added().get(cmd_name)
        return _added_command(entry) if entry else None


@cache
def _added() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=_GROUP)}


def _added_command(entry: EntryPoint) -> Any:
    """Load a command. If its function does not load, return a command that raises the error."""
    try:
        function = entry.load()
    except Exception as error:  # noqa: BLE001 - a package may raise anything; the others continue
        package = entry.dist.name if entry.dist else entry.value
        reason = f"{type(error).__name__}: {error}"
        function = _refusal(f"the command {entry.name!r} of {package} does not load: {reason}")
    added = typer.Typer(add_completion=False)
    added.command(entry.name)(function)
    return typer.main.get_command(added)


def _refusal(text: str) -> Callable[[], None]:
    def refuse() -> None:
        raise PluginError(text)

    refuse.__doc__ = text
    return refuse


app = typer.Typer(cls=_Commands, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
for wing in (start, sweep, numerics, make, show, audit):
    app.add_typer(wing.app)


def main() -> None:
    """Run the `stretto` command. Only this user can read the files that it and its workers write."""
    os.umask(0o077)
    spare_this_machine()
    signal.signal(signal.SIGINT, lambda number, frame: sys.exit(130))  # until a run sets its own handler
    try:
        app()
    except (ConfigError, PluginError) as error:
        fail(error, 2)
    except StrettoError as error:
        fail(error, 1)


def fail(error: Exception, status: int) -> NoReturn:
    """Print an error as lines, and end the command with an exit status."""
    lines = printable(str(error)).splitlines() or [type(error).__name__]
    for line in lines:
        typer.echo(f"error: {line}", err=True)
    sys.exit(status)


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"stretto {version('stretto')}")
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Asynchronous reinforcement learning of language models, composed from plugins."""
