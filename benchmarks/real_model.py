"""What a step of a pretrained model costs, against TRL's GRPOTrainer: processor time, memory, seconds.

    python benchmarks/real_model.py --trl VENV/bin/python --model MODEL [--rounds 3] [--steps 8]

VENV has trl 1.16 and torch for CPUs; MODEL is a model's folder or a hub id, such as
HuggingFaceTB/SmolLM2-135M-Instruct. Both sides train all its weights on short reviews, with 8 prompts of 8
samples a step, at most 12 tokens each, AdamW, in float32 and in bfloat16. They take turns, each alone. The
processor time and the memory (PSS, so that shared pages count once) are those of all processes of a side. The
first two steps do not count. stretto has its defaults, so its samples may be two steps old. The last line is
one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

from stretto.records.metrics import MetricsReader

HERE = Path(__file__).parent
PROMPTS, GROUP, TOKENS, LR = 8, 8, 12, 1e-5
FIRST = 2
"""Steps that do not count."""
EVERY_S = 0.25
DTYPES = ("float32", "bfloat16")


class Cost(NamedTuple):
    """One run of one side."""

    processor_s: float
    """Of a step."""
    step_s: float
    gib: float
    """The most memory at one time."""


def rows(file: Path, count: int = 160) -> None:
    """Write reviews that are positive or negative."""
    things = ["film", "book", "hotel", "phone", "song", "game", "pizza", "museum", "chair", "lamp"]
    words = {"positive": ["great", "lovely", "superb"], "negative": ["awful", "boring", "poor"]}
    forms = ["The {} was {}.", "My sister says that the {} is {}.", "I found the {} {}, as did my friends."]
    kinds = itertools.product(things, forms, [(word, kind) for kind in words for word in words[kind]])
    ask = "Is this review positive or negative? Answer with one word.\nReview: "
    texts = [(ask + form.format(thing, word) + "\nAnswer:", kind) for thing, form, (word, kind) in kinds]
    order = np.random.default_rng(1).permutation(len(texts))[:count]
    lines = [json.dumps({"prompt": texts[i][0], "answer": texts[i][1]}) for i in order]
    file.write_text("\n".join(lines) + "\n")


def measured(command: Sequence[str], ends: Callable[[], Sequence[float]]) -> Cost:
    """Run a command, and return what its steps cost. `ends`: the times at which they ended."""
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=quiet, stderr=quiet, env=environment)
    points: list[tuple[float, float, float]] = []
    spent: dict[int, float] = {}

    def watch() -> None:
        while process.poll() is None:
            memory = 0.0
            for each in _tree(process.pid):
                with suppress(psutil.Error):  # it has ended
                    times = each.cpu_times()
                    spent[each.pid] = times.user + times.system
                    memory += each.memory_full_info().pss
            points.append((time.time(), sum(spent.values()), memory / 2**30))
            time.sleep(EVERY_S)

    watcher = threading.Thread(target=watch)
    watcher.start()
    if process.wait():
        raise SystemExit(f"{command[0]} failed with status {process.returncode}")
    watcher.join()
    ended = ends()
    times, processor, memory = (np.array(column) for column in zip(*points, strict=True))
    steps = len(ended) - FIRST
    first, last = np.interp([ended[FIRST - 1], ended[-1]], times, processor)
    return Cost(float(last - first) / steps, (ended[-1] - ended[FIRST - 1]) / steps, float(memory.max()))


def _tree(pid: int) -> list[psutil.Process]:
    """Return a process and all that it started; none if it has ended."""
    with suppress(psutil.Error):
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    return []


def stretto(model: str, file: Path, folder: Path, dtype: str, steps: int) -> Cost:
    """Run stretto's side."""
    out = folder / "run"
    values = [
        *("name=real", f"model={model}", f"out={out}", f"steps={steps}", "reward=exact"),
        *("dataset.use=jsonl", f"dataset.path={file}", f"algorithm={{use: grpo, group_size: {GROUP}}}"),
        *(f"training.lr={LR}", f"training.dtype={dtype}", f"inference.dtype={dtype}"),
        *(f"queue.batch_size={PROMPTS}", f"sampling.max_tokens={TOKENS}", "inference.context_length=160"),
        "checkpoint.every=0",
    ]
    run_file = folder / "run.yaml"
    run_file.write_text("{}\n")

    def ends() -> list[float]:
        reader = MetricsReader(out)
        reader.read()
        return [line["time"] for line in reader.steps]

    return measured([sys.executable, "-m", "stretto", "run", str(run_file), *values], ends)


def trl(python: str, model: str, file: Path, folder: Path, dtype: str, steps: int) -> Cost:
    """Run TRL's side."""
    settings = {
        "model": model,
        "rows": str(file),
        "out": str(folder),
        "seed": 1,
        "dtype": dtype,
        "lr": LR,
        "threads": len(os.sched_getaffinity(0)),
        "steps": steps,
        "save_every": steps + 1,
        "passes": 1,
        "prompts": PROMPTS,
        "group_size": GROUP,
        "max_tokens": TOKENS,
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    command = [python, str(HERE / "trl_side.py"), str(folder / "settings.json")]
    return measured(command, lambda: json.loads((folder / "times.json").read_text())["ended"])


def figures(costs: Mapping[tuple[str, str], Sequence[Cost]], dtype: str) -> dict[str, dict[str, float]]:
    """Return, for each figure, the medians of both sides, and TRL's over stretto's."""
    result: dict[str, dict[str, float]] = {}
    for name in Cost._fields:
        sides = ("trl", "stretto")
        trl, own = (statistics.median(getattr(each, name) for each in costs[dtype, side]) for side in sides)
        result[name] = {"trl": round(trl, 2), "stretto": round(own, 2), "ratio": round(trl / own, 2)}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="What a step of a pretrained model costs, against TRL.")
    parser.add_argument("--trl", required=True, metavar="PYTHON")
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    costs: dict[tuple[str, str], list[Cost]] = defaultdict(list)
    print(f"{'dtype':>9} {'side':>8} {'processor s':>12} {'s/step':>7} {'GiB':>6}")
    for number, dtype in itertools.product(range(options.rounds), DTYPES):
        for side in ("stretto", "trl") if number % 2 == 0 else ("trl", "stretto"):
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                rows(folder / "rows.jsonl")
                given = options.model, folder / "rows.jsonl", folder, dtype, options.steps
                cost = stretto(*given) if side == "stretto" else trl(options.trl, *given)
            costs[dtype, side].append(cost)
            shown = f"{cost.processor_s:>12.2f} {cost.step_s:>7.2f} {cost.gib:>6.2f}"
            print(f"{dtype:>9} {side:>8} {shown}", flush=True)
    print(json.dumps({dtype: figures(costs, dtype) for dtype in DTYPES}))


if __name__ == "__main__":
    main()
