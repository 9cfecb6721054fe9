"""A version of the weights as a folder of safetensors: write it atomically, open it and check it.

Weight transports that keep versions in folders, at one end or at both, share this module. A folder holds the
files `model-00000.safetensors` and so on, and `manifest.json` with the hash of every tensor. The manifest is
written last.

Tensors that training does not change are in files `frozen-00000.safetensors`. They are written once, and are
hard links in the folder of every later version. A subscriber receives and hashes them once (`FrozenFiles`).
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np

from stretto.errors import WeightsError
from stretto.models.digest import bytes_hash, differing_names, digest_of, tensor_hash
from stretto.models.safetensors import places, save_tensors
from stretto.weights import WeightsNote

if TYPE_CHECKING:
    from torch import Tensor

    from stretto.component import Context

__all__ = [
    "AskOutline",
    "FolderPublisher",
    "FolderUpdate",
    "FrozenFiles",
    "Manifest",
    "Outline",
    "RunFolders",
    "StoredVersion",
    "expect_private",
    "lay_out",
    "open_shared_version",
    "open_version",
]

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the folders made in it are private and named after the run
_FILE_NAME = re.compile(r"[\w.-]+\.safetensors")


class RunFolders:
    """The folders of versions that the processes of a run have on a machine; each process has its own.

    Args:
        folder: parent of all these folders. Default: shared memory if this machine has it, else `otherwise`,
            else the machine's folder for temporary files.
    """

    def __init__(self, context: Context, folder: str | None, otherwise: Path | None = None) -> None:
        self._prefix = f"stretto-{context.run}-"
        self._worker = context.worker
        if folder is not None:
            self._parent = Path(folder)
        elif os.access(_SHARED_MEMORY, os.W_OK):
            self._parent = _SHARED_MEMORY
        else:
            self._parent = otherwise or Path(tempfile.gettempdir())

    def own(self, purpose: str = "") -> Path:
        """Make a folder for this process, which only this user can enter. The name contains the process id,
        so that a process that is ending does not remove the folder of its successor. Folders that earlier
        processes of this worker left here are removed.

        Args:
            purpose: name of one of several folders of a worker. Call without a purpose first: that call
                removes all folders of the worker's earlier processes.

        Raises:
            WeightsError: if the folder cannot be made.
        """
        own_prefix = f"{self._prefix}{self._worker}-{purpose and f'{purpose}-'}"
        self._remove(own_prefix)
        try:
            self._parent.mkdir(parents=True, exist_ok=True)
            # The name ends with random letters: nobody else can make the folder first.
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

    @classmethod
    def write(
        cls, folder: Path, version: int, files: dict[str, dict[str, str]], frozen: Iterable[str] = ()
    ) -> Manifest:
        """Complete a folder that already has its tensor files: write the manifest."""
        digest = digest_of((name, value) for hashes in files.values() for name, value in hashes.items())
        manifest = cls(version, digest, files, tuple(frozen))
        (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest))
        return manifest

    def hashes(self) -> dict[str, str]:
        """Return tensor name -> its hash, over all files."""
        return {name: value for tensors in self.files.values() for name, value in tensors.items()}


class AskOutline(msgspec.Struct, frozen=True, array_like=True, tag="outline"):
    """Ask which files a version has. The answer is an `Outline`."""

    version: int


class Outline(msgspec.Struct, frozen=True, array_like=True):
    """The description of a version that its sender gives to a receiver. The receiver checks against it."""

    manifest: bytes
    """JSON of the `Manifest`."""
    sizes: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    """Size of each file in bytes, in the manifest's order."""


@dataclass(frozen=True)
class StoredVersion:
    """A version in its folder."""

    folder: Path
    files: list[Path]
    """Paths of the files, in the manifest's order."""
    outline: Outline

    @classmethod
    def of(cls, folder: Path) -> StoredVersion:
        """Read the description of a complete folder."""
        data = (folder / "manifest.json").read_bytes()
        files = [folder / name for name in msgspec.json.decode(data, type=Manifest).files]
        return cls(folder, files, Outline(data, tuple(file.stat().st_size for file in files)))


