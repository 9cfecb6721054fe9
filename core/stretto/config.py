"""The run file as structs: one section each, with every key's type, default and meaning.

`RunConfig` is the whole file. In a composed run, a section that names a component is the struct of that
component.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from stretto.algorithm import AlgorithmConfig
from stretto.component import (
    LocalPath,
    ModelSource,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SandboxMode,
)
from stretto.dataset import DatasetConfig
from stretto.engine import InferenceConfig, Sampling, TrainingConfig
from stretto.launcher import LauncherConfig, Resources
from stretto.reward import RewardConfig
from stretto.tracker import TrackerConfig
from stretto.weights import WeightsConfig
from stretto.workflow import WorkflowConfig

__all__ = [
    "BusConfig",
    "CheckpointConfig",
    "EvaluationConfig",
    "Groups",
    "ModelConfig",
    "QueueConfig",
    "RolloutConfig",
    "RunConfig",
    "VerifierConfig",
]


class QueueConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far generation may run ahead of training."""

    batch_size: PositiveInt = 32
    """Groups in each train step, B. A step trains on B × `algorithm.group_size` samples."""
    max_staleness: NonNegativeInt = 2
    """Train steps a token may be older than the weights it trains, η. 0 is synchronous training."""
    max_divergence: PositiveFloat | None = None
    """Bound on how far batches may be off-policy, in nats a token: while KL(behaviour || current) is above
    it, generation runs fewer than `max_staleness` steps ahead. Null leaves `max_staleness` as the only
    bound."""
    on_late: Literal["wait", "drop"] = "wait"
    """A group that is due but unfinished: wait for it, so that long answers are never lost; or expire
    it and issue its prompt again."""
    max_attempts: PositiveInt = 3
    """How often a ticket is issued before it fails, when workers die or, with `drop`, when it is late."""
    max_filtered: PositiveInt | None = None
    """Groups that the algorithm may filter one after the other before the run stops. Rows that are left out,
    such as by `max_prompt_tokens`, do not count. Default: 16 × `batch_size`."""
    max_failures: PositiveInt | None = None
    """Tickets that may fail one after the other before the run stops. Default: 2 × `batch_size`."""


class EvaluationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Held-out evaluation: at version 0, at every multiple of `every`, and at the last version.
    Each is of exactly one version; training goes on beside those in between."""

    dataset: DatasetConfig
    """Held-out rows."""
    every: NonNegativeInt = 0
    """Versions between two evaluations; 0 evaluates the first and the last only."""
    rows: PositiveInt | None = None
    """Use the first so many rows; default all."""
    samples: PositiveInt = 1
    """Answers to each row."""
    sampling: Sampling | None = None
    """How answers are drawn. What is not said here is as in training."""
    keep_answers: bool = False
    """Write every answer, with its row's columns, version, prompt, reward and length, to
    `answers/step-000040.jsonl` in the run's folder."""


class CheckpointConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Checkpoints in the run's folder. One is always written when the run ends or is interrupted."""

    every: NonNegativeInt = 50
    """Train steps between two checkpoints. 0 writes the last only: a run that crashes is then repeated from
    its beginning, for which its whole log is kept."""
    keep: PositiveInt = 2
    """Newest checkpoints that are kept."""
    keep_best: bool = False
    """Keep the checkpoint of the version with the best held-out accuracy too, the first of equal ones. Every
    version that is evaluated then gets a checkpoint. `summary.json` names it under `best`."""


class BusConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The NATS server that carries the run."""

    url: (
        Annotated[
            str,
            msgspec.Meta(pattern=r"^(nats|tls)://", description="`nats://host:4222` or `tls://host:4222`"),
        ]
        | None
    ) = None
    """A server of one's own, `nats://host:4222` or `tls://…`. By default the run starts the bundled one,
    on loopback, with its store in the run's folder."""
    credentials: LocalPath | None = None
    """With `url`: file with `user` and `password` as JSON, or a NATS credentials file (`.creds`)."""
    grace_s: PositiveFloat = 10.0
    """Seconds that workers and the bundled server outlive a kernel that has gone."""
    max_payload_mb: PositiveInt = 8
    """Largest single message of the bundled server in MiB; larger ones travel in parts."""


