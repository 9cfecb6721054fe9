"""What the golden vectors leave open of GRPO: gradients, statistics and the scale of steps, by hand."""

import math
from typing import Any

import pytest
import torch

from stretto import Context
from stretto.rl.batch import Batch
from stretto.rl.correction import CorrectionConfig
from stretto_policy_gradients import GRPO, GRPOConfig


def grpo(**options: Any) -> GRPO:
    return GRPO(GRPOConfig(use="grpo", **options), Context(run="r", name="n", seed=1))


def batch_of(rewards: list[float], groups: list[int], answers: list[int], prompt: int = 2) -> Batch:
    lengths, samples = [prompt + answer for answer in answers], torch.arange(len(groups))
    mask = torch.cat([torch.arange(length) >= prompt for length in lengths])
    return Batch(
        lengths,
        {"loss_mask": mask, "behaviour_logprobs": torch.zeros(sum(lengths))},
        {"rewards": torch.tensor(rewards), "group": torch.tensor(groups), "sample": samples},
    )


def test_group_adv_norm_whitens_over_the_tokens_of_each_group() -> None:
    batch = batch_of([1.0, 0.0, 5.0, 5.0], [0, 0, 1, 1], [3, 1, 2, 2])
    found = grpo(group_adv_norm=True, group_reward_norm=False).advantages(batch)
    # Group 0: 1/2 three times, -1/2 once: mean 1/4, std 1/2. Group 1: all 0.
    torch.testing.assert_close(
        found[batch["loss_mask"]], torch.tensor([0.5, 0.5, 0.5, -1.5, 0, 0, 0, 0]), atol=1e-5, rtol=0
    )


def test_decoupled_with_one_update_the_gradient_is_the_weighted_policy_gradient() -> None:
    # The ratio is 1 in value, so d loss / d logp = -w A.
    behaviour = torch.tensor([1.0, 0.25, 1.0, 0.5]).log()
    batch = batch_of([1.0, 0.0], [0, 0], [1, 1], prompt=1).with_columns(
        {"advantages": torch.tensor([0.0, 2.0, 0.0, -1.0]), "behaviour_logprobs": behaviour}
    )
    logprobs = torch.log(torch.tensor([1.0, 0.5, 1.0, 0.25])).requires_grad_()
    losses, _ = grpo(correction=CorrectionConfig(use="decoupled")).loss(logprobs, batch)
    losses.sum().backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, torch.tensor([0.0, -4.0, 0.0, 0.5]))


def test_by_default_stale_tokens_that_moved_far_enough_have_no_gradient() -> None:
    # Ratios to the behaviour policy: 2, 1.1, 1/2, 8. The first is beyond 1.2 and wanted, the third below
    # 0.8 and unwanted: nothing more to do. The second has the gradient -r A. The fourth is unwanted and has
    # become eight times as likely: the dual clip bounds its loss at 3 |A|, without a gradient.
    behaviour = torch.tensor([0.25, 0.5, 0.5, 0.1])
    ratio = torch.tensor([2.0, 1.1, 0.5, 8.0])
    batch = batch_of([1.0, 0.0], [0, 0], [1, 1], prompt=1).with_columns(
        {"advantages": torch.tensor([1.0, 2.0, -1.0, -1.0]), "behaviour_logprobs": behaviour.log()}
    )
    logprobs = (ratio * behaviour).log().requires_grad_()
    losses, statistics = grpo().loss(logprobs, batch)
    losses.sum().backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, torch.tensor([0.0, -2.2, 0.0, 0.0]))
    torch.testing.assert_close(losses.detach(), torch.tensor([-1.2, -2.2, 0.8, 3.0]))
    # r - 1 - log r: 0.3069, 0.0047, 0.1931, and 4.92, which counts as 1.
    expected = torch.tensor([1 - math.log(2), 0.1 - math.log(1.1), math.log(2) - 0.5, 1.0])
    torch.testing.assert_close(statistics["behaviour_kl"], expected)


def test_steps_on_samples_of_a_distant_policy_are_shorter_until_the_target_holds() -> None:
    scale = grpo().lr_scale
    assert scale({"behaviour_kl": 0.01}, 1.0) == 1.0
    assert scale({"behaviour_kl": 0.05}, 1.0) == pytest.approx(0.2)  # target / KL
    assert scale({"behaviour_kl": 0.0101}, 0.2) == pytest.approx(0.2 / 1.2)  # still above: falls further
    assert scale({"behaviour_kl": 0.007}, 0.2) == 0.2  # near the target: stays
    assert scale({"behaviour_kl": 0.001}, 0.2) == pytest.approx(0.22)
    assert scale({"behaviour_kl": 0.0}, 0.95) == 1.0
    assert scale({"behaviour_kl": math.nan}, 0.2) == 0.2  # a step that is skipped anyway
    assert grpo(correction=CorrectionConfig(target_kl=0.1)).lr_scale({"behaviour_kl": 0.05}, 1.0) == 1.0
    assert grpo(correction=CorrectionConfig(target_kl=None)).lr_scale({"behaviour_kl": 9.0}, 1.0) == 1.0


def test_effective_sample_sizes_by_hand() -> None:
    # Ratios of the tokens: 2 and 1/2 in the first answer, 3 in the second, 1 in the third; prompts do not
    # count. Tokens: Σ w = 6.5, Σ w² = 4 + 1/4 + 9 + 1 = 14.25, n = 4.
    # Answers: 1, 3, 1: Σ = 5, Σ² = 11, n = 3.
    batch = batch_of([1.0, 0.0, 0.0], [0, 0, 0], [2, 1, 1], prompt=1)
    ratios = torch.tensor([9.0, 2.0, 0.5, 9.0, 3.0, 9.0, 1.0])
    batch = batch.with_columns({"advantages": torch.ones(7)})
    _, statistics = grpo().loss(ratios.log(), batch)
    means = {name: float(column[batch["loss_mask"]].mean()) for name, column in statistics.items()}
    [train] = [call for call in grpo().calls() if call.op == "train"]
    assert train.loss is not None
    figures = train.loss.summarise(means)
    assert figures["ess_token"] == pytest.approx(6.5**2 / (4 * 14.25))
    assert figures["ess"] == pytest.approx(5**2 / (3 * 11))
    assert not any(name.startswith("moment/") for name in figures)
    assert figures["ratio"] == means["ratio"]


def test_steps_can_be_scaled_by_the_effective_sample_size() -> None:
    scale = grpo(correction=CorrectionConfig(step_scale="ess")).lr_scale
    assert scale({"behaviour_kl": 9.0, "ess": 0.25}, 1.0) == 0.5
    assert scale({"behaviour_kl": 9.0, "ess": 1.0}, 0.5) == 1.0
    assert scale({"behaviour_kl": 9.0, "ess": math.nan}, 0.5) == 0.5


def test_without_correction_stale_tokens_weigh_one() -> None:
    batch = batch_of([1.0, 0.0], [0, 0], [1, 1], prompt=1).with_columns(
        {"advantages": torch.ones(4), "behaviour_logprobs": torch.full((4,), -3.0)}
    )
    losses, statistics = grpo(correction=CorrectionConfig(use="none")).loss(torch.zeros(4), batch)
    torch.testing.assert_close(losses, -torch.ones(4))
    torch.testing.assert_close(statistics["importance_weight"], torch.ones(4))
