"""Algorithm `sapo`: soft adaptive policy optimisation.

Gao et al. 2025 (arXiv 2511.20347): a sigmoid gate of the ratio replaces the hard clip. Its slope at ratio 1
is 1, as without a gate; the gate is sharper for negative advantages. The loss is the mean over answers.
The advantage is GRPO's. An advantage of 0 uses `tau_neg`; it has no gradient either way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from stretto.algorithm import Reduction
from stretto.component import PositiveFloat
from stretto.rl.correction import CorrectionConfig
from stretto.rl.policy_gradient import GroupRelative, GroupRelativeConfig

if TYPE_CHECKING:
    from torch import Tensor

    from stretto.rl.batch import Batch


class SAPOConfig(GroupRelativeConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the algorithm `sapo`."""

    correction: CorrectionConfig = CorrectionConfig(target_kl=0.003)
    """Off-policy correction. The gate does not bound the ratio, so `target_kl` is smaller than with clipped
    objectives."""
    loss_mean: Reduction = "sequence"
    """How token losses are averaged, as in every policy gradient. Default: the mean over answers, as in the
    paper."""
    tau_pos: PositiveFloat = 1.0
    """Sharpness of the gate for tokens of positive advantage."""
    tau_neg: PositiveFloat = 1.05
    """Sharpness of the gate for tokens of advantage 0 or less; a larger value reduces the gradient more at
    ratios far from 1."""


class SAPO(GroupRelative[SAPOConfig]):
    """GRPO's advantages, and an objective with a soft gate instead of a clip."""

    def objective(
        self, logprobs: Tensor, anchor: Tensor, batch: Batch
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return -f(r) A, (T,), where f is the gate."""
        from stretto.rl.functional import soft_gate

        config = self.config
        loss = soft_gate(
            logprobs, anchor, batch["advantages"], tau_pos=config.tau_pos, tau_neg=config.tau_neg
        )
        return loss, {}
