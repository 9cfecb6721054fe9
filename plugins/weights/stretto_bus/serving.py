"""The requests of subscribers, in msgpack, and the publisher's end, which answers them."""

import os
import zlib
from pathlib import Path
from typing import Annotated

import anyio.to_thread
import msgspec

from stretto.errors import WeightsError
from stretto.models.version_files import AskOutline, FolderPublisher
from stretto.weights import Wire


class AskPiece(msgspec.Struct, frozen=True, array_like=True, tag="piece"):
    """Ask for a piece of one of a version's files. The answer is a `TensorPiece`."""

    version: int
    file: str
    start: Annotated[int, msgspec.Meta(ge=0)]
    size: Annotated[int, msgspec.Meta(ge=0)]


Question = AskOutline | AskPiece


class TensorPiece(msgspec.Struct, frozen=True, array_like=True):
    """The bytes of a piece, and their checksum."""

    checksum: int
    data: memoryview


def checksum(data: bytes | memoryview) -> int:
    """Return the CRC-32, which shows a damaged piece at once. The tensors' hashes show wrong weights."""
    return zlib.crc32(data)


_decode = msgspec.msgpack.Decoder[Question](Question).decode


class BusPublisher(FolderPublisher):
    """Publishes in a thread, and meanwhile answers requests of subscribers on the event loop."""

    def __init__(self, root: Path, keep: int, shard_gb: float, wire: Wire, *, deltas: bool) -> None:
        super().__init__(root, keep, shard_gb, wire.address, deltas=deltas)
        self._limit = wire.limit
        wire.answer(self._answer)

    async def _answer(self, question: bytes) -> bytes:
        return await anyio.to_thread.run_sync(self._answer_from_files, _decode(question))

    def _answer_from_files(self, question: Question) -> bytes:
        stored = self.find(question.version)
        if isinstance(question, AskOutline):
            return msgspec.msgpack.encode(stored.outline)
        if question.file not in stored.manifest.stored or question.size > self._limit:
            raise WeightsError(
                f"version {question.version} has the files {', '.join(stored.manifest.stored[:3])} …, and a "
                f"piece has at most {self._limit} bytes; requested was {question.file[:40]!r}, "
                f"{question.size} bytes",
                version=question.version,
            )
        try:
            with (stored.folder / question.file).open("rb") as file:
                data = os.pread(file.fileno(), question.size, question.start)
        except OSError as error:  # the file has just been removed
            reason = f"version {question.version} has been removed: {error}"
            raise WeightsError(reason, version=question.version) from error
        return msgspec.msgpack.encode(TensorPiece(checksum(data), memoryview(data)))
