"""The training engine `fsdp2`: a model sharded over ranks (FSDP2), replicated, or split by tensor (DTensor).

Importing this module does not import torch; the factory does.
"""

from collections.abc import Iterable, Iterator
from typing import Literal

from stretto.component import Component, Context, PositiveInt, Problem
from stretto.config import RunConfig
from stretto.engine import TrainingEngine
from stretto.hooks import hookimpl
from stretto.models.files import known_config, modelling_imports, text_config
from stretto.models.vision import is_vision_language
from stretto.training.config import GroupTrainingConfig, check_training

__all__ = ["Fsdp2TrainingConfig"]


class Fsdp2TrainingConfig(GroupTrainingConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Data parallel over `processes` ranks, or over groups of `tensor_parallel` ranks each."""

    tensor_parallel: PositiveInt = 1
    """Number of ranks that compute each layer together, for models of the Llama, Qwen2 and Gemma types; must
    divide `processes`. Rank r has the number r % tensor_parallel in its group."""
    shard: bool = True
    """Shard parameters, gradients and optimizer over the data-parallel ranks. If false, each rank keeps full
    copies, which takes about half the time for models of less than some million parameters."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which gradients are reduced between data-parallel ranks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.processes % self.tensor_parallel:
            raise ValueError(
                f"processes ({self.processes}) must be a multiple of tensor_parallel ({self.tensor_parallel})"
            )
        if self.tensor_parallel > 1:
            for key in ("lora", "compile"):
                if getattr(self, key):
                    raise ValueError(f"{key} and tensor_parallel above 1 cannot be combined")

    @property
    def data_parallel(self) -> int:
        """Number of parts of a batch, one for each data-parallel group."""
        return self.processes // self.tensor_parallel

    @property
    def shards(self) -> int:
        """See `ModelTrainingConfig`."""
        return self.processes if self.shard else self.tensor_parallel

    @property
    def gathers(self) -> bool:
        """See `ModelTrainingConfig`."""
        return self.shard

    @property
    def may_be_on_host(self) -> bool:
        """See `ModelTrainingConfig`."""
        return self.shard

    @property
    def ranks_together(self) -> int:
        """Number of ranks of a tensor-parallel group."""
        return self.tensor_parallel


def _make(config: Fsdp2TrainingConfig, context: Context) -> TrainingEngine:
    from stretto.training.engine import HFTraining
    from stretto_fsdp2.sharded import ShardedLayout

    return HFTraining(config, context, ShardedLayout(config, context))


def _check(config: Fsdp2TrainingConfig, run: RunConfig) -> Iterator[Problem]:
    yield from check_training(config, run)
    if config.tensor_parallel > 1 and is_vision_language(known_config(run.model)):
        yield Problem(
            "training.tensor_parallel",
            f"is {config.tensor_parallel}, but {run.model!r} reads images and cannot be split; expected 1",
        )
    model, ranks = text_config(run.model), config.tensor_parallel
    heads = model.get("num_attention_heads")
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        number = model.get(key) or heads
        if isinstance(number, int) and number % ranks:
            yield Problem(
                "training.tensor_parallel", f"is {ranks}; it must divide the model's {key}, {number}"
            )


@hookimpl
def stretto_training() -> Iterable[Component[Fsdp2TrainingConfig]]:
    yield Component(
        name="fsdp2",
        factory=_make,
        config=Fsdp2TrainingConfig,
        summary="several processes: FSDP2, replicated or tensor parallel; packed micro-batches, LoRA",
        check=_check,
        requires={"torch": "stretto[torch]", "safetensors": "stretto[torch]"},
        imports=lambda config, run: modelling_imports(run.model),
    )
