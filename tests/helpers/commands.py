"""Commands of stretto, each in a process of its own, as a user types them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

STRETTO = (sys.executable, "-m", "stretto")


def stretto(
    *arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout_s: float = 600
) -> subprocess.CompletedProcess[str]:
    """A command that has ended, with what it printed."""
    command = [*STRETTO, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=cwd, env=env, timeout=timeout_s
    )


def output_of(*arguments: object, status: int = 0, cwd: Path | None = None) -> str:
    """What a command printed that ended with this status."""
    done = stretto(*arguments, cwd=cwd)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr
