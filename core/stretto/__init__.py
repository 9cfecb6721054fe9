"""stretto: a plugin framework for asynchronous reinforcement learning of language models.

`run` trains from Python. The other names are those that a plugin author needs. The module of each name
describes it in detail.
"""

from stretto.algorithm import Algorithm, AlgorithmConfig
from stretto.api import API_VERSION
from stretto.component import Component, Context, LocalPath, Problem
from stretto.dataset import Dataset, DatasetConfig
from stretto.engine import InferenceConfig, InferenceEngine, Sampling, TrainingConfig, TrainingEngine
from stretto.errors import ConfigError, PluginError, RunError, StrettoError
from stretto.hooks import hookimpl
from stretto.launcher import Launcher, LauncherConfig
from stretto.reward import Reward, RewardConfig
from stretto.runs.handle import RunHandle, run
from stretto.tracker import Tracker, TrackerConfig
from stretto.weights import WeightsConfig, WeightsTransport
from stretto.workflow import Workflow, WorkflowConfig

__all__ = [
    "API_VERSION",
    "Algorithm",
    "AlgorithmConfig",
    "Component",
    "ConfigError",
    "Context",
    "Dataset",
    "DatasetConfig",
    "InferenceConfig",
    "InferenceEngine",
    "Launcher",
    "LauncherConfig",
    "LocalPath",
    "PluginError",
    "Problem",
    "Reward",
    "RewardConfig",
    "RunError",
    "RunHandle",
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
    "run",
]
