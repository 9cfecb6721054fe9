"""The comparison of a replay with its run: digests, figures of steps, and the off-policy error.

The trajectories of a replay were sampled by the policies of the recorded run. As long as the weights are the
same, the replay has the run's own staleness. With other values the replayed policy moves away from the
behaviour policy, and the importance weights (replayed / behaviour) measure how far.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from rich.table import Table

from stretto.cli.audit.audit_records import read_journal
from stretto.cli.audit.recording import WeightSums, sums_of
from stretto.records.events.history import RecordedBatch, RunHistory
from stretto.records.figures import add_row, figure_table
from stretto.records.files import REPLAY
from stretto.records.run_folder import RunFolder
from stretto.runs.replay import StepWeights

_OF_METRICS = ("loss", "grad_norm", "entropy", "clipped")
"""Keys of `metrics.jsonl` that the comparison shows. A step has the keys that its algorithm logs."""
_OFF_POLICY = ("kl", "ess", "ess_sequences", "outside")
_MOST_STEPS = 10
_MOSTLY_OFF = 0.5
"""The report warns if the effective sample size is below this share of the answers."""

_LIMITS = (
    "nothing was generated: rewards, lengths and accuracies are those of the recorded run, and say nothing "
    "about the replayed values",
    "the recorded policy chose what was sampled; what the replayed policy would have sampled, and learned "
    "from that, is not known",
    "groups that the recorded algorithm filtered out are not there for another algorithm",
)


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The first step whose weights differ."""

    step: int
    recorded: str
    replayed: str
    recorded_layout: str
    replayed_layout: str
    incarnation_from: int | None
    """Version at which the run began a new incarnation, at this step or before it; None if it did not."""


class ComparedStep(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one step in both runs.

    `kl` is the mean k3 estimate of KL(behaviour || policy at the first optimizer step on a token) in nats a
    token, `ess` the effective sample size of the tokens' importance weights as a share of the tokens,
    `ess_sequences` the same of whole answers, and `outside` the share of weights outside 0.8 to 1.2.
    """

    step: int
    recorded: dict[str, float]
    replayed: dict[str, float]


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """A replay and its comparison, as `replay.json` has them."""

    run: str
    first: int
    last: int
    overrides: list[str]
    state: Literal["begun", "complete"]
    compared: int = 0
    """Number of steps of which both digests are known."""
    identical: int = 0
    """Number of these steps before the first step that differs."""
    difference: Difference | None = None
    digest: str = ""
    steps: list[ComparedStep] = []
    limits: list[str] = []
    """What the comparison cannot show. Empty for a replay without overrides."""

    def write(self, folder: Path) -> None:
        (folder / REPLAY).write_bytes(msgspec.json.format(msgspec.json.encode(self)) + b"\n")


def report_of(
    begun: ReplayReport,
    recording: RunHistory,
    batches: Sequence[RecordedBatch],
    run: RunFolder,
    replay: RunFolder,
    weights: Sequence[Iterable[StepWeights]],
) -> ReplayReport:
    """Complete the report `begun` of a replay that has ended: compare it with its run, and both `weights`."""
    replayed = read_journal(replay.folder).history
    recorded, reached = recording.reached, replayed.reached
    compared = [each for each in batches if each.version + 1 in recorded]  # the run may have ended in a step
    identical = [*takewhile(lambda each: recorded[each.version + 1] == reached[each.version + 1], compared)]
    difference: Difference | None = None
    if len(identical) < len(compared):
        batch = compared[len(identical)]
        version = batch.version + 1
        difference = Difference(
            step=version,
            recorded=recorded[version],
            replayed=reached[version],
            recorded_layout=batch.layout,
            replayed_layout=replayed.batches[batch.version].layout,
            incarnation_from=_break_before(recording, version),
        )
    return msgspec.structs.replace(
        begun,
        state="complete",
        compared=len(compared),
        identical=len(identical),
        difference=difference,
        digest=reached[begun.last],
        steps=list(_steps(begun, run, replay, [sums_of(each, batches) for each in weights])),
        limits=list(_LIMITS) if begun.overrides else [],
    )


def _break_before(recording: RunHistory, version: int) -> int | None:
    """Return the last version up to `version` that began a new incarnation without new values, or None."""
    batches, changes = recording.batches, dict(recording.values)
    for each in range(min(version, len(batches) - 1), 0, -1):
        if each not in changes and batches[each].incarnation != batches[each - 1].incarnation:
            return each
    return None


def _steps(
    begun: ReplayReport, run: RunFolder, replay: RunFolder, weights: Sequence[Mapping[int, WeightSums]]
) -> Iterator[ComparedStep]:
    lines = [{line["step"]: line for line in each.steps} for each in (run, replay)]
    for step in range(begun.first, begun.last + 1):
        recorded, replayed = (
            _figures(own.get(step, {}), found.get(step)) for own, found in zip(lines, weights, strict=True)
        )
        yield ComparedStep(step=step, recorded=recorded, replayed=replayed)


def _figures(line: Mapping[str, float], weights: WeightSums | None) -> dict[str, float]:
    figures = {key: float(line[key]) for key in _OF_METRICS if line.get(key) is not None}
    return figures if weights is None else figures | off_policy(weights)


def off_policy(weights: WeightSums) -> dict[str, float]:
    """Return the figures of `ComparedStep` that follow from a step's importance weights."""
    logs = np.array(weights.sequences)
    relative = np.exp(logs - logs.max())  # a product over a long answer may be out of range
    return {
        "kl": weights.kl / weights.tokens,
        "ess": weights.total**2 / (weights.tokens * weights.squares),
        "ess_sequences": float(relative.sum() ** 2 / (len(relative) * (relative**2).sum())),
        "outside": weights.outside / weights.tokens,
    }


def report_lines(report: ReplayReport) -> list[str]:
    """Return the result of a complete replay in words."""
    what = f"steps {report.first} to {report.last} of {report.run} were trained again"
    values = f" with {' '.join(report.overrides)}" if report.overrides else ""
    lines = [f"{what}{values}; nothing was generated"]
    difference = report.difference
    if not report.compared:
        lines.append("no digest to compare: the run ended before its first step was complete")
    elif difference is None:
        lines.append(
            f"identical: all {report.compared} steps reached the recorded digests, at last {report.digest}"
        )
    else:
        lines.append(
            f"step {difference.step} is the first whose weights differ, after {report.identical} identical "
            f"steps: recorded {difference.recorded}, replayed {difference.replayed}"
        )
        if not report.overrides:
            lines += _causes(difference)
    if report.overrides:
        lines += [*_off_policy_lines(report), *(f"not known: {each}" for each in report.limits)]
    return lines


def _causes(difference: Difference) -> Iterator[str]:
    recorded, replayed = difference.recorded_layout, difference.replayed_layout
    if recorded != replayed:
        yield f"the layout differs: recorded {recorded!r}, here {replayed!r}"
    if difference.incarnation_from is not None:
        yield (
            f"the run began a new incarnation at version {difference.incarnation_from}: it continued with "
            "weights that its journal does not repeat; replay the steps after it from its checkpoint: "
            f"--from {difference.incarnation_from}"
        )
    else:
        yield (
            "possible causes: another processor or GPU, another version of torch or of a plugin, another "
            "model under the same path, or a step that is not deterministic; replay twice to find the last "
            "from the others"
        )


def _off_policy_lines(report: ReplayReport) -> Iterator[str]:
    measured = [each for each in report.steps if "kl" in each.replayed]
    if not measured:
        yield "off-policy error: not known, the trainers recorded no importance weights"
        return
    worst = min(measured, key=lambda each: each.replayed["ess"])
    last = measured[-1]
    recorded = f", recorded {_number(last.recorded.get('kl'))}"
    yield (
        f"off-policy error: KL(behaviour || replayed) {_number(last.replayed['kl'])} nats per token in step "
        f"{last.step}{recorded}; effective sample size at least {worst.replayed['ess']:.1%} of the tokens "
        f"(step {worst.step}); {last.replayed['outside']:.1%} of the weights outside 0.8 to 1.2 in step "
        f"{last.step}"
    )
    answers = last.replayed["ess_sequences"]
    if answers < _MOSTLY_OFF:
        yield (
            f"the replayed policy is far from the one that sampled: over whole answers, the effective sample "
            f"size is {answers:.1%} in step {last.step}"
        )


def report_tables(report: ReplayReport) -> list[tuple[str, Table]]:
    """Return the figures of a few steps as a table with its title; none for an identical replay."""
    if report.difference is None:
        return []
    keys = [key for key in (*_OF_METRICS, *_OFF_POLICY) if any(key in each.replayed for each in report.steps)]
    table = figure_table("step", *keys)
    for each in _spread(report.steps):
        cells = (f"{_number(each.recorded.get(key))} / {_number(each.replayed.get(key))}" for key in keys)
        add_row(table, str(each.step), *cells)
    return [("recorded / replayed", table)]


def _spread(steps: Sequence[ComparedStep]) -> list[ComparedStep]:
    if len(steps) <= _MOST_STEPS:
        return list(steps)
    places = np.linspace(0, len(steps) - 1, _MOST_STEPS).round().astype(int)
    return [steps[place] for place in places]


def _number(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.4g}"
