"""One run of trackio.

A thread of trackio writes logged rows to the database later, so each start reads which rows arrived.
"""

import atexit
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import trackio
from trackio.sqlite_storage import SQLiteStorage

from stretto import Context
from stretto.errors import ConfigError
from stretto.tracker import SAMPLE_FIELDS, Sent, figures, kept_id, sample_cells
from stretto_trackio import TrackioConfig

_EVALUATION = "evaluation/samples"
"""A figure that is in the row of every evaluation, and in no row of a step."""
_SAMPLES = {"train": "samples/train", "eval": "samples/evaluation"}


class TrackioTracker:
    """Logs to one run of trackio."""

    def __init__(self, config: TrackioConfig, context: Context) -> None:
        self._config = config
        self._context = context

    def start(self, config: Mapping[str, Any], resumed_at: Sent | None) -> Sent:
        """Begin or resume the run; return the last steps in the database."""
        del resumed_at
        for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
            if os.environ.get(name):
                raise ConfigError(
                    f"unset {name}: the tracker trackio writes to this machine; `trackio sync` sends"
                )
        base = self._config.run_name or Path(self._context.folder).name
        self._name = kept_id(self._config, self._context, lambda: f"{base}-{secrets.token_hex(2)}")
        self._run = trackio.init(
            self._config.project,
            self._name,
            config=dict(config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        atexit.register(self._run.finish)  # trackio's own exit handler writes only rows of the main thread
        rows = SQLiteStorage.get_logs(self._config.project, self._name)
        not_of_steps = {_EVALUATION, *_SAMPLES.values()}
        return Sent(
            step=max((row["step"] for row in rows if not not_of_steps & row.keys()), default=0),
            evaluation=_newest(rows, _EVALUATION, -1),
            samples=_newest(rows, _SAMPLES["train"], 0),
            evaluation_samples=_newest(rows, _SAMPLES["eval"], -1),
        )

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Log the figures of a step, or of an evaluation at the version that was evaluated."""
        self._run.log(figures(metrics), step=metrics["step"])

    evaluation = step

    def advice(self, advice: Mapping[str, Any]) -> None:
        """Send given advice as an alert of the dashboard."""
        if advice["until"] is None:
            self._run.alert(advice["rule"], advice["message"], level=trackio.AlertLevel.WARN)

    def samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log a table, at its step or version. The dashboard shows texts unchanged."""
        table = trackio.Table(columns=list(SAMPLE_FIELDS), data=[sample_cells(row) for row in rows])
        self._run.log({_SAMPLES[rows[0]["purpose"]]: table}, step=rows[0]["step"])

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the remaining rows."""
        del summary
        self._run.finish()


def _newest(rows: Sequence[Mapping[str, Any]], name: str, default: int) -> int:
    return max((row["step"] for row in rows if name in row), default=default)
