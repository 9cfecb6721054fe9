"""How an answer is put together from chunks: in which order they arrive, from whom, and what is done when the
engine at work on it dies, gives it up, or says nothing any more.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import anyio
import numpy as np
import pytest
from anyio.abc import TaskGroup
from numpy.typing import NDArray

from bus_testing import until
from fixture_types import OpenBus
from patience import patience
from stretto.array import Array
from stretto.bus.client import Bus
from stretto.bus.messages.inference import Abort, ChunkBatch, ChunkHead, Confirm, Generate
from stretto.bus.messages.membership import Beacon, EngineFigures, Peer, Routes
from stretto.bus.messages.subjects import Subjects
from stretto.engine import Finish, GenerateRequest, Sampling
from stretto.errors import EngineError
from stretto.workers.sampling.generation import GeneratedSample, Generations, VersionFloor
from stretto.workers.sampling.routing import Router


class Engine:
    """An inference worker that says what the test tells it to."""

    def __init__(self, bus: Bus, names: Subjects, worker: str) -> None:
        self.worker = worker
        self.asked: list[GenerateRequest] = []
        self.aborted: list[str] = []
        self.confirmed: list[str] = []
        self._bus, self._names, self._chunks = bus, names, ""

    async def open(self) -> None:
        subject = partial(self._names.worker, "inference", self.worker, "n")
        await self._bus.subscribe(subject("generate"), Generate, self._generate)
        await self._bus.subscribe(subject("abort"), Abort, self._abort)
        await self._bus.subscribe(subject("confirm"), Confirm, self._confirm)

    def _abort(self, message: Abort) -> None:
        self.aborted.append(message.request)

    def _confirm(self, message: Confirm) -> None:
        self.confirmed.extend(message.requests)

    def _generate(self, message: Generate) -> None:
        self.asked.append(message.request)
        self._chunks = self._names.chunks(message.inbox)

    async def until_asked(self, times: int = 1) -> GenerateRequest:
        await until(lambda: len(self.asked) >= times)
        return self.asked[times - 1]

    async def says(
        self,
        request: str,
        sample: int,
        position: int,
        tokens: Sequence[int],
        finish: Finish = "",
        *,
        version: int = 0,
    ) -> None:
        """A message with one chunk; the logprob of a token t is -t."""
        head = ChunkHead(
            request, sample, position, len(tokens), finish, "no such token" if finish == "error" else ""
        )
        values = np.array(tokens, np.int32)
        columns = (values, -values.astype(np.float32), np.full(len(values), version, np.int32))
        await self._bus.publish(self._chunks, ChunkBatch(self.worker, (head,), *map(Array.of, columns)))


class Case:
    """A rollout worker's requests, two engines, and the kernel that names them."""

    def __init__(self, open_bus: OpenBus, names: Subjects) -> None:
        self.open_bus = open_bus
        self.names = names
        self.deterministic = False
        self.now = 0.0
        self.floor = VersionFloor(0, lambda version: None)
        self.heard: list[tuple[int, int]] = []
        self.result: list[GeneratedSample] | Exception | None = None
        self.engines: dict[str, Engine] = {}
        self._listeners: list[Any] = []
        self._routes_listeners: list[Any] = []

    async def open(self, engine_bus: Bus, bus: Bus, tasks: TaskGroup) -> None:
        for worker in ("inference-a", "inference-b"):
            self.engines[worker] = Engine(engine_bus, self.names, worker)
            await self.engines[worker].open()
        inference = SimpleNamespace(deterministic=self.deterministic)
        context = SimpleNamespace(
            bus=bus,
            names=self.names,
            worker="rollout-0",
            nonce="n",
            routes=None,
            on_beacon=self._listeners.append,
            on_routes=self._routes_listeners.append,
            composed=SimpleNamespace(config=SimpleNamespace(inference=inference)),
        )
        pool = Router(cast(Any, context), "inference", lambda: self.now)
        self._generations = Generations(cast(Any, context), pool, silence_s=patience(0.1))
        await self._generations.open(tasks)

    def there_are(self, **in_hand: int) -> None:
        """The kernel names engines, with what they have in hand."""
        self._in_hand = in_hand
        peers = [
            Peer(f"inference-{worker}", "n", EngineFigures(0, running, 8, 0))
            for worker, running in in_hand.items()
        ]
        for listener in self._routes_listeners:
            listener(Routes(1, tuple(peers)))
        for listener in self._listeners:
            listener(Beacon(1, "running"))

    async def until_asked_again(self, engine: Engine, times: int) -> GenerateRequest:
        """At beacons, which come more often than every second here."""

        def asked() -> bool:
            self.there_are(**self._in_hand)
            return len(engine.asked) >= times

        await until(asked)
        return engine.asked[times - 1]

    async def ask(self, samples: int) -> None:
        request = GenerateRequest("7/1/1", Array.of([1, 2], np.int32), tuple(range(samples)), Sampling(), 0)
        try:
            self.result = await self._generations.run(request, self.floor, on_tokens=self._hear)
        except (EngineError, ValueError) as error:
            self.result = error

    async def has_heard(self, *tokens: tuple[int, int]) -> None:
        """Wait for these (sample, token), in this order and no others."""
        await until(lambda: self.heard == list(tokens))

    async def answered(self) -> list[GeneratedSample]:
        await until(lambda: self.result is not None)
        assert isinstance(self.result, list), self.result
        return self.result

    async def refused(self) -> str:
        await until(lambda: self.result is not None)
        return str(self.result)

    def _hear(self, sample: int, tokens: NDArray[np.int32]) -> None:
        if 666 in tokens:
            raise ValueError("the listener broke")
        self.heard.extend((sample, token) for token in tokens.tolist())


