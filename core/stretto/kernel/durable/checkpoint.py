"""Checkpoint folders: write them atomically, find the newest intact one, and remove old ones.

    step-000040/model/          the lead model; it loads with transformers
    step-000040/                further files of its training engine, and the algorithm's state
    step-000040/models/<name>/  the same for each other model that is trained
    step-000040/evaluation/     weights of older versions that still have to be evaluated
    step-000040/kernel.json     ledger, dataset cursor, and positions in journal and log
    step-000040/manifest.json   SHA-256 of every other file; it is written last

A checkpoint is written under a temporary name and then renamed, so it is complete or absent.

With `checkpoint.store`, the trainers write their files to a folder at that URL, and the kernel adds
`kernel.json` and then the manifest. The run's own folder has these two files, and `store.json` with the URL.
A checkpoint in the store without these files in the run's folder is invalid, and is removed from the store.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import AsyncGenerator, Collection, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio.to_thread
import msgspec
import structlog

from stretto.bus.messages.events import JournalHead
from stretto.errors import ConfigError
from stretto.kernel.schedule.scheduler import Snapshot
from stretto.machine.private_file import cache_folder, sync
from stretto.records.remote_folder import RemoteFolder, file_hash
from stretto.weights import WeightsNote

log = structlog.get_logger()

FORMAT = 7
"""Number of the format of snapshots, events and samples. Runs of another format cannot be resumed."""
_PREFIX = "step-"
_MANIFEST = "manifest.json"
_STORE = "store.json"


class _StoreEntry(msgspec.Struct, frozen=True):
    """The content of `store.json`."""

    url: str


class LostData(msgspec.Struct, frozen=True):
    """Data that a run lost for good, to damaged files or to new values that began at an older checkpoint."""

    steps: int = 0
    """Train steps that were complete and were not repeated."""
    groups: int = 0
    """Finished groups whose trajectories were gone, or were sampled by the weights of lost steps."""
    messages: int = 0
    """Messages that were missing in the part of the log that no checkpoint covered."""
    journals: int = 0
    """Number of resumes at which messages of the journal were missing."""

    def __bool__(self) -> bool:
        return self != LostData()

    def __add__(self, other: LostData) -> LostData:
        counts, other_counts = msgspec.structs.astuple(self), msgspec.structs.astuple(other)
        return LostData(*map(sum, zip(counts, other_counts, strict=True)))


class KernelState(msgspec.Struct, frozen=True):
    """The kernel's own part of a checkpoint."""

    version: int
    incarnation: int
    digest: str
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
    problems: tuple[str, ...] = ()
    events_after: int = 0
    """Sequence number in the journal's stream: the snapshot has taken in all events up to it."""
    journal: JournalHead = JournalHead(0, "")
    lowest_event: int = 0
    """Sequence number of the first message of the journal that a resumed run needs; 0 if it is unknown."""
    format: int = 1

    @classmethod
    def initial(cls) -> KernelState:
        """Return the state of a run without an intact checkpoint."""
        return cls(0, 0, "", Snapshot(), 0, 0, "", 0, 0, 0, 0.0, format=FORMAT)


def checkpoint_name(version: int, values: int | None = None) -> str:
    """Return a folder's name: `step-000040`, or with changed values `step-000040-values-2`, sorted later."""
    return f"{_PREFIX}{version:06d}" + (f"-values-{values}" if values is not None else "")


def version_in(name: str) -> int | None:
    """Return the version in the name of a checkpoint; None for any other name."""
    matched = re.fullmatch(rf"{_PREFIX}(\d{{6,}})(-values-\d+)?", name)
    return int(matched[1]) if matched else None


def checkpoints_in(folder: Path) -> set[str]:
    """Return the names of the checkpoints in a run's folder, also of damaged ones."""
    return {path.name for path in (folder / "checkpoints").glob(f"{_PREFIX}*")}


@dataclass
class Draft:
    """A checkpoint that is being written."""

    folder: Path
    """Local folder. Every file in it becomes a part of the checkpoint."""
    remote: RemoteFolder | None = None
    uploaded: dict[str, str] = field(default_factory=dict[str, str])
    """Name -> SHA-256 of the files that the trainers have written to `remote`."""
    digest: str = ""
    """Digest of the weights, if it becomes known only while the checkpoint is written."""

    @property
    def place(self) -> str:
        """Where the trainers write their files: the path of a folder, or a URL."""
        return self.remote.url if self.remote else str(self.folder)


