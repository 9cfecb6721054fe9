"""(torch) The subscriber's end: receives a version into the files of a folder."""

import asyncio
import secrets
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import anyio.to_thread
import msgspec
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage] - documented there

from stretto.errors import BusError, StrettoError, WeightsError, one_job
from stretto.models.version_files import AskOutline, Outline
from stretto.models.version_receiver import VersionReceiver
from stretto.weights import WeightsNote, Wire
from stretto_collective import CollectiveConfig
from stretto_collective.meeting import BACKEND, Put, Question, Send, Take, Transfer, buckets, gpu_for


class CollectiveSubscriber(VersionReceiver):
    """Receives versions into folders below `root`, which this subscriber owns."""

    def __init__(self, root: Path, wire: Wire, config: CollectiveConfig) -> None:
        super().__init__(root, _RanksSource(wire, config))


class _RanksSource:
    def __init__(self, wire: Wire, config: CollectiveConfig) -> None:
        self._wire = wire
        self._config = config
        self._gpu = gpu_for(config.backend)

    async def outline(self, note: WeightsNote) -> Outline:
        answer = await self._ask(note, AskOutline(note.version), self._config.deadline_s)
        try:
            return msgspec.msgpack.decode(answer, type=Outline)
        except msgspec.DecodeError as error:
            reason = f"version {note.version} cannot be received: {error}"
            raise WeightsError(reason, version=note.version) from error

    async def fetch(self, note: WeightsNote, files: Mapping[Path, int]) -> None:
        transfer, deadline_s = secrets.token_hex(8), self._config.deadline_s
        num_buckets = sum(-(-size // (self._config.bucket_mb * 2**20)) for size in files.values())
        store = _Meeting(self._wire, note.address, transfer, deadline_s)
        async with one_job() as tasks:
            question = Send(transfer, note.version, self._gpu, tuple(path.name for path in files))
            tasks.start_soon(self._ask, note, question, deadline_s * (num_buckets + 2))
            await anyio.to_thread.run_sync(self._fill, note, store, files, abandon_on_cancel=True)

    def _fill(self, note: WeightsNote, store: Store, files: Mapping[Path, int]) -> None:
        config = self._config
        try:
            backend = store.get(BACKEND).decode()
            with Transfer(backend, store, 1, config.interface, config.deadline_s) as transfer:
                for bucket in buckets(files.items(), config.bucket_mb * 2**20, write=True):
                    transfer.receive(bucket)
        except (RuntimeError, StrettoError, TimeoutError) as error:
            why = str(error) or f"no answer within weights.deadline_s={config.deadline_s:g}"
            reason = f"version {note.version} from {note.address} was not received: {why}"
            raise WeightsError(reason, version=note.version) from error

    async def _ask(self, note: WeightsNote, question: Question, deadline_s: float) -> bytes:
        data = msgspec.msgpack.encode(question)
        try:
            return await self._wire.ask(note.address, data, deadline_s=deadline_s)
        except BusError as error:
            reason = f"version {note.version} cannot be received: {error}"
            raise WeightsError(reason, version=note.version) from error


class _Meeting(Store):
    """The receiver's access to a transfer's store in the sender; torch calls it in the receiving thread."""

    def __init__(self, wire: Wire, address: str, transfer: str, deadline_s: float) -> None:
        super().__init__()
        self._wire = wire
        self._address = address
        self._transfer = transfer
        self._deadline_s = deadline_s
        self._loop = asyncio.get_running_loop()

    def set(self, key: str, value: Any) -> None:
        self._ask(Put(self._transfer, key, bytes(value)))

    def get(self, key: str) -> bytes:
        return self._ask(Take(self._transfer, key))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def _ask(self, question: Question) -> bytes:
        answer = self._wire.ask(self._address, msgspec.msgpack.encode(question), deadline_s=self._deadline_s)
        try:
            future = asyncio.run_coroutine_threadsafe(answer, self._loop)
        except RuntimeError:  # the worker has ended, but this thread has not
            answer.close()
            raise
        return future.result(self._deadline_s + 1)
