"""The contract of algorithms: the models they need and their dataflow of calls.

A call is one model function call (or a pure function) with the keys it reads and writes; the edges
of the graph follow from the keys. The kernel orders and dispatches calls by name and never runs
their code, so an algorithm's module must not import torch at import time: import it where the
arithmetic is. Worker groups run the code, with a `stretto.batch.Batch` that holds the keys read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

from stretto.component import PositiveInt

if TYPE_CHECKING:
    from torch import Tensor

    from stretto.batch import Batch

__all__ = [
    "Algorithm",
    "AlgorithmConfig",
    "Call",
    "Function",
    "Group",
    "Loss",
    "LossFunction",
    "Model",
    "Reduction",
    "forward",
    "function",
    "generate",
    "score",
    "train",
]

# What a rollout leaves behind; every later call may read these keys.
#   tokens              (T,) int64    prompt and answer
#   loss_mask           (T,) bool     tokens the policy sampled, to be trained on
#   behaviour_logprobs  (T,) float32  as the engine reported them; 0 where loss_mask is False
#   versions            (T,) int64    policy version that sampled the token; -1 where not sampled
#   truncated           (S,) bool     the answer ended at its token limit
#   group               (S,) int64    sequences of one prompt share a number
GENERATED = ("tokens", "loss_mask", "behaviour_logprobs", "versions", "truncated", "group")
#   rewards             (S,) float32
SCORED = ("rewards",)

Reduction = Literal["token", "sequence", "sequence_sum"]
"""What a loss is the mean of, always over the whole batch of one optimizer step:
`token`: all trained tokens, each alike; `sequence`: sequences, each the mean of its tokens;
`sequence_sum`: sequences, each the sum of its tokens."""

# (T,) current logprobs and the batch -> (T,) loss of each token, and (T,) statistics to be averaged.
LossFunction = Callable[["Tensor", "Batch"], "tuple[Tensor, Mapping[str, Tensor]]"]
# The batch -> the columns written.
Function = Callable[["Batch"], "Mapping[str, Tensor]"]


class AlgorithmConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every algorithm's section."""

    use: str
    """Name of the algorithm."""
    group_size: PositiveInt = 8
    """Samples of each prompt, n."""


@dataclass(frozen=True)
class Model:
    """One model of an algorithm."""

    trainable: bool = True


@dataclass(frozen=True)
class Loss:
    """A loss, unreduced: the engine reduces it, so that no split of the batch can change the gradient."""

    function: LossFunction
    reduction: Reduction


@dataclass(frozen=True)
class Call:
    """One node of the dataflow. Made by the functions below."""

    name: str
    op: Literal["generate", "score", "forward", "function", "train"]
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    model: str | None = None
    function: Function | None = None
    loss: Loss | None = None
    minibatches: int = 1
    """Optimizer steps a pass over the batch is split into; must divide the batch's groups."""
    epochs: int = 1
    """Passes over the batch."""


def generate(model: str = "actor") -> Call:
    """Sample the answers, in the ticket. Writes the keys of `GENERATED`."""
    return Call(f"generate({model})", "generate", ("prompt",), GENERATED, model)


def score() -> Call:
    """Score the answers, in the ticket. Writes `rewards`."""
    return Call("score", "score", ("tokens",), SCORED)


def forward(model: str, *, writes: str) -> Call:
    """Logprobs of the batch under a model's weights at the start of the step."""
    return Call(f"forward({model})", "forward", ("tokens",), (writes,), model)


def function(run: Function, *, reads: Sequence[str], writes: Sequence[str], name: str = "") -> Call:
    """A pure function of columns of the whole batch."""
    name = name or getattr(run, "__name__", "function")
    return Call(name, "function", tuple(reads), tuple(writes), function=run)


def train(model: str, loss: Loss, *, reads: Sequence[str], minibatches: int = 1, epochs: int = 1) -> Call:
    """Optimizer steps on a model: `epochs` passes, each in `minibatches` steps."""
    reads = ("tokens", "loss_mask", *reads)
    return Call(
        f"train({model})", "train", reads, (), model, loss=loss, minibatches=minibatches, epochs=epochs
    )


@dataclass(frozen=True)
class Group:
    """What the kernel knows of a finished group: one entry a sample."""

    rewards: tuple[float, ...]
    lengths: tuple[int, ...]
    """Tokens sampled."""


class Algorithm(Protocol):
    """Made in the kernel, where only its graph is read, and in every trainer, where it is run."""

    @property
    def models(self) -> Mapping[str, Model]:
        """The models by name; `actor` is the one that samples."""
        ...

    def calls(self) -> Sequence[Call]:
        """The dataflow, in any order."""
        ...

    def keep(self, group: Group) -> bool:
        """Whether to train on a finished group; False retires it as `filtered`. Asked in the kernel,
        once for each group, before any batch is made of it."""
        ...
