"""Messages as bytes, and in parts where they are larger than the server's limit."""

import secrets
import struct
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any

import msgspec

from stretto.errors import BusError

_PART = 0xC1
"""First byte of a part of a larger payload, and of a list of its parts. msgpack never uses this byte."""
_MAX_PAYLOAD = 48 * 2**20
_MAX_PARTS = 4096
_PartNumbers = Annotated[list[Annotated[int, msgspec.Meta(ge=1)]], msgspec.Meta(max_length=_MAX_PARTS)]
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
    """Return whether the data is a part, or lists the stored parts of a payload."""
    return data[:1] == b"\xc1"


def split(data: bytes, limit: int) -> list[bytes]:
    """Split a payload into parts of at most `limit` bytes. A payload that fits stays as it is."""
    if len(data) > _MAX_PAYLOAD:
        raise BusError(
            f"a message of {len(data):,} bytes cannot be sent: the largest that is accepted has "
            f"{_MAX_PAYLOAD:,} bytes; a reward, a workflow or an agent made too much data"
        )
    if len(data) <= limit:
        return [data]
    key = secrets.token_bytes(16)
    room = limit - _HEAD.size
    pieces = [data[start : start + room] for start in range(0, len(data), room)]
    return [_HEAD.pack(_PART, key, index, len(pieces)) + piece for index, piece in enumerate(pieces)]


class Parts:
    """Incomplete payloads. Above `_UNFINISHED_BYTES` the oldest is dropped: any process may send parts."""

    def __init__(self) -> None:
        self._unfinished: OrderedDict[bytes, _Unfinished] = OrderedDict()
        self._bytes = 0

    def add(self, data: bytes) -> bytes | None:
        """Add a part, and return the payload if it is complete. Raise ValueError if the part does not fit."""
        if len(data) < _HEAD.size or not is_split(data):
            raise ValueError("a part without a head")
        _, key, index, count = _HEAD.unpack_from(data)
        if not index < count <= _MAX_PARTS:
            raise ValueError(f"part {index} of {count}; a payload has at most {_MAX_PARTS} parts")
        payload = self._unfinished.setdefault(key, _Unfinished(count))
        if payload.count != count or index in payload.pieces:
            raise ValueError(f"part {index} of {count} does not fit the parts that have arrived")
        payload.pieces[index] = data[_HEAD.size :]
        payload.bytes += len(data) + _PIECE_OVERHEAD
        self._bytes += len(data) + _PIECE_OVERHEAD
        if payload.bytes > _MAX_PAYLOAD + count * (_HEAD.size + _PIECE_OVERHEAD):
            self._drop(key)
            raise ValueError(f"the parts have more than {_MAX_PAYLOAD:,} bytes together")
        if len(payload.pieces) == count:
            self._drop(key)
            return b"".join(payload.pieces[number] for number in range(count))
        while self._bytes > _UNFINISHED_BYTES:
            self._drop(next(iter(self._unfinished)))
        return None

    def _drop(self, key: bytes) -> None:
        self._bytes -= self._unfinished.pop(key).bytes


@dataclass
class _Unfinished:
    count: int
    pieces: dict[int, bytes] = field(default_factory=dict)
    bytes: int = 0


# A stream stores the parts of a payload at a separate subject, and then a message that lists the parts.


def with_parts(*subjects: str) -> list[str]:
    """Return these subjects of a stream, each followed by the subject of its parts."""
    return [name for subject in subjects for name in (subject, f"{subject}.part")]


def list_parts(sequences: Sequence[int]) -> bytes:
    """Return the message that lists, by sequence number in the stream, the stored parts of a payload."""
    return bytes([_PART]) + encode(sequences)


async def join_stored(data: bytes, read: Callable[[int], Awaitable[bytes]]) -> bytes:
    """Return a payload, joined from its stored parts. Raise DecodeError or ValueError if they do not fit."""
    if not is_split(data):
        return data
    parts, payload = Parts(), None
    for sequence in msgspec.msgpack.decode(data[1:], type=_PartNumbers):
        payload = parts.add(await read(sequence))
    if payload is None:
        raise ValueError("some parts of a message are missing")
    return payload
