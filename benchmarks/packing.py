"""The torch training engine's packed rows, shared prefixes and chunked logits, each against the engine
without it.

    python benchmarks/packing.py

The benchmark uses one thread. The sides of a comparison alternate within one process, and medians are
compared, except for memory: there, each side is a process of its own.

- `padded`: the quickstart's model and 256 sequences of 8 to 512 tokens, packed end to end up to a budget of
  tokens, against rows padded to the longest of 32, in order. The computed tokens are counted at the model's
  input.
- `short` and `long`: 32 groups of 8 random answers of 4 to 16 tokens (mean 10). The prompts have 6 to 16
  tokens, as in the quickstart, or 60 to 100 (8 times the answers). `shared_prefixes` and `chunked_logits` are
  on or off. The gradients are compared too.
- `vocabulary`: the peak memory of a process that trains a model of 150,000 tokens on 1,280 answer tokens,
  with `chunked_logits` on or off.

The last line is one JSON object.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from stretto import Context
from stretto.algorithm import Loss
from stretto.rl.batch import Batch
from stretto.training.engine import HFTraining
from stretto_torch import TorchTrainingConfig

ROUNDS, SEQUENCES, ROWS, GROUP = 5, 256, 32, 8
VOCABULARY = 150_000
MODEL = Path(__file__).parent.parent / "examples" / "quickstart" / "model"
OFF: dict[str, Any] = {"shared_prefixes": False, "chunked_logits": False}


def lengths() -> list[int]:
    """Draw log-normal lengths, clamped to 8 and 512: half are below 32 tokens, one in fifty is above 300."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(SEQUENCES, generator=generator) * 1.1 + 3.4
    return drawn.exp().clamp(8, 512).long().tolist()


def batch_of(sizes: list[int]) -> Batch:
    generator = torch.Generator().manual_seed(1)
    total = sum(sizes)
    tokens = torch.randint(4, 90, (total,), generator=generator)
    return Batch(sizes, {"tokens": tokens, "loss_mask": torch.ones(total, dtype=torch.bool)}, {})


