"""The Python environments of servers that `stretto engine install` makes below the user's cache folder."""

import os
from dataclasses import dataclass
from pathlib import Path

from stretto.machine.private_file import cache_folder

__all__ = ["ServerEnvironment", "environment_of", "is_private"]


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

    def is_ready(self) -> bool:
        """Return True if all of today's requirements are installed, where no other user can change them."""
        is_complete = self.mark.is_file() and self.mark.read_bytes() == self.requirements.read_bytes()
        return is_complete and is_private(self.folder.parent)


def environment_of(requirements: Path, *, cpu: bool) -> ServerEnvironment:
    """Return a server's environment for CPUs or for GPUs. `requirements`: see `ServerEngineConfig`."""
    title = (requirements / "gpu.txt").read_text().strip().replace("==", "-")  # vllm-0.32.0
    file, folder = ("cpu.txt", f"{title}-cpu") if cpu else ("gpu.txt", title)
    return ServerEnvironment(requirements / file, cache_folder("engines") / folder)


def is_private(folder: Path) -> bool:
    """Return True if a folder belongs to this user, and no other user can write to it."""
    status = folder.stat()
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022
