"""The contract of algorithms: the models they need and their dataflow of calls.

A call is one model function call (or a pure function) with the keys it reads and writes; the edges
of the graph follow from the keys. The kernel orders and dispatches calls by name and never runs
their code, so an algorithm's module must not import torch at import time: import it where the
arithmetic is. Worker groups run the code, with a `stretto.rl.batch.Batch` that holds the keys read.
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
    from stretto.models.tokenizer import Tokenizer
    from stretto.rl.batch import Batch

__all__ = [
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
    "forward",
    "function",
    "generate",
    "read",
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
#   sample              (S,) int64    sequences of a group that are pieces of one sample share a number
GENERATED = ("tokens", "loss_mask", "behaviour_logprobs", "versions", "truncated", "group", "sample")
#   rewards             (S,) float32
SCORED = ("rewards",)
# What `read` makes of rows of the dataset, instead of a rollout: the loss mask is what `encode` says.
READ = ("tokens", "loss_mask", "group")

Reduction = Literal["token", "sequence", "sequence_sum"]
"""What a loss is the mean of, always over the whole batch of one optimizer step:
`token`: all trained tokens, each alike; `sequence`: sequences, each the mean of its tokens;
`sequence_sum`: sequences, each the sum of its tokens."""

# (T,) what the model's head says now, with gradient, and the batch -> (T,) loss of each token, and (T,)
# statistics to be averaged over the trained tokens; of one whose name ends in `_max`, the largest is taken.
LossFunction = Callable[["Tensor", "Batch"], "tuple[Tensor, Mapping[str, Tensor]]"]
# Statistics of the batch of an optimizer step, before that step -> factor of its learning rate, >= 0.
LearningRateScale = Callable[[Mapping[str, float]], float]
# The batch -> the columns written.
Function = Callable[["Batch"], "Mapping[str, Tensor]"]


class Encoded(NamedTuple):
    """One sequence made of a row of the dataset."""

    tokens: Sequence[int]
    """Ids, at least one."""
    loss_mask: Sequence[bool]
    """Which of them are trained on; as many."""


# A row, the number of the sequence wanted of it (0 .. samples - 1), and the tokenizer -> that sequence.
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
    """A loss, unreduced: the engine reduces it, so that no split of the batch can change the gradient."""

    function: LossFunction
    reduction: Reduction
    unit: Literal["sequence", "group"] = "sequence"
    """What the function has to see whole: sequences of one group are split up, or not."""
    entropy_coef: float = 0.0
    """Weight of an entropy bonus: the engine subtracts this times the entropy, in nats, of the policy's whole
    distribution at each trained token. Only of a `policy` head."""
    lr_scale: LearningRateScale | None = None
    """What the learning rate of an optimizer step is multiplied by; None leaves it as it is."""


@dataclass(frozen=True)
class Call:
    """One node of the dataflow. Made by the functions below."""

    name: str
    op: Literal["generate", "score", "read", "forward", "function", "train"]
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    model: str | None = None
    function: Function | None = None
    loss: Loss | None = None
    encode: Encode | None = None
    samples: int = 0
    """Sequences of each row that `generate` or `read` makes."""
    minibatches: int = 1
    """Optimizer steps a pass over the batch is split into; must divide the batch's groups."""
    epochs: int = 1
    """Passes over the batch."""


def generate(model: str = "actor", *, samples: int) -> Call:
    """Sample `samples` answers to each prompt, in the ticket. Writes the keys of `GENERATED`."""
    return Call(f"generate({model})", "generate", ("prompt",), GENERATED, model, samples=samples)


def read(encode: Encode, *, samples: int = 1) -> Call:
    """Take the sequences from the rows of the dataset, with nothing sampled: `samples` of each row, which
    are a group. Writes the keys of `READ`; `keep` is asked as of any group, its rewards all 0."""
    return Call("read", "read", ("prompt",), READ, encode=encode, samples=samples)


def score() -> Call:
    """Score the answers, in the ticket. Writes `rewards`."""
    return Call("score", "score", ("tokens",), SCORED)


def forward(model: str, *, writes: str) -> Call:
    """What a model's head says of the batch, with its weights at the start of the step: (T,) float32."""
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
        """The models by name; the one that samples is `actor`."""
        ...

    def calls(self) -> Sequence[Call]:
        """The dataflow, in any order."""
        ...

    def keep(self, group: Group) -> bool:
        """Whether to train on a finished group; False retires it as `filtered`. Asked in the kernel,
        once for each group, before any batch is made of it."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """An algorithm that learns numbers of its own, such as a controller's coefficient, is one of these too.
    Its functions run in one process, and that one is asked."""

    def state(self) -> Mapping[str, float]:
        """What is written into a checkpoint."""
        ...

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on from what `state` gave; from the beginning, if it is empty."""
        ...
