"""One run of Weights & Biases.

wandb only appends to a history, but evaluations and samples may come after later steps. So rows have figures
`step` and `evaluation/step`, over which wandb draws curves. A process of wandb sends rows some time after
they were logged, so each start reads which rows arrived, from the run's page or an offline run's files.
"""

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import wandb

from stretto import Context
from stretto.tracker import SAMPLE_FIELDS, Sent, figures, kept_id, sample_cells, tracker_folder
from stretto_wandb import WandbConfig
from stretto_wandb.offline import history_rows

_STEP, _EVALUATION = "step", "evaluation/step"
_SAMPLES = {"train": "samples/train", "eval": "samples/evaluation"}
_SAMPLES_STEP = {purpose: f"{table}_step" for purpose, table in _SAMPLES.items()}
"""The figure over which wandb shows the tables of a purpose."""
_RUNS: dict[str, wandb.Run] = {}
"""Run id -> the run in this process. It must be finished before another tracker can resume it."""


class WandbTracker:
    """Logs to one run of wandb, whose id is the same in all processes."""

    def __init__(self, config: WandbConfig, context: Context) -> None:
        self._config = config
        self._context = context
        self._folder = tracker_folder(config, context)

    def start(self, config: Mapping[str, Any], resumed_at: Sent | None) -> Sent:
        """Begin or resume the run; return the last steps that the run has."""
        del resumed_at
        section = self._config
        run_id = kept_id(section, self._context, lambda: secrets.token_hex(4))
        offline = section.mode == "offline"
        rows: list[dict[str, Any]] = []
        if run_id in _RUNS:
            rows.append(_last(_RUNS[run_id]))  # `finish` does not wait until an offline run's file is written
            _RUNS.pop(run_id).finish()
        for file in self._folder.glob(f"wandb/offline-run-*-{run_id}/run-{run_id}.wandb"):
            rows += history_rows(file)
        self._run = _RUNS[run_id] = wandb.init(
            project=section.project,
            entity=section.entity,
            name=section.run_name or Path(self._context.folder).name,
            group=section.group,
            tags=section.tags,
            id=run_id,
            resume="allow",
            reinit="create_new",  # the default returns the run of another tracker of this process
            mode=section.mode,
            dir=str(self._folder),
            config=dict(config),
            settings=wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True),
        )
        self._run.define_metric(_STEP, hidden=True)
        self._run.define_metric(_EVALUATION, hidden=True)
        self._run.define_metric("*", step_metric=_STEP)
        self._run.define_metric("evaluation/*", step_metric=_EVALUATION)
        for purpose, step in _SAMPLES_STEP.items():
            self._run.define_metric(step, hidden=True)
            self._run.define_metric(_SAMPLES[purpose], step_metric=step)
        if not offline:
            rows = [_last(self._run)]
        return Sent(
            step=_largest(rows, _STEP, 0),
            evaluation=_largest(rows, _EVALUATION, -1),
            samples=_largest(rows, _SAMPLES_STEP["train"], 0),
            evaluation_samples=_largest(rows, _SAMPLES_STEP["eval"], -1),
        )

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Log a row with the figures of a step."""
        self._run.log({_STEP: metrics["step"], **figures(metrics)})

    def evaluation(self, metrics: Mapping[str, Any]) -> None:
        """Log a row with the figures of an evaluation."""
        self._run.log({_EVALUATION: metrics["step"], **figures(metrics)})

    def advice(self, advice: Mapping[str, Any]) -> None:
        """Send given advice as an alert; wandb can notify the user of alerts."""
        if advice["until"] is None:
            self._run.alert(f"stretto: {advice['rule']}", advice["message"], level="WARN")

    def samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log a table, whose texts wandb shows unchanged."""
        purpose, step = rows[0]["purpose"], rows[0]["step"]
        table = wandb.Table(columns=list(SAMPLE_FIELDS), data=[sample_cells(row) for row in rows])
        self._run.log({_SAMPLES_STEP[purpose]: step, _SAMPLES[purpose]: table})

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Finish the run. A run that did not complete counts as failed."""
        self._run.summary["status"] = summary["status"]
        self._run.summary["reason"] = summary["reason"]
        self._run.finish(exit_code=0 if summary["status"] == "completed" else 1)


def _last(run: wandb.Run) -> dict[str, Any]:
    return {name: run.summary.get(name) for name in (_STEP, _EVALUATION, *_SAMPLES_STEP.values())}


def _largest(rows: list[dict[str, Any]], name: str, default: int) -> int:
    return max((row[name] for row in rows if row.get(name) is not None), default=default)
