"""Several runs compared: their figures side by side, differences of their values, and intervals.

Runs that differ only in their seed are a group. A score's interval is computed over rows if all answers
are kept, otherwise over single answers as if independent. If two runs kept answers to the same rows, the
difference of their last common evaluation is paired by row; else it is that of their last evaluations.
The interval of rewards is over steps, as if independent.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

import msgspec

from stretto.bus.messages.events import Measure
from stretto.errors import ConfigError
from stretto.records.accuracy import estimate, estimate_difference, estimate_score, row_scores
from stretto.records.figures import FIGURES, RECENT_STEPS, recent
from stretto.records.files import read_record
from stretto.records.intervals import Estimate, Moments, difference_of, mean_of
from stretto.records.metrics import ACCURACY, HELD_OUT_REWARD, MAIN_FIGURES, is_figure
from stretto.records.run_folder import RunFolder
from stretto.records.samples.answers import by_sample, read_answers

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
"""Largest number of common steps at which curves are compared."""
_NO_DIFFERENCE = frozenset({"name", "out"})
"""Keys that name the run and have no effect on its training."""
_MEASURES = (
    "reward.",
    "workflow.environment",
    "evaluation.dataset",
    "evaluation.rows",
    "evaluation.sampling",
)
"""Prefixes of the keys that define what a score measures."""
_LIMITS = frozenset({"reward.timeout_s", "reward.answer_cpu_s", "reward.answer_memory_mb"})
"""Keys with such a prefix that change no score by themselves."""
_OF_REWARDS = ("reward.", "workflow.", "dataset.", "variants.")
"""Prefixes of the keys that define what a reward in training measures."""
MIXED = "held-out score"
"""The label of scores if some runs have an accuracy and others only a reward."""
_APART = _NO_DIFFERENCE | {"seed"}  # keys whose values may differ within a group of seeds


class Evaluated(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation of a run."""

    version: int
    score: Estimate
    measure: str
    """`held-out accuracy` or `held-out reward`; see `RunFolder.held_out`."""
    by_row: bool
    """True if the interval is over the means of rows, False if over independent answers."""

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
    """Mean of the last 10 steps, like the figures from `length` to `tokens_per_s`."""
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


class RunDifference(msgspec.Struct, frozen=True, kw_only=True):
    """The difference of a figure between two runs, `run` − `minus`."""

    run: str
    minus: str
    figure: str
    of: str
    """The compared values, in words."""
    difference: Estimate


class SeedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Runs that differ only in their seed."""

    runs: list[str]
    score: float | None
    """Mean of the runs' last scores; None without scores, or if the compared runs have different measures."""
    score_sd: float | None
    """Standard deviation between the runs; None for a single run."""
    reward: float | None
    reward_sd: float | None
    figure: str = ""
    """What `difference` is of: the runs' measure, or `reward` if the groups have no scores in common."""
    difference: Estimate | None = None
    """This group's mean − that of the first group; None for the first one, or without a comparable figure."""
    paired: int = 0
    """Number of common seeds that pair the runs of both groups; 0 below two: runs count as independent."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `stretto compare` and the page show."""

    runs: list[RunFigures]
    differences: dict[str, list[str | None]]
    """Dotted key -> its JSON value in each run; None where a run lacks the key."""
    curves: dict[str, list[tuple[int, list[float]]]]
    """Key of `metrics.jsonl` -> (step, mean of the 10 steps up to it in each run) for common steps."""
    measure: str
    """As in `Evaluated`; `held-out score` if the runs' measures differ: no differences are computed then."""
    scores: list[tuple[int, list[float | None]]]
    """(version, score in each run)."""
    caution: str
    """Why the scores are not the same measure; empty if they are."""
    between: list[RunDifference]
    """Of each run and the first one, unless both are in `groups`; also of runs that repeat the first one."""
    groups: list[SeedGroup]
    """Groups of at least two runs."""


def labels_of(runs: Sequence[RunFolder]) -> list[str]:
    """Return a label for each run: its name, or its folder where several runs have the same name."""
    names, parents = [run.name for run in runs], [run.folder.parent for run in runs]
    return [
        name if names.count(name) == 1 else str(run.folder.relative_to(os.path.commonpath(parents)))
        for name, run in zip(names, runs, strict=True)
    ]


