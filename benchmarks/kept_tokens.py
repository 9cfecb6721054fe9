"""What training with top_p, top_k and min_p costs a train step and a decode step.

    python benchmarks/kept_tokens.py [--vocabulary 32000] [--repeats 8]

A train step of the engine `torch` on a batch whose tokens were drawn from a few ids each (a log-normal
number, median 2, mean 8), and the same step on the same batch without; and drawing a token for 32 rows of
logits with these options, with and without the ids. Both sides take turns in one process on one thread.
Prints a table of median times, and as the last line one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from stretto.algorithm import Loss
from stretto.array import KeptTokens
from stretto.component import Context
from stretto.rl.batch import Batch, Drawn
from stretto_torch import stretto_training
from stretto_torch.sampling import SamplingSettings, draw

SEQUENCES, LENGTH, PROMPT = 16, 160, 32


def model_of(folder: Path, vocabulary: int) -> Path:
    """Make a random model with a vocabulary of this size."""
    sizes = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 6}
    config = AutoConfig.for_model("qwen2", vocab_size=vocabulary, num_key_value_heads=2, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def batch_of(vocabulary: int) -> Batch:
    """Make a batch of answers whose tokens were drawn from a few ids each."""
    rng = np.random.default_rng(0)
    tokens = torch.from_numpy(rng.integers(0, vocabulary, SEQUENCES * LENGTH))
    mask = (torch.arange(SEQUENCES * LENGTH) % LENGTH) >= PROMPT
    kept: list[KeptTokens] = []
    for own, trained in zip(tokens.split(LENGTH), mask.split(LENGTH), strict=True):
        sizes = np.clip(rng.lognormal(np.log(2), 1.66, LENGTH), 1, 1024).astype(int)
        sets = [
            np.union1d(rng.integers(0, vocabulary, size - 1), token) if is_trained else np.empty(0)
            for token, is_trained, size in zip(own.tolist(), trained.tolist(), sizes, strict=True)
        ]
        counts = np.array([len(each) for each in sets], np.uint16)
        kept.append(KeptTokens(counts, np.concatenate(sets).astype(np.int32)))
    columns = {"tokens": tokens, "loss_mask": mask}
    return Batch([LENGTH] * SEQUENCES, columns, {}, drawn=Drawn({}, kept))


def loss(said: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Raise every logprob."""
    return -said, {}


def medians(sides: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Return the median seconds of each side. They take turns, after one turn that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats + 1):
        for name, run in sides.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(found[1:]) for name, found in seconds.items()}


def train_step(vocabulary: int, repeats: int) -> dict[str, float]:
    """Measure a train step."""
    with tempfile.TemporaryDirectory() as folder:
        model = model_of(Path(folder, "model"), vocabulary)
        [component] = stretto_training()
        context = Context(run="r", name="n", seed=1, model=str(model), folder=folder)
        engine = component.make(component.config(use="torch", threads=1), context)
        engine.load(None)
        kept = batch_of(vocabulary)
        whole = Batch(kept.lengths, kept.tokens, kept.sequences)
        one = Loss(loss, "token")
        return medians(
            {
                "whole": lambda: engine.train(whole, one, temperature=1.0),
                "kept": lambda: engine.train(kept, one, temperature=1.0),
            },
            repeats,
        )


def draws(vocabulary: int, repeats: int) -> dict[str, float]:
    """Measure drawing a token for 32 rows, with top_p 0.8, top_k 20 and min_p 0.1."""
    rows = 32
    logits = torch.randn(rows, vocabulary) * 3
    uniform = np.random.default_rng(0).random(rows, np.float32)

    def settings(*, kept: bool) -> SamplingSettings:
        return SamplingSettings(
            temperature=np.full(rows, 1.0, np.float32),
            top_k=np.full(rows, 20, np.int64),
            top_p=np.full(rows, 0.8, np.float32),
            min_p=np.full(rows, 0.1, np.float32),
            wants_kept=np.ones(rows, np.bool_) if kept else None,
        )

    sides = {name: settings(kept=name == "kept") for name in ("whole", "kept")}
    return medians(
        {name: lambda own=own: draw(logits.clone(), uniform, own) for name, own in sides.items()},
        10 * repeats,
    )


def main() -> None:
    """Measure both, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--repeats", type=int, default=8)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    report: dict[str, Any] = {"vocabulary": chosen.vocabulary}
    print(f"{'':<12}{'without':>10}{'with ids':>10}{'ratio':>8}")
    for name, measure in (("train step", train_step), ("32 draws", draws)):
        found = measure(chosen.vocabulary, chosen.repeats)
        ratio = found["kept"] / found["whole"]
        print(f"{name:<12}{1e3 * found['whole']:>8.1f}ms{1e3 * found['kept']:>8.1f}ms{ratio:>8.3f}")
        report[name] = {**found, "ratio": ratio}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
