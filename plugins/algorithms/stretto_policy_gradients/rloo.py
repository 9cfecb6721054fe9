"""Algorithm `rloo`: REINFORCE with the other samples of the prompt as the baseline.

Ahmadian et al. 2024 (arXiv 2402.14740): A_i = R_i - mean of the other R_j, one advantage for the whole
answer, not divided by a standard deviation. A group of one sample has advantage 0 (verl uses R).

Deliberate differences from the paper: the samples may be stale, so the objective is the clipped surrogate
rather than A log pi, with the same gradient where the ratio is 1; and the loss is the mean over the tokens of
the batch. The paper's sum over each answer is `loss_mean: sequence_sum`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.rl.policy_gradient import ClippedConfig, ClippedSurrogate

if TYPE_CHECKING:
    from torch import Tensor

    from stretto.rl.batch import Batch


class RLOOConfig(ClippedConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the algorithm `rloo`."""


class RLOO(ClippedSurrogate[RLOOConfig]):
    """Leave-one-out advantages, and a clipped objective."""

    def advantages(self, batch: Batch) -> Tensor:
        """Return R minus the mean of the group's other rewards, at every sampled token: (T,) float32."""
        from stretto.rl.functional import group_normalise

        relative = group_normalise(
            batch["rewards"], batch["group"], batch["sample"], std=False, leave_one_out=True
        )
        return relative[batch.sequence_index()] * batch["loss_mask"]
