"""Run a child process that reads its input, writes its output, and ends; or start one that lives on."""

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["last_line", "run_child"]


def run_child(
    argv: Sequence[str],
    stdin: bytes,
    timeout_s: float,
    *,
    env: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """Run a process with this input until it ends. At `timeout_s` kill it and raise TimeoutError."""
    try:
        return subprocess.run(
            argv, input=stdin, capture_output=True, timeout=timeout_s, check=False, env=env, cwd=folder
        )
    except subprocess.TimeoutExpired as error:
        raise TimeoutError from error


def start_apart(
    argv: Sequence[str], output: Path, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a process whose output is appended to a file. It has a session of its own, which ^C at this one's
    terminal does not reach."""
    with output.open("ab") as file:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )


def last_line(errors: bytes) -> str:
    """Return the last line of a process's standard error: for a traceback, the exception, without the class
    of an error of stretto."""
    line = errors.decode(errors="replace").strip().rpartition("\n")[2]
    return re.sub(r"^stretto[\w.]*\.\w+: ", "", line)
