"""Checkpoint folders: write them atomically, find the newest intact one, and remove old ones.

    step-000040/model/          the lead model; it loads with transformers
    step-000040/                further files of its training engine, and the algorithm's state
    step-000040/models/<name>/  the same for each other model that is trained
    step-000040/evaluation/     weights of older versions that still have to be evaluated
    step-000040/kernel.json     ledger, dataset cursor, and positions in journal and log
    step-000040/manifest.json   SHA-256 of every other file; it is written last

A checkpoint is written under a temporary name and then renamed, so it is complete or absent.
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

from stretto.errors import ConfigError
from stretto.kernel.scheduler import Ledger, Snapshot
from stretto.weights import WeightsNote

__all__ = [
    "KernelState",
    "LostData",
    "checkpoint_name",
    "damage_of",
    "find_checkpoint",
    "newest_intact",
    "prune",
    "state_of",
    "writing",
]

log = structlog.get_logger()

_PREFIX = "step-"


class LostData(msgspec.Struct, frozen=True):
    """What a run has lost for good, because its store or its checkpoints were damaged."""

    steps: int = 0
    """Train steps that were complete and could not be repeated."""
    groups: int = 0
    """Finished groups whose trajectories were gone, or were sampled by the weights of lost steps."""
    messages: int = 0
    """Messages that were missing in the part of the log that no checkpoint covered."""

    def __bool__(self) -> bool:
        return self != LostData()

    def __add__(self, other: LostData) -> LostData:
        return LostData(self.steps + other.steps, self.groups + other.groups, self.messages + other.messages)


class KernelState(msgspec.Struct, frozen=True):
    """The kernel's own part of a checkpoint."""

    version: int
    incarnation: int
    digest: str
    """Digest of the weights."""
    snapshot: Snapshot
    log_sequence: int
    """Sequence number of the last log message that the snapshot has taken in."""
    lowest_sequence: int
    """Sequence number of the first log message that a resumed run needs."""
    layout: str
    seed: int
    trained_tokens: int
    generated_tokens: int
    wall_s: float
    values: int = 1
    """Number of the run's values with which the checkpoint was written."""
    needed: tuple[WeightsNote, ...] = ()
    """Older versions that still have to be evaluated. Their weights are in the checkpoint too."""
    lost: LostData = LostData()
    """All losses up to the checkpoint."""

    @classmethod
    def initial(cls) -> KernelState:
        """Return the state at the beginning of a run, for a resumed run without an intact checkpoint."""
        snapshot = Snapshot(0, Ledger(), 0, 0, [], [], [], {}, {})
        return cls(0, 0, "", snapshot, 0, 0, "", 0, 0, 0, 0.0)


def checkpoint_name(version: int, values: int | None = None) -> str:
    """Return the name of a checkpoint's folder, such as `step-000040`.

    Args:
        values: number of the changed values, for the first checkpoint with them: `step-000040-values-2`. This
            name sorts after the checkpoint of the former values at the same version, which stays.
    """
    return f"{_PREFIX}{version:06d}" + (f"-values-{values}" if values is not None else "")


@asynccontextmanager
async def writing(root: Path, name: str, state: KernelState) -> AsyncGenerator[Path]:
    """Yield a folder for the files of a checkpoint.

    At the end of the block the function adds `state` and the manifest, and renames the folder to
    `root / name`. If the block raises, the folder is removed.

    Raises:
        OSError: if the checkpoint cannot be written, for example because the disk is full.
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
    """Return the newest checkpoint whose files match its manifest, and its state; None if there is none.
    Damaged checkpoints are logged and skipped."""
    for folder in sorted(root.glob(f"{_PREFIX}*"), reverse=True):
        damage = damage_of(folder)
        if damage:
            log.warning("checkpoint is damaged", folder=str(folder), damage=damage)
            continue
        return folder, state_of(folder)
    return None


def find_checkpoint(
    folder: Path, version: str | None, advice: str = "", *, option: str = "--version"
) -> Path:
    """Return a checkpoint of the run in a folder, which is intact.

    Args:
        version: a version, or the name of a checkpoint; None for the newest intact one.
        advice: what to do if the run has no checkpoint, for the error.
        option: the option that gave the version, for the error.

    Raises:
        ConfigError: if there is no such checkpoint, or if it is damaged.
    """
    root = folder / "checkpoints"
    if version is None:
        newest = newest_intact(root)
        if newest is None:
            raise ConfigError(f"the run in {folder} has no checkpoint{advice}")
        return newest[0]
    name = checkpoint_name(int(version)) if version.isdecimal() else version
    names = sorted(path.name for path in root.glob(f"{_PREFIX}*"))
    if name not in names:
        known = ", ".join(names) or "none"
        raise ConfigError(f"{option} {version}: no checkpoint {name!r} in {folder}; checkpoints: {known}")
    if damage := damage_of(root / name):
        raise ConfigError(f"checkpoint {root / name} is damaged: {damage}")
    return root / name


def damage_of(folder: Path) -> str:
    """Return what is wrong with a checkpoint; empty if it is intact."""
    try:
        hashes = msgspec.json.decode((folder / "manifest.json").read_bytes(), type=dict[str, str])
        wrong = [name for name, value in hashes.items() if _hash(folder / name) != value]
        state_of(folder)
    except (OSError, msgspec.DecodeError) as error:
        return str(error)
    return f"{wrong[0]} differs from its hash in manifest.json" if wrong else ""


def state_of(folder: Path) -> KernelState:
    """Return the kernel's part of a checkpoint.

    Raises:
        OSError: if it cannot be read.
        msgspec.DecodeError: if it is damaged.
    """
    return msgspec.json.decode((folder / "kernel.json").read_bytes(), type=KernelState)


def prune(root: Path, keep: int, newest: str, spared: Collection[int] = ()) -> int:
    """Remove old checkpoints, and return the lowest `lowest_sequence` of the newest `keep`; 0 if none
    can be read.

    Args:
        keep: number of the newest checkpoints that stay.
        newest: name of the checkpoint that was written last. Checkpoints with later names stay and do not
            count: a former kernel wrote them and they are damaged.
        spared: versions whose checkpoints stay too.
    """
    folders = [folder for folder in sorted(root.glob(f"{_PREFIX}*")) if folder.name <= newest]
    names = {checkpoint_name(version) for version in spared}
    for folder in folders[:-keep]:
        if folder.name not in names:
            shutil.rmtree(folder, ignore_errors=True)
    needed: list[int] = []
    for folder in folders[-keep:]:
        try:
            needed.append(state_of(folder).lowest_sequence)
        except (OSError, msgspec.DecodeError) as error:
            log.warning("checkpoint is damaged", folder=str(folder), damage=str(error))
    return min(needed, default=0)


# --------------------------------------------------------------------------------------- private


def _clear(root: Path) -> None:
    """Remove the unfinished checkpoints of kernels that were killed."""
    for folder in root.glob(f".{_PREFIX}*"):
        shutil.rmtree(folder, ignore_errors=True)


def _put(aside: Path, final: Path) -> None:
    """Rename a finished checkpoint to its final name. It replaces a former kernel's folder of that name."""
    _seal(aside)
    shutil.rmtree(final, ignore_errors=True)
    aside.rename(final)
    _sync(final.parent)


def _seal(folder: Path) -> None:
    """Write the manifest with the hash of every file, and sync all files to disk."""
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
