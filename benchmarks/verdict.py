"""How often the verdict is wrong: made runs of 60 steps with the noise of real ones.

    python benchmarks/verdict.py make FOLDER [JOBS]   # 30 runs of five tasks, whose policies hardly change
    python benchmarks/verdict.py judge FOLDER [--seed 1] [--runs 400]

`judge` draws for each made run the noise of one run in FOLDER (deviation and correlation of the reward around
its trend), the figures of its steps, and a number of answers a step, which scales the deviation. Half of the
made runs keep their reward; those of the other half rise by 0.1, or by 4 standard errors of a straight-line
fit if that is more. The last line is one JSON object: the share of unchanged runs that are called learning,
collapsing, broken or falling, and of rising ones that are called learning.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

from step_lines import correlated
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["make", "judge"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("jobs", type=int, nargs="?", default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--runs", type=int, default=400)
    asked = parser.parse_args()
    folder = asked.folder.absolute()
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
