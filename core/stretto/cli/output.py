"""What commands print: tables, and errors as lines."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NoReturn

import typer

from stretto.errors import printable

if TYPE_CHECKING:
    from rich.table import Table


def print_table(table: Table) -> None:
    """Print a table. Text in its cells is no markup: a model or a plugin may have written it."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else 160
    Console(width=width, markup=False, emoji=False, highlight=False).print(table)


def fail(error: Exception, status: int) -> NoReturn:
    """Print an error and end the command with an exit status."""
    lines = printable(str(error)).splitlines() or [type(error).__name__]
    for line in lines:
        typer.echo(f"error: {line}", err=True)
    sys.exit(status)
