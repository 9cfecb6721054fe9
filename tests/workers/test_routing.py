"""Which engine a request goes to; and what is in the log when one of them was killed in the middle of it."""

import random
from collections import Counter, deque
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, cast

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fixture_types import Start
from patience import patience
from stretto.bus.client import connect
from stretto.bus.messages.membership import EngineFigures, Peer, Routes
from stretto.bus.messages.subjects import Subjects
from stretto.bus.messages.tickets import TrajectoryBundle, WireTrajectory
from stretto.bus.server import Bootstrap
from stretto.engine import sample_seed
from stretto.workers.sampling.routing import Router


class Kernel:
    """What a pool hears of: routes, at a time of the test's own. And that pool."""

    def __init__(self) -> None:
        self.routes: Routes | None = None
        self.now = 0.0
        self._listeners: list[Any] = []
        self.pool = self.new_pool()

    def on_routes(self, listener: Any) -> None:
        self._listeners.append(listener)

    def tells(self, lent: dict[str, int] | None = None, /, **loads: EngineFigures | None) -> None:
        exact = lent or {}
        named = {f"inference-{name.removeprefix('inference-')}": load for name, load in loads.items()}
        self.sends(*(Peer(worker, "n", load, exact.get(worker)) for worker, load in named.items()))

    def sends(self, *peers: Peer) -> None:
        for listener in self._listeners:
            listener(Routes(1, peers))

    def new_pool(self) -> Router:
        return Router(cast(Any, self), "inference", lambda: self.now)

    async def chosen(self, times: int = 40, affinity: str = "", **how: Any) -> Counter[str]:
        """Who gets each of some calls, one after the other."""
        workers: Counter[str] = Counter()
        for _ in range(times):
            async with self.pool.member(affinity, **how) as peer:
                workers[peer.worker] += 1
        return workers


def load(in_hand: int = 0, *, slots: int = 80, version: int = 0, tokens: int = 0) -> EngineFigures:
    return EngineFigures(version, in_hand, slots, tokens)


def other(worker: str) -> str:
    return "inference-b" if worker == "inference-a" else "inference-a"


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


# ------------------------------------------------------------------------------------- the choice


async def test_calls_of_an_evaluation_go_to_the_workers_lent_to_it_and_no_others_do(kernel: Kernel) -> None:
    kernel.tells({"inference-b": 3}, a=load(), b=load(), c=load())
    assert set(await kernel.chosen()) == {"inference-a", "inference-c"}
    assert set(await kernel.chosen(affinity="s")) <= {"inference-a", "inference-c"}
    assert set(await kernel.chosen(exact_version=3)) == {"inference-b"}
    with anyio.move_on_after(patience(0.05)) as waiting:
        await kernel.chosen(1, exact_version=4)
    assert waiting.cancelled_caught


async def test_calls_leave_silently_when_their_worker_is_lent_or_taken_back(kernel: Kernel) -> None:
    third, fourth = {"inference-a": 3}, {"inference-a": 4}
    for before, after, exact_version in (({}, third, None), (third, {}, 3), (third, fourth, 3)):
        kernel.tells(before, a=load())
        left = False
        with anyio.fail_after(patience()):
            async with kernel.pool.member(exact_version=exact_version):
                kernel.tells(before, a=load(5))  # other figures are no reason to leave
                await anyio.lowlevel.checkpoint()
                left = True
                kernel.tells(after, a=load())
                await anyio.sleep_forever()
        assert left


