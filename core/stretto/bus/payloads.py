"""Messages as bytes, and in parts where they are larger than the server's limit."""

from __future__ import annotations

import secrets
import struct
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import msgspec

from stretto.errors import BusError

__all__ = [
    "MAX_PARTS",
    "MAX_PAYLOAD",
    "PART",
    "Parts",
    "content_of",
    "decoder",
    "encode",
    "is_split",
    "split",
]

PART = 0xC1
"""First byte of a part of a larger payload. msgpack never uses this byte."""
MAX_PAYLOAD = 48 * 2**20
"""Largest payload, in bytes, that is sent in parts."""
MAX_PARTS = 4096
_HEAD = struct.Struct(">B16sII")  # mark, id of the whole payload, index, count
_UNFINISHED_BYTES = 64 * 2**20
"""Memory for the parts of payloads that are not complete yet."""
_PIECE_OVERHEAD = 200
"""Estimated bytes that a stored piece takes besides its content."""

encode = msgspec.msgpack.Encoder().encode


@lru_cache(maxsize=256)
def decoder(kind: Any) -> Callable[[bytes | memoryview], Any]:
    """Return the decoder of one kind of message. For malformed bytes it raises only msgspec.DecodeError."""
    decode = msgspec.msgpack.Decoder(kind).decode

    def decode_checked(data: bytes | memoryview) -> Any:
        try:
            return decode(data)
        except UnicodeDecodeError as error:  # msgspec raises it for some strings
            raise msgspec.DecodeError(f"a string is not UTF-8: {error}") from error
        except RecursionError as error:  # msgspec also reads the fields that it ignores
            raise msgspec.DecodeError("nested too deeply") from error

    return decode_checked


def is_split(data: bytes) -> bool:
    """Return whether the data is a part, or stands for a payload that is stored in parts."""
    return data[:1] == b"\xc1"


def content_of(part: bytes) -> bytes:
    """Return what a part contains."""
    return part[_HEAD.size :]


def split(data: bytes, limit: int) -> list[bytes]:
    """Split a payload into parts of at most `limit` bytes. A payload that fits stays as it is.

    Raises:
        BusError: if the payload is larger than any process accepts.
    """
    if len(data) <= limit:
        return [data]
    if len(data) > MAX_PAYLOAD:
        raise BusError(
            f"a message of {len(data):,} bytes cannot be sent: the largest that is accepted has "
            f"{MAX_PAYLOAD:,} bytes"
        )
    key = secrets.token_bytes(16)
    room = limit - _HEAD.size
    pieces = [data[start : start + room] for start in range(0, len(data), room)]
    return [_HEAD.pack(PART, key, index, len(pieces)) + piece for index, piece in enumerate(pieces)]


class Parts:
    """Payloads of which some parts have not arrived yet. Any process may send parts, so their memory is
    bounded: above `_UNFINISHED_BYTES` the oldest payload is dropped, because its sender has probably gone."""

    def __init__(self) -> None:
        self._unfinished: OrderedDict[bytes, _Unfinished] = OrderedDict()
        self._bytes = 0

    def add(self, data: bytes) -> bytes | None:
        """Add one part. Return the payload if it is complete now, or None.

        Raises:
            ValueError: if the part has no head, or does not fit the other parts of its payload, or if its
                payload would be too large.
        """
        if len(data) < _HEAD.size:
            raise ValueError("a part without a head")
        _, key, index, count = _HEAD.unpack_from(data)
        if not index < count <= MAX_PARTS:
            raise ValueError(f"part {index} of {count}; a payload has at most {MAX_PARTS} parts")
        payload = self._unfinished.setdefault(key, _Unfinished(count))
        if payload.count != count or index in payload.pieces:
            raise ValueError(f"part {index} of {count} does not fit the parts that have arrived")
        payload.pieces[index] = content_of(data)
        payload.bytes += len(data) + _PIECE_OVERHEAD
        self._bytes += len(data) + _PIECE_OVERHEAD
        if len(payload.pieces) == count:
            self._drop(key)
            return b"".join(payload.pieces[each] for each in range(count))
        while self._bytes > _UNFINISHED_BYTES:
            self._drop(next(iter(self._unfinished)))
        return None

    def _drop(self, key: bytes) -> None:
        self._bytes -= self._unfinished.pop(key).bytes


@dataclass
class _Unfinished:
    """A payload of which some parts have not arrived yet."""

    count: int
    """Number of its parts."""
    pieces: dict[int, bytes] = field(default_factory=dict)
    """Index -> content, of the parts that have arrived."""
    bytes: int = 0
    """Memory of the pieces."""
