"""Tracker `trackio`: Hugging Face's tracker, into its database on this machine."""

from collections.abc import Iterator

from stretto import Component, TrackerConfig, hookimpl

__all__ = ["TrackioConfig"]


class TrackioConfig(TrackerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the tracker `trackio`. The environment variable `TRACKIO_DIR` sets the database's folder;
    the default is in the cache of Hugging Face."""

    project: str = "stretto"
    """Project of the run."""
    run_name: str | None = None
    """Name of the run in trackio; default: the name of the run's folder. A suffix makes it unique."""


@hookimpl
def stretto_tracker() -> Iterator[Component[TrackioConfig]]:
    yield Component(
        "trackio",
        "stretto_trackio.trackio_run:TrackioTracker",
        TrackioConfig,
        "trackio's dashboard on this machine",
        requires={"trackio": "stretto[trackio]"},
    )