async def test_a_closed_worker_finishes_its_calls_and_gets_no_new_ones(kernel: Kernel) -> None:
    kernel.sends(Peer("inference-a", "n"))
    with anyio.fail_after(patience()):
        async with kernel.pool.member(affinity="s") as peer:
            kernel.sends(Peer("inference-b", "n"), Peer("inference-a", "n", closed=True))
            await anyio.lowlevel.checkpoint()
            assert peer.worker == "inference-a"
            assert await kernel.chosen() == {"inference-b": 40}
            assert await kernel.chosen(affinity="s") == {"inference-b": 40}
        kernel.sends(Peer("inference-a", "n", closed=True))
        with anyio.move_on_after(patience(0.05)) as waiting:
            await kernel.chosen(1)
        assert waiting.cancelled_caught
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(kernel.chosen, 1)
            await anyio.wait_all_tasks_blocked()
            kernel.sends(Peer("inference-a", "n"))  # it is a candidate again


async def test_calls_leave_a_process_whose_successor_has_its_id(kernel: Kernel) -> None:
    nonces: list[str] = []
    kernel.sends(Peer("inference-a", "first"))
    with anyio.fail_after(patience()):
        while len(nonces) < 2:
            async with kernel.pool.member() as peer:
                nonces.append(peer.nonce)
                kernel.sends(Peer("inference-a", "second"))
                await anyio.sleep(0)
                if peer.nonce == "first":
                    await anyio.sleep_forever()
    assert nonces == ["first", "second"]


async def test_calls_wait_for_a_worker_and_leave_silently_with_it(kernel: Kernel) -> None:
    seen: list[str] = []

    async def call() -> None:
        while True:
            async with kernel.pool.member() as peer:
                seen.append(peer.worker)
                await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call)
        await anyio.wait_all_tasks_blocked()
        assert seen == []
        kernel.tells(a=load())
        await anyio.wait_all_tasks_blocked()
        kernel.tells(b=load())
        await anyio.wait_all_tasks_blocked()
        assert seen == ["inference-a", "inference-b"]
        tasks.cancel_scope.cancel()


async def test_other_rollout_workers_count_and_ones_own_calls_count_once(kernel: Kernel) -> None:
    kernel.tells(a=load(), b=load())
    async with AsyncExitStack() as calls:
        for _ in range(4):  # 2 x 4 samples each
            await calls.enter_async_context(kernel.pool.member(samples=lambda: 4))
        kernel.tells(a=load(8 + 3), b=load(8))  # 3 of a's are somebody else's
        assert await kernel.chosen() == {"inference-b": 40}
        kernel.tells(a=load(8), b=load(8 + 3))
        assert await kernel.chosen() == {"inference-a": 40}


async def test_a_sample_that_is_over_makes_room(kernel: Kernel) -> None:
    kernel.tells(a=load(), b=load())
    async with AsyncExitStack() as calls:
        for worker, samples in (("inference-a", 3), ("inference-b", 2)):
            await calls.enter_async_context(
                kernel.pool.member(samples=lambda n=samples: n, avoid=other(worker))
            )
        assert await kernel.chosen() == {"inference-b": 40}
        kernel.pool.finish_sample("inference-a")
        kernel.pool.finish_sample("inference-a")
        assert await kernel.chosen() == {"inference-a": 40}


async def test_one_that_is_behind_is_taken_only_when_the_other_has_more_to_do(kernel: Kernel) -> None:
    kernel.tells(a=load(40, version=3), b=load(40, version=4))
    assert await kernel.chosen(min_version=4) == {"inference-b": 40}
    assert len(await kernel.chosen(min_version=3)) == 2
    kernel.tells(a=load(40, version=3), b=load(70, version=4))
    assert await kernel.chosen(min_version=4) == {"inference-a": 40}


async def test_one_that_has_work_and_does_nothing_is_passed_over(kernel: Kernel) -> None:
    kernel.tells(a=load(), b=load())
    kernel.now = 1000.0  # idle for long, which is no fault
    kernel.tells(a=load(20, tokens=10), b=load(60, tokens=10))
    kernel.now += 29
    kernel.tells(a=load(30, tokens=10), b=load(60, tokens=900))
    assert await kernel.chosen() == {"inference-a": 40}
    kernel.now += 2
    assert kernel.pool.stuck("inference-a")
    assert not kernel.pool.stuck("inference-b")
    assert await kernel.chosen() == {"inference-b": 40}
    kernel.tells(a=load(30, tokens=11), b=load(60, tokens=900))
    assert await kernel.chosen() == {"inference-a": 40}
    kernel.now += 31  # both stand still: nobody is better off
    assert not kernel.pool.stuck("inference-a")
    assert not kernel.pool.stuck("inference-b")


