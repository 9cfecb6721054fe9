"""Whole runs through the command line, for the benchmarks that compare them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

__all__ = ["QUICKSTART", "arguments_of", "summary_of"]

QUICKSTART = Path(__file__).parent.parent / "examples" / "quickstart" / "run.yaml"


def summary_of(file: Path, out: Path, *overrides: str) -> dict[str, Any]:
    """Run a run file and return its summary.

    Raises:
        CalledProcessError: if the run fails.
    """
    command = [sys.executable, "-m", "stretto", "run", str(file), f"out={out}", *overrides]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads((out / "summary.json").read_text())


def arguments_of(process: psutil.Process) -> list[str]:
    """Return the arguments of a process; none while it ends. A forked worker has empty ones behind its own,
    because the room is that of its server's command.

    Raises:
        psutil.Error: if the process is gone.
    """
    arguments = process.cmdline()
    while arguments and not arguments[-1]:
        arguments.pop()
    return arguments
