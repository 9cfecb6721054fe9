"""Algorithm `grpo`: group relative policy optimisation, for samples that may be stale.

Shao et al. 2024 (arXiv 2402.03300) for the advantage, eq. 3, and the objective, eq. 1; Ye et al. 2019 (arXiv
1912.09729) for the dual clip; Liu et al. 2025 (Dr. GRPO, arXiv 2503.20783) is `group_reward_norm: false,
loss_mean: sequence_sum, loss_divisor: <longest answer>`.

Deliberate differences from the GRPO paper: the loss is the mean over the tokens of the whole batch
(`loss_mean: token`), not first over each answer; there is no KL to a reference unless `kl.coef` is set (the
paper has k3 in the loss, 0.04); the ratio is to the behaviour policy, which may be some versions old
(`correction` has other choices), and the dual clip is on. A group of one sample has advantage 0.

Metrics, averaged over trained tokens: `clipped` and `dual_clipped`, the shares of tokens that the two clips
affect, and the metrics of every policy gradient: `ratio`, `advantage`, `importance_weight`,
`masked_fraction` (share of tokens whose weight is 0), `behaviour_kl` (KL of the behaviour policy to the
current one, in nats per token), and with a reference `reference_kl`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from stretto.component import PositiveFloat, Share
from stretto.rl.policy_gradient import ClippedConfig, ClippedSurrogate

if TYPE_CHECKING:
    from torch import Tensor

    from stretto.rl.batch import Batch


class GRPOConfig(ClippedConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the algorithm `grpo`."""

    group_reward_norm: bool = True
    """Divide group-centred rewards by the group's standard deviation; false is Dr. GRPO's advantage."""
    baseline: Literal["mean", "leave_one_out"] = "mean"
    """Baseline of a sample's reward: the mean reward of its group, or of the group's other samples."""
    norm_eps: PositiveFloat = 1e-6
    """Constant added to the standard deviation. TRL uses 1e-4."""
    group_adv_norm: bool = False
    """Whiten the advantages over the tokens of each group again, after GAE."""
    gamma: Share = 1.0
    """Discount per token. With 1 an answer's reward counts equally for all its tokens."""
    gae_lambda: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    """GAE's lambda. There is no critic, so a value below 1 reduces the reward towards the answer's start."""


class GRPO(ClippedSurrogate[GRPOConfig]):
    """Group-relative advantages, and a clipped objective."""

    def advantages(self, batch: Batch) -> Tensor:
        """Return the group-relative advantage of every sampled token, (T,) float32."""
        import torch

        from stretto.rl.functional import at_last_token, gae, group_normalise, masked_whiten

        config, mask = self.config, batch["loss_mask"]
        relative = group_normalise(  # (S,)
            batch["rewards"],
            batch["group"],
            batch["sample"],
            std=config.group_reward_norm,
            eps=config.norm_eps,
            leave_one_out=config.baseline == "leave_one_out",
        )
        rewards = at_last_token(relative, mask, batch.sequence_index())  # (T,)
        values = torch.zeros_like(rewards)
        advantages, _ = gae(rewards, values, mask, batch.lengths, gamma=config.gamma, lam=config.gae_lambda)
        if config.group_adv_norm:
            advantages = masked_whiten(advantages, mask, batch["group"][batch.sequence_index()])
        return advantages
