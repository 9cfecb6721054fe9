"""Say how much memory a run's engines take, before the run starts, and refuse what cannot fit."""

import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence

from stretto.assembly.assembly import Assembly
from stretto.assembly.memory_changes import changes, fitting
from stretto.assembly.placement import Placement
from stretto.assembly.run_memory import Need, on_host, version_bytes
from stretto.component import Problem
from stretto.config import RunConfig
from stretto.machine.cores import available_memory
from stretto.models.files import folder_of_model, parameters_in
from stretto.models.version_files import SHARED_MEMORY
from stretto.training.config import ModelTrainingConfig

_GIB = 2**30
_MUCH = 0.8
"""Share of the memory above which the check warns: other processes need the rest."""
_VERSIONS = 2
"""Number of versions of the weights in shared memory: the newest one, and the one being written."""


def memory_lines(assembly: Assembly) -> Iterator[str]:
    """Yield a table: a line for each kind of engine whose memory is known, and their sum."""
    known = assembly.needs
    if not known:
        return
    yield from _table(known)
    for need in known:
        if need.memory.settings:
            yield f"           {need.section}: {need.memory.settings}"
    if assembly.config.launcher.use != "local":
        return
    yield f"           host: {on_host(known) / _GIB:.1f} GiB of {available_memory() / _GIB:.1f}"
    if version := version_bytes(assembly.config, assembly.graph):
        free = shutil.disk_usage(SHARED_MEMORY).free
        yield f"           {SHARED_MEMORY}: {_VERSIONS * version / _GIB:.2g} GiB of {free / _GIB:.1f} free"


def checkpoint_sizes(config: RunConfig, placement: Placement) -> Mapping[str, int]:
    """Return group -> bytes of its models in a checkpoint; without groups whose models this machine lacks."""
    sizes: dict[str, int] = {}
    for name, group in placement.groups.items():
        section, size = group.section, 0
        for model in group.models:
            folder = folder_of_model(config.source_of(model))
            if not isinstance(section, ModelTrainingConfig) or folder is None:
                break
            if placement.graph.models[model].trainable:
                has_states = section.optimizer == "adamw" and section.lora is None
                size += 4 * parameters_in(folder) * (3 if has_states else 1)  # float32
        else:
            sizes |= {name: size} if size else {}
    return sizes


def _table(known: Sequence[Need]) -> Iterator[str]:
    names = list(dict.fromkeys(name for need in known for name in need.memory.parts))
    rows = [["memory", "GiB", *names, "libraries", "sum", "of"]]
    for need in known:
        parts = [need.memory.parts.get(name, 0) for name in names]
        sizes = [*parts, need.size - need.memory.size, need.size]
        device = f"{need.number} x GPU" if need.on_gpu else f"{need.number} x host"
        of = "?" if need.limit == math.inf else f"{need.limit / _GIB:.1f}"
        rows.append([need.section, device, *(f"{size / _GIB:.2f}" for size in sizes), of])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for section, device, *sizes in rows:
        numbers = "  ".join(size.rjust(width) for size, width in zip(sizes, widths[2:], strict=True))
        yield f"{section.ljust(max(10, widths[0]))} {device.ljust(widths[1])}  {numbers}"


def memory_problems(assembly: Assembly, *, limited: bool) -> Iterator[Problem]:
    """Yield a warning if a run takes most of the memory; if `limited`, an error if it takes more than all."""
    known = assembly.needs
    for need in known:
        if need.on_gpu and need.size > need.limit:
            text = f"needs {need.size / _GIB:.1f} GiB of its GPU, and may use {need.limit / _GIB:.1f}"
            advice = _advice(
                assembly,
                [need.section],
                lambda needs: all(each.size <= each.limit for each in needs if each.on_gpu),
            )
            yield Problem(need.section, f"{text}; {advice}", "error" if limited else "warning")
    if assembly.config.launcher.use != "local":
        return
    size, memory = on_host(known), available_memory()
    if size > _MUCH * memory:
        text = f"its engines need {size / _GIB:.1f} GiB of memory, and this machine has {memory / _GIB:.1f}"
        sections = [need.section for need in known if not need.on_gpu]
        advice = _advice(assembly, sections, lambda needs: on_host(needs) <= memory)
        yield Problem("model", f"{text}; {advice}", "error" if size > memory and limited else "warning")
    yield from _shared_memory_problems(assembly)
    yield from _disk_problems(assembly)


def _advice(assembly: Assembly, sections: Sequence[str], fits: Callable[[Sequence[Need]], bool]) -> str:
    """Name the keys that free memory, the largest first, and those with which the run fits."""
    found = sorted(
        (change for section in sections for change in changes(assembly, section)),
        key=lambda change: -change.freed,
    )
    if not found:
        return "no key frees memory: choose a smaller model, or another machine"
    chosen = " ".join(change.override for change in fitting(assembly, found, fits))
    end = f"it fits with {chosen}" if chosen else "even together they do not make it fit"
    return f"{', '.join(map(str, found))}; {end}; `--no-memory-limit` starts it anyway"


def _disk_problems(assembly: Assembly) -> Iterator[Problem]:
    """Compare the checkpoints that a run has at most, with the one being written, with the free disk."""
    config = assembly.config.checkpoint
    number = config.keep + config.keep_best + 1 if config.every else 1
    size = number * sum(checkpoint_sizes(assembly.config, assembly.placement).values())
    place = next(
        folder for folder in (assembly.folder, *assembly.folder.absolute().parents) if folder.is_dir()
    )
    if config.store is None and size > (free := shutil.disk_usage(place).free):
        yield Problem(
            "checkpoint",
            f"{number} checkpoints take {size / _GIB:.1f} GiB, and {place} has {free / _GIB:.1f} free; set "
            "`checkpoint.keep: 1`, `out` to a folder of another disk, or `checkpoint.store`",
            "environment",
        )


def _shared_memory_problems(assembly: Assembly) -> Iterator[Problem]:
    if version := version_bytes(assembly.config, assembly.graph):
        size, free = _VERSIONS * version, shutil.disk_usage(SHARED_MEMORY).free
        if size > free:
            yield Problem(
                "weights",
                f"{_VERSIONS} versions of the weights take {size / _GIB:.1f} GiB, and {SHARED_MEMORY} has "
                f"{free / _GIB:.1f} free: enlarge it (a container's --shm-size), or set weights.folder",
                "environment",
            )
