"""A version of the weights as a folder of safetensors: write it atomically, open it and check it.

A folder holds the files `model-00000.safetensors` and so on, and `manifest.json` with the hash of every
tensor, which is written last.

Tensors that training does not change are in files `frozen-00000.safetensors`: written once, and hard links in
the folder of every later version. A subscriber receives and hashes them once (`FrozenFiles`).

A publisher may write deltas in files `model-00000.delta` and so on (`stretto.models.deltas`). It then writes
whole files only for some versions, with which subscribers begin (`stretto.models.version_receiver`).
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np

from stretto.errors import WeightsError
from stretto.models.deltas import FileBytes, apply_delta
from stretto.models.digest import bytes_hash, differing_names, digest_of, hashes_of
from stretto.models.files import SHARED_MEMORY
from stretto.models.safetensors import Place, layout_of, places, save_tensors, write_header
from stretto.weights import WeightsNote

if TYPE_CHECKING:
    from torch import Tensor

    from stretto.component import Context

__all__ = [
    "SHARED_MEMORY",
    "AskOutline",
    "FolderPublisher",
    "FolderUpdate",
    "FrozenFiles",
    "Manifest",
    "Outline",
    "RunFolders",
    "StoredVersion",
    "bring_up_to_date",
    "expect_private",
    "folder_name",
    "lay_out",
    "open_shared_version",
    "open_version",
    "read_outline",
    "stored_version",
]

_MOST_LINKS = 16  # whole files are written again after this number of deltas
_FILE_NAME = re.compile(r"[\w.-]+\.safetensors")


class RunFolders:
    """The folders in which a run's processes on a machine keep versions, one for each process. All are in
    `folder`; by default shared memory, else `otherwise`, else the machine's folder for temporary files."""

    def __init__(self, context: Context, folder: str | None, otherwise: Path | None = None) -> None:
        self._prefix = f"stretto-{context.run}-"
        self._worker = context.worker
        if folder is not None:
            self._parent = Path(folder)
        elif os.access(SHARED_MEMORY, os.W_OK):
            self._parent = SHARED_MEMORY
        else:
            self._parent = otherwise or Path(tempfile.gettempdir())

    def own(self, purpose: str = "") -> Path:
        """Make a folder for this process, which only this user can enter. Its name contains the process id,
        so that an ending process does not remove its successor's folder. Remove the folders of earlier
        processes of this worker: call first without `purpose`, which tells apart several folders. Raise
        WeightsError if the folder cannot be made."""
        own_prefix = f"{self._prefix}{self._worker}-{purpose and f'{purpose}-'}"
        self._remove(own_prefix)
        try:
            self._parent.mkdir(parents=True, exist_ok=True)
            return Path(tempfile.mkdtemp(prefix=f"{own_prefix}{os.getpid()}-", dir=self._parent))
        except OSError as error:
            raise WeightsError(f"no folder for weights can be made in {self._parent}: {error}") from error

    def clean(self) -> None:
        """Remove the folders of all processes of the run on this machine."""
        self._remove(self._prefix)

    def _remove(self, prefix: str) -> None:
        for folder in self._parent.glob(f"{prefix}*"):
            shutil.rmtree(folder, ignore_errors=True)


class Manifest(msgspec.Struct, frozen=True):
    """The content of a version's folder."""

    version: int
    digest: str
    files: dict[str, dict[str, str]]
    """File name -> tensor name -> its hash."""
    frozen: tuple[str, ...] = ()
    """Names of the files that later versions have too."""
    whole: bool = True
    """Whether the folder has the whole files; else it has only their deltas."""
    base: str = ""
    """Digest of the version to which the deltas apply; empty if there are no deltas."""
    base_version: int = -1
    followed: bool = False
    """Whether later versions may be deltas."""

    @classmethod
    def of(cls, version: int, files: dict[str, dict[str, str]], frozen: Iterable[str] = ()) -> Manifest:
        """Return the manifest of a folder with whole files."""
        digest = digest_of((name, value) for hashes in files.values() for name, value in hashes.items())
        return cls(version, digest, files, tuple(frozen))

    def write(self, folder: Path) -> None:
        """Write `manifest.json` into a folder that already has its files."""
        file = folder / "manifest.json"
        file.unlink(missing_ok=True)  # the previous version's manifest may have hard links elsewhere
        file.write_bytes(msgspec.json.encode(self))

    @property
    def deltas(self) -> dict[str, str]:
        """Name of each file with a delta -> name of the delta."""
        trained = [name for name in self.files if name not in self.frozen] if self.base else []
        return {name: f"{name.removesuffix('.safetensors')}.delta" for name in trained}

    @property
    def stored(self) -> list[str]:
        """Names of the files in the folder."""
        return [*(self.files if self.whole else ()), *self.deltas.values()]

    def hashes(self) -> dict[str, str]:
        """Return tensor name -> its hash, over all files."""
        return {name: value for tensors in self.files.values() for name, value in tensors.items()}