@pytest.fixture
def case(open_bus: OpenBus, names: Subjects) -> Case:
    return Case(open_bus, names)


@asynccontextmanager
async def asking(case: Case, samples: int = 1) -> AsyncGenerator[tuple[Engine, Engine, GenerateRequest]]:
    """Both engines, and a request that has arrived at `a`, the only one that is named so far."""
    async with (
        case.open_bus("inference") as engine_bus,
        case.open_bus("rollout") as bus,
        anyio.create_task_group() as tasks,
    ):
        await case.open(engine_bus, bus, tasks)
        case.there_are(a=0)
        tasks.start_soon(case.ask, samples)
        a, b = case.engines.values()
        yield a, b, await a.until_asked()
        tasks.cancel_scope.cancel()


def parts(sample: GeneratedSample) -> tuple[list[int], list[float], list[int]]:
    return sample.tokens().tolist(), sample.logprobs().tolist(), sample.versions().tolist()


# -------------------------------------------------------------------------------- of one engine


async def test_an_answer_is_put_together_and_what_is_missing_asked_for(case: Case) -> None:
    async with asking(case, 2) as (a, _, request):
        await a.says(request.id, 0, 0, [5, 6])
        await a.says(request.id, 1, 0, [8], "stop")
        await a.says(request.id, 0, 3, [9], "stop")  # [7] was lost
        again = await a.until_asked(2)
        assert (again.id, again.have) == (request.id, (2, -1))
        await a.says(request.id, 0, 1, [6, 7, 9], "length", version=1)  # more than was asked for
        first, second = await case.answered()
        await until(lambda: a.confirmed == [request.id])
    assert parts(first) == ([5, 6, 7, 9], [-5, -6, -7, -9], [0, 0, 1, 1])
    assert parts(second) == ([8], [-8], [0])
    assert (first.finish, second.finish, first.engine) == ("length", "stop", "inference-a")
    await case.has_heard((0, 5), (0, 6), (1, 8), (0, 7), (0, 9))


async def test_a_silent_engine_is_asked_again_and_a_refusal_ends_the_request(case: Case) -> None:
    async with asking(case, 2) as (a, _, request):
        assert (await case.until_asked_again(a, 3)).id == request.id
        await a.says(request.id, 0, 0, [], "error")
        assert await case.refused() == "inference-a: no such token"
        await until(lambda: a.aborted == [request.id])


async def test_a_listener_that_raises_fails_its_own_request(case: Case) -> None:
    async with asking(case) as (a, _, request):
        await a.says(request.id, 0, 0, [666])
        assert await case.refused() == "the listener broke"
        await until(lambda: a.aborted == [request.id])


# ------------------------------------------------------------------------- one engine after another


async def test_an_answer_goes_on_elsewhere_from_what_was_received(case: Case) -> None:
    async with asking(case, 3) as (a, b, request):
        await a.says(request.id, 0, 0, [5, 6])
        await a.says(request.id, 1, 0, [7], "stop")
        await a.says(request.id, 2, 0, [3], version=1)
        await case.has_heard((0, 5), (0, 6), (1, 7), (2, 3))
        case.there_are(b=0)
        taken_over = await b.until_asked()
        assert [begun.numpy().tolist() for begun in taken_over.begun] == [[5, 6], [7], [3]]
        assert taken_over.have == (2, -1, 1)
        await a.says(request.id, 0, 2, [40, 41], "stop")  # from the dead: it does not count
        await b.says(taken_over.id, 0, 2, [8], "stop", version=3)
        await b.says(taken_over.id, 2, 1, [4, 5], "stop", version=3)
        first, second, third = await case.answered()
    assert parts(first) == ([5, 6, 8], [-5, -6, -8], [0, 0, 3])
    assert parts(second) == ([7], [-7], [0])
    assert parts(third) == ([3, 4, 5], [-3, -4, -5], [1, 3, 3])
    assert [first.engine, second.engine] == ["inference-b", "inference-a"]


