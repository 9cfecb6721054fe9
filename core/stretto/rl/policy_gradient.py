"""The base class of policy-gradient algorithms: dataflow, proximal policy, correction, KL to a reference.

An algorithm of this family adds its advantages and its objective.

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

from stretto import algorithm
from stretto.component import Context, NonNegativeFloat, PositiveFloat, PositiveInt, Problem
from stretto.rl.correction import CorrectionConfig, check_correction

if TYPE_CHECKING:
    from torch import Tensor

    from stretto.config import RunConfig
    from stretto.rl.batch import Batch

__all__ = [
    "ClippedConfig",
    "ClippedSurrogate",
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
    """Weight of the KL penalty. 0: no penalty and no reference model."""
    estimator: KLEstimator = "k3"
    """Estimate of the KL at each token, with d = log policy - log reference: `k1` d, `k2` d²/2,
    `k3` exp(-d) - 1 + d."""
    where: Literal["loss", "reward"] = "loss"
    """Where the penalty applies. `loss`: the KL of the current policy is added to each token's loss, with its
    gradient. `reward`: the KL of the policy that sampled the token is subtracted from the rewards, before the
    advantages are computed."""


class PolicyConfig(algorithm.AlgorithmConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the sections of policy-gradient algorithms."""

    group_size: PositiveInt = 8
    """Number of samples of each prompt, n."""
    correction: CorrectionConfig = CorrectionConfig()
    """Off-policy correction."""
    kl: KLConfig = KLConfig()
    """KL penalty to a reference model; none by default."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of an entropy bonus, for a policy that loses its entropy too early. Start with 0.001."""
    loss_mean: algorithm.Reduction = "token"
    """Averaging of the loss. `token`: the mean over all tokens of the batch. `sequence`: the mean over
    answers of each answer's token mean. `sequence_sum`: the mean over answers of each answer's token sum."""
    loss_divisor: PositiveFloat = 1.0
    """Constant by which the loss is divided. Dr. GRPO uses the maximum answer length with `sequence_sum`."""
    minibatches: PositiveInt = 1
    """Number of minibatches, one optimizer step each, into which a batch is split."""
    epochs: PositiveInt = 1
    """Number of passes over each batch."""


