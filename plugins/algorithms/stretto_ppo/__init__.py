"""Algorithm `ppo`: proximal policy optimisation with a critic, GAE, and a KL to the initial policy.

Schulman et al. 2017 (arXiv 1707.06347), eq. 7, with generalised advantage estimation (Schulman et al. 2015,
1506.02438, eq. 16); for language models as in Ziegler et al. 2019 (1909.08593): the KL to a reference is
subtracted from the reward token by token, r_t = -beta KL_t, and the score is added at the last token; a
controller may set beta. The dataflow:

    prompt -> generate(actor) -> tokens, behaviour_logprobs
    tokens -> score -> rewards                tokens -> forward(reference) -> reference_logprobs
    tokens -> forward(critic) -> values
    rewards, values, reference_logprobs -> advantages -> advantages, returns
    advantages -> train(actor)                values, returns -> train(critic)

Deliberate differences: samples may be stale, so the ratio is taken to the behaviour policy, or tokens are
weighted by another correction, as in every policy gradient here; the critic's loss is not weighted, because
it learns the values of the states that were sampled. An answer cut off at its token limit counts as ended:
the value after it is 0. There is no reference and no KL unless `kl.coef` is set.

Metrics, averaged over trained tokens. The actor has those of every policy gradient (see grpo), `clipped` and
`dual_clipped`, and with a controller `kl_coef`, beta in this step. The critic has `value`, its value at the
start of the step, `return`, the target of that value, `value_error`, (V - R)^2, and `value_clipped`, the
share of tokens whose gradient the clip removed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from stretto import Component, Context, hookimpl
from stretto.algorithm import Call, Loss, Model, forward, function, generate, score, train
from stretto.component import PositiveFloat, PositiveInt, Share
from stretto.rl import policy_gradient

if TYPE_CHECKING:
    from torch import Tensor

    from stretto.rl.batch import Batch

__all__ = ["PPO", "PPOConfig", "PPOKLConfig"]


class PPOKLConfig(policy_gradient.KLConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A penalty that keeps the policy near a frozen model, `reference`."""

    estimator: policy_gradient.KLEstimator = "k1"
    """Estimator of the KL, as in every policy gradient; k1 is the estimator of Ziegler et al."""
    where: Literal["loss", "reward"] = "reward"
    """Where the KL is subtracted, as in every policy gradient; PPO's default is the reward."""
    target: PositiveFloat | None = None
    """Target of the KL per answer, in nats. A controller changes the coefficient, starting from `coef`;
    6 is customary. Null keeps `coef` fixed."""
    horizon: PositiveFloat = 10_000.0
    """With `target`: number of samples over which the coefficient changes by at most a fifth."""

    def __post_init__(self) -> None:
        if self.target is not None and self.coef == 0:
            raise ValueError("target needs coef above 0: the controller starts from it")
        if self.target is not None and self.where == "loss":
            raise ValueError("target is for a KL in the reward; expected where: reward")