class FolderPublisher:
    """A publisher (see `stretto.weights.Publisher`) that keeps the newest versions, each in its own folder
    below `root`. It owns `root`. Transports that send versions from there extend it.

    Args:
        keep: number of newest versions to keep. Older versions that are needed are kept too.
        shard_gb: largest file in GiB. Publishing holds at most this much in memory besides the model.
        address: where subscribers ask for a version. Default: the note has the path of the version's folder.
    """

    def __init__(self, root: Path, keep: int, shard_gb: float, address: str | None = None) -> None:
        self._root = root
        self._address = address
        self._keep = keep
        self._shard_bytes = int(shard_gb * 2**30)
        self._versions: dict[int, StoredVersion] = {}
        self._frozen: dict[str, dict[str, str]] = {}
        """The files of frozen tensors: name -> tensor name -> its hash."""

    def freeze(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Write and hash the tensors that every later version has (see `stretto.weights.FreezingPublisher`).

        Raises:
            WeightsError: if they cannot be written, or if `root` is not private.
        """
        folder = self._frozen_folder
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            expect_private(self._root)
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(mode=0o700)
            self._frozen = self._write_tensors(folder, "frozen", tensors)
        except OSError as error:
            raise WeightsError(f"frozen tensors cannot be written to {folder}: {error}") from error

    def publish(
        self, version: int, tensors: Iterable[tuple[str, Tensor]], needed: Collection[int] = ()
    ) -> WeightsNote:
        """Write a version to a temporary folder, rename the folder, and remove the oldest versions that are
        not in `needed`.

        Raises:
            WeightsError: if the version cannot be written, or if `root` is not private.
        """
        final = self._root / f"v{version:08d}"
        temporary = self._root / f".v{version:08d}-{os.getpid()}"
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            expect_private(self._root)
            temporary.mkdir(mode=0o700)
            digest = self._write(temporary, version, tensors)
            shutil.rmtree(final, ignore_errors=True)  # a repeated step publishes its version again
            temporary.rename(final)
            versions = {**self._versions, version: StoredVersion.of(final)}
        except OSError as error:
            reason = f"version {version} cannot be written to {self._root}: {error}"
            raise WeightsError(reason, version=version) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        for old in sorted(versions)[: -self._keep]:
            if old not in needed:
                shutil.rmtree(versions.pop(old).folder, ignore_errors=True)
        self._versions = versions
        return WeightsNote(version, self._address or str(final), digest)

    def find(self, version: int) -> StoredVersion:
        """Find a version. It may be removed before the caller opens its files. Any thread may call this.

        Raises:
            WeightsError: if the version was never here or has been removed.
        """
        entry = self._versions.get(version)
        if entry is None:
            newest = max(self._versions, default="none")
            reason = f"version {version} is not here (any more); the newest is {newest}"
            raise WeightsError(reason, version=version)
        return entry

    def copy(self, version: int, folder: Path) -> None:
        """Copy a version to a folder that does not exist yet.

        Raises:
            WeightsError: if the version was never here or has been removed.
            OSError: if the folder cannot be written.
        """
        shutil.copytree(self.find(version).folder, folder)

    def close(self) -> None:
        """Remove all versions and `root`."""
        shutil.rmtree(self._root, ignore_errors=True)

    @property
    def _frozen_folder(self) -> Path:
        return self._root / "frozen"

    def _write(self, folder: Path, version: int, tensors: Iterable[tuple[str, Tensor]]) -> str:
        files = self._write_tensors(folder, "model", tensors)
        for name in self._frozen:
            (folder / name).hardlink_to(self._frozen_folder / name)
        return Manifest.write(folder, version, files | self._frozen, self._frozen).digest

    def _write_tensors(
        self, folder: Path, stem: str, tensors: Iterable[tuple[str, Tensor]]
    ) -> dict[str, dict[str, str]]:
        """Write tensors to files. Return file name -> tensor name -> its hash."""
        files: dict[str, dict[str, str]] = {}
        for index, shard in enumerate(_shards(tensors, self._shard_bytes)):
            name = f"{stem}-{index:05d}.safetensors"
            save_tensors(shard, folder / name)
            files[name] = {key: tensor_hash(tensor) for key, tensor in shard.items()}
            shard.clear()  # free it before the next one is gathered
        return files


class FolderUpdate:
    """One checked version.

    Args:
        temporary: the folder belongs to this update; `close` removes it.
    """

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
        """Return all tensors, memory-mapped from their files.

        Raises:
            WeightsError: if the safetensors library refuses a file.
        """
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
    """The files of frozen tensors that one subscriber has checked: it neither hashes nor receives them again.

    Args:
        folder: where the subscriber keeps the files that it has received; None if it reads the publisher's.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._checked: dict[tuple[int, ...], dict[str, str]] = {}
        """Identity of a file -> tensor name -> its hash."""

    def hashes(self, path: Path) -> Mapping[str, str] | None:
        """Return tensor name -> its hash for a file that was checked before, else None."""
        return self._checked.get(_identity(path))

    def find(self, name: str) -> tuple[Path, Mapping[str, str]] | None:
        """Return the path of a file that is kept under this name, and its hashes; or None."""
        if self._folder is None or not (path := self._folder / name).exists():
            return None
        hashes = self.hashes(path)
        return (path, hashes) if hashes is not None else None

    def keep(self, version: Path, manifest: Manifest) -> None:
        """Keep the frozen files of a version that has just been checked.

        Raises:
            OSError: if a file cannot be kept.
        """
        if not manifest.frozen:
            return
        self._checked = {_identity(version / name): manifest.files[name] for name in manifest.frozen}
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir(mode=0o700, parents=True)
            for name in manifest.frozen:
                (self._folder / name).hardlink_to(version / name)


def _identity(path: Path) -> tuple[int, ...]:
    """Return numbers that distinguish the file from every other, and change when it is written."""
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def expect_private(folder: Path) -> None:
    """Check that a folder is this user's own, and that nobody else can enter it.

    Raises:
        OSError: if the folder does not exist.
        WeightsError: if it is another user's, has a mode beyond 700, or is a link.
    """
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
    raise WeightsError(f"{folder} is not private: {fault}; somebody else may have made it")


def lay_out(
    outline: Outline, note: WeightsNote, folder: Path, frozen: FrozenFiles | None = None
) -> dict[Path, int]:
    """Make the folder of a version that this process will receive. Return the path of each file that the
    caller must fill, with its size in bytes.

    Args:
        frozen: files that this process has; those that are in the version need not be filled.

    Raises:
        WeightsError: if the outline does not describe the announced version, or the folder cannot be written
            or has no room for it.
    """
    manifest = _read_manifest(outline.manifest, note)
    files = [*manifest.files]
    if len(files) != len(outline.sizes):
        raise WeightsError(
            f"version {note.version} at {note.address} has {len(files)} files and {len(outline.sizes)} sizes "
            "of files",
            version=note.version,
        )
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        (folder / "manifest.json").write_bytes(outline.manifest)
        sizes = dict(zip(files, outline.sizes, strict=True))
        for name in manifest.frozen:
            kept = frozen.find(name) if frozen is not None else None
            if kept is not None and kept[1] == manifest.files[name]:
                (folder / name).hardlink_to(kept[0])
                del sizes[name]
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise WeightsError(f"{folder} cannot be written: {error}", version=note.version) from error
    if (size := sum(sizes.values())) > free:
        raise WeightsError(
            f"version {note.version} has {size} bytes; {folder} has room for {free}", version=note.version
        )
    return {folder / name: size for name, size in sizes.items()}


def open_version(
    note: WeightsNote, folder: Path, *, temporary: bool = False, frozen: FrozenFiles | None = None
) -> FolderUpdate:
    """Open a version's folder and check that every tensor matches the announcement.

    Args:
        temporary: remove the folder when the update is closed.
        frozen: files that were checked before and are not hashed again. The version's are added.

    Raises:
        WeightsError: if the folder is missing or damaged, or is not the announced version. The error names
            tensors that differ.
    """
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
    """Open the version in the folder `note.address`, which another process of this user made.

    Args:
        frozen: as for `open_version`.

    Raises:
        WeightsError: as `open_version`, or if others can enter the folder or its parent.
    """
    folder = Path(note.address)
    try:
        # The files are read to hash them, and later to load them. Nobody else may change them in between.
        expect_private(folder.parent)
        expect_private(folder)
    except (OSError, WeightsError) as error:
        reason = f"version {note.version} at {folder} cannot be read: {error}"
        raise WeightsError(reason, version=note.version) from error
    return open_version(note, folder, frozen=frozen)


def _read_manifest(data: bytes, note: WeightsNote) -> Manifest:
    """Read the manifest of a version.

    Raises:
        WeightsError: if it cannot be read, names a file in another folder, or is not the manifest of the
            announced version.
    """
    label = f"version {note.version} at {note.address}"
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
        digest = digest_of(manifest.hashes().items())
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise WeightsError(f"{label} cannot be read: {error}", version=note.version) from error
    if bad_names := [name for name in manifest.files if not _FILE_NAME.fullmatch(name)]:
        raise WeightsError(
            f"{label} has a file {bad_names[0]!r}; expected plain names that end in .safetensors",
            version=note.version,
        )
    if not {*manifest.frozen} <= manifest.files.keys():
        raise WeightsError(f"{label} has frozen files that it does not name", version=note.version)
    if manifest.version != note.version:
        raise WeightsError(
            f"{label} is not the announced one: its manifest is of version {manifest.version}",
            version=note.version,
        )
    if digest != note.digest:
        raise WeightsError(
            f"{label} is not the announced one: its manifest is of other tensors", version=note.version
        )
    return manifest


def _file_hashes(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (tensor name, hash) for every tensor of a safetensors file."""
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
