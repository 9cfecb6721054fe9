"""The difference between two sides' logprobs, by depth of context."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from stretto.rl.drift import Drift, drift_by_depth, kl_of_tokens


def of(*values: float) -> NDArray[np.float32]:
    return np.array(values, np.float32)


def test_each_token_counts_at_its_own_depth() -> None:
    expected, found = [of(0, 0, 0, 0), of(0, 0)], [of(0, -1, 0, 4), of(2, 0)]
    # Depths 1 to 4, and 1 and 2.
    assert drift_by_depth(expected, found, [0, 1, 2, 4]) == [Drift(1, 2), Drift(0.5, 1), Drift(2, 4)]
    # The second sequence is compared from depth 3 on.
    assert drift_by_depth(expected, found, [0, 2, 4], [1, 3]) == [Drift(0.5, 1), Drift(1.5, 4)]
    assert drift_by_depth(expected, found, [0, 4, 9]) == [Drift(7 / 6, 4), None]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_infinitely_far(value: float) -> None:
    [drift] = drift_by_depth([of(-1, -1)], [of(-1, value)], [0, 2])
    assert drift == Drift(math.inf, math.inf)
    assert drift
    assert not drift.within(1e9)


def test_kl_of_tokens_is_the_k3_estimate() -> None:
    # k3 = r - 1 - log r with r = trainer / sampler: 2 - 1 - log 2, and 0 where both agree.
    sampler, trainer = of(math.log(0.25), math.log(0.5)), of(math.log(0.5), math.log(0.5))
    np.testing.assert_allclose(kl_of_tokens(sampler, trainer), [1 - math.log(2), 0], atol=1e-7)
