"""Tracker `tensorboard`: event files for TensorBoard, in the run's folder `trackers/tensorboard`.

To see them: `tensorboard --logdir RUN`, or a folder of several runs. `train` and `evaluation` have figures by
step or version; `samples/train` and `samples/evaluation` have samples as texts.
"""

from collections.abc import Iterator

from stretto import Component, TrackerConfig, hookimpl

__all__: list[str] = []


@hookimpl
def stretto_tracker() -> Iterator[Component[TrackerConfig]]:
    yield Component(
        "tensorboard",
        "stretto_tensorboard.events:TensorBoardTracker",
        TrackerConfig,
        "event files for TensorBoard",
        requires={"tensorboard": "stretto[tensorboard]"},
    )
