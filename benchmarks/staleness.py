"""Does asynchrony cost learning? Runs of tiny models with and without staleness, compared seed by seed.

    python benchmarks/staleness.py [STAGE ...] [--quick] [--jobs N]

`screening`: every correction with grpo and every other algorithm at its default; one task, one seed, η 0
and 4. `grid`: the defaults on three tasks × three learning rates × η 0, 1, 2, 4, 8 × three seeds, and seven
more seeds where a cell's mean is suspicious. `drawn`: the same at five settings drawn at random. `gate`:
`queue.max_divergence` at a third and at three times the rate. `step_scale`: the drawn settings at η 2 and 8
with `correction.step_scale: ess` against `kl`. `top_p`: sampling with top_p 0.95 against 1, η 2, on a task
that was used for tuning and on one that was not. `speed`: time to equal accuracy on the
long-tailed task, η 2 against 0. `collapse`: rates that are 15 and 50 times too high, and whether the advice
says so; and the advice at the right rate and at 3 times it. Without a stage, all of them.

Every finished run is a line of `benchmarks/staleness.jsonl`, and is not run again: delete the file to begin
from nothing. Lines that begin with `former rule/` were measured before the factor of `target_kl` persisted
and `warmup_steps` was 10, and those that begin with `no warm-up/` with `training.warmup_steps=0`. `--quick`
takes a few short runs of each stage, to see that they work, and keeps nothing. Tables, `docs/staleness.svg`,
and as the last line one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from staleness_tasks import TASKS

HERE = Path(__file__).parent
RUN_FILE = HERE / "staleness.yaml"
RESULTS = HERE / "staleness.jsonl"
FIGURE = HERE.parent / "docs" / "staleness.svg"
WORK = HERE.parent / "build" / "staleness"

RATES = {"1/3": 1 / 3, "1": 1.0, "3": 3.0}
TUNED = ("sums", "chains", "sorting")
MORE_SEEDS = range(3, 10)
WINDOW = 10
"""Number of steps over which rewards are averaged."""

CORRECTIONS = ("behaviour", "decoupled", "token_tis", "sequence_tis", "icepop", "sequence_mask")
ALGORITHMS = ("dapo", "gspo", "cispo", "sapo", "rloo", "m2po", "reinforce_pp", "ppo")


@dataclass(frozen=True)
class Run:
    """One run, with the settings that vary."""

    stage: str
    cell: str
    """Runs of one cell differ in seed and staleness alone."""
    task: str
    staleness: int
    seed: int
    options: tuple[str, ...] = ()
    layers: int = 3

    @property
    def key(self) -> str:
        """Name of the run in the file of results."""
        return f"{self.stage}/{self.cell}/{self.staleness}/{self.seed}"


@dataclass(frozen=True)
class Result:
    """The figures of a finished run."""

    first: float
    """Held-out accuracy of the initial policy."""
    final: float
    """Held-out accuracy of the final policy."""
    best: float
    """Highest mean training reward over `WINDOW` steps."""
    last: float
    """Mean training reward over the last `WINDOW` steps."""
    staleness: float
    """Mean staleness of the trained samples."""
    eta: float
    """Mean effective bound of staleness."""
    rewards: tuple[float, ...]
    """Mean training reward of each step."""
    times_s: tuple[float, ...]
    """End time of each step, in seconds."""
    advice: tuple[str, ...] = ()
    """Rules of docs/advice.md that gave advice."""
    said: tuple[int, ...] = ()
    """Step of each advice."""
    names_lr: tuple[bool, ...] = ()
    """Whether each advice names `training.lr`."""
    status: str = "completed"

    @property
    def collapsed(self) -> bool:
        """Whether it lost what it had learned."""
        return self.last < self.best - 0.2


# --------------------------------------------------------------------------------------- running


class Runner:
    """Runs what has no line in the file of results, `jobs` at a time, each on one core."""

    def __init__(self, jobs: int, *, quick: bool) -> None:
        self.staleness = (0, 4, 8) if quick else (0, 1, 2, 4, 8)
        self.seeds = range(1) if quick else range(3)
        self._jobs = jobs
        self.quick = quick
        self._known: dict[str, Result] = {}
        if RESULTS.exists() and not quick:
            for line in RESULTS.read_bytes().splitlines():
                run, record = json.loads(line)
                self._known[run] = Result(**record)

    def results(self, runs: Iterable[Run], *, jobs: int | None = None) -> dict[Run, Result]:
        """Return the result of every run, in order."""
        every = list(runs)
        models = sorted({(run.task, run.layers) for run in every})
        missing = [run for run in every if run.key not in self._known]
        with ThreadPoolExecutor(jobs or self._jobs) as pool:
            for made in [pool.submit(TASKS[task].make, WORK, layers=layers) for task, layers in models]:
                made.result()
            for run, result in zip(missing, pool.map(self._run, missing), strict=True):
                self._keep(run, result)
        return {run: self._known[run.key] for run in every}

    def _run(self, run: Run) -> Result:
        task = TASKS[run.task]
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "run")
            options = [
                *task.overrides(WORK, layers=run.layers),
                f"training.lr={task.lr}",
                f"queue.max_staleness={run.staleness}",
                f"seed={run.seed}",
                *run.options,
                *(["steps=6", "evaluation.rows=32"] if self.quick else []),
            ]
            command = [sys.executable, "-m", "stretto", "run", str(RUN_FILE), f"out={out}", *options]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode and "on_collapse=stop" not in run.options:
                raise SystemExit(f"{run.key} failed: {' '.join(command)}\n{done.stderr[-2000:]}")
            return _result_of(out)

    def _keep(self, run: Run, result: Result) -> None:
        self._known[run.key] = result
        print(f"{run.key:50} {result.first:.3f} -> {result.final:.3f}", flush=True)
        if not self.quick:
            with RESULTS.open("a") as file:
                file.write(json.dumps([run.key, vars(result)]) + "\n")


def _result_of(out: Path) -> Result:
    summary = json.loads((out / "summary.json").read_text())
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_bytes().splitlines()]
    steps = [line for line in lines if "train_s" in line]
    rewards = [step["reward"] for step in steps]
    means = [statistics.fmean(rewards[i : i + WINDOW]) for i in range(max(1, len(rewards) - WINDOW + 1))]
    samples = {int(key): count for key, count in summary["staleness"].items()}
    return Result(
        first=summary["evaluation"][0]["accuracy"],
        final=summary["evaluation"][-1]["accuracy"],
        best=max(means),
        last=means[-1],
        staleness=sum(key * count for key, count in samples.items()) / sum(samples.values()),
        eta=statistics.fmean(step.get("staleness_limit", math.nan) for step in steps),
        rewards=tuple(rewards),
        times_s=tuple(step["time_s"] for step in steps),
        advice=tuple(advice["rule"] for advice in summary["advice"]),
        said=tuple(advice["said"] for advice in summary["advice"]),
        names_lr=tuple("`training.lr`" in advice["message"] for advice in summary["advice"]),
        status=summary["status"],
    )


# ---------------------------------------------------------------------------------------- stages


def screening(runner: Runner) -> dict[str, Any]:
    """Which correction, which algorithm? One task at twice its rate, one seed."""
    choices: dict[str, tuple[str, ...]]
    choices = {f"grpo {use}": (f"algorithm.correction.use={use}",) for use in CORRECTIONS}
    unscaled = "algorithm.correction.target_kl=null"
    choices |= {f"{name}, target_kl null": (*options, unscaled) for name, options in choices.items()}
    choices |= {name: (f"algorithm.use={name}", "algorithm.group_size=8") for name in ALGORITHMS}
    choices["ppo"] += ("groups={critics: {use: torch, lr: 1e-3, threads: 1}}", "models.critic.group=critics")
    choices["reinforce_pp"] += ("algorithm.baseline=true",)
    rate = f"training.lr={TASKS['sums'].lr * 2}"
    runs = [
        Run("screening", name, "sums", eta, 0, (rate, *options))
        for name, options in choices.items()
        for eta in (0, 4)
    ]
    found = runner.results(runs)
    print(f"\n{'screening':40} {'η = 0':>16} {'η = 4':>16} {'lowest':>8}")
    table: dict[str, list[float]] = {}
    for sync, late in zip(runs[::2], runs[1::2], strict=True):
        a, b = found[sync], found[late]
        table[sync.cell] = [a.final, b.final]
        both = f"{a.first:.3f} -> {a.final:.3f}", f"{b.first:.3f} -> {b.final:.3f}"
        print(f"{sync.cell:40} {both[0]:>16} {both[1]:>16} {'collapse' if b.collapsed else ''}")
    return {"final": table}


def grid(runner: Runner) -> dict[str, Any]:
    """The defaults on every task and rate."""
    cells = {
        f"{task.name} × {name}": Cell(task.name, (f"training.lr={task.lr * rate}",))
        for task in (TASKS[name] for name in TUNED)
        for name, rate in RATES.items()
    }
    report = compare(runner, "grid", cells)
    if not runner.quick:
        FIGURE.write_text(heat_map(report["cells"]))
    return report


def drawn(runner: Runner) -> dict[str, Any]:
    """The defaults at five settings that nothing was tuned on."""
    return compare(runner, "drawn", drawn_cells())


def drawn_cells() -> dict[str, Cell]:
    """Draw the five settings."""
    rng, cells = random.Random("drawn settings"), dict[str, Cell]()
    for number in range(1, 6):
        task, layers = rng.choice(["chains", "sorting"]), rng.choice([2, 4, 6])
        group, batch = rng.choice([4, 8, 16]), rng.choice([8, 16, 32])
        schedule, temperature = rng.choice(["constant", "linear", "cosine"]), rng.choice([0.8, 1.0, 1.2])
        options = (
            f"algorithm.group_size={group}",
            f"queue.batch_size={batch}",
            f"training.schedule={schedule}",
            "training.decay_steps=${steps}",
            f"sampling.temperature={temperature}",
        )
        cells[f"{number}: {task}"] = Cell(task, options, layers)
        print(f"setting {number}: {task}, {layers} layers, {', '.join(options)}")
    return cells


def step_scale(runner: Runner) -> dict[str, Any]:
    """The two rules that shorten steps, at the drawn settings, seed by seed."""
    ess, report = "algorithm.correction.step_scale=ess", dict[str, Any]()
    print(f"\n{'step_scale':12} {'η':>2} {'kl':>7} {'ess':>7} {'ess - kl, each seed':>28}")
    differences: list[float] = []
    for name, cell in drawn_cells().items():
        for eta in (2, 8):
            kinds = {
                "kl": [
                    Run("drawn", name, cell.task, eta, seed, cell.options, cell.layers)
                    for seed in runner.seeds
                ],
                "ess": [
                    Run("step_scale", name, cell.task, eta, seed, (*cell.options, ess), cell.layers)
                    for seed in runner.seeds
                ],
            }
            found = {
                kind: [each.final for each in runner.results(runs).values()] for kind, runs in kinds.items()
            }
            own = [b - a for a, b in zip(found["kl"], found["ess"], strict=True)]
            differences += own
            means = {kind: statistics.fmean(finals) for kind, finals in found.items()}
            report[f"{name}/{eta}"] = {**means, "differences": own}
            each = ", ".join(f"{value:+.3f}" for value in own)
            print(f"{name:12} {eta:>2} {means['kl']:>7.3f} {means['ess']:>7.3f} {each:>28}")
    mean, lower = _lower_bound(differences)
    print(f"all: mean {mean:+.4f}, lower end of the 95 % interval {lower:+.4f}")
    return {"cells": report, "mean": mean, "lower": lower}


def top_p(runner: Runner) -> dict[str, Any]:
    """Sampling from a part of the vocabulary, against sampling from all of it."""
    report: dict[str, Any] = {}
    print(f"\n{'top_p, η = 2':14} {'1':>7} {'0.95':>7} {'difference':>11} {'each seed':>24}")
    for name in ("sums", "largest"):
        finals = {
            value: [
                each.final
                for each in runner.results(
                    Run("top_p", f"{name} {value}", name, 2, seed, (f"sampling.top_p={value}",))
                    for seed in runner.seeds
                ).values()
            ]
            for value in (1.0, 0.95)
        }
        own = [b - a for a, b in zip(*finals.values(), strict=True)]
        means = [statistics.fmean(each) for each in finals.values()]
        each = ", ".join(f"{value:+.3f}" for value in own)
        print(f"{name:14} {means[0]:>7.3f} {means[1]:>7.3f} {means[1] - means[0]:>+11.4f} {each:>24}")
        report[name] = {"whole": means[0], "top_p": means[1], "differences": own}
    return report


def gate(runner: Runner) -> dict[str, Any]:
    """The gate on divergence, at three times the rate and at a third of it; without it, the grid's runs."""
    bound = "queue.max_divergence=0.01"
    report: dict[str, Any] = {}
    print(f"\n{'gate':10} {'η = 0':>8} {'η ≤ 4':>8} {'with the gate':>14} {'mean η_eff':>11}")
    for name in ("3", "1/3"):
        cell, rate = f"sums × {name}", f"training.lr={TASKS['sums'].lr * RATES[name]}"
        kinds = {
            "sync": [Run("grid", cell, "sums", 0, seed, (rate,)) for seed in runner.seeds],
            "free": [Run("grid", cell, "sums", 4, seed, (rate,)) for seed in runner.seeds],
            "gated": [Run("gate", cell, "sums", 4, seed, (rate, bound)) for seed in runner.seeds],
        }
        found = {kind: [*runner.results(runs).values()] for kind, runs in kinds.items()}
        finals = {kind: statistics.fmean(each.final for each in results) for kind, results in found.items()}
        eta = statistics.fmean(each.eta for each in found["gated"])
        print(
            f"{name:10} {finals['sync']:>8.3f} {finals['free']:>8.3f} {finals['gated']:>14.3f} {eta:>11.2f}"
        )
        report[name] = {**finals, "eta_eff": eta}
    return report