async def test_an_engine_that_gets_a_request_back_is_not_taken_for_its_former_self(case: Case) -> None:
    async with asking(case) as (a, b, first):
        await a.says(first.id, 0, 0, [5])
        await case.has_heard((0, 5))
        case.there_are(b=0)
        second = await b.until_asked()
        await b.says(second.id, 0, 1, [6])
        await case.has_heard((0, 5), (0, 6))
        case.there_are(a=0)
        third = await a.until_asked(2)
        await a.says(first.id, 0, 1, [70, 71, 72], "stop")
        await a.says(third.id, 0, 2, [7], "stop")
        [sample] = await case.answered()
    assert len({first.id, second.id, third.id}) == 3
    assert sample.tokens().tolist() == [5, 6, 7]


async def test_what_an_engine_gives_up_another_finishes(case: Case) -> None:
    async with asking(case, 2) as (a, b, request):
        await a.says(request.id, 0, 0, [5])
        case.there_are(a=0, b=8)  # busier, but not broken
        await a.says(request.id, 0, 1, [6], "abort")
        taken_over = await b.until_asked()
        assert taken_over.have == (2, 0)
        await b.says(taken_over.id, 0, 2, [7], "stop")
        await b.says(taken_over.id, 1, 0, [8], "stop")
        first, second = await case.answered()
    assert (first.tokens().tolist(), second.tokens().tolist()) == ([5, 6, 7], [8])


async def test_what_every_engine_gives_up_fails(case: Case) -> None:
    async with asking(case) as (a, _, _):
        for times in range(1, 6):
            await a.says((await a.until_asked(times)).id, 0, 0, [], "abort")
        assert await case.refused() == "engines gave the request up 5 times, the last one was inference-a"


async def test_an_engine_that_beats_and_does_nothing_loses_its_requests(case: Case) -> None:
    async with asking(case) as (a, b, request):
        await a.says(request.id, 0, 0, [5])
        case.there_are(a=1, b=0)
        case.now = 29.0
        assert (await case.until_asked_again(a, 5)).id == request.id  # it may only be slow
        case.now = 31.0
        taken_over = await case.until_asked_again(b, 1)
        assert taken_over.have == (1,)
        await b.says(taken_over.id, 0, 1, [6], "stop")
        [sample] = await case.answered()
        await until(lambda: a.aborted == [request.id])
    assert sample.tokens().tolist() == [5, 6]


async def test_a_deterministic_answer_is_repeated_from_its_seed(case: Case) -> None:
    case.deterministic = True
    async with asking(case, 2) as (a, b, request):
        await a.says(request.id, 0, 0, [5, 6])
        await a.says(request.id, 1, 0, [8], "stop")
        await case.has_heard((0, 5), (0, 6), (1, 8))
        case.there_are(b=0)
        taken_over = await b.until_asked()
        assert (taken_over.begun, taken_over.have) == ((), (0, -1))
        await b.says(taken_over.id, 0, 0, [5, 6, 7], "stop", version=1)
        first, second = await case.answered()
    assert parts(first) == ([5, 6, 7], [-5, -6, -7], [1, 1, 1])
    assert second.tokens().tolist() == [8]
    await case.has_heard((0, 5), (0, 6), (1, 8), (0, 7))


# --------------------------------------------------------------------------- the oldest token of a ticket


async def test_the_oldest_token_is_known_when_every_sample_has_begun(case: Case) -> None:
    told: list[int] = []
    case.floor = floor = VersionFloor(12, told.append)
    async with asking(case, 3) as (a, _, request):
        assert request.min_version == 12
        await a.says(request.id, 0, 0, [1, 1], version=14)
        await a.says(request.id, 0, 2, [1], version=13)  # as from another engine, which had not swapped yet
        await a.says(request.id, 1, 0, [1], "stop", version=14)
        await a.says(request.id, 0, 3, [1], "stop", version=14)
        await until(lambda: len(case.heard) == 5)
        assert (floor.version, told) == (12, [])
        await a.says(request.id, 2, 0, [1], "stop", version=15)
        await case.answered()
    assert (floor.version, told) == (13, [13])


def test_turns_and_requests_side_by_side_are_one_ticket() -> None:
    told: list[int] = []
    floor = VersionFloor(12, told.append)
    floor.add_request()
    floor.add_request()
    floor.record_start(15)
    assert told == []
    floor.record_start(13)
    assert (floor.version, told) == (13, [13])
    floor.add_request()
    floor.record_start(16)  # a later turn cannot make the ticket any younger
    assert (floor.version, told) == (13, [13])
