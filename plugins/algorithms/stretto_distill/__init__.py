"""Algorithm `distill`: on-policy distillation, a teacher's word on every token that the policy samples.

Agarwal et al. 2023 (GKD, arXiv 2306.13649) with the policy's own samples and the reverse KL; as a policy
gradient, Lu et al. 2025 (Thinking Machines Lab, "On-Policy Distillation"): the advantage of a token is
A_t = coef · (log pi_T - log mu), the reverse KL of the sampling policy to the teacher at that token alone,
nothing of later ones. `reward_weight` w adds the task's reward, w · (R - mean of its group).

Deliberate differences: GKD differentiates the KL over the whole vocabulary; here, as in Lu et al., it is
estimated at the sampled token, so the teacher gives one number a token. Lu et al. take the plain ratio to
mu; here it is PPO's clipped surrogate around the correction's anchor, with the same gradient where the ratio
is 1. A KL in the reward (`kl`), too, is taken off at its token.

Metrics, averaged over trained tokens: `teacher_kl`, log mu - log pi_T, the estimate of KL(mu || pi_T) in
nats, `clipped`, and those of every policy gradient (see grpo).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from stretto import Component, Problem, hookimpl
from stretto.algorithm import Call, Model, forward
from stretto.component import NonNegativeFloat, PositiveFloat
from stretto.rl.policy_gradient import ClippedConfig, PolicyGradient, check_objective, clipped_surrogate

if TYPE_CHECKING:
    from torch import Tensor

    from stretto.config import RunConfig
    from stretto.rl.batch import Batch

__all__ = ["Distill", "DistillConfig"]


class DistillConfig(ClippedConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the algorithm `distill`."""

    coef: PositiveFloat = 1.0
    """Weight of the teacher's word."""
    reward_weight: NonNegativeFloat = 0.0
    """Weight of the reward, less the mean of its group; 0 learns from the teacher alone."""


class Distill(PolicyGradient[DistillConfig]):
    """The teacher's log-ratio as the advantage, clipped objective."""

    advantage_reads = ("behaviour_logprobs", "teacher_logprobs")
    objective_reads = ("teacher_logprobs",)

    @property
    def models(self) -> Mapping[str, Model]:
        """The actor, the reference if there is a KL to it, and the teacher."""
        return {**super().models, "teacher": Model(trainable=False)}

    def more_calls(self) -> Sequence[Call]:
        """What the teacher thinks of the samples."""
        return [forward("teacher", writes="teacher_logprobs")]

    def estimates(self, batch: Batch) -> Mapping[str, Tensor]:
        """The column `advantages`, whose KL penalties stay at their tokens."""
        return {"advantages": self.advantages(batch)}

    def advantages(self, batch: Batch) -> Tensor:
        """coef · (log pi_T - log mu) + w · (R - mean) of every sampled token, (T,) float32."""
        import torch

        from stretto.rl.functional import group_normalise

        config = self.config
        taught = config.coef * (batch["teacher_logprobs"] - batch["behaviour_logprobs"])  # (T,)
        relative = group_normalise(batch["rewards"], batch["group"], batch["sample"], std=False)  # (S,)
        rewarded = config.reward_weight * relative[batch.sequence_index()]
        advantages = taught + rewarded - self.kl_penalty(batch)
        return torch.where(batch["loss_mask"], advantages, 0.0)

    def objective(
        self, logprobs: Tensor, anchor: Tensor, batch: Batch
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Clipped surrogate, (T,)."""
        loss, statistics = clipped_surrogate(self.config, logprobs, anchor, batch["advantages"])
        teacher_kl = batch["behaviour_logprobs"] - batch["teacher_logprobs"]
        return loss, {**statistics, "teacher_kl": teacher_kl}


def check(config: DistillConfig, run: RunConfig) -> Iterator[Problem]:
    """Only the reward compares the samples of a group."""
    yield from check_objective(config, run)
    if config.reward_weight and config.group_size == 1:
        yield Problem(
            "algorithm.group_size",
            "1 leaves the reward without effect; expected at least 2, or no reward_weight",
        )


@hookimpl
def stretto_algorithm() -> Iterator[Component[DistillConfig]]:
    """The component of this package."""
    yield Component(
        "distill",
        Distill,
        DistillConfig,
        "on-policy distillation: a teacher's logprobs as the reward of each token",
        check,
        requires={"torch": "stretto[torch]"},
    )
