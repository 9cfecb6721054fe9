"""Plugin of `faults.py`: a training engine that needs memory for each step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stretto import Component, Context, hookimpl
from stretto_mock import MockTrainingConfig

STEP_BYTES = 64 * 2**20


def make_training(config: MockTrainingConfig, context: Context) -> Any:
    """Return the engine `mock`, with 64 MiB of activations in each step. This imports torch."""
    from stretto_mock.training import MockTraining

    class Activations(MockTraining):
        def train(self, *arguments: Any, **options: Any) -> Any:
            activations = bytearray(STEP_BYTES)
            done = super().train(*arguments, **options)
            del activations
            return done

    return Activations(config, context)


@hookimpl
def stretto_training() -> Iterator[Component[MockTrainingConfig]]:
    """The engine of this file."""
    yield Component(
        "faults_activations",
        make_training,
        MockTrainingConfig,
        "takes memory in each step",
        needs_model=False,
    )
