"""Checkpoints: folders that are complete or not there, and the reading of the newest intact one.

`checkpoints/step-000040/` holds `model/` (loads with transformers) and what else the training engine
wrote, `evaluation/` with the weights of older versions that were still to be evaluated, `kernel.json` (the
ledger, the cursor, the places in journal and log) and `manifest.json` with the hash of every file, written
last. It is made under another name and renamed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import AsyncGenerator, Collection, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio.to_thread
import msgspec
import structlog

from stretto.kernel.scheduler import Ledger, Snapshot
from stretto.weights import WeightsNote

__all__ = ["KernelState", "checkpoint_name", "damage_of", "newest_intact", "prune", "writing"]

log = structlog.get_logger()

_PREFIX = "step-"


class KernelState(msgspec.Struct, frozen=True):
    """The kernel's own part of a checkpoint."""

    version: int
    incarnation: int
    digest: str
    """Of the weights."""
    snapshot: Snapshot
    log_sequence: int
    """Last message of the log that the snapshot has taken in."""
    lowest_sequence: int
    """Messages of the log below it are not needed any more."""
    layout: str
    seed: int
    trained_tokens: int
    generated_tokens: int
    wall_s: float
    values: int = 1
    """Number of the run file's values in force when it was written."""
    needed: tuple[WeightsNote, ...] = ()
    """Older versions that are still to be evaluated; their weights are in the checkpoint too."""

    @classmethod
    def initial(cls) -> KernelState:
        """That of a run of which nothing but the journal and the log is left: its beginning."""
        snapshot = Snapshot(0, Ledger(), 0, 0, [], [], [], {}, {})
        return cls(0, 0, "", snapshot, 0, 0, "", 0, 0, 0, 0.0)


def checkpoint_name(version: int, values: int | None = None) -> str:
    """`step-000040`; `step-000040-values-2` for the one with which changed values begin, which stands beside
    that of the former values and comes after it in the order of names."""
    return f"{_PREFIX}{version:06d}" + (f"-values-{values}" if values is not None else "")


@asynccontextmanager
async def writing(root: Path, name: str, state: KernelState) -> AsyncGenerator[Path]:
    """A folder to write a checkpoint into; complete under its name when the block is left, or gone.

    Raises:
        OSError: if it cannot be written, such as on a full disk.
    """
    final = root / name
    aside = root / f".{final.name}-{os.getpid()}"
    try:
        await anyio.to_thread.run_sync(_clear, root)
        aside.mkdir(parents=True)
        yield aside
        (aside / "kernel.json").write_bytes(msgspec.json.format(msgspec.json.encode(state)))
        await anyio.to_thread.run_sync(_put, aside, final)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def newest_intact(root: Path) -> tuple[Path, KernelState] | None:
    """The newest checkpoint whose every file is what its manifest says. Damaged ones are passed over, and
    said."""
    for folder in sorted(root.glob(f"{_PREFIX}*"), reverse=True):
        damage = damage_of(folder)
        if damage:
            log.warning("checkpoint is damaged", folder=str(folder), damage=damage)
            continue
        return folder, _state_in(folder)
    return None


def damage_of(folder: Path) -> str:
    """What is wrong with a checkpoint, or an empty string."""
    try:
        hashes = msgspec.json.decode((folder / "manifest.json").read_bytes(), type=dict[str, str])
        wrong = [name for name, value in hashes.items() if _hash(folder / name) != value]
        _state_in(folder)
    except (OSError, msgspec.DecodeError) as error:
        return str(error)
    return f"{wrong[0]} is not what was written" if wrong else ""


def prune(root: Path, keep: int, newest: str, spared: Collection[int] = ()) -> int:
    """Of the checkpoints up to `newest`, written last, remove all but the newest `keep` and those of `spared`
    versions; returns the lowest log sequence that the newest need. Later ones are of a former life, and
    damaged."""
    folders = [folder for folder in sorted(root.glob(f"{_PREFIX}*")) if folder.name <= newest]
    names = {checkpoint_name(version) for version in spared}
    for folder in folders[:-keep]:
        if folder.name not in names:
            shutil.rmtree(folder, ignore_errors=True)
    needed: list[int] = []
    for folder in folders[-keep:]:
        try:
            needed.append(_state_in(folder).lowest_sequence)
        except (OSError, msgspec.DecodeError) as error:
            log.warning("checkpoint is damaged", folder=str(folder), damage=str(error))
    return min(needed, default=0)


# --------------------------------------------------------------------------------------- private


def _state_in(folder: Path) -> KernelState:
    return msgspec.json.decode((folder / "kernel.json").read_bytes(), type=KernelState)


def _clear(root: Path) -> None:
    """Remove what kernels that were killed had begun to write."""
    for folder in root.glob(f".{_PREFIX}*"):
        shutil.rmtree(folder, ignore_errors=True)


def _put(aside: Path, final: Path) -> None:
    """Give a finished checkpoint its name, in place of a former life's."""
    _seal(aside)
    shutil.rmtree(final, ignore_errors=True)
    aside.rename(final)
    _sync(final.parent)


def _seal(folder: Path) -> None:
    """Hash every file into the manifest, and put everything on disk."""
    hashes = {str(path.relative_to(folder)): _hash(path) for path in _files(folder)}
    (folder / "manifest.json").write_bytes(msgspec.json.format(msgspec.json.encode(hashes)))
    for path in (*_files(folder), folder):
        _sync(path)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