# --------------------------------------------------------------------------------------- affinity


async def test_a_session_stays_where_it_was_and_moves_only_from_the_overloaded(kernel: Kernel) -> None:
    kernel.tells(a=load(), b=load())
    [home] = await kernel.chosen(affinity="s")
    away = other(home)
    kernel.tells(**{home: load(115), away: load(20)})  # 1.44 <= 1 + 2 * 0.25
    assert await kernel.chosen(affinity="s") == {home: 40}
    assert await kernel.chosen() == {away: 40}
    kernel.tells(**{home: load(130), away: load(20)})
    assert await kernel.chosen(affinity="s") == {away: 40}
    kernel.tells(**{home: load(0), away: load(80)})  # it has moved: its prefix is there now
    assert await kernel.chosen(affinity="s") == {away: 40}


async def test_a_session_forgets_an_engine_that_is_gone(kernel: Kernel) -> None:
    kernel.tells(a=load())
    assert await kernel.chosen(affinity="s") == {"inference-a": 40}
    kernel.tells(b=load())
    assert await kernel.chosen(affinity="s") == {"inference-b": 40}
    kernel.tells(a=load(), b=load(40))
    assert await kernel.chosen(affinity="s") == {"inference-b": 40}


async def test_the_memory_of_sessions_is_bounded(kernel: Kernel) -> None:
    kernel.tells(a=load())
    await kernel.chosen(affinity="first")
    for number in range(20_000):
        await kernel.chosen(1, affinity=f"{number}")
    kernel.tells(a=load(60), b=load())
    assert await kernel.chosen(affinity="19999") == {"inference-a": 40}
    assert await kernel.chosen(affinity="first") == {"inference-b": 40}


# ------------------------------------------------------------------------- under load, in time of its own


TICKS = 200


@dataclass
class Replica:
    """An engine: its slots decode so many tokens a tick each."""

    slots: int
    rate: float
    samples: deque[tuple[list[float], anyio.Event]] = field(default_factory=deque[Any])
    tokens: float = 0.0
    fullest: float = 0.0

    def tick(self) -> None:
        for sample, over in list(self.samples)[: self.slots]:
            self.tokens += min(self.rate, sample[0])
            sample[0] -= self.rate
            if sample[0] <= 0:
                over.set()
        self.samples = deque(each for each in self.samples if each[0][0] > 0)
        self.fullest = max(self.fullest, len(self.samples) / self.slots)

    def load(self) -> EngineFigures:
        return load(len(self.samples), slots=self.slots, tokens=int(self.tokens))


async def simulate(replicas: dict[str, Replica], requests: int, seed: int) -> None:
    """Two rollout workers keep requests of 4 samples under way; figures are a second or two old."""
    lengths = random.Random(seed)
    kernel = Kernel()
    pools = [kernel.new_pool(), kernel.new_pool()]
    kernel.tells(**{name: replica.load() for name, replica in replicas.items()})

    async def ask(pool: Router) -> None:
        while True:
            await one([([lengths.lognormvariate(3, 0.6)], anyio.Event()) for _ in range(4)], pool)

    async def one(samples: list[tuple[list[float], anyio.Event]], pool: Router) -> None:
        async with pool.member(samples=lambda: sum(not over.is_set() for _, over in samples)) as peer:
            replicas[peer.worker].samples.extend(samples)
            async with anyio.create_task_group() as waits:
                for _, over in samples:
                    waits.start_soon(until_over, pool, peer.worker, over)

    async def until_over(pool: Router, worker: str, over: anyio.Event) -> None:
        await over.wait()
        pool.finish_sample(worker)

    async with anyio.create_task_group() as tasks:
        for number in range(requests):
            tasks.start_soon(ask, pools[number % 2])
        figures: dict[str, EngineFigures] = {}
        for tick in range(TICKS):
            for _ in range(10):  # rounds of the event loop, until everybody waits again
                await anyio.lowlevel.checkpoint()
            for replica in replicas.values():
                replica.tick()
            kernel.now += 0.1
            if tick % 10 == 0:
                if figures:
                    kernel.tells(**figures)
                figures = {name: replica.load() for name, replica in replicas.items()}
        tasks.cancel_scope.cancel()


