"""Run a sample of the slow tests, cut by time: `python .ci/sample.py SECONDS`, which `make test-sample` does.

Whole files run, in an order drawn from the tree of HEAD: over many trees each file has its turn. A file
begins only if the time that `.ci/durations.json` has for it, on a machine like this one, fits into what is
left. At twice the seconds the sample ends, says so, and does not fail.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

from patience import factor  # noqa: E402

UNKNOWN_S = 120.0
"""A file that has no duration yet."""
AT_ONCE = 2
NO_TESTS = 5
"""pytest's exit status if it has chosen no test."""
_SLOW = re.compile(r"\bslow\b|in_both_worlds")


def main() -> int:
    """Run the sample; the exit status."""
    budget_s, selection = float(sys.argv[1]), sys.argv[2]
    durations = json.loads((ROOT / ".ci" / "durations.json").read_text())
    slower = factor()
    began = time.monotonic()
    waiting = drawn(files_with_slow_tests())
    print(
        f"{len(waiting)} files have slow tests; a sample for {budget_s:.0f} s, "
        f"on a machine {slower:.1f} times slower than a good one"
    )
    running: dict[str, subprocess.Popen[bytes]] = {}
    ended: list[str] = []
    while time.monotonic() < began + 2 * budget_s:
        for file, process in [*running.items()]:
            if process.poll() is None:
                continue
            del running[file]
            ended.append(file)
            print(file, output_of(file).read_text(), sep="\n", flush=True)
            if process.returncode not in (0, NO_TESTS):
                end(running)
                return 1
        left_s = began + budget_s - time.monotonic()
        fitting = [file for file in waiting if durations.get(file, UNKNOWN_S) * slower <= left_s]
        if fitting and len(running) < AT_ONCE:
            waiting.remove(fitting[0])
            running[fitting[0]] = start(fitting[0], selection)
        elif not running:
            break
        else:
            time.sleep(0.2)
    end(running)
    print(f"the sample had {len(ended)} files in {time.monotonic() - began:.0f} s: {' '.join(ended)}")
    return 0


def files_with_slow_tests() -> list[str]:
    """Files of tests, by their paths in the checkout."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(file.relative_to(ROOT)) for file in files if _SLOW.search(file.read_text())]


def drawn(files: list[str]) -> list[str]:
    """Return the files in the order of this tree."""
    command = ["git", "rev-parse", "HEAD^{tree}"]
    tree = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    seed = tree.strip() or hashlib.sha256("\n".join(files).encode()).hexdigest()
    return random.Random(seed).sample(files, len(files))


def start(file: str, selection: str) -> subprocess.Popen[bytes]:
    """Run the slow tests of one file, in a group of processes of its own."""
    command = [sys.executable, str(ROOT / ".ci" / "second_chance.py"), "-m", selection, file]
    output_of(file).parent.mkdir(parents=True, exist_ok=True)
    with output_of(file).open("wb") as output:
        return subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )


def output_of(file: str) -> Path:
    """What a file's tests print."""
    return ROOT / "build" / "ci" / "sample" / f"{file.replace('/', '-')}.log"


def end(running: dict[str, subprocess.Popen[bytes]]) -> None:
    """End what runs, and say so."""
    for file, process in running.items():
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()
        print(f"{file} had no time to end")


if __name__ == "__main__":
    sys.exit(main())
