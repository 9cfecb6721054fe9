"""Several runs compared: their figures side by side, differences of their values, and intervals.

Runs that differ only in their seed are a group. Intervals of scores are over rows if all answers are kept,
otherwise over independent answers. If two runs kept answers to the same rows, the difference of their last
common evaluation is paired by row.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

import msgspec

from stretto.bus.messages.events import Measure
from stretto.errors import ConfigError
from stretto.records.accuracy import estimate, estimate_difference, estimate_score, row_scores
from stretto.records.figures import FIGURES, RECENT_STEPS, recent
from stretto.records.files import read_record
from stretto.records.intervals import Estimate, Moments, difference_of, mean_of
from stretto.records.metrics import ACCURACY, HELD_OUT_REWARD, MAIN_FIGURES, is_figure
from stretto.records.samples.answers import by_sample, read_answers

if TYPE_CHECKING:
    from stretto.records.run_folder import RunFolder

__all__ = [
    "Comparison",
    "RunFigures",
    "SeedGroup",
    "caution",
    "compare_runs",
    "differences",
    "labels_of",
    "setting",
]

_MOST_STEPS = 10
"""Number of equal steps at which curves are compared."""
_NO_DIFFERENCE = frozenset({"name", "out"})
"""Keys that say which run it is, and not how it trains."""
_MEASURES = (
    "reward.",
    "workflow.environment",
    "evaluation.dataset",
    "evaluation.rows",
    "evaluation.sampling",
)
"""Prefixes of keys that say what a score measures."""
_LIMITS = frozenset({"reward.timeout_s", "reward.answer_cpu_s", "reward.answer_memory_mb"})
"""Of these, keys that change no score by themselves."""
MIXED = "held-out score"
"""What scores are called that are different measures."""
_APART = _NO_DIFFERENCE | {"seed"}


class Evaluated(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation of a run."""

    version: int
    score: Estimate
    measure: str
    """`held-out accuracy` or `held-out reward`; see `RunFolder.held_out`."""
    by_row: bool
    """Whether the interval is over rows, not over independent answers."""

    def __str__(self) -> str:
        return f"{self.score} (version {self.version})"


class RunFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one run."""

    label: str
    folder: str
    state: str
    verdict: str
    seed: int | None
    steps: int
    reward: float | None
    """Mean of the last 10 steps, as the other figures of steps."""
    length: float | None
    staleness: float | None
    step_s: float | None
    tokens_per_s: float | None
    wall_s: float | None
    """See `RunFolder.wall_s`."""
    last: Evaluated | None
    best: Evaluated | None
    """The evaluation with the highest score."""
    trained: int
    not_trained: int
    """Tickets filtered, expired or failed."""


class Paired(msgspec.Struct, frozen=True, kw_only=True):
    """The difference between two runs in one evaluation, over the rows that both have answered."""

    run: str
    minus: str
    version: int
    rows: int
    difference: Estimate


class SeedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Runs that differ only in their seed."""

    runs: list[str]
    score: float | None
    """Mean of the last scores; None for different measures."""
    score_sd: float | None
    """Standard deviation between the runs; None for a single run."""
    reward: float | None
    reward_sd: float | None
    difference: Estimate | None = None
    """Score less that of the first group; None for that group, without scores, or for different measures."""
    paired: int = 0
    """Number of seeds that pair the difference; 0 if fewer than two are common: runs count as independent."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `stretto compare` and the page show."""

    runs: list[RunFigures]
    differences: dict[str, list[str | None]]
    """Dotted key -> JSON value in each run, or None."""
    curves: dict[str, list[tuple[int, list[float]]]]
    """Key of `metrics.jsonl` -> equal steps, each with the mean of the last 10 steps in each run."""
    measure: str
    """As in `Evaluated`, or `held-out score` if runs differ: such scores are not subtracted."""
    scores: list[tuple[int, list[float | None]]]
    """(version, score in each run)."""
    caution: str
    """Why the scores are not the same measure; empty if they are."""
    paired: list[Paired]
    groups: list[SeedGroup]
    """Only groups of several runs."""


