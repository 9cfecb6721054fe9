"""The weight transport `my_name`: each version is a folder on a disk that all machines share."""

from __future__ import annotations

from collections.abc import Iterator

import anyio.to_thread

from stretto import Component, Context, WeightsConfig, hookimpl
from stretto.models.version_files import (
    FolderPublisher,
    FolderUpdate,
    RunFolders,
    open_shared_version,
)
from stretto.weights import KeptVersions, WeightsNote, Wire


class MyNameConfig(WeightsConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the weight transport `my_name`."""

    folder: str | None = None
    """Folder for versions, which all machines see under the same path. Default: the run's folder."""
    keep: KeptVersions = 3
    """Number of newest versions to keep. An engine that is slower skips to the newest."""


class MyNameSubscriber:
    """An engine's end: opens versions."""

    async def receive(self, note: WeightsNote) -> FolderUpdate:
        """Open a version, and compare the hash of every tensor with the announced one."""
        return await anyio.to_thread.run_sync(open_shared_version, note)

    def close(self) -> None:
        """Do nothing: this end holds no resources."""


class MyName:
    """Makes both ends. `FolderPublisher` writes a version aside and renames it when it is complete."""

    def __init__(self, config: MyNameConfig, context: Context) -> None:
        self._keep = config.keep
        self._folders = RunFolders(context, config.folder or str(context.path("weights")))

    def publisher(self, wire: Wire) -> FolderPublisher:
        """Return the trainer's end. It does not need the wire: a note's address is the folder."""
        del wire
        return FolderPublisher(self._folders.own(), self._keep, shard_gb=2.0)

    def subscriber(self, wire: Wire) -> MyNameSubscriber:
        """Return an engine's end."""
        del wire
        return MyNameSubscriber()

    def clean(self) -> None:
        """Remove the folders that publishers of this run left behind."""
        self._folders.clean()


@hookimpl
def stretto_weights() -> Iterator[Component[MyNameConfig]]:
    """The component of this package."""
    yield Component("my_name", MyName, MyNameConfig, "folders on a shared disk")
