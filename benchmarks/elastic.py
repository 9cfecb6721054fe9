"""Static numbers of rollout workers against `elastic`, on mock engines with rollout as the bottleneck.

    python benchmarks/elastic.py [--numbers 2,4,8,12,16] [--seconds 15] [--within 150]

Both are real runs through the command line. A ticket takes about two seconds, whatever the load, and the
engine has slots for the tickets of 12 workers. The first run gets each static number in turn (`stretto
scale`) and the benchmark counts the groups that it finishes. The second run starts with the smallest number
and has `elastic: {rollout: [smallest, largest]}`; it is measured in the same way at the end of the time
that it has to find a number. The last line is one JSON object; `ratio` is the speed that elastic found over
that of the best static number.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from stretto.records.status import read_status
from stretto.records.timeline import TicketDone, read_timeline
from whole_runs import mock_run_file

_SETTLE_S = 6.0
_START_S = 120.0

RUN = """\
name: elastic
algorithm: {use: grpo, group_size: 4}
training: {use: mock, seconds_per_step: 0.02}
inference: {use: mock, tokens_per_s: 3840, slots: 96, mean_tokens: 80}
rollout: {concurrency: 2}
queue: {batch_size: 8, max_staleness: 7}
samples: {keep: none}
steps: 1000000
"""


@contextmanager
def living_run(file: Path, out: Path, *overrides: str) -> Generator[subprocess.Popen[bytes]]:
    """A run that lives for the duration of the block.

    Raises:
        RuntimeError: if it does not start to train.
    """
    command = [sys.executable, "-m", "stretto", "run", str(file), f"out={out}", *overrides]
    with out.with_suffix(".txt").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + _START_S
        while not (out / "metrics.jsonl").exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the run did not start:\n{out.with_suffix('.txt').read_text()}")
            time.sleep(0.2)
        yield process
    finally:
        if process.poll() is None:
            subprocess.run([sys.executable, "-m", "stretto", "stop", str(out), "--now"], check=True)
        process.wait()


def ready_rollout_workers(out: Path) -> int:
    """Return the rollout workers of a run that are ready and stay."""
    status = read_status(out)
    workers = [] if status is None else status.workers
    return sum(each.worker.startswith("rollout-") and each.ready and not each.leaving for each in workers)


def groups_per_s(out: Path, seconds: float) -> float:
    """Return the groups per second that a run finishes in the next seconds."""
    start = time.time()
    time.sleep(seconds + 2)  # the timeline is a second behind
    done = [event.time for event in read_timeline(out) if isinstance(event, TicketDone)]
    return sum(start < each <= start + seconds for each in done) / seconds


def static_speeds(file: Path, out: Path, numbers: list[int], seconds: float) -> dict[int, float]:
    """Return the speed with each number of rollout workers."""
    speeds: dict[int, float] = {}
    with living_run(file, out, f"rollout.processes={numbers[0]}"):
        for number in numbers:
            command = [sys.executable, "-m", "stretto", "scale", str(out), f"rollout={number}"]
            subprocess.run(command, check=True, capture_output=True)
            while ready_rollout_workers(out) != number:
                time.sleep(0.2)
            time.sleep(_SETTLE_S)
            speeds[number] = groups_per_s(out, seconds)
            print(f"static  {number:>3} workers {speeds[number]:7.2f} groups/s", flush=True)
    return speeds


def elastic_speed(file: Path, out: Path, bounds: tuple[int, int], within: float, seconds: float) -> float:
    """Return the speed that `elastic` has found after some time."""
    overrides = f"rollout.processes={bounds[0]}", f"elastic={{rollout: [{bounds[0]}, {bounds[1]}]}}"
    with living_run(file, out, *overrides):
        time.sleep(within)
        speed = groups_per_s(out, seconds)
        print(f"elastic {ready_rollout_workers(out):>3} workers {speed:7.2f} groups/s", flush=True)
    return speed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--numbers", default="2,4,8,12,16", help="static numbers, in rising order")
    parser.add_argument("--seconds", type=float, default=15, help="seconds of each measurement")
    parser.add_argument("--within", type=float, default=150, help="seconds that elastic has")
    options = parser.parse_args()
    numbers = [int(each) for each in options.numbers.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        file = mock_run_file(Path(folder), 1000, RUN)
        static = static_speeds(file, Path(folder, "static"), numbers, options.seconds)
        bounds = numbers[0], numbers[-1]
        elastic = elastic_speed(file, Path(folder, "elastic"), bounds, options.within, options.seconds)
    best = max(static, key=lambda number: static[number])
    result = {
        "static": {str(number): round(speed, 2) for number, speed in static.items()},
        "best": best,
        "elastic": round(elastic, 2),
        "ratio": round(elastic / static[best], 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
