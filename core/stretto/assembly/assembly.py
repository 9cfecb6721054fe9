"""A composed run, assembled: its algorithm, dataflow, placement, workers and their numbers.

Private to the core. Each process of a run makes one `Assembly` after composition and passes it on. A worker
makes its `Assembly` from the configuration that the kernel sends.
"""

from __future__ import annotations

import math
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from datetime import date, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import msgspec

from stretto.algorithm import Algorithm
from stretto.assembly.compose import Composed, is_utf8
from stretto.assembly.dataflow import Graph, graph_of
from stretto.assembly.placement import DEFAULT_GROUP, Placement, group_of_worker, sections
from stretto.assembly.run_memory import SMALLEST_PASS, Need, device_memory, longest_sample, needs, on_host
from stretto.assembly.variants import run_of_variant
from stretto.assembly.worker_numbers import EVALUATOR, NUMBER_KEYS, WorkerNumbers
from stretto.component import Context, Known
from stretto.config import RunConfig
from stretto.engine import HeldModel
from stretto.errors import ConfigError, StrettoError, offer
from stretto.launcher import Job, Resources, Role, thread_variables
from stretto.machine.cores import available_memory
from stretto.machine.gpus import computes_bfloat16, visible_gpus
from stretto.models.files import folder_of_model, parameters_in, writes_date
from stretto.models.tokenizer import CLOCK, load_tokenizer
from stretto.tokenizer import Tokenizer
from stretto.workflow import WorkflowConfig

_KERNEL = "kernel"
_ROWS_PER_GROUP = 0.4
"""Minimum number of evaluation rows that begin for each training group that ends. A row costs up to 0.4 of a
group, so a step takes about a tenth longer."""
_IN_TIME = 0.8
"""An evaluation ends within this share of the time until the next evaluation."""
_TOKENS = "micro_batch_tokens"
_LARGEST_PASS, _STEP = 65536, 256
"""Tokens of a micro-batch. A larger pass than the largest is no faster on any device."""
_ENOUGH, _PASS_UNKNOWN = 16384, 8192
"""Tokens of a micro-batch on GPUs by default: at most, and where the memory is not known."""
_TRIED_PASSES = (1024, 4096)
"""Tokens of the micro-batches from which `auto` follows."""
_ROOM = 0.9
"""Share of the memory that `auto` fills: allocators lose some to fragments."""


@dataclass(frozen=True)
class Worker:
    """One worker process of the run."""

    id: str
    role: Role
    resources: Resources
    unit: str = ""
    """Workers with the same unit must run on one machine; empty for any machine."""

    def job(self, command: tuple[str, ...] = (), log: str = "", imports: tuple[str, ...] = ()) -> Job:
        """Return the worker's job. Only starting it needs `command`. `imports` are modules slow to import."""
        return Job(
            worker=self.id,
            role=self.role,
            command=command,
            env=thread_variables(self.resources),
            resources=self.resources,
            log=log,
            imports=imports,
            unit=self.unit,
        )


