"""Images on their way from rollout workers to engines: each goes once to each engine, under its digest.

A request names its images by their digests. An engine's worker that does not have an image asks the rollout
worker that sent the request, in parts that fit into a message, and keeps what it was sent last.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import anyio

from stretto.bus.messages import AskImage, ImagePart
from stretto.errors import BusError, Refused
from stretto.models.images import MAX_FILE_BYTES, OpenImage
from stretto.workers.context import WorkerContext

__all__ = ["ImageFetcher", "ImageShelf"]

_ENVELOPE = 64
"""Maximum number of bytes of an `ImagePart` besides its data."""
_PART_S = 60.0
"""Time limit of a rollout worker for one part."""
_KEPT_BYTES = 2**27


class ImageShelf:
    """The images of the tickets that a rollout worker has in hand. Engines ask for them."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._files: dict[str, bytes] = {}
        self._holders: Counter[str] = Counter()

    async def open(self) -> None:
        """Listen for questions. Called once, before the first `hold`."""
        await self._context.bus.serve(self._context.subject("image"), AskImage, self._answer, forget=True)

    @contextmanager
    def hold(self, images: Sequence[OpenImage]) -> Generator[None]:
        """Have these images ready for the duration of the block."""
        for image in images:
            self._files[image.digest] = image.file
            self._holders[image.digest] += 1
        try:
            yield
        finally:
            for image in images:
                self._holders[image.digest] -= 1
                if not self._holders[image.digest]:
                    del self._holders[image.digest], self._files[image.digest]

    async def _answer(self, message: AskImage) -> ImagePart:
        file = self._files.get(message.digest)
        if file is None:
            raise Refused(self._context.worker, "has no ticket with this image in hand")
        end = message.offset + self._context.bus.limit - _ENVELOPE
        return ImagePart(len(file), file[message.offset : end])


class ImageFetcher:
    """The images that an engine's worker has been sent, up to 128 MiB of them."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._files: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0
        self.fetched = Counter[str]()
        """Number of images that came, and of their bytes: `images` and `bytes`."""
        self._locks: defaultdict[str, anyio.Lock] = defaultdict(anyio.Lock)
        """Of each image that is being fetched, so that two requests for it fetch it once."""

    async def get(self, worker: str, digests: Sequence[str]) -> list[bytes]:
        """Return the files with these digests.

        Args:
            worker: the rollout worker that has them.

        Raises:
            BusError: if the rollout worker does not send one of them, or sends something else.
        """
        return [await self._file(worker, digest) for digest in digests]

    async def _file(self, worker: str, digest: str) -> bytes:
        lock = self._locks[digest]
        async with lock:
            file = self._files.get(digest)
            if file is None:
                file = await self._fetch(worker, digest)
                self._keep(digest, file)
            self._files.move_to_end(digest)
        if not lock.statistics().tasks_waiting:
            self._locks.pop(digest, None)
        return file

    async def _fetch(self, worker: str, digest: str) -> bytes:
        file = b""
        while True:
            part = await self._context.bus.request(
                self._context.names.worker("rollout", worker, "image"),
                AskImage(digest, len(file)),
                ImagePart,
                who=worker,
                deadline_s=_PART_S,
            )
            file += part.data
            if len(file) >= part.size or not part.data or part.size > MAX_FILE_BYTES:
                break
        if hashlib.sha256(file).hexdigest() != digest:
            raise BusError(f"{worker} sent another image than it had named, of {part.size} bytes")
        return file

    def _keep(self, digest: str, file: bytes) -> None:
        self._files[digest] = file
        self._bytes += len(file)
        self.fetched.update(images=1, bytes=len(file))
        while self._bytes > _KEPT_BYTES and len(self._files) > 1:
            _, oldest = self._files.popitem(last=False)
            self._bytes -= len(oldest)
