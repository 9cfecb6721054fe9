"""(torch) The engine. `HFTraining` has the model, the optimizer, micro-batches and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from stretto.training.engine import HFTraining
from stretto.training.layout import Layout

if TYPE_CHECKING:
    from stretto import Context
    from stretto.algorithm import Loss
    from stretto.rl.batch import Batch
    from stretto_my_name import MyNameConfig


class MyNameTraining(HFTraining):
    """`HFTraining` in one process, with one statistic more."""

    def __init__(self, config: MyNameConfig, context: Context) -> None:
        super().__init__(config, context, Layout(config, context))

    def train(self, batch: Batch, loss: Loss, *, temperature: float) -> Mapping[str, float]:
        """Take one optimizer step. The statistic `weight_norm` is the norm of all weights after it."""
        figures = super().train(batch, loss, temperature=temperature)
        squares = sum(float(tensor.float().square().sum()) for _, tensor in self.weights())
        return {**figures, "weight_norm": squares**0.5}
