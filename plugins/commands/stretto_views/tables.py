"""Tables in the terminal. Texts in cells are not markup: a model or a plugin may have written them."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from stretto.errors import printable


def figure_table(*columns: str) -> Table:
    """Return a table without rows: the first column has names, and the others have figures."""
    table = Table(box=None, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(printable(column), overflow="fold", justify="left" if number == 0 else "right")
    return table


def add_row(table: Table, *cells: str) -> None:
    """Add a row, with control characters as escapes."""
    table.add_row(*map(printable, cells))


def print_table(table: Table) -> None:
    width = None if sys.stdout.isatty() else 160
    Console(width=width, markup=False, emoji=False, highlight=False).print(table)