class RolloutConfig(Resources, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The workers that run workflows."""

    processes: PositiveInt = 1
    """Rollout workers."""
    concurrency: PositiveInt = 64
    """Tickets that each works on at once, and as many of evaluations."""


class VerifierConfig(Resources, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The workers that run rewards."""

    processes: PositiveInt = 1
    """Verifier workers."""
    children: PositiveInt = 1
    """Scoring processes of each, and as many for an environment; a child that exceeds the time limit is
    killed alone."""
    tool_children: PositiveInt = 4
    """Tool processes of each. One is started at once, the others when calls wait for them."""


class Groups(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Worker groups beside `training`, each under a name of its own."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where one of the algorithm's models comes from, and where it lives."""

    group: str = "training"
    """Name of its worker group: `training`, or a key below `groups`."""
    path: ModelSource | None = None
    """Folder or hub id that it starts from; default the run's `model`."""
    lr: PositiveFloat | None = None
    """Its peak learning rate; default that of its group."""


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole run. In a composed run each section is the struct of the component it chose."""

    name: Annotated[
        str,
        msgspec.Meta(
            pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$",
            description="letters, digits, `-` and `_`, the first a letter or a digit",
        ),
    ]
    """Name of the run; letters, digits, `-` and `_`."""
    steps: NonNegativeInt
    """Train steps. 0 trains nothing: the initial policy is evaluated, and that is all."""
    algorithm: AlgorithmConfig
    """What is optimised."""
    dataset: DatasetConfig
    """Rows to train on."""
    reward: RewardConfig | None = None
    """What scores the answers; required where answers are sampled."""
    model: ModelSource | None = None
    """The initial policy: a local folder in Hugging Face format, or a hub id."""
    seed: int = 1
    """Seed of everything drawn at random."""
    out: str | None = None
    """The run's folder; default `runs/<name>-<time>-<seed>`."""
    plugins: tuple[str, ...] = ()
    """Python files with plugins of one's own, looked up like all paths: from the working directory,
    else beside the run file."""
    training: TrainingConfig = TrainingConfig()
    """The engine that trains: the worker group that every model is in unless it is placed elsewhere."""
    groups: Groups = Groups()
    """More worker groups, each `name: {use: engine, …}` like `training`, with a layout of its own."""
    models: dict[str, ModelConfig] = {}
    """What becomes of the algorithm's models, by name, where it is not the default."""
    inference: InferenceConfig = InferenceConfig()
    """The engine that samples."""
    rollout: RolloutConfig = RolloutConfig()
    """Workers that run workflows."""
    verifier: VerifierConfig = VerifierConfig()
    """Workers that run rewards."""
    workflow: WorkflowConfig = WorkflowConfig()
    """How a prompt becomes trajectories."""
    sampling: Sampling = Sampling()
    """How tokens are drawn in training."""
    queue: QueueConfig = QueueConfig()
    """How far generation may run ahead."""
    evaluation: EvaluationConfig | None = None
    """Held-out evaluation; none by default."""
    on_collapse: Literal["warn", "stop"] = "warn"
    """When the mean reward collapses (docs/advice.md): warn, or save and end the run as failed."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When to save."""
    weights: WeightsConfig = WeightsConfig()
    """How new weights reach the engines."""
    launcher: LauncherConfig = LauncherConfig()
    """What starts the workers."""
    bus: BusConfig = BusConfig()
    """The NATS server."""
    sandbox: SandboxMode = "bubblewrap"
    """What tools, and commands of agents, run in. `unsafe`: in nothing, with the run's rights and a scrubbed
    environment."""
    trackers: tuple[TrackerConfig, ...] = ()
    """Where the figures go besides the run's folder."""