@asynccontextmanager
async def writing(
    root: Path, name: str, state: KernelState, store: RemoteFolder | None = None
) -> AsyncGenerator[Draft]:
    """Yield a draft. The end of the block renames the draft to `root / name`; an error removes it."""
    final = root / name
    # Nothing in a store can be renamed, so each draft has a name of its own there.
    draft = Draft(
        root / f".{final.name}-{os.getpid()}", store and store.below(f"{name}-{secrets.token_hex(3)}")
    )
    try:
        await anyio.to_thread.run_sync(_clear, root, store)
        draft.folder.mkdir(parents=True)
        yield draft
        if draft.digest:
            state = msgspec.structs.replace(state, digest=draft.digest)
        (draft.folder / "kernel.json").write_bytes(msgspec.json.format(msgspec.json.encode(state)))
        await anyio.to_thread.run_sync(_put, draft, final)
    except BaseException:
        shutil.rmtree(draft.folder, ignore_errors=True)
        raise


def newest_intact(root: Path) -> tuple[Path, KernelState] | None:
    """Return the newest checkpoint whose files match its manifest. Damaged ones are logged and skipped."""
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
    """Return the folder of an intact checkpoint: `version` is a version, a checkpoint's name, or None for the
    newest. Files in a store are downloaded into this user's cache. Error messages contain `advice` if there
    is no checkpoint, and `option` as the option that gave the version."""
    root = folder / "checkpoints"
    if version is None:
        newest = newest_intact(root)
        if newest is None:
            raise ConfigError(f"the run in {folder} has no checkpoint{advice}")
        return _with_all_files(newest[0])
    names = sorted(path.name for path in root.glob(f"{_PREFIX}*"))
    name = checkpoint_name(int(version)) if version.isdecimal() else version
    if name not in names and version.isdecimal():  # a resume with other values may have written it
        changed = [each for each in names if each.startswith(f"{name}-values-")]
        name = max(changed, key=lambda each: int(each.rpartition("-")[2]), default=name)
    if name not in names:
        known = ", ".join(names) or "none"
        raise ConfigError(f"{option} {version}: no checkpoint {name!r} in {folder}; checkpoints: {known}")
    if damage := damage_of(root / name):
        raise ConfigError(f"checkpoint {root / name} is damaged: {damage}")
    return _with_all_files(root / name)


def damage_of(folder: Path) -> str:
    """Return the damage of a checkpoint; empty if intact. Files in a store only have to be present."""
    try:
        manifest = (folder / _MANIFEST).read_bytes()
        hashes = msgspec.json.decode(manifest, type=dict[str, str])
        remote = _remote_of(folder)
        local = {name for name in hashes if remote is None or (folder / name).exists()}
        wrong = [name for name in hashes if name in local and file_hash(folder / name) != hashes[name]]
        state_of(folder)
    except (OSError, msgspec.DecodeError) as error:
        return str(error)
    if wrong:
        return f"{wrong[0]} differs from its hash in {_MANIFEST}"
    return _damage_in_store(remote, manifest, {*hashes} - local) if remote else ""


def place_of(folder: Path | None) -> tuple[str, str]:
    """Return where the trainers read a checkpoint, a folder or a URL, and the SHA-256 of its manifest."""
    if folder is None:
        return "", ""
    remote = _remote_of(folder)
    manifest = sha256((folder / _MANIFEST).read_bytes()).hexdigest()
    return (remote.url if remote else str(folder)), manifest


def state_of(folder: Path) -> KernelState:
    """Return the kernel's part. Raise OSError if it cannot be read, msgspec.DecodeError if it is damaged."""
    return msgspec.json.decode((folder / "kernel.json").read_bytes(), type=KernelState)


def prune(root: Path, keep: int, newest: str, spared: Collection[int] = ()) -> tuple[int, int]:
    """Remove all checkpoints but the newest `keep` and the `spared` versions. Return the sequence numbers of
    the first messages of log and journal that the newest `keep` need, 0 if unknown. Checkpoints with names
    after `newest` stay and do not count: a previous kernel wrote them, and they are damaged."""
    folders = [folder for folder in sorted(root.glob(f"{_PREFIX}*")) if folder.name <= newest]
    names = {checkpoint_name(version) for version in spared}
    for folder in folders[:-keep]:
        if folder.name not in names:
            _remove(folder)
    states: list[KernelState] = []
    for folder in folders[-keep:]:
        try:
            states.append(state_of(folder))
        except (OSError, msgspec.DecodeError) as error:
            log.warning("checkpoint is damaged", folder=str(folder), damage=str(error))
    log_below = min((state.lowest_sequence for state in states), default=0)
    return log_below, min((state.lowest_event for state in states), default=0)