class ClippedConfig(PolicyConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the sections of algorithms with PPO's clipped surrogate."""

    eps_clip: NonNegativeFloat = 0.2
    """Clip range of the ratio: 1 - eps_clip to 1 + eps_clip."""
    eps_clip_high: NonNegativeFloat | None = None
    """Upper clip range of the ratio, 1 + eps_clip_high, if it is wider than the lower one (clip-higher).
    null: `eps_clip`."""
    c_clip: Annotated[float, msgspec.Meta(gt=1)] | None = 3.0
    """Dual clip: maximum ratio for tokens of negative advantage. null: no bound; then a few tokens that have
    become far more likely dominate the gradient."""


ConfigT = TypeVar("ConfigT", bound=PolicyConfig)


class PolicyGradient(ABC, Generic[ConfigT]):
    """An algorithm with one trainable policy, `actor`. The kernel reads the dataflow; trainers compute it."""

    needs_proximal = False
    """Compute the proximal policy's logprobs even when they equal the current policy's."""
    advantage_reads: tuple[str, ...] = ()
    """Columns that the advantages read, besides rewards, group, sample and loss mask."""
    objective_reads: tuple[str, ...] = ()
    """Columns written by `more_calls` that the objective reads, besides logprobs and advantages."""

    def __init__(self, config: ConfigT, context: Context) -> None:
        del context
        self.config = config
        # With one optimizer step on the batch, the proximal policy is the current one: no forward needed.
        several_updates = config.minibatches > 1 or config.epochs > 1
        in_loss = several_updates and config.correction.anchor == "proximal"
        self._has_proximal = self.needs_proximal or in_loss
        self._has_reference = config.kl.coef > 0
        self.kl_coef = config.kl.coef  # for this step: an algorithm with a controller changes it

    @property
    def models(self) -> Mapping[str, algorithm.Model]:
        """The trainable policy, and the reference model if `kl.coef` is not 0."""
        reference = {"reference": algorithm.Model(trainable=False)} if self._has_reference else {}
        return {"actor": algorithm.Model(), **reference}

    def calls(self) -> Sequence[algorithm.Call]:
        """Return generate -> score -> advantages (and logprobs of other policies, if needed) -> train."""
        # A dict removes duplicates: `advantage_reads` may repeat names of `penalty_reads`.
        more_columns = (*self.penalty_reads, *self.advantage_reads)
        reads = dict.fromkeys(("rewards", "group", "sample", "loss_mask", *more_columns))
        return [
            algorithm.generate("actor", samples=self.config.group_size),
            algorithm.score(),
            *self.forwards(),
            algorithm.function(self.estimates, reads=tuple(reads), writes=("advantages",), name="advantages"),
            *self.more_calls(),
            self.train_actor(),
        ]

    def forwards(self) -> Sequence[algorithm.Call]:
        """Return the calls for logprobs of the proximal policy and of the reference, where needed."""
        proximal = [algorithm.forward("actor", writes="proximal_logprobs")] if self._has_proximal else []
        reference = (
            [algorithm.forward("reference", writes="reference_logprobs")] if self._has_reference else []
        )
        return [*proximal, *reference]

    def more_calls(self) -> Sequence[algorithm.Call]:
        """Return the calls after the advantages, which write `objective_reads`; none by default."""
        return ()

    def train_actor(self) -> algorithm.Call:
        """Return the call that trains the policy on `advantages`."""
        config = self.config
        forward_columns = [key for call in self.forwards() for key in call.writes]
        return algorithm.train(
            "actor",
            algorithm.Loss(
                self.loss,
                config.loss_mean,
                entropy_coef=config.entropy_coef,
                whole_vocabulary=self._has_reference and config.kl.where == "loss",
                summarise=with_sample_sizes,
                lr_scale=self.lr_scale,
            ),
            reads=("behaviour_logprobs", "advantages", *forward_columns, *self.objective_reads),
            minibatches=config.minibatches,
            epochs=config.epochs,
        )

    def keep(self, group: algorithm.Group) -> bool:
        """Return True: train on every group."""
        del group
        return True

    @property
    def penalty_reads(self) -> tuple[str, ...]:
        """Columns from which the KL penalty in the reward is computed; none without that penalty."""
        in_reward = self._has_reference and self.config.kl.where == "reward"
        return ("behaviour_logprobs", "reference_logprobs") if in_reward else ()

    def sampled_kl(self, batch: Batch) -> Tensor:
        """Return the estimate of KL(behaviour || reference) at each sampled token, (T,) float32; all 0
        if the reward has no KL penalty.

        The behaviour policy sampled the tokens, so the estimate of its KL has the right mean, and its
        logprobs are already in the batch.
        """
        import torch

        from stretto.rl.functional import kl_estimate

        mask = batch["loss_mask"]
        if not self.penalty_reads:
            return torch.zeros(len(mask), device=mask.device)
        behaviour, reference = batch["behaviour_logprobs"], batch["reference_logprobs"]
        return torch.where(mask, kl_estimate(behaviour, reference, self.config.kl.estimator), 0.0)

    def kl_penalty(self, batch: Batch) -> Tensor:
        """Return the penalty that the reward loses at each sampled token, (T,) float32; 0 without one."""
        return self.kl_coef * self.sampled_kl(batch)

    def estimates(self, batch: Batch) -> Mapping[str, Tensor]:
        """Compute the column `advantages` from the rewards minus the KL penalty of all the answer's tokens.

        An algorithm with a reward for each token overrides this and keeps each penalty at its token.
        """
        from stretto.rl.functional import sequence_sum

        penalty = sequence_sum(self.kl_penalty(batch), batch.sequence_index(), len(batch))  # (S,)
        penalised = batch.with_columns({"rewards": batch["rewards"] - penalty})
        return {"advantages": self.advantages(penalised).float()}

    @abstractmethod
    def advantages(self, batch: Batch) -> Tensor:
        """Compute the advantages of the whole batch, (T,) float32; 0 for tokens that are not trained."""

    @abstractmethod
    def objective(
        self, logprobs: Tensor, anchor: Tensor, batch: Batch
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Compute the loss of each token, (T,), to be minimised, and statistics, (T,) each.

        Args:
            logprobs: (T,) logprobs of the current policy, with gradient.
            anchor: (T,) logprobs of the policy in the denominator of the ratio, without gradient.
            batch: has `advantages`; sequences are whole, so sums over them are exact.
        """

    def loss(self, logprobs: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Compute the loss of each token, (T,), and statistics, (T,) each.

        The correction weights the objective of each token. It does not weight a KL in the loss.

        The statistics are those of the objective, `ratio` to the anchor, `advantage`, `importance_weight`,
        `masked_fraction` (1 for tokens of weight 0), `behaviour_kl` (see `stretto.rl.functional.bounded_kl`),
        with a reference model `reference_kl`, the KL estimate, and the moments for `with_sample_sizes`.
        """
        import torch

        from stretto.rl.functional import bounded_kl, kl_estimate, moments_of_ratios

        correction, kl = self.config.correction, self.config.kl
        behaviour = batch["behaviour_logprobs"]
        proximal = batch["proximal_logprobs"] if self._has_proximal else logprobs.detach()
        anchor = behaviour if correction.anchor == "behaviour" else proximal
        loss, statistics = self.objective(logprobs, anchor, batch)
        weight = correction.weights(proximal, behaviour, batch)
        loss, statistics = loss * weight, dict(statistics)
        if self._has_reference:
            kl_logprobs = logprobs if kl.where == "loss" else behaviour
            if kl.where == "loss" and algorithm.WHOLE in batch:
                kl_logprobs = batch[algorithm.WHOLE]
            estimate = kl_estimate(kl_logprobs, batch["reference_logprobs"], kl.estimator)
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
            **moments_of_ratios(
                logprobs.detach(), behaviour, batch["loss_mask"], batch.sequence_index(), len(batch)
            ),
        }

    def lr_scale(self, statistics: Mapping[str, float], former: float) -> float:
        """Return the factor for the learning rate of a step; see `CorrectionConfig.lr_scale`."""
        return self.config.correction.lr_scale(statistics, former)


def with_sample_sizes(means: Mapping[str, float]) -> dict[str, float]:
    """Return a step's statistics with `ess` and `ess_token` instead of the moments of the ratios (see
    `stretto.rl.functional.moments_of_ratios`).

    The effective sample size of n weights w, as a share of n, is (Σ w)² / (n Σ w²), Kish 1965: 1 if all
    weights are equal. w is the ratio current / behaviour, before any clip or truncation: the ratio of one
    token for `ess_token`, and the product over a sequence's trained tokens for `ess`.
    """
    figures = {name: value for name, value in means.items() if not name.startswith("moment/")}
    if len(figures) == len(means):
        return figures
    moments = {name.removeprefix("moment/"): value for name, value in means.items()}
    figures["ess_token"] = moments["token"] ** 2 / moments["token_square"]
    figures["ess"] = moments["sequence"] ** 2 / (moments["sequences"] * moments["sequence_square"])
    return figures


class _Clip(Protocol):
    @property
    def eps_clip(self) -> float: ...
    @property
    def eps_clip_high(self) -> float | None: ...
    @property
    def c_clip(self) -> float | None: ...


def clipped_surrogate(
    config: _Clip, logprobs: Tensor, anchor: Tensor, advantages: Tensor
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Compute PPO's surrogate loss, (T,), with the clip ranges of `config`, and the metrics `clipped` and
    `dual_clipped`. Each input is (T,); see `stretto.rl.functional.clipped_objective`."""
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


ClippedT = TypeVar("ClippedT", bound=ClippedConfig)


class ClippedSurrogate(PolicyGradient[ClippedT], Generic[ClippedT]):
    """A policy gradient whose objective is PPO's clipped surrogate."""

    def objective(
        self, logprobs: Tensor, anchor: Tensor, batch: Batch
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the clipped and dual-clipped surrogate, (T,)."""
        return clipped_surrogate(self.config, logprobs, anchor, batch["advantages"])


class GroupRelativeConfig(PolicyConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the sections of algorithms whose advantage is GRPO's."""

    group_reward_norm: bool = True
    """Divide the group-centred rewards by the standard deviation of the group's rewards."""


GroupRelativeT = TypeVar("GroupRelativeT", bound=GroupRelativeConfig)


class GroupRelative(PolicyGradient[GroupRelativeT], Generic[GroupRelativeT]):
    """A policy gradient whose advantage is the answer's group-relative reward (GRPO eq. 3)."""

    def advantages(self, batch: Batch) -> Tensor:
        """Compute for every sampled token the group-relative reward of its answer, (T,) float32."""
        from stretto.rl.functional import group_normalise

        relative = group_normalise(
            batch["rewards"], batch["group"], batch["sample"], std=self.config.group_reward_norm
        )
        return relative[batch.sequence_index()] * batch["loss_mask"]


def check_objective(config: PolicyConfig, run: RunConfig) -> Iterator[Problem]:
    """Yield problems of the loss of any policy-gradient algorithm; call it from `Component.check`."""
    yield from check_correction(config.correction, run)
    if config.kl.coef and config.kl.where == "reward" and run.sampling.reshapes:
        yield Problem(
            "algorithm.kl.where",
            "is 'reward', which needs the sampler's logprobs over the whole vocabulary, but with top_p, "
            "top_k, min_p or logit_bias engines report those of what they drew from; use where: loss",
        )
    if config.kl.coef and config.kl.where == "loss" and config.kl.estimator == "k1":
        yield Problem(
            "algorithm.kl.estimator",
            "is 'k1': its gradient has mean 0, so in the loss it does not keep the policy near the "
            "reference; use k2 or k3, or where: reward",
            "warning",
        )
    if isinstance(config, ClippedConfig) and config.eps_clip >= 1:
        yield Problem(
            "algorithm.eps_clip",
            f"is {config.eps_clip:g}: the ratio has no lower bound then; usual values are 0.1 to 0.3",
            "warning",
        )


def check_policy(config: PolicyConfig, run: RunConfig) -> Iterator[Problem]:
    """Yield the problems of `check_objective`, and a problem if groups have one sample and no advantage."""
    yield from check_objective(config, run)
    if config.group_size == 1:
        yield Problem("algorithm.group_size", "is 1, which makes every advantage 0; expected at least 2")
