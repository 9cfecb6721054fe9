"""Forecasts of `stretto plan` against real runs.

    python benchmarks/plan.py [--mock 20] [--torch 5] [--seed 1]
    python benchmarks/plan.py --pairs 5

Draws run files: with the engines `mock`, over speed, slots, batch, group and staleness; and the quickstart,
over slots, batch, group and staleness. The service times of all forecasts are measured once, with one mock
run and with the quickstart as it is, so they come from another configuration.
Each file runs `--runs` times, and the median counts. The last line is one JSON object.

With `--pairs`: `stretto plan RUN` proposes a change of a quickstart with drawn values; else its row with the
most different speed counts. The run and the changed one run in turns. The processor seconds of a step of the
changed run, by its records, are compared with those of the row.
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

from stretto.machine.cores import available_cores
from stretto.records.metrics import MetricsReader
from stretto.records.run_folder import RunFolder
from stretto_plan.measuring import processor_s
from stretto_plan.recorded import steady_steps
from whole_runs import QUICKSTART, mock_run_file, summary_of

STEPS = 60
PAIR_STEPS = 40
WORTH = 1.1  # speed-up from which `stretto plan` recommends a value
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
    # With overrides, the file without them has a line of its own, before.
    *_, line = [each for each in text.splitlines() if "  the run file" in each]
    seconds, _, _, age, *_ = line.split()
    return float(seconds), float(age)


def planned_rows(run: Path) -> dict[str, tuple[float, float]]:
    """Return the changed values of each row of `stretto plan RUN`, its speed and processor seconds a step.
    The recommended one, if any, is the first."""
    command = [sys.executable, "-m", "stretto", "plan", str(run)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    rows: dict[str, tuple[float, float]] = {}
    for line in lines[2:]:
        if line[:1] == " ":
            seconds, _, speed, _, _, _, cores, values = line.split(maxsplit=7)
            rows[values] = float(speed), float(seconds) * float(cores)
    advised = [line.split(": ")[1] for line in lines if line.startswith("recommended: ")]
    return {values: rows[values] for values in dict.fromkeys((*advised, *rows))}


def used_s(run: Path) -> float:
    """Return the processor seconds of a steady step of a run on this machine."""
    return sum(processor_s(steady_steps(RunFolder(run)), available_cores()).values())


def compare_pair(overrides: list[str], turns: int) -> dict[str, Any]:
    """Run a file and the file with the proposed values in turns, and compare with the forecast."""
    fixed = (f"steps={PAIR_STEPS}", "evaluation=null", "checkpoint.every=0")
    with tempfile.TemporaryDirectory() as folder:
        first, second = Path(folder, "first"), Path(folder, "second")
        summary_of(QUICKSTART, first / "0", *fixed, *overrides)
        rows = planned_rows(first / "0")
        [proposed, *others] = rows
        if rows[proposed][0] <= WORTH:
            proposed = max((proposed, *others), key=lambda values: abs(rows[values][0] - 1))
        for turn in range(turns):
            summary_of(QUICKSTART, second / str(turn), *fixed, *overrides, *proposed.split())
            if turn + 1 < turns:
                summary_of(QUICKSTART, first / str(turn + 1), *fixed, *overrides)
        before, after = (statistics.median(map(used_s, each.iterdir())) for each in (first, second))
    planned = rows[proposed][1]
    return {
        "run": " ".join(overrides),
        "proposed": proposed,
        "run_s": round(before, 3),
        "planned_s": round(planned, 3),
        "real_s": round(after, 3),
        "error": round(planned / after - 1, 3),
    }


def drawn(rng: random.Random, kind: str) -> list[str]:
    """Return values for the keys of a run file."""
    return [f"{key}={rng.choice(values)}" for key, values in CHOICES[kind].items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mock", type=int, default=20, help="mock files")
    parser.add_argument("--torch", type=int, default=5, help="files of the quickstart")
    parser.add_argument("--runs", type=int, default=3, help="real runs of each file")
    parser.add_argument("--pairs", type=int, help="pairs of a run and its proposed values, and nothing else")
    parser.add_argument("--seed", type=int, default=1, help="draws the files")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    if options.pairs:
        print(f"{'run s':>7} {'real s':>7} {'plan s':>7} {'error':>7}  processor seconds a step")
        pairs: list[dict[str, Any]] = []
        for _ in range(options.pairs):
            pairs.append(pair := compare_pair(drawn(rng, "torch"), options.runs))
            figures = " ".join(f"{pair[key]:>7.3f}" for key in ("run_s", "real_s", "planned_s"))
            print(f"{figures} {pair['error']:>+7.1%}  {pair['run']} -> {pair['proposed']}", flush=True)
        print(json.dumps({"pairs": pairs, "within_15": sum(abs(pair["error"]) <= 0.15 for pair in pairs)}))
        return
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