def speed(runner: Runner) -> dict[str, Any]:
    """Seconds until the long-tailed task is solved as well as the synchronous run solves it in the end."""
    cells = [Run("speed", "chains", "chains", eta, seed) for seed in runner.seeds for eta in (0, 2)]
    found = runner.results(cells, jobs=1)
    ratios: list[float] = []
    print(f"\n{'speed':6} {'level':>6} {'η = 0':>8} {'η = 2':>8}")
    for sync, late in zip(cells[::2], cells[1::2], strict=True):
        a, b = found[sync], found[late]
        level = 0.95 * min(a.last, b.last)
        times = [_time_to(result, level) for result in (a, b)]
        ratios.append(times[1] / times[0])
        print(f"{sync.seed:<6} {level:>6.3f} {times[0]:>7.1f}s {times[1]:>7.1f}s")
    return {"ratio": statistics.median(ratios)}


LEARNING = {
    *("reward_collapse", "shortened_steps", "constant_reward", "masked_tokens", "gradient_spikes"),
    *("truncation", "entropy_collapse", "zero_variance_groups", "plateau"),
}
"""Rules whose advice is about learning."""


def collapse(runner: Runner) -> dict[str, Any]:
    """Does the advice name a learning rate that destroys the policy, and only that? 40 steps, three tasks
    with a first reward of at least 0.15."""
    tasks, steps = ("sums", "chains", "largest"), "steps=40"

    def run(task: str, rate: int, eta: int, seed: int, *more: str) -> Run:
        lr = f"training.lr={TASKS[task].lr * rate}"
        cell = " ".join([f"{task} × {rate}", *more])
        return Run("collapse", cell, task, eta, seed, (lr, steps, *more))

    high = [run(*each) for each in itertools.product(tasks, (15, 50), (0, 4), runner.seeds)]
    found = runner.results(high)
    fallen = [each for each in high if _has_fallen(found[each].rewards)]
    named = [each for each in fallen if _names_lr_alone(found[each])]
    stops = [
        run(each.task, int(each.cell.split()[-1]), each.staleness, each.seed, "on_collapse=stop")
        for each in fallen
    ]
    stopped = [each for each, result in runner.results(stops).items() if result.status == "failed"]
    usual = [
        run(task, rate, eta, seed)
        for task in tasks
        for rate, seeds in ((1, range(5)), (3, range(5, 10)))
        for seed in seeds
        for eta in (4 * (seed % 2),)
    ]
    results = runner.results(usual)
    risen = [each for each in usual if results[each].last > statistics.fmean(results[each].rewards[:3])]
    false = [each for each in risen if LEARNING & set(results[each].advice)]
    print(f"\n{'rate too high':24} {'first 3':>8} {'last 10':>8}  advice (step)")
    for each in [*high, *usual]:
        result = found.get(each) or results[each]
        told = ", ".join(f"{rule} ({at})" for rule, at in zip(result.advice, result.said, strict=True))
        mark = "!" if each in false or (each in fallen and each not in named) else ""
        print(
            f"{each.cell:14} η {each.staleness} {each.seed:3} {statistics.fmean(result.rewards[:3]):>8.3f} "
            f"{result.last:>8.3f}{mark:1} {told}"
        )
    return {
        "high": len(high),
        "fallen": len(fallen),
        "named": len(named),
        "stopped": len(stopped),
        "usual": len(usual),
        "risen": len(risen),
        "false_advice": len(false),
    }


