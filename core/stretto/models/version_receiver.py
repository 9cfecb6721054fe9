"""Receive versions into the files of a folder: whole, or as what has changed since a version that is here.

A weight transport with files at both ends adds only the source of the bytes.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import anyio.to_thread
import msgspec

from stretto.errors import WeightsError
from stretto.models.version_files import (
    FolderUpdate,
    FrozenFiles,
    Manifest,
    Outline,
    bring_up_to_date,
    folder_name,
    lay_out,
    open_version,
    read_outline,
)

if TYPE_CHECKING:
    from stretto.weights import WeightsNote

__all__ = ["Source", "VersionReceiver"]


class Source(Protocol):
    """Where a subscriber gets versions."""

    async def outline(self, note: WeightsNote) -> Outline:
        """Return the outline of a version. Raise WeightsError if the version is gone, or cannot be had."""
        ...

    async def fetch(self, note: WeightsNote, files: Mapping[Path, int]) -> None:
        """Fill files of a version, given with their sizes in bytes, under the names of the outline. The
        next call with the same files may continue an interrupted one. Raise WeightsError if the version is
        gone."""
        ...


class VersionReceiver:
    """Receives versions into folders below `root`, which it owns. While the publisher makes deltas, the
    newest version stays here, and the next ones change its files."""

    def __init__(self, root: Path, source: Source) -> None:
        self._root = root
        self._source = source
        self._frozen = FrozenFiles(root / "frozen")
        self._here: tuple[Manifest, Path] | None = None
        """The newest version and its folder, if the next one may be a delta."""
        self._begun: tuple[WeightsNote, Path, dict[Path, int]] | None = None
        """The version whose whole files are on their way, its folder, and those that are not here yet."""

    async def receive(self, note: WeightsNote) -> FolderUpdate:
        """Receive a version, and compare every hash. Raise WeightsError if it is gone, damaged or another."""
        links = await self._links(note)
        takes_deltas = len(links) > 1 or self.begins_here(links[-1][0])
        try:
            return await self._receive(note, links)
        except WeightsError:
            is_damaged = self._here is None and self._begun is None
            if not (takes_deltas and is_damaged):
                raise  # what has come is good: the next call asks for the rest
            return await self._receive(note, await self._links(note))

    def begins_here(self, manifest: Manifest) -> bool:
        """Return whether the deltas of a version begin with what is here, or the version itself is here."""
        return self._here is not None and self._here[0].digest in (manifest.base, manifest.digest)

    def drop(self) -> None:
        """Remove what is here, and what has come of a version that is on its way."""
        for folder in self._root.glob("v*"):
            shutil.rmtree(folder, ignore_errors=True)
        self._here = self._begun = None

    async def _receive(self, note: WeightsNote, links: list[tuple[Manifest, Outline]]) -> FolderUpdate:
        newest, _ = links[0]
        if self._here is not None and self.begins_here(links[-1][0]):
            here, folder = self._here
            if here.digest == newest.digest:
                links = []
        else:
            manifest, outline = links.pop()
            folder = await self._fetch_whole(_note_of(manifest, note), outline)
        deltas = self._deltas(note)
        try:
            for manifest, outline in links:
                await self._fetch_deltas(_note_of(manifest, note), outline, deltas)
            manifests = [manifest for manifest, _ in reversed(links)]
            # Hashing releases the interpreter lock, so the engine in this process continues meanwhile.
            return await anyio.to_thread.run_sync(self._complete, note, newest, folder, manifests, deltas)
        finally:
            shutil.rmtree(deltas, ignore_errors=True)

    def _deltas(self, note: WeightsNote) -> Path:
        """Make a folder for deltas, with a new name: the source must not continue an interrupted fetch."""
        try:
            return Path(tempfile.mkdtemp(prefix="deltas-", dir=self._root))
        except OSError as error:
            raise WeightsError(f"{self._root} cannot be written: {error}", version=note.version) from error

    async def _links(self, note: WeightsNote) -> list[tuple[Manifest, Outline]]:
        """Return the version and those before it, to one with whole files, or that continues what is here."""
        outline = await self._source.outline(note)
        links = [(read_outline(outline, note)[0], outline)]
        while not (links[-1][0].whole or self.begins_here(links[-1][0])):
            manifest, _ = links[-1]
            if manifest.base_version >= manifest.version:
                raise WeightsError(
                    f"version {manifest.version} begins with version {manifest.base_version}",
                    version=note.version,
                )
            before = msgspec.structs.replace(note, version=manifest.base_version, digest=manifest.base)
            outline = await self._source.outline(before)
            links.append((read_outline(outline, before)[0], outline))
        return links

    async def _fetch_whole(self, note: WeightsNote, outline: Outline) -> Path:
        if self._begun is None or self._begun[0] != note:
            self.drop()
            folder = self._root / folder_name(note.version)
            self._begun = note, folder, lay_out(outline, note, folder, self._frozen)
        _, folder, files = self._begun
        if files:
            await self._source.fetch(note, files)
            self._begun = note, folder, {}
        return folder

    async def _fetch_deltas(self, note: WeightsNote, outline: Outline, folder: Path) -> None:
        manifest, sizes = read_outline(outline, note)
        own = folder / f"{note.version}"
        try:
            own.mkdir(mode=0o700)
        except OSError as error:
            raise WeightsError(f"{own} cannot be written: {error}", version=note.version) from error
        await self._source.fetch(note, {own / name: sizes[name] for name in manifest.deltas.values()})

    def _complete(
        self, note: WeightsNote, newest: Manifest, folder: Path, links: Sequence[Manifest], deltas: Path
    ) -> FolderUpdate:
        """Bring the files in a folder up to date, and check them. Runs in a thread, always to its end."""
        self._here = self._begun = None
        own = self._root / folder_name(note.version)
        try:
            for manifest in links:
                bring_up_to_date(folder, manifest, deltas / f"{manifest.version}")
            if folder != own:
                shutil.rmtree(own, ignore_errors=True)
                folder.rename(own)
            newest.write(own)
            update = open_version(note, own, temporary=not newest.followed, frozen=self._frozen)
        except (OSError, ValueError, WeightsError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.rmtree(own, ignore_errors=True)
            raise WeightsError(str(error), version=note.version) from error
        if newest.followed:
            self._here = newest, own
        return update


def _note_of(manifest: Manifest, note: WeightsNote) -> WeightsNote:
    """Return the announcement of the announced version, or of one before it, as far as a source needs it."""
    return msgspec.structs.replace(note, version=manifest.version, digest=manifest.digest, canary="")
