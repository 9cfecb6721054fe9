"""What a kernel and a nats-server cost for 10, 100, 1,000 and 10,000 workers.

    python benchmarks/scale.py [WORKERS ...]

For each number of workers the real command `stretto run` starts the real kernel and server. Its launcher
(`scale_launcher.py`) starts processes that simulate the workers (`scale_workers.py`): they join, send
heartbeats, take tickets, append groups and swap. Of ten workers two are rollout workers, one is a verifier,
and the others are engines, except for one trainer, whose steps take no time. docs/benchmarks.md says what the
figures mean. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

HERE = Path(__file__).parent
SIZES = (10, 100, 1_000, 10_000)
GROUPS_PER_WORKER_S = 0.015
LEAST_GROUPS_S = 150.0
"""Groups per second of all workers together, at least: that of fewer would drown in that of heartbeats."""
STALENESS = 3
SAMPLES = 8
SETTLE_S = 1.5
"""From the end of work until the kernel has taken it in and the workers have written what they counted."""
START_S = 900.0


@dataclass(frozen=True)
class Times:
    """Durations in seconds."""

    idle_s: float = 20.0
    """Only heartbeats, beacons and routes."""
    step_s: float = 10.0
    """Time between two steps, about."""
    window_s: float = 5.0
    """Of a window with groups, and of the window without that follows."""
    pairs: int = 10
    """Number of such pairs."""


def numbers_of(workers: int) -> dict[str, int]:
    """Return the number of workers of each role."""
    rollout, verifier = workers // 5, workers // 10
    return {"rollout": rollout, "verifier": verifier, "inference": workers - 1 - rollout - verifier}


def write_run(folder: Path, workers: int, step_s: float) -> Path:
    """Write the run file, and return its path."""
    numbers = numbers_of(workers)
    rate = max(LEAST_GROUPS_S, GROUPS_PER_WORKER_S * workers)
    batch = round(rate * step_s)
    ticket_s = (STALENESS + 1) * batch / rate
    (folder / "rows.jsonl").write_text(
        "".join(f'{{"prompt": "{row}", "answer": "2"}}\n' for row in range(1000))
    )
    document = {
        "name": "scale",
        "out": str(folder / "run"),
        "steps": 100_000,
        "plugins": [str(HERE / "scale_launcher.py")],
        "algorithm": {"use": "grpo", "group_size": SAMPLES},
        "training": "mock",
        "inference": {"use": "mock", "replicas": numbers["inference"]},
        "rollout": {"processes": numbers["rollout"]},
        "verifier": {"processes": numbers["verifier"]},
        "reward": "exact",
        "dataset": {"use": "jsonl", "path": str(folder / "rows.jsonl")},
        "queue": {"batch_size": batch, "max_staleness": STALENESS},
        "checkpoint": {"every": 0},
        "samples": {"keep": "none"},
        "launcher": {
            "use": "simulated",
            "slots": math.ceil(1.5 * (STALENESS + 1) * batch / numbers["rollout"]),
            "ticket_s": ticket_s,
        },
    }
    file = folder / "run.yaml"
    file.write_text(json.dumps(document))
    return file


@dataclass
class Reading:
    """What was counted up to a moment."""

    at: float
    kernel_s: float
    """Processor seconds of the kernel's process."""
    server_s: float
    counts: Counter[str]


class Run:
    """A run with simulated workers."""

    def __init__(self, folder: Path, workers: int, step_s: float) -> None:
        self.folder = folder / "run"
        self.workers = workers
        self._log = (folder / "output").open("wb")
        command = [sys.executable, "-m", "stretto", "run", str(write_run(folder, workers, step_s))]
        self.process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)
        self.kernel = psutil.Process(self.process.pid)
        self.output = folder / "output"

    def server(self) -> psutil.Process:
        """Return the process of nats-server."""
        return psutil.Process(int((self.folder / "bus" / "nats.pid").read_text()))

    def counts(self) -> Counter[str]:
        """Return the counts of all simulated workers."""
        total: Counter[str] = Counter()
        for file in self.folder.glob("counts-*.json"):
            total.update(json.loads(file.read_text()))
        return total

    def read(self) -> Reading:
        """Return what was counted up to now."""
        kernel, server = self.kernel.cpu_times(), self.server().cpu_times()
        return Reading(
            time.monotonic(), kernel.user + kernel.system, server.user + server.system, self.counts()
        )

    def restarts(self) -> int:
        """Return the number of workers that ended and were started again. The figures would be wrong."""
        status = self.folder / "status.json"
        return json.loads(status.read_text())["restarts"] if status.exists() else 0

    def until(self, condition: Callable[[], bool], what: str, seconds: float = START_S) -> None:
        """Wait for a condition, or end the benchmark with the run's output."""
        deadline = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None or self.restarts() or time.monotonic() > deadline:
                tail = "\n".join(self.output.read_text(errors="replace").splitlines()[-20:])
                raise SystemExit(f"{self.workers} workers: not {what}; the end of the run's output:\n{tail}")
            time.sleep(0.2)

    def stop(self) -> None:
        """End the run. The simulated workers end with its last beacon."""
        children = self.kernel.children(recursive=True) if self.process.poll() is None else []
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
        for child in children:
            try:
                child.kill()
            except psutil.NoSuchProcess:
                continue
        self._log.close()


