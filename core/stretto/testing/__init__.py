"""The contract of each kind of component as pytest tests, for plugin authors to run against their own.

    from stretto.testing import RewardConformance

    class TestBrevity(RewardConformance):
        use = "brevity"
        options = {"limit": 60}

pytest then runs the tests of rewards with `{use: brevity, limit: 60}`. docs/testing.md says for each kind
what its tests check, and what a class can set.

With `pytest.register_assert_rewrite("stretto.testing")` in a conftest.py, failures show the compared values.
"""

from stretto.testing.algorithm import AlgorithmConformance
from stretto.testing.component import ComponentConformance, ComponentUnderTest
from stretto.testing.dataset import DatasetConformance
from stretto.testing.inference import InferenceConformance
from stretto.testing.launcher import LauncherConformance
from stretto.testing.reward import RewardConformance
from stretto.testing.served_engine import Sample, ServedEngine
from stretto.testing.tiny_model import Reference, TinyModel, make_tiny_model
from stretto.testing.tracker import TrackerConformance
from stretto.testing.training import TrainingConformance
from stretto.testing.weights import WeightsConformance
from stretto.testing.workflow import FakeSession, WorkflowConformance, assert_valid_trajectories

__all__ = [
    "AlgorithmConformance",
    "ComponentConformance",
    "ComponentUnderTest",
    "DatasetConformance",
    "FakeSession",
    "InferenceConformance",
    "LauncherConformance",
    "Reference",
    "RewardConformance",
    "Sample",
    "ServedEngine",
    "TinyModel",
    "TrackerConformance",
    "TrainingConformance",
    "WeightsConformance",
    "WorkflowConformance",
    "assert_valid_trajectories",
    "make_tiny_model",
]
