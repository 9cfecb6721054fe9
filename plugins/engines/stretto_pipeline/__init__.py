"""The training engine `pipeline`: a model split by layers into stages, each in its own process.

Importing this module does not import torch; the factory does.
"""

from collections.abc import Iterable, Iterator

from stretto.component import Component, Context, PositiveInt, Problem
from stretto.config import RunConfig
from stretto.engine import TrainingEngine
from stretto.hooks import hookimpl
from stretto.models.files import known_config, modelling_imports, text_config
from stretto.models.vision import is_vision_language
from stretto.training.config import GroupTrainingConfig, check_training

__all__ = ["PipelineTrainingConfig"]


class PipelineTrainingConfig(GroupTrainingConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pipeline of stages (1F1B), and data parallel over `processes // stages` such pipelines."""

    processes: PositiveInt = 2
    """Number of ranks of the worker group. Rank r is stage r % stages of its pipeline."""
    stages: PositiveInt = 2
    """Number of stages, each with an equal share of the layers as far as possible; must divide `processes`.
    More micro-batches keep the stages busier: of m micro-batches, all stages work during m - stages + 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.processes % self.stages:
            raise ValueError(f"processes ({self.processes}) must be a multiple of stages ({self.stages})")

    @property
    def data_parallel(self) -> int:
        """Number of parts of a batch, one for each pipeline."""
        return self.processes // self.stages

    @property
    def may_be_on_host(self) -> bool:
        """See `ModelTrainingConfig`."""
        return False


def _make(config: PipelineTrainingConfig, context: Context) -> TrainingEngine:
    from stretto.training.engine import HFTraining
    from stretto_pipeline.pipeline import PipelineLayout

    return HFTraining(config, context, PipelineLayout(config, context))


def _check(config: PipelineTrainingConfig, run: RunConfig) -> Iterator[Problem]:
    yield from check_training(config, run)
    if is_vision_language(known_config(run.model)):
        yield Problem(
            "training.use",
            f"'pipeline' cannot split {run.model!r}, which reads images; 'torch' and 'fsdp2' can train it",
        )
    layers = text_config(run.model).get("num_hidden_layers")
    if isinstance(layers, int) and layers < config.stages:
        yield Problem(
            "training.stages", f"is {config.stages}, but the model has {layers} layers; at most {layers}"
        )


@hookimpl
def stretto_training() -> Iterable[Component[PipelineTrainingConfig]]:
    yield Component(
        name="pipeline",
        factory=_make,
        config=PipelineTrainingConfig,
        summary="several processes, each with a part of the layers: 1F1B, combined with data parallel",
        check=_check,
        requires={"torch": "stretto[torch]", "safetensors": "stretto[torch]"},
        imports=lambda config, run: modelling_imports(run.model),
    )
