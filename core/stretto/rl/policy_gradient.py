"""The frame of policy-gradient algorithms: dataflow, proximal policy, correction, KL to a reference.

An algorithm of this family adds what its paper is about: its advantages and its objective.

    class Mine(PolicyGradient[MyConfig]):
        def advantages(self, batch): ...                        # (T,)
        def objective(self, logprobs, anchor, batch): ...       # (T,) loss, statistics

Importing this module imports no torch: the kernel reads the dataflow.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Generic, Literal, Protocol, TypeVar

import msgspec

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
from stretto.component import Context, NonNegativeFloat, PositiveFloat, PositiveInt, Problem
from stretto.rl.correction import CorrectionConfig, check_correction

if TYPE_CHECKING:
    from torch import Tensor

    from stretto.config import RunConfig
    from stretto.rl.batch import Batch

__all__ = [
    "ClippedConfig",
    "GroupRelative",
    "GroupRelativeConfig",
    "KLConfig",
    "KLEstimator",
    "PolicyConfig",
    "PolicyGradient",
    "check_objective",
    "check_policy",
    "clipped_surrogate",
]

KLEstimator = Literal["k1", "k2", "k3"]
"""See `stretto.rl.functional.kl_estimate`."""


class KLConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A penalty that keeps the policy near a frozen model, `reference`."""

    coef: NonNegativeFloat = 0.0
    """Weight of the KL. With 0 there is no reference model."""
    estimator: KLEstimator = "k3"
    """With d = log policy - log reference, by token: `k1` d, `k2` d²/2, `k3` exp(-d) - 1 + d."""
    where: Literal["loss", "reward"] = "loss"
    """`loss`: the current policy's KL is added to each token's loss, with its gradient. `reward`: the KL of
    the policy that sampled the token is taken off the rewards, before the advantages."""