def labels_of(runs: Sequence[RunFolder]) -> list[str]:
    """Return a label for each run: its name, or its folder where several runs have the same name."""
    names = [run.name for run in runs]
    return [
        name if names.count(name) == 1 else str(run.folder.relative_to(_common(runs)))
        for name, run in zip(names, runs, strict=True)
    ]


def _common(runs: Sequence[RunFolder]) -> Path:
    first, *others = (run.folder for run in runs)
    return next(path for path in first.parents if all(path in other.parents for other in others))


def compare_runs(runs: Sequence[RunFolder]) -> Comparison:
    """Compare runs."""
    figures = [run_figures(run, label) for run, label in zip(runs, labels_of(runs), strict=True)]
    evaluated = [run for run, each in zip(runs, figures, strict=True) if each.last]
    measures = {run.last.measure for run in figures if run.last is not None}
    measure = MIXED if len(measures) > 1 else next(iter(measures), FIGURES[ACCURACY].label)
    comparable = measure != MIXED
    return Comparison(
        runs=figures,
        differences=differences([run.values() for run in runs]),
        measure=measure,
        caution=caution([run.values() for run in evaluated], comparable=comparable),
        curves={key: curve for key in MAIN_FIGURES if (curve := _curve(runs, key))},
        scores=_scores(runs),
        paired=list(_paired(runs, figures)) if comparable else [],
        groups=_groups(runs, figures, comparable=comparable),
    )


def run_figures(run: RunFolder, label: str) -> RunFigures:
    """Return the figures of one run, with its label for people."""
    last = run.steps[-1] if run.steps else {}
    ledger: Mapping[str, int] = last.get("ledger", {})
    held_out = run.held_out
    evaluated = [line for line in run.evaluations if is_figure(line.get(held_out))]
    best = max(evaluated, key=lambda line: line[held_out], default=None)
    return RunFigures(
        label=label,
        folder=str(run.folder),
        state=run.state,
        verdict=run.verdict,
        seed=run.config.get("seed"),
        steps=last.get("step", 0),
        reward=_recent(run, "reward"),
        length=_recent(run, "length"),
        staleness=_recent(run, "staleness"),
        step_s=_recent(run, "step_s"),
        tokens_per_s=_recent(run, "step_tokens_per_s"),
        wall_s=run.wall_s,
        last=_evaluated(run, evaluated[-1]) if evaluated else None,
        best=_evaluated(run, best) if best else None,
        trained=ledger.get("trained", 0),
        not_trained=sum(ledger.get(name, 0) for name in ("filtered", "expired", "failed")),
    )


def _recent(run: RunFolder, key: str) -> float | None:
    return recent([value for _, value in run.series(key)])


def _evaluated(run: RunFolder, line: Mapping[str, Any]) -> Evaluated:
    answers = read_answers(run.samples, line["step"])
    all_kept = len(by_sample(answers)) == line["evaluation/samples"] > 0
    if all_kept:
        score = estimate(list(row_scores(answers, _measure(run)).values()))
    else:
        deviation = line["evaluation/reward_std"] if run.held_out == HELD_OUT_REWARD else None
        score = estimate_score(line[run.held_out], line["evaluation/samples"], deviation)
    measure = FIGURES[run.held_out].label
    return Evaluated(version=line["step"], score=score, measure=measure, by_row=all_kept)


def _measure(run: RunFolder) -> Measure:
    return "accuracy" if run.held_out == ACCURACY else "reward"


def differences(values: Sequence[Mapping[str, str]]) -> dict[str, list[str | None]]:
    """Return each key whose value differs between runs, with its values (see `RunFolder.values`) or None."""
    keys = dict.fromkeys(key for each in values for key in each)
    return {
        key: row
        for key in keys
        if key not in _NO_DIFFERENCE and len(set(row := [each.get(key) for each in values])) > 1
    }


def caution(values: Sequence[Mapping[str, str]], *, comparable: bool) -> str:
    """Return why the scores are not the same measure; empty if they are. `comparable`: all are accuracies, or
    all are rewards."""
    if not comparable:
        return "some runs have a held-out accuracy, others only a held-out reward: no difference is taken"
    keys = [key for key in differences(values) if key.startswith(_MEASURES) and key not in _LIMITS]
    if not keys:
        return ""
    return f"the runs differ in {', '.join(keys)}: their held-out scores are not the same measure"


