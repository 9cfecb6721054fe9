"""Training engine `frozen`: gives engines the weights of the run's model, and trains nothing.

For runs with `steps: 0`, which evaluate a model: `stretto evaluate` uses it. It holds the model in host
memory, in the type of its files and without an optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal

from stretto import Component, Context, Problem, TrainingConfig, hookimpl

if TYPE_CHECKING:
    from stretto.config import RunConfig

__all__ = ["FrozenConfig"]


class FrozenConfig(TrainingConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the training engine `frozen`."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the published weights; `auto` is that of the model's files. To serve what a run served, give
    its `training.dtype`."""


def make(config: FrozenConfig, context: Context) -> Any:
    """The engine; it imports torch, as every one does."""
    from stretto_frozen.training import FrozenTraining

    return FrozenTraining(config, context)


def check(config: FrozenConfig, run: RunConfig) -> Iterable[Problem]:
    """It cannot train, and is one process."""
    if run.steps:
        yield Problem(
            "training.use", f"'frozen' trains nothing, and steps is {run.steps}; it is for `steps: 0`"
        )
    if config.processes != 1:
        yield Problem("training.processes", f"is {config.processes}; engine 'frozen' is one process")


@hookimpl
def stretto_training() -> Iterator[Component[FrozenConfig]]:
    """The component of this package."""
    yield Component(
        "frozen",
        make,
        FrozenConfig,
        "trains nothing: publishes the model as it is, for runs that only evaluate",
        check=check,
        requires={"torch": "stretto[torch]", "safetensors": "stretto[torch]"},
    )
