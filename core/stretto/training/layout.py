"""(torch) How a model in training is distributed over processes: the interface between engine and layout.

A *rank* is one process of the group. The engine splits a batch into *parts*; one rank, or several consecutive
ranks, compute a part.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from stretto.component import Context
from stretto.training.config import ModelTrainingConfig
from stretto.training.device import compute_device
from stretto.training.token_head import ModelInputs

__all__ = ["Layout"]


class Layout:
    """The whole model in one process. `RankLayout` and the distributed engines override its methods.

    Methods may communicate: the engine calls them in all ranks, in one order, for equally many micro-batches.
    """

    rank: int = 0
    """Number of this process in the group."""
    parts: int = 1
    """Number of parts that a batch is split into."""
    width: int = 1
    """Number of ranks that compute a part together."""
    autocast: bool = True
    """Use autocast for `dtype: bfloat16`. If False, the layout itself casts the parameters."""
    offloads: bool = False
    """Whether the layout itself keeps parameters and optimizer in the host's memory."""

    def __init__(self, config: ModelTrainingConfig, context: Context) -> None:
        del context
        self._low = config.dtype == "bfloat16"
        self._on_host = config.state == "host"
        torch.set_num_threads(config.threads)
        self.device = compute_device(config.device, config)

    @property
    def staging(self) -> torch.device:
        """The device on which the engine loads and tests the whole model before distribution."""
        return torch.device("cpu") if self._on_host else self.device

    def connect(self) -> None:
        """Connect to the other ranks, before all other calls; a second call does nothing."""

    def distribute(self, model: PreTrainedModel) -> None:
        """Reduce a whole model to this rank's parts on its device, in place; EngineError if that is not
        possible."""
        cast("nn.Module", model).to(self.device)

    def close(self) -> None:
        """Disconnect from the other ranks."""

    def name(self, own: str) -> str:
        """Return the name that a parameter of this rank has in the model's files."""
        return own

    def stream(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the full tensors, assembled one by one from all ranks' shards; the same in all ranks."""
        yield from tensors

    def take(self, into: Tensor, full: Tensor) -> None:
        """Copy a rank's share of the tensor `full` to the rank's tensor `into`."""
        into.copy_(full)

    def gather_ranks(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order, in every rank. Values have JSON types."""
        return [value]

    def gather(self, value: Any) -> list[Any]:
        """Return the value of every part, from its last rank, which computes the model's output."""
        return self.gather_ranks(value)[self.width - 1 :: self.width]

    def share(self, output: Tensor) -> Tensor:
        """Return, in all ranks of a part, the tensor that some of these ranks have computed."""
        return output

    def compute(self, model: Any, inputs: ModelInputs) -> Tensor:
        """Return the figures of the wanted tokens; see `stretto.training.token_head.return_figures`."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._low and self.autocast):
            return model(**inputs.arguments, wanted=inputs.wanted)

    def forward(
        self, model: nn.Module, rows: Sequence[ModelInputs], take: Callable[[int, Tensor], object]
    ) -> None:
        """Call `take` with the number and the figures of each micro-batch, in ranks that compute figures."""
        for index, row in enumerate(rows):
            take(index, self.compute(model, row))

    def backward(
        self, model: nn.Module, rows: Sequence[ModelInputs], loss_of: Callable[[int, Tensor], Tensor]
    ) -> None:
        """Compute the gradient of the sum of the losses of all parts, and keep it in the parameters.
        `loss_of`: micro-batch's number and figures -> its part of the loss, a scalar."""
        for index, row in enumerate(rows):
            loss_of(index, self.compute(model, row)).backward()

    def clip(self, model: nn.Module, limit: float | None) -> float:
        """Scale the gradient down to a norm of at most `limit`. Return the unclipped norm."""
        bound = math.inf if limit is None else limit
        return float(nn.utils.clip_grad_norm_(model.parameters(), bound, foreach=True))
