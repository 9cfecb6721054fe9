"""Calls of user code that pause while a service does not answer."""

import anyio
import pytest

from bus_testing import until
from stretto.machine import clock
from stretto.user_code.faults import SampleFault
from stretto.workers.scoring import pause
from stretto.workers.scoring.pause import Pause

GONE = SampleFault("no answer", "infrastructure", "gone")


class Service:
    """Answers with a fault until it is there."""

    def __init__(self, fault: SampleFault = GONE) -> None:
        self.is_there, self.calls, self._fault = False, 0, fault

    async def ask(self) -> str | SampleFault:
        self.calls += 1
        await anyio.lowlevel.checkpoint()
        return "here" if self.is_there else self._fault


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pause, "_FIRST_S", 0.01)
    monkeypatch.setattr(pause, "_LONGEST_S", 0.02)


async def test_calls_pause_and_succeed_when_the_service_is_back() -> None:
    service, calls = Service(), Pause("the reward", 60)
    results: list[str | SampleFault] = []

    async def call() -> None:
        results.append(await calls.call(service.ask))

    async with anyio.create_task_group() as tasks:
        for _ in range(30):
            tasks.start_soon(call)
        await until(lambda: service.calls >= 33)
        assert calls.reason == "no answer"
        assert len(results) == 9, "those before the pause have failed"
        service.is_there = True
    assert results[9:] == ["here"] * 21
    assert (calls.reason, await calls.call(service.ask)) == ("", "here")


async def test_after_the_limit_calls_fail_until_one_succeeds() -> None:
    service, calls = Service(), Pause("the reward", 0.05)
    began = clock.now()
    results = [await calls.call(service.ask) for _ in range(10)]
    assert clock.now() - began >= 0.05
    assert results == [GONE] * 10
    asked = service.calls
    assert await calls.call(service.ask) == GONE
    assert service.calls == asked + 1, "no second pause"
    service.is_there = True
    assert await calls.call(service.ask) == "here"
    service.is_there = False
    assert [await calls.call(service.ask) for _ in range(9)] == [GONE] * 9
    assert not calls.reason


@pytest.mark.parametrize(
    ("limit_s", "fault"), [(0, GONE), (60, SampleFault("reward raised KeyError", "environment", "KeyError"))]
)
async def test_what_raises_does_not_pause(limit_s: float, fault: SampleFault) -> None:
    service, calls = Service(fault), Pause("the reward", limit_s)
    assert [await calls.call(service.ask) for _ in range(30)] == [fault] * 30
    assert service.calls == 30
