"""The contract of algorithms: the models that they need, and their dataflow of calls.

A call is one model function call (or a pure function) with the keys that it reads and writes; the keys define
the edges of the graph. The kernel orders and dispatches calls by name and never runs their code, so the
module of an algorithm must not import torch at import time: import it in the functions that compute. Worker
groups run the code with a `stretto.rl.batch.Batch` that holds the keys that the call reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, runtime_checkable

import msgspec

from stretto.component import Head

if TYPE_CHECKING:
    from torch import Tensor

    from stretto.dataset import Row
    from stretto.rl.batch import Batch
    from stretto.tokenizer import Tokenizer

__all__ = [
    "EQUAL",
    "WHOLE",
    "Algorithm",
    "AlgorithmConfig",
    "Call",
    "Encode",
    "Encoded",
    "Function",
    "Group",
    "Loss",
    "LossFunction",
    "Model",
    "Reduction",
    "Stateful",
    "are_equal",
    "forward",
    "function",
    "generate",
    "read",
    "score",
    "train",
]

# The columns that a rollout writes; every later call may read these keys.
#   tokens              (T,) int64    prompt and answer
#   loss_mask           (T,) bool     tokens that the policy sampled and that are trained on
#   behaviour_logprobs  (T,) float32  logprobs that the engine reported; 0 where loss_mask is False
#   versions            (T,) int64    policy version that sampled the token; -1 where not sampled
#   truncated           (S,) bool     the answer ended at its token limit
#   group               (S,) int64    sequences of one prompt share a number
#   sample              (S,) int64    sequences of a group that are pieces of one sample share a number
GENERATED = ("tokens", "loss_mask", "behaviour_logprobs", "versions", "truncated", "group", "sample")
#   rewards             (S,) float64
SCORED = ("rewards",)
# The columns that `read` makes from rows of the dataset, without a rollout. `encode` sets the loss mask.
READ = ("tokens", "loss_mask", "group")
# The column that the engine adds for a loss with `whole_vocabulary`.
#   whole_logprobs      (T,) float32
WHOLE = "whole_logprobs"

Reduction = Literal["token", "sequence", "sequence_sum"]
"""How a loss is averaged over the whole batch of one optimizer step:
`token`: mean over all trained tokens, with equal weights; `sequence`: mean over sequences of the mean over
their tokens; `sequence_sum`: mean over sequences of the sum over their tokens."""

# (T,) current output of the model's head, with gradient, and the batch -> (T,) loss of each token, and (T,)
# statistics. The engine averages each statistic over the trained tokens; of a statistic whose name ends in
# `_max` it takes the maximum.
LossFunction = Callable[["Tensor", "Batch"], "tuple[Tensor, Mapping[str, Tensor]]"]
# Statistics of the batch of an optimizer step, before the step, and the factor of the previous step (1 for
# the first step) -> factor of the step's learning rate, >= 0.
LearningRateScale = Callable[[Mapping[str, float], float], float]
# The batch -> the columns that the call writes.
Function = Callable[["Batch"], "Mapping[str, Tensor]"]


class Encoded(NamedTuple):
    """One sequence made from a row of the dataset."""

    tokens: Sequence[int]
    """Token ids, at least one."""
    loss_mask: Sequence[bool]
    """Whether each token is trained on; as long as `tokens`."""


# A row, the number of the sequence to make from it (0 .. samples - 1), and the tokenizer -> that sequence.
Encode = Callable[["Row", int, "Tokenizer"], Encoded]


class AlgorithmConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every algorithm's section."""

    use: str
    """Name of the algorithm."""


@dataclass(frozen=True)
class Model:
    """One model of an algorithm."""

    trainable: bool = True
    head: Head = "policy"


@dataclass(frozen=True)
class Loss:
    """A loss per token. The engine reduces it, so that no split of the batch can change the gradient."""

    function: LossFunction
    reduction: Reduction
    unit: Literal["sequence", "group"] = "sequence"
    """What the function must receive as a whole. With `sequence`, the engine may split the sequences of a
    group over several calls; with `group` it keeps them together."""
    entropy_coef: float = 0.0
    """Weight of an entropy bonus: at each trained token, the engine subtracts this weight times the entropy,
    in nats, of the distribution that the token was drawn from. Only for a `policy` head."""
    whole_vocabulary: bool = False
    """Whether the function reads the column `WHOLE`. The batch has this column if the sampler did not draw
    from softmax(logits / temperature). The function's first argument then has the logprobs of the sampler's
    distribution, and `WHOLE` has the logprobs over the whole vocabulary, with gradient."""
    summarise: Callable[[Mapping[str, float]], Mapping[str, float]] = dict
    """Converts the means of the function's statistics over the trained tokens to the step's statistics, for a
    value that is not itself such a mean."""
    lr_scale: LearningRateScale | None = None
    """Gets the step's statistics, and returns the factor of the learning rate of an optimizer step. The
    engine keeps the factor from step to step and in checkpoints. None leaves the learning rate unchanged."""


