"""Whole runs through the command line, for the benchmarks that compare them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

__all__ = ["QUICKSTART", "arguments_of", "mock_run_file", "summary_of"]

QUICKSTART = Path(__file__).parent.parent / "examples" / "quickstart" / "run.yaml"


def mock_run_file(folder: Path, rows: int, sections: str) -> Path:
    """Write a run file into a folder, beside a dataset of that many additions that reward `exact` scores.

    Args:
        sections: the sections other than `reward` and `dataset`, as YAML.
    """
    dataset = folder / "rows.jsonl"
    dataset.write_text(
        "".join(json.dumps({"prompt": f"{n}+1=", "answer": f"{n + 1}"}) + "\n" for n in range(rows))
    )
    file = folder / "run.yaml"
    file.write_text(f"{sections}reward: exact\ndataset: {{use: jsonl, path: {dataset}}}\n")
    return file


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
