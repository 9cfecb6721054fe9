"""Accuracies with 95 % intervals, from the answers of evaluations.

Answers to the same row depend on each other, answers to different rows do not (Miller 2024, arXiv 2411.00640,
sections 2 and 3). So an interval is computed over the means of rows wherever the rows are known.
"""

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
    """Return the mean score of `count` answers with its interval, as if the answers were independent. Without
    `deviation`, a score from 0 to 1 is a binomial share, with at least the error after two successes and two
    failures more: that is not 0 at 0 and 1 (Agresti and Coull 1998). Other scores have no interval."""
    if count < 2 or (deviation is None and not 0 <= score <= 1):
        return Estimate(score, None)
    if deviation is None:
        share = (score * count + 2) / (count + 4)
        variance = max(score * (1 - score) / count, share * (1 - share) / (count + 4))
        return Estimate(score, Z * math.sqrt(variance))
    return Estimate(score, Z * deviation / math.sqrt(count))


def row_scores(answers: Iterable[KeptAnswer], measure: Measure) -> dict[int, float]:
    """Return row -> mean score of its samples."""
    scores_of_rows: defaultdict[int, list[float]] = defaultdict(list)
    for answer in by_sample(answers).values():
        scores_of_rows[answer.row].append(answer.score(measure))
    return {row: fmean(scores) for row, scores in scores_of_rows.items()}


def estimate_difference(one: Mapping[int, float], other: Mapping[int, float]) -> Estimate | None:
    """Return the mean of other − one over the common rows, with its interval; None without a common row.
    A row is hard or easy for both, so this interval is narrower than that of two independent means."""
    common = sorted(one.keys() & other.keys())
    return estimate([other[row] - one[row] for row in common]) if common else None
