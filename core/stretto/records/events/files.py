"""The folder `events` of a run: the messages of its journal, as files that need no server.

Each kernel writes its own files, named by its lease epoch. A record is a message's sequence number in the
journal's stream, its length, the CRC-32 of number and message, and the message, an `EventBatch`. Numbers rise
within a file. A kernel first copies messages that former kernels did not write; two files may have the same.
"""

import heapq
import re
import struct
import zlib
from collections.abc import Iterable, Iterator
from itertools import groupby, pairwise, takewhile
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO

from stretto.machine.private_file import sync, write_private
from stretto.records.files import open_record, read_record

FOLDER = "events"
_NAME = re.compile(r"\d{12,}-\d{12,}\.events")
_HEAD = struct.Struct("<QII")
_STORE = "store.txt"
"""File with the identity of the store that has the messages."""
_LONGEST = 2**30
"""Largest message in bytes; a record with a greater length is damaged."""
_NEVER = 2**63  # above every sequence number


def file_name(epoch: int, first: int) -> str:
    """Return the name of a kernel's file whose first message has the sequence number `first`."""
    return f"{epoch:012}-{first:012}.events"


def record_of(sequence: int, message: bytes) -> bytes:
    """Return the record of a message."""
    return _HEAD.pack(sequence, len(message), _checksum(sequence, message)) + message


def stored_events(folder: Path) -> Iterator[tuple[int, bytes | None]]:
    """Yield (sequence number, message, or None if all copies are damaged). A damaged head ends its file."""
    per_file = [records_in(file, below) for file, below in files_of_kernels(folder)]
    records = heapq.merge(*per_file, key=itemgetter(0))
    for sequence, copies in groupby(records, key=itemgetter(0)):
        yield sequence, next((message for _, message, _ in copies if message is not None), None)


def newest_stored(folder: Path, *, below: int) -> int:
    """Return the last sequence number below `below` before any damage in the newest file; 0 without one."""
    for file, next_epoch in reversed(files_of_kernels(folder)):
        undamaged = takewhile(lambda record: record[1] is not None, records_in(file, min(below, next_epoch)))
        if sequences := [sequence for sequence, *_ in undamaged]:
            return sequences[-1]
    return 0


def event_files(folder: Path) -> list[Path]:
    """Return the files of the run in `folder`, in order."""
    return sorted(file for file in (folder / FOLDER).glob("*.events") if _NAME.fullmatch(file.name))


def sync_files(folder: Path, files: Iterable[Path]) -> None:
    """Flush files of the run in `folder`, and their names, to the disk. OSError if that fails."""
    for path in (*files, folder / FOLDER):
        sync(path)


def move_lost(folder: Path, epoch: int, store: str) -> Path | None:
    """Make the folder for a new kernel's files. Move files of another store, or of a lost part of this store,
    to another folder, and return that folder; None without such files."""
    events = folder / FOLDER
    events.mkdir(mode=0o700, exist_ok=True)
    mark = events / _STORE
    is_same = not mark.exists() or read_record(mark) == store.encode()
    lost = [file for file in event_files(folder) if not is_same or _epoch_of(file) >= epoch]
    lost_folder = folder / f"{FOLDER}.lost-{1 + len(list(folder.glob(f'{FOLDER}.lost-*')))}"
    if lost:
        lost_folder.mkdir(mode=0o700)
        for file in lost:
            file.rename(lost_folder / file.name)
    write_private(mark, store.encode())
    return lost_folder if lost else None


def files_of_kernels(folder: Path) -> list[tuple[Path, int]]:
    """Return (file, limit) in order. The limit is the next kernel's lease epoch: the store has lost the
    messages of the file with this sequence number or a higher one."""
    files = event_files(folder)
    epochs = sorted({_epoch_of(file) for file in files})
    next_epochs = dict(pairwise(epochs))
    return [(file, next_epochs.get(_epoch_of(file), _NEVER)) for file in files]


def _epoch_of(file: Path) -> int:
    return int(file.name.partition("-")[0])


def records_in(
    file: Path, below: int, *, start: int = 0, newest: int = 0
) -> Iterator[tuple[int, bytes | None, int]]:
    """Yield (sequence number, message, end of the record) for the records of a file from the byte `start` on.
    Stop at an incomplete record, or at a number that is not above `newest` and below `below`."""
    with open_record(file) as opened:
        opened.seek(start)
        while (record := next_record(opened)) is not None and newest < record[0] < below:
            yield *record, opened.tell()
            newest = record[0]


def next_record(file: BinaryIO) -> tuple[int, bytes | None] | None:
    """Return the next number and message, None for a damaged message; None at the end, or if incomplete."""
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    sequence, length, checksum = _HEAD.unpack(head)
    message = file.read(length) if length <= _LONGEST else b""
    if len(message) < length:
        return None
    return sequence, message if _checksum(sequence, message) == checksum else None


def _checksum(sequence: int, message: bytes) -> int:
    return zlib.crc32(message, zlib.crc32(sequence.to_bytes(8, "little")))
