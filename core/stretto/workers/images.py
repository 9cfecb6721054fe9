"""Images in rollout workers, and their transfer to inference workers: each image once, under its digest. An
inference worker that lacks an image requests it, in parts that fit into a message, from the rollout worker
that sent the generation request. It keeps the images that it used last."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

from stretto.bus.messages.inference import AskImage, ImagePart
from stretto.bus.messages.membership import WorkerProcess
from stretto.dataset import Message, Row
from stretto.errors import BusError, EngineError, Refused, RequestError
from stretto.models.images import MAX_FILE_BYTES, ImageFile, OpenImage, decode
from stretto.models.vision import Vision
from stretto.workers.context import WorkerContext
from stretto.workflow import Trajectory

T = TypeVar("T")

_ENVELOPE = 64
"""Maximum number of bytes of an `ImagePart` besides its data."""
_PART_S = 60.0  # for one part; a rollout worker that is gone never sends one
_KEPT_BYTES = 2**27  # of images in an inference worker
_TICKET_BYTES = 2**28
"""Maximum number of bytes of the images that the workflow adds to one ticket."""


class RolloutImages:
    """The images of a rollout worker whose model reads images. Inference workers request them."""

    def __init__(self, context: WorkerContext, vision: Vision) -> None:
        self.vision = vision
        self._context = context
        self._tickets: set[TicketImages] = set()
        self._thread = anyio.CapacityLimiter(1)

    async def open(self) -> None:
        """Serve requests for images. Called once, before the first `ticket`."""
        await self._context.bus.serve(self._context.subject("image"), AskImage, self._answer, forget=True)

    @contextmanager
    def ticket(self) -> Generator[TicketImages]:
        """Yield the images of a ticket, at first none. Inference workers may request them in the block."""
        ticket = TicketImages(self)
        self._tickets.add(ticket)
        try:
            yield ticket
        finally:
            self._tickets.remove(ticket)

    async def work(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function that reads images, which is slow, in a thread. One call at a time."""
        return await anyio.to_thread.run_sync(function, *arguments, limiter=self._thread)

    async def _answer(self, message: AskImage) -> ImagePart:
        ticket = next((candidate for candidate in self._tickets if message.digest in candidate), None)
        if ticket is None:
            raise Refused(self._context.worker, "has no ticket with this image in hand")
        [file] = ticket.files([message.digest])
        end = message.offset + self._context.bus.limit - _ENVELOPE
        return ImagePart(len(file), file[message.offset : end])


class TicketImages:
    """The `stretto.workflow.Images` of one ticket; that protocol documents the contract."""

    def __init__(self, images: RolloutImages) -> None:
        self._images = images
        self._files: dict[str, bytes] = {}
        self._tokens: dict[str, int] = {}
        self._added_bytes = 0
        self.of_row: Sequence[str] = ()
        self._of_row_tokens = 0

    async def encode_row(self, row: Row, tools: Sequence[Mapping[str, Any]] = ()) -> NDArray[np.int32]:
        """Return the token ids of a row's prompt, and add the row's images to the ticket."""
        ids, images = await self._images.work(_encode_row, self._images.vision, row, tools)
        self._files |= {image.digest: image.file for image in images}
        self.of_row = [image.digest for image in images]
        self._of_row_tokens = self._images.vision.count(ids)
        return ids

    def add(self, files: Sequence[bytes]) -> list[str]:
        images = [ImageFile(file) for file in files]
        for image in images:
            if len(image.file) > MAX_FILE_BYTES:
                raise RequestError(f"an image has {len(image.file)} bytes; expected at most {MAX_FILE_BYTES}")
        new_files = {image.digest: image.file for image in images if image.digest not in self._files}
        self._added_bytes += sum(map(len, new_files.values()))
        if self._added_bytes > _TICKET_BYTES:
            raise RequestError(
                f"the images that the workflow adds to one row have more than {_TICKET_BYTES} bytes together"
            )
        self._files |= new_files
        return [image.digest for image in images]

    async def render(self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = ()) -> str:
        return await self._images.work(lambda: self._images.vision.render(messages, tools=tools))

    async def encode(self, text: str, names: Sequence[str], *, plain: bool = False) -> NDArray[np.int32]:
        """Return the token ids of a part of a text with images."""
        files = self.files(names)
        ids = await self._images.work(_encode, self._images.vision, text, files, plain)
        if len(names) == 1:
            self._tokens[names[0]] = self._images.vision.count(ids)
        return ids

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def files(self, names: Sequence[str]) -> list[bytes]:
        if unknown := [name for name in names if name not in self._files]:
            raise RequestError(f"this ticket has no image {unknown[0]!r}")
        return [self._files[name] for name in names]

    def tokens_in(self, ids: NDArray[np.int32]) -> int:
        return self._images.vision.count(ids)

    async def check(self, trajectory: Trajectory) -> None:
        """Check that a trajectory has as many image tokens as its images need: else no model can read it."""
        vision = self._images.vision
        expected, whose = self._of_row_tokens, "the row's images"
        if trajectory.images is not None and list(trajectory.images) != list(self.of_row):
            expected, whose = sum([await self._tokens_of(name) for name in trajectory.images]), "its images"
        count = self.tokens_in(trajectory.tokens)
        if count != expected:
            raise EngineError(
                f"a trajectory has {count} image tokens (id {vision.image_token}), and {whose} make "
                f"{expected}: the engine must not sample that token, nor a workflow add it"
            )

    async def _tokens_of(self, name: str) -> int:
        if name not in self._tokens:
            vision = self._images.vision
            ids = await self._images.work(_encode, vision, vision.place, self.files([name]), False)
            self._tokens[name] = vision.count(ids)
        return self._tokens[name]


