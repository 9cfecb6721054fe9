"""Algorithm `cispo`: clipped importance-sampling weights, without clipping any token's gradient away.

MiniMax 2025 (MiniMax-M1, arXiv 2506.13585), eq. 4 and 5: the loss is -sg(clip(r, 1 - eps, 1 + eps_high)) A
log pi, averaged over the tokens of the batch. The advantage is GRPO's.

Other libraries disagree on the bounds: verl, SkyRL and NeMo-RL clip on both sides, open-instruct clips above
only, and TRL reads its upper bound as an absolute ratio. Here both bounds are half-widths around 1;
`eps_clip: 1` means no lower bound, as in the paper.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from stretto.component import NonNegativeFloat
from stretto.rl.policy_gradient import GroupRelative, GroupRelativeConfig

if TYPE_CHECKING:
    from torch import Tensor

    from stretto.rl.batch import Batch


class CISPOConfig(GroupRelativeConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the algorithm `cispo`."""

    eps_clip: NonNegativeFloat = 1.0
    """The importance weight is clipped from below at 1 minus this value; 1 means no lower bound."""
    eps_clip_high: NonNegativeFloat = 0.28
    """The importance weight is clipped from above at 1 plus this value."""


class CISPO(GroupRelative[CISPOConfig]):
    """GRPO's advantages, and REINFORCE's objective with a clipped importance weight."""

    def objective(
        self, logprobs: Tensor, anchor: Tensor, batch: Batch
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return -sg(clip(r)) A log pi, (T,), and statistics. sg: stop-gradient."""
        import torch

        low, high = 1 - self.config.eps_clip, 1 + self.config.eps_clip_high
        ratio = torch.exp(logprobs.detach() - anchor)
        loss = -ratio.clamp(low, high) * batch["advantages"] * logprobs
        return loss, {"clipped": ((ratio < low) | (ratio > high)).float()}
