"""Output of workers and of their children, in real files."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from patience import SOON_S
from waiting import until

BOUND = 1_000_000

CHILD = f"""
import subprocess, sys
from stretto.workers import output

output.MAX_OUTPUT = {BOUND}
children = output.ChildOutput()
# 30 MB, as fast as it can.
program = "for _ in range(300_000): print('x' * 99)\\nprint('last')"
subprocess.run([sys.executable, "-c", program], stdout=children.pipe, check=True)
children.close()
"""

WORKER = f"""
import os, sys
from stretto.workers import output

output.MAX_OUTPUT = {BOUND}
output.limit_output()
os.write(1, b"x" * {3 * BOUND})  # in one piece: the file may be rotated between two
sys.stdin.read()
print("after")
"""


def sizes(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in folder.iterdir()}


def test_what_children_print_never_fills_the_disk(tmp_path: Path) -> None:
    with (tmp_path / "verifier-0.out").open("ab") as file:
        worker = subprocess.Popen([sys.executable, "-c", CHILD], stderr=file)
    most = 0
    while worker.poll() is None:
        most = max(most, sum(sizes(tmp_path).values()))
        time.sleep(SOON_S)
    assert worker.returncode == 0
    assert 0 < most <= 2 * BOUND + 2**17
    kept = (tmp_path / "verifier-0.out.1").read_text() + (tmp_path / "verifier-0.out").read_text()
    assert kept.endswith("last\n")
    assert len(kept) >= BOUND


def test_the_output_of_a_worker_is_rotated_and_it_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "rollout-0.out"
    with file.open("ab") as output:
        worker = subprocess.Popen(
            [sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=output, stderr=output
        )
    until(lambda: sizes(tmp_path) == {"rollout-0.out": 0, "rollout-0.out.1": BOUND})
    worker.communicate()
    assert file.read_text() == "after\n"


@pytest.mark.parametrize("mode", ["wb", "ab"])
def test_only_a_file_for_appending_is_rotated(tmp_path: Path, mode: str) -> None:
    body = "from stretto.workers import output; output.MAX_OUTPUT = 10; output.rotate_output()"
    with (tmp_path / "x.out").open(mode) as file:
        file.write(b"x" * 100)
        file.flush()
        subprocess.run([sys.executable, "-c", body], stderr=file, check=True)
    assert sizes(tmp_path) == ({"x.out": 100} if mode == "wb" else {"x.out": 0, "x.out.1": 10})
