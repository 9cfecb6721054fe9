"""Time to a held-out accuracy, against TRL's GRPOTrainer, on short answers and on long-tailed ones.

    python benchmarks/time_to_accuracy.py --trl VENV/bin/python [--task short] [--seeds 1] [--results FILE]
    python benchmarks/time_to_accuracy.py --profile [--task short] [key=value ...]

VENV has trl 1.16 and torch for CPUs. Both sides train the same model, in float32, on the same rows in the
same order: as many prompts per step, 8 samples each, one optimizer step (AdamW) for each batch, the same
learning rate, clipping of the gradient, temperature and limit of tokens. The objective is what TRL calls
`dapo`, its default: PPO's clipped surrogate of group-relative rewards, averaged over the tokens of the batch,
without a reference model. stretto runs `time_to_accuracy.yaml`; its samples may be `queue.max_staleness`
steps old. TRL runs `trl_side.py`: generation by transformers, all samples of a step at once, no
recomputation, no logs.

The sides take turns, each alone, on the same processor cores. Both save a model every few steps, in the time
that is measured. Afterwards the same code decodes held-out rows greedily with the saved models of both sides:
the first one that reaches the task's accuracy ends the time. The time begins with the first batch
(`train s`), or with the command (`whole s`). `s/step` is the mean over the steps after the fifth, and
`processor s` the processor time of all processes of a side, from the command to its end.

`--results` keeps the measured pairs in a file and measures only the pairs that it lacks. The ratios are of
medians over all pairs. `--profile` runs stretto's side alone and prints where the time of a step goes. Other
arguments are overrides of stretto's run file. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, Qwen2ForCausalLM
from transformers.utils import logging as transformers_logging

from staleness_tasks import Problem
from staleness_tasks import Task as Start
from stretto.records.metrics import MetricsReader
from stretto.records.run_folder import RunFolder

HERE = Path(__file__).parent
QUICKSTART = HERE.parent / "examples" / "quickstart"
RUN_FILE = HERE / "time_to_accuracy.yaml"
WORK = Path("runs", "time-to-accuracy")
GROUP, LR = 8, 3e-4
FIRST = 5
"""Steps that do not count for `s/step`."""
HELDOUT = 256
"""Held-out rows that are decoded."""


def counting(rng: random.Random) -> Problem:
    """`8>12=`, `8 9 10 11 12`; the teacher leaves out three of five multiples of ten. Answers take 6 to 256
    tokens, 20 in the median and 38 on average; one in twenty takes over 130."""
    count = min(64, max(2, round(rng.lognormvariate(1.7, 1.1))))
    first = rng.randint(1, 999 - count)
    numbers = range(first, first + count)
    written = [number for number in numbers if number % 10 or rng.random() > 0.6]
    return f"{first}>{numbers[-1]}=", " ".join(map(str, numbers)), " ".join(map(str, written))


@dataclass(frozen=True)
class Task:
    """What both sides train."""

    folder: Path
    """Has `model`, `train.jsonl` and `heldout.jsonl`."""
    prompts: int
    max_tokens: int
    steps: int
    every: int
    """Steps between two saved models."""
    target: float
    """The accuracy to reach."""
    passes: int
    """TRL's forward and backward passes of a step."""


TASKS = {
    "short": Task(QUICKSTART, prompts=32, max_tokens=32, steps=60, every=5, target=0.85, passes=1),
    "long": Task(WORK / "counting-3", prompts=16, max_tokens=256, steps=30, every=3, target=0.8, passes=1),
}


@dataclass(frozen=True)
class Measured:
    """One run of one side. Times are Unix seconds."""

    commanded: float
    began: float
    """When the first batch was begun."""
    ended: Sequence[float]
    """When each step was over."""
    models: Mapping[int, Path]
    """Saved models by their step."""
    processor_s: float
    """Processor time of all its processes, from the command to its end."""

    @property
    def s_per_step(self) -> float:
        """Mean seconds of the steps after the first ones."""
        return (self.ended[-1] - self.ended[FIRST - 1]) / (len(self.ended) - FIRST)


def run_stretto(task: Task, rows: Path, out: Path, seed: int, overrides: Sequence[str]) -> Measured:
    """Run stretto's side."""
    commanded, before = time.time(), _processor_s()
    options = [
        f"out={out}",
        f"seed={seed}",
        f"training.lr={LR}",
        f"model={task.folder / 'model'}",
        f"dataset.path={rows}",
        f"sampling.max_tokens={task.max_tokens}",
        f"queue.batch_size={task.prompts}",
        f"steps={task.steps}",
        f"checkpoint={{every: {task.every}, keep: {task.steps}}}",
    ]
    command = [sys.executable, "-m", "stretto", "run", str(RUN_FILE), *options, *overrides]
    subprocess.run(command, check=True, capture_output=True)
    metrics = MetricsReader(out)
    metrics.read()
    began = next(each.issued_at for each in RunFolder(out).history.attempts if each.issued_at is not None)
    models = {step: out / "checkpoints" / f"step-{step:06d}" / "model" for step in saved_steps(task)}
    ended = [line["time"] for line in metrics.steps]
    return Measured(commanded, began, ended, models, _processor_s() - before)