class PolicyConfig(AlgorithmConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the sections of policy-gradient algorithms."""

    group_size: PositiveInt = 8
    """Samples of each prompt, n."""
    correction: CorrectionConfig = CorrectionConfig()
    """Off-policy correction."""
    kl: KLConfig = KLConfig()
    """KL to a reference model; none by default."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of an entropy bonus, against a policy that loses its entropy too soon; 0.001 is a start."""
    loss_mean: Reduction = "token"
    """`token`: every token of the batch counts alike; `sequence`: every answer does; `sequence_sum`: every
    answer, with the sum of its tokens instead of their mean."""
    loss_divisor: PositiveFloat = 1.0
    """Constant that the loss is divided by, such as Dr. GRPO's longest answer with `sequence_sum`."""
    minibatches: PositiveInt = 1
    """Optimizer steps that a batch is split into."""
    epochs: PositiveInt = 1
    """Passes over each batch."""


class ClippedConfig(PolicyConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the sections of algorithms with PPO's clipped surrogate."""

    eps_clip: NonNegativeFloat = 0.2
    """Half-width of the trust region around the policy that the ratio is taken to."""
    eps_clip_high: NonNegativeFloat | None = None
    """Its upper half, if it is to be wider (clip-higher); default `eps_clip`."""
    c_clip: Annotated[float, msgspec.Meta(gt=1)] | None = 3.0
    """Dual clip: largest ratio that counts for tokens of negative advantage. Null for no bound: then a few
    tokens that have become far more likely rule the gradient."""


ConfigT = TypeVar("ConfigT", bound=PolicyConfig)


class PolicyGradient(ABC, Generic[ConfigT]):
    """One trainable policy, `actor`; the kernel reads the dataflow, trainers run the arithmetic."""

    needs_proximal = False
    """Whether the proximal policy's logprobs are wanted even where they equal the current policy's."""
    advantage_reads: tuple[str, ...] = ()
    """Columns, written by `more_calls`, that the advantages read."""
    objective_reads: tuple[str, ...] = ()
    """Columns, written by `more_calls`, that the objective reads."""

    def __init__(self, config: ConfigT, context: Context) -> None:
        del context
        self.config = config
        # With one optimizer step on the batch, the proximal policy is the current one: no forward needed.
        several_updates = config.minibatches > 1 or config.epochs > 1
        in_loss = several_updates and config.correction.anchor == "proximal"
        self._has_proximal = self.needs_proximal or in_loss
        self._has_reference = config.kl.coef > 0
        self.kl_coef = config.kl.coef  # in this step: an algorithm with a controller moves it

    @property
    def models(self) -> Mapping[str, Model]:
        """One trainable policy, and the reference if there is a KL to it."""
        reference = {"reference": Model(trainable=False)} if self._has_reference else {}
        return {"actor": Model(), **reference}

    def calls(self) -> Sequence[Call]:
        """generate -> score -> advantages (and logprobs of other policies, if they are needed) -> train."""
        # Each once: an algorithm may read for itself what a KL in the reward reads too.
        own = (*self.penalty_reads, *self.advantage_reads)
        reads = dict.fromkeys(("rewards", "group", "sample", "loss_mask", *own))
        return [
            generate("actor", samples=self.config.group_size),
            score(),
            *self.forwards(),
            function(self.estimates, reads=tuple(reads), writes=("advantages",), name="advantages"),
            *self.more_calls(),
            self.train_actor(),
        ]

    def forwards(self) -> Sequence[Call]:
        """Logprobs of the proximal policy and of the reference, where they are needed."""
        proximal = [forward("actor", writes="proximal_logprobs")] if self._has_proximal else []
        reference = [forward("reference", writes="reference_logprobs")] if self._has_reference else []
        return [*proximal, *reference]

    def more_calls(self) -> Sequence[Call]:
        """Calls that write the columns of `advantage_reads` and `objective_reads`."""
        return ()

    def train_actor(self) -> Call:
        """Train the policy on `advantages`."""
        config = self.config
        written = [key for call in self.forwards() for key in call.writes]
        return train(
            "actor",
            Loss(
                self.loss,
                config.loss_mean,
                entropy_coef=config.entropy_coef,
                lr_scale=self.lr_scale,
            ),
            reads=("behaviour_logprobs", "advantages", *written, *self.objective_reads),
            minibatches=config.minibatches,
            epochs=config.epochs,
        )

    def keep(self, group: Group) -> bool:
        """Every group is trained on."""
        del group
        return True

    @property
    def penalty_reads(self) -> tuple[str, ...]:
        """Columns that the KL in the reward is computed from."""
        in_reward = self._has_reference and self.config.kl.where == "reward"
        return ("behaviour_logprobs", "reference_logprobs") if in_reward else ()

    def sampled_kl(self, batch: Batch) -> Tensor:
        """(T,) float32, estimate of KL(behaviour || reference) at each sampled token, for a KL in the reward;
        0 without one.

        The behaviour policy sampled the tokens, so of its KL the estimate has the right mean, and its
        logprobs are at hand.
        """
        import torch

        from stretto.rl.functional import kl_estimate

        mask = batch["loss_mask"]
        if not self.penalty_reads:
            return torch.zeros(len(mask), device=mask.device)
        behaviour, reference = batch["behaviour_logprobs"], batch["reference_logprobs"]
        return torch.where(mask, kl_estimate(behaviour, reference, self.config.kl.estimator), 0.0)

    def kl_penalty(self, batch: Batch) -> Tensor:
        """(T,) float32, what a KL in the reward takes off it at each sampled token; 0 without one."""
        return self.kl_coef * self.sampled_kl(batch)

    def estimates(self, batch: Batch) -> Mapping[str, Tensor]:
        """The column `advantages`, of rewards less the KL penalty of all the answer's tokens.

        An algorithm that rewards tokens one by one overrides this and leaves each penalty at its token.
        """
        from stretto.rl.functional import sequence_sum

        penalty = sequence_sum(self.kl_penalty(batch), batch.sequence_index(), len(batch))  # (S,)
        penalised = batch.with_columns({"rewards": batch["rewards"] - penalty})
        return {"advantages": self.advantages(penalised)}

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
        """The objective around its anchor, each token weighted by the correction, and a KL in the loss, which
        is not weighted: (T,), and statistics.

        They are `ratio` to the anchor, `advantage`, `importance_weight`, `masked_fraction`, the share of
        tokens of weight 0, `behaviour_kl`, see `stretto.rl.functional.bounded_kl`, and `reference_kl`, the KL
        estimate where there is a reference.
        """
        import torch

        from stretto.rl.functional import bounded_kl, kl_estimate

        correction, kl = self.config.correction, self.config.kl
        behaviour = batch["behaviour_logprobs"]
        proximal = batch["proximal_logprobs"] if self._has_proximal else logprobs.detach()
        anchor = behaviour if correction.anchor == "behaviour" else proximal
        loss, statistics = self.objective(logprobs, anchor, batch)
        weight = correction.weights(proximal, behaviour, batch)
        loss, statistics = loss * weight, dict(statistics)
        if self._has_reference:
            penalised = logprobs if kl.where == "loss" else behaviour
            estimate = kl_estimate(penalised, batch["reference_logprobs"], kl.estimator)
            statistics["reference_kl"] = estimate.detach()
            if kl.where == "loss":
                loss = loss + self.kl_coef * estimate
        return loss / self.config.loss_divisor, {
            **statistics,
            "ratio": torch.exp(logprobs.detach() - anchor),
            "advantage": batch["advantages"],
            "importance_weight": weight,
            "masked_fraction": (weight == 0).float(),
            "behaviour_kl": bounded_kl(logprobs.detach(), behaviour),
        }

    def lr_scale(self, statistics: Mapping[str, float]) -> float:
        """Factor of the learning rate of an optimizer step on a batch with these statistics; see
        `CorrectionConfig.target_kl`."""
        target, kl = self.config.correction.target_kl, statistics["behaviour_kl"]
        return target / kl if target is not None and kl > target else 1.0


class _Clip(Protocol):
    """The fields of `ClippedConfig` that belong to it alone."""

    @property
    def eps_clip(self) -> float: ...
    @property
    def eps_clip_high(self) -> float | None: ...
    @property
    def c_clip(self) -> float | None: ...


def clipped_surrogate(
    config: _Clip, logprobs: Tensor, anchor: Tensor, advantages: Tensor
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """PPO's surrogate with the clips of a section, (T,) from (T,) each, and the metrics `clipped` and
    `dual_clipped`; see `stretto.rl.functional.clipped_objective`."""
    from stretto.rl.functional import clipped_objective

    loss, clipped, dual_clipped = clipped_objective(
        logprobs,
        anchor,
        advantages,
        eps_clip=config.eps_clip,
        eps_clip_high=config.eps_clip_high,
        c_clip=config.c_clip,
    )
    return loss, {"clipped": clipped.float(), "dual_clipped": dual_clipped.float()}


class GroupRelativeConfig(PolicyConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the sections of algorithms whose advantage is GRPO's."""

    group_reward_norm: bool = True
    """Divide group-centred rewards by the group's standard deviation."""


GroupRelativeT = TypeVar("GroupRelativeT", bound=GroupRelativeConfig)


class GroupRelative(PolicyGradient[GroupRelativeT], Generic[GroupRelativeT]):
    """A policy gradient whose advantage is the answer's group-relative reward (GRPO eq. 3)."""

    def advantages(self, batch: Batch) -> Tensor:
        """The group-relative reward of its answer for every sampled token, (T,) float32."""
        from stretto.rl.functional import group_normalise

        relative = group_normalise(
            batch["rewards"], batch["group"], batch["sample"], std=self.config.group_reward_norm
        )
        return relative[batch.sequence_index()] * batch["loss_mask"]


def check_objective(config: PolicyConfig, run: RunConfig) -> Iterator[Problem]:
    """What can be wrong with the loss of any algorithm of the family: for `Component.check`."""
    yield from check_correction(config.correction, run)
    if config.kl.coef and config.kl.where == "loss" and config.kl.estimator == "k1":
        yield Problem(
            "algorithm.kl.estimator",
            "the mean of k1's gradient is 0, so in the loss it keeps the policy near nothing; use k2 or k3, "
            "or where: reward",
            "warning",
        )


def check_policy(config: PolicyConfig, run: RunConfig) -> Iterator[Problem]:
    """The same for one whose advantages compare the samples of a group."""
    yield from check_objective(config, run)
    if config.group_size == 1:
        yield Problem("algorithm.group_size", "1 leaves every advantage 0; expected at least 2")
