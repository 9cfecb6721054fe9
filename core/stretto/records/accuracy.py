"""Accuracies with 95 % intervals, from the answers of evaluations.

Answers to one row depend on each other, rows do not (Miller 2024, arXiv 2411.00640, sections 2 and 3). So an
interval is taken over the means of rows wherever they are known.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev

from stretto.bus.messages.events import Measure
from stretto.records.intervals import Estimate, Z
from stretto.records.samples.answers import KeptAnswer, by_sample


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of the rows' values with its interval, mean ± 1.96 s / √R."""
    ci95 = Z * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Estimate(fmean(values), ci95)


def estimate_score(score: float, count: int, deviation: float | None = None) -> Estimate:
    """Return the mean score of `count` answers, as if independent. Without a `deviation` it is a share: the
    interval is the normal approximation of the binomial distribution, and none outside 0 to 1."""
    if deviation is None and 0 <= score <= 1:
        deviation = math.sqrt(score * (1 - score))
    if deviation is None or count < 2:
        return Estimate(score, None)
    return Estimate(score, Z * deviation / math.sqrt(count))


def row_scores(answers: Iterable[KeptAnswer], measure: Measure) -> dict[int, float]:
    """Return row -> mean score of its samples."""
    rows: defaultdict[int, list[float]] = defaultdict(list)
    for answer in by_sample(answers).values():
        rows[answer.row].append(answer.score(measure))
    return {row: fmean(scores) for row, scores in rows.items()}


def estimate_difference(one: Mapping[int, float], other: Mapping[int, float]) -> Estimate | None:
    """Return the mean of other − one over the rows that both have; None without one. Rows of one dataset are
    hard or easy for both, so its interval is narrower than that of two independent means."""
    common = sorted(one.keys() & other.keys())
    return estimate([other[row] - one[row] for row in common]) if common else None
