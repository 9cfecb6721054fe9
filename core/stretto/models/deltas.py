"""Deltas: the bytes of a tensor file that changed since the previous version, without loss.

At a learning rate of 1e-6 a few per cent of the bfloat16 values change in a step, and a delta has a few per
cent of the bytes. The unit is a word of 16 bits: a bfloat16 value, or half of a float32 value (nearly all
float32 values change). In files with a tensor of an odd number of bytes, a word is one byte.

The format: the bytes of a word (1), the number of words of the file's tensors (8) and of changed words (8);
then, compressed by zlib, for each changed word the number of words since the previous one (4 bytes), and the
XOR of its old and new value. Bytes of the same significance are adjacent, which compresses better.
"""

import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["FileBytes", "apply_delta"]

_HEAD = struct.Struct("<BQQ")
_FEWEST = 4
"""A delta is made if at most 1 / _FEWEST of the words changed: it is then smaller than half of the file."""
_MOST_WORDS = 2**32  # the number of words between two changed words has 4 bytes
_CHUNK = 2**20  # words that are compared at once: they stay in the processor's cache
_LEVEL = 1  # of zlib: higher ones take several times as long for a few per cent of the bytes

_Words = NDArray[np.unsignedinteger[Any]]


class FileBytes:
    """The bytes of the tensors of one file in the newest version: `size` bytes, in words of `width` bytes (1
    or 2). All tensors begin and end at whole words."""

    def __init__(self, size: int, width: int) -> None:
        self._width = width
        self._words: _Words = np.zeros(size // width, f"<u{width}")
        self._changed: list[NDArray[np.int64]] = []
        self._xor: list[_Words] = []
        self._number = 0
        self._is_new = True

    @property
    def data(self) -> memoryview:
        """The bytes."""
        return self._words.view(np.uint8).data

    def begin(self, *, is_new: bool) -> None:
        """Begin a version. `is_new`: there is no earlier version, so no delta."""
        self._changed, self._xor, self._number, self._is_new = [], [], 0, is_new

    def put(self, start: int, data: NDArray[np.uint8]) -> None:
        """Store the bytes of a tensor, from byte `start` on."""
        whole, first = data.view(self._words.dtype), start // self._width
        for begin in range(0, len(whole), _CHUNK):
            new = whole[begin : begin + _CHUNK]
            old = self._words[first + begin : first + begin + len(new)]
            if self._is_new or self._number * _FEWEST > len(self._words):
                old[:] = new
                continue
            places = np.flatnonzero(new != old)
            self._changed.append(places + first + begin)
            self._xor.append(new[places] ^ old[places])
            self._number += len(places)
            old[places] = new[places]

    def delta(self) -> bytes | None:
        """Return the changes since `begin`, once; None if too much has changed or the file is new."""
        changed, xors, self._changed, self._xor = self._changed, self._xor, [], []  # large, and used once
        words = len(self._words)
        if self._is_new or self._number * _FEWEST > words or words >= _MOST_WORDS:
            return None
        places = np.concatenate([np.empty(0, np.int64), *changed])
        xor = np.concatenate([np.empty(0, self._words.dtype), *xors])
        gaps = np.diff(places, prepend=-1) - 1
        content = zlib.compress(_planes(gaps.astype("<u4")) + _planes(xor), _LEVEL)
        return _HEAD.pack(self._width, words, len(places)) + content


def apply_delta(data: bytes, tensors: NDArray[np.uint8]) -> None:
    """Change a file's tensors, in place, to those of the next version. Raise ValueError if `data` is no
    delta for this file."""
    width, size, number = _HEAD.unpack_from(data) if len(data) >= _HEAD.size else (0, 0, 0)
    if width not in (1, 2) or size * width != len(tensors) or number > size:
        raise ValueError(f"a delta of {number} of {size} words, for a file with {len(tensors)} bytes")
    words = tensors.view(f"<u{width}")
    expected = (4 + width) * number
    unpacker = zlib.decompressobj()
    try:
        content = unpacker.decompress(memoryview(data)[_HEAD.size :], expected + 1)
    except zlib.error as error:
        raise ValueError(f"a delta that cannot be unpacked: {error}") from error
    if len(content) != expected or not unpacker.eof:
        raise ValueError(f"a delta of {number} words has {len(content)} bytes; expected {expected}")
    gaps, xor = _from_planes(content[: 4 * number], 4), _from_planes(content[4 * number :], width)
    places = np.cumsum(gaps.astype(np.int64) + 1) - 1
    if number and places[-1] >= size:
        raise ValueError(f"a delta changes word {places[-1]} of {size}")
    words[places] ^= xor


def _planes(values: _Words) -> bytes:
    """Return the bytes of values: first the lowest byte of every value, last the highest byte."""
    return values.view(np.uint8).reshape(len(values), values.itemsize).T.tobytes()


def _from_planes(data: bytes, width: int) -> _Words:
    bytes_ = np.frombuffer(data, np.uint8).reshape(width, len(data) // width).T
    return np.ascontiguousarray(bytes_).view(f"<u{width}").reshape(-1)
