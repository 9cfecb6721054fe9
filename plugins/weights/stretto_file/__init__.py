"""Weight transport `file`: each version is a folder of safetensors, in shared memory or on a shared disk.

A version is written aside and renamed, so a reader finds it whole or not at all. The publisher keeps
the newest few and never waits; a reader that has opened a version keeps its pages even when the files
are removed. Every tensor's bytes are hashed on both sides.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio.to_thread
import msgspec

from stretto import Component, Context, WeightsConfig, hookimpl
from stretto.component import PositiveFloat, PositiveInt
from stretto.errors import WeightsError
from stretto.weights import WeightsNote, digest_of, tensor_hash

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FilePublisher", "FileSubscriber", "FileTransport", "FileTransportConfig"]

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the folder made in it is private and named after the run


class FileTransportConfig(WeightsConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the weight transport `file`."""

    folder: str | None = None
    """Folder that trainer and engines see under the same path. Default: shared memory where there is
    some, else the run's folder."""
    keep: PositiveInt = 3
    """Newest versions that are kept; a slower reader skips to the newest."""
    shard_gb: PositiveFloat = 2.0
    """Largest file in GiB; no more than this is held in memory besides the model."""


class Manifest(msgspec.Struct, frozen=True):
    """What a version's folder holds; written last."""

    version: int
    digest: str
    files: dict[str, dict[str, str]]
    """File name -> tensor name -> SHA-256 of its bytes."""


class FileTransport:
    """Both ends, for the processes of one run."""

    def __init__(self, config: FileTransportConfig, context: Context) -> None:
        self._config = config
        self._context = context

    def publisher(self) -> FilePublisher:
        """The end beside the trainer. Its folder is named after the process too: a trainer that is going
        must not take away what its successor publishes."""
        root = self._parent() / f"{self._prefix}-{os.getpid()}"
        return FilePublisher(root, self._config.keep, self._config.shard_gb)

    def subscriber(self) -> FileSubscriber:
        """The end beside an engine."""
        return FileSubscriber()

    def clean(self) -> None:
        """Remove the folders of this run's publishers."""
        for folder in self._parent().glob(f"{self._prefix}-*"):
            shutil.rmtree(folder, ignore_errors=True)

    @property
    def _prefix(self) -> str:
        return f"stretto-{self._context.run}"

    def _parent(self) -> Path:
        if self._config.folder is not None:
            return Path(self._config.folder)
        return _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else self._context.path("weights")


class FilePublisher:
    """Writes versions into `root`, which it owns."""

    def __init__(self, root: Path, keep: int, shard_gb: float) -> None:
        self._root = root
        self._keep = keep
        self._shard_bytes = int(shard_gb * 2**30)

    def publish(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> WeightsNote:
        """Write one version aside, rename it, and remove the oldest."""
        final = self._root / f"v{version:08d}"
        aside = self._root / f".v{version:08d}-{os.getpid()}"
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            aside.mkdir(mode=0o700)
            digest = self._write(aside, version, tensors)
            shutil.rmtree(final, ignore_errors=True)  # a repeated step publishes its version again
            aside.rename(final)
        except OSError as error:
            shutil.rmtree(aside, ignore_errors=True)
            reason = f"version {version} cannot be written to {self._root}: {error}"
            raise WeightsError(reason, version=version) from error
        for old in sorted(self._root.glob("v*"))[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)
        return WeightsNote(version, str(final), digest)

    def close(self) -> None:
        """Remove everything."""
        shutil.rmtree(self._root, ignore_errors=True)

    def _write(self, folder: Path, version: int, tensors: Iterable[tuple[str, Tensor]]) -> str:
        from safetensors.torch import save_file

        files: dict[str, dict[str, str]] = {}
        for index, shard in enumerate(_shards(tensors, self._shard_bytes)):
            name = f"model-{index:05d}.safetensors"
            save_file(shard, folder / name)
            files[name] = {key: tensor_hash(tensor) for key, tensor in shard.items()}
        digest = digest_of((key, value) for hashes in files.values() for key, value in hashes.items())
        manifest = Manifest(version, digest, files)
        (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest))
        return digest


class FileSubscriber:
    """Opens and checks versions."""

    async def receive(self, note: WeightsNote) -> FileUpdate:
        """Map the files of a version and compare every tensor's hash with the announcement."""
        # Hashing releases the interpreter lock: the engine beside goes on meanwhile.
        return await anyio.to_thread.run_sync(_open_checked, note)

    def close(self) -> None:
        """Nothing is held."""


class FileUpdate:
    """One checked version."""

    def __init__(self, note: WeightsNote, folder: Path, files: list[Path]) -> None:
        self.note = note
        self.folder: Path | None = folder
        self._files = files

    def tensors(self) -> Mapping[str, Tensor]:
        """Every tensor, mapped from its file."""
        from safetensors import safe_open

        tensors: dict[str, Tensor] = {}
        for file in self._files:
            with safe_open(file, framework="pt") as opened:
                tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        return tensors

    def close(self) -> None:
        """The maps go with their tensors."""


def _open_checked(note: WeightsNote) -> FileUpdate:
    folder = Path(note.address)
    try:
        manifest = msgspec.json.decode((folder / "manifest.json").read_bytes(), type=Manifest)
        hashes: list[tuple[str, str]] = []
        for name in manifest.files:
            hashes += _file_hashes(folder / name)
    except (OSError, ValueError, msgspec.DecodeError) as error:
        reason = f"version {note.version} at {note.address} cannot be read: {error}"
        raise WeightsError(reason, version=note.version) from error
    found = digest_of(hashes)
    if found != note.digest:
        expected = {name: value for tensors in manifest.files.values() for name, value in tensors.items()}
        wrong = [name for name, value in hashes if expected.get(name) != value] or ["the set of tensors"]
        raise WeightsError(
            f"version {note.version} at {note.address} is not the announced one: {wrong[:3]} differ",
            version=note.version,
        )
    return FileUpdate(note, folder, [folder / name for name in manifest.files])


def _file_hashes(path: Path) -> Iterator[tuple[str, str]]:
    """(tensor name, SHA-256 of its bytes) of a safetensors file, read without torch.

    The format: 8 bytes little-endian length, a JSON header of that length, then the tensors' bytes.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        size = int.from_bytes(mapped[:8], "little")
        header: dict[str, Any] = json.loads(mapped[8 : 8 + size])
        with memoryview(mapped) as view:
            for name, entry in header.items():
                if name != "__metadata__":
                    start, end = entry["data_offsets"]
                    with view[8 + size + start : 8 + size + end] as data:
                        yield name, _hash(data)


def _shards(tensors: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[dict[str, Tensor]]:
    """The tensors in groups of at most `limit` bytes; a larger one stands alone."""
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


def _hash(data: memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


@hookimpl
def stretto_weights() -> Iterator[Component[FileTransportConfig]]:
    """The component of this package."""
    yield Component(
        "file", FileTransport, FileTransportConfig, "safetensors in shared memory or a shared folder"
    )
