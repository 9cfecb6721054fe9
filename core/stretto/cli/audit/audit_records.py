"""Read what a run has written, for the audit: journal, kept samples, checkpoints, summary."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BufferedReader
from itertools import chain, pairwise, repeat
from pathlib import Path
from typing import Any

import msgspec

from stretto.bus.guard import is_locked
from stretto.bus.messages.events import BatchStarted, Event, EventBatch, RowsDrawn, VersionPublished
from stretto.bus.messages.tickets import Purpose
from stretto.bus.payloads import decoder
from stretto.cli.audit.kept_rows import has_its_digest, kept_groups
from stretto.errors import RunError
from stretto.records.events.files import stored_events
from stretto.records.events.history import RunHistory
from stretto.records.files import read_record


@dataclass(frozen=True)
class JournalMessage:
    """A message of the journal, without its events: its place in the chain of digests."""

    sequence: int
    digest: str
    former: str


@dataclass(frozen=True)
class NamedMessage:
    """A message of the journal that a file names."""

    place: str
    sequence: int
    digest: str


@dataclass
class JournalRecord:
    """The journal of a run."""

    history: RunHistory = field(default_factory=RunHistory)
    messages: list[JournalMessage] = field(default_factory=list[JournalMessage])
    unreadable: list[int] = field(default_factory=list[int])
    batch_faults: list[str] = field(default_factory=list[str])
    """Batches that replaced another batch in the same incarnation, and steps without an earlier batch."""
    draw_faults: list[str] = field(default_factory=list[str])

    def add(self, time: float, event: Event) -> None:
        """Add the next event to the history, and record its faults."""
        history = self.history
        match event:
            case BatchStarted(version, _, rows):
                if version in history.batches and history.batches[version].rows != rows:
                    fault = f"version {version} has two batches in incarnation {history.incarnation}"
                    self.batch_faults.append(fault)
            case VersionPublished(incarnation, version):
                if version - 1 not in history.batches_of(incarnation):
                    self.batch_faults.append(f"the step to version {version} has no earlier batch")
            case RowsDrawn(draws=draws):
                repeated = (ticket for ticket, _ in draws if ticket in history.draws)
                self.draw_faults += [f"ticket {ticket} has two draws in the journal" for ticket in repeated]
            case _:
                pass
        history.add(time, event)


def read_journal(folder: Path) -> JournalRecord:
    """Read the whole journal of a run that no kernel owns, from its files."""
    if is_locked(lock := folder / "bus" / "kernel.lock"):
        owner = read_record(lock).decode().strip()
        raise RunError(f"the run in {folder} is owned by {owner}; try again when it has ended")
    journal = JournalRecord()
    try:
        for sequence, message in stored_events(folder):
            try:
                batch = _batch_of(message or b"")
                events = batch.decoded()
            except msgspec.DecodeError:
                journal.unreadable.append(sequence)
                continue
            journal.messages.append(JournalMessage(sequence, batch.digest, batch.former))
            for event, time in zip(events, chain(batch.times, repeat(0.0)), strict=False):
                journal.add(time, event)
    except OSError as error:
        raise RunError(f"the events of the run in {folder} cannot be read: {error}") from error
    return journal


_batch_of = decoder(EventBatch)


def chain_faults(messages: Sequence[JournalMessage], named: Iterable[NamedMessage]) -> Iterator[str]:
    """Yield faults: messages that do not follow each other, and named messages that are altered or gone."""
    for previous, message in pairwise([JournalMessage(0, "", ""), *messages]):
        if message.former != previous.digest:
            before = f"message {previous.sequence}" if previous.sequence else "the beginning"
            yield (
                f"message {message.sequence} does not follow {before}: one of them was altered or moved, or "
                "one was removed or inserted there"
            )
    digests = {message.sequence: message.digest for message in messages}
    for reference in named:
        if reference.sequence and digests.get(reference.sequence) != reference.digest:
            state = "was altered or moved" if reference.sequence in digests else "is not there"
            yield f"message {reference.sequence}, which {reference.place} names, {state}"


@dataclass(frozen=True)
class TrajectoryFacts:
    """The facts of one kept trajectory, computed from its arrays."""

    id: str
    ticket: int
    attempt: int
    row: int
    length: int
    oldest: int
    newest: int
    """Versions of the oldest and the newest token under the loss mask."""
    accuracy: float | None
    reward: float | None
    sample: int
    """Index of the ticket's sample. A sample may have several trajectories."""


