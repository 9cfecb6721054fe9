"""Intervals against values of published tables."""

import math
from statistics import fmean, variance

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.records.intervals import Moments, difference_of, mean_of, t_quantile


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (30, 2.042), (math.inf, 1.960)],
)
def test_quantiles_are_those_of_the_table(degrees: float, expected: float) -> None:
    assert t_quantile(degrees) == pytest.approx(expected, rel=2e-3)


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=50))
def test_moments_are_those_of_the_values(values: list[float]) -> None:
    moments = Moments.of(values)
    assert moments.mean == pytest.approx(fmean(values), abs=1e-9)
    assert moments.variance_of_mean == pytest.approx(variance(values) / len(values), rel=1e-6, abs=1e-9)


def test_the_interval_of_a_mean_is_students() -> None:
    found = mean_of(Moments.of([1.0, 2.0, 3.0]))  # s = 1, t(2) = 4.3027
    assert found.mean == 2.0
    assert found.ci95 == pytest.approx(4.3027 / math.sqrt(3))
    assert mean_of(Moments.of([1.0])).ci95 is None


def test_the_interval_of_a_difference_is_welchs() -> None:
    # variances of the means 1/3 and 4/3, so 25/9 / ((1/9)/2 + (16/9)/2) = 2.94 degrees, rounded down to 2
    found = difference_of(Moments.of([1.0, 2.0, 3.0]), Moments.of([2.0, 4.0, 6.0]))
    assert found.mean == -2.0
    assert found.ci95 == pytest.approx(4.3027 * math.sqrt(5 / 3))
    assert difference_of(Moments.of([1.0]), Moments.of([2.0, 3.0])).ci95 is None
    assert difference_of(Moments.of([1.0, 1.0]), Moments.of([2.0, 2.0])).ci95 == 0.0  # no spread
