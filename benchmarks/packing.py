"""The torch training engine with packed rows against padded ones, on a long-tailed length distribution.

    python benchmarks/packing.py

The benchmark uses one thread, the quickstart's model, and 256 sequences of 8 to 512 tokens. They are packed
end to end up to a budget of tokens, or computed 32 rows at a time, in order, padded to the longest of the 32.
The computed tokens are counted at the model's input. Rounds alternate and medians are compared. The last line
is one JSON object.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stretto import Context
from stretto.algorithm import Loss
from stretto.rl.batch import Batch
from stretto_torch import TorchTrainingConfig
from stretto_torch.training import TorchTraining

ROUNDS, SEQUENCES, ROWS = 5, 256, 32
MODEL = Path(__file__).parent.parent / "examples" / "quickstart" / "model"


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


def negative(logprobs: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
    del batch
    return -logprobs, {}


def engine(packing: str, tokens: int) -> TorchTraining:
    config = TorchTrainingConfig(packing=packing, micro_batch_tokens=tokens)  # pyright: ignore[reportArgumentType]
    trainer = TorchTraining(config, Context(run="r", name="n", seed=1, model=str(MODEL)))
    trainer.load(None)
    return trainer


def seconds(trainer: TorchTraining, batches: list[Batch]) -> float:
    began = time.perf_counter()
    for batch in batches:
        trainer.train(batch, Loss(negative, "token"), temperature=1.0)
    return time.perf_counter() - began


def computed(trainer: TorchTraining, batches: list[Batch]) -> int:
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


def main() -> None:
    sizes = lengths()
    batch, total = batch_of(sizes), sum(sizes)
    rows = batch.split([ROWS] * (SEQUENCES // ROWS))
    packed, padded = engine("packed", 4096), engine("padded", 10**9)
    times: dict[str, list[float]] = {"packed": [], "padded": []}
    share = {"packed": total / computed(packed, [batch]), "padded": total / computed(padded, rows)}
    for _ in range(ROUNDS + 1):  # the first is for warming up
        times["packed"].append(seconds(packed, [batch]))
        times["padded"].append(seconds(padded, rows))
    speed = {name: total / statistics.median(found[1:]) for name, found in times.items()}
    print(f"{SEQUENCES} sequences, {total} tokens, 1 thread")
    print(f"{'':8} {'tokens/s':>10} {'real tokens':>12}")
    for name in times:
        print(f"{name:8} {speed[name]:>10.0f} {share[name]:>12.2f}")
    ratio = speed["packed"] / speed["padded"]
    print(json.dumps({"real_token_share": round(share["packed"], 4), "ratio": {"padded": round(ratio, 3)}}))


if __name__ == "__main__":
    main()
