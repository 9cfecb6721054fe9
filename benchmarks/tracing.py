"""The cost of tracing every ticket: runs with `tracing` and runs without it, at equal settings.

    python benchmarks/tracing.py [--pairs 5] [--seconds 40] [tracing.key=value ...]

The two runs of a pair share the machine at the same time, so other programs slow both of them. The benchmark
begins to measure when both have trained a few steps, and measures for the given time. It counts finished
tickets per second, and the CPU seconds (user and system) of all processes of a run for each finished ticket.
It does so for the quickstart, whose torch engines use all cores, and for the run file of `rollout.py`, whose
rollout worker has 512 tickets at once. The spans go to files unless an argument names a collector. The
medians of the ratios over the pairs count. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from rollout import run_file
from stretto.records.timeline import TicketDone, read_timeline
from whole_runs import QUICKSTART

FIRST_STEP = 3


@dataclass
class Rates:
    """What a run did in the measured time."""

    tickets_per_s: float
    cpu_s_per_ticket: float


@dataclass
class Measured:
    """A run under way."""

    process: subprocess.Popen[bytes]
    out: Path

    def steps(self) -> int:
        """Return the number of complete steps."""
        assert self.process.poll() is None, f"the run in {self.out} ended early"
        metrics = self.out / "metrics.jsonl"
        return sum('"ledger"' in line for line in metrics.open()) if metrics.exists() else 0

    def cpu_s(self) -> float:
        """Return the CPU seconds of all processes of the run."""
        run = psutil.Process(self.process.pid)
        times = [process.cpu_times() for process in (run, *run.children(recursive=True))]
        return sum(each.user + each.system for each in times)

    def done(self, since: float, until: float) -> list[float]:
        """Return when training tickets were finished."""
        events = read_timeline(self.out, since, until)
        return [each.time for each in events if isinstance(each, TicketDone) and each.purpose == "train"]


@contextmanager
def measured(file: Path, out: Path, overrides: Sequence[str]) -> Generator[Measured]:
    """Start a run, and stop it at the end of the block."""
    command = [sys.executable, "-m", "stretto", "run", str(file), f"out={out}", *overrides]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield Measured(process, out)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


def pair(file: Path, folder: Path, overrides: dict[bool, list[str]], seconds: float) -> dict[bool, Rates]:
    """Run with and without tracing at the same time. The run that `overrides` names first starts first."""
    first, second = overrides
    with (
        measured(file, folder / str(first), overrides[first]) as one,
        measured(file, folder / str(second), overrides[second]) as other,
    ):
        runs = {first: one, second: other}
        while min(run.steps() for run in runs.values()) < FIRST_STEP:
            time.sleep(0.2)
        begin, cpu_before = time.time(), {traced: run.cpu_s() for traced, run in runs.items()}
        time.sleep(seconds)
        end, cpu_after = time.time(), {traced: run.cpu_s() for traced, run in runs.items()}
        time.sleep(2)  # the kernel writes the timeline once per second
        rates: dict[bool, Rates] = {}
        for traced, run in runs.items():
            done = run.done(begin, end)
            rate = (len(done) - 1) / (done[-1] - done[0])
            cpu_rate = (cpu_after[traced] - cpu_before[traced]) / (end - begin)
            rates[traced] = Rates(rate, cpu_rate / rate)
    return rates


def cost(name: str, file: Path, options: list[str], arguments: argparse.Namespace) -> dict[str, object]:
    """Compare runs of one file; return the medians."""
    throughput, cpu = list[float](), list[float]()
    tracing = arguments.overrides or ["tracing.share=1"]
    for number in range(arguments.pairs):
        order = (True, False) if number % 2 else (False, True)
        overrides = {traced: [*options, *(tracing if traced else [])] for traced in order}
        with tempfile.TemporaryDirectory() as folder:
            rates = pair(file, Path(folder), overrides, arguments.seconds)
        throughput.append(rates[True].tickets_per_s / rates[False].tickets_per_s)
        cpu.append(rates[True].cpu_s_per_ticket / rates[False].cpu_s_per_ticket)
        speeds = [rates[traced].tickets_per_s for traced in (False, True)]
        cpu_ms = [1e3 * rates[traced].cpu_s_per_ticket for traced in (False, True)]
        print(
            f"{name:>10} {number + 1:>4} {speeds[0]:>9.1f} {speeds[1]:>9.1f} {throughput[-1]:>7.3f} "
            f"{cpu_ms[0]:>14.2f} {cpu_ms[1]:>9.2f} {cpu[-1]:>7.3f}",
            flush=True,
        )
    return {
        "throughput": round(statistics.median(throughput), 3),
        "cpu": round(statistics.median(cpu), 3),
        "throughput_of_pairs": [round(each, 3) for each in throughput],
        "cpu_of_pairs": [round(each, 3) for each in cpu],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of tracing every ticket.")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--only", choices=("quickstart", "rollout"))
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    print(f"{'run':>10} pair tickets/s {'traced':>9} {'ratio':>7}  CPU ms/ticket {'traced':>9} {'ratio':>7}")
    results: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        files = {
            "quickstart": (QUICKSTART, ["steps=100000", "evaluation=null", "checkpoint.every=0"]),
            "rollout": (run_file(Path(folder)), ["steps=100000"]),
        }
        for name, (file, options) in files.items():
            if arguments.only in (None, name):
                results[name] = cost(name, file, options, arguments)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