def groups_of(sequences: int, prompt: tuple[int, int]) -> Batch:
    """Draw groups of answers of 4 to 16 tokens to prompts of `prompt` tokens. The answers are trained."""
    generator = torch.Generator().manual_seed(2)

    def draw(shortest: int, longest: int) -> Tensor:
        size = int(torch.randint(shortest, longest + 1, (1,), generator=generator))
        return torch.randint(4, 90, (size,), generator=generator)

    rows: list[Tensor] = []
    masks: list[Tensor] = []
    for _ in range(sequences // GROUP):
        tokens = draw(*prompt)
        for _ in range(GROUP):
            rows.append(torch.cat([tokens, draw(4, 16)]))
            masks.append(torch.arange(len(rows[-1])) >= len(tokens))
    group = torch.arange(len(rows)) // GROUP
    return Batch(
        [len(row) for row in rows],
        {"tokens": torch.cat(rows), "loss_mask": torch.cat(masks)},
        {"group": group},
    )


def negative(logprobs: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
    del batch
    return -logprobs, {}


def engine(model: Path = MODEL, **options: Any) -> HFTraining:
    config = TorchTrainingConfig(**options)
    trainer = HFTraining(config, Context(run="r", name="n", seed=1, model=str(model)))
    trainer.load(None)
    return trainer


def seconds(trainer: HFTraining, batches: list[Batch]) -> float:
    began = time.perf_counter()
    for batch in batches:
        trainer.train(batch, Loss(negative, "token"), temperature=1.0)
    return time.perf_counter() - began


def medians(sides: Mapping[str, Callable[[], float]]) -> dict[str, float]:
    """Measure the sides in turn; the first round is for warming up."""
    rounds = [{name: measure() for name, measure in sides.items()} for _ in range(ROUNDS + 1)]
    return {name: statistics.median(found[name] for found in rounds[1:]) for name in sides}


def computed(trainer: HFTraining, batches: list[Batch]) -> int:
    """Count the tokens that go through the model in a pass over the batches."""
    count = 0

    def add(module: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        nonlocal count
        count += named["input_ids"].numel()

    model: Any = trainer._model  # pyright: ignore[reportPrivateUsage] - the figure is about its input
    handle = model.register_forward_pre_hook(add, with_kwargs=True)
    seconds(trainer, batches)
    handle.remove()
    return count


def compare_padding() -> tuple[float, float]:
    """Print packed rows beside padded ones. Return the share of real tokens, and the ratio of speeds."""
    sizes = lengths()
    batch, total = batch_of(sizes), sum(sizes)
    rows = batch.split([ROWS] * (SEQUENCES // ROWS))
    packed, padded = (
        engine(packing="packed", **OFF),
        engine(packing="padded", micro_batch_tokens=10**9, **OFF),
    )
    share = {"packed": total / computed(packed, [batch]), "padded": total / computed(padded, rows)}
    times = medians({"packed": lambda: seconds(packed, [batch]), "padded": lambda: seconds(padded, rows)})
    print(f"{SEQUENCES} sequences, {total} tokens, 1 thread")
    print(f"{'':8} {'tokens/s':>10} {'real tokens':>12}")
    for name, found in times.items():
        print(f"{name:8} {total / found:>10.0f} {share[name]:>12.2f}")
    return share["packed"], times["padded"] / times["packed"]


def compare_sharing(name: str, prompt: tuple[int, int]) -> float:
    """Print an engine with shared prefixes and chunked logits, with one of them, and with neither. Return the
    ratio of the first to the last."""
    batch = groups_of(SEQUENCES, prompt)
    sides = {
        "both": engine(),
        "shared_prefixes": engine(chunked_logits=False),
        "chunked_logits": engine(shared_prefixes=False),
        "neither": engine(**OFF),
    }
    tokens = {side: computed(trainer, [batch]) for side, trainer in sides.items()}
    times = medians({side: lambda of=trainer: seconds(of, [batch]) for side, trainer in sides.items()})
    print(f"\n{name}: {SEQUENCES} answers in groups of {GROUP}, prompts of {prompt[0]} to {prompt[1]} tokens")
    print(f"{'':16} {'samples/s':>10} {'computed':>10} {'gradient off by':>16}")
    expected = gradient({**OFF}, batch)
    for side, found in times.items():
        options = {key: side in ("both", key) for key in OFF}
        off = float((gradient(options, batch) - expected).norm() / expected.norm())
        print(f"{side:16} {SEQUENCES / found:>10.0f} {tokens[side]:>10} {off:>16.1e}")
    return times["neither"] / times["both"]


def gradient(options: Mapping[str, Any], batch: Batch) -> Tensor:
    """The gradient, as the update of plain gradient descent from the initial weights."""
    trainer = engine(optimizer="sgd", lr=1.0, clip_norm=None, **options)
    before = {name: tensor.clone() for name, tensor in trainer.weights()}
    trainer.train(batch, Loss(negative, "token"), temperature=1.0)
    return torch.cat([(before[name] - tensor).flatten() for name, tensor in trainer.weights()])


def compare_memory() -> float:
    """Print the peak memory with and without chunked logits. Return the ratio."""
    with tempfile.TemporaryDirectory() as folder:
        config = AutoConfig.from_pretrained(MODEL, vocab_size=VOCABULARY)
        AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
        peak = {
            name: int(subprocess.check_output([sys.executable, __file__, folder, name]))
            for name in ("chunked", "whole")
        }
    print(f"\na vocabulary of {VOCABULARY}")
    for name, found in peak.items():
        print(f"{name:16} {found / 2**20:>10.0f} MiB at the peak")
    return peak["chunked"] / peak["whole"]


def train_and_weigh(folder: Path, side: str) -> None:
    """Take two steps and print the peak memory of this process in bytes."""
    trainer = engine(folder, chunked_logits=side == "chunked")
    seconds(trainer, [groups_of(SEQUENCES // 2, (6, 16))] * 2)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def main() -> None:
    share, padded = compare_padding()
    ratios = {
        "padded": padded,
        "short": compare_sharing("short", (6, 16)),
        "long": compare_sharing("long", (60, 100)),
        "memory": compare_memory(),
    }
    found = {name: round(ratio, 3) for name, ratio in ratios.items()}
    print(json.dumps({"real_token_share": round(share, 4), "ratio": found}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) == 3:
        train_and_weigh(Path(sys.argv[1]), sys.argv[2])
    else:
        main()
