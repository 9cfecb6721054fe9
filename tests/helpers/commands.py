"""Commands of stretto, as a user types them: each in a process of its own, or in this one."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

from patience import patience

STRETTO = (sys.executable, "-m", "stretto")


def stretto(
    *arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [*STRETTO, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=cwd, env=env, timeout=patience(400)
    )


def output_of(*arguments: object, status: int = 0, cwd: Path | None = None) -> str:
    done = stretto(*arguments, cwd=cwd)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def called(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A command that has ended in this process. It is for commands that start no run."""
    from stretto.cli.main import main

    words, output, errors, status = [*map(str, arguments)], StringIO(), StringIO(), 0
    before = sys.argv, Path.cwd(), os.umask(0o077), signal.getsignal(signal.SIGINT)
    try:
        sys.argv = ["stretto", *words]
        os.chdir(cwd or before[1])
        with redirect_stdout(output), redirect_stderr(errors):
            main()
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        sys.argv = before[0]
        os.chdir(before[1])
        os.umask(before[2])
        signal.signal(signal.SIGINT, before[3])
    return subprocess.CompletedProcess(words, status, output.getvalue(), errors.getvalue())
