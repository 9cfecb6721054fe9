"""Off-policy correction: one option that every policy-gradient algorithm takes alike.

A sample's tokens were drawn by the *behaviour* policy mu, perhaps some versions old. A correction says what
the objective's ratio is taken to (its anchor: the *proximal* policy at the start of the train step, or mu),
and with which weight a token counts, mostly a function of rho = proximal / mu.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import msgspec

from stretto.component import PositiveFloat, Problem

if TYPE_CHECKING:
    from torch import Tensor

    from stretto.config import RunConfig
    from stretto.rl.batch import Batch

__all__ = ["Correction", "CorrectionConfig", "check_correction"]

Correction = Literal["decoupled", "token_tis", "sequence_tis", "icepop", "sequence_mask", "behaviour", "none"]

# (smallest, largest) weight that counts, where the run file does not say: the usual ones of the field.
_BOUNDS: dict[Correction, tuple[float, float]] = {
    "decoupled": (0.0, 5.0),
    "token_tis": (0.0, 2.0),
    "sequence_tis": (0.0, 2.0),
    "icepop": (0.5, 5.0),
    "sequence_mask": (0.99, 1.01),
}


class CorrectionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens that older weights sampled are corrected for. rho = proximal / behaviour, by token."""

    use: Correction = "behaviour"
    """`behaviour`: the ratio itself is taken to the behaviour policy, no weight, so the trust region of the
    objective bounds how far the policy moves away from stale samples. The others take the ratio to the
    proximal policy, which bounds nothing where a batch gives one update. `decoupled`: weight rho, tokens
    above `cap` masked (AReaL, arXiv 2505.24298). `token_tis`: weight min(rho, cap). `sequence_tis`:
    min(product of rho over the answer, cap). `icepop`: weight rho, tokens outside `low`..`cap` masked.
    `sequence_mask`: weight rho, answers whose geometric mean of rho is outside `low`..`cap` masked. `none`:
    as if the proximal policy had drawn the samples; only with `queue.max_staleness: 0`."""
    target_kl: PositiveFloat | None = 0.01
    """Take shorter steps on samples from a policy that is far from the current one: where the metric
    `behaviour_kl`, in nats a token, is above this, the learning rate of the step is multiplied by
    target_kl / behaviour_kl. Null never does."""
    cap: PositiveFloat | None = None
    """Largest weight that counts. Default: 5 for `decoupled` and `icepop`, 2 for both `tis`, 1.01 for
    `sequence_mask`."""
    low: PositiveFloat | None = None
    """Smallest weight that counts. Default: 0.5 for `icepop`, 0.99 for `sequence_mask`; the others have
    none."""

    @property
    def anchor(self) -> Literal["proximal", "behaviour"]:
        """The policy that the objective's ratio is taken to."""
        return "behaviour" if self.use == "behaviour" else "proximal"

    def weights(self, proximal: Tensor, behaviour: Tensor, batch: Batch) -> Tensor:
        """What each token's loss counts: (T,) float32, without gradient, 1 where nothing is corrected.

        A token of weight 0 still counts in the loss's denominator.

        Args:
            proximal, behaviour: (T,) logprobs.
            batch: has `loss_mask`; sequence-wise kinds take the product over its tokens.
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
        judged = rho if by_token else sequence_mean(log_rho, mask, index, len(batch)).exp()[index]
        return torch.where((judged >= low) & (judged <= cap), rho, 0.0)


def check_correction(config: CorrectionConfig, run: RunConfig) -> Iterator[Problem]:
    """Staleness without a correction is refused."""
    if config.use == "none" and run.queue.max_staleness > 0:
        yield Problem(
            "algorithm.correction.use",
            f"'none' with queue.max_staleness={run.queue.max_staleness}: stale samples need a correction; "
            "use 'behaviour', or max_staleness: 0",
        )
    low, cap = _BOUNDS.get(config.use, (0.0, 0.0))
    if config.use in _BOUNDS and (config.low or low) >= (config.cap or cap):
        yield Problem(
            "algorithm.correction",
            f"low={config.low or low:g} is not below cap={config.cap or cap:g}: no token would count",
        )
