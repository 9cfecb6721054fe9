"""The folder `events` of a run: the messages of its journal, as files that need no server.

Each kernel writes files of its own, with names that begin with its lease epoch. A record is the sequence
number of a message in the journal's stream, the length of the message, its CRC-32, and the message, which is
an `EventBatch`. The numbers of a file rise. A kernel first copies what its predecessors had stored but not
written, so a message may be in two files.
"""

from __future__ import annotations

import heapq
import struct
import zlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

from stretto.records.files import open_record

FOLDER = "events"
_HEAD = struct.Struct("<QII")
_LONGEST = 2**30
"""Bytes. A longer message is none."""
_NEVER = 2**63


def file_name(epoch: int, first: int) -> str:
    """Return the name of a kernel's file that begins with the message of this sequence number."""
    return f"{epoch:012}-{first:012}.events"


def record_of(sequence: int, message: bytes) -> bytes:
    """Return the record of a message."""
    return _HEAD.pack(sequence, len(message), zlib.crc32(message)) + message


def stored_events(folder: Path) -> Iterator[tuple[int, bytes | None]]:
    """Yield sequence number and bytes of each message in the files of the run in `folder`, in order; None
    for bytes that are damaged. Nothing is known of what follows a damaged head in its file.

    Raises:
        OSError: if a file cannot be read.
    """
    newest = 0
    every = [_records(file, below) for file, below in _files(folder)]
    for sequence, message in heapq.merge(*every, key=lambda record: record[0]):
        if sequence > newest:
            yield sequence, message
            newest = sequence


def newest_stored(folder: Path) -> int:
    """Return the sequence number of the last message in the files of the run in `folder`; 0 without one.

    Raises:
        OSError: if a file cannot be read.
    """
    for file, below in reversed(_files(folder)):
        if sequences := [sequence for sequence, _ in _records(file, below)]:
            return sequences[-1]
    return 0


def move_lost(folder: Path, epoch: int) -> Path | None:
    """Move the files aside that no kernel before this lease epoch has written: the store of the run in
    `folder` is another one than theirs, and its numbers begin again. Return their new folder; None if there
    are none.

    Raises:
        OSError: if they cannot be moved.
    """
    lost = [file for file, _ in _files(folder) if _epoch_of(file) >= epoch]
    if not lost:
        return None
    number = 1 + len(list(folder.glob(f"{FOLDER}.lost-*")))
    aside = folder / f"{FOLDER}.lost-{number}"
    aside.mkdir(mode=0o700)
    for file in lost:
        file.rename(aside / file.name)
    return aside


def _files(folder: Path) -> list[tuple[Path, int]]:
    """Return the files in order. The messages of each have numbers below the next kernel's lease epoch,
    which is the number of its lease in the same stream; later ones were lost with a part of the store."""
    files = sorted((folder / FOLDER).glob("[0-9]*-*.events"))
    epochs = sorted({_epoch_of(file) for file in files})
    following = dict(pairwise(epochs))
    return [(file, following.get(_epoch_of(file), _NEVER)) for file in files]


def _epoch_of(file: Path) -> int:
    return int(file.name.partition("-")[0])


def _records(file: Path, below: int) -> Iterator[tuple[int, bytes | None]]:
    """Yield the records of a file with lower numbers, up to one that is not whole."""
    with open_record(file) as opened:
        newest = 0
        while (record := _read_record(opened)) is not None and newest < record[0] < below:
            yield record
            newest = record[0]


def _read_record(file: BinaryIO) -> tuple[int, bytes | None] | None:
    """Return the next record; None at the end, or if it is not whole."""
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    sequence, length, checksum = _HEAD.unpack(head)
    message = file.read(length) if length <= _LONGEST else b""
    if len(message) < length:
        return None
    return sequence, message if zlib.crc32(message) == checksum else None
