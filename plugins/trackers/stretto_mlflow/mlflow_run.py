"""One run of MLflow.

A figure is `train/<name>` or `evaluation/<name>`. A further `/` becomes a dot, because a store of files
cannot have both `reward` and `reward/format`. A killed process may have logged only a part of a step, so the
next process reads the last step of each figure.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, cast

from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from stretto import Context
from stretto.tracker import SAMPLE_FIELDS, Sent, figures, kept_id, sample_cells
from stretto_mlflow import MlflowConfig

_REFUSED = re.compile(r"[^\w .:-]")
"""Characters that MLflow does not accept in the name of a figure or a parameter, and `/`."""
_MOST_PARAMS = 100
"""Maximum number of parameters that MLflow accepts in one call."""
_LONGEST_VALUE = 500
"""Maximum characters of the value of a parameter or tag: the smallest limit of MLflow's stores."""
_STATUS = {"completed": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}


class MlflowTracker:
    """Logs to one run of MLflow. Every method returns after the store has answered."""

    def __init__(self, config: MlflowConfig, context: Context) -> None:
        self._config = config
        self._context = context
        self._run_id = ""
        self._last: dict[str, int] = {}
        """Figure -> its last step in the store."""

    def start(self, config: Mapping[str, Any], resumed_at: Sent | None) -> None:
        """Create or resume the run; read the last step of each figure."""
        self._client = MlflowClient(self._config.tracking_uri)
        self._run_id = kept_id(self._config, self._context, self._create_run)
        self._client.update_run(self._run_id, status="RUNNING")
        data = self._client.get_run(self._run_id).data
        for name in data.metrics:
            history = self._client.get_metric_history(self._run_id, name)
            self._last[name] = max(metric.step for metric in history)
        if resumed_at is None:
            self._log_params(config, data.params)

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Log the figures of a step."""
        self._log("train", metrics)

    def evaluation(self, metrics: Mapping[str, Any]) -> None:
        """Log the figures of an evaluation, at the version that was evaluated."""
        self._log("evaluation", metrics)

    def advice(self, advice: Mapping[str, Any]) -> None:
        """Set a tag with the advice, or delete the tag when the advice is withdrawn."""
        name = f"advice.{advice['rule']}"
        if advice["until"] is None:
            self._client.set_tag(self._run_id, name, advice["message"][:_LONGEST_VALUE])
        elif name in self._client.get_run(self._run_id).data.tags:
            self._client.delete_tag(self._run_id, name)

    def samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write a table as an artifact. A table that is sent again replaces the artifact."""
        kind = "train" if rows[0]["purpose"] == "train" else "evaluation"
        # The format of MLflow's tables. `log_table` would need pandas, and would append a table sent again.
        table = {"columns": SAMPLE_FIELDS, "data": [sample_cells(row) for row in rows]}
        self._client.log_dict(self._run_id, table, f"samples/{kind}-{rows[0]['step']:06}.json")

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Set the status of the run."""
        self._client.set_tag(self._run_id, "reason", summary["reason"][:_LONGEST_VALUE])
        self._client.set_terminated(self._run_id, _STATUS[summary["status"]])

    def _create_run(self) -> str:
        name = self._config.experiment
        try:
            experiment = self._client.create_experiment(name)
        except MlflowException:  # it exists: another process may just have created it
            existing = self._client.get_experiment_by_name(name)
            if existing is None:
                raise
            experiment = existing.experiment_id
        run_name = self._config.run_name or Path(self._context.folder).name
        return self._client.create_run(experiment, run_name=run_name).info.run_id

    def _log(self, prefix: str, metrics: Mapping[str, Any]) -> None:
        step, milliseconds = metrics["step"], round(1000 * metrics["time"])
        values = {
            f"{prefix}/{_REFUSED.sub('.', name.removeprefix(f'{prefix}/'))}": value
            for name, value in figures(metrics).items()
        }
        new = [
            Metric(name, value, milliseconds, step)
            for name, value in values.items()
            if self._last.get(name, -1) < step
        ]
        self._client.log_batch(self._run_id, metrics=new)

    def _log_params(self, config: Mapping[str, Any], logged: Mapping[str, str]) -> None:
        """Log the run's config as parameters, except those logged before: a parameter cannot change."""
        params = (
            Param(_REFUSED.sub("_", key), value[:_LONGEST_VALUE])
            for key, value in _leaves(config)
            if key not in logged
        )
        while batch := list(islice(params, _MOST_PARAMS)):
            self._client.log_batch(self._run_id, params=batch)


def _leaves(node: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(node, Mapping):
        for key, value in cast("Mapping[str, Any]", node).items():
            yield from _leaves(value, f"{path}.{key}" if path else key)
    else:
        yield path, str(node)