def setting(values: Mapping[str, str]) -> str:
    """Return a text that is the same for runs which differ only in their seed."""
    return json.dumps(sorted((key, value) for key, value in values.items() if key not in _APART))


def _curve(runs: Sequence[RunFolder], key: str) -> list[tuple[int, list[float]]]:
    """Return a few steps that all runs have, spread over the shortest run, with the means that end there."""
    series = [dict(run.series(key)) for run in runs]
    common = sorted(set.intersection(*(set(each) for each in series)))
    if not common:
        return []
    parts = min(_MOST_STEPS, len(common))
    steps = [common[len(common) * part // parts - 1] for part in range(1, parts + 1)]
    return [(step, [_mean_until(each, step) for each in series]) for step in steps]


def _mean_until(series: Mapping[int, float], step: int) -> float:
    return fmean(series[each] for each in range(step - RECENT_STEPS + 1, step + 1) if each in series)


def _scores(runs: Sequence[RunFolder]) -> list[tuple[int, list[float | None]]]:
    series = [dict(run.series(run.held_out)) for run in runs]
    versions = sorted({version for each in series for version in each})
    return [(version, [each.get(version) for each in series]) for version in versions]


def _paired(runs: Sequence[RunFolder], figures: Sequence[RunFigures]) -> Iterable[Paired]:
    first, *others = runs
    rows, versions = _fingerprint(first), {version for version, _ in first.series(first.held_out)}
    for number, run in enumerate(others, 1):
        common = [version for version, _ in run.series(run.held_out) if version in versions]
        if not common or rows is None or _fingerprint(run) != rows:
            continue
        one, other = (
            row_scores(read_answers(each.samples, common[-1]), _measure(each)) for each in (first, run)
        )
        difference = estimate_difference(one, other)
        if difference is not None:
            yield Paired(
                run=figures[number].label,
                minus=figures[0].label,
                version=common[-1],
                rows=len(one.keys() & other.keys()),
                difference=difference,
            )


def _fingerprint(run: RunFolder) -> str | None:
    """Return what identifies the rows that a run evaluates; None if it is not known."""
    file = run.folder / "fingerprints.json"
    try:
        return msgspec.json.decode(read_record(file), type=dict[str, str]).get("evaluation.dataset")
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{file} does not hold the fingerprints of datasets: {error}") from error


def _groups(runs: Sequence[RunFolder], figures: Sequence[RunFigures], *, comparable: bool) -> list[SeedGroup]:
    settings: dict[str, list[RunFigures]] = {}
    for run, each in zip(runs, figures, strict=True):
        settings.setdefault(setting(run.values()), []).append(each)
    groups = [members for members in settings.values() if len(members) > 1]
    return [_group(members, groups[0], comparable=comparable) for members in groups]


def _group(members: Sequence[RunFigures], first: Sequence[RunFigures], *, comparable: bool) -> SeedGroup:
    scores = [score for _, score in _last_scores(members)] if comparable else []
    rewards = [each.reward for each in members if each.reward is not None]
    difference, paired = (None, 0) if members is first or not comparable else _difference(members, first)
    return SeedGroup(
        runs=[each.label for each in members],
        score=fmean(scores) if scores else None,
        score_sd=stdev(scores) if len(scores) > 1 else None,
        reward=fmean(rewards) if rewards else None,
        reward_sd=stdev(rewards) if len(rewards) > 1 else None,
        difference=difference,
        paired=paired,
    )


def _last_scores(members: Iterable[RunFigures]) -> list[tuple[int | None, float]]:
    """Return (seed, last score) of the runs that have one. Several runs may have the same seed."""
    return [(each.seed, each.last.score.mean) for each in members if each.last is not None]


def _difference(members: Sequence[RunFigures], first: Sequence[RunFigures]) -> tuple[Estimate | None, int]:
    ours, theirs = _last_scores(members), _last_scores(first)
    if not ours or not theirs:
        return None, 0
    one, other = dict(ours), dict(theirs)
    common = sorted(one.keys() & other.keys(), key=str)
    if len(common) > 1:
        return mean_of(Moments.of(one[seed] - other[seed] for seed in common)), len(common)
    return difference_of(*(Moments.of(score for _, score in each) for each in (ours, theirs))), 0
