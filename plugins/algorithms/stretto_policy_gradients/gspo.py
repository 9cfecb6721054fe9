"""Algorithm `gspo`: group sequence policy optimisation.

Zheng et al. 2025 (arXiv 2507.18071): the ratio belongs to the sequence, s = exp(mean over its tokens of log
r), eq. 7; the clip is applied to s, eq. 5, and the loss is the mean over answers. The advantage is GRPO's.

Its trust region is two orders of magnitude narrower than PPO's, because s is a geometric mean; the defaults
are the paper's. As in TRL, OpenRLHF and NeMo-RL the gradient is that of s itself; verl's token form has the
same value and gradient where all tokens of an answer have the same advantage.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import msgspec

from stretto.algorithm import Reduction
from stretto.component import NonNegativeFloat
from stretto.rl.policy_gradient import GroupRelative, GroupRelativeConfig, clipped_surrogate

if TYPE_CHECKING:
    from torch import Tensor

    from stretto.rl.batch import Batch


class GSPOConfig(GroupRelativeConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the algorithm `gspo`."""

    loss_mean: Reduction = "sequence"
    """How token losses are averaged, as in every policy gradient. Default: the mean over answers, as in the
    paper."""
    eps_clip: NonNegativeFloat = 3e-4
    """Lower half-width of the trust region of the sequence's ratio."""
    eps_clip_high: NonNegativeFloat | None = 4e-4
    """Upper half-width of the trust region of the sequence's ratio; null uses `eps_clip`."""
    c_clip: Annotated[float, msgspec.Meta(gt=1)] | None = 3.0
    """Dual clip: upper bound of the ratio of sequences with negative advantage; null for no bound."""


class GSPO(GroupRelative[GSPOConfig]):
    """GRPO's advantages, and an objective with one clipped ratio for each answer."""

    def objective(
        self, logprobs: Tensor, anchor: Tensor, batch: Batch
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the clipped surrogate of the answer, the same at each of its tokens: (T,)."""
        import torch

        from stretto.rl.functional import sequence_mean

        index = batch.sequence_index().to(logprobs.device)
        log_s = sequence_mean(logprobs - anchor, batch["loss_mask"], index, len(batch))[index]
        return clipped_surrogate(self.config, log_s, torch.zeros_like(log_s), batch["advantages"])
