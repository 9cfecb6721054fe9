"""Gradients that two ranks exchange whole, in bfloat16 or by PowerSGD: what is sent, and what is learned.

    python benchmarks/compression.py

The quickstart's model begins at random and learns its task from correct answers, supervised, in two ranks of
`fsdp2` with `shard: false`, one thread each. All sides of a seed have the same first weights and batches. The
table has, for each side, the bytes that a rank sends in a compressed step, and the loss on held-out rows at
the end, in nats per token, for each seed. The last line is one JSON object: for each side the bytes, and the
mean loss less that of whole gradients.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from stretto import Context
from stretto.algorithm import Loss
from stretto.rl.batch import Batch
from stretto.training.engine import HFTraining
from stretto.user_code.importable import load_module
from stretto_fsdp2 import Fsdp2TrainingConfig
from stretto_fsdp2.sharded import ShardedLayout

QUICKSTART = Path(__file__).parent.parent / "examples" / "quickstart"
SIDES: dict[str, dict[str, Any]] = {
    "whole": {},
    "bfloat16": {"reduce_dtype": "bfloat16"},
    "power_sgd rank 1": {"power_sgd": {"rank": 1}},
    "power_sgd rank 4": {"power_sgd": {"rank": 4}},
    "power_sgd rank 8": {"power_sgd": {"rank": 8}},
}
SEEDS, STEPS, ROWS, HELD_OUT, RANKS = (0, 1, 2), 600, 64, 512, 2


def rows_of(seed: int, count: int) -> list[tuple[str, str]]:
    """Draw prompts and their correct answers."""
    task, rng = load_module(str(QUICKSTART / "make_model.py")), random.Random(seed)
    drawn = [task.draw_terms(rng) for _ in range(count)]
    return [(task.prompt_of(terms), task.answer_of(terms)) for terms in drawn]


def batch_of(rows: list[tuple[str, str]], tokenizer: Any) -> Batch:
    """Return the rows as a batch; the answers and end tokens are trained."""
    tokens: list[int] = []
    mask: list[bool] = []
    lengths: list[int] = []
    for prompt, answer in rows:
        first, second = (tokenizer.encode(text, add_special_tokens=False) for text in (prompt, answer))
        second.append(tokenizer.eos_token_id)
        tokens += first + second
        mask += [False] * len(first) + [True] * len(second)
        lengths.append(len(first) + len(second))
    return Batch(lengths, {"tokens": torch.tensor(tokens), "loss_mask": torch.tensor(mask)}, {})


def negative(logprobs: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
    del batch
    return -logprobs, {}


def train(folder: Path, rank: int, options: Mapping[str, Any], seed: int) -> dict[str, float]:
    """Train one side in this rank. Return its figures."""
    section = {"use": "fsdp2", "processes": RANKS, "shard": False, "lr": 3e-3, **options}
    config = msgspec.convert(section, Fsdp2TrainingConfig)
    context = Context(
        run="r",
        name="n",
        seed=seed,
        model=str(folder / f"model-{seed}"),
        rank=rank,
        rendezvous=str(folder / "rendezvous"),
    )
    layout = ShardedLayout(config, context)
    engine = HFTraining(config, context, layout)
    engine.load(None)
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "model")
    loss = Loss(negative, "token")
    for step in range(STEPS):
        rows = rows_of(1000 * seed + step, ROWS)
        engine.train(batch_of(rows[rank::RANKS], tokenizer), loss, temperature=1.0)
    held_out = batch_of(rows_of(-1 - seed, HELD_OUT), tokenizer)
    figures = engine.forward(held_out, temperature=1.0)
    weights = sum(tensor.numel() for _, tensor in engine.weights())
    return {
        "loss": -float(figures[held_out["loss_mask"]].mean()),
        "bytes": 4 * weights / layout.compression,
    }


def work(folder: Path, rank: int) -> None:
    """Train all sides in this rank, and write rank 0's figures."""
    figures = {
        name: [train(folder, rank, options, seed) for seed in SEEDS] for name, options in SIDES.items()
    }
    if rank == 0:
        (folder / "figures.json").write_text(json.dumps(figures))


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="compression-") as name:
        folder = Path(name)
        for seed in SEEDS:
            torch.manual_seed(seed)
            config = AutoConfig.from_pretrained(QUICKSTART / "model")
            AutoModelForCausalLM.from_config(config).float().save_pretrained(folder / f"model-{seed}")
            AutoTokenizer.from_pretrained(QUICKSTART / "model").save_pretrained(folder / f"model-{seed}")
        ranks = [
            subprocess.Popen([sys.executable, __file__, str(folder), str(rank)]) for rank in range(RANKS)
        ]
        for rank in ranks:
            if rank.wait():
                raise SystemExit(f"a rank ended with status {rank.returncode}")
        figures = json.loads((folder / "figures.json").read_text())
    whole = statistics.mean(each["loss"] for each in figures["whole"])
    print(f"{STEPS} steps of {ROWS} rows; held-out loss for each of {len(SEEDS)} seeds")
    print(f"{'':18} {'bytes per step':>14} {'mean loss':>10}  losses")
    result: dict[str, dict[str, float]] = {}
    for side, found in figures.items():
        losses = [each["loss"] for each in found]
        mean, sent = statistics.mean(losses), found[0]["bytes"]
        print(f"{side:18} {sent:>14,.0f} {mean:>10.4f}  {' '.join(f'{loss:.4f}' for loss in losses)}")
        result[side] = {"bytes": round(sent), "loss_difference": round(mean - whole, 4)}
    print(json.dumps(result))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        work(Path(sys.argv[1]), int(sys.argv[2]))
    else:
        main()
