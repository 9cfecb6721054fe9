"""Estimate how much of this machine's memory a run's engines take, before the run starts."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from stretto.assembly.assembly import Assembly
from stretto.assembly.placement import WorkerGroup
from stretto.component import Problem
from stretto.engine import HostMemory
from stretto.machine.cores import available_memory
from stretto.models.files import folder_of_model, parameters_in
from stretto.models.version_files import SHARED_MEMORY
from stretto.training.config import ModelTrainingConfig

_GIB = 2**30
_MUCH = 0.8
"""Share of the memory above which the check warns: activations and other processes need the rest."""
_LIBRARIES = _GIB // 4
"""Bytes that torch and transformers take in each process of an engine."""
_VERSIONS = 2
"""Number of versions of the weights in shared memory: the newest one, and the one being written."""


class _Need(NamedTuple):
    name: str
    number: int
    each: HostMemory

    @property
    def size(self) -> int:
        return self.number * (self.each.size + _LIBRARIES)

    def __str__(self) -> str:
        several = f"{self.number} x " if self.number > 1 else ""
        parts = f" ({self.each.parts})" if self.each.parts else ""
        return f"{self.name} {several}{(self.each.size + _LIBRARIES) / _GIB:.1f} GiB{parts}"


def memory_lines(assembly: Assembly) -> Iterator[str]:
    """Yield a line for each kind of engine whose memory is known, and their sum."""
    label = "memory"
    for processes in (known := _processes(assembly)):
        yield f"{label:10} {processes}"
        label = ""
    if known:
        size = sum(processes.size for processes in known) / _GIB
        yield f"{'':10} {size:.1f} GiB of {available_memory() / _GIB:.1f}, besides activations"


def memory_problems(assembly: Assembly, *, limited: bool) -> Iterator[Problem]:
    """Yield a warning if a run takes most of the memory; if `limited`, an error if it takes more than all."""
    if assembly.config.launcher.use != "local":
        return
    known, memory = _processes(assembly), available_memory()
    size = sum(processes.size for processes in known)
    if size > _MUCH * memory:
        needs = ", ".join(map(str, known))
        yield Problem(
            "model",
            f"its engines take {size / _GIB:.1f} GiB of memory, and this machine has {memory / _GIB:.1f}: "
            f"{needs}; lower inference.slots, inference.context_length or inference.cache_gb, set "
            "evaluation.own_engine to false, or use training.lora; `--no-memory-limit` starts it anyway",
            "error" if size > memory and limited else "warning",
        )
    yield from _shared_memory_problems(assembly)


def _shared_memory_problems(assembly: Assembly) -> Iterator[Problem]:
    config, folder = assembly.config, folder_of_model(assembly.config.model)
    section = config.training
    is_sent = assembly.graph.samples and config.weights.use == "file"
    if not is_sent or folder is None or not isinstance(section, ModelTrainingConfig) or section.lora:
        return
    if getattr(config.weights, "folder", None) is not None or not SHARED_MEMORY.is_dir():
        return
    item_bytes = 2 if (section.publish_dtype or section.dtype) == "bfloat16" else 4
    size, free = _VERSIONS * item_bytes * parameters_in(folder), shutil.disk_usage(SHARED_MEMORY).free
    if size > free:
        yield Problem(
            "weights",
            f"{_VERSIONS} versions of the weights take {size / _GIB:.1f} GiB, and {SHARED_MEMORY} has "
            f"{free / _GIB:.1f} free: enlarge it (a container's --shm-size), or set weights.folder",
            "environment",
        )


@lru_cache(maxsize=1)  # the problems and the lines of `stretto check` need it
def _processes(assembly: Assembly) -> list[_Need]:
    """Return the memory that each kind of engine needs, except engines that do not report it."""
    config, needs = assembly.config, list[_Need]()
    for group in assembly.placement.groups.values():
        if (memory := _memory_of_group(assembly, group)) is not None:
            needs.append(_Need(group.path, len(group.workers), memory))
    engines = [worker for worker in assembly.workers if worker.role == "inference"]
    if config.model is not None and engines:
        memory = config.inference.host_memory(config.model, assembly.samples_in_flight)
        if memory is not None:
            needs.append(_Need("inference", len(engines), memory))
    return needs


def _memory_of_group(assembly: Assembly, group: WorkerGroup) -> HostMemory | None:
    sizes = {True: 0, False: 0}
    for name in group.models:
        folder = folder_of_model(assembly.config.source_of(name))
        if folder is None:
            return None
        sizes[assembly.graph.models[name].trainable] += parameters_in(folder)
    return group.section.host_memory(trained=sizes[True], frozen=sizes[False])