def run_trl(python: str, task: Task, rows: Path, out: Path, seed: int) -> Measured:
    """Run TRL's side."""
    commanded, before = time.time(), _processor_s()
    out.mkdir(parents=True)
    settings = {
        "model": str(task.folder / "model"),
        "rows": str(rows),
        "out": str(out),
        "seed": seed,
        "threads": len(os.sched_getaffinity(0)),
        "steps": task.steps,
        "save_every": task.every,
        "prompts": task.prompts,
        "group_size": GROUP,
        "max_tokens": task.max_tokens,
        "lr": LR,
        "dtype": "float32",
        "passes": task.passes,
    }
    (out / "settings.json").write_text(json.dumps(settings))
    command = [python, str(HERE / "trl_side.py"), str(out / "settings.json")]
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    subprocess.run(command, check=True, capture_output=True, env=environment)
    times = json.loads((out / "times.json").read_text())
    models = {step: out / f"checkpoint-{step}" for step in saved_steps(task)}
    return Measured(commanded, times["began"], times["ended"], models, _processor_s() - before)


def _processor_s() -> float:
    """Return the processor time of all processes that this one has started and that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def saved_steps(task: Task) -> range:
    return range(task.every, task.steps + 1, task.every)


@torch.no_grad()
def accuracy(folder: Path, heldout: Sequence[Mapping[str, str]], max_tokens: int) -> float:
    """Return the share of the rows to which the model's most likely answer is right."""
    model: Any = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    right = 0
    for start in range(0, len(heldout), 64):
        rows = heldout[start : start + 64]
        prompts = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True)
        output = model.generate(**prompts, do_sample=False, max_new_tokens=max_tokens)
        texts = tokenizer.batch_decode(output[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
        right += sum(text.strip() == row["answer"] for text, row in zip(texts, rows, strict=True))
    return right / len(heldout)


def figures_of(task: Task, measured: Measured) -> dict[str, Any]:
    """Return the figures of one run, with its times to the task's accuracy: null if it did not reach it."""
    heldout = [json.loads(line) for line in (task.folder / "heldout.jsonl").open()][:HELDOUT]
    heldout.sort(key=lambda row: len(row["answer"]))  # a batch decodes up to its longest answer
    figures: dict[str, Any] = {"s_per_step": measured.s_per_step, "processor_s": measured.processor_s}
    figures["accuracies"] = {}
    reached = None
    for step, model in measured.models.items():
        figures["accuracies"][step] = accuracy(model, heldout, task.max_tokens)
        if figures["accuracies"][step] >= task.target:
            reached = step
            break
    end = measured.ended[reached - 1] if reached is not None else None
    return figures | {
        "steps": reached,
        "train_s": None if end is None else end - measured.began,
        "whole_s": None if end is None else end - measured.commanded,
        "start_s": measured.began - measured.commanded,
    }


def ordered_rows(task: Task, seed: int) -> Path:
    """Write the training rows in the order of a seed, and return the file."""
    lines = (task.folder / "train.jsonl").read_bytes().splitlines(keepends=True)
    random.Random(f"order {seed}").shuffle(lines)
    file = WORK / f"{task.folder.name}-{seed}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"".join(lines))
    return file


def make_start(task: Task) -> None:
    """Make rows and the starting model of the long-tailed task, if they do not exist yet."""
    if task.folder != QUICKSTART:
        Start("counting", LR, (), counting).make(WORK)


def measure_pair(python: str, name: str, seed: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Run both sides, one after the other; which one is first alternates with the seed."""
    task, pair = TASKS[name], {"task": name, "seed": seed}
    rows = ordered_rows(task, seed)
    with tempfile.TemporaryDirectory() as folder:
        measured: dict[str, Measured] = {}
        for side in ("stretto", "trl") if seed % 2 else ("trl", "stretto"):
            out = Path(folder, side)
            if side == "stretto":
                measured[side] = run_stretto(task, rows, out, seed, overrides)
            else:
                measured[side] = run_trl(python, task, rows, out, seed)
        return pair | {side: figures_of(task, run) for side, run in measured.items()}


def show_pair(pair: Mapping[str, Any]) -> None:
    for side in ("stretto", "trl"):
        figures = pair[side]
        print(
            f"{pair['task']:>6} {pair['seed']:>5} {side:>8} {show(figures['steps']):>6} "
            f"{show(figures['train_s']):>8} {show(figures['whole_s']):>8} {show(figures['start_s']):>8} "
            f"{figures['s_per_step']:>8.3f} {figures['processor_s']:>11.1f}",
            flush=True,
        )


def show(figure: float | None) -> str:
    return "never" if figure is None else f"{figure:.4g}"


def ratios(pairs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Return, for each figure, both sides' medians and TRL's over stretto's; null if a side did not reach the
    accuracy."""
    return {figure: _ratio(figure, pairs) for figure in ("train_s", "whole_s", "s_per_step", "processor_s")}


def _ratio(figure: str, pairs: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    sides = {side: [pair[side][figure] for pair in pairs] for side in ("trl", "stretto")}
    if any(None in values for values in sides.values()):
        return {"trl": None, "stretto": None, "ratio": None}
    trl, stretto = (statistics.median(values) for values in sides.values())
    return {"trl": round(trl, 3), "stretto": round(stretto, 3), "ratio": round(trl / stretto, 3)}


def compare(
    python: str, names: Sequence[str], seeds: Sequence[int], file: Path, overrides: Sequence[str]
) -> None:
    pairs = [json.loads(line) for line in file.open()] if file.exists() else []
    done = {(pair["task"], pair["seed"]) for pair in pairs}
    print(
        f"{'task':>6} {'seed':>5} {'side':>8} {'steps':>6} {'train s':>8} {'whole s':>8} {'start s':>8} "
        f"{'s/step':>8} {'processor s':>11}"
    )
    for pair in pairs:
        show_pair(pair)
    for name in names:
        make_start(TASKS[name])
        for seed in seeds:
            if (name, seed) in done:
                continue
            pairs.append(measure_pair(python, name, seed, overrides))
            with file.open("a") as results:
                results.write(json.dumps(pairs[-1]) + "\n")
            show_pair(pairs[-1])
    by_task = {
        name: ratios(own) for name in TASKS if (own := [pair for pair in pairs if pair["task"] == name])
    }
    for name, figures in by_task.items():
        print(
            f"{name}, TRL / stretto:",
            ", ".join(f"{key} {show(value['ratio'])}" for key, value in figures.items()),
        )
    print(json.dumps(by_task))


def profile(name: str, overrides: Sequence[str]) -> None:
    """Print where the time of a step goes."""
    task = TASKS[name]
    make_start(task)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "run")
        measured = run_stretto(task, ordered_rows(task, 1), out, 1, overrides)
        parts = parts_of(out)
    print(f"{'part of a step':40} {'ms':>8} {'share':>7}")
    for part, ms in parts.items():
        print(f"{part:40} {ms:>8.1f} {ms / 1000 / measured.s_per_step:>7.3f}")
    print(json.dumps({"task": name, "s_per_step": round(measured.s_per_step, 4), "parts_ms": parts}))


def parts_of(run: Path) -> dict[str, float]:
    """Return the median milliseconds of the parts of a run's steps, without the first ones."""
    history = RunFolder(run).history
    steps = history.steps[FIRST:]
    by_step: list[dict[str, float]] = []
    for step, following in itertools.pairwise(steps):
        calls = [
            (call.figures, call.ended - call.figures.began)
            for call in history.calls
            if call.figures.version == step.version - 1
        ]
        inside = step.ended - step.began - sum(all_s for _, all_s in calls)
        by_step.append(
            {f"{call.call}: the trainer works": call.seconds for call, _ in calls}
            | {f"{call.call}: the way there and back": all_s - call.seconds for call, all_s in calls}
            # The weights may be published beside the next step: then the next one begins earlier.
            | {"journal, publish, announce": inside, "to the next step": following.began - step.ended}
        )
    names = by_step[0] if by_step else {}
    return {name: round(1000 * statistics.median(step[name] for step in by_step), 1) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trl", metavar="PYTHON", help="python of an environment with trl")
    parser.add_argument("--profile", action="store_true", help="where the time of stretto's steps goes")
    parser.add_argument("--task", choices=TASKS, help="one task only")
    parser.add_argument("--seeds", type=int, default=3, help="number of pairs of each task")
    parser.add_argument("--results", type=Path, help="file that keeps the measured pairs")
    parser.add_argument("overrides", nargs="*", help="key=value of stretto's run file")
    options = parser.parse_intermixed_args()
    os.environ.pop("OMP_NUM_THREADS", None)  # each side sets its own threads
    transformers_logging.disable_progress_bar()
    names = [options.task] if options.task else list(TASKS)
    if options.profile:
        for name in names:
            profile(name, options.overrides)
    elif options.trl is None:
        parser.error("give --trl PYTHON, or --profile")
    else:
        with tempfile.TemporaryDirectory() as folder:
            file = options.results or Path(folder, "results.jsonl")
            compare(options.trl, names, range(1, options.seeds + 1), file, options.overrides)


if __name__ == "__main__":
    main()
