"""Weight transport `file`: each version is a folder of safetensors, in shared memory or on a shared disk.

A version is written under another name and then renamed, so a reader finds it complete or not at all. The
publisher keeps the newest few versions and never waits; a reader that has opened a version keeps its pages
even when the files are removed. Both sides hash every tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import anyio.to_thread

from stretto import Component, Context, WeightsConfig, hookimpl
from stretto.component import PositiveFloat
from stretto.models.version_files import (
    FolderPublisher,
    FolderUpdate,
    FrozenFiles,
    RunFolders,
    open_shared_version,
)
from stretto.weights import KeptVersions

if TYPE_CHECKING:
    from stretto.weights import WeightsNote, Wire

__all__ = ["FileSubscriber", "FileTransport", "FileTransportConfig"]


class FileTransportConfig(WeightsConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the weight transport `file`."""

    folder: str | None = None
    """Folder that trainer and engines see under the same path. Default: shared memory where available, else
    the run's folder."""
    keep: KeptVersions = 3
    """Number of newest versions to keep; a slower reader skips to the newest."""
    shard_gb: PositiveFloat = 0.5
    """Size of the largest file in GiB. Publishing holds at most this much in memory besides the model."""


class FileTransport:
    """Make both ends, for the processes of one run."""

    def __init__(self, config: FileTransportConfig, context: Context) -> None:
        self._config = config
        self._folders = RunFolders(context, config.folder, otherwise=context.path("weights"))

    def publisher(self, wire: Wire) -> FolderPublisher:
        """Return the trainer's end."""
        del wire
        config = self._config
        return FolderPublisher(self._folders.own(), config.keep, config.shard_gb)

    def subscriber(self, wire: Wire) -> FileSubscriber:
        """Return an engine's end."""
        del wire
        return FileSubscriber()

    def clean(self) -> None:
        """Remove the folders of this run's publishers."""
        self._folders.clean()


class FileSubscriber:
    """Opens and checks versions."""

    def __init__(self) -> None:
        self._frozen = FrozenFiles()

    async def receive(self, note: WeightsNote) -> FolderUpdate:
        """Map the files of a version and compare every tensor's hash with the announcement."""
        # Hashing releases the interpreter lock, so the engine in this process continues meanwhile.
        return await anyio.to_thread.run_sync(open_shared_version, note, self._frozen)

    def close(self) -> None:
        """Do nothing: the subscriber holds no resources."""


@hookimpl
def stretto_weights() -> Iterator[Component[FileTransportConfig]]:
    """The component of this package."""
    yield Component(
        "file", FileTransport, FileTransportConfig, "safetensors in shared memory or a shared folder"
    )
