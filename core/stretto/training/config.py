"""Config and checks shared by training engines of Hugging Face models. Importing it imports no torch."""

import importlib.util
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import msgspec

from stretto.component import (
    Defaults,
    Known,
    LocalPath,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Problem,
    Share,
)
from stretto.config import RunConfig
from stretto.engine import HeldModel, Memory, TrainingConfig
from stretto.errors import offer
from stretto.models.files import known_config, needs_padding, shapes_in
from stretto.models.vision import is_vision_language
from stretto.nodes import interface_problems
from stretto.training.memory import MicroBatchShape, counted, is_lossless

__all__ = ["GroupTrainingConfig", "LoraConfig", "ModelTrainingConfig", "check_training"]


Beta = Annotated[float, msgspec.Meta(ge=0, lt=1)]


_WARMUP = 10
"""Default of `warmup_steps`. A run with fewer steps is a trial run: the default causes no warning."""
_FINAL_LR_RATIO = 0.1
_TOKENS_OF_CPUS = 4096
_LEAST = 1024  # tokens that a pass needs with `auto`, which takes what all others leave
_FRAGMENTS = {False: 0.45, True: 1.5}
"""Memory that malloc loses between activations, as a share of them, without and with adapters, whose layers
free more than they keep. SmolLM2-135M, glibc 2.36, whose memalign hardly uses freed memory again, full
micro-batches of 1,024 to 4,096 tokens: 0.41, and 1.0 to 1.34 (dpo with two pairs a pass: 1.9)."""
_TYPICAL_LENGTH = 512  # tokens of a sequence, if the run does not say how long its samples may be


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Low-rank adapters, W + alpha / rank · B A (LoRA, Hu et al. 2021, arXiv 2106.09685)."""

    rank: PositiveInt = 16
    """Rank of the two factors."""
    alpha: PositiveFloat = 32.0
    """Scale of the adapters: their output is multiplied by alpha / rank."""
    targets: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    """Linear modules that get an adapter. An entry is the last part of a module's name, or the full name."""
    adapter: LocalPath | None = None
    """Folder of an adapter of `model` to continue, in peft's format, such as `stretto export --adapter`
    writes. The policy and its frozen reference start with this adapter. null: start with a new adapter."""
    send: Literal["adapter", "merged"] = "adapter"
    """Weights that the trainer sends to inference workers. `adapter`: only the adapter; each worker merges it
    into its own files of `model`. `merged`: the whole model, merged by the trainer."""


