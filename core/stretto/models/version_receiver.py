"""Receive versions into the files of a folder: whole files, or deltas to a version that is already there.

A weight transport with files at both ends adds only the source of the bytes.
"""

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

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
from stretto.weights import WeightsNote

__all__ = ["Source", "VersionReceiver"]


class Source(Protocol):
    """The place from which a subscriber fetches versions."""

    async def outline(self, note: WeightsNote) -> Outline:
        """Return the outline of a version. Raise WeightsError if the version is gone or unreachable."""
        ...

    async def fetch(self, note: WeightsNote, files: Mapping[Path, int]) -> None:
        """Fill files of a version. `files`: path with the outline's name -> size in bytes. The next call
        with the same files may continue an interrupted call. Raise WeightsError if the version is
        gone."""
        ...


class VersionReceiver:
    """Receives versions into folders below `root`, which it owns. While the publisher makes deltas, the
    newest version stays in its folder, and the next versions change its files."""

    def __init__(self, root: Path, source: Source) -> None:
        self._root = root
        self._source = source
        self._frozen = FrozenFiles(root / "frozen")
        self._here: tuple[Manifest, Path] | None = None
        """The newest version and its folder, if the next one may be a delta."""
        self._begun: tuple[WeightsNote, Path, dict[Path, int]] | None = None
        """The version whose whole files are being received, its folder, and the files still missing."""

    async def receive(self, note: WeightsNote) -> FolderUpdate:
        """Receive a version and check every hash. Raise WeightsError if it is gone, damaged or wrong."""
        links = await self._links(note)
        takes_deltas = len(links) > 1 or self.begins_here(links[-1][0])
        try:
            return await self._receive(note, links)
        except WeightsError:
            is_damaged = self._here is None and self._begun is None
            if not (takes_deltas and is_damaged):
                raise  # the received part is good: the next call asks for the rest
            return await self._receive(note, await self._links(note))

    def begins_here(self, manifest: Manifest) -> bool:
        """Return whether the received version is this one, or the one to which its deltas apply."""
        return self._here is not None and self._here[0].digest in (manifest.base, manifest.digest)

    def drop(self) -> None:
        """Remove the received version, and the received part of a version that is not complete."""
        for folder in self._root.glob("v*"):
            shutil.rmtree(folder, ignore_errors=True)
        self._here = self._begun = None

    def close(self) -> None:
        """Remove the folder `root`."""
        shutil.rmtree(self._root, ignore_errors=True)

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
        """Make a folder for deltas. Its name is new, so that the source does not continue an old fetch."""
        try:
            return Path(tempfile.mkdtemp(prefix="deltas-", dir=self._root))
        except OSError as error:
            raise WeightsError(f"{self._root} cannot be written: {error}", version=note.version) from error

    async def _links(self, note: WeightsNote) -> list[tuple[Manifest, Outline]]:
        """Return the version and earlier ones, back to one with whole files or with deltas to `_here`."""
        outline = await self._source.outline(note)
        links = [(read_outline(outline, note)[0], outline)]
        while not (links[-1][0].whole or self.begins_here(links[-1][0])):
            manifest, _ = links[-1]
            if manifest.base_version >= manifest.version:
                raise WeightsError(
                    f"version {manifest.version} begins with version {manifest.base_version}",
                    version=note.version,
                )
            base = msgspec.structs.replace(note, version=manifest.base_version, digest=manifest.base)
            outline = await self._source.outline(base)
            links.append((read_outline(outline, base)[0], outline))
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
        place = folder / f"{note.version}"
        try:
            place.mkdir(mode=0o700)
        except OSError as error:
            raise WeightsError(f"{place} cannot be written: {error}", version=note.version) from error
        await self._source.fetch(note, {place / name: sizes[name] for name in manifest.deltas.values()})

    def _complete(
        self, note: WeightsNote, newest: Manifest, folder: Path, links: Sequence[Manifest], deltas: Path
    ) -> FolderUpdate:
        """Apply the deltas to the files in a folder and check them. Runs in a thread, always to its end."""
        self._here = self._begun = None
        final = self._root / folder_name(note.version)
        try:
            for manifest in links:
                bring_up_to_date(folder, manifest, deltas / f"{manifest.version}")
            if folder != final:
                shutil.rmtree(final, ignore_errors=True)
                folder.rename(final)
            newest.write(final)
            update = open_version(note, final, temporary=not newest.followed, frozen=self._frozen)
        except (OSError, ValueError, WeightsError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.rmtree(final, ignore_errors=True)
            raise WeightsError(str(error), version=note.version) from error
        if newest.followed:
            self._here = newest, final
        return update


def _note_of(manifest: Manifest, note: WeightsNote) -> WeightsNote:
    """Return an announcement of the manifest's version, with the facts that a source needs."""
    return msgspec.structs.replace(note, version=manifest.version, digest=manifest.digest, canary="")