def _has_fallen(rewards: Sequence[float]) -> bool:
    """Whether the last ten steps are below the first three by 3 standard errors. The variance of a step is
    half of the mean squared difference between successive steps."""
    error = math.sqrt(statistics.fmean((b - a) ** 2 for a, b in itertools.pairwise(rewards[:10])) / 2 / 3)
    last = rewards[-WINDOW:]
    error = math.hypot(error, statistics.stdev(last) / math.sqrt(len(last)))
    return statistics.fmean(rewards[:3]) - statistics.fmean(last) > 3 * error


def _names_lr_alone(result: Result) -> bool:
    """Whether advice before step 30 names `training.lr`, and no advice about learning does not."""
    about = [
        (at, names)
        for rule, at, names in zip(result.advice, result.said, result.names_lr, strict=True)
        if rule in LEARNING
    ]
    return any(at < 30 and names for at, names in about) and all(names for _, names in about)


STAGES = {
    "screening": screening,
    "grid": grid,
    "drawn": drawn,
    "step_scale": step_scale,
    "top_p": top_p,
    "gate": gate,
    "speed": speed,
    "collapse": collapse,
}


def _time_to(result: Result, level: float) -> float:
    """Seconds from the first step's end until the mean reward of `WINDOW` steps reaches a level."""
    for step in range(WINDOW, len(result.rewards) + 1):
        if statistics.fmean(result.rewards[step - WINDOW : step]) >= level:
            return result.times_s[step - 1] - result.times_s[0]
    raise ValueError(f"the run never reaches {level}")


