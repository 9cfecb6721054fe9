"""The training engine `torch` for tests, and batches, losses and steps for it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from stretto import Context
from stretto.algorithm import Loss
from stretto.component import Head
from stretto.rl.batch import Batch
from stretto.training.engine import HFTraining
from stretto_torch import TorchTrainingConfig

NEARLY_LINEAR: Mapping[str, Any] = {"lr": 0.1, "eps": 1.0, "clip_norm": None}
"""AdamW's updates are then nearly linear in the gradient, so that they tell it."""


def loaded_engine(
    model: Path, *, head: Head = "policy", trainable: bool = True, **options: Any
) -> HFTraining:
    section: dict[str, Any] = {"warmup_steps": 0, **options}
    config = TorchTrainingConfig(**section)
    context = Context(run="r", name="n", seed=1, model=str(model), head=head, trainable=trainable)
    engine = HFTraining(config, context)
    engine.load(None)
    return engine


def batch_of(lengths: list[int], seed: int = 0, **columns: Tensor) -> Batch:
    """Random tokens and advantages; in each sequence the second half is trained on."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    usual = {
        "tokens": torch.randint(2, 97, (total,), generator=generator),
        "loss_mask": torch.cat([torch.arange(length) >= length // 2 for length in lengths]),
        "advantages": torch.randn(total, generator=generator),
    }
    return Batch(lengths, {**usual, **columns}, {"group": torch.arange(len(lengths)) // 2})


def batch_of_one_prompt(lengths: list[int], prompt: int) -> Batch:
    """Random sequences that begin with the same tokens."""
    batch = batch_of(lengths)
    places = batch.positions()
    return batch.with_columns({"tokens": torch.where(places < prompt, places % 90 + 2, batch["tokens"])})


def random_batch(seed: int) -> Batch:
    """Two sequences, of which every token is trained."""
    return batch_of([30, 30], seed, loss_mask=torch.ones(60, dtype=torch.bool))


def push_up(logprobs: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
    return -logprobs, {}


def plain_loss(logprobs: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
    """-A log π: linear, so that its gradient is easily had by other means."""
    return -batch["advantages"] * logprobs, {"advantage": batch["advantages"]}


def squared(said: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
    return (said - batch["advantages"]) ** 2, {"said": said, "said_max": said}


def step_of(
    engine: HFTraining, batch: Batch, loss: Loss, temperature: float = 1.0
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The whole gradient of each parameter in a train step on this rank's part of a batch; the statistics."""
    inner, found = cast("Any", engine), dict[str, Tensor]()

    def keep(*_: object) -> None:
        for name, parameter in inner._trained.items():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            found[name] = (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).clone()

    handle = inner._optimizer.register_step_pre_hook(keep)
    statistics = dict(engine.train(batch, loss, temperature=temperature))
    handle.remove()
    return found, statistics


def off(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Norm of the difference of two updates or gradients, relative to the expected one's."""
    assert found.keys() == expected.keys()
    difference = torch.cat([(found[name] - expected[name]).flatten() for name in expected])
    whole = torch.cat([each.flatten() for each in expected.values()])
    return float(difference.norm() / whole.norm().clamp(min=1e-12))  # no token may be trained


def assert_equal_steps(one: HFTraining, other: HFTraining, batch: Batch, entropy_coef: float = 0.0) -> None:
    """Both say the same of a batch, and a step on it has the same gradient and statistics."""
    said = [engine.forward(batch, temperature=0.7) for engine in (one, other)]
    torch.testing.assert_close(said[0], said[1], atol=2e-5, rtol=1e-5)
    loss = Loss(squared, "sequence", entropy_coef=entropy_coef)
    (found, statistics), (expected, others) = (step_of(each, batch, loss, 0.7) for each in (one, other))
    assert off(found, expected) < 1e-5
    del statistics["micro_batches"], others["micro_batches"]
    assert statistics == pytest.approx(others, rel=1e-4, abs=1e-6)