class AskOutline(msgspec.Struct, frozen=True, array_like=True, tag="outline"):
    """The question which files a version has. The answer is an `Outline`."""

    version: int


class Outline(msgspec.Struct, frozen=True, array_like=True):
    """A sender's description of a version; the receiver checks the files against it."""

    manifest: bytes
    """JSON of the `Manifest`."""
    sizes: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    """Size in bytes of each file that the version's folder has, in the order of `Manifest.stored`."""


@dataclass(frozen=True)
class StoredVersion:
    """A version in its folder."""

    folder: Path
    manifest: Manifest
    outline: Outline

    @classmethod
    def of(cls, folder: Path, manifest: Manifest) -> StoredVersion:
        """Return the version in a complete folder."""
        sizes = tuple((folder / name).stat().st_size for name in manifest.stored)
        return cls(folder, manifest, Outline(msgspec.json.encode(manifest), sizes))

    @property
    def sizes(self) -> dict[Path, int]:
        """Path of each file -> its size in bytes."""
        paths = (self.folder / name for name in self.manifest.stored)
        return dict(zip(paths, self.outline.sizes, strict=True))

    @property
    def fetched_bytes(self) -> int:
        """Bytes to fetch for a receiver that has the previous version and the frozen tensors."""
        needed = {*(self.manifest.deltas.values() or self.manifest.files)} - {*self.manifest.frozen}
        return sum(size for path, size in self.sizes.items() if path.name in needed)