@dataclass
class Window:
    """A window with groups, and the window without that followed."""

    seconds: float
    """Processor seconds of the kernel in the first beyond those in the second."""
    groups: int
    steps: int

    @staticmethod
    def between(before: Reading, middle: Reading, after: Reading) -> Window:
        """Return the pair of windows that three readings bound."""
        share = (after.kernel_s - middle.kernel_s) / (after.at - middle.at)
        seconds = middle.kernel_s - before.kernel_s - share * (middle.at - before.at)
        groups = middle.counts["groups"] - before.counts["groups"]
        return Window(seconds, groups, after.counts["steps"] - before.counts["steps"])


def costs(windows: list[Window]) -> dict[str, float]:
    """Return the kernel's cost of a group from the windows without a step, and of a step from the others."""
    plain = [window.seconds / window.groups for window in windows if not window.steps and window.groups]
    low, middle, high = np.quantile(plain, (0.25, 0.5, 0.75)) if plain else (math.nan,) * 3
    steps = [(window.seconds - middle * window.groups) / window.steps for window in windows if window.steps]
    return {
        "kernel_us_per_group": 1e6 * middle,
        "kernel_us_per_group_lower_quartile": 1e6 * low,
        "kernel_us_per_group_upper_quartile": 1e6 * high,
        "kernel_ms_per_step": 1e3 * float(np.median(steps)) if steps else math.nan,
    }


def measure(workers: int, times: Times) -> dict[str, float]:
    """Return the figures of a run with this many workers."""
    with tempfile.TemporaryDirectory(prefix="scale-") as folder:
        run = Run(Path(folder), workers, times.step_s)
        try:
            began = time.monotonic()
            run.until(lambda: run.counts()["ready"] == workers, "all workers joined")
            status = run.folder / "status.json"
            run.until(
                lambda: status.exists() and json.loads(status.read_text())["ledger"]["issued"] > 0,
                "tickets issued",
            )
            start_s = time.monotonic() - began
            time.sleep(3)
            first, _ = run.read(), time.sleep(times.idle_s)
            last = run.read()
            idle = differences(first, last)
            go = run.folder / "go"
            go.touch()
            run.until(lambda: run.counts()["steps"] >= 2, "two steps trained")
            readings, windows = [run.read()], list[Window]()
            for _ in range(times.pairs):
                time.sleep(times.window_s)
                go.unlink()
                time.sleep(SETTLE_S)
                middle = run.read()
                time.sleep(times.window_s)
                after = run.read()
                go.touch()
                windows.append(Window.between(readings[-1], middle, after))
                readings.append(after)
            busy = differences(readings[0], readings[-1])
            memory = {"kernel_mb": run.kernel, "server_mb": run.server()}
            return {
                "start_s": start_s,
                "groups_per_s": busy["groups"],
                "steps": readings[-1].counts["steps"] - readings[0].counts["steps"],
                **costs(windows),
                "kernel_us_per_worker_s": 1e6 * idle["kernel_s"] / workers,
                "kernel_share": busy["kernel_s"],
                "server_share": busy["server_s"],
                "beacon_bytes_per_worker_s": (idle["beacon"] + idle["routes"]) / workers,
                "busy_beacon_bytes_per_worker_s": (busy["beacon"] + busy["routes"]) / workers,
                "heartbeat_bytes_per_worker_s": idle["heartbeats"] / workers,
                "other_bytes_per_group": sum(busy[kind] for kind in ("sent", "log", "acks", "tickets"))
                / busy["groups"],
                **{name: process.memory_info().rss / 2**20 for name, process in memory.items()},
            }
        finally:
            run.stop()


def differences(first: Reading, last: Reading) -> dict[str, float]:
    """Return what grew between two readings, for each second."""
    seconds = last.at - first.at
    rates = {name: (value - first.counts[name]) / seconds for name, value in last.counts.items()}
    zeros = dict.fromkeys(("groups", "beacon", "routes", "heartbeats", "sent", "log", "acks", "tickets"), 0.0)
    return {
        **zeros,
        **rates,
        "kernel_s": (last.kernel_s - first.kernel_s) / seconds,
        "server_s": (last.server_s - first.server_s) / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("workers", nargs="*", type=int, default=list(SIZES))
    parser.add_argument(
        "--quick", action="store_true", help="check the benchmark; the figures are worth nothing"
    )
    arguments = parser.parse_args()
    times = Times(idle_s=3, step_s=3, window_s=1, pairs=3) if arguments.quick else Times()
    figures: dict[int, dict[str, float]] = {}
    for workers in arguments.workers:
        figures[workers] = measure(workers, times)
        print(f"{workers:,} workers")
        for name, figure in figures[workers].items():
            print(f"  {name:<36} {figure:>12,.2f}", flush=True)
    shown = ("kernel_us_per_group", "beacon_bytes_per_worker_s")
    print(
        json.dumps(
            {name: {str(size): round(each[name], 1) for size, each in figures.items()} for name in shown}
        )
    )


if __name__ == "__main__":
    main()
