"""The arithmetic: what the golden vectors of the algorithms leave open, gradients by hand, and properties."""

import math
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from stretto.algorithm import Reduction, are_equal
from stretto.rl import functional as F
from stretto.rl.policy_gradient import KLEstimator


def close(found: Tensor, expected: Any, atol: float = 1e-5) -> None:
    torch.testing.assert_close(found.double(), torch.as_tensor(expected).double(), atol=atol, rtol=1e-4)


def test_a_sample_of_several_pieces_counts_once_in_its_group() -> None:
    # Group 0: samples of 1 (two pieces), 0 and 2 (three pieces): mean 1, std 1. Group 1: 3, and 5 in two
    # pieces of 4 and 6: mean 4, std sqrt(2). The numbers of samples begin anew in each group.
    rewards = torch.tensor([1.0, 1.0, 0.0, 2.0, 2.0, 2.0, 3.0, 4.0, 6.0])
    group = torch.tensor([0, 0, 0, 0, 0, 0, 1, 1, 1])
    sample = torch.tensor([1, 1, 2, 3, 3, 3, 1, 2, 2])
    root = math.sqrt(2)
    close(F.group_normalise(rewards, group, sample), [0, 0, -1, 1, 1, 1, -1 / root, 0, 2 / root])
    others = F.group_normalise(rewards, group, sample, std=False, leave_one_out=True)
    close(others, [0, 0, -1.5, 1.5, 1.5, 1.5, -2, 0, 4])
    assert torch.equal(F.group_normalise(rewards, group, torch.arange(9)), F.group_normalise(rewards, group))


@given(
    samples=st.lists(
        st.tuples(st.integers(0, 3), st.floats(-5, 5), st.integers(1, 4)), min_size=1, max_size=12
    )
)
def test_advantages_do_not_depend_on_how_often_a_conversation_was_split(
    samples: list[tuple[int, float, int]],
) -> None:
    whole = F.group_normalise(
        torch.tensor([reward for _, reward, _ in samples], dtype=torch.float64),
        torch.tensor([group for group, _, _ in samples]),
    )
    pieces = [number for number, (_, _, count) in enumerate(samples) for _ in range(count)]
    split = F.group_normalise(
        torch.tensor([samples[number][1] for number in pieces], dtype=torch.float64),
        torch.tensor([samples[number][0] for number in pieces]),
        torch.tensor(pieces),
    )
    close(split, whole[torch.tensor(pieces)], atol=1e-6)


@pytest.mark.parametrize(
    "rewards",
    [
        *([reward] * size for reward in (0.1, 0.9, 87.6, -999.9, 1e-30, 1e300) for size in (1, 7, 8, 32)),
        [0.1 + 0.2, 0.3],  # parts added in another order
        [0.7, float(np.float32(0.7))],
        [0.0, -0.0],
    ],
    ids=str,
)
def test_equal_rewards_have_no_advantage(rewards: list[float]) -> None:
    values, group = torch.tensor([*rewards, 9.0], dtype=torch.float64), [0] * len(rewards) + [1]
    assert are_equal(rewards)
    for std, leave_one_out in ((True, False), (False, False), (True, True), (False, True)):
        found = F.group_normalise(values, torch.tensor(group), std=std, leave_one_out=leave_one_out)
        assert found.tolist() == [0.0] * len(group)
    assert not F.masked_whiten(values[:-1], torch.ones(len(rewards), dtype=torch.bool)).any()


def test_rewards_that_differ_a_little_are_not_equal_and_pieces_may_differ() -> None:
    assert not are_equal([0.7, 0.7000004])
    close(F.group_normalise(torch.tensor([0.7, 0.7000004]), torch.tensor([0, 0])), [-0.16, 0.16], atol=0.07)
    # Two samples of reward 1: the pieces of the first have 0.5 and 1.5.
    found = F.group_normalise(torch.tensor([0.5, 1.5, 1.0]), torch.zeros(3).long(), torch.tensor([0, 0, 1]))
    assert found.tolist() == [0.0] * 3


