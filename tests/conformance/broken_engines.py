"""Engines that break their contract, as in `broken.py`. This file imports torch, which that one must not."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from stretto import Component, hookimpl
from stretto.testing import InferenceConformance, TrainingConformance
from stretto.training.engine import HFTraining
from stretto_mock import MockInferenceConfig
from stretto_mock.inference import MockInference
from stretto_torch import TorchTrainingConfig

HERE = (__file__,)


class Shifted(HFTraining):
    """Its logprobs are wrong, and it reads no checkpoint."""

    def forward(self, batch: Any, *, temperature: float) -> Any:
        return super().forward(batch, temperature=temperature) + 0.01

    def load(self, folder: Path | None) -> None:
        super().load(None)


class Misreporting(MockInference):
    """Says something else than what it serves."""

    async def swap(self, update: Any) -> Any:
        report = await super().swap(update)
        return msgspec.structs.replace(report, digest="")

    def load(self) -> Any:
        return msgspec.structs.replace(super().load(), swaps=0)


@hookimpl
def stretto_training() -> Iterable[Component[Any]]:
    yield Component("shifted", Shifted, TorchTrainingConfig, "")


@hookimpl
def stretto_inference() -> Iterable[Component[Any]]:
    yield Component("misreporting", Misreporting, MockInferenceConfig, "", needs_model=False)


class TestShifted(TrainingConformance):
    use, plugins = "shifted", HERE
    finds = {
        "its_outputs_are_those_of_torch": "the logprobs at temperature 1.0: differs by 0.01",
        "from_a_checkpoint_it_goes_on_as_before": "one step after `load`,: differs by",
    }


class TestMisreporting(InferenceConformance):
    use, plugins = "misreporting", HERE
    finds = {
        "without_a_model_nothing_is_sampled_before_the_first_swap": "it reports another digest",
        "without_a_model_answers_go_on_over_a_swap": "after two swaps, its figures are",
    }
