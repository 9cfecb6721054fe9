"""Reads the files of wandb's offline runs.

A file is a log of LevelDB's format with wandb's header: blocks of 32 KiB, in which each part of a record has
checksum, length and kind. A record is wandb's protobuf message `Record`.
"""

# pyright: reportAttributeAccessIssue=false
# Protobuf makes the names of these modules when they are imported.

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

_MAGIC = b":W&B"
_FILE_HEAD = 7
_BLOCK = 32 * 2**10
_PART_HEAD = struct.Struct("<IHB")
_WHOLE, _LAST = 1, 4
"""Kinds of parts: those that end a record."""


def history_rows(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the run's history. A killed process's file ends with its last whole block or record."""
    data = file.read_bytes()
    if not data.startswith(_MAGIC):
        raise ValueError(f"{file} is not a file of wandb")
    for content in _records(data):
        record = Record()
        record.ParseFromString(content)
        if record.WhichOneof("record_type") == "history":
            yield {
                item.key or ".".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }


def _records(data: bytes) -> Iterator[bytes]:
    place, parts = _FILE_HEAD, b""
    while True:
        if (left := _BLOCK - place % _BLOCK) < _PART_HEAD.size:
            place += left  # a block ends with zeros where no head fits
        if place + _PART_HEAD.size > len(data):
            return
        _, length, kind = _PART_HEAD.unpack_from(data, place)
        place += _PART_HEAD.size
        if kind == 0 or place + length > len(data):
            return
        parts += data[place : place + length]
        place += length
        if kind in (_WHOLE, _LAST):
            yield parts
            parts = b""
