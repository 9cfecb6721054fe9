"""Kept samples: how long it takes to find some of a million, how large they are, and what keeping them costs.

    python benchmarks/samples.py find [SAMPLES]     # default 1,000,000
    python benchmarks/samples.py cost [PAIRS]       # default 3

`find` writes samples of about 100 tokens through the sample writer's own code: groups of 8, answers with
long-tailed lengths, words as text, and the trainer's record of each. Then it times the command `stretto
samples` as a user calls it, one process for each question.

`cost` runs `benchmarks/rollout.py`'s run file in pairs, one run that keeps all samples and one that keeps
none, and compares tokens per second and processor seconds of all processes. The last line is one JSON object.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa

from rollout import run_file
from stretto.array import Array
from stretto.bus.messages.tickets import (
    GroupDone,
    KeptText,
    TicketRecord,
    TrainedRow,
    TrainedRows,
    TrajectoryBundle,
    WireTrajectory,
)
from stretto.records.samples.files import Table
from stretto.records.samples.join import Joiner
from stretto.records.samples.kept_sample import digest_of, kept_samples
from stretto.records.samples.segments import FLUSHES, SegmentWriter

GROUP, GROUPS_A_BATCH, PROMPT_TOKENS, MEAN_TOKENS = 8, 512, 32, 64
WORDS = 20_000


def words(rng: np.random.Generator) -> list[str]:
    letters = np.array(list("etaoinshrdlucmwfgypbvk"))
    return ["".join(rng.choice(letters, rng.integers(2, 8))) for _ in range(WORDS)]


def group(ticket: int, rng: np.random.Generator, vocabulary: list[str]) -> tuple[Any, ...]:
    """The messages of one group: trajectories, record, outcome, and the trainer's record."""
    wires: list[WireTrajectory] = []
    texts: list[KeptText] = []
    trained: list[TrainedRow] = []
    answer = prompt = np.minimum(rng.zipf(1.3, PROMPT_TOKENS), WORDS) - 1
    for index in range(GROUP):
        length = int(np.clip(rng.lognormal(np.log(MEAN_TOKENS) - 0.18, 0.6), 1, 4096))
        answer = np.minimum(rng.zipf(1.3, length), WORDS) - 1
        mask = np.arange(PROMPT_TOKENS + length) >= PROMPT_TOKENS
        logprobs = np.where(mask, -rng.exponential(0.6, len(mask)), 0.0)
        wires.append(
            WireTrajectory(
                id=f"{ticket}/1/{index}",
                tokens=Array.of(np.concatenate([prompt, answer]), np.int32),
                loss_mask=Array.of(mask, np.bool_),
                logprobs=Array.of(logprobs, np.float32),
                versions=Array.of(np.where(mask, ticket // GROUPS_A_BATCH, -1), np.int32),
                reward=float(rng.random() < 0.4),
                metrics={"accuracy": 1.0},
                finish="stop",
                engine=f"inference-{index % 2}",
                sample=index,
            )
        )
        texts.append(KeptText(None, " ".join(vocabulary[token] for token in answer)))
        weights = np.exp(rng.normal(0, 0.02, length))
        trained.append(
            TrainedRow(
                f"{ticket}/1/{index}", Array.of([rng.normal()], np.float32), Array.of(weights, np.float16)
            )
        )
    question = " ".join(vocabulary[token] for token in prompt)
    row = json.dumps({"prompt": question, "answer": vocabulary[int(answer[-1])]})
    record = TicketRecord("train", ticket, 1, ticket, "rollout-0", row, question, tuple(texts), 1.0, 0.9, 0.1)
    outcome = GroupDone(
        "train", ticket, 1, "rollout-0", (), 1.0, record=1, digest=digest_of(kept_samples(record, wires))
    )
    step = TrainedRows(0, ticket // GROUPS_A_BATCH + 1, tuple(trained))
    return TrajectoryBundle(ticket, 1, ticket, tuple(wires)), record, outcome, step


def batch(rng: np.random.Generator, vocabulary: list[str]) -> Table:
    """The rows of `GROUPS_A_BATCH` groups."""
    joiner = Joiner(1, staleness=1)
    messages = (each for ticket in range(GROUPS_A_BATCH) for each in group(ticket, rng, vocabulary))
    for sequence, message in enumerate(messages, 1):
        joiner.add(sequence, message)
    return joiner.pop_rows()["train"]


def moved(table: Table, number: int) -> Table:
    """The rows of a batch under the names of a later one."""
    first = number * GROUPS_A_BATCH
    by_number = dict.fromkeys(("step", "oldest", "newest"), number)
    for name, by in {"ticket": first, "sequence": 4 * first, "row": first, **by_number}.items():
        column = pa.array(np.asarray(table[name]) + by, table.schema.field(name).type)
        table = table.set_column(table.schema.get_field_index(name), table.schema.field(name), column)
    indices = np.arange(len(table)) % GROUP
    ids = [f"{ticket}/1/{index}" for ticket, index in zip(table["ticket"].to_pylist(), indices, strict=True)]
    return table.set_column(0, table.schema.field("id"), pa.array(ids))


def make(run: Path, samples: int) -> dict[str, float]:
    """Write that many samples, and return what they take."""
    rng = np.random.default_rng(1)
    vocabulary = words(rng)
    segments = SegmentWriter(run / "samples")
    bases = [batch(rng, vocabulary) for _ in range(8)]
    batches = max(1, round(samples / (GROUPS_A_BATCH * GROUP)))
    tokens = 0
    for number in range(batches):
        base = bases[number % len(bases)]
        segments.write("train", moved(base, number))
        segments.close("train", FLUSHES)
        tokens += int(np.asarray(base["length"]).sum())
    files = list((run / "samples").iterdir())
    size = sum(path.stat().st_size for path in files)
    return {
        "samples": batches * GROUPS_A_BATCH * GROUP,
        "tokens": tokens,
        "files": len(files),
        "gb": round(size / 1e9, 3),
        "of_raw_ids_and_logprobs": round(size / (8 * tokens), 3),
    }


def timed(run: Path, *options: str) -> float:
    """Seconds of one `stretto samples`, from its start to its end."""
    command = [sys.executable, "-m", "stretto", "samples", str(run), "--format", "jsonl", *options]
    began = time.monotonic()
    found = subprocess.run(command, capture_output=True, check=True)
    assert found.stdout, options
    return round(time.monotonic() - began, 2)


def find(samples: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        sizes = make(run, samples)
        middle = int(sizes["samples"]) // GROUP // 2
        questions = {
            "ticket_s": ("--ticket", str(middle)),
            "reward_and_length_s": ("--reward", "1", "--length", "200:", "--order", "-length"),
            "step_and_staleness_s": ("--step", "50:60", "--staleness", "1"),
            "rare_text_s": ("--text", "thistexttherebyneverappears"),
            "text_s": ("--text", "the", "--reward", "1", "--order", "-reward"),
        }
        times: dict[str, Any] = {}
        for name, options in questions.items():
            if name == "rare_text_s":  # it reads everything, and finds nothing
                command = [sys.executable, "-m", "stretto", "samples", str(run), *options]
                began = time.monotonic()
                subprocess.run(command, capture_output=True, check=True)
                times[name] = round(time.monotonic() - began, 2)
            else:
                times[name] = timed(run, *options)
    return {**sizes, **times}


def measured(folder: Path, keep: str) -> tuple[float, float]:
    """Run the run file, and return tokens per second of its steady part, and processor seconds of all."""
    out = folder / f"out-{time.monotonic_ns()}"
    command = [sys.executable, "-m", "stretto", "run", str(folder / "run.yaml")]
    before = os.times()
    subprocess.run(
        [*command, f"out={out}", f"samples.keep={keep}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    after = os.times()
    processor_s = after.children_user + after.children_system - before.children_user - before.children_system
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_bytes().splitlines()]
    steady = [line for line in lines if "ledger" in line][2:]
    speed = sum(line["step_tokens_per_s"] * line["step_s"] for line in steady) / sum(
        line["step_s"] for line in steady
    )
    return speed, processor_s


def cost(pairs: int) -> dict[str, Any]:
    speeds: dict[str, list[float]] = {"all": [], "none": []}
    processor: dict[str, list[float]] = {"all": [], "none": []}
    with tempfile.TemporaryDirectory() as folder:
        run_file(Path(folder))
        for pair in range(pairs):
            for keep in ("all", "none") if pair % 2 else ("none", "all"):
                speed, seconds = measured(Path(folder), keep)
                speeds[keep].append(speed)
                processor[keep].append(seconds)
    ratios = [one / other for one, other in zip(speeds["all"], speeds["none"], strict=True)]
    return {
        "tokens_per_s": {keep: [round(each) for each in values] for keep, values in speeds.items()},
        "processor_s": {keep: [round(each, 1) for each in values] for keep, values in processor.items()},
        "speed_ratio": round(median(ratios), 4),
    }


if __name__ == "__main__":
    what, number = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0
    result = find(number or 1_000_000) if what == "find" else cost(number or 3)
    for name, value in result.items():
        print(f"{name:>24}  {value}")
    print(json.dumps(result))
