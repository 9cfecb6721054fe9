"""The guard of child processes, with guards and children that are really killed."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from patience import patience
from stretto.user_code.guard import guarded

OBEYS = "trap 'exit 7' TERM; echo up; while :; do sleep 0.01; done"
REFUSES = "trap '' TERM; echo up; while :; do sleep 0.01; done"
SHARES = """
import multiprocessing.shared_memory as shared
block = shared.SharedMemory(create=True, size=1)
print(block.name, flush=True)
input()
"""


def start(command: list[str], grace_s: float = 0.0) -> tuple[subprocess.Popen[str], str]:
    """Start a command under a guard. Return the guard and the first line that the command writes."""
    process = subprocess.Popen(
        guarded(command, grace_s), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


@pytest.mark.parametrize(
    ("script", "status"), [("exit 3", 3), ("kill -9 $$", -9), ("kill -PIPE $$", -13), ("exec /no/such", 127)]
)
def test_a_guard_ends_as_its_child_ended(script: str, status: int) -> None:
    with start(["sh", "-c", script])[0] as guard:
        assert guard.wait(patience()) == status


@pytest.mark.parametrize(
    ("script", "grace_s", "status"), [(OBEYS, 20, 7), (REFUSES, 0.2, -9), (OBEYS, 0, -15), (REFUSES, 0, -15)]
)
def test_a_child_has_the_grace_time_to_end(script: str, grace_s: float, status: int) -> None:
    guard, line = start(["sh", "-c", script], grace_s)
    with guard:
        assert line == "up"
        began = time.monotonic()
        guard.terminate()
        assert guard.wait(patience()) == status
        assert time.monotonic() - began < patience(10)


def test_a_child_dies_with_a_guard_that_is_killed() -> None:
    guard, _ = start(["sh", "-c", REFUSES], grace_s=patience(60))
    with guard:
        [child] = psutil.Process(guard.pid).children()
        guard.kill()
        assert not psutil.wait_procs([child], timeout=patience())[1]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_shared_memory_of_a_killed_child_is_removed(number: signal.Signals) -> None:
    guard, name = start([sys.executable, "-c", SHARES], grace_s=patience(20))
    with guard:
        [child] = psutil.Process(guard.pid).children()
        assert Path("/dev/shm", name).exists()
        child.send_signal(number)
        guard.wait(patience())
        assert not Path("/dev/shm", name).exists()
