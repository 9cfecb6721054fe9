"""Algorithm `distill`: on-policy distillation, where a teacher rates every token that the policy samples.

Agarwal et al. 2023 (GKD, arXiv 2306.13649) with the policy's own samples and the reverse KL; as a policy
gradient, Lu et al. 2025 (Thinking Machines Lab, "On-Policy Distillation"): the advantage of a token is
A_t = coef · (log pi_T - log mu), minus the reverse KL of the sampling policy to the teacher at that token
alone; later tokens do not contribute. `reward_weight` w adds the task's reward, w · (R - mean of its group).

Deliberate differences: GKD differentiates the KL over the whole vocabulary; here, as in Lu et al., it is
estimated at the sampled token, so the teacher gives one number for each token. Lu et al. use the plain ratio
to mu; this module uses PPO's clipped surrogate around the correction's anchor, which has the same gradient
where the ratio is 1. A KL in the reward (`kl`) is also subtracted only at its token.

Metrics, averaged over trained tokens: `teacher_kl`, log mu - log pi_T, the estimate of KL(mu || pi_T) in
nats, `clipped`, and the metrics of every policy gradient (see grpo).
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
    """Weight of the teacher's log-ratio in the advantage."""
    reward_weight: NonNegativeFloat = 0.0
    """Weight of the group-centred reward in the advantage; 0 means learning from the teacher alone."""


class Distill(PolicyGradient[DistillConfig]):
    """The teacher's log-ratio as the advantage, and a clipped objective."""

    advantage_reads = ("behaviour_logprobs", "teacher_logprobs")
    objective_reads = ("teacher_logprobs",)

    @property
    def models(self) -> Mapping[str, Model]:
        """The actor, the teacher, and the reference if the run has a KL to it."""
        return {**super().models, "teacher": Model(trainable=False)}

    def more_calls(self) -> Sequence[Call]:
        """Add the teacher's forward pass over the samples."""
        return [forward("teacher", writes="teacher_logprobs")]

    def estimates(self, batch: Batch) -> Mapping[str, Tensor]:
        """Return the column `advantages`. A KL penalty counts only at its token, not at earlier tokens."""
        return {"advantages": self.advantages(batch)}

    def advantages(self, batch: Batch) -> Tensor:
        """Return coef · (log pi_T - log mu) + w · (R - mean) of every sampled token, (T,) float32."""
        import torch

        from stretto.rl.functional import group_normalise

        config = self.config
        teacher_advantages = config.coef * (batch["teacher_logprobs"] - batch["behaviour_logprobs"])  # (T,)
        relative = group_normalise(batch["rewards"], batch["group"], batch["sample"], std=False)  # (S,)
        reward_advantages = config.reward_weight * relative[batch.sequence_index()]
        advantages = teacher_advantages + reward_advantages - self.kl_penalty(batch)
        return torch.where(batch["loss_mask"], advantages, 0.0)

    def objective(
        self, logprobs: Tensor, anchor: Tensor, batch: Batch
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the clipped surrogate, (T,), and statistics."""
        loss, statistics = clipped_surrogate(self.config, logprobs, anchor, batch["advantages"])
        teacher_kl = batch["behaviour_logprobs"] - batch["teacher_logprobs"]
        return loss, {**statistics, "teacher_kl": teacher_kl}


def check(config: DistillConfig, run: RunConfig) -> Iterator[Problem]:
    """Check the teacher, the sampling, and that groups have several samples if the reward has a weight."""
    yield from check_objective(config, run)
    teacher = run.models.get("teacher")
    if run.model is not None and (teacher is None or teacher.path in (None, run.model)):
        yield Problem(
            "models.teacher.path",
            f"is not set, so the teacher is the run's own initial model, {run.model!r}; set it to the "
            "model that teaches",
            "warning",
        )
    if run.sampling.reshapes:
        yield Problem(
            "sampling",
            "the algorithm 'distill' compares the sampler's logprobs with the teacher's over the whole "
            "vocabulary, and with top_p, top_k, min_p or logit_bias engines report those of what they drew "
            "from; leave these options at their defaults",
        )
    if config.reward_weight and config.group_size == 1:
        yield Problem(
            "algorithm.group_size",
            "is 1, so the reward has no effect; expected at least 2, or reward_weight 0",
        )


@hookimpl
def stretto_algorithm() -> Iterator[Component[DistillConfig]]:
    yield Component(
        "distill",
        Distill,
        DistillConfig,
        "on-policy distillation: a teacher's logprobs as the reward of each token",
        check,
        requires={"torch": "stretto[torch]"},
    )
