"""The training engine `torch` for tests, and a batch and a loss for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stretto import Context
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


def random_batch(seed: int) -> Batch:
    """Two sequences, of which every token is trained."""
    tokens = torch.randint(2, 97, (60,), generator=torch.Generator().manual_seed(seed))
    return Batch([30, 30], {"tokens": tokens, "loss_mask": torch.ones(60, dtype=torch.bool)}, {})


def push_up(logprobs: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
    """A loss that makes every token more likely."""
    return -logprobs, {}
