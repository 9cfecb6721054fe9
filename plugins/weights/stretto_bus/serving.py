"""The publisher's end: answers questions about the versions in its folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import anyio.to_thread
import msgspec

from stretto.errors import WeightsError
from stretto.models.version_files import FolderPublisher
from stretto_bus.questions import AskOutline, AskPiece, Question, TensorPiece, checksum

if TYPE_CHECKING:
    from stretto.weights import Wire

_decode = msgspec.msgpack.Decoder[Question](Question).decode


class BusPublisher(FolderPublisher):
    """Publishes from a thread, and meanwhile answers questions on the event loop."""

    def __init__(self, root: Path, keep: int, shard_gb: float, wire: Wire) -> None:
        super().__init__(root, keep, shard_gb, wire.address)
        self._limit = wire.limit
        wire.answer(self._answer)

    async def _answer(self, question: bytes) -> bytes:
        return await anyio.to_thread.run_sync(self._answer_from_files, _decode(question))

    def _answer_from_files(self, question: Question) -> bytes:
        stored = self.find(question.version)
        if isinstance(question, AskOutline):
            return msgspec.msgpack.encode(stored.outline)
        if question.file >= len(stored.files) or question.size > self._limit:
            raise WeightsError(
                f"version {question.version} has {len(stored.files)} files, and a piece has at most "
                f"{self._limit} bytes; requested was file {question.file}, {question.size} bytes",
                version=question.version,
            )
        try:
            data = _read(stored.files[question.file], question)
        except OSError as error:  # the file has just been removed
            reason = f"version {question.version} has been removed: {error}"
            raise WeightsError(reason, version=question.version) from error
        return msgspec.msgpack.encode(TensorPiece(checksum(data), memoryview(data)))


def _read(path: Path, question: AskPiece) -> bytes:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.pread(descriptor, question.size, question.start)
    finally:
        os.close(descriptor)