@dataclass(frozen=True)
class Call:
    """One node of the dataflow. The functions below make calls."""

    name: str
    op: Literal["generate", "score", "read", "forward", "function", "train"]
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    model: str | None = None
    function: Function | None = None
    loss: Loss | None = None
    encode: Encode | None = None
    samples: int = 0
    """Number of sequences that `generate` or `read` makes from each row."""
    minibatches: int = 1
    """Number of optimizer steps in one pass over the batch; must divide the number of groups in the batch."""
    epochs: int = 1
    """Number of passes over the batch."""


def generate(model: str = "actor", *, samples: int) -> Call:
    """Sample `samples` answers to each prompt, in the ticket. Writes the keys of `GENERATED`."""
    return Call(f"generate({model})", "generate", ("prompt",), GENERATED, model, samples=samples)


def read(encode: Encode, *, samples: int = 1) -> Call:
    """Make the sequences from the rows of the dataset, without sampling: `samples` sequences of each row form
    a group. Writes the keys of `READ`. The kernel calls `keep` for these groups too, with all rewards 0."""
    return Call("read", "read", ("prompt",), READ, encode=encode, samples=samples)


def score() -> Call:
    """Score the answers, in the ticket. Writes `rewards`."""
    return Call("score", "score", ("tokens",), SCORED)


def forward(model: str, *, writes: str) -> Call:
    """Compute the output of a model's head for the batch, with the weights at the start of the step: (T,)
    float32."""
    return Call(f"forward({model})", "forward", ("tokens",), (writes,), model)


def function(run: Function, *, reads: Sequence[str], writes: Sequence[str], name: str = "") -> Call:
    """Call a pure function of columns of the whole batch."""
    name = name or getattr(run, "__name__", "function")
    return Call(name, "function", tuple(reads), tuple(writes), function=run)


def train(model: str, loss: Loss, *, reads: Sequence[str], minibatches: int = 1, epochs: int = 1) -> Call:
    """Train a model: `epochs` passes over the batch, each with `minibatches` optimizer steps."""
    reads = ("tokens", "loss_mask", *reads)
    return Call(
        f"train({model})", "train", reads, (), model, loss=loss, minibatches=minibatches, epochs=epochs
    )


EQUAL = 8 * 2.0**-24
"""Rewards that differ by at most this share of the largest reward are equal. Rounding errors are smaller: of
sums in another order, and of a value that was converted to float32."""


def are_equal(rewards: Sequence[float]) -> bool:
    """Return whether the rewards of a group are equal, so that there is nothing to learn from it."""
    return max(rewards) - min(rewards) <= EQUAL * max(map(abs, rewards))


@dataclass(frozen=True)
class Group:
    """The facts that the kernel knows about a finished group: one entry for each sample."""

    rewards: tuple[float, ...]
    lengths: tuple[int, ...]
    """Number of sampled tokens of each sample."""


class Algorithm(Protocol):
    """An algorithm. The kernel makes it and only reads its graph; every trainer makes it and runs its
    calls."""

    @property
    def models(self) -> Mapping[str, Model]:
        """The models by name. The model that samples is `actor`."""
        ...

    def calls(self) -> Sequence[Call]:
        """Return the calls of the dataflow, in any order."""
        ...

    def keep(self, group: Group) -> bool:
        """Return whether to train on a finished group; False retires it as `filtered`. The kernel calls this
        once for each group, before it puts the group into a batch."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """Second contract of an algorithm that changes its own numbers during a run, such as the coefficient of a
    controller. Its functions run in one process, and stretto calls these methods there."""

    def state(self) -> Mapping[str, float]:
        """Return the numbers to write into a checkpoint."""
        ...

    def restore(self, state: Mapping[str, float]) -> None:
        """Continue from the result of `state`; from the beginning if it is empty."""
        ...
