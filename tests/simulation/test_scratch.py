"""A folder that goes with the process that made it, however that one ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from waiting import until

CODE = """\
import subprocess, sys
from stretto.machine.scratch import scratch_folder
with scratch_folder("scratch-") as (folder, until_ended):
    (folder / "file").touch()
    child = subprocess.Popen(["sleep", "1000"], pass_fds=[until_ended], stdout=subprocess.DEVNULL)
    print(folder, child.pid, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_folder_of_a_killed_process_stays_for_those_that_use_it(number: signal.Signals) -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", CODE], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        name, child = process.stdout.readline().split()
        process.send_signal(number)
    assert process.returncode == -number
    folder = Path(name.decode())
    is_there = (folder / "file").exists()
    os.kill(int(child), signal.SIGKILL)
    assert is_there
    until(lambda: not folder.exists())


def test_the_folder_goes_at_the_end_of_the_block() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], input=b"", stdout=subprocess.PIPE, check=True)
    name, child = done.stdout.split()
    os.kill(int(child), signal.SIGKILL)
    assert not Path(name.decode()).exists()
