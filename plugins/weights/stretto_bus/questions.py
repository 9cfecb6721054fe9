"""The questions and answers of the two ends, in msgpack, and the checksum of a piece of a file."""

from __future__ import annotations

import zlib
from typing import Annotated

import msgspec

from stretto.models.version_files import AskOutline

__all__ = ["AskOutline", "AskPiece", "Question", "TensorPiece", "checksum"]


class AskPiece(msgspec.Struct, frozen=True, array_like=True, tag="piece"):
    """Ask for a piece of one of a version's files. The answer is a `TensorPiece`."""

    version: int
    file: Annotated[int, msgspec.Meta(ge=0)]
    """Index in the manifest."""
    start: Annotated[int, msgspec.Meta(ge=0)]
    size: Annotated[int, msgspec.Meta(ge=0)]


Question = AskOutline | AskPiece


class TensorPiece(msgspec.Struct, frozen=True, array_like=True):
    """The bytes of a piece, and their checksum."""

    checksum: int
    data: memoryview


def checksum(data: bytes | memoryview) -> int:
    """Return the CRC-32. It shows a damaged piece at once, so that only this piece is requested again. The
    tensors' hashes show whether they are the announced ones."""
    return zlib.crc32(data)
