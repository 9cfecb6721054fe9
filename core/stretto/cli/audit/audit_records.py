"""What a run has written, as the audit reads it: journal, log, checkpoints, metrics, summary.

A version's batch is *in force* if it led to the run's current weights. A new incarnation replaces the batches
from its first version on.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec

from stretto.bus.messages.events import (
    BatchExpired,
    BatchStarted,
    Evaluation,
    EvaluationEnded,
    Event,
    EventBatch,
    RowsDrawn,
    RunOwned,
    VersionPublished,
)
from stretto.bus.messages.tickets import GroupDone, GroupFailed, TrajectoryBundle, WireTrajectory
from stretto.bus.payloads import decoder, encode
from stretto.cli.audit.audit_store import StoredMessage, StoredRun
from stretto.errors import RunError
from stretto.process.replay import RecordedBatch
from stretto.records.event_files import stored_events
from stretto.records.files import read_record

_PIECE = 2**20
"""Bytes that are read at once."""

# -------------------------------------------------------------------------------- journal and log


@dataclass
class BatchHistory:
    """The batches of one incarnation and of those before it, as far as they are in force."""

    batches: dict[int, RecordedBatch] = field(default_factory=dict[int, RecordedBatch])
    """Version -> batch."""
    values: list[tuple[int, int]] = field(default_factory=lambda: [(0, 1)])
    """(version from which they are in force, number of the values), in order."""

    def cut(self, version: int) -> BatchHistory:
        """Return the history up to a version, for an incarnation that begins there."""
        batches = {each: batch for each, batch in self.batches.items() if each < version}
        return BatchHistory(batches, [each for each in self.values if each[0] <= version])

    def values_at(self, version: int) -> int:
        """Return the number of the values with which the batch of a version was made."""
        return next(number for start, number in reversed(self.values) if start <= version)


@dataclass(frozen=True)
class JournalMessage:
    """A message with events, without them."""

    sequence: int
    digest: str
    former: str
    """Digest of the message that it follows."""


@dataclass(frozen=True)
class NamedMessage:
    """A message of the journal that a file names."""

    place: str
    """The file."""
    sequence: int
    digest: str


@dataclass
class JournalRecord:
    """The journal of a run."""

    messages: list[JournalMessage] = field(default_factory=list[JournalMessage])
    """Those that can be read."""
    histories: dict[int, BatchHistory] = field(default_factory=lambda: {0: BatchHistory()})
    """Incarnation -> its history."""
    incarnation: int = 0
    """The current incarnation."""
    layout: str = ""
    """The current layout."""
    steps: dict[tuple[int, int], list[str]] = field(default_factory=lambda: defaultdict(list[str]))
    """(incarnation, version) -> the recorded digests of the step that led to the version."""
    evaluations: list[tuple[int, Evaluation]] = field(default_factory=list[tuple[int, Evaluation]])
    """(incarnation, result)."""
    rewritten: list[str] = field(default_factory=list[str])
    """Batches that replaced another one in the same incarnation."""
    draws: dict[int, int] = field(default_factory=dict[int, int])
    """Ticket -> the row that the run's curriculum chose for it."""
    drawn_twice: list[str] = field(default_factory=list[str])
    """Draws that replaced another one."""
    unordered: list[str] = field(default_factory=list[str])
    """Steps without an earlier batch."""
    unreadable: list[int] = field(default_factory=list[int])
    """Sequence numbers of messages that cannot be read."""
    only_stored: list[tuple[int, int, bytes]] = field(default_factory=list[tuple[int, int, bytes]])
    """Lease epoch, sequence number and bytes of the messages that no file has."""

    @property
    def history(self) -> BatchHistory:
        """The history in force."""
        return self.histories[self.incarnation]

    def enter(self, incarnation: int, version: int) -> BatchHistory:
        """Return the history of an incarnation in which something happens at a version. A higher incarnation
        than the current one begins there. A lower one continues: a kernel went back to it."""
        if incarnation > self.incarnation:
            self.histories[incarnation] = self.history.cut(version)
        self.incarnation = incarnation
        return self.histories.setdefault(incarnation, BatchHistory())

    def add(self, event: Event) -> None:
        """Take in the next event."""
        match event:
            case RunOwned(incarnation, version, values, layout):
                self.layout = layout
                history = self.enter(incarnation, version)
                if history.values[-1][1] != values:
                    history.values = [each for each in history.values if each[1] < values]
                    history.values.append((version, values))
            case BatchStarted(version, tickets, rows):
                batches = self.histories[self.incarnation].batches
                batch = RecordedBatch(version, tickets, rows, self.incarnation, self.layout)
                if version in batches and batches[version].rows != rows:
                    self.rewritten.append(
                        f"version {version} has two batches in incarnation {self.incarnation}"
                    )
                batches[version] = batch
            case BatchExpired(version):
                self.histories[self.incarnation].batches.pop(version, None)
            case VersionPublished(incarnation, version, digest):
                if version - 1 not in self.histories.get(incarnation, BatchHistory()).batches:
                    self.unordered.append(f"the step to version {version} has no earlier batch")
                self.steps[incarnation, version].append(digest)
            case EvaluationEnded(result):
                self.evaluations.append((self.incarnation, result))
            case RowsDrawn(draws=draws):
                self.drawn_twice += [
                    f"ticket {ticket} has two draws in the journal"
                    for ticket, _ in draws
                    if ticket in self.draws
                ]
                self.draws |= dict(draws)
            case _:
                pass


