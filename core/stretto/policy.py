"""The frame of policy-gradient algorithms: their dataflow, the proximal policy, and the correction.

An algorithm of this family adds what its paper is about: its advantages and its objective.

    class Mine(PolicyGradient[MyConfig]):
        def advantages(self, batch): ...                        # (T,)
        def objective(self, logprobs, anchor, batch): ...       # (T,) loss, statistics

Importing this module imports no torch: the kernel reads the dataflow.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from stretto.algorithm import (
    AlgorithmConfig,
    Call,
    Group,
    Loss,
    Model,
    Reduction,
    forward,
    function,
    generate,
    score,
    train,
)
from stretto.component import Context, PositiveFloat, PositiveInt, Problem
from stretto.correction import CorrectionConfig, check_correction

if TYPE_CHECKING:
    from torch import Tensor

    from stretto.batch import Batch
    from stretto.config import RunConfig

__all__ = ["GroupRelative", "GroupRelativeConfig", "PolicyConfig", "PolicyGradient", "check_policy"]


class PolicyConfig(AlgorithmConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the sections of policy-gradient algorithms."""

    correction: CorrectionConfig = CorrectionConfig()
    """Off-policy correction."""
    loss_mean: Reduction = "token"
    """`token`: every token of the batch counts alike; `sequence`: every answer does; `sequence_sum`: every
    answer, with the sum of its tokens instead of their mean."""
    loss_divisor: PositiveFloat = 1.0
    """Constant that the loss is divided by, such as Dr. GRPO's longest answer with `sequence_sum`."""
    minibatches: PositiveInt = 1
    """Optimizer steps that a batch is split into."""
    epochs: PositiveInt = 1
    """Passes over each batch."""


ConfigT = TypeVar("ConfigT", bound=PolicyConfig)


class PolicyGradient(ABC, Generic[ConfigT]):
    """One trainable policy, `actor`; the kernel reads the dataflow, trainers run the arithmetic."""

    needs_proximal = False
    """Whether the proximal policy's logprobs are wanted even where they equal the current policy's."""
    objective_reads: tuple[str, ...] = ()
    """Columns, written by `more_calls`, that the objective reads."""

    def __init__(self, config: ConfigT, context: Context) -> None:
        del context
        self.config = config
        # With one optimizer step on the batch, the proximal policy is the current one: no forward needed.
        one_update = config.minibatches == config.epochs == 1
        self._has_proximal = self.needs_proximal or not one_update

    @property
    def models(self) -> Mapping[str, Model]:
        """One trainable policy."""
        return {"actor": Model(trainable=True)}

    def calls(self) -> Sequence[Call]:
        """generate -> score -> advantages (and proximal logprobs, if they are needed) -> train."""
        config = self.config
        proximal = ("proximal_logprobs",) if self._has_proximal else ()
        return [
            generate("actor"),
            score(),
            *(forward("actor", writes=key) for key in proximal),
            function(
                lambda batch: {"advantages": self.advantages(batch)},
                reads=("rewards", "group", "loss_mask"),
                writes=("advantages",),
                name="advantages",
            ),
            *self.more_calls(),
            train(
                "actor",
                Loss(self.loss, config.loss_mean),
                reads=("behaviour_logprobs", "advantages", *proximal, *self.objective_reads),
                minibatches=config.minibatches,
                epochs=config.epochs,
            ),
        ]

    def more_calls(self) -> Sequence[Call]:
        """Calls that write the columns of `objective_reads`."""
        return ()

    def keep(self, group: Group) -> bool:
        """Every group is trained on."""
        del group
        return True

    @abstractmethod
    def advantages(self, batch: Batch) -> Tensor:
        """(T,) float32 from the whole batch: advantage of every trained token, 0 elsewhere."""

    @abstractmethod
    def objective(
        self, logprobs: Tensor, anchor: Tensor, batch: Batch
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Loss (T,) of each token, to be minimised, and statistics (T,) each.

        Args:
            logprobs: (T,) of the current policy, with gradient.
            anchor: (T,) of the policy that the ratio is taken to, without.
            batch: has `advantages`; sequences are whole, so sums over them are exact.
        """

    def loss(self, logprobs: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The objective around its anchor, each token weighted by the correction: (T,), and statistics:
        `ratio` to the anchor, `advantage`, `behaviour_weight`, and `left_out`, the share of weight 0."""
        import torch

        correction = self.config.correction
        behaviour = batch["behaviour_logprobs"]
        proximal = batch["proximal_logprobs"] if self._has_proximal else logprobs.detach()
        anchor = behaviour if correction.anchor == "behaviour" else proximal
        loss, statistics = self.objective(logprobs, anchor, batch)
        weight = correction.weights(proximal, behaviour, batch)
        return loss * weight / self.config.loss_divisor, {
            **statistics,
            "ratio": torch.exp(logprobs.detach() - anchor),
            "advantage": batch["advantages"],
            "behaviour_weight": weight,
            "left_out": (weight == 0).float(),
        }


class GroupRelativeConfig(PolicyConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the sections of algorithms whose advantage is GRPO's."""

    group_reward_norm: bool = True
    """Divide group-centred rewards by the group's standard deviation."""


GroupRelativeT = TypeVar("GroupRelativeT", bound=GroupRelativeConfig)


class GroupRelative(PolicyGradient[GroupRelativeT], Generic[GroupRelativeT]):
    """A policy gradient whose advantage is the answer's group-relative reward (GRPO eq. 3)."""

    def advantages(self, batch: Batch) -> Tensor:
        """The group-relative reward of its answer for every sampled token, (T,) float32."""
        from stretto.functional import group_normalise

        relative = group_normalise(batch["rewards"], batch["group"], std=self.config.group_reward_norm)
        return relative[batch.sequence_index()] * batch["loss_mask"]


def check_policy(config: PolicyConfig, run: RunConfig) -> Iterator[Problem]:
    """What can be wrong with any algorithm of the family: for `Component.check`."""
    yield from check_correction(config.correction, run)
    if config.group_size == 1:
        yield Problem("algorithm.group_size", "1 leaves every advantage 0; expected at least 2")
