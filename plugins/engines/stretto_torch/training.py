"""The training engine `torch`: one process, one model, any Hugging Face causal language model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.training.engine import HFTraining
from stretto.training.layout import Layout

if TYPE_CHECKING:
    from stretto import Context
    from stretto_torch import TorchTrainingConfig


class TorchTraining(HFTraining):
    """`HFTraining` with the layout of one process."""

    def __init__(self, config: TorchTrainingConfig, context: Context) -> None:
        super().__init__(config, context, Layout(config, context))