class Assembly:
    """The parts of a run that follow from its run file. Each part is made at its first use.

    `folder` is empty in a process that cannot access the run's folder, and None for a new run, which gets an
    id. A worker receives the numbers of workers in force from the kernel. `gpu_bytes` is the memory of each
    GPU that the run will get; None: of this machine's GPUs.
    """

    def __init__(
        self,
        composed: Composed,
        *,
        folder: str | Path | None = None,
        run: str = "",
        worker: str = _KERNEL,
        gpu_bytes: int | None = None,
    ) -> None:
        path = self.folder = _new_folder(composed.config) if folder is None else Path(folder)
        self.gpu_bytes = gpu_bytes
        composed = with_defaults(composed, gpu_bytes)
        composed = decided(composed, gpu_bytes) if folder is None else composed
        self.numbers = WorkerNumbers(composed, path if worker == _KERNEL else None)
        self.composed = composed.with_numbers(self.numbers.in_force())
        self.context = Context(
            run=new_run_id(path) if folder is None else run,
            name=composed.config.name,
            seed=composed.config.seed,
            model=composed.config.model,
            folder="" if folder == "" else str(path),
            sandbox=composed.config.sandbox,
            worker=worker,
        )
        self.tools: Sequence[Mapping[str, Any]] = ()
        """JSON schemas of the run's own tools; empty until a check has made the tools."""
        self.longest_row = 0
        """Tokens of the longest row that a check has encoded, of a run that samples none."""

    @property
    def config(self) -> RunConfig:
        """The run file, with the numbers of workers that are in force."""
        return self.composed.config

    @property
    def trial_context(self) -> Context:
        """The context for components made on trial: without a folder, to which a factory could write."""
        return msgspec.structs.replace(self.context, folder="")

    def make(self, path: str) -> Any:
        """Make the component that a section of the run chose (see `Composed.make`)."""
        context = self.context
        if path == "inference":
            context = msgspec.structs.replace(context, samples_in_flight=self.samples_in_flight)
        return self.composed.make(path, context)

    @property
    def samples_in_flight(self) -> int:
        """The maximum number of training samples that one inference engine has at the same time."""
        return _samples_in_flight(self.config, self.graph)

    @cached_property
    def algorithm(self) -> Algorithm:
        """The algorithm object. This property and all that need `graph` raise as `Composed.make` does."""
        return self.make("algorithm")

    @cached_property
    def graph(self) -> Graph:
        """The algorithm's dataflow, checked. Raises `ConfigError` if it cannot run."""
        return graph_of(self.algorithm.calls(), self.algorithm.models)

    @cached_property
    def placement(self) -> Placement:
        """The models on the run's worker groups. Raises `ConfigError` if they cannot be placed."""
        return Placement(self.config, self.graph)

    @cached_property
    def workers(self) -> list[Worker]:
        """All worker processes that the run starts: those that its dataflow or its evaluation needs."""
        evaluates = self.config.evaluates_answers
        roles: dict[Role, bool] = {
            "inference": self.graph.samples or evaluates,
            "rollout": self.graph.samples or evaluates,
            "verifier": self.graph.scores or evaluates,
        }
        trainers = [
            Worker(name, "trainer", group.section, group.unit_of(rank))
            for group in self.placement.groups.values()
            for rank, name in enumerate(group.workers)
        ]
        evaluator = [Worker(EVALUATOR, "inference", self.config.inference)] if self.has_evaluator else []
        return [
            *trainers,
            *(
                Worker(name, role, self.resources_of(name))
                for role, is_needed in roles.items()
                if is_needed
                for name in (f"{role}-{index}" for index in range(self.composed.section(NUMBER_KEYS[role])))
            ),
            *evaluator,
        ]

    @cached_property
    def has_evaluator(self) -> bool:
        """Whether an inference worker serves evaluations alone, while the others train."""
        evaluation = self.config.evaluation
        is_wanted = evaluation is not None and bool(evaluation.own_engine)
        return is_wanted and bool(self.config.steps) and self.graph.samples

    def evaluation_pace(self, rows: int) -> float:
        """Return the number of evaluation rows that begin for each training group that ends: few, so that
        training loses little time, but enough to end before the next evaluation. 0 without an evaluator:
        all rows begin at once, because their engine serves no training then."""
        if not self.has_evaluator or self.config.evaluation is None:
            return 0.0
        groups = self.config.evaluation.every * self.config.queue.batch_size
        return max(_ROWS_PER_GROUP, rows / (groups * _IN_TIME)) if groups else _ROWS_PER_GROUP

    def resources_of(self, worker: str) -> Resources:
        role = worker.partition("-")[0]
        if role != "trainer":
            return self.composed.section(role)
        group, _ = group_of_worker(worker)
        known = sections(self.config)
        if group not in known:
            hint = offer(group, known, "groups")
            raise ConfigError(
                f"no worker group of this run has the worker {worker!r}{hint}; `stretto status` "
                "names the workers"
            )
        return known[group]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the run's model, for the run's rows. Raises ConfigError if none can be loaded."""
        return load_tokenizer(self.config.model, self.config.dataset)

    @cached_property
    def needs(self) -> list[Need]:
        """What each kind of engine needs of the memory of its device, except engines that do not say it."""
        engines = sum(worker.role == "inference" for worker in self.workers)
        longest = self.longest_row or longest_sample(self.config, sampled=self.graph.samples)
        return needs(self.config, self.placement, engines, self.samples_in_flight, self.gpu_bytes, longest)

    def need_of(self, worker: str) -> Need | None:
        """Return what a worker's engine needs of the memory of its device; None if it has none."""
        path = self._section_path(worker)
        return next((need for need in self.needs if need.section == path), None)

    def _section_path(self, worker: str) -> str:
        """Return the dotted key of a worker's section."""
        role = worker.partition("-")[0]
        return role if role != "trainer" else self.placement.groups[group_of_worker(worker)[0]].path

    def imports_of(self, worker: Worker) -> tuple[str, ...]:
        """Return the modules of a worker's process that take long to import."""
        path, components = self._section_path(worker.id), self.composed.components
        find_imports = components[path].imports if path in components else None
        return () if find_imports is None else tuple(find_imports(self.composed.section(path), self.config))

    def renewed(self) -> Assembly:
        """Return the run for its next kernel, with the numbers of workers that are in force now."""
        return Assembly(self.numbers.composed, folder=self.folder, run=self.context.run)

    def of_variant(self, name: str) -> Assembly:
        """Return the run with a variant's sections in place of its own. The placement stays the run's."""
        variant = copy(self)
        variant.composed = run_of_variant(self.composed, name)
        return variant


