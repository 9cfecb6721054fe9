"""Forecasts of `stretto plan` against real runs.

    python benchmarks/plan.py [--mock 20] [--torch 5] [--seed 1]

Draws run files: with the engines `mock`, over speed, slots, batch, group and staleness; and the quickstart,
over slots, batch, group and staleness. The service times of all forecasts are measured once, with one mock
run and with the quickstart as it is, so they come from another configuration.
Each file runs `--runs` times, and the median counts. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from stretto.records.metrics import MetricsReader
from whole_runs import QUICKSTART, mock_run_file, summary_of

STEPS = 60
SKIPPED = 3
"""The first third of the steps does not count, because the queue fills."""
CHOICES = {
    "mock": {
        "training.seconds_per_step": (0.05, 0.1, 0.2, 0.4),
        "inference.tokens_per_s": (5_000, 10_000, 20_000, 40_000),
        "inference.slots": (32, 64, 128, 256),
        "queue.batch_size": (16, 32, 48),
        "algorithm.group_size": (4, 8),
        "queue.max_staleness": (0, 1, 2, 4),
    },
    "torch": {
        "inference.slots": (32, 64, 128),
        "queue.batch_size": (16, 32, 64),
        "algorithm.group_size": (4, 8, 16),
        "queue.max_staleness": (1, 2, 4),
    },
}
MOCK = """\
name: plan
algorithm: {use: grpo, group_size: 8}
training: {use: mock, seconds_per_step: 0.1}
inference: {use: mock, tokens_per_s: 20000, slots: 128, mean_tokens: 24, sigma: 0.4}
queue: {batch_size: 32, max_staleness: 2}
steps: 60
"""


def real(file: Path, overrides: list[str]) -> tuple[float, float]:
    """Return seconds of a step and mean staleness of a real run's steady part."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "run")
        summary_of(file, out, *overrides, f"steps={STEPS}", "evaluation=null", "checkpoint.every=0")
        metrics = MetricsReader(out)
        metrics.read()
        lines = metrics.steps
    first = len(lines) // SKIPPED
    seconds = (lines[-1]["time"] - lines[first]["time"]) / (len(lines) - 1 - first)
    return seconds, statistics.mean(line["staleness"] for line in lines[first:])


def forecast(file: Path, times: Path, overrides: list[str]) -> tuple[float, float]:
    """Return the forecast of both, with the service times of a file; it is written if it is not there."""
    options = ["--times", str(times), "--only"]
    command = [sys.executable, "-m", "stretto", "plan", str(file), *overrides, *options]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    [line] = [each for each in text.splitlines() if each.endswith("the run file")]
    seconds, _, _, age, *_ = line.split()
    return float(seconds), float(age)


def drawn(rng: random.Random, kind: str) -> list[str]:
    """Return values for the keys of a run file."""
    return [f"{key}={rng.choice(values)}" for key, values in CHOICES[kind].items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mock", type=int, default=20, help="mock files")
    parser.add_argument("--torch", type=int, default=5, help="files of the quickstart")
    parser.add_argument("--runs", type=int, default=3, help="real runs of each file")
    parser.add_argument("--seed", type=int, default=1, help="draws the files")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    result: dict[str, Any] = {}
    print(f"{'':8} {'real s':>8} {'plan s':>8} {'error':>7} {'age':>6} {'plan':>6}")
    with tempfile.TemporaryDirectory() as folder:
        mock = mock_run_file(Path(folder), 2000, MOCK)
        kinds = {"mock": (mock, options.mock), "torch": (QUICKSTART, options.torch)}
        for kind, (file, number) in kinds.items():
            if not number:
                continue
            errors: list[float] = []
            ages: list[float] = []
            times = Path(folder, f"{kind}.json")
            forecast(file, times, [])  # measures
            for _ in range(number):
                overrides = drawn(rng, kind)
                runs = [real(file, overrides) for _ in range(options.runs)]
                seconds, age = (statistics.median(values) for values in zip(*runs, strict=True))
                planned, planned_age = forecast(file, times, overrides)
                errors.append(planned / seconds - 1)
                ages.append(planned_age - age)
                figures = (
                    f"{seconds:>8.3f} {planned:>8.3f} {errors[-1]:>+7.1%} {age:>6.2f} {planned_age:>6.2f}"
                )
                print(f"{kind:8} {figures}  {' '.join(overrides)}", flush=True)
            result[kind] = {
                "files": number,
                "median_error": round(statistics.median(map(abs, errors)), 3),
                "largest_error": round(max(map(abs, errors)), 3),
                "largest_age_error": round(max(map(abs, ages)), 2),
            }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
