"""The promises of training engines: the same numbers as the engine `torch`."""

from __future__ import annotations

from stretto.testing import TrainingConformance


class TestMyName(TrainingConformance):
    """stretto's own tests of a training engine."""

    use = "my_name"
