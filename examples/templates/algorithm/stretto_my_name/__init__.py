"""The algorithm `my_name`: GRPO whose baseline is the median of a group's rewards, in place of their mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from stretto import Component, hookimpl
from stretto.rl.policy_gradient import ClippedConfig, PolicyGradient, check_policy, clipped_surrogate

if TYPE_CHECKING:
    from torch import Tensor

    from stretto.rl.batch import Batch


class MyNameConfig(ClippedConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the algorithm `my_name`."""


class MyName(PolicyGradient[MyNameConfig]):
    """Advantages relative to the group's median, clipped objective."""

    def advantages(self, batch: Batch) -> Tensor:
        """Return the reward minus the median of its group, at every sampled token: (T,) float32."""
        import torch

        rewards, sample = batch["rewards"], batch["sample"]
        baseline = rewards.clone()
        for own in (batch["group"] == number for number in batch["group"].unique()):
            # The pieces of a conversation are one sample: it counts once.
            of_samples = [rewards[own & (sample == each)].mean() for each in sample[own].unique()]
            baseline[own] = torch.stack(of_samples).median()
        return (rewards - baseline)[batch.sequence_index()] * batch["loss_mask"]

    def objective(
        self, logprobs: Tensor, anchor: Tensor, batch: Batch
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return PPO's clipped surrogate of each token, (T,), and statistics."""
        return clipped_surrogate(self.config, logprobs, anchor, batch["advantages"])


@hookimpl
def stretto_algorithm() -> Iterator[Component[MyNameConfig]]:
    """The component of this package."""
    summary = "the group's median as baseline, clipped objective"
    yield Component(
        "my_name", MyName, MyNameConfig, summary, check_policy, requires={"torch": "stretto[torch]"}
    )
