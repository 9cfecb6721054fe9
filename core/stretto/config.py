"""The run file as structs: one struct for each section, with the type, default and meaning of every key.

`RunConfig` is the whole file. In a composed run, a section that names a component is an instance of that
component's own struct.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec

from stretto.algorithm import AlgorithmConfig
from stretto.component import (
    LocalPath,
    ModelSource,
    NonNegativeFloat,
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
    "Bounds",
    "BusConfig",
    "CheckpointConfig",
    "EvaluationConfig",
    "Groups",
    "MetricsConfig",
    "ModelConfig",
    "QueueConfig",
    "RolloutConfig",
    "RunConfig",
    "SamplesConfig",
    "TlsConfig",
    "VariantConfig",
    "Variants",
    "VerifierConfig",
]


class QueueConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far generation may run ahead of training."""

    batch_size: PositiveInt = 32
    """Number of groups in each train step, B. A step trains on B × `algorithm.group_size` samples."""
    max_staleness: NonNegativeInt = 2
    """Maximum staleness η: number of train steps by which a token may be older than the weights that it
    trains. 0 is synchronous training."""
    max_divergence: PositiveFloat | None = None
    """Bound on how far batches may be off-policy, in nats per token. While KL(behaviour || current) is above
    this bound, generation runs fewer than `max_staleness` steps ahead. With null, `max_staleness` is the
    only bound."""
    on_late: Literal["wait", "drop"] = "wait"
    """What to do with a group that is due but unfinished. `wait` waits for it, so that long answers are never
    lost. `drop` expires the group and issues its prompt again."""
    max_attempts: PositiveInt = 3
    """Maximum number of times that a ticket is issued before its row is given up. A ticket is issued again
    when its group fails, when its worker dies and, with `on_late: drop`, when it is late."""
    min_members: PositiveInt | Literal["all"] | None = None
    """Number of samples that a group must have when others have failed; with fewer, the whole group fails.
    `all`: a group in which a sample has failed is not trained. Default: half of the group, at least 2."""
    max_filtered: PositiveInt | None = None
    """Maximum number of consecutive groups that the algorithm filters; the run then stops. Rows that the
    dataset leaves out, such as by `max_prompt_tokens`, do not count. Default: 16 × `batch_size`."""
    max_failures: PositiveInt | None = None
    """Maximum number of consecutive groups that fail; the run then stops. Default: 2 × `batch_size`."""

    def least_members(self, samples: int) -> int:
        """Return the minimum number of samples of a group in which other samples have failed.

        Args:
            samples: number of samples of a complete group.
        """
        if self.min_members == "all":
            return samples
        return min(samples, self.min_members or max(2, samples // 2))


class EvaluationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Held-out evaluation at version 0, at every multiple of `every`, and at the last version.

    Each evaluation samples from exactly one version. During the evaluations before the last, training
    continues if evaluations have an engine of their own, or if there are several engines. Otherwise the
    evaluation takes the engine in turns, and training waits."""

    dataset: DatasetConfig
    """Dataset of held-out rows."""
    measure: Literal["answers", "loss", "both"] | None = None
    """What to measure on the held-out rows: the reward of sampled answers; the algorithm's loss, for an
    algorithm such as `sft` that reads rows; or both. null: `loss` without a `reward`, else `answers`. The
    trainers measure the loss after the first step, after every step whose version is a multiple of `every`,
    and after the last step, as part of the step."""
    every: NonNegativeInt = 0
    """Number of versions between two evaluations. 0 evaluates the first and the last version only."""
    own_engine: bool | None = None
    """Give evaluations an inference worker of their own, with a second copy of the model. On CPUs it
    computes with low priority, so training loses little. null: yes if the run has one engine, if that kind of
    engine starts quickly, on CPUs with the local launcher, and if memory suffices. `stretto check` says what
    the run does. Without it, `wait/evaluation_s` in `metrics.jsonl` is the time that training waits."""
    rows: PositiveInt | None = None
    """Number of rows to use, from the first row on; default all rows."""
    samples: PositiveInt = 1
    """Number of answers to sample for each row."""
    sampling: Sampling | None = None
    """How to sample the answers. A key that is not set here has its value from training (`sampling`)."""
    keep_answers: bool = False
    """Keep every answer as a sample, whatever `samples.keep` says. `stretto samples RUN --purpose eval` shows
    them."""

    def first_rows(self, available: int) -> int:
        """Return the number of rows to use of the available ones."""
        return min(available, self.rows or available)


class CheckpointConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Checkpoints in the run's folder, or in a store. The run always writes one when it ends or is
    interrupted."""

    every: NonNegativeInt = 50
    """Number of train steps between two checkpoints. 0 writes only the last one: `resume` then repeats a
    crashed run from its beginning, and the run keeps its whole log for that."""
    keep: PositiveInt = 2
    """Number of checkpoints to keep, the newest ones."""
    keep_best: bool = False
    """Also keep the checkpoint of the version with the best held-out score; of equal versions, the first.
    Every evaluated version then gets a checkpoint. `summary.json` names the best one under `best`."""
    copy_gb: NonNegativeFloat = 2.0
    """Largest copy of a checkpoint that each trainer may hold in memory, in GB. The copy is written while the
    next steps run. If more is needed, or with 0, the next step waits until the checkpoint is written."""
    store: (
        Annotated[
            str,
            msgspec.Meta(
                pattern=r"^[a-z][a-z0-9+.-]*://[^\s?#@]+$(?!\n)",
                description="a URL such as `s3://bucket/folder`, without a login",
            ),
        ]
        | None
    ) = None
    """URL of a folder for the files of the checkpoints, which fsspec can write: `s3://…`, `gs://…`,
    `file:///…`. Each run has its own folder in it. Trainers then need no folder in common with the kernel.
    Credentials come from the environment, as the file system of the URL says. Default: the run's folder."""


class SamplesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The samples that the run keeps in its folder, for people who look at them."""

    keep: Annotated[
        str,
        msgspec.Meta(
            pattern=r"^(all|none|(last|every) [1-9][0-9]{0,8})$(?!\n)",
            description="`all`, `none`, `last N` (steps) or `every K` (tickets)",
        ),
    ] = "all"
    """Which samples to keep. `all`: those of every ticket. `last N`: those of the last N steps. `every K`:
    those of every K-th ticket, and in evaluations of every K-th row. `none`: none."""

    @property
    def last(self) -> int | None:
        """Number of steps of which the samples are kept; None for all."""
        return int(self.keep.removeprefix("last ")) if self.keep.startswith("last ") else None

    def keeps(self, number: int) -> bool:
        """Return whether to keep the samples of a training ticket, or of a row of an evaluation."""
        every = int(self.keep.removeprefix("every ")) if self.keep.startswith("every ") else 1
        return self.keep != "none" and number % every == 0


class TlsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """TLS of the connections to your own NATS server. docs/nats.md has the commands that make such files."""

    ca: LocalPath | None = None
    """Certificates of the authorities that may have signed the server's certificate; default: the
    system's."""
    certificate: LocalPath | None = None
    """Certificate that every process of the run shows to the server, if the server asks for one."""
    key: LocalPath | None = None
    """Private key of `certificate`, not encrypted."""

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key go together")


_ADDRESS = r"(nats|tls)://[^\s,]+"
_MOST_REPLICAS = 5
"""Largest number of copies of a stream in NATS."""
_MOST_PAYLOAD_MB = 64
"""A nats-server refuses to start with larger messages."""
_MOST_PORT = 65535


class BusConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The NATS server, or the cluster of NATS servers, that carries the run."""

    url: (
        Annotated[
            str,
            msgspec.Meta(
                pattern=rf"^{_ADDRESS}(,\s*{_ADDRESS})*$(?!\n)",
                description="`nats://host:4222` or `tls://host:4222`, several with commas",
            ),
        ]
        | None
    ) = None
    """Address of your own NATS server, `nats://host:4222` or `tls://…`; of a cluster the addresses of all its
    servers, with commas. By default the run starts the bundled server on loopback, with its store in the
    run's folder."""
    credentials: LocalPath | None = None
    """Credentials for `url`: a JSON file with `user` and `password`, or a NATS credentials file
    (`.creds`)."""
    tls: TlsConfig | None = None
    """Authority and certificate for `url` with `tls://`."""
    replicas: Annotated[int, msgspec.Meta(ge=1, le=_MOST_REPLICAS)] = 1
    """Number of servers of a cluster that keep a copy of everything stored. With 3, the run continues when
    one of the servers is lost. The bundled server is one server."""
    listen: (
        Annotated[
            str,
            msgspec.Meta(
                pattern=r"^([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?$(?!\n)",
                description="an address such as `0.0.0.0:4222`, `10.0.0.5` or `[::]:4222`",
            ),
        ]
        | None
    ) = None
    """Address at which the bundled server listens, `host` or `host:port`, so that workers of other machines
    can join; `0.0.0.0` is every address of the machine. Without a port it takes a free one. Off loopback the
    server has TLS, and each process of the run its own certificate. Default: loopback."""
    address: (
        Annotated[
            str, msgspec.Meta(pattern=r"^[A-Za-z0-9:.-]+$(?!\n)", description="a host's name or address")
        ]
        | None
    ) = None
    """Name or address by which other machines reach the bundled server. Default: the address in
    `listen`; for `0.0.0.0` the machine's name if it resolves to an address other than loopback, else the
    address of the machine's default route."""
    insecure: bool = False
    """Use no TLS for `listen`, and do not warn of a `url` without TLS on another machine. Whoever can read
    the network then reads the run's credentials, and with them can do everything that its workers can."""
    grace_s: PositiveFloat = 10.0
    """Seconds that workers and the bundled server keep running after the kernel process is gone. This applies
    to workers on the kernel's machine that see the run's folder; other workers leave after `outage_s`."""
    outage_s: PositiveFloat = 300.0
    """Seconds for which the run waits for a NATS server that is gone or does not answer. Afterwards the run
    ends, and can be resumed. A worker on another machine leaves after this many seconds without the
    kernel."""
    max_payload_mb: Annotated[int, msgspec.Meta(ge=1, le=_MOST_PAYLOAD_MB)] = 8
    """Largest single message of the bundled server, in MiB. Larger messages are sent in parts."""

    def __post_init__(self) -> None:
        schemes = {server.partition(":")[0] for server in self.servers}
        if self.servers and (self.listen or self.address):
            raise ValueError("listen and address are for the bundled server; with url there is none")
        if not self.servers and self.replicas > 1:
            raise ValueError(
                f"replicas {self.replicas} needs a cluster: url names its servers; the bundled server is one"
            )
        if self.tls is not None and schemes != {"tls"}:
            raise ValueError("tls needs a url in which every server has tls://")
        if len(schemes) > 1:
            raise ValueError("url has servers with tls:// and servers with nats://; expected one of them")
        port = (self.listen or "").rpartition("]")[2].rpartition(":")[2]
        if port.isdigit() and int(port) > _MOST_PORT:
            raise ValueError(f"listen has the port {port}; expected at most {_MOST_PORT}")
        if self.credentials is not None and not self.servers:
            raise ValueError(
                "credentials are for your own server (the bundled one makes its own); set its "
                "url too, or leave them out"
            )
        if self.address and not self.listen:
            raise ValueError("address needs listen: without it the bundled server is on loopback only")

    @property
    def servers(self) -> tuple[str, ...]:
        """The addresses in `url`; empty for the bundled server."""
        return tuple(address.strip() for address in self.url.split(",")) if self.url else ()


class MetricsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The run's figures for Prometheus, at `http://<address>:<port>/metrics`."""

    address: str = "127.0.0.1"
    """Address at which the kernel listens. Anybody who can reach it can read the figures."""
    insecure: bool = False
    """Listen at an address other than loopback. There is no login and no TLS."""
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    """Port at which the kernel listens. 0 takes a free port; the log and `status.json` name it."""
    hosts: tuple[str, ...] = ()
    """Names by which Prometheus calls the kernel's machine. `localhost`, the machine's own name and addresses
    need no entry; requests for other names are refused."""


class Bounds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The bounds of a number that stretto changes during the run."""

    min: PositiveInt
    """The smallest value."""
    max: PositiveInt
    """The largest value."""

    def __post_init__(self) -> None:
        if self.min > self.max:
            raise ValueError(f"min is {self.min} and max is {self.max}; expected min <= max")


class RolloutConfig(Resources, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The workers that run workflows."""

    processes: PositiveInt = 1
    """Number of rollout workers."""
    concurrency: PositiveInt | Bounds = 64
    """Number of training tickets that each worker runs at once. Each worker also runs up to this many
    evaluation tickets at once. `{min: 8, max: 64}` is for conversations of many turns: the number begins at
    `min`, grows while it is reached, and falls while engines recompute texts that their caches could not
    keep. With `inference.deterministic` it is `max`."""

    @property
    def most(self) -> int:
        """The largest number of tickets of one purpose that each worker runs at once."""
        return self.concurrency if isinstance(self.concurrency, int) else self.concurrency.max


class VerifierConfig(Resources, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The workers that run rewards."""

    processes: PositiveInt = 1
    """Number of verifier workers."""
    children: PositiveInt = 1
    """Number of scoring processes of each worker. A run with an environment has this many environment
    processes in each worker too. A process that exceeds its time limit is killed; the others continue."""
    tool_children: PositiveInt = 4
    """Maximum number of tool processes of each worker. One starts with the worker; the others start when
    calls wait."""
    pause_s: NonNegativeFloat = 300.0
    """How long the calls of the reward or the environment pause, in seconds, after 10 calls in a row failed
    because a service did not answer or a call took too long. During the pause one call at a time is repeated;
    after it, the calls fail. 0: calls never pause."""


class Groups(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Worker groups besides `training`, each under its own name."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The source of one of the algorithm's models, and the worker group that holds it."""

    group: str = "training"
    """Name of the worker group that holds the model: `training`, or a key of `groups`."""
    path: ModelSource | None = None
    """Folder or hub id of the initial weights; default the run's `model`."""
    lr: PositiveFloat | None = None
    """Peak learning rate of the model; default the `lr` of its worker group."""


class VariantConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One variant of an A/B test. A section that is not set here is the run's own section. A key that is not
    set in a section has the value of the run's own section; if the section has another `use`, its default."""

    weight: PositiveFloat = 1.0
    """Share of the training tickets that this variant gets, relative to the weights of the others."""
    workflow: WorkflowConfig | None = None
    """The variant's workflow."""
    reward: RewardConfig | None = None
    """The variant's reward."""
    sampling: Sampling | None = None
    """How the variant samples tokens. The temperature cannot differ from that of `sampling`: a train step
    computes all its logprobs at one temperature."""


class Variants(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The variants of an A/B test, each under its own name."""


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole run. In a composed run, each section is the struct of the component that `use` names."""

    name: Annotated[
        str,
        msgspec.Meta(
            pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,99}$(?!\n)",
            description="at most 100 letters, digits, `-` and `_`, the first a letter or a digit",
        ),
    ]
    """Name of the run: letters, digits, `-` and `_`."""
    steps: NonNegativeInt
    """Number of train steps. With 0 the run trains nothing and only evaluates the initial policy."""
    algorithm: AlgorithmConfig
    """The algorithm, which defines what the run optimises."""
    dataset: DatasetConfig
    """Dataset of the rows to train on."""
    reward: RewardConfig | None = None
    """The reward that scores the answers. Required when the run samples answers."""
    model: ModelSource | None = None
    """The initial policy: a local folder in Hugging Face format, or a hub id."""
    seed: int = 1
    """Seed of all random numbers of the run."""
    out: str | None = None
    """The run's folder; default `runs/<name>-<time>-<seed>`."""
    plugins: tuple[str, ...] = ()
    """Python files with your own plugins. Like all paths, they are looked up first in the working directory,
    then beside the run file."""
    training: TrainingConfig = TrainingConfig()
    """The training engine and its worker group. This group holds every model that `models` does not place in
    another group."""
    groups: Groups = Groups()
    """More worker groups, each written `name: {use: engine, …}` like `training`, with its own layout."""
    models: dict[str, ModelConfig] = {}
    """Settings of the algorithm's models, by model name. A model without an entry has the defaults."""
    inference: InferenceConfig = InferenceConfig()
    """The inference engine, which samples the answers."""
    rollout: RolloutConfig = RolloutConfig()
    """Workers that run workflows."""
    verifier: VerifierConfig = VerifierConfig()
    """Workers that run rewards."""
    workflow: WorkflowConfig = WorkflowConfig()
    """The workflow: how a prompt becomes trajectories."""
    sampling: Sampling = Sampling()
    """How to sample tokens in training."""
    variants: Variants = Variants()
    """An A/B test within the run: two or more variants of workflow, reward or sampling, each written
    `name: {weight: 0.5, …}`. Every training ticket gets one of them by weight; evaluations have none."""
    queue: QueueConfig = QueueConfig()
    """How far generation may run ahead of training."""
    evaluation: EvaluationConfig | None = None
    """Held-out evaluation; none by default."""
    on_collapse: Literal["warn", "stop"] = "warn"
    """What to do when the mean reward collapses (see docs/advice.md): `warn` logs a warning; `stop` saves a
    checkpoint and ends the run as failed."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When to write checkpoints, and which ones to keep."""
    weights: WeightsConfig = WeightsConfig()
    """The weight transport: how new weights reach the inference engines."""
    launcher: LauncherConfig = LauncherConfig()
    """The launcher, which starts the workers."""
    samples: SamplesConfig = SamplesConfig()
    """The samples that the run keeps. `stretto samples` reads them."""
    bus: BusConfig = BusConfig()
    """The NATS server."""
    metrics: MetricsConfig | None = None
    """Figures for Prometheus (see docs/metrics.md); off by default."""
    sandbox: SandboxMode = "bubblewrap"
    """Sandbox for tools and for the commands of agents. `unsafe` uses no sandbox: they run with the rights of
    the run and get none of its environment variables but PATH."""
    trackers: tuple[TrackerConfig, ...] = ()
    """Trackers that receive the metrics, besides the files in the run's folder."""

    def samplings(self) -> Iterator[tuple[str, Sampling]]:
        """Yield the run's sampling sections, each with its dotted key. A variant has its own `RunConfig`."""
        yield "sampling", self.sampling
        if self.evaluation is not None and self.evaluation.sampling is not None:
            yield "evaluation.sampling", self.evaluation.sampling

    @property
    def evaluates_answers(self) -> bool:
        """Whether evaluations sample answers and score them."""
        return self.evaluation is not None and self._measure != "loss"

    @property
    def evaluates_loss(self) -> bool:
        """Whether trainers measure the loss on held-out rows."""
        return self.evaluation is not None and self._measure != "answers"

    def measures_loss_of(self, version: int) -> bool:
        """Return whether trainers measure the loss of a version on held-out rows."""
        every = self.evaluation.every if self.evaluation is not None else 0
        is_due = version in (1, self.steps) or bool(every and version % every == 0)
        return self.evaluates_loss and is_due

    @property
    def _measure(self) -> str:
        gives_reward = self.reward is not None or self.workflow.gives_reward
        default = "answers" if gives_reward else "loss"
        return (self.evaluation and self.evaluation.measure) or default

    def source_of(self, model: str) -> str | None:
        """Return the folder or hub id of the initial weights of one of the algorithm's models."""
        settings = self.models.get(model)
        return (settings and settings.path) or self.model

    def keeps_row(self, row: int) -> bool:
        """Return whether to keep the samples of a held-out row."""
        evaluation = self.evaluation
        return evaluation is not None and (evaluation.keep_answers or self.samples.keeps(row))
