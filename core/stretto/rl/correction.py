"""Off-policy correction: the option `correction` of every policy-gradient algorithm.

The *behaviour* policy mu, perhaps some versions old, sampled the tokens. A correction chooses the denominator
of the objective's ratio (the anchor: the *proximal* policy at the start of the train step, or mu) and the
weight of each token, which is usually a function of rho = proximal / mu.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal

import msgspec

from stretto.component import PositiveFloat, Problem

if TYPE_CHECKING:
    from torch import Tensor

    from stretto.config import RunConfig
    from stretto.rl.batch import Batch

__all__ = ["Correction", "CorrectionConfig", "check_correction"]

Correction = Literal["decoupled", "token_tis", "sequence_tis", "icepop", "sequence_mask", "behaviour", "none"]

# Default (low, cap) of each correction: the usual values in the literature.
_BOUNDS: dict[Correction, tuple[float, float]] = {
    "decoupled": (0.0, 5.0),
    "token_tis": (0.0, 2.0),
    "sequence_tis": (0.0, 2.0),
    "icepop": (0.5, 5.0),
    "sequence_mask": (0.99, 1.01),
}


class CorrectionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Correction for tokens that older weights sampled. rho = proximal / behaviour, for each token."""

    use: Correction = "behaviour"
    """Correction to use. `behaviour`: the objective's ratio is current / behaviour and all weights are 1, so
    the trust region bounds how far the policy moves away from stale samples. With all other values the ratio
    is current / proximal: when a batch gives one update, it is 1 and bounds nothing. `decoupled`: weight rho;
    tokens above `cap` are masked (AReaL, arXiv 2505.24298). `token_tis`: weight min(rho, cap).
    `sequence_tis`: weight min(product of rho over the answer, cap). `icepop`: weight rho; tokens outside
    `low`..`cap` are masked. `sequence_mask`: weight rho; answers whose geometric mean of rho is outside
    `low`..`cap` are masked. `none`: no correction, as if the proximal policy had sampled the tokens; only
    with `queue.max_staleness: 0`."""
    target_kl: PositiveFloat | None = 0.01
    """Target for the metric `behaviour_kl`, in nats per token. While the metric is above it, the learning
    rate falls, so steps on samples of a distant policy are smaller. The rate rises again while the metric is
    below half of the target. The metric `lr_scale` is the rate's factor. null: never reduce the rate."""
    step_scale: Literal["kl", "ess"] = "kl"
    """How the learning rate is reduced. `kl`: by `target_kl`. `ess`: the learning rate is multiplied by the
    square root of the metric `ess`, the effective sample size of the batch (VCPO, arXiv 2602.17616, without
    VCPO's minimum-variance baseline); `target_kl` is not read."""
    cap: PositiveFloat | None = None
    """Upper bound that `use` applies. null: 5 for `decoupled` and `icepop`, 2 for `token_tis` and
    `sequence_tis`, 1.01 for `sequence_mask`."""
    low: PositiveFloat | None = None
    """Lower bound that `use` applies. null: 0.5 for `icepop`, 0.99 for `sequence_mask`. The other corrections
    have no lower bound."""

    @property
    def anchor(self) -> Literal["proximal", "behaviour"]:
        """The policy in the denominator of the objective's ratio."""
        return "behaviour" if self.use == "behaviour" else "proximal"

    def lr_scale(self, statistics: Mapping[str, float], former: float) -> float:
        """Return the factor of the learning rate of an optimizer step, in (0, 1].

        With `step_scale: ess` it is sqrt(ess). With `kl`, above the target the factor is at most
        target_kl / kl, and at most 1 / 1.2 of the previous factor: it falls until the target holds. Below
        half of the target it rises by a tenth. As in rsl_rl's adaptive schedule (Schwarke et al. 2025, arXiv
        2509.10771), each step starts from the previous factor. Without that, one batch near the target would
        undo the reduction.

        Args:
            statistics: of the batch: `behaviour_kl`, in nats per token, and `ess`. If the value is NaN, the
                factor stays.
            former: the factor of the previous optimizer step; 1 for the first step.
        """
        if self.step_scale == "ess":
            ess = statistics["ess"]
            return former if math.isnan(ess) else math.sqrt(ess)
        if self.target_kl is None:
            return 1.0
        kl = statistics["behaviour_kl"]
        if kl > self.target_kl:
            return min(former / 1.2, self.target_kl / kl)
        return min(1.0, former * 1.1) if kl < self.target_kl / 2 else former

    def weights(self, proximal: Tensor, behaviour: Tensor, batch: Batch) -> Tensor:
        """Return the weight of each token's loss: (T,) without gradient; all 1 for `behaviour` and `none`.

        A token of weight 0 still counts in the loss's denominator.

        Args:
            proximal: (T,) logprobs of the policy at the start of the step.
            behaviour: (T,) logprobs of the policy that sampled.
            batch: has `loss_mask`. Over the tokens with `loss_mask`, `sequence_tis` uses the product of rho
                and `sequence_mask` the geometric mean.
        """
        import torch

        from stretto.rl.functional import importance_weight, sequence_mean, sequence_sum

        if self.use not in _BOUNDS:
            return torch.ones_like(behaviour)
        low, cap = _BOUNDS[self.use]
        low, cap = self.low or low, self.cap or cap
        if self.use in ("decoupled", "token_tis"):
            over_cap = "mask" if self.use == "decoupled" else "truncate"
            return importance_weight(proximal, behaviour, cap=cap, over_cap=over_cap)
        mask, index = batch["loss_mask"], batch.sequence_index().to(behaviour.device)
        log_rho = torch.where(mask, proximal.detach() - behaviour, 0.0)  # (T,)
        if self.use == "sequence_tis":
            return sequence_sum(log_rho, index, len(batch)).exp().clamp(max=cap)[index]
        rho = log_rho.exp()
        by_token = self.use == "icepop"
        ratio = rho if by_token else sequence_mean(log_rho, mask, index, len(batch)).exp()[index]
        return torch.where((ratio >= low) & (ratio <= cap), rho, 0.0)


def check_correction(config: CorrectionConfig, run: RunConfig) -> Iterator[Problem]:
    """Yield a problem for staleness without a correction, and for bounds in the wrong order."""
    if config.use == "none" and run.queue.max_staleness > 0:
        yield Problem(
            "algorithm.correction.use",
            f"is 'none' with queue.max_staleness={run.queue.max_staleness}: stale samples need a correction; "
            "use 'behaviour', or max_staleness: 0",
        )
    low, cap = _BOUNDS.get(config.use, (0.0, 0.0))
    if config.use in _BOUNDS and (config.low or low) >= (config.cap or cap):
        yield Problem(
            "algorithm.correction",
            f"low={config.low or low:g} is not below cap={config.cap or cap:g}: every token would be masked",
        )
