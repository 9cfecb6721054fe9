"""What training engines on Hugging Face models have in common before torch is imported: config and checks."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from stretto.component import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Problem,
    Share,
)
from stretto.engine import TrainingConfig
from stretto.models.files import known_config
from stretto.models.vision import is_vision_language

if TYPE_CHECKING:
    from stretto.config import RunConfig

__all__ = ["GroupTrainingConfig", "LoraConfig", "ModelTrainingConfig", "check_training"]


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Low-rank adapters, W + alpha / rank · B A (LoRA, Hu et al. 2021, arXiv 2106.09685)."""

    rank: PositiveInt = 16
    """Rank of the two factors."""
    alpha: PositiveFloat = 32.0
    """Scale of the adapters: what they add is multiplied by alpha / rank."""
    targets: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    """Linear modules that get one: by the last part of their name, or by the whole of it."""
    send: Literal["adapter", "merged"] = "adapter"
    """What inference workers are sent: the adapter alone, which each puts into the files of `model` that it
    has, or the whole model, merged by the trainer."""


class ModelTrainingConfig(TrainingConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of an engine that trains a Hugging Face model."""

    optimizer: Literal["adamw", "sgd"] = "adamw"
    """`sgd` is without momentum and holds no state; it is meant for comparisons."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates of the gradient's mean and of its square's."""
    eps: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay; 0 because RL moves weights little from where they were."""
    clip_norm: PositiveFloat | None = 1.0
    """Largest norm of the whole gradient; null for no bound."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps in which the learning rate rises to `lr`."""
    decay_steps: NonNegativeInt | None = None
    """Optimizer step at which a `linear` or `cosine` schedule has come down. 0 only
    where `steps` is 0, such as by `${steps}`."""
    final_lr_ratio: Share = 0.1
    """Where it comes down to, as a part of `lr`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the forward and backward passes, and of the published weights. Parameters and optimizer
    are float32 in any case: updates of RL vanish in bfloat16."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; `auto` takes a GPU if the process can see one."""
    micro_batch_tokens: PositiveInt = 4096
    """Tokens computed at once; a longer sequence stands alone. Changes memory and speed, never the
    gradient: the logits of so many tokens, in float32, are the largest tensor."""
    packing: Literal["auto", "packed", "padded"] = "auto"
    """`packed`: no padding, attention by sequence; `auto` tries that at the start and pads where a model
    does not allow it (sliding windows, soft caps)."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass, for less memory."""
    lora: LoraConfig | None = None
    """Train low-rank adapters and leave the model as it is; null trains all of it."""
    compile: bool = False
    """Have torch.compile fuse the feed-forward part of every layer, the part whose shapes vary in one
    dimension only. Needs a C++ compiler on a CPU, Triton on a GPU; the first steps are slow."""

    def __post_init__(self) -> None:
        """Relations between fields."""
        if self.schedule != "constant" and self.decay_steps is None:
            raise ValueError(f"schedule {self.schedule!r} needs decay_steps")


class GroupTrainingConfig(ModelTrainingConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of an engine whose model lies over several ranks."""

    interface: str = ""
    """Network interface that ranks on CPUs meet on. Empty takes what GLOO_SOCKET_IFNAME says, else `lo`,
    which is right where all ranks are on one machine."""
    timeout_s: PositiveFloat = 600.0
    """How long a rank waits for the others before it gives up; it covers the time rank 0 takes to write."""


_LARGE_LR = 0.01
"""AdamW moves each weight by about the learning rate in a step, and weights are of the order of 0.02."""


def check_training(config: ModelTrainingConfig, run: RunConfig) -> Iterator[Problem]:
    """What can be wrong with any section of this kind."""
    if config.packing == "packed" and is_vision_language(known_config(run.model)):
        yield Problem(
            "training.packing",
            f"is 'packed', and {run.model!r} reads images, whose rows are padded; leave it",
        )
    if config.optimizer == "adamw" and config.lr > _LARGE_LR:
        yield Problem(
            "training.lr",
            f"is {config.lr:g}: with AdamW a step above {_LARGE_LR:g} destroys what a model knows; usual are "
            "1e-6 (large models) to 1e-3 (tiny ones)",
            "warning",
        )
    if config.decay_steps == 0 and run.steps:
        yield Problem("training.decay_steps", "is 0: the rate would have come down before the first step")
    if config.device == "cuda" and not config.gpus:
        yield Problem("training.gpus", "is 0, but training.device is 'cuda'; set it to 1")
    if config.lora is not None and importlib.util.find_spec("peft") is None:
        yield Problem("training.lora", "needs peft: pip install 'stretto[lora]'", "environment")
