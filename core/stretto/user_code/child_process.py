"""A process that is told something, says what it found, and ends."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["last_line", "run_child"]


def run_child(
    argv: Sequence[str],
    told: bytes,
    timeout_s: float,
    *,
    env: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """Start a process, give it its whole input, and wait for its end, whatever its status.

    Raises:
        TimeoutError: if it has not ended in time; it is killed.
    """
    try:
        return subprocess.run(
            argv, input=told, capture_output=True, timeout=timeout_s, check=False, env=env, cwd=folder
        )
    except subprocess.TimeoutExpired as error:
        raise TimeoutError from error


def last_line(done: subprocess.CompletedProcess[bytes]) -> str:
    """The last line of its errors: of a traceback, the exception."""
    return done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