class FolderPublisher:
    """A publisher (see `stretto.weights.Publisher`) that keeps the newest versions, each in its own folder
    below `root`, which the publisher owns. Transports that send versions from there extend this class.

    Args:
        keep: number of newest versions to keep, besides older versions that are needed.
        shard_gb: largest file in GiB. Publishing needs at most this much memory besides the model; with
            deltas, the memory of one version.
        address: where subscribers ask for a version. Default: the path of the version's folder.
        deltas: write deltas if most values have 16 bits: nearly all float32 values change in a step.
    """

    def __init__(
        self, root: Path, keep: int, shard_gb: float, address: str | None = None, *, deltas: bool = False
    ) -> None:
        self._root = root
        self._address = address
        self._keep = keep
        self._shard_bytes = int(shard_gb * 2**30)
        self._makes_deltas = deltas
        self._newest: _InMemory | None = None
        """The version to which the next deltas apply; None if there are no deltas."""
        self._versions: dict[int, StoredVersion] = {}
        self._frozen: dict[str, dict[str, str]] = {}
        """The files of frozen tensors: name -> tensor name -> its hash."""

    def freeze(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Write and hash the tensors that every later version has (see `stretto.weights.FreezingPublisher`).
        Raise WeightsError if they cannot be written, or if `root` is not private."""
        folder, self._newest = self._root / "frozen", None
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            expect_private(self._root)
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(mode=0o700)
            self._frozen = self._write_files(folder, "frozen", _shards(tensors, self._shard_bytes))
        except OSError as error:
            raise WeightsError(f"frozen tensors cannot be written to {folder}: {error}") from error

    def publish(
        self, version: int, tensors: Iterable[tuple[str, Tensor]], needed: Collection[int] = ()
    ) -> WeightsNote:
        """Write a version to a temporary folder, rename it, and remove old versions that are not `needed`.
        Raise WeightsError if it cannot be written, or `root` is not private."""
        final = self._root / folder_name(version)
        temporary = self._root / f".v{version:08d}-{os.getpid()}"
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            expect_private(self._root)
            temporary.mkdir(mode=0o700)
            manifest = self._write(temporary, version, tensors)
            shutil.rmtree(final, ignore_errors=True)  # a repeated step publishes its version again
            temporary.rename(final)
            versions = {**self._versions, version: StoredVersion.of(final, manifest)}
        except OSError as error:
            reason = f"version {version} cannot be written to {self._root}: {error}"
            raise WeightsError(reason, version=version) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        for old in versions.keys() - self._in_use(versions, needed):
            shutil.rmtree(versions.pop(old).folder, ignore_errors=True)
        self._versions = versions
        fetched = versions[version].fetched_bytes
        return WeightsNote(version, self._address or str(final), manifest.digest, fetched_bytes=fetched)

    def find(self, version: int) -> StoredVersion:
        """Find a version; it may be removed before its files are opened. Any thread may call this. Raise
        WeightsError if the version is not stored."""
        entry = self._versions.get(version)
        if entry is None:
            newest = max(self._versions, default="none")
            reason = f"version {version} is not here (any more); the newest is {newest}"
            raise WeightsError(reason, version=version)
        return entry

    def copy(self, version: int, folder: Path) -> None:
        """Copy a version to a new folder. Raise WeightsError if it is not stored, OSError if this fails."""
        stored = self.find(version)
        *links, last = _chain(self._versions, stored)
        if not last.manifest.whole:
            raise WeightsError(f"version {version} has lost the one that it begins with", version=version)
        shutil.copytree(last.folder, folder, ignore=shutil.ignore_patterns("*.delta"))
        for link in reversed(links):
            bring_up_to_date(folder, link.manifest, link.folder)
        Manifest.of(version, stored.manifest.files, stored.manifest.frozen).write(folder)

    def close(self) -> None:
        """Remove all versions and `root`."""
        shutil.rmtree(self._root, ignore_errors=True)

    def _in_use(self, versions: Mapping[int, StoredVersion], needed: Collection[int]) -> set[int]:
        wanted = {*sorted(versions)[-self._keep :], *(versions.keys() & needed)}
        return {link.manifest.version for number in wanted for link in _chain(versions, versions[number])}

    def _write(self, folder: Path, version: int, tensors: Iterable[tuple[str, Tensor]]) -> Manifest:
        shards = _shards(tensors, self._shard_bytes)
        first = next(shards, {})
        all_shards = chain([first], shards) if first else shards
        if self._makes_deltas and _has_16_bits(first):
            manifest = self._write_followed(folder, version, all_shards)
        else:
            self._newest = None
            files = self._write_files(folder, "model", all_shards)
            manifest = Manifest.of(version, files | self._frozen, self._frozen)
        if manifest.whole:
            for name in self._frozen:
                (folder / name).hardlink_to(self._root / "frozen" / name)
        manifest.write(folder)
        return manifest

    def _write_followed(self, folder: Path, version: int, shards: Iterator[dict[str, Tensor]]) -> Manifest:
        """Write deltas if the previous version has the same files, and whole files if needed (`_is_long`)."""
        base, self._newest = self._newest, None  # a failure leaves it half overwritten
        if base is not None and base.version >= version:
            base = None  # the steps since then were lost
        names = set(base.files) if base is not None else set()
        newest = _InMemory(version)
        hashes: dict[str, dict[str, str]] = {}
        with ThreadPoolExecutor(1) as beside:  # hashing and comparing take equally long and release the lock
            for index, shard in enumerate(shards):
                name = f"model-{index:05d}.safetensors"
                hashing = beside.submit(hashes_of, shard)
                newest.put(name, shard, base)
                hashes[name] = hashing.result()
                shard.clear()
        manifest = Manifest.of(version, hashes | self._frozen, self._frozen)
        newest.digest, is_whole = manifest.digest, True
        if base is not None and len(newest.deltas) == len(newest.files) == len(names):
            manifest = msgspec.structs.replace(manifest, base=base.digest, base_version=base.version)
            for name, delta in manifest.deltas.items():
                (folder / delta).write_bytes(newest.deltas[name])
            is_whole = self._is_long(base, sum(map(len, newest.deltas.values())), newest.bytes)
        if is_whole:
            newest.write(folder)
        newest.deltas.clear()
        self._newest = newest
        return msgspec.structs.replace(manifest, followed=True, whole=is_whole)

    def _is_long(self, base: _InMemory, size: int, whole: int) -> bool:
        """Return whether one more delta of `size` bytes makes the deltas since the whole files too large."""
        stored = self._versions.get(base.version)
        if stored is None or stored.manifest.digest != base.digest:
            return True
        *links, last = _chain(self._versions, stored)
        size += sum(sum(link.outline.sizes) for link in links)
        return not last.manifest.whole or len(links) + 1 >= _MOST_LINKS or size > whole // 2

    def _write_files(
        self, folder: Path, stem: str, shards: Iterable[dict[str, Tensor]]
    ) -> dict[str, dict[str, str]]:
        files: dict[str, dict[str, str]] = {}
        for index, shard in enumerate(shards):
            name = f"{stem}-{index:05d}.safetensors"
            save_tensors(shard, folder / name)
            files[name] = hashes_of(shard)
            shard.clear()  # free the tensors before the next shard is gathered
        return files


class _InMemory:
    """The files of a version in memory, without frozen files. The next version overwrites them."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.digest = ""
        self.files: dict[str, tuple[list[Place], FileBytes]] = {}
        """File name -> the places of its tensors, and their bytes."""
        self.deltas: dict[str, bytes] = {}
        """File name -> its delta, for each file whose layout is the same as in the previous version."""

    def put(self, name: str, shard: Mapping[str, Tensor], base: _InMemory | None) -> None:
        import torch

        layout = layout_of(shard)
        before, content = base.files.pop(name, ([], None)) if base is not None else ([], None)
        if content is None or before != layout:
            width = 1 if any(place.size % 2 for place in layout) else 2
            content, before = FileBytes(sum(place.size for place in layout), width), []
        content.begin(is_new=not before)
        for place in layout:
            content.put(place.start, shard[place.name].reshape(-1).view(torch.uint8).numpy())
        self.files[name] = layout, content
        if (delta := content.delta()) is not None:
            self.deltas[name] = delta

    def write(self, folder: Path) -> None:
        for name, (layout, content) in self.files.items():
            with (folder / name).open("wb") as file:
                write_header(file, layout)
                file.write(content.data)

    @property
    def bytes(self) -> int:
        return sum(content.data.nbytes for _, content in self.files.values())


def _has_16_bits(tensors: Mapping[str, Tensor]) -> bool:
    halves = sum(tensor.nbytes for tensor in tensors.values() if tensor.element_size() == 2)
    return 2 * halves > sum(tensor.nbytes for tensor in tensors.values())


def _chain(versions: Mapping[int, StoredVersion], stored: StoredVersion) -> list[StoredVersion]:
    """Return a version, the version to which its deltas apply, and so on, to whole files or a missing one."""
    links = [stored]
    while not links[-1].manifest.whole:
        before = versions.get(links[-1].manifest.base_version)
        if before is None or before.manifest.digest != links[-1].manifest.base:
            break
        links.append(before)
    return links


def bring_up_to_date(folder: Path, manifest: Manifest, deltas: Path) -> None:
    """Apply the deltas in the folder `deltas` to the files in `folder`, which are those of `manifest.base`.
    Raise OSError if a file cannot be read or written, WeightsError if a file is damaged, ValueError if a
    delta is damaged or for another file. After an error, some files may have changed."""
    for name, delta in manifest.deltas.items():
        file = folder / name
        if file.stat().st_nlink > 1:  # an engine keeps the previous version, for a restart of its server
            copy = file.with_suffix(".copy")
            shutil.copyfile(file, copy)
            copy.replace(file)
        start = min(place.start for place in places(file))
        tensors = np.memmap(file, np.uint8, "r+", offset=start)
        apply_delta((deltas / delta).read_bytes(), tensors)


class FolderUpdate:
    """A checked version in a folder. `temporary`: `close` removes the folder."""

    def __init__(self, note: WeightsNote, folder: Path, manifest: Manifest, *, temporary: bool) -> None:
        self.note = note
        self._temporary = temporary
        self.folder: Path | None = folder
        self._files = [folder / name for name in manifest.files]
        self._hashes = manifest.hashes()

    def hashes(self) -> Mapping[str, str]:
        """Return the hashes in the manifest, which was checked against the announced digest."""
        return self._hashes

    def tensors(self) -> Mapping[str, Tensor]:
        """Return all tensors, memory-mapped; WeightsError if the safetensors library refuses a file."""
        from safetensors import SafetensorError, safe_open

        tensors: dict[str, Tensor] = {}
        for file in self._files:
            try:
                with safe_open(file, framework="pt") as reader:
                    tensors |= {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118
            except SafetensorError as error:
                raise WeightsError(f"{file} cannot be read: {error}", version=self.note.version) from error
        return tensors

    def close(self) -> None:
        """Remove the folder if it is temporary. A file stays mapped until its tensors are freed."""
        if self._temporary and self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


class FrozenFiles:
    """The files of frozen tensors that a subscriber has checked, so it does not receive or hash them again.
    `folder`: where the subscriber keeps received files; None if it reads the publisher's files."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._checked: dict[tuple[int, ...], dict[str, str]] = {}
        """Identity of a file -> tensor name -> its hash."""

    def hashes(self, path: Path) -> Mapping[str, str] | None:
        """Return tensor name -> its hash for a file that was checked before, else None."""
        return self._checked.get(_identity(path))

    def find(self, name: str) -> tuple[Path, Mapping[str, str]] | None:
        """Return the path and the hashes of the file that is kept under this name; None if none is."""
        if self._folder is None or not (path := self._folder / name).exists():
            return None
        hashes = self.hashes(path)
        return (path, hashes) if hashes is not None else None

    def keep(self, version: Path, manifest: Manifest) -> None:
        """Keep the frozen files of a version that has just been checked; OSError if that fails."""
        if not manifest.frozen:
            return
        self._checked = {_identity(version / name): manifest.files[name] for name in manifest.frozen}
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir(mode=0o700, parents=True)
            for name in manifest.frozen:
                (self._folder / name).hardlink_to(version / name)


def _identity(path: Path) -> tuple[int, ...]:
    """Return numbers that distinguish the file from all others and that change when it is written."""
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def folder_name(version: int) -> str:
    """Return the name of a version's folder."""
    return f"v{version:08d}"


def expect_private(folder: Path) -> None:
    """Check that a folder belongs to this user and nobody else can enter it. Raise OSError if it does not
    exist, WeightsError if it belongs to another user, has a mode beyond 700, or is a link."""
    status, user = folder.lstat(), os.geteuid()
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISDIR(status.st_mode):
        fault = "it is not a folder"
    elif status.st_uid != user:
        fault = f"it belongs to user {status.st_uid}, but this process is of user {user}"
    elif mode & 0o077:
        fault = f"it has mode {mode:o}, expected 700"
    else:
        return
    raise WeightsError(
        f"{folder} is not private: {fault}; somebody else may have made it: set weights.folder "
        "to a folder of yours"
    )


def lay_out(
    outline: Outline, note: WeightsNote, folder: Path, frozen: FrozenFiles | None = None
) -> dict[Path, int]:
    """Make the folder of a version whose whole files this process will receive. Return path -> size in bytes
    of each file that the caller must fill: all but those in `frozen`. Raise WeightsError if the outline does
    not describe the announced version, or the folder cannot be written or has no room."""
    manifest, sizes = read_outline(outline, note)
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        for name in manifest.deltas.values():
            del sizes[name]
        for name in manifest.frozen:
            stored = frozen.find(name) if frozen is not None else None
            if stored is not None and stored[1] == manifest.files[name]:
                (folder / name).hardlink_to(stored[0])
                del sizes[name]
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise WeightsError(f"{folder} cannot be written: {error}", version=note.version) from error
    if (size := sum(sizes.values())) > free:
        raise WeightsError(
            f"version {note.version} has {size} bytes; {folder} has room for {free}: free "
            "space, or set weights.folder",
            version=note.version,
        )
    return {folder / name: size for name, size in sizes.items()}


def read_outline(outline: Outline, note: WeightsNote) -> tuple[Manifest, dict[str, int]]:
    """Return an announced version's manifest and the size in bytes of each file that its sender has. Raise
    WeightsError if the outline describes another version."""
    manifest = _read_manifest(outline.manifest, note)
    if len(manifest.stored) != len(outline.sizes):
        raise WeightsError(
            f"version {note.version} at {note.address} has {len(manifest.stored)} files and "
            f"{len(outline.sizes)} sizes of files",
            version=note.version,
        )
    return manifest, dict(zip(manifest.stored, outline.sizes, strict=True))


def open_version(
    note: WeightsNote, folder: Path, *, temporary: bool = False, frozen: FrozenFiles | None = None
) -> FolderUpdate:
    """Open a version's folder and check every tensor against the announcement, except those in `frozen`; add
    the version's frozen files to it. `temporary`: closing the update removes the folder. Raise WeightsError
    if the folder is missing, damaged or of another version; the error names tensors that differ."""
    label = f"version {note.version} at {note.address}"
    try:
        manifest = _read_manifest((folder / "manifest.json").read_bytes(), note)
        hashes: dict[str, str] = {}
        for name in manifest.files:
            checked = frozen.hashes(folder / name) if frozen is not None else None
            hashes |= dict(_file_hashes(folder / name)) if checked is None else checked
    except (OSError, ValueError, WeightsError) as error:
        raise WeightsError(f"{label} cannot be read: {error}", version=note.version) from error
    if wrong := differing_names(hashes, manifest.hashes()):
        raise WeightsError(f"{label} is not the announced one: {wrong[:3]} differ", version=note.version)
    if frozen is not None:
        try:
            frozen.keep(folder, manifest)
        except OSError as error:
            raise WeightsError(f"{label} cannot be kept: {error}", version=note.version) from error
    return FolderUpdate(note, folder, manifest, temporary=temporary)


def open_shared_version(note: WeightsNote, frozen: FrozenFiles | None = None) -> FolderUpdate:
    """Open the version that `stored_version` finds; see `open_version`."""
    return open_version(note, stored_version(note).folder, frozen=frozen)


def stored_version(note: WeightsNote) -> StoredVersion:
    """Find a version that another process of this user has made, in the folder `note.address`. Raise
    WeightsError if it cannot be read, or others can enter its folder or the parent."""
    folder = Path(note.address)
    with _unreadable(note):
        # Nobody else may change the files between the check of their hashes and the load.
        expect_private(folder.parent)
        expect_private(folder)
        data = (folder / "manifest.json").read_bytes()
    manifest = _read_manifest(data, note)
    with _unreadable(note):
        return StoredVersion.of(folder, manifest)


@contextmanager
def _unreadable(note: WeightsNote) -> Generator[None]:
    try:
        yield
    except (OSError, WeightsError) as error:
        reason = f"version {note.version} at {Path(note.address)} cannot be read: {error}"
        hint = "without a shared folder, weights: bus"
        raise WeightsError(f"{reason}; {hint}", version=note.version) from error


def _read_manifest(data: bytes, note: WeightsNote) -> Manifest:
    label = f"version {note.version} at {note.address}"
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
        digest = digest_of(manifest.hashes().items())
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise WeightsError(f"{label} cannot be read: {error}", version=note.version) from error
    if bad_names := [name for name in manifest.files if not _FILE_NAME.fullmatch(name)]:
        fault = f"has a file {bad_names[0]!r}; expected plain names that end in .safetensors"
    elif not {*manifest.frozen} <= manifest.files.keys():
        fault = "has frozen files that it does not name"
    elif manifest.version != note.version:
        fault = f"is not the announced one: its manifest is of version {manifest.version}"
    elif digest != note.digest:
        fault = "is not the announced one: its manifest is of other tensors"
    else:
        return manifest
    raise WeightsError(f"{label} {fault}", version=note.version)


def _file_hashes(path: Path) -> Iterator[tuple[str, str]]:
    tensors = places(path)
    data = np.memmap(path, np.uint8, "r")
    for place in tensors:
        yield (
            place.name,
            bytes_hash(data[place.start : place.start + place.size], place.dtype_name, place.shape),
        )


def _shards(tensors: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[dict[str, Tensor]]:
    """Group the tensors into shards of at most `limit` bytes; a larger tensor gets its own shard."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        tensor = tensor.detach().contiguous()
        if shard and size + tensor.nbytes > limit:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    if shard:
        yield shard
