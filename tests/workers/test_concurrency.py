"""How many tickets a rollout worker runs at once."""

import anyio
import pytest

from stretto.bus.messages.membership import EngineFigures, Peer, Routes
from stretto.config import Bounds
from stretto.workers.sampling.concurrency import Concurrency


class Case:
    """A worker that always has as many tickets as it may, and one engine."""

    def __init__(self, limit: int | Bounds) -> None:
        self.now = 0.0
        self.concurrency = Concurrency(limit, lambda: self.now)
        self.running = 0
        self.sampled = self.lost = 0
        self.nonce = "engine"
        self.fill()
        self.tell()

    @property
    def limit(self) -> int:
        return self.concurrency.limit

    def fill(self) -> None:
        while self.running < self.limit:
            self.concurrency.begin("train")
            self.running += 1

    def end(self, number: int) -> None:
        for _ in range(number):
            self.concurrency.end("train")
            self.running -= 1

    def tell(self) -> None:
        figures = EngineFigures(0, 0, 64, self.sampled, self.lost)
        self.concurrency.follow(Routes(1, (Peer("inference-0", self.nonce, figures),)))

    def pass_second(self, *, sampled: int = 0, lost: int = 0) -> None:
        self.now += 1
        self.sampled += sampled
        self.lost += lost
        self.tell()

    def look(self, lost: int, *, ended: int = 0) -> int:
        """Let five seconds pass, in which 1,000 tokens are sampled; return the limit afterwards."""
        self.end(ended)
        self.fill()
        for _ in range(5):
            self.pass_second(sampled=200, lost=lost // 5)
        self.fill()
        return self.limit


def test_a_number_stays_that_number() -> None:
    case = Case(24)
    assert [case.look(lost) for lost in (0, 5000, 0)] == [24, 24, 24]


def test_it_doubles_until_tokens_are_lost_and_then_follows_them() -> None:
    case = Case(Bounds(min=4, max=100))
    assert [case.look(0) for _ in range(3)] == [8, 16, 32]
    assert case.look(5000) == 16  # half: where it was before

    # No second decrease before so few run; what is lost meanwhile says nothing about the new limit.
    assert [case.look(5000, ended=4) for _ in range(3)] == [16, 16, 16]
    case.end(4)
    assert case.running == 16
    assert case.look(5000) == 12  # 12.8
    case.end(3)
    case.tell()
    case.end(1)

    assert case.look(900) == 12  # fewer than are sampled, and one ticket has ended: 12.8 + 1/8
    assert case.look(0, ended=5) == 13
    assert case.look(0, ended=13) == 15
    assert case.look(0, ended=30) == 18


def test_it_stays_within_its_bounds() -> None:
    case = Case(Bounds(min=3, max=7))
    assert [case.look(0) for _ in range(3)] == [6, 7, 7]
    for _ in range(12):
        case.end(max(0, case.running - case.limit))
        case.look(9000)
    assert case.limit == 3


def test_it_does_not_grow_where_it_is_not_reached() -> None:
    case = Case(Bounds(min=8, max=64))
    case.end(3)
    for _ in range(20):
        case.pass_second(sampled=100)
    assert case.limit == 16  # it was reached at first


def test_it_does_not_grow_while_engines_sample_nothing() -> None:
    """They start, or are lent to an evaluation: what would be lost is not known."""
    case = Case(Bounds(min=8, max=64))
    for _ in range(20):
        case.pass_second()
    assert case.limit == 8
    assert case.look(0) == 16


def test_single_texts_that_are_lost_do_not_make_it_fall_again_and_again() -> None:
    """Slow tools: few turns in five seconds, and now and then a text is lost, which is long."""
    case = Case(Bounds(min=4, max=64))
    for second in range(3600):
        if second % 4 == 0:
            case.end(1)
            case.fill()
        case.pass_second(sampled=20, lost=4000 * (second % 400 == 399))  # half of what is sampled
    assert case.limit == 64


def test_much_that_is_lost_makes_it_fall_also_after_a_long_calm() -> None:
    case = Case(Bounds(min=4, max=64))
    for _ in range(500):
        case.look(0, ended=5)
    assert case.limit == 64
    looks = 0
    while case.limit == 64:
        case.look(16_000, ended=5)
        looks += 1
    assert looks <= 2


def test_totals_of_another_process_are_no_difference() -> None:
    """An engine that starts again counts from 0; one that joins brings what it lost before."""
    case = Case(Bounds(min=8, max=64))
    case.lost = 10_000
    case.nonce = "another"
    assert case.look(0) == 16


async def test_a_ticket_begins_when_one_has_ended_or_the_limit_has_grown() -> None:
    case = Case(Bounds(min=2, max=8))
    rooms: list[int] = []

    async def wait() -> None:
        rooms.append(await case.concurrency.room("train"))

    assert await case.concurrency.room("eval") == 2  # each purpose has its own number
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        assert rooms == []
        case.end(1)
        await anyio.wait_all_tasks_blocked()
        assert rooms == [1]
        case.fill()
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        for _ in range(5):
            case.pass_second(sampled=1)
        await anyio.wait_all_tasks_blocked()
        assert rooms == [1, 2]
        case.fill()
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        case.concurrency.close()
        await anyio.wait_all_tasks_blocked()
        assert rooms == [1, 2, 0]


def test_bounds_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="min is 9 and max is 8; expected min <= max"):
        Bounds(min=9, max=8)
