"""Algorithm `m2po`: second-moment trust policy optimisation, for very stale samples.

Zheng et al. 2025 (arXiv 2510.01161): over the trained tokens of the batch, those with the largest squared
log-ratio between behaviour and proximal policy are left out until the mean square of the rest is at most
`tau`; a few outliers go, and stale tokens with small ratios stay. The rest is GRPO.

What is left out still counts in the loss's denominator. The proximal logprobs are always computed, one
forward a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec

from stretto import Component, hookimpl
from stretto.algorithm import Call, function
from stretto.component import NonNegativeFloat, PositiveFloat
from stretto.rl.policy_gradient import (
    GroupRelative,
    GroupRelativeConfig,
    check_policy,
    clipped_surrogate,
)

if TYPE_CHECKING:
    from torch import Tensor

    from stretto.rl.batch import Batch

__all__ = ["M2PO", "M2POConfig"]


class M2POConfig(GroupRelativeConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the algorithm `m2po`."""

    tau: PositiveFloat = 0.04
    """Largest mean square of log(behaviour / proximal) over the tokens that count."""
    eps_clip: NonNegativeFloat = 0.2
    """Half-width of the trust region."""
    eps_clip_high: NonNegativeFloat | None = None
    """Its upper half, if it is to be wider; default `eps_clip`."""
    c_clip: Annotated[float, msgspec.Meta(gt=1)] | None = 3.0
    """Dual clip: largest ratio that counts for tokens of negative advantage; null for no bound."""


class M2PO(GroupRelative[M2POConfig]):
    """GRPO's advantages, clipped objective on trusted tokens."""

    needs_proximal = True
    objective_reads = ("trusted",)

    def more_calls(self) -> Sequence[Call]:
        """Which tokens are trusted, which only the whole batch can tell."""
        reads = ("behaviour_logprobs", "proximal_logprobs", "loss_mask")
        return [function(self.trusted, reads=reads, writes=("trusted",))]

    def trusted(self, batch: Batch) -> Mapping[str, Tensor]:
        """(T,) bool."""
        from stretto.rl.functional import second_moment_mask

        delta = batch["behaviour_logprobs"] - batch["proximal_logprobs"]
        return {"trusted": second_moment_mask(delta, batch["loss_mask"], self.config.tau)}

    def objective(
        self, logprobs: Tensor, anchor: Tensor, batch: Batch
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Clipped surrogate, 0 where the token is not trusted: (T,)."""
        import torch

        loss, statistics = clipped_surrogate(self.config, logprobs, anchor, batch["advantages"])
        trusted = batch["trusted"]
        return torch.where(trusted, loss, 0.0), {**statistics, "trusted": trusted.float()}


@hookimpl
def stretto_algorithm() -> Iterator[Component[M2POConfig]]:
    """The component of this package."""
    yield Component(
        "m2po",
        M2PO,
        M2POConfig,
        "second-moment trust region, for very stale samples",
        check_policy,
        requires={"torch": "stretto[torch]"},
    )