class ModelTrainingConfig(TrainingConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of an engine that trains a Hugging Face model."""

    reads_drawn: ClassVar[bool] = True

    optimizer: Literal["adamw", "sgd"] = "adamw"
    """Optimizer. `sgd` has no momentum and keeps no state; it is meant for comparisons."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """AdamW's decay rates for the running means of the gradient and of its square."""
    eps: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay. The default is 0 because RL changes the weights little."""
    clip_norm: PositiveFloat | None = 1.0
    """Maximum norm of the gradient over all parameters. null: no clipping."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule of the learning rate after the warm-up."""
    warmup_steps: NonNegativeInt = _WARMUP
    """Number of optimizer steps over which the learning rate rises to `lr`. `target_kl` does not
    reduce the first steps, and one step at a far too high rate destroys a policy."""
    decay_steps: NonNegativeInt | None = None
    """Optimizer step at which a `linear` or `cosine` schedule reaches its final learning rate. 0 is accepted
    only if `steps` is 0, for example when both come from `${steps}`."""
    final_lr_ratio: Share = _FINAL_LR_RATIO
    """Final learning rate of the schedule, as a fraction of `lr`."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Data type of the forward and backward passes, and of frozen weights of linear modules that it can hold.
    Trained parameters and optimizer state are always float32: small updates of RL are lost in bfloat16. null:
    that of the run's other engines if one is set, else bfloat16 with GPUs and float32 without."""
    state: Literal["device", "host"] = "device"
    """Where the float32 weights, the sum of gradients and the optimizer of trained parameters are. `host`: in
    the host's memory, and its processors compute the optimizer step. A GPU then has copies of the parameters
    (with `dtype: bfloat16`, those of linear modules take 16 bits), and each gradient of a micro-batch until
    the host has added it. Files and checkpoints are those of `device`, and on a CPU so are all bits. `fsdp2`
    needs `shard: true`, and has all parameters on the host; `pipeline` refuses `host`. Off by default: no GPU
    has run it."""
    publish_dtype: Literal["float32", "bfloat16"] | None = None
    """Data type of the published weights. null: `dtype`. With `bfloat16` a version has half the bytes of
    float32, and a weight transport with `deltas` sends a few hundredths of those bytes. The engines then
    sample from rounded weights; the canary shows the difference."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on. `auto` uses a GPU if the process can see one."""
    micro_batch_tokens: PositiveInt | Literal["auto"] | None = None
    """Maximum number of tokens in one forward and backward pass. A longer sequence gets a pass of its own.
    This changes memory and speed, never the gradient. With `shared_prefixes`, tokens of a shared prefix count
    once. `auto`: as many as the memory has room for when the run starts. null: 4,096 without GPUs; with GPUs
    as `auto`, at most 16,384, or 8,192 if the memory is not known. `config.yaml` has the number."""
    packing: Literal["auto", "packed", "padded"] = "auto"
    """Layout of a batch. `packed`: no padding, attention within each sequence. `padded`: one padded row for
    each sequence. `auto`: test at the start whether the model supports `packed`, else use `padded` (models
    with sliding windows or soft caps)."""
    shared_prefixes: bool = True
    """Compute once what several sequences of a micro-batch begin with: the prompt of a group, or the earlier
    turns of a conversation. This changes speed, never the gradient. The engine tests at the start whether it
    is exact for the model, and only models that support packed rows share prefixes."""
    varlen_attention: bool = False
    """Compute attention in one call a layer (`torch.nn.attention.varlen`), not in one for each sequence of a
    packed row. It needs a GPU, torch 2.12 and `dtype: bfloat16`. The engine compares outputs and gradients of
    both ways at the start; if they differ, or the kernel is missing, it keeps to separate calls and logs why.
    As with other attention on a GPU, the last bits of gradients vary. Off by default: no GPU has run it."""
    chunked_logits: bool = True
    """Compute the logits of a policy in chunks of tokens, and again in the backward pass. If false, or if the
    model's head does not allow it, all logits of a micro-batch are in memory together."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass, to use less memory."""
    lora: LoraConfig | None = None
    """Train low-rank adapters and keep the model's own weights fixed. null: train all weights."""
    freeze_vision_tower: bool = False
    """Keep the weights of a vision-language model's image encoder fixed: they have no gradient, no optimizer
    state and no adapters, and are sent to inference workers once. For Qwen's models, this includes the merger
    that maps its output to the text model; LLaVA's projector is trained. False by default: only
    `lora` and this key keep weights fixed (docs/weights.md#frozen-weights)."""
    compile: bool = False
    """Apply torch.compile to the feed-forward part of every layer, because its shapes vary in only one
    dimension. It needs a C++ compiler on a CPU and Triton on a GPU. The first steps are slow."""

    segments_expand: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.schedule != "constant" and self.decay_steps is None:
            raise ValueError(f"schedule {self.schedule!r} needs decay_steps")
        if self.state == "host" and not self.may_be_on_host:
            raise ValueError("state: host needs the engine torch, or fsdp2 with shard: true")

    def default_values(self, known: Known) -> Defaults:
        """See `Resources.default_values`. The assembly counts `micro_batch_tokens` for GPUs."""
        values: dict[str, tuple[object, str]] = {}
        if self.dtype is None:
            values["dtype"] = known.dtype, known.why
        if self.micro_batch_tokens is None and not self.gpus:
            values["micro_batch_tokens"] = _TOKENS_OF_CPUS, ""
        return values

    @property
    def compute_dtype(self) -> Literal["float32", "bfloat16"]:
        """`dtype`; its default without GPUs where no run has decided it."""
        return self.dtype or "float32"

    @property
    def tokens_per_pass(self) -> int:
        """`micro_batch_tokens` of a composed run, where 'auto' has become a number."""
        if self.micro_batch_tokens == "auto":
            raise ValueError("micro_batch_tokens is 'auto', which only a run file can have")
        return self.micro_batch_tokens or _TOKENS_OF_CPUS

    @property
    def shards(self) -> int:
        """Number of processes over which parameters, gradients and optimizer state are split."""
        return self.processes // self.data_parallel

    @property
    def gathers(self) -> bool:
        """Whether a process gathers each layer before it computes, as FSDP2 does, without autocast."""
        return False

    @property
    def may_be_on_host(self) -> bool:
        """Whether `state: host` is possible."""
        return True

    def memory(self, models: Sequence[HeldModel], longest: int) -> Memory | None:
        """See `TrainingConfig`. The layers that FSDP2 gathers are not counted."""
        if not models or not all(known_config(model.source) for model in models):
            return None
        tokens = max(_LEAST if self.micro_batch_tokens == "auto" else self.tokens_per_pass, longest)
        length = min(tokens, longest or _TYPICAL_LENGTH)
        counts = counted([self._micro_batch(model, tokens, length) for model in models])
        fault = next((f"; activations are not known: {count.fault}" for count in counts if count.fault), "")
        trained = sum(count.trained for count in counts) // self.shards
        weights = sum(count.weights for count in counts) // self.shards
        state = {"gradients": 4 * trained, "optimizer": (8 if self.optimizer == "adamw" else 0) * trained}
        on_host = ""
        if self._has_masters:
            state["masters"] = 4 * trained
        if self.state == "host" and self.gpus:
            size = sum(state.values()) + (0 if self._has_masters else weights)
            on_host, state = f", and {size / 2**30:.2g} GiB of the host", {}
        parts = {
            "weights": weights,
            **state,
            # One model computes at a time.
            "casts": max(count.casts for count in counts) // self.shards,
            "activations": max(count.activations for count in counts),
        }
        if not self.gpus:
            parts["fragments"] = int(parts["activations"] * _FRAGMENTS[self.lora is not None])
        parameters = sum(count.parameters for count in counts)
        sizes = {name: size for name, size in parts.items() if size}
        rows = " in padded rows" if any(needs_padding(model.source) for model in models) else ""
        return Memory(sizes, f"micro-batches of {tokens} tokens{rows}{on_host}{fault}", parameters)

    @property
    def _has_masters(self) -> bool:
        return self.state == "host" and not self.gathers

    def _micro_batch(self, model: HeldModel, tokens: int, length: int) -> MicroBatchShape:
        lora = self.lora if model.trainable else None
        return MicroBatchShape(
            model=model.source,
            head=model.head,
            trainable=model.trainable,
            rank=0 if lora is None else lora.rank,
            targets=() if lora is None else lora.targets,
            gradient_checkpointing=self.gradient_checkpointing and model.trainable,
            chunked_logits=self.chunked_logits,
            may_be_packed=self.packing != "padded",
            low=self.dtype == "bfloat16",
            lossless=is_lossless(model.source),
            gathered=self.gathers,
            has_masters=self._has_masters,
            on_gpu=self.gpus > 0,
            tokens=tokens,
            length=length,
        )


class GroupTrainingConfig(ModelTrainingConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of an engine that distributes the model over several ranks."""

    interface: str = ""
    """Network interface for the traffic between ranks: by Gloo for tensors in host memory, by NCCL for
    tensors on GPUs. Empty: the values of GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME. Without these variables:
    loopback on one machine, and on several machines the interface that leads to rank 0."""
    timeout_s: PositiveFloat = 600.0
    """Seconds that a rank waits for the other ranks before it fails. Set it longer than rank 0 needs to write
    a checkpoint."""


_LARGE_LR = 0.01
"""A step of AdamW changes each weight by about the learning rate; typical weights are about 0.02."""
_SMALL_LR = 1e-9  # smaller steps are lost when added to a typical float32 weight
_SMALL_LORA_LR = 2e-5
"""SmolLM2-135M with rank 16: reward 0.12 -> 0.16 in 14 steps at 1e-5, 0.12 -> 0.46 at 1e-4."""


def check_training(config: ModelTrainingConfig, run: RunConfig) -> Iterator[Problem]:
    """Yield the problems of the section of any training engine of Hugging Face models."""
    if config.packing == "packed" and is_vision_language(known_config(run.model)):
        yield Problem(
            "training.packing",
            f"is 'packed', but {run.model!r} reads images, which need padded rows; leave it out",
        )
    model_config = known_config(run.model)
    if config.freeze_vision_tower and model_config and not is_vision_language(model_config):
        yield Problem(
            "training.freeze_vision_tower", f"is true, but {run.model!r} reads no images; leave it out"
        )
    yield from _varlen_problems(config, run)
    if config.optimizer == "adamw" and config.lr > _LARGE_LR:
        yield Problem(
            "training.lr",
            f"is {config.lr:g}: with AdamW, a learning rate above {_LARGE_LR:g} destroys what a model knows; "
            "usual values are 1e-6 (large models) to 1e-3 (tiny models)",
            "warning",
        )
    if config.lora is not None and _SMALL_LR <= config.lr < _SMALL_LORA_LR:
        yield Problem(
            "training.lr",
            f"is {config.lr:g}, and adapters need about ten times the rate of a whole model: below "
            f"{_SMALL_LORA_LR:g} they hardly learn; usual values are 5e-5 to 1e-3",
            "warning",
        )
    if config.weight_decay > 1:
        yield Problem(
            "training.weight_decay",
            f"is {config.weight_decay:g}: a step takes this times the learning rate of every weight; usual "
            "values are 0 to 0.1",
            "warning",
        )
    if config.lr < _SMALL_LR:
        yield Problem(
            "training.lr",
            f"is {config.lr:g}: such steps change no weight; usual values are 1e-6 (large models) to 1e-3 "
            "(tiny models)",
            "warning",
        )
    if isinstance(config, GroupTrainingConfig) and config.interface:
        yield from interface_problems("training.interface", config.interface)
    yield from _schedule_problems(config, run)
    if config.betas[0] > config.betas[1]:
        yield Problem(
            "training.betas",
            f"is {list(config.betas)}: the first is the rate of the gradient, and usually the smaller one, "
            "such as [0.9, 0.999]",
            "warning",
        )
    if config.lora is not None:
        yield from _target_problems(config.lora, run.model)
    if config.decay_steps == 0 and run.steps:
        yield Problem("training.decay_steps", "is 0: the schedule would end before the first step")
    if config.device == "cuda" and not config.gpus:
        yield Problem("training.gpus", "is 0, but training.device is 'cuda'; set it to 1")
    if config.lora is not None and importlib.util.find_spec("peft") is None:
        yield Problem("training.lora", "needs peft: pip install 'stretto[lora]'", "environment")


def lr_factor(config: ModelTrainingConfig, step: int) -> float:
    """Return the factor of the learning rate: warm-up to 1, then constant, or decay until `decay_steps`."""
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant" or config.decay_steps is None:
        return 1.0
    length = max(1, config.decay_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / length)
    shape = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.final_lr_ratio + (1 - config.final_lr_ratio) * shape


def _varlen_problems(config: ModelTrainingConfig, run: RunConfig) -> Iterator[Problem]:
    has = {
        "`dtype: bfloat16`": config.dtype == "bfloat16",
        "a GPU (`gpus: 1`)": config.gpus > 0 and config.device != "cpu",
        "packed rows": config.packing != "padded" and not is_vision_language(known_config(run.model)),
    }
    missing = " and ".join(need for need, given in has.items() if not given)
    if config.varlen_attention and missing:
        yield Problem("training.varlen_attention", f"is true, and needs {missing}; or leave it out")


def _schedule_problems(config: ModelTrainingConfig, run: RunConfig) -> Iterator[Problem]:
    updates_per_step = getattr(run.algorithm, "minibatches", 1) * getattr(run.algorithm, "epochs", 1)
    updates, warmup, decay = run.steps * updates_per_step, config.warmup_steps, config.decay_steps
    if updates < 2 * warmup and run.steps:
        yield Problem(
            "training.warmup_steps",
            f"is {warmup}, so {max(0, updates - warmup)} of the run's {updates} optimizer steps have the "
            "full learning rate; set a smaller number, or more `steps`",
            "warning",
        )
    unused = {"decay_steps": None, "final_lr_ratio": _FINAL_LR_RATIO} if config.schedule == "constant" else {}
    for key, default in unused.items():
        if (value := getattr(config, key)) not in (default, run.steps):
            yield Problem(
                f"training.{key}",
                f"is {value}, and has no effect with the schedule 'constant'; set `training.schedule` to "
                "'linear' or 'cosine', or leave it out",
                "warning",
            )
    if config.schedule != "constant" and decay and decay <= warmup and warmup > _WARMUP:
        yield Problem(
            "training.decay_steps",
            f"is {decay}, but the warm-up alone takes {warmup} optimizer steps; expected a larger number",
        )


def _target_problems(lora: LoraConfig, model: str | None) -> Iterator[Problem]:
    if model is None or not Path(model, "config.json").is_file():
        return
    matrices = [
        name.removesuffix(".weight")
        for name, shape in shapes_in(model).items()
        if len(shape) == 2 and name.endswith(".weight")
    ]
    names = sorted({name.rpartition(".")[2] for name in matrices})
    for target in lora.targets:
        # The full name of a module is not always that of its tensor in the files.
        if names and target.rpartition(".")[2] not in names:
            yield Problem(
                "training.lora.targets",
                f"{target!r} is no linear module of {model!r}{offer(target, names, 'it has')}",
            )
