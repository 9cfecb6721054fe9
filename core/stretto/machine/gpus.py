"""The GPUs of this machine: how processes name them, and how much of their memory is free."""

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

__all__ = [
    "Driver",
    "Gpu",
    "computes_bfloat16",
    "gpu_memory",
    "gpu_variables",
    "listed_gpus",
    "nvidia_driver",
    "visible_gpus",
]

_ANSWER_S = 20.0  # a driver that has not been used for long takes seconds to answer
_PROGRAMS = ("nvidia-smi", "/usr/lib/wsl/lib/nvidia-smi")  # WSL2 has it outside of PATH
_LINE = re.compile(
    r"^(?:GPU \d+: (?P<model>.*)| +MIG (?P<slice>\S+) .*:) \(UUID: (?P<uuid>[^)]+)\)$", re.MULTILINE
)
# From driver 610 on, it writes KMD for Driver, and CUDA UMD for CUDA.
_HEADER = re.compile(r"(?:Driver|KMD) Version: *([\d.]+) +CUDA (?:UMD )?Version: *(\d+\.\d+)")
_NAME = re.compile(r"\d+|(GPU|MIG)-\S+")
_OF_USERS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_DEV, _KFD = Path("/dev"), Path("/sys/class/kfd/kfd/topology/nodes")
_SLICE_SHARE = 0.95
"""Usable part of what the name of a slice says, at least: `1g.5gb` has 4.75 GiB (NVIDIA's MIG user guide)."""


class Gpu(NamedTuple):
    """A GPU, or a slice of one (MIG)."""

    name: str
    """As in CUDA_VISIBLE_DEVICES: its position in the order of the PCI bus, among those that this machine or
    container has; its UUID where any GPU is sliced."""
    uuid: str = ""
    """Empty for other GPUs than NVIDIA's, and where its tools are missing."""
    model: str = ""
    free: int | None = None
    """Free bytes of its memory when it was first asked for; None if unknown."""


class Driver(NamedTuple):
    """NVIDIA's driver, and the newest CUDA that it knows. If that is 12.2, it runs builds for all of 12.x."""

    version: str
    cuda: float


def nvidia_driver() -> Driver | None:
    """Return this machine's NVIDIA driver; None if there is none."""
    found = _HEADER.search(_answer())
    return Driver(found[1], float(found[2])) if found else None


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """Return the GPUs that processes on this machine may use, named as in CUDA_VISIBLE_DEVICES: the entries
    that the user gave there, up to the first that names no GPU, such as -1; else all."""
    for given in filter(environment.__contains__, _OF_USERS):
        return [*takewhile(_NAME.fullmatch, map(str.strip, environment[given].split(",")))]
    return [gpu.name for gpu in listed_gpus()]


def gpu_variables(gpus: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables with which a process sees these GPUs alone.

    Args:
        gpus: some of `visible_gpus(environment)`.
    """
    given = [name for name in _OF_USERS if name in environment]
    # CUDA's own order is FASTEST_FIRST. A user's entries keep the user's order.
    order = {} if given else {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return dict.fromkeys(["CUDA_VISIBLE_DEVICES", *given], ",".join(gpus)) | order


def gpu_memory(gpus: Sequence[str]) -> int | None:
    """Return the bytes that are free on each of these GPUs; None if it is not known of any."""
    return min((gpu.free for gpu in _chosen(gpus) if gpu.free is not None), default=None)


def _chosen(gpus: Sequence[str]) -> list[Gpu]:
    return [
        gpu
        for name in gpus
        for place, gpu in enumerate(listed_gpus())
        if (name == str(place) if name.isdigit() else gpu.uuid.startswith(name))
    ]


def computes_bfloat16(gpus: Sequence[str]) -> bool:
    """Return whether each of these GPUs computes in bfloat16, as far as NVIDIA's program says it: from
    compute capability 8.0 on (CUDA C++ Programming Guide, "Compute Capabilities")."""
    answer = _answer("--query-gpu=uuid,compute_cap", "--format=csv,noheader")
    old = re.findall(r"^(\S+), [1-7]\.\d$", answer, re.MULTILINE)
    return not any(gpu.uuid in old for gpu in _chosen(gpus))


@lru_cache(maxsize=1)
def listed_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs of this machine, or those of them that its container has."""
    found = [line.group("uuid", "model", "slice") for line in _LINE.finditer(_answer("-L"))]
    sizes = _answer("--query-gpu=uuid,memory.free", "--format=csv,noheader,nounits") if found else ""
    # Other lines may stand between these: warnings of the driver, and sizes that it does not know.
    free = {uuid: int(size) * 2**20 for uuid, size in re.findall(r"^(\S+), (\d+)$", sizes, re.MULTILINE)}
    groups: list[list[Gpu]] = []  # each GPU, and its slices
    for uuid, model, part in found:
        if part and groups:
            size = re.search(r"(\d+)gb", part)
            usable = int(int(size[1]) * _SLICE_SHARE * 2**30) if size else None
            groups[-1].append(Gpu(uuid, uuid, f"{groups[-1][0].model} {part}", usable))
        else:
            groups.append([Gpu(uuid, uuid, model, free.get(uuid))])
    gpus = [gpu for whole, *slices in groups for gpu in slices or [whole]]
    if any(slices for _, *slices in groups):
        return tuple(gpus)
    gpus = gpus or [Gpu("")] * _count_devices()
    return tuple(gpu._replace(name=str(place)) for place, gpu in enumerate(gpus))


def _answer(*question: str) -> str:
    """Return what NVIDIA's program says; nothing if there is no such program, or no driver."""
    options: Any = {"capture_output": True, "check": True, "timeout": _ANSWER_S, "text": True}
    for program in _PROGRAMS:
        with suppress(OSError, subprocess.SubprocessError):
            return subprocess.run((program, *question), **options).stdout
    return ""


def _count_devices() -> int:
    """Count the files of GPUs where no program lists them: NVIDIA's, else AMD's. A container with one GPU of
    several may have `nvidia3` alone: the number in the name is not its position."""
    nvidia = sum(bool(re.fullmatch(r"nvidia\d+", file.name)) for file in _DEV.glob("nvidia*"))
    if nvidia or not (_DEV / "kfd").exists():
        return nvidia
    facts = "".join(file.read_text() for file in _KFD.glob("*/properties"))
    minors = re.findall(r"^drm_render_minor (\d+)", facts, re.MULTILINE)
    count = sum(re.sub(r"\D", "", file.name) in minors for file in (_DEV / "dri").glob("render*"))
    chosen = [*filter(None, os.environ.get("ROCR_VISIBLE_DEVICES", "").split(","))]  # ROCm counts these alone
    return min(count, len(chosen) or count)
