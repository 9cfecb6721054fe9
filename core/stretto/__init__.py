"""stretto: a plugin framework for asynchronous reinforcement learning of language models.

The names that a plugin author needs. The module of each name describes it in detail.
"""

from stretto.algorithm import Algorithm, AlgorithmConfig
from stretto.component import Component, Context, LocalPath, Problem
from stretto.dataset import Dataset, DatasetConfig
from stretto.engine import InferenceConfig, InferenceEngine, Sampling, TrainingConfig, TrainingEngine
from stretto.errors import StrettoError
from stretto.hooks import hookimpl
from stretto.launcher import Launcher, LauncherConfig
from stretto.reward import Reward, RewardConfig
from stretto.tracker import Tracker, TrackerConfig
from stretto.weights import WeightsConfig, WeightsTransport
from stretto.workflow import Workflow, WorkflowConfig

__all__ = [
    "Algorithm",
    "AlgorithmConfig",
    "Component",
    "Context",
    "Dataset",
    "DatasetConfig",
    "InferenceConfig",
    "InferenceEngine",
    "Launcher",
    "LauncherConfig",
    "LocalPath",
    "Problem",
    "Reward",
    "RewardConfig",
    "Sampling",
    "StrettoError",
    "Tracker",
    "TrackerConfig",
    "TrainingConfig",
    "TrainingEngine",
    "WeightsConfig",
    "WeightsTransport",
    "Workflow",
    "WorkflowConfig",
    "hookimpl",
]