@given(
    group=st.lists(st.floats(-5, 5), min_size=2, max_size=32).filter(lambda group: np.std(group) >= 0.1),
    shift=st.floats(-1, 1),
    scale=st.floats(1, 1000),
    seed=st.integers(0, 99),
)
def test_advantages_do_not_depend_on_the_order_the_zero_or_the_unit_of_rewards(
    group: list[float], shift: float, scale: float, seed: int
) -> None:
    def advantages(rewards: Any) -> Tensor:
        return F.group_normalise(torch.tensor(rewards, dtype=torch.float64), torch.zeros(len(group)).long())

    plain, rewards = advantages(group), np.array(group)
    most = 2e-5 * plain.abs().clamp(min=1)
    order = np.random.default_rng(seed).permutation(len(group))
    assert ((advantages(rewards[order]) - plain[order]).abs() <= most[order]).all()
    assert ((advantages(rewards + shift * 1000 * np.std(group)) - plain).abs() <= most).all()
    assert ((advantages(rewards * scale) - plain).abs() <= most).all()


@example(groups=[[1.0, 1.0 + 1.192092896e-07]], seed=0)
@given(
    groups=st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=6), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_advantages_of_groups_in_any_order_are_those_of_numpy(groups: list[list[float]], seed: int) -> None:
    rewards = torch.tensor([reward for group in groups for reward in group], dtype=torch.float64)
    names = torch.tensor([index for index, group in enumerate(groups) for _ in group])
    order = torch.randperm(len(rewards), generator=torch.Generator().manual_seed(seed))
    expected = [
        0.0 if are_equal(group) else float((value - np.mean(group)) / (np.std(group, ddof=1) + 1e-6))
        for group in groups
        for value in group
    ]
    found = F.group_normalise(rewards[order], names[order])
    close(found, torch.tensor(expected, dtype=torch.float64)[order], atol=1e-6)


def test_masked_whiten_by_hand() -> None:
    # Chosen 1, 3, 5 of one group: mean 3, std 2. Garbage outside the mask must not matter.
    values = torch.tensor([1.0, math.nan, 3.0, 5.0])
    mask = torch.tensor([True, False, True, True])
    close(F.masked_whiten(values, mask), [-1.0, 0.0, 0.0, 1.0])


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped", "dual"),
    [
        (1.0, 2.0, -2.0, -2.0, False, False),  # d(-rA)/d logp = -rA
        (1.19, 1.0, -1.19, -1.19, False, False),  # inside
        (1.21, 1.0, -1.2, 0.0, True, False),  # beyond the edge: nothing to gain
        (1.5, 2.0, -2.4, 0.0, True, False),  # 1.2 · 2: no more for going further
        (0.5, 2.0, -1.0, -1.0, False, False),  # the pessimistic side is not clipped
        (0.79, -1.0, 0.8, 0.0, True, False),
        (0.81, -1.0, 0.81, 0.81, False, False),
        (1.5, -2.0, 3.0, 3.0, False, False),  # the pessimistic side keeps its gradient
        (9.0, -2.0, 6.0, 0.0, False, True),  # dual clip: at most c |A| = 3 · 2
        (9.0, 2.0, -2.4, 0.0, True, False),  # which is for negative advantages only
    ],
)
def test_clipped_objective_and_its_gradient_by_hand(
    ratio: float, advantage: float, loss: float, gradient: float, clipped: bool, dual: bool
) -> None:
    logprobs = torch.tensor([math.log(ratio)], requires_grad=True)
    found, is_clipped, is_dual = F.clipped_objective(
        logprobs, torch.zeros(1), torch.tensor([advantage]), eps_clip=0.2, c_clip=3.0
    )
    close(found.detach(), [loss])
    assert (is_clipped.tolist(), is_dual.tolist()) == ([clipped], [dual])
    found.sum().backward()
    assert logprobs.grad is not None
    close(logprobs.grad, [gradient])


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        # Sequences with 1 and 3 trained tokens, and one without any.
        ("token", [0.25, 0.0, 0.25, 0.25, 0.25, 0.0]),
        ("sequence", [1 / 2, 0.0, 1 / 6, 1 / 6, 1 / 6, 0.0]),
        ("sequence_sum", [1 / 2, 0.0, 1 / 2, 1 / 2, 1 / 2, 0.0]),
    ],
)
def test_loss_weights_by_hand(reduction: Reduction, expected: list[float]) -> None:
    mask = torch.tensor([True, False, True, True, True, False])
    index = torch.tensor([0, 0, 1, 1, 1, 2])
    close(F.loss_weights(mask, index, 3, reduction), expected)


