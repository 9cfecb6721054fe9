"""Algorithm `m2po`: second-moment trust policy optimisation, for very stale samples.

Zheng et al. 2025 (arXiv 2510.01161): among the trained tokens of the batch, those with the largest squared
log-ratio between behaviour and proximal policy are masked, until the mean square of the rest is at most
`tau`. This removes a few outliers and keeps stale tokens with small ratios. Everything else is GRPO: its clip
and dual clip are additions to the paper, whose objective has neither.

Masked tokens still count in the loss's denominator. The proximal logprobs are always computed, with one
forward pass per step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec

from stretto.algorithm import Call, function
from stretto.component import NonNegativeFloat, PositiveFloat
from stretto.rl.policy_gradient import GroupRelative, GroupRelativeConfig, clipped_surrogate

if TYPE_CHECKING:
    from torch import Tensor

    from stretto.rl.batch import Batch


class M2POConfig(GroupRelativeConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the algorithm `m2po`."""

    tau: PositiveFloat = 0.04
    """Largest mean square of log(behaviour / proximal) over the tokens that are not masked."""
    eps_clip: NonNegativeFloat = 0.2
    """Half-width of the trust region of the ratio."""
    eps_clip_high: NonNegativeFloat | None = None
    """Upper half-width of the trust region, if it differs from the lower one; null uses `eps_clip`."""
    c_clip: Annotated[float, msgspec.Meta(gt=1)] | None = 3.0
    """Dual clip: upper bound of the ratio of tokens with negative advantage; null for no bound."""


class M2PO(GroupRelative[M2POConfig]):
    """GRPO's advantages, and a clipped objective on the trusted tokens."""

    needs_proximal = True
    objective_reads = ("trusted",)

    def more_calls(self) -> Sequence[Call]:
        """Add the function that chooses the trusted tokens; it needs the whole batch."""
        reads = ("behaviour_logprobs", "proximal_logprobs", "loss_mask")
        return [function(self.trusted, reads=reads, writes=("trusted",))]

    def trusted(self, batch: Batch) -> Mapping[str, Tensor]:
        """Return the column `trusted`, (T,) bool: true for the tokens that are not masked."""
        from stretto.rl.functional import second_moment_mask

        delta = batch["behaviour_logprobs"] - batch["proximal_logprobs"]
        return {"trusted": second_moment_mask(delta, batch["loss_mask"], self.config.tau)}

    def objective(
        self, logprobs: Tensor, anchor: Tensor, batch: Batch
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the clipped surrogate, 0 where the token is not trusted: (T,)."""
        import torch

        loss, statistics = clipped_surrogate(self.config, logprobs, anchor, batch["advantages"])
        trusted = batch["trusted"]
        return torch.where(trusted, loss, 0.0), {**statistics, "trusted": trusted.float()}