# ------------------------------------------------------------------------------------- comparing


@dataclass(frozen=True)
class Cell:
    """The common settings of the runs of a cell."""

    task: str
    options: tuple[str, ...]
    layers: int = 3


def compare(runner: Runner, stage: str, cells: dict[str, Cell]) -> dict[str, Any]:
    """Compare the final accuracy with every bound to that of η = 0 with the same seed.

    A cell with a suspicious mean gets more seeds. The cells in which η = 0 improves are pooled.
    """

    def runs(name: str, eta: int, seeds: Iterable[int]) -> list[Run]:
        cell = cells[name]
        return [Run(stage, name, cell.task, eta, seed, cell.options, cell.layers) for seed in seeds]

    seeds = {(name, eta): [*runner.seeds] for name in cells for eta in runner.staleness}
    found = runner.results(run for (name, eta), few in seeds.items() for run in runs(name, eta, few))

    def difference(name: str, eta: int, some: Iterable[int]) -> float:
        pairs = zip(runs(name, eta, some), runs(name, 0, some), strict=True)
        return statistics.fmean(found[late].final - found[sync].final for late, sync in pairs)

    bounded = [eta for eta in runner.staleness if 0 < eta <= 4]
    suspicious = [
        (name, eta) for name in cells for eta in bounded if difference(name, eta, runner.seeds) < -0.08
    ]
    for name, eta in suspicious:
        seeds[name, eta] += MORE_SEEDS
    found |= runner.results(run for name, eta in suspicious for run in runs(name, eta, MORE_SEEDS))
    found |= runner.results(run for name in dict(suspicious) for run in runs(name, 0, MORE_SEEDS))

    report: dict[str, dict[str, Any]] = {}
    print(
        f"\n{stage:18} {'first':>6} {'η = 0':>6} "
        + " ".join(f"{f'η = {eta}':>9}" for eta in runner.staleness[1:])
    )
    for name in cells:
        sync = [found[run] for run in runs(name, 0, runner.seeds)]
        first, final = (statistics.fmean(getattr(each, end) for each in sync) for end in ("first", "final"))
        row = {eta: difference(name, eta, seeds[name, eta]) for eta in runner.staleness[1:]}
        collapsed = {
            eta: sum(found[run].collapsed for run in runs(name, eta, seeds[name, eta]))
            for eta in runner.staleness
        }
        report[name] = {"first": first, "final": final, "difference": row, "collapsed": collapsed}
        shown = [f"{row[eta]:+.3f}" + ("!" if collapsed[eta] else " ") for eta in row]
        print(f"{name:18} {first:>6.3f} {final:>6.3f} " + " ".join(f"{text:>9}" for text in shown))

    # The runs of a cell and a seed are compared with one synchronous run: they are one observation.
    improving = [name for name, row in report.items() if row["final"] - row["first"] > 0.05]
    observations = [
        statistics.fmean(difference(name, eta, [seed]) for eta in bounded)
        for name in improving
        for seed in runner.seeds
    ]
    mean, low = _lower_bound(observations)
    print(f"η ≤ 4, {len(observations)} groups: mean {mean:+.4f}, lower 95 % bound {low:+.4f}")
    return {
        "mean": mean,
        "lower_95": low,
        "worst_cell": min(row["difference"][eta] for row in report.values() for eta in bounded),
        "collapsed_at_8": sum(row["collapsed"][8] for row in report.values()),
        "cells": report,
    }


