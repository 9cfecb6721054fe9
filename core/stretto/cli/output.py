"""Errors of commands, as lines."""

from __future__ import annotations

import sys
from typing import NoReturn

import typer

from stretto.errors import printable


def fail(error: Exception, status: int) -> NoReturn:
    """Print an error and end the command with an exit status."""
    lines = printable(str(error)).splitlines() or [type(error).__name__]
    for line in lines:
        typer.echo(f"error: {line}", err=True)
    sys.exit(status)