class PPOConfig(policy_gradient.ClippedConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the algorithm `ppo`."""

    group_size: PositiveInt = 1
    """Samples of each prompt. The critic is the baseline, so one sample is enough."""
    kl: PPOKLConfig = PPOKLConfig()
    """KL to a reference model; none by default."""
    gamma: Share = 1.0
    """Discount per token."""
    gae_lambda: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    """GAE's lambda: 1 uses the rewards alone, 0 the critic alone. Below 1, an untrained critic penalises long
    answers; verl and OpenRLHF use 1, TRL 0.95."""
    reward_norm: bool = False
    """Whiten the scores over the answers of each batch, before the KL is subtracted."""
    adv_norm: bool = True
    """Whiten the advantages over the trained tokens of each batch."""
    value_clip: PositiveFloat | None = 0.2
    """Half-width of the critic's trust region around its values at the start of the step; null for none."""


class PPO(policy_gradient.PolicyGradient[PPOConfig]):
    """Trains an actor and a critic on the same samples."""

    def __init__(self, config: PPOConfig, context: Context) -> None:
        super().__init__(config, context)
        # A controller changes `self.kl_coef`, beta, only in the process that runs the functions: the actor's
        # loss reads it from a column.
        if config.kl.target is not None:
            self.objective_reads = ("kl_coef",)

    @property
    def models(self) -> Mapping[str, Model]:
        """The actor, the critic, and the reference if the run has a KL to it."""
        return {**super().models, "critic": Model(head="value")}

    def calls(self) -> Sequence[Call]:
        """Return the module's dataflow; `self.forwards`: logprobs of reference and proximal policy."""
        config = self.config
        return [
            generate("actor", samples=config.group_size),
            score(),
            forward("critic", writes="values"),
            *self.forwards(),
            function(
                self.estimates,
                reads=("rewards", "loss_mask", "values", *self.penalty_reads),
                writes=("advantages", "returns", *self.objective_reads),
                name="advantages",
            ),
            self.train_actor(),
            train(
                "critic",
                Loss(self.value_loss, "token"),
                reads=("values", "returns"),
                minibatches=config.minibatches,
                epochs=config.epochs,
            ),
        ]

    def state(self) -> Mapping[str, float]:
        return {"kl_coef": self.kl_coef}

    def restore(self, state: Mapping[str, float]) -> None:
        """Restore a state that `state` returned; an empty state means the initial coefficient."""
        self.kl_coef = state.get("kl_coef", self.config.kl.coef)

    def estimates(self, batch: Batch) -> Mapping[str, Tensor]:
        """Return advantages and returns, (T,) float32; with a controller also beta, (S,), and update it."""
        import torch

        from stretto.rl.functional import adapt_kl_coef, masked_whiten, sequence_sum

        config, mask, target = self.config, batch["loss_mask"], self.config.kl.target
        advantages = self.advantages(batch)
        columns = {
            "advantages": masked_whiten(advantages, mask) if config.adv_norm else advantages,
            "returns": torch.where(mask, advantages + batch["values"], 0.0),
        }
        if target is not None:
            columns["kl_coef"] = torch.full((len(batch),), self.kl_coef)
            kl = sequence_sum(self.sampled_kl(batch), batch.sequence_index(), len(batch))  # (S,)
            self.kl_coef = adapt_kl_coef(
                self.kl_coef, float(kl.mean()), target=target, horizon=config.kl.horizon, samples=len(batch)
            )
        return columns

    def advantages(self, batch: Batch) -> Tensor:
        """Return the GAE of the scores at the last tokens minus the KL at each token, (T,) float32."""
        import torch

        from stretto.rl.functional import at_last_token, gae, group_normalise

        config, mask, scores = self.config, batch["loss_mask"], batch["rewards"]
        if config.reward_norm:  # with the whole batch as one group
            scores = group_normalise(scores, torch.zeros_like(scores, dtype=torch.long))
        rewards = at_last_token(scores.float(), mask, batch.sequence_index()) - self.kl_penalty(batch)
        advantages, _ = gae(
            rewards, batch["values"], mask, batch.lengths, gamma=config.gamma, lam=config.gae_lambda
        )
        return advantages

    def objective(
        self, logprobs: Tensor, anchor: Tensor, batch: Batch
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the clipped and dual-clipped surrogate, (T,)."""
        loss, statistics = policy_gradient.clipped_surrogate(
            self.config, logprobs, anchor, batch["advantages"]
        )
        if self.config.kl.target is None:
            return loss, statistics
        kl_coef = batch["kl_coef"][batch.sequence_index().to(logprobs.device)]
        return loss, {**statistics, "kl_coef": kl_coef}

    def value_loss(self, values: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the critic's loss on its current values, (T,), and statistics."""
        from stretto.rl.functional import clipped_value_loss

        returns = batch["returns"]
        loss, clipped = clipped_value_loss(
            values, batch["values"], returns, value_clip=self.config.value_clip
        )
        return loss, {
            "value": batch["values"],
            "return": returns,
            "value_error": (values.detach() - returns).square(),
            "value_clipped": clipped.float(),
        }


@hookimpl
def stretto_algorithm() -> Iterator[Component[PPOConfig]]:
    yield Component(
        "ppo",
        PPO,
        PPOConfig,
        "proximal policy optimisation: critic, GAE, KL in the reward",
        policy_gradient.check_objective,
        requires={"torch": "stretto[torch]"},
    )
