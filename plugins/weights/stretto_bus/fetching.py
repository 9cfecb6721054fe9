"""The subscriber's end: fetches a version into a folder, several pieces at a time."""

from __future__ import annotations

import os
import shutil
from collections import deque
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import anyio
import anyio.to_thread
import msgspec

from stretto.errors import BusError, WeightsError, one_error
from stretto.models.version_files import (
    AskOutline,
    FolderUpdate,
    FrozenFiles,
    Manifest,
    Outline,
    lay_out,
    open_version,
)
from stretto_bus.serving import AskPiece, Question, TensorPiece, checksum

if TYPE_CHECKING:
    from stretto.weights import WeightsNote, Wire

A = TypeVar("A")

_ENVELOPE = 64
"""Largest number of bytes of a `TensorPiece` besides its data."""
_TRIES = 3
"""Number of attempts to fetch a piece that arrives damaged."""


class BusSubscriber:
    """Fetches versions into folders below `root`, which it owns.

    Args:
        piece: bytes to request at once, no more than the wire's limit.
        in_flight: number of pieces to request at once.
        deadline_s: seconds to wait for a piece.
    """

    def __init__(self, root: Path, wire: Wire, *, piece: int, in_flight: int, deadline_s: float) -> None:
        self._root = root
        self._source = _TensorSource(wire, deadline_s)
        self._frozen = FrozenFiles(root / "frozen")
        self._piece = piece - _ENVELOPE
        self._in_flight = in_flight
        self._fetch: _Fetch | None = None
        """The fetch in progress, or an interrupted one: the next attempt at the same version continues it."""

    async def receive(self, note: WeightsNote) -> FolderUpdate:
        """Fetch the missing pieces of a version, and compare every tensor's hash with the announcement."""
        if self._fetch is None or self._fetch.note != note:
            self._drop()
            self._fetch = await self._begin(note)
        fetch = self._fetch
        await fetch.run(self._in_flight)
        self._fetch = None
        # Hashing releases the interpreter lock, so the engine in this process continues meanwhile.
        open_update = partial(open_version, note, fetch.folder, temporary=True, frozen=self._frozen)
        try:
            return await anyio.to_thread.run_sync(open_update)
        except WeightsError:
            fetch.drop()
            raise

    def close(self) -> None:
        """Remove the folders that have not been handed out."""
        self._drop()
        shutil.rmtree(self._root, ignore_errors=True)

    async def _begin(self, note: WeightsNote) -> _Fetch:
        outline = await self._source.ask(note, AskOutline(note.version), Outline)
        folder = self._root / f"v{note.version:08d}"
        missing = lay_out(outline, note, folder, self._frozen)
        names = [*msgspec.json.decode(outline.manifest, type=Manifest).files]
        files = {names.index(path.name): (path, size) for path, size in missing.items()}
        return _Fetch(self._source, note, folder, files, self._piece)

    def _drop(self) -> None:
        if self._fetch is not None:
            self._fetch.drop()
            self._fetch = None


class _TensorSource:
    """Sends questions to publishers."""

    def __init__(self, wire: Wire, deadline_s: float) -> None:
        self._wire = wire
        self._deadline_s = deadline_s

    async def ask(self, note: WeightsNote, question: Question, answer: type[A]) -> A:
        """Ask the publisher of a version a question.

        Raises:
            WeightsError: if there is no answer, or an unexpected one.
        """
        try:
            data = await self._wire.ask(
                note.address, msgspec.msgpack.encode(question), deadline_s=self._deadline_s
            )
            return msgspec.msgpack.decode(data, type=answer)
        except (BusError, msgspec.DecodeError) as error:
            reason = f"version {note.version} cannot be fetched: {error}"
            raise WeightsError(reason, version=note.version) from error


class _Fetch:
    """The fetch of one version.

    Args:
        files: number of each file to fetch, in the manifest -> its path and its size in bytes.
    """

    def __init__(
        self,
        source: _TensorSource,
        note: WeightsNote,
        folder: Path,
        files: dict[int, tuple[Path, int]],
        piece: int,
    ) -> None:
        self.note = note
        self.folder = folder
        self._source = source
        self._files = {number: path for number, (path, _) in files.items()}
        self._missing = deque(
            AskPiece(note.version, number, start, min(piece, size - start))
            for number, (_, size) in files.items()
            for start in range(0, size, piece)
        )

    async def run(self, in_flight: int) -> None:
        """Fetch the missing pieces.

        Raises:
            WeightsError: if a piece cannot be fetched; those that have arrived are kept.
        """
        with one_error():
            async with anyio.create_task_group() as tasks:
                for _ in range(in_flight):
                    tasks.start_soon(self._fetch_pieces)

    def drop(self) -> None:
        """Remove the pieces that have arrived."""
        shutil.rmtree(self.folder, ignore_errors=True)

    async def _fetch_pieces(self) -> None:
        while self._missing:
            question = self._missing.popleft()
            try:
                await self._fetch_piece(question)
            except BaseException:
                self._missing.appendleft(question)  # for the next attempt
                raise

    async def _fetch_piece(self, question: AskPiece) -> None:
        data = await self._receive_intact(question)
        path = self._files[question.file]
        try:
            await anyio.to_thread.run_sync(_write, path, question.start, data)
        except OSError as error:
            raise WeightsError(f"{path} cannot be written: {error}", version=self.note.version) from error

    async def _receive_intact(self, question: AskPiece) -> memoryview:
        for _ in range(_TRIES):
            piece = await self._source.ask(self.note, question, TensorPiece)
            if len(piece.data) == question.size and checksum(piece.data) == piece.checksum:
                return piece.data
        file = self._files[question.file].name
        raise WeightsError(
            f"version {self.note.version} from {self.note.address}: a piece of {file} arrived damaged"
            f" {_TRIES} times; at least {len(self._missing) + 1} pieces are missing",
            version=self.note.version,
        )


def _write(path: Path, start: int, data: memoryview) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        os.pwrite(descriptor, data, start)
    finally:
        os.close(descriptor)