def _samples_in_flight(config: RunConfig, graph: Graph) -> int:
    source, queue = graph.source, config.queue
    groups = (queue.max_staleness + 1) * queue.batch_size if source.op == "generate" else 0
    return -(-groups * source.samples // max(1, config.inference.replicas))


def with_defaults(composed: Composed, gpu_bytes: int | None = None) -> Composed:
    """Return a run in which keys that are null have the values that follow from the device or from other
    keys. A run that began has none of these keys left."""
    given = composed

    def in_flight() -> int:
        config = given.config
        context = Context(run=config.name, name=config.name, seed=config.seed, model=config.model)
        with suppress(StrettoError):  # the check shows why the algorithm cannot be made
            algorithm: Algorithm = given.make("algorithm", context)
            return _samples_in_flight(config, graph_of(algorithm.calls(), algorithm.models))
        return 0

    dtype, why = _dtype_of_run(composed)
    for path in composed.components:
        section = composed.section(path)
        if not isinstance(section, Resources | WorkflowConfig):
            continue
        variant = path.split(".")[1] if path.startswith("variants.") else ""
        run = run_of_variant(composed, variant).config if variant else composed.config
        memory = partial(device_memory, run, gpu_bytes=gpu_bytes)
        values = section.default_values(Known(run, memory, in_flight, dtype, why))
        for key, (value, reason) in values.items():
            composed = composed.with_value(f"{path}.{key}", value, reason)
    return composed


def _dtype_of_run(composed: Composed) -> tuple[str, str]:
    """Return the dtype of trainers and engines that set none, and the reason."""
    computing = {path: composed.section(path) for path in (*_training_paths(composed), "inference")}
    if not any(section.gpus for section in computing.values()):
        return "float32", ""
    for path, section in computing.items():
        if (dtype := getattr(section, "dtype", None)) in ("float32", "bfloat16"):
            return dtype, f"as {path}.dtype"
    if composed.config.launcher.use == "local" and not computes_bfloat16(visible_gpus(os.environ)):
        return "float32", "these GPUs do not compute in bfloat16"
    return "bfloat16", "with GPUs; the weights that are trained stay float32"


def decided(composed: Composed, gpu_bytes: int | None = None) -> Composed:
    """Return a run with the unset values filled in that depend on the machine and on today's date."""
    config = composed.config
    if config.evaluation is not None and config.evaluation.own_engine is None:
        composed = composed.with_value("evaluation.own_engine", _has_room(config))
    folder, template = folder_of_model(config.model), config.dataset.template
    if folder is not None and CLOCK not in template and writes_date(folder):
        template = {**template, CLOCK: date.today().isoformat()}
        composed = composed.with_value("dataset.template", template)
    if config.inference.sleep == "auto":
        composed = composed.with_value("inference.sleep", _must_sleep(composed, gpu_bytes))
    return _with_pass_sizes(composed, gpu_bytes)


def _must_sleep(composed: Composed, gpu_bytes: int | None) -> bool:
    """Return whether trainer and engine share GPUs whose memory suffices only if the engine sleeps."""
    engine, trainer = composed.config.inference, composed.config.training
    if not (engine.may_sleep and engine.gpus and trainer.gpus and engine.share + trainer.share <= 1):
        return False

    def fits(*, sleep: bool) -> bool:
        tried = _with_pass_sizes(composed.with_value("inference.sleep", sleep), gpu_bytes)
        assembly = Assembly(tried, folder="", gpu_bytes=gpu_bytes)
        return assembly.graph.samples and all(need.size <= need.limit for need in assembly.needs)

    return not fits(sleep=False) and fits(sleep=True)


def _has_room(config: RunConfig) -> bool:
    """Return whether a second engine, for evaluations, costs little: the run has one engine, on CPUs of this
    machine, and the trainer and both engines fit into half of its memory."""
    section = config.inference
    is_alone = section.replicas == 1 and config.launcher.use == "local"
    if not section.may_be_doubled or section.gpus or config.training.gpus or section.sleeps or not is_alone:
        return False
    folder = folder_of_model(config.model)
    if config.model is None or folder is None:
        return False
    available = available_memory()
    policy, longest = HeldModel(config.model, "policy", trainable=True), longest_sample(config, sampled=True)
    trainer = config.training.memory([policy], longest)  # as `needs` asks: a large model is counted once
    engine = section.memory(config.model, parameters_in(folder), 0, available)
    return bool(trainer and engine and trainer.size + 2 * engine.size <= available / 2)


def _new_folder(config: RunConfig) -> Path:
    now = datetime.now().astimezone()
    name = f"runs/{config.name}-{now:%Y%m%d-%H%M%S}-{config.seed}" if config.out is None else config.out
    folder = Path(name).expanduser().absolute()
    if not is_utf8(str(folder)):
        raise ConfigError(f"out: the name {str(folder)!r} is not UTF-8; choose another folder", path="out")
    return folder


def new_run_id(folder: Path) -> str:
    """Return an id for a run in this folder. It is unique on a bus that several runs share."""
    return f"{re.sub(r'[^A-Za-z0-9_-]', '-', folder.name)}-{secrets.token_hex(3)}"


def _training_paths(composed: Composed) -> list[str]:
    return [DEFAULT_GROUP, *(f"groups.{name}" for name in composed.config.groups.__struct_fields__)]


def _with_pass_sizes(composed: Composed, gpu_bytes: int | None) -> Composed:
    """Return the run with a number for each `micro_batch_tokens` that is 'auto' or null: as many as the
    memory has room for. Raise ConfigError for 'auto' if that is not known."""
    for path in _training_paths(composed):
        if (given := getattr(composed.section(path), _TOKENS, 0)) == "auto":
            composed = composed.with_value(f"{path}.{_TOKENS}", _pass_size(composed, path, gpu_bytes))
        elif given is None:
            try:
                tokens = min(_ENOUGH, _pass_size(composed, path, gpu_bytes))
                why = f"its GPUs have room for {'them' if tokens < _ENOUGH else 'more'}"
            except ConfigError:
                tokens, why = _PASS_UNKNOWN, "what its GPUs have, or the model needs, is not known here"
            composed = composed.with_value(f"{path}.{_TOKENS}", tokens, why)
    return composed


def _pass_size(composed: Composed, path: str, gpu_bytes: int | None) -> int:
    """Activations grow by the same number of bytes for each token, so two sizes tell all others."""
    sizes = list[float]()
    for tokens in _TRIED_PASSES:
        assembly = Assembly(composed.with_value(f"{path}.{_TOKENS}", tokens), folder="", gpu_bytes=gpu_bytes)
        known = assembly.needs
        need = next((need for need in known if need.section == path), None)
        if need is None or need.limit == math.inf or "activations" not in need.memory.parts:
            why = "the memory of its machine is not known here"
            if need is not None and need.limit < math.inf:
                why = need.memory.settings
            raise ConfigError(f"{path}.{_TOKENS}: 'auto' needs a number: {why}", path=f"{path}.{_TOKENS}")
        others = 0 if need.on_gpu else on_host(known) - need.number * need.size
        room = _ROOM * (need.limit - others) / (1 if need.on_gpu else need.number)
        sizes.append(room - need.size)
    first, second = sizes
    per_token = (first - second) / (_TRIED_PASSES[1] - _TRIED_PASSES[0])
    tokens = int(_TRIED_PASSES[0] + first / per_token) // _STEP * _STEP
    return min(_LARGEST_PASS, max(SMALLEST_PASS, tokens))
