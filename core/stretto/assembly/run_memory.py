"""What the engines of a run need of the memory of their devices."""

import math
import os
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from stretto.assembly.dataflow import Graph
from stretto.assembly.placement import Placement, WorkerGroup
from stretto.config import RunConfig
from stretto.engine import HeldModel, Memory, TrainingConfig
from stretto.launcher import Resources
from stretto.machine.cores import available_memory
from stretto.machine.gpus import gpu_memory, visible_gpus
from stretto.models.files import SHARED_MEMORY, folder_of_model, parameters_in

__all__ = [
    "SMALLEST_PASS",
    "Need",
    "device_memory",
    "longest_sample",
    "needs",
    "on_host",
    "training_share",
    "version_bytes",
]

SMALLEST_PASS = 512  # tokens of a micro-batch

_LIBRARIES = {True: 2**29, False: 2**28}
"""Bytes that torch and its libraries take of a GPU (True), and of the host, in each process of an engine."""


class Need(NamedTuple):
    """The memory of one kind of process."""

    section: str
    """Dotted key of the engine's section."""
    number: int
    """Number of processes."""
    on_gpu: bool
    memory: Memory
    limit: float
    """Bytes that one process may use: on a GPU, its share; infinite if its machine is not known."""

    @property
    def size(self) -> int:
        """Bytes of one process."""
        return self.memory.size + _LIBRARIES[self.on_gpu]

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in self.memory.parts.items())
        return f"`stretto check` counts {self.size / 2**30:.1f} GiB ({parts})"


def needs(
    config: RunConfig,
    placement: Placement,
    engines: int,
    samples_in_flight: int,
    gpu_bytes: int | None,
    longest: int,
) -> list[Need]:
    """Return what each kind of engine needs, except engines that do not say it. See `Assembly.needs`.
    `longest`: tokens of the longest sequence; 0 if not known."""
    result, parameters = list[Need](), 0
    for group in placement.groups.values():
        held = _held(config, placement, group)
        section = _within_batch(config, placement, group.section, longest)
        if (memory := section.memory(held, longest)) is not None:
            limit = device_memory(config, group.section, gpu_bytes)
            if (share := training_share(config, placement, group.section)) > group.section.share:
                limit = _limit_in_turns(memory, limit, share / group.section.share)
            result.append(Need(group.path, len(group.workers), bool(group.section.gpus), memory, limit))
            parameters = memory.parameters if [model.source for model in held] == [config.model] else 0
    section = config.inference
    if folder := folder_of_model(config.model):
        parameters = parameters_in(folder) or parameters  # without files, as counted from the config
    if config.model is not None and engines and parameters:
        limit = device_memory(config, section, gpu_bytes)
        # A server takes all that it may use, and `Need` adds the libraries.
        available = limit - (_LIBRARIES[True] if section.gpus else 0)
        memory = section.memory(config.model, parameters, samples_in_flight, available)
        if memory is not None:
            if not section.gpus and (version := version_bytes(config, placement.graph)):
                memory = memory._replace(parts={**memory.parts, "version": version})
            result.append(Need("inference", engines, bool(section.gpus), memory, limit))
    return result


def version_bytes(config: RunConfig, graph: Graph) -> int:
    """Return the bytes of a version of the weights in shared memory, which an engine maps at a swap; 0 if
    none is there, or a small one."""
    folder, section = folder_of_model(config.model), config.training
    is_sent = graph.samples and config.weights.use == "file"
    dtype: str | None = getattr(section, "publish_dtype", None) or getattr(section, "dtype", None)
    sends_adapter = getattr(getattr(section, "lora", None), "send", "") == "adapter"
    if not is_sent or folder is None or dtype is None or sends_adapter:
        return 0
    if getattr(config.weights, "folder", None) is not None or not SHARED_MEMORY.is_dir():
        return 0
    return (2 if dtype == "bfloat16" else 4) * parameters_in(folder)


def _within_batch(
    config: RunConfig, placement: Placement, section: TrainingConfig, longest: int
) -> TrainingConfig:
    """Return the section with micro-batches that are no larger than a batch of the longest rows."""
    tokens = getattr(section, "micro_batch_tokens", None)
    batch = config.queue.batch_size * placement.graph.source.samples * longest
    if placement.graph.samples or not isinstance(tokens, int) or not 0 < batch < tokens:
        return section  # sampled conversations may be longer than the run file says
    return msgspec.structs.replace(section, micro_batch_tokens=batch)


def longest_sample(config: RunConfig, *, sampled: bool) -> int:
    """Return the most tokens that a sequence can have by the run file, or 0 if it does not say it. `sampled`:
    the policy samples the sequences."""
    if not sampled:
        return config.dataset.max_tokens or 0
    return config.sampling.max_tokens + (config.dataset.max_prompt_tokens or 0)


def training_share(config: RunConfig, placement: Placement, section: TrainingConfig) -> float:
    """Return the share of each GPU that a process of training may use. An engine that sleeps leaves its share
    to the processes that may be on its GPU, in equal parts."""
    engine = config.inference
    if not (engine.sleeps and engine.gpus and section.gpus and section.share + engine.share <= 1):
        return section.share
    groups = sum(group.section.gpus > 0 for group in placement.groups.values())
    ranks = min(section.processes, int((1 - engine.share) / section.share + 1e-6))
    return section.share + engine.share / (groups * ranks)


def _limit_in_turns(memory: Memory, own: float, factor: float) -> float:
    """Return the bytes of training's turn. Between its turns, what it keeps must fit into its own share."""
    kept = memory.size - memory.parts.get("activations", 0) + _LIBRARIES[True]
    return own * factor - _LIBRARIES[True] if kept <= own else own


def on_host(known: Sequence[Need]) -> int:
    """Return the bytes of the host that these processes need together."""
    return sum(need.number * need.size for need in known if not need.on_gpu)


def _held(config: RunConfig, placement: Placement, group: WorkerGroup) -> list[HeldModel]:
    held: list[HeldModel] = []
    for name in group.models:
        model, source = placement.graph.models[name], config.source_of(name)
        if source is not None:
            held.append(HeldModel(source, model.head, model.trainable))
    return held


def device_memory(config: RunConfig, section: Resources, gpu_bytes: int | None) -> float:
    """Return the bytes that a process may use of its GPU, or of the host; infinite if not known.

    Args:
        gpu_bytes: memory of each GPU; None: of this machine's.
    """
    if section.gpus and gpu_bytes is not None:
        return section.share * gpu_bytes
    if config.launcher.use != "local":
        return math.inf
    if not section.gpus:
        return available_memory()
    return math.inf if (size := gpu_memory(visible_gpus(os.environ))) is None else section.share * size