def _remote_of(folder: Path) -> RemoteFolder | None:
    entry = folder / _STORE
    if not entry.exists():
        return None
    return RemoteFolder(msgspec.json.decode(entry.read_bytes(), type=_StoreEntry).url)


def _damage_in_store(remote: RemoteFolder, manifest: bytes, names: set[str]) -> str:
    """Return the damage of a checkpoint in its store, which must have the files `names`; empty if intact."""
    try:
        is_same, stored_names = remote.read(_MANIFEST) == manifest, remote.files()
    except FileNotFoundError:
        return f"{remote.url} has no {_MANIFEST}"
    except OSError as error:
        raise ConfigError(f"the store of the checkpoints cannot be read: {error}") from error
    if not is_same:
        return f"{_MANIFEST} in {remote.url} is not the one in the run's folder"
    return f"{remote.url} has no {min(names - stored_names)}" if names - stored_names else ""


def _with_all_files(folder: Path) -> Path:
    remote = _remote_of(folder)
    if remote is None:
        return folder
    copy = cache_folder("checkpoints") / sha256(remote.url.encode()).hexdigest()[:16] / folder.name
    if copy.exists() and not damage_of(copy):
        return copy
    copy.parent.mkdir(parents=True, exist_ok=True)
    log.info("download checkpoint", url=remote.url, folder=str(copy))
    hashes = msgspec.json.decode((folder / _MANIFEST).read_bytes(), type=dict[str, str])
    with TemporaryDirectory(dir=copy.parent) as aside:
        try:
            remote.download(hashes, Path(aside, folder.name))
        except OSError as error:
            raise ConfigError(f"checkpoint {folder} cannot be downloaded: {error}") from error
        shutil.copy(folder / _MANIFEST, Path(aside, folder.name))
        shutil.rmtree(copy, ignore_errors=True)
        Path(aside, folder.name).rename(copy)
    return copy


def _remove(folder: Path) -> None:
    """Remove a checkpoint, also from its store. If the store refuses, the next checkpoint tries again."""
    remote = _named_remote(folder)
    shutil.rmtree(folder, ignore_errors=True)
    if remote is not None:
        _remove_from_store(remote)


def _named_remote(folder: Path) -> RemoteFolder | None:
    """Return a checkpoint's folder in the store; None without one, or if `store.json` is damaged."""
    try:
        return _remote_of(folder)
    except (OSError, msgspec.DecodeError) as error:
        log.warning("checkpoint is damaged", folder=str(folder), damage=str(error))
        return None


def _remove_from_store(remote: RemoteFolder) -> None:
    try:
        remote.remove(first=_MANIFEST)
    except OSError as error:
        log.warning("checkpoint is not removed from its store", error=str(error))


def _clear(root: Path, store: RemoteFolder | None) -> None:
    """Remove drafts of killed kernels, and what the store has of checkpoints that the run's folder lacks."""
    for folder in root.glob(f".{_PREFIX}*"):
        shutil.rmtree(folder, ignore_errors=True)
    if store is not None:
        known = {remote.url for folder in root.glob(f"{_PREFIX}*") if (remote := _named_remote(folder))}
        for name in {name.partition("/")[0] for name in store.files()}:
            if name.startswith(_PREFIX) and store.below(name).url not in known:
                _remove_from_store(store.below(name))


def _put(draft: Draft, final: Path) -> None:
    """Complete a checkpoint, first in the store. It replaces a previous kernel's one of the same name."""
    local_hashes = {str(path.relative_to(draft.folder)): file_hash(path) for path in _files(draft.folder)}
    hashes = dict(sorted({**draft.uploaded, **local_hashes}.items()))
    (draft.folder / _MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(hashes)))
    if draft.remote is not None:
        for name in ("kernel.json", _MANIFEST):
            draft.remote.write(name, (draft.folder / name).read_bytes())
        (draft.folder / _STORE).write_bytes(msgspec.json.encode(_StoreEntry(draft.remote.url)))
    for path in (*_files(draft.folder), draft.folder):
        sync(path)
    shutil.rmtree(final, ignore_errors=True)
    draft.folder.rename(final)
    sync(final.parent)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())
