"""Look at processes that may end at any moment."""

from __future__ import annotations

import psutil


def arguments_of(process: psutil.Process) -> list[str]:
    """Its command line; nothing once it has ended, whether or not its parent has collected its status."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []
