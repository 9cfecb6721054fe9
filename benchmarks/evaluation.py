"""What evaluations cost a run with one engine: with an engine of their own, in turns with training, and none.

    python benchmarks/evaluation.py [--rounds 3] [--every 100] [--steps 200] [KEY=VALUE ...]

Runs the quickstart, whose evaluations have 1,024 rows, three ways in turn. *Alone* is the time of the last
evaluation, for which training rests. A step counts as during an evaluation if the two overlap. Medians over
the rounds; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from stretto.records.metrics import MetricsReader
from stretto.records.run_folder import RunFolder
from whole_runs import QUICKSTART, summary_of

FORMS = {
    "own engine": ("evaluation.own_engine=true",),
    "in turns": ("evaluation.own_engine=false",),
    "none": ("evaluation=null",),
}
FIRST_STEPS = 8
"""They do not count, because the queue fills."""


def measured(folder: Path, *overrides: str) -> dict[str, float]:
    """Return figures of one run, in seconds."""
    wall_s = summary_of(QUICKSTART, folder, *overrides)["wall_s"]
    history = RunFolder(folder).history
    evaluations = [(each.began, each.ended) for each in history.evaluations]
    metrics = MetricsReader(folder)
    metrics.read()
    waited_s = sum(line["wait/evaluation_s"] for line in metrics.steps)
    during: list[float] = []
    outside: list[float] = []
    steps = history.steps
    for before, step in zip(steps[FIRST_STEPS - 1 :], steps[FIRST_STEPS:], strict=False):
        overlaps = any(start < step.ended and before.ended < end for start, end in evaluations)
        (during if overlaps else outside).append(step.ended - before.ended)
    return {
        "wall_s": wall_s,
        "waited_s": waited_s,
        "during_s": _median(during),
        "outside_s": _median(outside),
        "evaluation_s": _median([end - start for start, end in evaluations[:-1]]),
        "alone_s": evaluations[-1][1] - evaluations[-1][0] if evaluations else 0.0,
        "evaluations": len(evaluations),
    }


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else float("nan")


def main() -> None:
    """Measure, and print a table and the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("overrides", nargs="*")
    chosen = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {form: [] for form in FORMS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(chosen.rounds):
            for form, overrides in FORMS.items():
                every = () if form == "none" else (f"evaluation.every={chosen.every}",)
                fixed = (f"steps={chosen.steps}", f"seed={number + 1}", *every)
                out = Path(folder, f"{form.replace(' ', '-')}-{number}")
                found[form].append(measured(out, *fixed, *overrides, *chosen.overrides))
    medians = {
        form: {name: _median([run[name] for run in runs]) for name in runs[0]} for form, runs in found.items()
    }
    print("                 wall s   step during   outside   evaluation s   training waits s")
    for form, run in medians.items():
        print(
            f"{form:14} {run['wall_s']:8.2f}  {run['during_s']:12.4f} {run['outside_s']:9.4f}"
            f" {run['evaluation_s']:14.2f} {run['waited_s']:18.2f}"
        )
    own, none = medians["own engine"], medians["none"]
    alone_s = own["evaluations"] * medians["in turns"]["alone_s"]
    ratios = {
        "step_during_over_outside": own["during_s"] / own["outside_s"],
        "wall_over_none_and_evaluations_alone": own["wall_s"] / (none["wall_s"] + alone_s),
        "wall_over_in_turns": own["wall_s"] / medians["in turns"]["wall_s"],
    }
    for name, ratio in ratios.items():
        print(f"{name.replace('_', ' ')}: {ratio:.3f}")
    print(json.dumps({"ratios": ratios, "medians": medians}))


if __name__ == "__main__":
    main()
