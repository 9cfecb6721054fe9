"""Engines `mock`: training and inference at configured speeds, to try a configuration's timing.

They have no model. Answers are random tokens of random length, or texts from a function.
"""

from collections.abc import Iterator
from typing import ClassVar

from stretto import Component, InferenceConfig, Problem, TrainingConfig, hookimpl
from stretto.component import Importable, NonNegativeFloat, PositiveFloat, PositiveInt
from stretto.config import RunConfig
from stretto.user_code.importable import fault_of_importable

__all__ = ["MockInferenceConfig", "MockTrainingConfig"]


class MockTrainingConfig(TrainingConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the training engine `mock`."""

    seconds_per_step: NonNegativeFloat = 1.0
    """Seconds of one optimizer step, independent of the batch."""
    tokens_per_s: PositiveFloat | None = None
    """If set, a step takes additional time: the number of tokens in its batch divided by this speed."""
    seconds_per_forward: NonNegativeFloat = 0.0
    """Seconds of one forward pass over a batch."""
    calls_loss: bool = False
    """Call the algorithm's loss, to test its code; the result is not used."""


class MockInferenceConfig(InferenceConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the inference engine `mock`."""

    may_sleep: ClassVar[bool] = True

    tokens_per_s: PositiveFloat = 10_000.0
    """Tokens per second with all slots busy. Each slot has an equal part of this speed, even if others are
    idle."""
    slots: PositiveInt = 64
    """Number of samples decoded at once."""
    mean_tokens: PositiveFloat = 64.0
    """Mean length of an answer, before `sampling.max_tokens` cuts it."""
    sigma: NonNegativeFloat = 0.0
    """Standard deviation of the logarithm of the answer lengths, which are lognormal. With 0 all lengths are
    equal; 1 gives a long tail."""
    step_s: NonNegativeFloat = 0.0
    """With this or `sample_s` the engine decodes in steps, one token of every sample at once. A step takes
    this time, and `sample_s` for each sample. `tokens_per_s` has no effect then."""
    sample_s: NonNegativeFloat = 0.0
    """Time that each sample adds to a step."""
    lengths: tuple[PositiveInt, ...] = ()
    """Lengths in tokens, of which each answer draws one. If empty, answers draw lengths by `mean_tokens` and
    `sigma`."""
    swap_s: NonNegativeFloat = 0.0
    """Seconds of pause at each weight swap."""
    fetch_s: NonNegativeFloat = 0.0
    """Seconds before this pause, in which the engine samples with the weights it has."""
    vocab_size: PositiveInt = 64
    """Number of different tokens that answers are drawn from."""
    script: Importable | None = None
    """A function that makes the answers, to try agents, tools and environments without a model:
    `answer(prompt: str, seed: int) -> str`, which returns at least one character. It runs in the inference
    worker, so it must be fast. The tokens of a text are its bytes, so the run has no `model`."""


def check_inference(config: MockInferenceConfig, run: RunConfig) -> Iterator[Problem]:
    """Check that the script exists, and that a run with a script has no model."""
    if config.script is not None and (fault := fault_of_importable(config.script)):
        yield Problem("inference.script", fault)
    if config.script is not None and run.model is not None:
        yield Problem(
            "inference.script", "its texts are bytes, and the tokens of a `model` are not; set `model: null`"
        )


@hookimpl
def stretto_training() -> Iterator[Component[MockTrainingConfig]]:
    yield Component(
        "mock",
        "stretto_mock.training:MockTraining",
        MockTrainingConfig,
        "trains nothing, at a configured speed",
        requires={"torch": "stretto[torch]"},
        imports=lambda config, run: ("torch",),
        needs_model=False,
    )


@hookimpl
def stretto_inference() -> Iterator[Component[MockInferenceConfig]]:
    yield Component(
        "mock",
        "stretto_mock.inference:MockInference",
        MockInferenceConfig,
        "random answers of random length, or those of a function, at a configured speed",
        check_inference,
        needs_model=False,
        reads_images=True,
    )