def test_clipped_value_loss_by_hand() -> None:
    # V_old = 0, eps 0.2. R = 2: V = 0.1 is within, 1.9^2 / 2; V = 1 counts as 0.2, 1.8^2 / 2. R = -1: V = 0.5
    # went the wrong way, which counts in full, 1.5^2 / 2.
    values = torch.tensor([0.1, 1.0, 0.5], requires_grad=True)
    returns = torch.tensor([2.0, 2.0, -1.0])
    loss, clipped = F.clipped_value_loss(values, torch.zeros(3), returns, value_clip=0.2)
    close(loss.detach(), [1.805, 1.62, 1.125])
    assert clipped.tolist() == [False, True, False]
    # d/dV of half a square is V - R, and nothing where the clip acts.
    loss.sum().backward()
    assert values.grad is not None
    close(values.grad, [-1.9, 0.0, 1.5])


def test_the_mean_gradients_of_the_kl_estimates_are_what_they_are_said_to_be() -> None:
    logits = torch.tensor([0.3, -1.0, 0.7], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([1.0, 0.0, -0.5], dtype=torch.float64), -1)

    def gradient_of(number: Tensor) -> Tensor:
        return torch.autograd.grad(number, logits, retain_graph=True)[0]

    policy = torch.log_softmax(logits, -1)
    samples = policy.exp().detach()  # the mean over samples, whose choice has no gradient
    estimators: tuple[KLEstimator, ...] = get_args(KLEstimator)
    of = {
        estimator: gradient_of((samples * F.kl_estimate(policy, reference, estimator)).sum())
        for estimator in estimators
    }
    reverse = gradient_of((policy.exp() * (policy - reference)).sum())
    forward = gradient_of((reference.exp() * (reference - policy)).sum())
    close(of["k1"], [0.0, 0.0, 0.0], atol=1e-9)
    close(of["k2"], reverse, atol=1e-9)
    close(of["k3"], forward, atol=1e-9)


def test_kl_to_behaviour_by_hand() -> None:
    # r = 2: 2 - 1 - ln 2 = 0.306853; r = 1: 0.
    close(F.kl_to_behaviour(torch.tensor([math.log(2.0), 0.0]), torch.zeros(2)), [0.3068528, 0.0])


@pytest.mark.parametrize(
    ("kl", "samples", "expected"),
    [
        (6.0, 100, 0.1),  # on target
        (6.6, 100, 0.1 * 1.01),  # a tenth over, a tenth of the horizon
        (60.0, 100, 0.1 * 1.02),  # no more than a fifth over counts
        (0.0, 100, 0.1 * 0.98),
        (0.0, 9_000, 0.08),  # nor more than a horizon
    ],
)
def test_adapted_kl_coef_by_hand(kl: float, samples: int, expected: float) -> None:
    found = F.adapt_kl_coef(0.1, kl, target=6.0, horizon=1000.0, samples=samples)
    assert found == pytest.approx(expected)


def test_the_gradient_of_dpo_by_hand() -> None:
    # d/dh -ln sigmoid(beta h) = -beta sigmoid(-beta h); at h = 0 -beta / 2.
    difference = torch.tensor([0.0, math.log(3.0)], requires_grad=True)
    F.preference_loss(difference).sum().backward()
    assert difference.grad is not None
    close(difference.grad, [-0.5, -0.25])
