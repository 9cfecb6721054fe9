"""Tracker `tensorboard`: event files for TensorBoard, in the run's folder `trackers/tensorboard`.

To look at them: `tensorboard --logdir RUN`, or a folder of several runs. `train` has the figures of the
steps, and `evaluation` those of the evaluations, by version. `samples/train` and `samples/evaluation` have
samples as texts.
"""

from __future__ import annotations

from collections.abc import Iterator

from stretto import Component, Context, TrackerConfig, hookimpl
from stretto.tracker import Tracker

__all__: list[str] = []


def _make(config: TrackerConfig, context: Context) -> Tracker:
    from stretto_tensorboard.events import TensorBoardTracker  # TensorBoard is slow to import

    return TensorBoardTracker(config, context)


@hookimpl
def stretto_tracker() -> Iterator[Component[TrackerConfig]]:
    """The component of this package."""
    yield Component(
        "tensorboard",
        _make,
        TrackerConfig,
        "event files for TensorBoard",
        requires={"tensorboard": "stretto[tensorboard]"},
    )
