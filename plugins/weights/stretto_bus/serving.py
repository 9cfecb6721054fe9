"""The publisher's end: keeps versions in a folder, and answers questions about them."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import anyio.to_thread
import msgspec

from stretto.errors import WeightsError
from stretto.models.version_files import VersionFolders
from stretto_bus.questions import AskOutline, AskPiece, Question, TensorPiece, checksum

if TYPE_CHECKING:
    from torch import Tensor

    from stretto.weights import WeightsNote, Wire

__all__ = ["BusPublisher"]

_decode = msgspec.msgpack.Decoder[Question](Question).decode


class BusPublisher:
    """Publishes from the compute thread, and meanwhile answers questions on the event loop."""

    def __init__(self, versions: VersionFolders, wire: Wire) -> None:
        self._versions = versions
        self._address = wire.address
        wire.answer(self._answer)

    def publish(
        self, version: int, tensors: Iterable[tuple[str, Tensor]], needed: Collection[int] = ()
    ) -> WeightsNote:
        """Write a version into the folder; subscribers find it by this publisher's address in the note."""
        note = self._versions.write(version, tensors, needed)
        return msgspec.structs.replace(note, address=self._address)

    def copy(self, version: int, folder: Path) -> None:
        """Write a version into a folder."""
        self._versions.copy(version, folder)

    def close(self) -> None:
        """Remove everything."""
        self._versions.close()

    async def _answer(self, question: bytes) -> bytes:
        return await anyio.to_thread.run_sync(self._answer_from_files, _decode(question))

    def _answer_from_files(self, question: Question) -> bytes:
        stored = self._versions.find(question.version)
        if isinstance(question, AskOutline):
            return msgspec.msgpack.encode(stored.outline)
        try:
            data = _read(stored.files[question.file], question)
        except OSError as error:  # the file has just been removed
            reason = f"version {question.version} has been removed: {error}"
            raise WeightsError(reason, version=question.version) from error
        return msgspec.msgpack.encode(TensorPiece(checksum(data), memoryview(data)))


def _read(path: Path, asked: AskPiece) -> bytes:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.pread(descriptor, asked.size, asked.start)
    finally:
        os.close(descriptor)
