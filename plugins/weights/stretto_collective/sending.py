"""(torch) The publisher's end: sends versions from a folder, each transfer in a separate thread."""

from collections import OrderedDict
from collections.abc import Collection
from datetime import timedelta
from pathlib import Path

import anyio.to_thread
import msgspec
from torch.distributed import HashStore, Store  # pyright: ignore[reportPrivateImportUsage] - documented there

from stretto.errors import WeightsError
from stretto.models.version_files import AskOutline, FolderPublisher
from stretto.weights import Wire
from stretto_collective import CollectiveConfig, meeting

_decode = msgspec.msgpack.Decoder[meeting.Question](meeting.Question).decode
_MAX_STORES = 64
"""Number of newest transfers whose stores are kept."""


class CollectivePublisher(FolderPublisher):
    """Publishes in a thread, and meanwhile meets subscribers and sends versions to them."""

    def __init__(self, root: Path, wire: Wire, config: CollectiveConfig) -> None:
        super().__init__(root, config.keep, config.shard_gb, wire.address, deltas=config.deltas)
        self._config = config
        self._stores: OrderedDict[str, HashStore] = OrderedDict()
        self._sent: set[str] = set()
        wire.answer(self._answer)

    async def _answer(self, question: bytes) -> bytes:
        request: meeting.Question = _decode(question)
        match request:
            case AskOutline(version):
                return msgspec.msgpack.encode(self.find(version).outline)
            case meeting.Put(transfer, key, value):
                self._store(transfer).set(key, value)  # pyright: ignore[reportArgumentType] - takes bytes too
                return b""
            case meeting.Take(transfer, key):
                return await anyio.to_thread.run_sync(self._store(transfer).get, key)
            case meeting.Send(transfer, version, gpu, files):
                if transfer not in self._sent:  # otherwise the files were sent, but the answer was lost
                    await anyio.to_thread.run_sync(self._send, self._store(transfer), version, gpu, files)
                    self._sent.add(transfer)
                return b""

    def _store(self, transfer: str) -> HashStore:
        if transfer not in self._stores:
            store = self._stores[transfer] = HashStore()
            store.set_timeout(timedelta(seconds=self._config.deadline_s))
            while len(self._stores) > _MAX_STORES:
                self._sent.discard(self._stores.popitem(last=False)[0])
        return self._stores[transfer]

    def _send(self, store: Store, version: int, gpu: str, names: Collection[str]) -> None:
        stored, config = self.find(version), self._config
        files = [(file, size) for file, size in stored.sizes.items() if file.name in names]
        try:
            backend = meeting.choose_backend(config.backend, meeting.gpu_for(config.backend), gpu)
            store.set(meeting.BACKEND, backend)
            with meeting.Transfer(backend, store, 0, config.interface, config.deadline_s) as transfer:
                for bucket in meeting.buckets(files, config.bucket_mb * 2**20, write=False):
                    transfer.send(bucket)
        except RuntimeError as error:  # from torch.distributed, or because a file has just been removed
            raise WeightsError(f"version {version} cannot be sent: {error}", version=version) from error
