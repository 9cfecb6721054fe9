"""Algorithm `dapo`: decoupled clip and dynamic sampling policy optimisation.

Yu et al. 2025 (arXiv 2503.14476): clip-higher (eq. 10), a loss averaged over the tokens of the batch (eq.
12), dynamic sampling (eq. 11: groups in which all answers have the same reward are dropped, and other prompts
take their places), and the soft penalty for overlong answers (eq. 13). The advantage is GRPO's, and there is
no KL.

The filter sees rewards before the overlong penalty, so a group in which all answers are right is dropped
whatever their lengths. A filtered group is never trained on and does not count in any denominator.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from stretto.algorithm import Group, are_equal
from stretto.component import NonNegativeFloat, PositiveFloat, PositiveInt, Problem
from stretto.rl.policy_gradient import ClippedConfig, ClippedSurrogate, check_policy

if TYPE_CHECKING:
    from torch import Tensor

    from stretto.config import RunConfig
    from stretto.rl.batch import Batch


class OverlongConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Penalty for long answers."""

    limit: PositiveInt
    """Answer length, in tokens, at which the full penalty applies; usually `sampling.max_tokens`."""
    buffer: PositiveInt
    """Number of tokens before the limit at which the penalty starts. It grows linearly up to the limit."""
    penalty: PositiveFloat = 1.0
    """Amount subtracted from the reward at the limit."""

    def __post_init__(self) -> None:
        if self.buffer > self.limit:
            raise ValueError(f"buffer ({self.buffer}) must be at most limit ({self.limit})")


class DAPOConfig(ClippedConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the algorithm `dapo`."""

    dynamic_sampling: bool = True
    """Drop groups in which all answers have the same reward."""
    overlong: OverlongConfig | None = None
    """Soft penalty for long answers; null for none."""
    eps_clip_high: NonNegativeFloat | None = 0.28
    """Upper half-width of the trust region, wider than the lower one; null uses `eps_clip`."""


class DAPO(ClippedSurrogate[DAPOConfig]):
    """GRPO's advantages, from penalised rewards, and a clipped objective with clip-higher."""

    def keep(self, group: Group) -> bool:
        """Return False for a group with equal rewards, if `dynamic_sampling` drops it."""
        return not self.config.dynamic_sampling or not are_equal(group.rewards)

    def advantages(self, batch: Batch) -> Tensor:
        """Return the answer's penalised reward relative to its group, at each sampled token of the answer:
        (T,) float32."""
        from stretto.rl.functional import group_normalise, overlong_penalty, sequence_sum

        mask, index, rewards = batch["loss_mask"], batch.sequence_index(), batch["rewards"]
        if (overlong := self.config.overlong) is not None:
            lengths = sequence_sum(mask.float(), index, len(batch))
            rewards = rewards + overlong_penalty(
                lengths, limit=overlong.limit, buffer=overlong.buffer, factor=overlong.penalty
            )
        return group_normalise(rewards, batch["group"], batch["sample"])[index] * mask


def check_dapo(config: DAPOConfig, run: RunConfig) -> Iterator[Problem]:
    """Warn of a length penalty that no answer can get."""
    yield from check_policy(config, run)
    overlong, longest = config.overlong, run.sampling.max_tokens
    if overlong is not None and overlong.limit - overlong.buffer >= longest:
        yield Problem(
            "algorithm.overlong.limit",
            f"is {overlong.limit}, and the penalty begins at {overlong.limit - overlong.buffer} tokens, "
            f"which no answer exceeds: sampling.max_tokens is {longest}",
            "warning",
        )
