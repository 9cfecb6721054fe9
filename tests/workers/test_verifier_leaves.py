"""A verifier worker that leaves: its calls go to another one, and none of them fails."""

from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest
from anyio.abc import TaskGroup

from bus_testing import context_of, until
from fixture_types import OpenBus
from patience import patience
from stretto.bus.client import Bus
from stretto.bus.messages.scoring import Scored, ScoreSamples
from stretto.bus.messages.subjects import Subjects
from stretto.errors import NoAnswer
from stretto.workers.scoring import verifier
from stretto.workers.scoring.verifier import VerifierWorker


class Children:
    """Children whose answers come when they are closed, and are errors then."""

    def __init__(self) -> None:
        self.calls = 0
        self.busy_s = 0.0
        self._closed = anyio.Event()

    async def close(self) -> None:
        self._closed.set()

    async def score(self, message: ScoreSamples) -> Scored:
        self.calls += 1
        await self._closed.wait()
        raise RuntimeError("this task group is not active")


class Service(SimpleNamespace):
    async def open(self, tasks: TaskGroup) -> None:
        del tasks


def worker_with(children: Children, bus: Bus) -> VerifierWorker:
    worker: Any = VerifierWorker(context_of(bus, "verifier-0"))
    service = Service(children=children, score=children.score)
    worker._services, worker._rewards = [service], {"": service}
    return worker


async def test_a_verifier_that_leaves_refuses_no_call(open_bus: OpenBus, names: Subjects) -> None:
    """Its rollout workers ask another one as soon as they hear that it has left. A refusal would fail their
    tickets."""
    children, left = Children(), anyio.Event()
    async with open_bus("verifier") as own, open_bus("rollout") as rollout:
        worker = worker_with(children, own)

        async def leave() -> None:
            await until(lambda: children.calls)
            tasks.cancel_scope.cancel()

        async def work() -> None:
            nonlocal tasks
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(worker.run, lambda: None)
                tasks.start_soon(leave)
            left.set()

        tasks: Any = None
        async with anyio.create_task_group() as all_tasks:
            all_tasks.start_soon(work)
            subject = names.worker("verifier", "verifier-0", "n", "score")
            asked = ScoreSamples(b"", ("x",), b"")
            for _ in range(2):  # one in hand when it leaves, and one that comes later
                with pytest.raises(NoAnswer):
                    await rollout.request(subject, asked, Scored, deadline_s=patience(0.5))
            assert left.is_set()


async def test_a_verifier_drains_until_its_rollout_workers_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifier, "_ROUTES_S", 0.2)
    children, drained = Children(), anyio.Event()
    worker = worker_with(children, cast("Any", None))

    async def drain() -> None:
        await worker.drain()
        drained.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(drain)
        await anyio.wait_all_tasks_blocked()
        children.calls = 1  # of a rollout worker that does not know it yet
        with anyio.move_on_after(patience(0.4)):
            await drained.wait()
        assert not drained.is_set()
        children.calls = 0
        with anyio.fail_after(patience()):
            await drained.wait()
