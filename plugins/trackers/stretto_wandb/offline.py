"""Reads the files of wandb's offline runs.

A file is a log of LevelDB's format with wandb's header: blocks of 32 KiB, in which each part of a record has
checksum, length and kind. A record is wandb's protobuf message `Record`.
"""

# pyright: reportAttributeAccessIssue=false
# Protobuf makes the names of these modules when they are imported.

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

_MAGIC = b":W&B"
_FILE_HEAD = 7  # bytes
_BLOCK = 32 * 2**10
_PART_HEAD = struct.Struct("<IHB")
_WHOLE, _LAST = 1, 4
"""Kinds of the parts that end a record."""


def history_rows(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of the run's history. Ignore the incomplete end of a killed process's file."""
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
    offset, parts = _FILE_HEAD, b""
    while True:
        if (left_in_block := _BLOCK - offset % _BLOCK) < _PART_HEAD.size:
            offset += left_in_block  # a block ends with zeros where no head fits
        if offset + _PART_HEAD.size > len(data):
            return
        _, length, kind = _PART_HEAD.unpack_from(data, offset)
        offset += _PART_HEAD.size
        if kind == 0 or offset + length > len(data):
            return
        parts += data[offset : offset + length]
        offset += length
        if kind in (_WHOLE, _LAST):
            yield parts
            parts = b""
