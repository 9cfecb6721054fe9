"""What the two ends ask and answer, in msgpack, and how a piece of a file is checked."""

from __future__ import annotations

import zlib

import msgspec

__all__ = ["AskOutline", "AskPiece", "Question", "TensorPiece", "checksum"]


class AskOutline(msgspec.Struct, frozen=True, array_like=True, tag="outline"):
    """What does a version consist of? Answered by a `stretto.models.version_files.Outline`."""

    version: int


class AskPiece(msgspec.Struct, frozen=True, array_like=True, tag="piece"):
    """Bytes of one of its files. Answered by a `TensorPiece`."""

    version: int
    file: int
    """Index in the manifest."""
    start: int
    size: int


Question = AskOutline | AskPiece


class TensorPiece(msgspec.Struct, frozen=True, array_like=True):
    """Bytes, and what they add up to."""

    checksum: int
    data: memoryview


def checksum(data: bytes | memoryview) -> int:
    """CRC-32: tells a damaged piece at once, so that it alone is asked for again. That the tensors are the
    announced ones is seen by their SHA-256."""
    return zlib.crc32(data)
