"""Engines `mock`: training and inference with stated speeds, to try a configuration's timing.

Neither needs a model or a GPU: answers are random tokens of random length, weights are one number.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stretto import Component, Context, InferenceConfig, TrainingConfig, hookimpl
from stretto.component import NonNegativeFloat, PositiveFloat, PositiveInt

__all__ = ["MockInferenceConfig", "MockTrainingConfig"]


class MockTrainingConfig(TrainingConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the training engine `mock`."""

    seconds_per_step: NonNegativeFloat = 1.0
    """Time of one optimizer step, whatever the batch."""
    tokens_per_s: PositiveFloat | None = None
    """If given, a step takes the time of its tokens at this speed on top."""
    seconds_per_forward: NonNegativeFloat = 0.0
    """Time of one forward pass over a batch."""
    calls_loss: bool = False
    """Call the algorithm's loss, to try its code; what it gives changes nothing."""


class MockInferenceConfig(InferenceConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the inference engine `mock`."""

    tokens_per_s: PositiveFloat = 10_000.0
    """Speed with all slots busy; each slot has an equal part of it, used or not."""
    slots: PositiveInt = 64
    """Samples decoded at once."""
    mean_tokens: PositiveFloat = 64.0
    """Mean length of an answer, before `sampling.max_tokens` cuts it."""
    sigma: NonNegativeFloat = 0.0
    """Spread of the lengths, lognormal: standard deviation of the logarithm. 0: all alike; 1: long-tailed."""
    swap_s: NonNegativeFloat = 0.0
    """Pause at each swap of weights."""
    vocab_size: PositiveInt = 64
    """Tokens are drawn from so many."""


def make_training(config: MockTrainingConfig, context: Context) -> Any:
    """The training engine; it imports torch, as every one does."""
    from stretto_mock.training import MockTraining

    return MockTraining(config, context)


def make_inference(config: MockInferenceConfig, context: Context) -> Any:
    """The inference engine."""
    from stretto_mock.inference import MockInference

    return MockInference(config, context)


@hookimpl
def stretto_training() -> Iterator[Component[MockTrainingConfig]]:
    """The training engine of this package."""
    yield Component(
        "mock",
        make_training,
        MockTrainingConfig,
        "trains nothing, at a stated speed",
        requires={"torch": "stretto[torch]"},
        needs_model=False,
    )


@hookimpl
def stretto_inference() -> Iterator[Component[MockInferenceConfig]]:
    """The inference engine of this package."""
    yield Component(
        "mock",
        make_inference,
        MockInferenceConfig,
        "random answers of random length, at a stated speed",
        needs_model=False,
        reads_images=True,
    )
