"""Means of independent values, with 95 % intervals.

Student's interval is mean ± t s / √n; that of a difference is Welch's, without equal variances (Welch 1947,
doi 10.1093/biomet/34.1-2.28).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

Z = 1.959964
"""97.5 % quantile of the normal distribution."""
_FEW_DEGREES = {1: 12.7062, 2: 4.3027}
"""97.5 % quantiles of Student's distribution by degrees of freedom, where the expansion is too inexact."""


class Estimate(msgspec.Struct, frozen=True):
    """A mean with its interval."""

    mean: float
    ci95: float | None
    """Half the width; None for a single value."""

    def __str__(self) -> str:
        return f"{self.mean:.4f}" + ("" if self.ci95 is None else f" ± {self.ci95:.4f}")


class Moments(msgspec.Struct):
    """Number, mean and spread of values, without the values (Welford 1962)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of the squared distances from the mean."""

    def add(self, value: float) -> None:
        """Add one value."""
        self.count += 1
        distance = value - self.mean
        self.mean += distance / self.count
        self.squares += distance * (value - self.mean)

    @staticmethod
    def of(values: Iterable[float]) -> Moments:
        """Return the moments of some values."""
        moments = Moments()
        for value in values:
            moments.add(value)
        return moments

    @property
    def variance_of_mean(self) -> float:
        """s² / n. Expects at least two values."""
        return self.squares / (self.count - 1) / self.count


def mean_of(moments: Moments) -> Estimate:
    """Return the mean of the values with its interval. Expects at least one value."""
    ci95 = None
    if moments.count > 1:
        ci95 = t_quantile(moments.count - 1) * math.sqrt(moments.variance_of_mean)
    return Estimate(moments.mean, ci95)


def difference_of(first: Moments, second: Moments) -> Estimate:
    """Return the mean of `first` minus that of `second`, with Welch's interval; no interval if one
    of them has a single value. Expects at least one value of each."""
    if min(first.count, second.count) < 2:
        return Estimate(first.mean - second.mean, None)
    variances = [(each.variance_of_mean, each.count - 1) for each in (first, second)]
    variance = math.fsum(each for each, _ in variances)
    scaled = math.fsum(each**2 / degrees for each, degrees in variances)
    degrees = variance**2 / scaled if scaled else math.inf  # equal values have no spread
    return Estimate(first.mean - second.mean, t_quantile(degrees) * math.sqrt(variance))


def t_quantile(degrees: float) -> float:
    """Return the 97.5 % quantile of Student's distribution, to 0.2 %.

    From 3 degrees of freedom on: Abramowitz and Stegun (1964), 26.7.5. Fewer are rounded down.
    """
    if degrees < 3:
        return _FEW_DEGREES[max(1, int(degrees))]
    terms = (
        (Z**3 + Z) / 4,
        (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96,
        (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384,
        (79 * Z**9 + 776 * Z**7 + 1482 * Z**5 - 1920 * Z**3 - 945 * Z) / 92160,
    )
    return Z + math.fsum(term / degrees**power for power, term in enumerate(terms, 1))
