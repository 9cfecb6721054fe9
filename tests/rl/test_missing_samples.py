"""The advantages of every algorithm where samples of a group are missing, worked by hand.

Groups of four: one sample of the first is missing, and two of the third. Each answer has one token.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from stretto import Context
from stretto.assembly.plugins import Plugins
from stretto.rl.batch import Batch

REWARDS = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0]
GROUPS = [0, 0, 0, 1, 1, 1, 1, 2, 2]

# Means 1/3, 1/2, 1/2; unbiased variances (4/9 + 1/9 + 1/9) / 2 = 1/3, 4 (1/4) / 3 = 1/3, 2 (1/4) / 1 = 1/2.
CENTRED = [2 / 3, -1 / 3, -1 / 3, 0.5, 0.5, -0.5, -0.5, 0.5, -0.5]
BY_GROUP = [1.154701, -0.577350, -0.577350, 0.866025, 0.866025, -0.866025, -0.866025, 0.707107, -0.707107]
# Less the mean of those that are left: 0, 1/2, 1/2; 1/3 and 2/3; 0 and 1.
LEAVE_ONE_OUT = [1, -0.5, -0.5, 2 / 3, 2 / 3, -2 / 3, -2 / 3, 1, -1]
# All nine tokens: mean 4/9, unbiased variance (4 (5/9)² + 5 (4/9)²) / 8 = 5/18.
WHITENED = [(reward - 4 / 9) / math.sqrt(5 / 18) for reward in REWARDS]
# The centred rewards have the mean 0 and the variance (2/3 + 1 + 1/2) / 8 = 13/48.
CENTRED_WHITENED = [each / math.sqrt(13 / 48) for each in CENTRED]

ADVANTAGES: list[tuple[str, dict[str, Any], list[float]]] = [
    ("grpo", {}, BY_GROUP),
    ("grpo", {"group_reward_norm": False}, CENTRED),
    ("cispo", {}, BY_GROUP),
    ("dapo", {}, BY_GROUP),
    ("gspo", {}, BY_GROUP),
    ("m2po", {}, BY_GROUP),
    ("sapo", {}, BY_GROUP),
    ("rloo", {}, LEAVE_ONE_OUT),
    ("reinforce_pp", {}, WHITENED),
    ("reinforce_pp", {"baseline": True}, CENTRED_WHITENED),
    ("ppo", {"adv_norm": False}, REWARDS),
    ("ppo", {"adv_norm": True}, WHITENED),
    ("distill", {"reward_weight": 1.0}, CENTRED),
]
WITHOUT_GROUPS = {"dpo", "sft", "reward_model"}
"""They sample nothing."""


def batch() -> Batch:
    count = len(REWARDS)
    tokens = 2 * count
    zeros = ("behaviour_logprobs", "teacher_logprobs", "values")
    return Batch(
        [2] * count,
        {"loss_mask": torch.arange(tokens) % 2 == 1, **{name: torch.zeros(tokens) for name in zeros}},
        {
            "rewards": torch.tensor(REWARDS),
            "group": torch.tensor(GROUPS),
            "sample": torch.tensor([0, 1, 2, 0, 1, 2, 3, 0, 1]),
        },
    )


@pytest.mark.parametrize(("name", "options", "expected"), ADVANTAGES)
def test_advantages_are_those_of_the_samples_that_are_left(
    name: str, options: dict[str, Any], expected: list[float]
) -> None:
    component = Plugins().get("algorithm", name)
    algorithm = component.make(component.config(use=name, **options), Context(run="r", name="n", seed=1))
    found = algorithm.estimates(batch())["advantages"]
    assert found[0::2].abs().max() == 0
    torch.testing.assert_close(found[1::2], torch.tensor(expected), atol=2e-5, rtol=0)


def test_no_algorithm_is_left_out() -> None:
    assert {name for name, _, _ in ADVANTAGES} | WITHOUT_GROUPS == set(Plugins().names("algorithm"))
