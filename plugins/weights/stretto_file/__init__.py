"""Weight transport `file`: each version is a folder of safetensors, in shared memory or on a shared disk.

A version is written aside and renamed, so a reader finds it whole or not at all. The publisher keeps
the newest few and never waits; a reader that has opened a version keeps its pages even when the files
are removed. Every tensor's bytes are hashed on both sides.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import anyio.to_thread

from stretto import Component, Context, WeightsConfig, hookimpl
from stretto.component import PositiveFloat, PositiveInt
from stretto.models.version_files import FolderUpdate, RunFolders, VersionFolders, open_version

if TYPE_CHECKING:
    from torch import Tensor

    from stretto.weights import WeightsNote, Wire

__all__ = ["FilePublisher", "FileSubscriber", "FileTransport", "FileTransportConfig"]


class FileTransportConfig(WeightsConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the weight transport `file`."""

    folder: str | None = None
    """Folder that trainer and engines see under the same path. Default: shared memory where there is
    some, else the run's folder."""
    keep: PositiveInt = 3
    """Newest versions that are kept; a slower reader skips to the newest."""
    shard_gb: PositiveFloat = 2.0
    """Largest file in GiB; no more than this is held in memory besides the model."""


class FileTransport:
    """Both ends, for the processes of one run."""

    def __init__(self, config: FileTransportConfig, context: Context) -> None:
        self._config = config
        self._folders = RunFolders(context, config.folder, otherwise=context.path("weights"))

    def publisher(self, wire: Wire) -> FilePublisher:
        """The end beside the trainer."""
        del wire
        config = self._config
        return FilePublisher(VersionFolders(self._folders.own(), config.keep, config.shard_gb))

    def subscriber(self, wire: Wire) -> FileSubscriber:
        """The end beside an engine."""
        del wire
        return FileSubscriber()

    def clean(self) -> None:
        """Remove the folders of this run's publishers."""
        self._folders.clean()


class FilePublisher:
    """Writes versions where engines read them."""

    def __init__(self, versions: VersionFolders) -> None:
        self._versions = versions

    def publish(
        self, version: int, tensors: Iterable[tuple[str, Tensor]], needed: Collection[int] = ()
    ) -> WeightsNote:
        """Write one version; readers find it by its folder."""
        return self._versions.write(version, tensors, needed)

    def copy(self, version: int, folder: Path) -> None:
        """Write a version into a folder."""
        self._versions.copy(version, folder)

    def close(self) -> None:
        """Remove everything."""
        self._versions.close()


class FileSubscriber:
    """Opens and checks versions."""

    async def receive(self, note: WeightsNote) -> FolderUpdate:
        """Map the files of a version and compare every tensor's hash with the announcement."""
        # Hashing releases the interpreter lock: the engine beside goes on meanwhile.
        return await anyio.to_thread.run_sync(open_version, note, Path(note.address))

    def close(self) -> None:
        """Nothing is held."""


@hookimpl
def stretto_weights() -> Iterator[Component[FileTransportConfig]]:
    """The component of this package."""
    yield Component(
        "file", FileTransport, FileTransportConfig, "safetensors in shared memory or a shared folder"
    )