def _lower_bound(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean, and the lower end of its 95 % interval by the bootstrap."""
    drawn = np.random.default_rng(0).choice(values, (10_000, len(values))).mean(1)
    return statistics.fmean(values), float(np.percentile(drawn, 2.5))


def heat_map(cells: dict[str, dict[str, Any]]) -> str:
    """Draw an SVG: rows are cells, columns are bounds, colours are the difference to η = 0."""
    width, height, left = 84, 28, 150
    columns = list(next(iter(cells.values()))["difference"])
    across, down = left + width * len(columns) + 8, height * (len(cells) + 1) + 8
    style = 'font-family="sans-serif" font-size="13"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{across}" height="{down}" {style}>']
    parts.append('<rect width="100%" height="100%" fill="white"/>')

    def text(x: float, y: float, words: str, anchor: str = "middle") -> None:
        parts.append(f'<text x="{x}" y="{y + height * 0.65}" text-anchor="{anchor}">{words}</text>')

    for place, eta in enumerate(columns):
        text(left + width * (place + 0.5), 0, f"η = {eta}")
    for line, (name, row) in enumerate(cells.items(), 1):
        text(4, height * line, name, "start")
        for place, eta in enumerate(columns):
            difference = row["difference"][eta]
            fade = round(255 * (1 - 0.6 * min(1.0, abs(difference) / 0.1)))
            colour = f"rgb(255,{fade},{fade})" if difference < 0 else f"rgb({fade},{fade},255)"
            x, size = left + width * place, f'width="{width - 2}" height="{height - 2}"'
            parts.append(f'<rect x="{x}" y="{height * line}" {size} fill="{colour}"/>')
            text(x + width / 2, height * line, f"{difference:+.3f}")
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description="Does asynchrony cost learning?")
    parser.add_argument("stages", nargs="*", choices=[*STAGES, []], help="default: all")
    parser.add_argument("--quick", action="store_true", help="a few short runs, to see that it works")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time")
    args = parser.parse_args()
    runner = Runner(args.jobs, quick=args.quick)
    found = {name: STAGES[name](runner) for name in args.stages or STAGES}
    for report in found.values():
        report.pop("cells", None)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
