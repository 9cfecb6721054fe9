"""The subscriber's end: fetches a version into a folder, several pieces at a time."""

import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import anyio.to_thread
import msgspec

from stretto.errors import BusError, WeightsError, one_job
from stretto.models.version_files import AskOutline, Outline
from stretto.models.version_receiver import VersionReceiver
from stretto.weights import WeightsNote, Wire
from stretto_bus.serving import AskPiece, Question, TensorPiece, checksum

A = TypeVar("A")

_ENVELOPE = 64
"""Maximum number of bytes of a `TensorPiece` without its data."""
_TRIES = 3
"""Number of attempts to fetch a piece that arrives damaged."""


class BusSubscriber(VersionReceiver):
    """Fetches versions into folders below `root`, which it owns: `in_flight` pieces at once, each of at most
    `piece` bytes (no more than the wire's limit) and within `deadline_s`."""

    def __init__(self, root: Path, wire: Wire, *, piece: int, in_flight: int, deadline_s: float) -> None:
        super().__init__(root, _PieceSource(wire, piece - _ENVELOPE, in_flight, deadline_s))


class _PieceSource:
    def __init__(self, wire: Wire, piece: int, in_flight: int, deadline_s: float) -> None:
        self._wire = wire
        self._piece = piece
        self._in_flight = in_flight
        self._deadline_s = deadline_s
        self._fetch: _Fetch | None = None
        """The running or interrupted fetch; the next fetch of the same files continues it."""

    async def outline(self, note: WeightsNote) -> Outline:
        return await self.ask(note, AskOutline(note.version), Outline)

    async def fetch(self, note: WeightsNote, files: Mapping[Path, int]) -> None:
        if self._fetch is None or (self._fetch.note, self._fetch.files) != (note, files):
            self._fetch = _Fetch(self, note, files, self._piece)
        await self._fetch.run(self._in_flight)
        self._fetch = None

    async def ask(self, note: WeightsNote, question: Question, answer: type[A]) -> A:
        try:
            data = await self._wire.ask(
                note.address, msgspec.msgpack.encode(question), deadline_s=self._deadline_s
            )
            return msgspec.msgpack.decode(data, type=answer)
        except (BusError, msgspec.DecodeError) as error:
            reason = f"version {note.version} cannot be fetched: {error}"
            raise WeightsError(reason, version=note.version) from error


class _Fetch:
    def __init__(
        self, source: _PieceSource, note: WeightsNote, files: Mapping[Path, int], piece: int
    ) -> None:
        self.note = note
        self.files = files
        self._source = source
        self._missing = deque(
            (path, AskPiece(note.version, path.name, start, min(piece, size - start)))
            for path, size in files.items()
            for start in range(0, size, piece)
        )

    async def run(self, in_flight: int) -> None:
        async with one_job() as tasks:
            for _ in range(in_flight):
                tasks.start_soon(self._fetch_pieces)

    async def _fetch_pieces(self) -> None:
        while self._missing:
            path, question = self._missing.popleft()
            try:
                await self._fetch_piece(path, question)
            except BaseException:
                self._missing.appendleft((path, question))  # for the next attempt
                raise

    async def _fetch_piece(self, path: Path, question: AskPiece) -> None:
        data = await self._receive_intact(question)
        try:
            await anyio.to_thread.run_sync(_write, path, question.start, data)
        except OSError as error:
            raise WeightsError(f"{path} cannot be written: {error}", version=self.note.version) from error

    async def _receive_intact(self, question: AskPiece) -> memoryview:
        for _ in range(_TRIES):
            piece = await self._source.ask(self.note, question, TensorPiece)
            if len(piece.data) == question.size and checksum(piece.data) == piece.checksum:
                return piece.data
        raise WeightsError(
            f"version {self.note.version} from {self.note.address}: a piece of {question.file} arrived "
            f"damaged {_TRIES} times; at least {len(self._missing) + 1} pieces are missing",
            version=self.note.version,
        )


def _write(path: Path, start: int, data: memoryview) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        os.pwrite(descriptor, data, start)
    finally:
        os.close(descriptor)