def _encode_row(
    vision: Vision, row: Row, tools: Sequence[Mapping[str, Any]]
) -> tuple[NDArray[np.int32], Sequence[OpenImage]]:
    tokenizer = vision.of(row)
    return tokenizer.encode_prompt(row["prompt"], tools=tools), tokenizer.images


def _encode(vision: Vision, text: str, files: Sequence[bytes], plain: bool) -> NDArray[np.int32]:
    images = [decode(file) for file in files]
    return (vision.see(text, images) if plain else vision.see_part(text, images)).ids


class ImageFetcher:
    """The images that an inference worker has received; it keeps up to 128 MiB of them."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._files: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0
        self.fetched = Counter[str]()
        """Total number of fetched images, and of their bytes: `images` and `bytes`."""
        self._locks: defaultdict[str, anyio.Lock] = defaultdict(anyio.Lock)
        """Lock of each image that is being fetched, so that two requests for one image fetch it only once."""

    async def get(self, sender: WorkerProcess, digests: Sequence[str]) -> list[bytes]:
        """Return the files with these digests. Raise BusError if the rollout worker does not send one."""
        return [await self._file(sender, digest) for digest in digests]

    async def _file(self, sender: WorkerProcess, digest: str) -> bytes:
        lock = self._locks[digest]
        async with lock:
            file = self._files.get(digest)
            if file is None:
                file = await self._fetch(sender, digest)
                self._keep(digest, file)
            self._files.move_to_end(digest)
        if not lock.statistics().tasks_waiting:
            self._locks.pop(digest, None)
        return file

    async def _fetch(self, sender: WorkerProcess, digest: str) -> bytes:
        file, bus = b"", self._context.bus
        subject = self._context.names.worker("rollout", sender.worker, sender.nonce, "image")
        while True:
            part = await bus.request(subject, AskImage(digest, len(file)), ImagePart, deadline_s=_PART_S)
            file += part.data
            if len(file) >= part.size or not part.data or part.size > MAX_FILE_BYTES:
                break
        if ImageFile(file).digest != digest:
            raise BusError(f"{sender.worker} sent another image than it had named, of {part.size} bytes")
        return file

    def _keep(self, digest: str, file: bytes) -> None:
        self._files[digest] = file
        self._bytes += len(file)
        self.fetched.update(images=1, bytes=len(file))
        while self._bytes > _KEPT_BYTES and len(self._files) > 1:
            _, oldest = self._files.popitem(last=False)
            self._bytes -= len(oldest)
