"""Training engine `frozen`: publishes the run's model without training, for runs with `steps: 0`.

The model is in host memory, without an optimizer. `stretto evaluate` uses this engine.
"""

from collections.abc import Iterable, Iterator
from typing import Literal

from stretto import Component, Problem, TrainingConfig, hookimpl
from stretto.config import RunConfig
from stretto.models.files import modelling_imports

__all__ = ["FrozenConfig"]


class FrozenConfig(TrainingConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the training engine `frozen`."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of the published weights; `auto` keeps the dtype of the model's files. To serve the weights of an
    earlier run unchanged, use that run's `training.dtype`."""


def check(config: FrozenConfig, run: RunConfig) -> Iterable[Problem]:
    """Refuse runs that train, and configs of more than one process."""
    if run.steps:
        yield Problem(
            "training.use", f"'frozen' trains nothing, but steps is {run.steps}; expected `steps: 0`"
        )
    if config.processes != 1:
        yield Problem("training.processes", f"is {config.processes}; the engine 'frozen' runs in one process")


@hookimpl
def stretto_training() -> Iterator[Component[FrozenConfig]]:
    yield Component(
        "frozen",
        "stretto_frozen.training:FrozenTraining",
        FrozenConfig,
        "trains nothing: publishes the model unchanged, for runs that only evaluate",
        check=check,
        requires={"torch": "stretto[torch]", "safetensors": "stretto[torch]"},
        imports=lambda config, run: modelling_imports(run.model),
    )