@dataclass
class SampleRecord:
    """The kept samples of a run."""

    trained: dict[str, TrajectoryFacts] = field(default_factory=dict[str, TrajectoryFacts])
    members: dict[tuple[int, int], list[str]] = field(default_factory=lambda: defaultdict(list[str]))
    """(ticket, attempt) -> ids of the attempt's trajectories, in order."""
    evaluated: list[TrajectoryFacts] = field(default_factory=list[TrajectoryFacts])
    faults: list[str] = field(default_factory=list[str])
    """Rows whose columns differ from their arrays, and groups that differ from their digest."""


def read_samples(folder: Path) -> SampleRecord:
    """Read the kept samples of a run."""
    record = SampleRecord()
    for facts in _kept(folder, "train", record.faults):
        if facts.id not in record.trained:
            record.trained[facts.id] = facts
            record.members[facts.ticket, facts.attempt].append(facts.id)
    record.evaluated = list(_kept(folder, "eval", record.faults))
    return record


def _kept(folder: Path, purpose: Purpose, faults: list[str]) -> Iterator[TrajectoryFacts]:
    for group in kept_groups(folder, purpose):
        if group[0]["digest"] and not has_its_digest(group):
            name = f"{group[0]['ticket']}/{group[0]['attempt']}"
            faults.append(f"group {name}: its samples differ from their digest")
        yield from (facts for row in group if (facts := _facts(row, faults)) is not None)


def _facts(row: Mapping[str, Any], faults: list[str]) -> TrajectoryFacts | None:
    """Return the facts of a row, or None if its attempt has no trajectory, or its arrays have a fault."""
    if row["index"] is None:
        return None
    mask, versions = row["loss_mask"], row["versions"]
    lengths = {len(row["tokens"]), len(mask), len(versions), len(row["logprobs"])}
    trained = versions[mask.astype(bool)] if len(lengths) == 1 else versions[:0]
    if not len(trained):
        faults.append(f"{row['id']}: arrays of {sorted(lengths)} tokens, {len(trained)} trained")
        return None
    oldest, newest = int(trained.min()), int(trained.max())
    computed = {"length": len(mask), "sampled": len(trained), "oldest": oldest, "newest": newest}
    stored = {name: row[name] for name in computed}
    if stored != computed:
        faults.append(f"{row['id']}: its columns say {stored}, its tokens {computed}")
    return TrajectoryFacts(
        *(row["id"], row["ticket"], row["attempt"], row["row"]),
        *(len(mask), oldest, newest),
        accuracy=msgspec.json.decode(row["metrics"], type=dict[str, float]).get("accuracy"),
        reward=row["reward"],
        sample=row["sample"],
    )


@dataclass(frozen=True)
class CheckpointRecord:
    """One checkpoint folder, read as plain JSON."""

    name: str
    damage: str
    """What is wrong with the checkpoint's files; empty if they match the manifest."""
    state: Mapping[str, Any]

    @property
    def version(self) -> int:
        return self.state["version"]

    @property
    def incarnation(self) -> int:
        return self.state["incarnation"]


def read_checkpoint(folder: Path) -> CheckpointRecord:
    """Read a checkpoint, also a damaged one."""
    try:
        hashes: dict[str, str] = json.loads((folder / "manifest.json").read_bytes())
        state = json.loads((folder / "kernel.json").read_bytes())
        files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
        store = json.loads(files.pop("store.json").read_bytes())["url"] if "store.json" in files else ""
    except (OSError, ValueError, KeyError) as error:
        return CheckpointRecord(folder.name, str(error), {})
    actual = {name: _sha256(path.open("rb")) for name, path in files.items()}
    if store:
        actual = _read_store(store) | actual
    del actual["manifest.json"]
    altered = [name for name in hashes if actual.get(name, hashes[name]) != hashes[name]]
    damage = [f"{name} differs from its hash" for name in altered]
    damage += [f"{name}: unexpected or missing" for name in sorted(actual.keys() ^ hashes.keys())]
    return CheckpointRecord(folder.name, "; ".join(damage), state)


def _read_store(url: str) -> dict[str, str]:
    import fsspec.core

    try:
        system, root = fsspec.core.url_to_fs(url)
        return {
            path.removeprefix(root).lstrip("/"): _sha256(system.open(path, "rb"))
            for path in system.find(root)
        }
    except Exception as error:  # every file system has errors of its own
        raise RunError(f"the files of the checkpoint in {url} cannot be read: {error}") from error


def _sha256(opened: BufferedReader) -> str:
    with opened as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(file: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file; None if there is no file."""
    try:
        return json.loads(read_record(file))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RunError(f"{file} cannot be read: {error}") from error