@dataclass(frozen=True)
class TrajectoryFacts:
    """The facts of one trajectory in the log, computed from its arrays."""

    id: str
    length: int
    trained: int
    """Number of tokens under the loss mask."""
    oldest: int
    newest: int
    reward: float


@dataclass
class LogRecord:
    """What is left of the log of a run."""

    first: int
    last: int
    """Sequence numbers of the first and the last message."""
    trajectories: dict[tuple[int, int], TrajectoryFacts] = field(
        default_factory=dict[tuple[int, int], TrajectoryFacts]
    )
    """(sequence number, position in the bundle) -> trajectory."""
    groups: dict[tuple[int, int], GroupDone] = field(default_factory=dict[tuple[int, int], GroupDone])
    """(ticket, attempt) -> group, for training."""
    evaluation_groups: list[GroupDone] = field(default_factory=list[GroupDone])
    rows: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    """(ticket, row of the dataset) of each bundle of trajectories, for training."""
    unreadable: list[int] = field(default_factory=list[int])

    def add(self, message: StoredMessage) -> None:
        """Take in the next message."""
        match message.content:
            case TrajectoryBundle(ticket=ticket, row=row, trajectories=trajectories):
                self.rows.add((ticket, row))
                try:
                    facts = [_facts(each) for each in trajectories]
                except (TypeError, ValueError):
                    self.unreadable.append(message.sequence)
                    return
                self.trajectories |= {(message.sequence, index): each for index, each in enumerate(facts)}
            case GroupDone("train", ticket, attempt) as group:
                self.groups.setdefault((ticket, attempt), group)
            case GroupDone() as group:
                self.evaluation_groups.append(group)
            case GroupFailed():
                pass
            case _:
                self.unreadable.append(message.sequence)


def _facts(trajectory: WireTrajectory) -> TrajectoryFacts:
    """Compute the facts of a trajectory.

    Raises:
        TypeError: if an array names no dtype.
        ValueError: if its arrays do not fit each other, or if no token is trained.
    """
    mask, versions = trajectory.loss_mask.numpy().astype(bool), trajectory.versions.numpy()
    lengths = {len(trajectory.tokens), len(mask), len(versions), len(trajectory.logprobs)}
    if len(lengths) != 1 or not mask.any():
        raise ValueError(f"{trajectory.id}: arrays of {sorted(lengths)} tokens, {int(mask.sum())} trained")
    trained = versions[mask]
    return TrajectoryFacts(
        id=trajectory.id,
        length=len(mask),
        trained=len(trained),
        oldest=int(trained.min()),
        newest=int(trained.max()),
        reward=trajectory.reward,
    )


async def journal_messages(folder: Path, store: StoredRun) -> AsyncIterator[StoredMessage]:
    """Yield the messages of a run's journal: those in its files, and those that only the store has, because a
    kernel was killed before it wrote them, or a file is damaged.
    """
    kinds = {store.names.events: EventBatch}
    in_store = [each async for each in store.messages(store.names.journal_stream, kinds)]
    sequence_of = attrgetter("sequence")
    every = heapq.merge(map(_message_of, stored_events(folder)), in_store, key=sequence_of)
    try:
        for _, copies in groupby(every, key=sequence_of):
            first, *others = copies
            yield next((each for each in (first, *others) if each.content is not None), first)
    except OSError as error:
        raise RunError(f"the events of the run in {folder} cannot be read: {error}") from error


def _message_of(record: tuple[int, bytes | None]) -> StoredMessage:
    sequence, data = record
    try:
        return StoredMessage(sequence, None if data is None else decoder(EventBatch)(data), in_file=True)
    except (msgspec.DecodeError, ValueError):
        return StoredMessage(sequence, None, in_file=True)


async def read_journal(folder: Path, store: StoredRun) -> JournalRecord:
    """Read the whole journal."""
    journal = JournalRecord()
    async for message in journal_messages(folder, store):
        events = events_in(message)
        if events is None:
            journal.unreadable.append(message.sequence)
            continue
        batch = cast("EventBatch", message.content)
        journal.messages.append(JournalMessage(message.sequence, batch.digest, batch.former))
        if not message.in_file:
            journal.only_stored.append((batch.lease_epoch, message.sequence, encode(batch)))
        for event in events:
            journal.add(event)
    return journal


