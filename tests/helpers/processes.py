"""Start processes of a test's own, and look at processes that may end at any moment."""

import json
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

Spawn = Callable[..., subprocess.Popen[str]]
_BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def figures_of(benchmark: str, *arguments: object) -> dict[str, Any]:
    """What a script of `benchmarks` prints at last."""
    command = [sys.executable, str(_BENCHMARKS / benchmark), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@contextmanager
def spawning() -> Generator[Spawn]:
    """`spawn(command)`: a process with its output in a pipe, which is killed at the end of the block."""
    processes: list[subprocess.Popen[str]] = []

    def spawn(command: list[object], **options: Any) -> subprocess.Popen[str]:
        pipe, words = subprocess.PIPE, [str(word) for word in command]
        processes.append(subprocess.Popen(words, stdout=pipe, stderr=subprocess.STDOUT, text=True, **options))
        return processes[-1]

    try:
        yield spawn
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def sleepers(mark: str) -> list[psutil.Process]:
    """The processes of the command `sleep MARK`."""
    processes = psutil.process_iter(["cmdline"])
    return [each for each in processes if (each.info["cmdline"] or [])[:2] == ["sleep", mark]]


def arguments_of(process: psutil.Process) -> list[str]:
    """Its command line; nothing once it has ended, whether or not its parent has collected its status."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []
