"""Algorithm `grpo`: group relative policy optimisation, with decoupled correction for stale samples.

Shao et al. 2024 (arXiv 2402.03300) for the advantage, eq. 3, and the objective, eq. 1 without its KL
term; Fu et al. 2025 (AReaL, arXiv 2505.24298), eq. 5, for the weight on tokens that older weights
sampled; Ye et al. 2019 (arXiv 1912.09729) for the dual clip.

Deliberate differences from the GRPO paper: the loss is the mean over the tokens of the whole batch
(`loss_mean: token`), not of each answer first; there is no KL to a reference; the ratio is taken to
the proximal policy, the one at the start of the train step, and the older behaviour policy enters as
a weight. A group of one sample has advantage 0.

Metrics, averaged over trained tokens: `ratio` current / proximal; `clipped` and `dual_clipped` share
of tokens; `behaviour_weight` proximal / behaviour after the cap; `over_cap` share above it;
`advantage`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from stretto import AlgorithmConfig, Component, Context, Problem, hookimpl
from stretto.algorithm import Call, Group, Loss, Model, Reduction, forward, function, generate, score, train
from stretto.component import NonNegativeFloat, PositiveFloat, PositiveInt, Share
from stretto.config import RunConfig

if TYPE_CHECKING:
    from torch import Tensor

    from stretto.batch import Batch

__all__ = ["GRPO", "CorrectionConfig", "GRPOConfig"]


class CorrectionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens that older weights sampled are corrected for."""

    use: Literal["decoupled", "none"] = "decoupled"
    """`decoupled`: clip around the proximal policy and weight by proximal / behaviour. `none`: take the
    samples as if the proximal policy had drawn them; only for `queue.max_staleness: 0`."""
    cap: PositiveFloat | None = 5.0
    """Largest weight that counts; null for no bound."""
    over_cap: Literal["mask", "truncate"] = "mask"
    """Tokens whose weight is above the cap: leave them out, or let them weigh `cap`."""


class GRPOConfig(AlgorithmConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the algorithm `grpo`."""

    group_reward_norm: bool = True
    """Divide group-centred rewards by the group's standard deviation; off is Dr. GRPO's advantage."""
    group_adv_norm: bool = False
    """Whiten the advantages over the tokens of each group once more, after GAE."""
    gamma: Share = 1.0
    """Discount per token. 1: an answer's reward counts alike for all its tokens."""
    gae_lambda: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    """GAE's lambda. There is no critic here: below 1 it fades the reward towards the answer's start."""
    eps_clip: NonNegativeFloat = 0.2
    """Half-width of the trust region around the proximal policy."""
    eps_clip_high: NonNegativeFloat | None = None
    """Its upper half, if it is to be wider (clip-higher); default `eps_clip`."""
    c_clip: Annotated[float, msgspec.Meta(gt=1)] | None = None
    """Dual clip: largest ratio that counts for tokens of negative advantage; 3 is customary."""
    correction: CorrectionConfig = CorrectionConfig()
    """Off-policy correction."""
    loss_mean: Reduction = "token"
    """`token`: every token of the batch counts alike; `sequence`: every answer does (the paper's)."""
    minibatches: PositiveInt = 1
    """Optimizer steps that a batch is split into."""
    epochs: PositiveInt = 1
    """Passes over each batch."""


class GRPO:
    """The dataflow and its arithmetic. The kernel reads the first; trainers run the second."""

    def __init__(self, config: GRPOConfig, context: Context) -> None:
        del context
        self.config = config
        # With one optimizer step on the batch, the proximal policy is the current one: no forward needed.
        self.one_update = config.minibatches == config.epochs == 1

    @property
    def models(self) -> Mapping[str, Model]:
        """One trainable policy."""
        return {"actor": Model(trainable=True)}

    def calls(self) -> Sequence[Call]:
        """generate -> score -> advantages (and proximal logprobs, if several updates follow) -> train."""
        config = self.config
        proximal = () if self.one_update else ("proximal_logprobs",)
        return [
            generate("actor"),
            score(),
            *(forward("actor", writes=key) for key in proximal),
            function(
                self.advantages,
                reads=("rewards", "group", "loss_mask"),
                writes=("advantages",),
            ),
            train(
                "actor",
                Loss(self.loss, config.loss_mean),
                reads=("behaviour_logprobs", "advantages", *proximal),
                minibatches=config.minibatches,
                epochs=config.epochs,
            ),
        ]

    def keep(self, group: Group) -> bool:
        """Every group is trained on."""
        del group
        return True

    def advantages(self, batch: Batch) -> Mapping[str, Tensor]:
        """Group-relative advantage of every sampled token, (T,) float32."""
        import torch

        from stretto.functional import gae, group_normalise, masked_whiten

        config, mask = self.config, batch["loss_mask"]
        relative = group_normalise(batch["rewards"], batch["group"], std=config.group_reward_norm)  # (S,)
        rewards = _at_last_token(relative, batch)  # (T,)
        values = torch.zeros_like(rewards)
        advantages, _ = gae(rewards, values, mask, batch.lengths, gamma=config.gamma, lam=config.gae_lambda)
        if config.group_adv_norm:
            advantages = masked_whiten(advantages, mask, batch["group"][batch.sequence_index()])
        return {"advantages": advantages}

    def loss(self, logprobs: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Clipped objective around the proximal policy, weighted by proximal / behaviour. (T,)."""
        import torch

        from stretto.functional import behaviour_weight, clipped_objective

        config, correction = self.config, self.config.correction
        proximal = logprobs.detach() if self.one_update else batch["proximal_logprobs"]
        loss, clipped, dual_clipped = clipped_objective(
            logprobs,
            proximal,
            batch["advantages"],
            eps_clip=config.eps_clip,
            eps_clip_high=config.eps_clip_high,
            c_clip=config.c_clip,
        )
        statistics = {
            "ratio": torch.exp(logprobs.detach() - proximal),
            "clipped": clipped.float(),
            "dual_clipped": dual_clipped.float(),
            "advantage": batch["advantages"],
        }
        if correction.use == "decoupled":
            behaviour = batch["behaviour_logprobs"]
            weight = behaviour_weight(proximal, behaviour, cap=correction.cap, over_cap=correction.over_cap)
            loss = loss * weight
            statistics["behaviour_weight"] = weight
            if correction.cap is not None:
                statistics["over_cap"] = (torch.exp(proximal - behaviour) > correction.cap).float()
        return loss, statistics


def _at_last_token(rewards: Tensor, batch: Batch) -> Tensor:
    """(S,) rewards as (T,), each standing at the last token its sequence's policy sampled."""
    import torch

    index = batch.sequence_index()
    positions = torch.where(batch["loss_mask"], torch.arange(batch.num_tokens), -1)
    last = torch.full((len(batch),), -1).scatter_reduce(0, index, positions, "amax")  # (S,)
    spread = torch.zeros(batch.num_tokens)
    sampled = last >= 0
    spread[last[sampled]] = rewards[sampled]
    return spread


def check(config: GRPOConfig, run: RunConfig) -> Iterator[Problem]:
    """Staleness without a correction is refused."""
    if config.correction.use == "none" and run.queue.max_staleness > 0:
        yield Problem(
            "algorithm.correction.use",
            f"'none' with queue.max_staleness={run.queue.max_staleness}: stale samples need a correction; "
            "use 'decoupled', or max_staleness: 0",
        )
    if config.group_size == 1:
        yield Problem("algorithm.group_size", "1 leaves every advantage 0; expected at least 2")


@hookimpl
def stretto_algorithm() -> Iterator[Component[GRPOConfig]]:
    """The component of this package."""
    yield Component(
        "grpo",
        GRPO,
        GRPOConfig,
        "group relative policy optimisation, decoupled from the sampling policy",
        check,
        requires={"torch": "stretto[torch]"},
    )