@settings(max_examples=15)
@given(
    sizes=st.lists(st.tuples(st.integers(8, 24), st.sampled_from([1.0, 2.0])), min_size=2, max_size=4),
    seed=st.integers(0, 1000),
)
def test_no_replica_starves_and_none_is_flooded(sizes: list[tuple[int, float]], seed: int) -> None:
    replicas = {f"inference-r{number}": Replica(slots, rate) for number, (slots, rate) in enumerate(sizes)}
    total = sum(replica.slots for replica in replicas.values())
    requests = round(1.5 * total / 4)  # half again as many samples as there are slots
    anyio.run(simulate, replicas, requests, seed)
    for replica in replicas.values():
        at_most = TICKS * replica.slots * replica.rate
        assert replica.tokens > 0.5 * at_most, replicas  # starved
        assert replica.fullest < 3, replicas  # twice what each would have if it were even


# ---------------------------------------------------------------------------------- in a whole run


@pytest.mark.slow
async def test_a_replica_killed_amid_answers_costs_no_token_and_doubles_none(start: Start) -> None:
    """A mock engine's tokens follow from the seed, so every sample in the log can be compared."""
    run = start("inference.replicas=2", "steps=9", "inference.tokens_per_s=4000", "checkpoint.every=0")
    engines: dict[str, str] = {}
    await anyio.to_thread.run_sync(run.until, lambda: run.worker("rollout-0"))
    login = Bootstrap.read(run.folder / "bus" / "kernel.json")
    names = Subjects(login.run)

    async with connect(login) as bus, anyio.create_task_group() as tasks:

        async def compare() -> None:
            log = bus.store.follow(names.log_stream, names.trajectories, TrajectoryBundle, start=1)
            async for _, bundle in log:
                for wire in bundle.trajectories:
                    index = int(wire.id.rsplit("/", 1)[1])
                    assert sampled(wire).tolist() == drawn(1, bundle.ticket, index).tolist(), wire.id
                    engines[wire.id] = wire.engine

        tasks.start_soon(compare)
        await anyio.to_thread.run_sync(run.until_step, 3)
        killed = run.worker("inference-1")
        assert killed is not None
        killed.kill()
        await anyio.to_thread.run_sync(run.until_step, 8)
        tasks.cancel_scope.cancel()
    assert len(engines) >= 8 * 4 * 4
    assert set(engines.values()) == {"inference-0", "inference-1"}
    summary = run.assert_completed(9)
    assert summary["ledger"]["failed"] == 0
    assert summary["restarts"] == 1
    lost = [each for line in run.metrics() for each in line.get("lost", ())]
    assert lost == [{"worker": "inference-1", "how": "killed by signal 9"}]


def sampled(wire: WireTrajectory) -> NDArray[np.int32]:
    return wire.tokens.numpy()[wire.loss_mask.numpy()]


def drawn(seed: int, ticket: int, index: int) -> NDArray[np.int32]:
    """What a mock engine with the settings of `start` answers."""
    random = np.random.default_rng(sample_seed(f"{seed}/train/{ticket}", "1", index))
    length = max(1, round(24 * random.lognormal(-(0.6**2) / 2, 0.6)))
    return random.integers(64, size=min(length, 256), dtype=np.int32)