def compare_runs(runs: Sequence[RunFolder]) -> Comparison:
    """Return the comparison of these runs."""
    figures = [run_figures(run, label) for run, label in zip(runs, labels_of(runs), strict=True)]
    evaluated = [run for run, its_figures in zip(runs, figures, strict=True) if its_figures.last]
    measures = {run.last.measure for run in figures if run.last is not None}
    measure = MIXED if len(measures) > 1 else next(iter(measures), FIGURES[ACCURACY].label)
    comparable = measure != MIXED
    groups = _groups(runs, figures, measure)
    return Comparison(
        runs=figures,
        differences=differences([run.values() for run in runs]),
        measure=measure,
        caution=caution([run.values() for run in evaluated], comparable=comparable),
        curves={key: curve for key in MAIN_FIGURES if (curve := _curve(runs, key))},
        scores=_scores(runs),
        between=[*_between(runs, figures, groups, comparable=comparable)],
        groups=groups,
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
    return recent(_recent_values(run, key))


def _recent_values(run: RunFolder, key: str) -> list[float]:
    return [value for _, value in run.series(key)][-RECENT_STEPS:]


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
    """Return key -> its value in each run or None (see `RunFolder.values`), for keys whose values differ."""
    keys = dict.fromkeys(key for run_values in values for key in run_values)
    return {
        key: row
        for key in keys
        if key not in _NO_DIFFERENCE and len(set(row := [run_values.get(key) for run_values in values])) > 1
    }


def caution(values: Sequence[Mapping[str, str]], *, comparable: bool) -> str:
    """Return why the scores are not the same measure; empty if they are. `comparable`: all scores
    are accuracies, or all are rewards."""
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
    """Return (step, mean in each run up to it) for a few common steps, spread over the shortest run."""
    series = [dict(run.series(key)) for run in runs]
    common = sorted(set.intersection(*(set(values) for values in series)))
    if not common:
        return []
    num_parts = min(_MOST_STEPS, len(common))
    steps = [common[len(common) * part // num_parts - 1] for part in range(1, num_parts + 1)]
    return [(step, [_mean_until(values, step) for values in series]) for step in steps]


def _mean_until(series: Mapping[int, float], step: int) -> float:
    return fmean(series[number] for number in range(step - RECENT_STEPS + 1, step + 1) if number in series)


def _scores(runs: Sequence[RunFolder]) -> list[tuple[int, list[float | None]]]:
    series = [dict(run.series(run.held_out)) for run in runs]
    versions = sorted({version for scores in series for version in scores})
    return [(version, [scores.get(version) for scores in series]) for version in versions]


def _between(
    runs: Sequence[RunFolder], figures: Sequence[RunFigures], groups: Sequence[SeedGroup], *, comparable: bool
) -> Iterable[RunDifference]:
    """Yield the differences of each run and the first one: of their held-out scores and of their rewards."""
    first, first_figures, first_values = runs[0], figures[0], runs[0].values()
    places = {label: number for number, group in enumerate(groups) for label in group.runs}
    for run, its_figures in zip(runs[1:], figures[1:], strict=True):
        label, minus = its_figures.label, first_figures.label
        are_repeats = places.get(label) == places.get(minus) and its_figures.seed == first_figures.seed
        if {label, minus} <= places.keys() and not are_repeats:
            continue
        values = [first_values, run.values()]
        last, first_last = its_figures.last, first_figures.last
        if comparable and last is not None and first_last is not None:
            found = _paired(run, first)
            if found is None and not caution(values, comparable=True):
                found = _unpaired(last, first_last)
            if found is not None:
                of, difference = found
                yield RunDifference(run=label, minus=minus, figure=last.measure, of=of, difference=difference)
        rewards, first_rewards = (Moments.of(_recent_values(each, "reward")) for each in (run, first))
        if rewards.count and first_rewards.count and _has_same_rewards(values):
            of = f"means of the last {rewards.count} and {first_rewards.count} steps"
            difference = difference_of(rewards, first_rewards)
            yield RunDifference(run=label, minus=minus, figure="reward", of=of, difference=difference)


def _unpaired(last: Evaluated, first_last: Evaluated) -> tuple[str, Estimate]:
    intervals = last.score.ci95, first_last.score.ci95
    ci95 = None if None in intervals else math.hypot(*(each or 0.0 for each in intervals))
    of = f"versions {last.version} and {first_last.version}, not paired"
    return of, Estimate(last.score.mean - first_last.score.mean, ci95)


def _paired(run: RunFolder, first: RunFolder) -> tuple[str, Estimate] | None:
    """Return the difference over the rows that both runs have answered in their last common evaluation."""
    fingerprint, versions = _fingerprint(first), {version for version, _ in first.series(first.held_out)}
    common = [version for version, _ in run.series(run.held_out) if version in versions]
    if not common or fingerprint is None or _fingerprint(run) != fingerprint:
        return None
    scores, first_scores = (
        row_scores(read_answers(each.samples, common[-1]), _measure(each)) for each in (run, first)
    )
    difference = estimate_difference(first_scores, scores)
    if difference is None:
        return None
    rows = len(first_scores.keys() & scores.keys())
    return f"{rows} rows that both answered at version {common[-1]}", difference


def _fingerprint(run: RunFolder) -> str | None:
    """Return the fingerprint of the dataset that a run evaluates; None if it is not known."""
    file = run.folder / "fingerprints.json"
    try:
        return msgspec.json.decode(read_record(file), type=dict[str, str]).get("evaluation.dataset")
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{file} does not hold the fingerprints of datasets: {error}") from error


def _has_same_rewards(values: Sequence[Mapping[str, str]]) -> bool:
    """Return whether rewards in training measure the same in these runs."""
    return not any(key.startswith(_OF_REWARDS) for key in differences(values))


def _groups(runs: Sequence[RunFolder], figures: Sequence[RunFigures], measure: str) -> list[SeedGroup]:
    settings: dict[str, list[RunFigures]] = {}
    values: dict[str, Mapping[str, str]] = {}
    for run, its_figures in zip(runs, figures, strict=True):
        key = setting(run.values())
        settings.setdefault(key, []).append(its_figures)
        values[key] = run.values()
    groups = {key: members for key, members in settings.items() if len(members) > 1}
    first = next(iter(groups), "")
    return [
        _group(members, groups[first], measure, same_rewards=_has_same_rewards([values[first], values[key]]))
        for key, members in groups.items()
    ]


def _group(
    members: Sequence[RunFigures], first: Sequence[RunFigures], measure: str, *, same_rewards: bool
) -> SeedGroup:
    scores, rewards = ([value for _, value in _by_seed(members, each)] for each in (measure, "reward"))
    figures = [measure, "reward"] if same_rewards else [measure]
    common = (each for each in figures if _by_seed(members, each) and _by_seed(first, each))
    figure = "" if members is first else next(common, "")
    difference, paired = _difference(members, first, figure) if figure else (None, 0)
    return SeedGroup(
        runs=[member.label for member in members],
        score=fmean(scores) if scores else None,
        score_sd=stdev(scores) if len(scores) > 1 else None,
        reward=fmean(rewards) if rewards else None,
        reward_sd=stdev(rewards) if len(rewards) > 1 else None,
        figure=figure,
        difference=difference,
        paired=paired,
    )


def _by_seed(members: Iterable[RunFigures], figure: str) -> list[tuple[int | None, float]]:
    """Return (seed, figure) of the runs that have it: a reward, or a score of this measure. Several runs may
    have the same seed."""
    if figure == "reward":
        return [(member.seed, member.reward) for member in members if member.reward is not None]
    return [(member.seed, last.score.mean) for member in members if (last := member.last) and figure != MIXED]


def _difference(
    members: Sequence[RunFigures], first: Sequence[RunFigures], figure: str
) -> tuple[Estimate, int]:
    values, first_values = _by_seed(members, figure), _by_seed(first, figure)
    by_seed, first_by_seed = dict(values), dict(first_values)
    common = sorted(by_seed.keys() & first_by_seed.keys(), key=str)
    if len(common) > 1:
        return mean_of(Moments.of(by_seed[seed] - first_by_seed[seed] for seed in common)), len(common)
    return difference_of(*(Moments.of(value for _, value in pairs) for pairs in (values, first_values))), 0
