"""The training engine `my_name`: like `torch`, and it reports the norm of the weights after each step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from stretto import Component, Context, Problem, hookimpl
from stretto.training.config import ModelTrainingConfig, check_training

if TYPE_CHECKING:
    from stretto.config import RunConfig
    from stretto.engine import TrainingEngine


class MyNameConfig(ModelTrainingConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the training engine `my_name`."""


def make(config: MyNameConfig, context: Context) -> TrainingEngine:
    """Return the engine. This imports torch."""
    from stretto_my_name.engine import MyNameTraining

    return MyNameTraining(config, context)


def check(config: MyNameConfig, run: RunConfig) -> Iterable[Problem]:
    """Refuse what this engine cannot do."""
    if config.processes != 1:
        yield Problem("training.processes", f"is {config.processes}; 'my_name' runs in one process")
    yield from check_training(config, run)


@hookimpl
def stretto_training() -> Iterator[Component[MyNameConfig]]:
    """The component of this package."""
    yield Component(
        "my_name",
        make,
        MyNameConfig,
        "one process with the whole model; reports the norm of the weights",
        check,
        requires={"torch": "stretto[torch]"},
        imports=lambda config, run: ("stretto_my_name.engine",),
    )
