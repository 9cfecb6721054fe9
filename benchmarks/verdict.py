"""How often the verdict is wrong: made runs of 60 steps with the noise of real ones, and made curves.

    python benchmarks/verdict.py make FOLDER [JOBS]   # 30 runs of five tasks, whose policies hardly change
    python benchmarks/verdict.py judge FOLDER [--seed 1] [--runs 400]
    python benchmarks/verdict.py curves [--seed 1] [--runs 400]

`judge` draws for each made run the noise of one run in FOLDER (deviation and correlation of the reward around
its trend), the figures of its steps, and a number of answers a step, which scales the deviation. Half of the
made runs keep their reward; those of the other half rise by 0.1, or by 4 standard errors of a straight-line
fit if that is more. The last line is one JSON object: the share of unchanged runs that are called learning,
collapsing, broken or falling, and of rising ones that are called learning.

`curves` draws `--runs` curves of each shape, length and correlation of the noise from step to step. The noise
is 0.05 of the rise. Half of the curves are rewards, and half are losses, which fall. For the living and for
the ended run, the table has the share that is called learning; of unchanged curves, all that is not `flat` or
`unknown`. The last line is one JSON object: the largest such share of unchanged curves for each correlation,
and the smallest of saturating ones from 12 steps on.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

from step_lines import RUN, Steps, correlated
from stretto.bus.messages.events import Evaluation
from stretto.observe.advice import Adviser
from stretto.observe.verdict import RunState, verdict
from stretto.records.run_folder import RunFolder

ROOT = Path(__file__).parents[1]
STEPS, RISE, ERRORS = 60, 0.1, 4.0
ANSWERS = (64, 128, 256, 512)  # of a step
EVALUATED = 256  # answers of an evaluation
FIXED = ("training.lr=1e-12", "evaluation=null", "checkpoint.every=0", f"steps={STEPS}", "samples.keep=none")
TASKS = {  # name -> run file, values
    "sums": ("quickstart/run.yaml", ("queue.batch_size=8", "queue.max_staleness=1")),
    "sums-ppo": (
        "quickstart/ppo.yaml",
        ("queue.batch_size=16", "training.decay_steps=null", "training.schedule=constant"),
    ),
    "vision": ("vision/run.yaml", ("queue.batch_size=8",)),  # after `make_model.py` of that folder
    "hot": (
        "quickstart/run.yaml",
        ("queue.batch_size=4", "sampling.temperature=1.4", "algorithm.group_size=4"),
    ),
    "short": ("quickstart/run.yaml", ("queue.batch_size=8", "sampling.max_tokens=14", "algorithm.use=rloo")),
}
LENGTHS, CORRELATIONS, DEVIATION = (8, 12, 18, 30, 60), (0.0, 0.3, 0.5), 0.04
SHAPES: dict[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {  # of 0 to 1
    "unchanged": np.zeros_like,
    "saturating": lambda times: 1 - np.exp(-5 * times),
    "sigmoid": lambda times: 1 / (1 + np.exp(6 - 12 * times)),
    "late rise": lambda times: np.clip(2.5 * times - 1.5, 0, 1),
}


def make(folder: Path, jobs: int) -> None:
    def run(name: str, seed: int) -> None:
        file, values = TASKS[name]
        command = [sys.executable, "-m", "stretto", "run", f"examples/{file}", *FIXED, *values]
        command += [f"seed={seed}", f"out={folder / f'{name}-{seed}'}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)

    with ThreadPoolExecutor(jobs) as pool:
        for each in [pool.submit(run, name, seed) for name in TASKS for seed in range(1, 7)]:
            each.result()


@dataclass(frozen=True)
class Noise:
    """The rewards of a real run around their trend."""

    lines: list[dict[str, Any]]
    config: dict[str, Any]
    answers: int
    """Of a step."""
    deviation: float
    correlation: float
    mean: float

    @classmethod
    def of(cls, folder: Path) -> Noise:
        """The noise of the run in a folder."""
        run = RunFolder(folder)
        config = yaml.safe_load((folder / "config.yaml").read_text())
        rewards = np.array([value for _, value in run.series("reward")])
        steps = np.arange(len(rewards))
        residuals = rewards - np.polyval(np.polyfit(steps, rewards, 1), steps)
        correlation = float(np.corrcoef(residuals[:-1], residuals[1:])[0, 1]) + 2 / len(rewards)
        answers = config["queue"]["batch_size"] * config["algorithm"]["group_size"]
        spread = float(residuals.std(ddof=2))
        return cls(list(run.steps), config, answers, spread, correlation, float(rewards.mean()))


def judge(noises: list[Noise], seed: int, runs: int) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    counts: dict[str, Counter[str]] = {"same": Counter(), "rises": Counter()}
    for number in range(runs):
        kind = ("same", "rises")[number % 2]
        noise, of_steps = (noises[place] for place in random.integers(len(noises), size=2))
        deviation = noise.deviation * math.sqrt(noise.answers / random.choice(ANSWERS))
        counts[kind][_judged(random, noise, of_steps, deviation, rises=kind == "rises")] += 1
    for kind, states in counts.items():
        print(f"{kind:6} {dict(states.most_common())}")
    same, rises = counts["same"], counts["rises"]
    wrong = sum(same[state] for state in ("learning", "collapsing", "broken", "falling"))
    return {
        "runs": runs,
        "seed": seed,
        "unchanged_called_learning_or_collapsing": (same["learning"] + same["collapsing"]) / same.total(),
        "unchanged_called_anything_else": wrong / same.total(),
        "rising_called_learning": rises["learning"] / rises.total(),
    }


def _judged(
    random: np.random.Generator, noise: Noise, of_steps: Noise, deviation: float, *, rises: bool
) -> str:
    correlation = min(0.9, max(-0.9, noise.correlation))
    drawn = correlated(random, deviation, correlation, STEPS)
    # The standard error of the rise of a straight line over n equidistant values is about s √(12 / n).
    error = deviation * math.sqrt(12 / STEPS * (1 + correlation) / (1 - correlation))
    rise = max(RISE, ERRORS * error) if rises else 0.0
    level = np.linspace(noise.mean, noise.mean + rise, STEPS)
    adviser = Adviser(of_steps.config)
    lines = [of_steps.lines[step % len(of_steps.lines)] for step in range(STEPS)]
    for step, (line, value, mean) in enumerate(zip(lines, level + drawn, level, strict=True), 1):
        if step == 1 or step == STEPS:
            right = random.binomial(EVALUATED, min(1.0, max(0.0, mean)))
            adviser.evaluated(Evaluation(step - 1, right / EVALUATED, EVALUATED, 0))
        adviser.step({**line, "step": step, "reward": float(value)})
    return verdict(adviser, RunState("running", STEPS)).state


def curves(seed: int, runs: int) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    shares: dict[tuple[str, int, float], tuple[float, float]] = {}
    print("shape       steps  " + "".join(f"living, ended at {each}   " for each in CORRELATIONS))
    for shape, steps in product(SHAPES, LENGTHS):
        for correlation in CORRELATIONS:
            ends = [_of_curve(random, shape, steps, correlation, number % 2 == 1) for number in range(runs)]
            shares[shape, steps, correlation] = tuple(np.mean(ends, 0))
        row = [shares[shape, steps, correlation] for correlation in CORRELATIONS]
        print(f"{shape:11} {steps:5}  " + "".join(f"{one:8.3f} {two:8.3f}       " for one, two in row))
    same = {
        f"unchanged_called_otherwise_at_{correlation}": max(
            max(shares["unchanged", steps, correlation]) for steps in LENGTHS
        )
        for correlation in CORRELATIONS
    }
    found = min(
        min(share) for (shape, steps, _), share in shares.items() if shape == "saturating" and steps >= 12
    )
    return {"runs": runs, "seed": seed, **same, "saturating_called_learning": found}


def _of_curve(
    random: np.random.Generator, shape: str, steps: int, correlation: float, is_loss: bool
) -> tuple[bool, bool]:
    """Whether a drawn curve is called learning, or, if it is unchanged, anything that it is not."""
    rise = SHAPES[shape](np.linspace(0, 1, steps)) / 0.05 * DEVIATION
    level = (1.0 - rise) if is_loss else (0.1 + rise if rise.any() else 0.5 + rise)
    values = level + correlated(random, DEVIATION, correlation, steps)
    lines = [{"step": step, "step_s": 1.0} for step in range(1, steps + 1)]
    if not is_loss:
        lines = Steps(int(random.integers(2**32)))(steps)
    adviser = Adviser(RUN)
    for line, value in zip(lines, values, strict=True):
        adviser.step({**line, "loss" if is_loss else "reward": float(value)})
    right = ("flat", "unknown") if shape == "unchanged" else ("learning",)
    living, ended = (
        verdict(adviser, RunState(each, steps)).state in right for each in ("running", "completed")
    )
    return (not living, not ended) if shape == "unchanged" else (living, ended)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["make", "judge", "curves"])
    parser.add_argument("folder", type=Path, nargs="?", default=Path())
    parser.add_argument("jobs", type=int, nargs="?", default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--runs", type=int, default=400)
    asked = parser.parse_args()
    folder = asked.folder.absolute()
    if asked.what == "curves":
        print(json.dumps(curves(asked.seed, asked.runs)))
        return
    if asked.what == "make":
        make(folder, asked.jobs)
        return
    noises = {each.parent.name: Noise.of(each.parent) for each in sorted(folder.glob("*/config.yaml"))}
    for task in TASKS:
        found = [noise for name, noise in noises.items() if name.rpartition("-")[0] == task]
        means = [
            np.mean([getattr(noise, key) for noise in found]) for key in ("mean", "deviation", "correlation")
        ]
        print(task, len(found), "runs; reward {:.3f}, deviation {:.3f}, correlation {:.3f}".format(*means))
    print(json.dumps(judge([*noises.values()], asked.seed, asked.runs)))


if __name__ == "__main__":
    main()