def chain_faults(messages: Sequence[JournalMessage], named: Iterable[NamedMessage]) -> Iterator[str]:
    """Yield where messages of the journal do not follow each other, and which of those that files name are
    others or are gone."""
    for former, message in pairwise([JournalMessage(0, "", ""), *messages]):
        if message.former != former.digest:
            before = f"message {former.sequence}" if former.sequence else "the beginning"
            yield (
                f"message {message.sequence} does not follow {before}: one of them was altered or moved, or "
                "one was removed or inserted there"
            )
    digests = {message.sequence: message.digest for message in messages}
    for each in named:
        if each.sequence and digests.get(each.sequence) != each.digest:
            found = "was altered or moved" if each.sequence in digests else "is not there"
            yield f"message {each.sequence}, which {each.place} names, {found}"


def events_in(message: StoredMessage) -> list[Event] | None:
    """Return the events of a message of the journal; None if they cannot be read."""
    if not isinstance(message.content, EventBatch):
        return None
    try:
        return message.content.decoded()
    except msgspec.DecodeError:
        return None


async def read_log(store: StoredRun) -> LogRecord:
    """Read what is left of the log. The arrays of trajectories are not kept."""
    names = store.names
    kinds = {names.trajectories: TrajectoryBundle, names.groups: GroupDone | GroupFailed}
    log = LogRecord(*await store.span(names.log_stream))
    async for message in store.messages(names.log_stream, kinds):
        log.add(message)
    return log


# ------------------------------------------------------------------------------- files of the run


@dataclass(frozen=True)
class CheckpointRecord:
    """One checkpoint folder, read as plain JSON."""

    name: str
    damage: str
    """What is wrong with its files; empty if they are as the manifest says."""
    state: Mapping[str, Any]
    """Content of `kernel.json`; empty if it cannot be read."""

    @property
    def version(self) -> int:
        """Training version."""
        return self.state["version"]

    @property
    def incarnation(self) -> int:
        """Incarnation of the weights."""
        return self.state["incarnation"]


def read_checkpoints(folder: Path) -> list[CheckpointRecord]:
    """Read all checkpoints of the run in a folder, also damaged ones."""
    return [_checkpoint(each) for each in sorted((folder / "checkpoints").glob("step-*"))]


def _checkpoint(folder: Path) -> CheckpointRecord:
    """Read a checkpoint, and compare its files with the hashes in its manifest. Those in a store are read
    there.
    """
    try:
        hashes: dict[str, str] = json.loads((folder / "manifest.json").read_bytes())
        state = json.loads((folder / "kernel.json").read_bytes())
        there = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
        store = json.loads(there.pop("store.json").read_bytes())["url"] if "store.json" in there else ""
    except (OSError, ValueError, KeyError) as error:
        return CheckpointRecord(folder.name, str(error), {})
    found = {name: _sha256(path.open("rb")) for name, path in there.items()}
    if store:
        found = _read_store(store) | found
    del found["manifest.json"]
    damage = "; ".join(
        [
            *(
                f"{name} differs from its hash"
                for name in hashes
                if found.get(name, hashes[name]) != hashes[name]
            ),
            *(f"{name}: unexpected or missing" for name in sorted(found.keys() ^ hashes.keys())),
        ]
    )
    return CheckpointRecord(folder.name, damage, state)


def _read_store(url: str) -> dict[str, str]:
    """Return the name and the SHA-256 of every file in a folder of a store."""
    import fsspec.core

    try:
        system, root = fsspec.core.url_to_fs(url)
        return {
            path.removeprefix(root).lstrip("/"): _sha256(system.open(path, "rb"))
            for path in system.find(root)
        }
    except Exception as error:  # every file system has errors of its own
        raise RunError(f"the files of the checkpoint in {url} cannot be read: {error}") from error


def _sha256(opened: BinaryIO) -> str:
    digest = hashlib.sha256()
    with opened as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def read_lines(file: Path, *, is_log: bool = False) -> list[dict[str, Any]]:
    """Return the complete lines of a file of JSON objects; none if there is no file.

    Args:
        is_log: leave out lines that are not JSON: one that did not fit on a full disk, with the next behind.
    """
    try:
        lines = read_record(file).splitlines(keepends=True)
        found: list[dict[str, Any]] = []
        for line in lines:
            with suppress(*([ValueError] if is_log else [])):
                found += [json.loads(line)] if line.endswith(b"\n") else []
        return found
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError(f"{file} cannot be read: {error}") from error
    except ValueError as error:
        raise RunError(f"{file}: a line is not JSON: {error}") from error


def read_json(file: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file; None if there is no file."""
    try:
        return json.loads(read_record(file))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunError(f"{file} cannot be read: {error}") from error
    except ValueError as error:
        raise RunError(f"{file} is not JSON: {error}") from error
