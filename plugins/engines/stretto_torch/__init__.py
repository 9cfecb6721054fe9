"""The `torch` engines: sampling and training in plain PyTorch, on the CPU or on one GPU per process.

Importing this module imports neither torch nor transformers; the factory does.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar, Literal

from stretto.component import Component, Defaults, Known, PositiveFloat, PositiveInt, Problem
from stretto.config import RunConfig
from stretto.engine import FEW_SLOTS, InferenceConfig, Memory, slots_for
from stretto.hooks import hookimpl
from stretto.models.files import cache_bytes, modelling_imports, positions_of, text_config
from stretto.serving.config import context_problems, default_context
from stretto.training.config import ModelTrainingConfig, check_training

__all__ = ["TorchInferenceConfig", "TorchTrainingConfig", "slots_within", "tokens_within"]

_LONGEST = 4096
"""Maximum number of tokens of a sample if the config does not set `context_length`."""
_CACHE_SHARE = 1 / 8
"""Share of the device's memory that keys and values may take, unless one sample needs more."""


class TorchInferenceConfig(InferenceConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """In-process continuous batching with PyTorch.

    With `deterministic` a prompt is computed only together with prompts of the same length, rounded up to a
    multiple of 16. Prefixes that several prompts share are computed for each prompt, and a sample waits until
    it fits into the cache at its largest possible length. The engine tests at its start that a sample's bits
    do not depend on other samples; docs/benchmarks.md has the cost. The bits depend on the kind of processor,
    the number of threads, and the versions of torch and its libraries.
    """

    may_be_doubled: ClassVar[bool] = True
    may_sleep: ClassVar[bool] = True
    sends_kept_tokens: ClassVar[bool] = True

    slots: PositiveInt | None = None
    """Number of samples decoded at once. A larger number raises the total tokens per second and lowers the
    tokens per second of each sample. Null: the number of samples that the run may have in flight
    (`queue.max_staleness`), at most 128; halved, but not below 32, while full slots would need more than an
    eighth of the memory. With `deterministic`, null means 32."""
    context_length: PositiveInt | None = None
    """Tokens a sample may have, prompt and answer together. Null uses the model's own context length, at most
    4096; with GPUs, for `single_turn` and with `dataset.max_prompt_tokens`, the longest prompt and answer."""
    cache_gb: PositiveFloat | None = None
    """Memory for keys and values, in GiB; on a CPU, memory once used is not freed. It must hold at least
    one sample of `context_length`, or eight if transformers runs the model. Null: enough for all slots to be
    full, at most an eighth of the memory. With less than for all slots, a sample gets a slot only while the
    cache has room for it and the running samples. If the cache runs full, the samples that came last are
    preempted: they keep their tokens and resume later. Memory that running samples do not use keeps the
    texts of samples that have ended. A prompt with the same prefix as one of them, such as the next turn of a
    conversation, is then computed only from the first different token; not with `deterministic`, and never
    across versions."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on; `auto` uses a GPU if the process can see one."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of weights and cache. In float32 the logprobs agree with a float32 trainer's to about 1e-5.
    bfloat16 halves the memory and changes the logprobs by some hundredths, which the trainer must correct
    for. null: that of the trainer if it is set, else bfloat16 with GPUs and float32 without."""
    linear: Literal["auto", "torch", "onednn"] = "auto"
    """Kernels for large float32 products on a CPU. torch calls MKL, which on AMD is slower than oneDNN: half
    the speed on Zen 5, three quarters on Zen 3 with few samples at once. oneDNN is called through private
    operators of torch, and keeps a second copy of the weights. `auto` uses it on AMD processors."""
    cuda_graphs: bool = False
    """Start the kernels of a decode step with one call, as a CUDA graph. Not tried on a GPU yet. Needs a GPU
    (`gpus: 1`), `deterministic: false` and a model of the families Llama, Mistral, Qwen2 or Qwen3. A graph is
    captured at the first step with a new number of samples (rounded up to a multiple of 8) and a new length
    (to a power of two). For this, every sample takes as much of the cache as the longest. If the cache has no
    room for that, the step runs uncaptured. Prompts, `on_swap: recompute` and the sampling from logits always
    do. An engine that sleeps captures all graphs again."""

    def default_values(self, known: Known) -> Defaults:
        """See `Resources.default_values`. Without GPUs, the engine counts its slots when it starts."""
        values: dict[str, tuple[object, str]] = {}
        if self.dtype is None:
            values["dtype"] = known.dtype, known.why
        if self.context_length is None and self.gpus:
            values |= default_context(known.run)
        return values

    @property
    def compute_dtype(self) -> Literal["float32", "bfloat16"]:
        """`dtype`; its default without GPUs where no run has decided it."""
        return self.dtype or "float32"

    def room(self, model: str) -> int:
        """Return the number of tokens that a sample may have: `context_length`, or its default."""
        return self.context_length or min(positions_of(model) or _LONGEST, _LONGEST)

    def memory(self, model: str, parameters: int, samples_in_flight: int, available: float) -> Memory | None:
        """See `InferenceConfig`."""
        token = cache_bytes(model, _ITEM[self.compute_dtype])
        if not token:
            return None
        context = self.room(model)
        slots = self.slots or slots_within(self, samples_in_flight, context * token, available)
        if self.cache_gb is None:
            cache = token * tokens_within(slots * context, context, token, available)
        else:
            cache = int(self.cache_gb * 2**30)
        settings = f"{slots} slots x {context} tokens, cache at most {cache / 2**30:.2g} GiB"
        item, text = _ITEM[self.compute_dtype], text_config(model)
        is_packed = item == 4 and not self.gpus and text.get("model_type") in FAMILIES
        is_packed &= self.linear == "onednn" or (self.linear == "auto" and is_amd())
        states = 5 * text["hidden_size"] + 3 * text.get("intermediate_size", 4 * text["hidden_size"])
        parts = {
            "weights": item * parameters,
            "packed": item * parameters if is_packed else 0,  # copies for oneDNN (`linear.py`)
            # A layer's states in a prefill; the logits of a step and what `sampling.draw` makes of them; or
            # transformers' own copy of the weights at the start, when a CPU's cache takes no memory yet.
            "passes": max(
                item * min(PREFILL_TOKENS, slots * context) * states,
                _DRAWN * 4 * slots * text.get("vocab_size", 0),
                item * parameters - (0 if self.gpus else cache),
            ),
            "cache": cache,
        }
        return Memory({name: size for name, size in parts.items() if size}, settings)


FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Architectures that the hand-written decoder runs."""
PREFILL_TOKENS = 8192
"""Tokens in one prefill; bounds its memory."""
_DRAWN = 5  # float32 tensors of slots x vocabulary: logits, scaled, logprobs, probabilities, their sums
_ITEM = {"float32": 4, "bfloat16": 2}  # bytes of one number


def is_amd() -> bool:
    """Return whether this machine has a processor of AMD."""
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def slots_within(
    config: TorchInferenceConfig, samples_in_flight: int, sample_bytes: int, memory: float
) -> int:
    """Return the number of slots for a run file without `slots`. `memory` is in bytes."""
    slots = slots_for(samples_in_flight, deterministic=config.deterministic)
    if config.cache_gb is None:
        while slots > FEW_SLOTS and slots * sample_bytes > memory * _CACHE_SHARE:
            slots = max(FEW_SLOTS, slots // 2)
    return slots


def tokens_within(most: int, least: int, token_bytes: int, memory: float) -> int:
    """Return the size of the cache, `least` to `most` tokens, for a run file without `cache_gb`."""
    return int(min(most, max(least, memory * _CACHE_SHARE / token_bytes)))


def _check_inference(config: TorchInferenceConfig, run: RunConfig) -> Iterable[Problem]:
    if config.device == "cuda" and not config.gpus:
        yield Problem("inference.gpus", "is 0, but inference.device is 'cuda'; set it to 1")
    if config.cuda_graphs and (not config.gpus or config.device == "cpu" or config.deterministic):
        yield Problem(
            "inference.cuda_graphs",
            "is true, and needs a GPU (`gpus: 1`) and `deterministic: false`; or leave it out",
        )
    if config.slots == 1 and run.steps:
        yield Problem("inference.slots", "is 1, so answers are sampled one after another", "warning")
    yield from context_problems(config.context_length, run)
    needed = cache_bytes(run.model, _ITEM[config.compute_dtype]) * (config.context_length or 0)
    if config.cache_gb is not None and needed > config.cache_gb * 2**30:
        yield Problem(
            "inference.cache_gb",
            f"is {config.cache_gb:g}, but one sample of {config.context_length} tokens needs "
            f"{needed / 2**30:.3g}; raise it, or lower inference.context_length",
        )


@hookimpl
def stretto_inference() -> Iterable[Component[TorchInferenceConfig]]:
    yield Component(
        name="torch",
        factory="stretto_torch.inference:TorchInferenceEngine",
        config=TorchInferenceConfig,
        summary="samples in process with PyTorch: continuous batching, exact versions, bit-reproducible",
        check=_check_inference,
        reads_images=True,
        requires={"torch": "stretto[torch]", "safetensors": "stretto[torch]"},
        imports=lambda config, run: (*modelling_imports(run.model), "stretto_torch.inference"),
    )


class TorchTrainingConfig(ModelTrainingConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Training in one process, which has the whole model."""


def _check_training(config: TorchTrainingConfig, run: RunConfig) -> Iterable[Problem]:
    if config.processes != 1:
        yield Problem(
            "training.processes",
            f"is {config.processes}; 'torch' runs in one process, 'fsdp2' and 'pipeline' in several",
        )
    yield from check_training(config, run)


@hookimpl
def stretto_training() -> Iterable[Component[TorchTrainingConfig]]:
    yield Component(
        name="torch",
        factory="stretto.training.engine:HFTraining",
        config=TorchTrainingConfig,
        summary="one process with the whole model: packed micro-batches, AdamW, float32 or bfloat16",
        check=_check_training,
        requires={"torch": "stretto[torch]", "safetensors": "stretto[torch]"},
        imports=lambda config, run: (*modelling_imports(run.model), "stretto.training.engine"),
    )
