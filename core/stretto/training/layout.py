"""(torch) How a model in training lies over processes: the seams between an engine and its layout.

`Layout` is one process with all of the model. `stretto.training.distributed.RankLayout` and the distributed
engines override its methods.

Words: a *rank* is one process of the group; a *part* is one of the parts a batch is split into, computed by
one rank or by several that follow each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from stretto.component import Context
    from stretto.training.config import ModelTrainingConfig
    from stretto.training.packing import ModelInputs

__all__ = ["Layout"]


class Layout:
    """All of the model in one process.

    Methods are called in all ranks, in the same order and with as many micro-batches, as they may
    communicate.
    """

    rank: int = 0
    """This process's number in the group."""
    parts: int = 1
    """Parts that a batch is split into."""
    width: int = 1
    """Ranks that compute a part together."""
    autocast: bool = True
    """Whether `dtype: bfloat16` is had by autocast, rather than by what holds the parameters."""

    def __init__(self, config: ModelTrainingConfig, context: Context) -> None:
        del context
        self._low = config.dtype == "bfloat16"
        torch.set_num_threads(config.threads)
        use_gpu = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
        self.device = torch.device("cuda" if use_gpu else "cpu")
        if use_gpu and config.share < 1:
            torch.cuda.set_per_process_memory_fraction(config.share)

    # ------------------------------------------------------------------------------- the model

    @property
    def staging(self) -> torch.device:
        """Where a model is loaded and tried, as a whole, before it is distributed."""
        return self.device

    def connect(self) -> None:
        """Meet the other ranks. Called before anything else; again, it does nothing."""

    def distribute(self, model: PreTrainedModel) -> None:
        """Leave of a whole model what this rank is to hold, in place.

        Raises:
            EngineError: if the model cannot lie so.
        """

    def close(self) -> None:
        """Leave the other ranks."""

    def name(self, own: str) -> str:
        """The name in the files of what this rank's parameters call `own`."""
        return own

    def stream(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Full tensors made of all ranks' tensors, one after the other, the same in all ranks."""
        yield from tensors

    def take(self, into: Tensor, full: Tensor) -> None:
        """Copy from a full tensor what a rank's tensor holds of it."""
        into.copy_(full)

    # ------------------------------------------------------------------------------ the numbers

    def everyone(self, value: Any) -> list[Any]:
        """What each rank says, in order; the same list in all ranks. `value` is of JSON's types."""
        return [value]

    def gather(self, value: Any) -> list[Any]:
        """What each part says, by its last rank, which is one that computes the model's output."""
        return self.everyone(value)[self.width - 1 :: self.width]

    def share(self, output: Tensor) -> Tensor:
        """A tensor that some ranks of a part have computed, in all of them."""
        return output

    # --------------------------------------------------------------------------------- computing

    def compute(self, model: Any, arguments: dict[str, Any]) -> Tensor:
        """The output of the model's head."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._low and self.autocast):
            return model(**arguments).logits

    def forward(
        self, model: nn.Module, rows: Sequence[ModelInputs], take: Callable[[int, Tensor], object]
    ) -> None:
        """Give each micro-batch's output to `take`, with its number, in the ranks that compute it."""
        for index, row in enumerate(rows):
            take(index, self.compute(model, row.arguments))

    def backward(
        self, model: nn.Module, rows: Sequence[ModelInputs], loss_of: Callable[[int, Tensor], Tensor]
    ) -> None:
        """Leave in the parameters the gradient of the sum of all parts' losses.

        Args:
            loss_of: a micro-batch's number and output -> its part of the loss, a scalar.
        """
        for index, row in enumerate(rows):
            loss_of(index, self.compute(model, row.arguments)).backward()

    def clip(self, model: nn.Module, limit: float | None) -> float:
        """Scale the gradient down to a norm of `limit`; returns what the norm was."""
        return float(nn.utils.clip_grad_norm_(model.parameters(), math.inf if limit is None else limit))
