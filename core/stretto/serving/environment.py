"""The Python environments of servers that `stretto engine install` makes below the user's cache folder."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from stretto.errors import EngineError
from stretto.machine.private_file import cache_folder

__all__ = ["ServerEnvironment", "environment_of", "is_private"]

_OLDEST_DRIVERS = {12: 525, 13: 580}  # for each CUDA (docs.nvidia.com/deploy/cuda-compatibility)


@dataclass(frozen=True)
class ServerEnvironment:
    """A virtual environment with the tested version of a server; it may not exist yet."""

    requirements: Path
    """File with the packages, in pip's form."""
    folder: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    @property
    def mark(self) -> Path:
        """Copy of the requirements, written when everything is installed."""
        return self.folder / "requirements.txt"

    @property
    def cuda(self) -> float | None:
        """The CUDA of this build, such as 12.9; None for CPUs, and where the requirements do not say it."""
        found = re.search(r"# CUDA ([\d.]+)", self.requirements.read_text())
        return float(found[1]) if found else None

    @property
    def indexes(self) -> list[str]:
        """The package indexes that have this build, besides the one that pip is set to."""
        return re.findall(r"^--extra-index-url (\S+)", self.requirements.read_text(), re.MULTILINE)

    def is_ready(self) -> bool:
        """Return True if all of today's requirements are installed, where no other user can change them."""
        is_complete = self.mark.is_file() and self.mark.read_bytes() == self.requirements.read_bytes()
        return is_complete and is_private(self.folder.parent)


def environment_of(requirements: Path, *, cpu: bool, cuda: float | None = None) -> ServerEnvironment:
    """Return a server's environment for CPUs, or for GPUs whose driver knows this CUDA (`Driver`); by default
    the installed one for GPUs, else that of `gpu.txt`. EngineError: no build for such a driver is known.
    `requirements`: see `ServerEngineConfig`."""
    title = (requirements / "gpu.txt").read_text().split()[0].replace("==", "-")  # vllm-0.32.0
    for_gpus = [requirements / "gpu.txt", *sorted(requirements.glob("cu*.txt"), reverse=True)]
    builds = [
        ServerEnvironment(file, cache_folder("engines") / f"{title}-{file.stem}".removesuffix("-gpu"))
        for file in ([requirements / "cpu.txt"] if cpu else for_gpus)
    ]
    if cuda is None or cpu:  # of several installed ones, that for the oldest CUDA runs with most drivers
        return next(filter(ServerEnvironment.is_ready, reversed(builds)), builds[0])
    for build in builds:
        if int(build.cuda or 0) <= int(cuda):
            return build
    oldest = _OLDEST_DRIVERS.get(int(builds[-1].cuda or 0), "of a newer CUDA")
    raise EngineError(
        f"no build of {title} for a driver with CUDA {cuda} is known; use driver {oldest} or newer, or set "
        "inference.urls to a server in a container with NVIDIA's cuda-compat"
    )


def is_private(folder: Path) -> bool:
    """Return True if a folder belongs to this user, and no other user can write to it."""
    status = folder.stat()
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022
