"""The `torch` engines: sampling and training in plain PyTorch, on CPU or one GPU a process.

Importing this module imports neither torch nor transformers; the factory does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from stretto.component import (
    Component,
    Context,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Problem,
    Share,
)
from stretto.engine import InferenceConfig, InferenceEngine, TrainingConfig, TrainingEngine
from stretto.errors import PluginError
from stretto.hooks import hookimpl

if TYPE_CHECKING:
    from stretto.config import RunConfig

__all__ = ["TorchInferenceConfig", "TorchTrainingConfig"]


class TorchInferenceConfig(InferenceConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """In-process continuous batching with PyTorch.

    `deterministic` has every prompt computed by itself: about a tenth fewer tokens a second where each
    prompt has one sample (0.2 M parameters, 32 slots), next to nothing with groups, whose prompt is
    computed once either way. On AMD say `linear: onednn` with it, or models from about 1 M parameters on
    lose another third. The bits then depend on the kind of processor, the number of threads, and the
    versions of torch and its libraries.
    """

    slots: PositiveInt = 32
    """Samples decoded at once. More raises the tokens a second of all and lowers those of each; each
    costs `context_length` tokens of cache. On one core the gain flattens out at about 32."""
    context_length: PositiveInt | None = None
    """Tokens a slot can hold, prompt and answer together. None takes what the model was made for, at
    most 4096, because the cache of every slot is allocated at the start."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; `auto` takes a GPU if the process can see one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and cache. In float32 the logprobs agree with a float32 trainer's to about 1e-5;
    bfloat16 halves memory and moves them by some hundredths, which the trainer has to correct for."""
    linear: Literal["auto", "torch", "onednn"] = "auto"
    """Kernels of large float32 products on a CPU. torch calls MKL, which has half the speed of oneDNN
    on AMD; oneDNN is reached through a private operator. `auto` measures once at the start, or takes
    torch if `deterministic`, where bits must not hang on a measurement."""
    evaluation_delay_s: NonNegativeFloat = 2.0
    """A request of priority 1 is served as if it had come so many seconds later: training goes first,
    and evaluation still has its turn under any load."""


def _make_inference(config: TorchInferenceConfig, context: Context) -> InferenceEngine:
    try:
        from stretto_torch.inference import TorchInferenceEngine
    except ImportError as error:
        raise PluginError(
            f"the torch engine needs {error.name}: pip install 'stretto[torch]'",
            kind="inference",
            name="torch",
        ) from error
    return TorchInferenceEngine(config, context)


def _check_inference(config: TorchInferenceConfig, run: RunConfig) -> Iterable[Problem]:
    if config.device == "cuda" and not config.gpus:
        yield Problem("inference.gpus", "is 0, but inference.device is 'cuda'; set it to 1")
    longest = run.sampling.max_tokens
    if config.context_length is not None and longest >= config.context_length:
        yield Problem(
            "inference.context_length",
            f"is {config.context_length}; a prompt and sampling.max_tokens ({longest}) need more",
        )


@hookimpl
def stretto_inference() -> Iterable[Component[TorchInferenceConfig]]:
    """The inference engine `torch`."""
    yield Component(
        name="torch",
        factory=_make_inference,
        config=TorchInferenceConfig,
        summary="samples in process with PyTorch: continuous batching, exact versions, bit-reproducible",
        check=_check_inference,
    )


class TorchTrainingConfig(TrainingConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One process with the whole model; AdamW in float32."""

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
    decay_steps: PositiveInt | None = None
    """Optimizer step at which a `linear` or `cosine` schedule has come down."""
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

    def __post_init__(self) -> None:
        """Relations between fields."""
        if self.schedule != "constant" and self.decay_steps is None:
            raise ValueError(f"schedule {self.schedule!r} needs decay_steps")


def _make_training(config: TorchTrainingConfig, context: Context) -> TrainingEngine:
    from stretto_torch.training import TorchTraining

    return TorchTraining(config, context)


def _check_training(config: TorchTrainingConfig, run: RunConfig) -> Iterable[Problem]:
    del run
    if config.processes != 1:
        yield Problem("training.processes", f"is {config.processes}; engine 'torch' is one process")
    if config.device == "cuda" and not config.gpus:
        yield Problem("training.gpus", "is 0, but training.device is 'cuda'; set it to 1")


@hookimpl
def stretto_training() -> Iterable[Component[TorchTrainingConfig]]:
    """The training engine `torch`."""
    yield Component(
        name="torch",
        factory=_make_training,
        config=TorchTrainingConfig,
        summary="one process with the whole model: packed micro-batches, AdamW, float32 or bfloat16",
        check=_check_training,
        requires={"torch": "stretto[torch]", "safetensors": "stretto[torch]"},
    )
