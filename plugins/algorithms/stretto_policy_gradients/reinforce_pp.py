"""Algorithm `reinforce_pp`: REINFORCE++, returns whitened over the whole batch instead of by group.

Hu et al. 2025 (arXiv 2501.03262): the return-to-go of each token, G_t = sum of gamma^k r_{t+k}, is whitened
over the trained tokens of the batch and enters PPO's clipped objective. With `baseline: true` the group's
mean is subtracted from the rewards first (REINFORCE++-baseline), which suits rewards of 0 and 1.

Tokens that the policy did not sample, such as tool output between turns, are skipped: they neither discount
nor carry a return (as in verl). Whitening divides by the unbiased standard deviation plus 1e-6. A KL in the
reward is subtracted at each token, as in the paper, and after the group's mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from stretto import Problem
from stretto.component import Share
from stretto.rl.policy_gradient import ClippedConfig, ClippedSurrogate, check_objective, check_policy

if TYPE_CHECKING:
    from torch import Tensor

    from stretto.config import RunConfig
    from stretto.rl.batch import Batch


class ReinforcePPConfig(ClippedConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the algorithm `reinforce_pp`."""

    baseline: bool = False
    """Subtract the group's mean reward before whitening."""
    gamma: Share = 1.0
    """Discount per token."""


class ReinforcePP(ClippedSurrogate[ReinforcePPConfig]):
    """Whitened returns as advantages, and a clipped objective."""

    def estimates(self, batch: Batch) -> Mapping[str, Tensor]:
        """Return the column `advantages`, which contain the KL penalty already."""
        return {"advantages": self.advantages(batch)}

    def advantages(self, batch: Batch) -> Tensor:
        """Return the whitened return-to-go of every sampled token, (T,) float32."""
        import torch

        from stretto.rl.functional import at_last_token, gae, group_normalise, masked_whiten

        mask, rewards = batch["loss_mask"], batch["rewards"]
        if self.config.baseline:
            rewards = group_normalise(rewards, batch["group"], batch["sample"], std=False)
        token_rewards = at_last_token(rewards, mask, batch.sequence_index()) - self.kl_penalty(batch)  # (T,)
        # Without values, and with lambda 1, GAE is the discounted return-to-go.
        values = torch.zeros_like(token_rewards)
        returns, _ = gae(token_rewards, values, mask, batch.lengths, gamma=self.config.gamma)
        return masked_whiten(returns, mask)


def check_reinforce_pp(config: ReinforcePPConfig, run: RunConfig) -> Iterator[Problem]:
    """Check the config. With `baseline`, also refuse groups of one sample."""
    yield from (check_policy if config.baseline else check_objective)(config, run)
