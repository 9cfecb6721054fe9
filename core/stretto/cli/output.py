"""What commands print: tables, and errors as lines."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NoReturn

import typer

from stretto.errors import printable

if TYPE_CHECKING:
    from rich.table import Table


def figure_table(*columns: str) -> Table:
    """Return a table without rows: the first column has names, and the others have figures."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(printable(column), overflow="fold", justify="left" if number == 0 else "right")
    return table


def add_row(table: Table, *cells: str) -> None:
    """Add a row, with control characters as escapes."""
    table.add_row(*map(printable, cells))


def print_table(table: Table) -> None:
    """Print a table. Its cells are plain text, not markup: a model or a plugin may have written them."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else 160
    Console(width=width, markup=False, emoji=False, highlight=False).print(table)


def fail(error: Exception, status: int) -> NoReturn:
    """Print an error and end the command with an exit status."""
    lines = printable(str(error)).splitlines() or [type(error).__name__]
    for line in lines:
        typer.echo(f"error: {line}", err=True)
    sys.exit(status)
