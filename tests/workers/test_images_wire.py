"""Images go from a rollout worker to an engine's worker once, whole, and under their own names."""

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, cast

import anyio
import pytest

from bus_testing import context_of
from fixture_types import OpenBus
from stretto.bus.messages.inference import AskImage, ImagePart
from stretto.bus.messages.membership import WorkerProcess
from stretto.errors import BusError, Refused
from stretto.models.images import MAX_FILE_BYTES, OpenImage
from stretto.workers.images import ImageFetcher, RolloutImages

ROLLOUT = WorkerProcess("rollout-0", "n")


def image_of(size: int) -> OpenImage:
    """An image whose pixels nobody looks at."""
    return OpenImage(os.urandom(size), cast("Any", None))


@asynccontextmanager
async def ends(open_bus: OpenBus) -> AsyncGenerator[tuple[RolloutImages, ImageFetcher]]:
    async with open_bus("rollout") as rollout, open_bus("inference") as inference:
        images = RolloutImages(context_of(rollout, "rollout-0"), cast("Any", None))
        await images.open()
        yield images, ImageFetcher(context_of(inference, "inference-0"))


async def test_an_image_comes_whole_and_once(open_bus: OpenBus) -> None:
    """Also one of several messages, and for several requests at once."""
    small, large = image_of(1000), image_of(3_000_000)
    async with ends(open_bus) as (images, fetcher):
        with images.ticket() as ticket:
            ticket.add([small.file, large.file])
            async with anyio.create_task_group() as tasks:
                for _ in range(5):
                    tasks.start_soon(fetcher.get, ROLLOUT, [large.digest, small.digest])
        # The rollout worker has them no longer; the engine's worker has.
        assert await fetcher.get(ROLLOUT, [small.digest, large.digest]) == [small.file, large.file]
        assert fetcher.fetched == {"images": 2, "bytes": 3_001_000}


async def test_an_image_is_there_as_long_as_any_ticket_has_it(open_bus: OpenBus) -> None:
    image, other = image_of(10), image_of(10)
    async with ends(open_bus) as (images, fetcher):
        with images.ticket() as ticket:
            ticket.add([image.file, image.file])
            with images.ticket() as second:
                second.add([image.file, other.file])
            assert await fetcher.get(ROLLOUT, [image.digest]) == [image.file]
            with pytest.raises(Refused, match="rollout-0 refused: has no ticket with this image in hand"):
                await fetcher.get(ROLLOUT, [other.digest])


@pytest.mark.parametrize("lie", ["other bytes", "huge", "nothing"])
async def test_a_worker_that_sends_something_else_is_not_believed(open_bus: OpenBus, lie: str) -> None:
    image, asked = image_of(100), 0

    async def answer(message: AskImage) -> ImagePart:
        nonlocal asked
        asked += 1
        if lie == "other bytes":
            return ImagePart(100, os.urandom(100))
        return ImagePart(MAX_FILE_BYTES + 1, bytes(1000) if lie == "huge" else b"")

    async with open_bus("rollout") as rollout, open_bus("inference") as inference:
        context = context_of(rollout, "rollout-0")
        await rollout.serve(context.subject("image"), AskImage, answer, forget=True)
        fetcher = ImageFetcher(context_of(inference, "inference-0"))
        with pytest.raises(BusError, match="rollout-0 sent another image than it had named"):
            await fetcher.get(ROLLOUT, [image.digest])
        assert asked == 1


async def test_old_images_make_room(open_bus: OpenBus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.workers.images._KEPT_BYTES", 250)
    images = [image_of(100) for _ in range(4)]
    names = [image.digest for image in images]
    async with ends(open_bus) as (rollout, fetcher):
        with rollout.ticket() as ticket:
            ticket.add([image.file for image in images])
            await fetcher.get(ROLLOUT, names[:2])
            await fetcher.get(ROLLOUT, [names[0], names[2], names[0], names[3]])
            assert fetcher.fetched["images"] == 4
            await fetcher.get(ROLLOUT, [names[0], names[3]])
            assert fetcher.fetched["images"] == 4
            await fetcher.get(ROLLOUT, [names[1]])
            assert fetcher.fetched["images"] == 5
