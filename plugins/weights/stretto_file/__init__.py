"""Weight transport `file`: each version is a folder of safetensors, in shared memory or on a shared disk.

A version is written under another name and then renamed, so a reader finds a complete version or none. The
publisher never waits: a reader that has opened a version can still read it after its files are removed. Both
sides hash every tensor.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import anyio.to_thread
import msgspec

from stretto import Component, Context, WeightsConfig, hookimpl
from stretto.component import PositiveFloat
from stretto.errors import WeightsError
from stretto.models import version_files
from stretto.models.version_receiver import VersionReceiver
from stretto.weights import KeptVersions, WeightsNote, Wire

__all__ = ["FileSubscriber", "FileTransport", "FileTransportConfig"]


class FileTransportConfig(WeightsConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the weight transport `file`."""

    folder: str | None = None
    """Folder that trainer and engines see under the same path. Default: shared memory where available, else
    the run's folder."""
    keep: KeptVersions = 3
    """Number of newest versions to keep; a slower reader skips to the newest version."""
    deltas: bool = False
    """Write only the changes since the version before, as with `bus`. This is for a `folder` on a network
    disk. In shared memory, writing whole files is faster than comparing them."""
    shard_gb: PositiveFloat = 0.5
    """Size of the largest file in GiB. Publishing needs at most this much memory besides the model."""


class FileTransport:
    """Makes both ends, for the processes of one run."""

    def __init__(self, config: FileTransportConfig, context: Context) -> None:
        self._config = config
        self._folders = version_files.RunFolders(context, config.folder, otherwise=context.path("weights"))
        self.copies = version_files.RunFolders(context, None, otherwise=context.path("weights"))

    def publisher(self, wire: Wire) -> version_files.FolderPublisher:
        """Return the trainer's end."""
        del wire
        config = self._config
        return version_files.FolderPublisher(
            self._folders.own(), config.keep, config.shard_gb, deltas=config.deltas
        )

    def subscriber(self, wire: Wire) -> FileSubscriber:
        """Return an engine's end."""
        del wire
        return FileSubscriber(self.copies)

    def clean(self) -> None:
        """Remove the folders of this run's publishers, and the copies on this machine."""
        self._folders.clean()
        self.copies.clean()


class FileSubscriber:
    """Opens and checks versions. If they are published as deltas, it keeps a full copy in `folders`."""

    def __init__(self, folders: version_files.RunFolders) -> None:
        self._folders = folders
        self._frozen = version_files.FrozenFiles()
        self._copy: VersionReceiver | None = None

    async def receive(self, note: WeightsNote) -> version_files.FolderUpdate:
        """Map a version's files, or apply its delta to the copy; compare every tensor's hash."""
        stored = await anyio.to_thread.run_sync(version_files.stored_version, note)
        if stored.manifest.whole and not (self._copy and self._copy.begins_here(stored.manifest)):
            # Hashing releases the interpreter lock, so the engine in this process continues meanwhile.
            open_update = partial(version_files.open_version, note, stored.folder, frozen=self._frozen)
            return await anyio.to_thread.run_sync(open_update)
        if self._copy is None:
            folder = await anyio.to_thread.run_sync(self._folders.own, "copy")
            self._copy = VersionReceiver(folder, _FileSource())
        return await self._copy.receive(note)

    def close(self) -> None:
        """Remove the copy."""
        if self._copy is not None:
            self._copy.close()


class _FileSource:
    async def outline(self, note: WeightsNote) -> version_files.Outline:
        return (await anyio.to_thread.run_sync(self._find, note)).outline

    async def fetch(self, note: WeightsNote, files: Mapping[Path, int]) -> None:
        await anyio.to_thread.run_sync(self._copy, note, files)

    def _find(self, note: WeightsNote) -> version_files.StoredVersion:
        """Find the version `note.version` in the folder beside that of `note.address`."""
        folder = Path(note.address).with_name(version_files.folder_name(note.version))
        return version_files.stored_version(msgspec.structs.replace(note, address=str(folder)))

    def _copy(self, note: WeightsNote, files: Mapping[Path, int]) -> None:
        stored = self._find(note)
        try:
            for path in files:
                shutil.copyfile(stored.folder / path.name, path)
        except OSError as error:
            reason = f"version {note.version} cannot be read: {error}"
            raise WeightsError(reason, version=note.version) from error


@hookimpl
def stretto_weights() -> Iterator[Component[FileTransportConfig]]:
    yield Component(
        "file", FileTransport, FileTransportConfig, "safetensors in shared memory or a shared folder"
    )
