"""How many programs the reward `code` checks in a second: `python benchmarks/programs.py`.

Each check runs one small program with one test, from the text of an answer to its score. The right, wrong
and hostile programs are those of the tests. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

import hostile_programs
from stretto.component import SandboxMode
from stretto_code import CodeConfig
from stretto_code.marking import Marker
from stretto_code.programs import SandboxRunner
from stretto_code.suites import read_suite

CALLS = [{"call": "add", "args": [2, 3], "expected": 5}]
TEXTS = [{"stdin": "2 3", "stdout": "5"}]
ADD = "```python\ndef add(a, b):\n    return a + b\n```"
SUM = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
IMPORTS = "```python\nimport collections, heapq, math, re, itertools\n" + SUM.removeprefix("```python\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--checks", type=int, default=400)
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    kinds: dict[str, tuple[list[Any], str]] = {
        "call": (CALLS, ADD),
        "stdin": (TEXTS, SUM),
        "stdin with imports": (TEXTS, IMPORTS),
    }
    modes: tuple[SandboxMode, ...] = ("bubblewrap", "unsafe")
    rates: dict[str, float] = {}
    print(f"{arguments.parallel} programs at a time, median of {arguments.rounds} rounds")
    print(f"{'sandbox':12} {'program':20} {'start s':>8} {'checks/s':>9}")
    for mode in modes:
        config = CodeConfig(use="code", parallel=arguments.parallel)
        started = time.perf_counter()
        runner = SandboxRunner(mode, arguments.parallel, config.imports)
        start_s = time.perf_counter() - started
        for kind, (tests, answer) in kinds.items():
            rates[f"{mode}, {kind}"] = rate = statistics.median(
                checks_in_a_second(Marker(config, runner), tests, answer, arguments.checks)
                for _ in range(arguments.rounds)
            )
            print(f"{mode:12} {kind:20} {start_s:8.2f} {rate:9.1f}")
        runner.close()
    contained = contained_programs()
    print(f"hostile programs: {contained['programs']}, scored 0: {contained['scored_0']}")
    print(f"slowest of them beyond its limit of time: {contained['slowest_beyond_limit_s']:.2f} s")
    print(json.dumps({"cores": os.cpu_count(), "checks_per_s": rates, **contained}))


def checks_in_a_second(marker: Marker, tests: list[Any], answer: str, checks: int) -> float:
    started = time.perf_counter()
    marks = marker.mark([answer] * checks, read_suite(tests, {}))
    took = time.perf_counter() - started
    assert all(mark["reward"] == 1 for mark in marks)
    return checks / took


def contained_programs() -> dict[str, float]:
    """Score every hostile program with a limit of one second."""
    programs = [*hostile_programs.QUICK.values(), *hostile_programs.LASTING.values()]
    config = CodeConfig(use="code", parallel=1, time_s=1.0, memory_mb=128, disk_mb=4)
    runner = SandboxRunner("bubblewrap", 1, config.imports)
    scored_0, slowest = 0, 0.0
    for program in programs:
        started = time.perf_counter()
        [mark] = Marker(config, runner).mark([program], read_suite(CALLS, {}))
        slowest = max(slowest, time.perf_counter() - started - config.time_s)
        scored_0 += mark["reward"] == 0
    runner.close()
    return {"programs": len(programs), "scored_0": scored_0, "slowest_beyond_limit_s": round(slowest, 3)}


if __name__ == "__main__":
    main()
