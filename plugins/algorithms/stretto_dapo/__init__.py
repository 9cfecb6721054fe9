"""Algorithm `dapo`: decoupled clip and dynamic sampling policy optimisation.

Yu et al. 2025 (arXiv 2503.14476): clip-higher (eq. 10), the loss a mean over the tokens of the batch (eq.
12), dynamic sampling (eq. 11: groups whose answers all have one reward are left out, and their places given
to other prompts), and the soft punishment of overlong answers (eq. 13). The advantage is GRPO's, and there is
no KL.

The filter sees rewards before the overlong punishment, so a group of right answers stays out however long
they are. A filtered group is never trained on and does not count in any denominator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import msgspec

from stretto import Component, hookimpl
from stretto.algorithm import Group
from stretto.component import NonNegativeFloat, PositiveFloat, PositiveInt
from stretto.rl.policy_gradient import ClippedConfig, PolicyGradient, check_policy, clipped_surrogate

if TYPE_CHECKING:
    from torch import Tensor

    from stretto.rl.batch import Batch

__all__ = ["DAPO", "DAPOConfig"]


class OverlongConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long answers are punished."""

    limit: PositiveInt
    """Tokens at which the punishment is full; `sampling.max_tokens` as a rule."""
    buffer: PositiveInt
    """It begins so many tokens before."""
    penalty: PositiveFloat = 1.0
    """What is taken off the reward at the limit."""


class DAPOConfig(ClippedConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the algorithm `dapo`."""

    dynamic_sampling: bool = True
    """Leave out groups whose answers all have one reward."""
    overlong: OverlongConfig | None = None
    """Soft punishment of long answers; none by default."""
    eps_clip_high: NonNegativeFloat | None = 0.28
    """Upper half of the trust region, wider than the lower one; null takes `eps_clip`."""


class DAPO(PolicyGradient[DAPOConfig]):
    """GRPO's advantages of punished rewards, clip-higher."""

    def keep(self, group: Group) -> bool:
        """Whether there is anything to learn from the group."""
        return not self.config.dynamic_sampling or len(set(group.rewards)) > 1

    def advantages(self, batch: Batch) -> Tensor:
        """The group-relative punished reward of its answer for every sampled token, (T,) float32."""
        from stretto.rl.functional import group_normalise, overlong_penalty, sequence_sum

        mask, index, rewards = batch["loss_mask"], batch.sequence_index(), batch["rewards"]
        if (overlong := self.config.overlong) is not None:
            lengths = sequence_sum(mask.float(), index, len(batch))
            rewards = rewards + overlong_penalty(
                lengths, limit=overlong.limit, buffer=overlong.buffer, factor=overlong.penalty
            )
        return group_normalise(rewards, batch["group"], batch["sample"])[index] * mask

    def objective(
        self, logprobs: Tensor, anchor: Tensor, batch: Batch
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Clipped surrogate with the wider upper half, (T,)."""
        return clipped_surrogate(self.config, logprobs, anchor, batch["advantages"])


@hookimpl
def stretto_algorithm() -> Iterator[Component[DAPOConfig]]:
    """The component of this package."""
    yield Component(
        "dapo",
        DAPO,
        DAPOConfig,
        "clip-higher, dynamic sampling, overlong shaping",
        check_policy,
        requires={"torch": "stretto[torch]"},
    )
