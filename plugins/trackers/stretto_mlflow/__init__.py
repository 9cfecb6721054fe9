"""Tracker `mlflow`: a run on an MLflow tracking server, or in a store that MLflow can open."""

import os
from collections.abc import Iterator

from stretto import Component, Problem, TrackerConfig, hookimpl
from stretto.config import RunConfig

__all__ = ["MlflowConfig"]


class MlflowConfig(TrackerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the tracker `mlflow`. The credentials come from the environment (`MLFLOW_TRACKING_USERNAME`,
    `MLFLOW_TRACKING_PASSWORD`, `MLFLOW_TRACKING_TOKEN`)."""

    tracking_uri: str | None = None
    """Address of the tracking server, `http://host:5000`, or of a store; default: `MLFLOW_TRACKING_URI` of
    the environment."""
    experiment: str = "stretto"
    """Experiment of the run; it is created if it does not exist."""
    run_name: str | None = None
    """Name of the run in MLflow; default: the name of the run's folder."""


def _check(config: MlflowConfig, run: RunConfig) -> Iterator[Problem]:
    del run
    if config.tracking_uri is None and "MLFLOW_TRACKING_URI" not in os.environ:
        yield Problem(
            "trackers",
            "mlflow has no address: set `tracking_uri`, or MLFLOW_TRACKING_URI in the environment",
            "environment",
        )


@hookimpl
def stretto_tracker() -> Iterator[Component[MlflowConfig]]:
    yield Component(
        "mlflow",
        "stretto_mlflow.mlflow_run:MlflowTracker",
        MlflowConfig,
        "a run on an MLflow tracking server",
        check=_check,
        requires={"mlflow": "stretto[mlflow]"},
    )
