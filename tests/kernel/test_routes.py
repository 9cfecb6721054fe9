"""What a rollout worker is told of the workers that it may call, when engines come, go and are lent."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import anyio

from bus_testing import until
from patience import patience
from stretto.bus.messages.membership import EngineFigures, Heartbeat, Routes
from stretto.bus.messages.subjects import Subjects
from stretto.engine import Load
from stretto.kernel.fleet.fleet import FleetMember
from stretto.kernel.fleet.routes import RouteSender
from stretto.launcher import Role


class Case:
    """A kernel's routes, and what arrives at each rollout worker."""

    def __init__(self) -> None:
        self.members: dict[str, FleetMember] = {}
        self.heard: dict[str, Routes] = {}
        self.messages = 0
        fleet = cast(Any, SimpleNamespace(members=self.members))
        self.sender = RouteSender(cast(Any, self), Subjects("r"), fleet, 7, finish_s=patience(600))

    async def publish(self, subject: str, message: Routes) -> None:
        self.messages += 1
        self.heard[subject.split(".")[-3]] = message

    def add(self, worker: str, **facts: Any) -> None:
        role = cast(Role, worker.partition("-")[0])
        beat = Heartbeat(worker, "n", ready=True, **facts)
        self.members[worker] = FleetMember(worker, role, "n", "here", 0.0, beat, callable=True)
        self.sender.look(self.members[worker])

    def lose(self, worker: str) -> None:
        self.sender.look(self.members.pop(worker))

    def peers(self, rollout: str) -> set[str]:
        return {peer.worker for peer in self.heard[rollout].peers if not peer.closed}

    @asynccontextmanager
    async def sending(self) -> AsyncGenerator[None]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.sender.send_changes)
            yield
            tasks.cancel_scope.cancel()


async def test_a_worker_that_leaves_without_news_is_no_candidate_and_no_error() -> None:
    """While a run ends, the fleet tells nobody who leaves."""
    case = Case()
    async with case.sending():
        for worker in ("rollout-0", "inference-0", "verifier-0"):
            case.add(worker)
        await until(lambda: "rollout-0" in case.heard and len(case.peers("rollout-0")) == 2)
        del case.members["verifier-0"]
        case.sender.look(case.members["rollout-0"])
        case.add("inference-1")
        await until(lambda: case.peers("rollout-0") == {"inference-0", "inference-1"})


async def test_a_rollout_worker_hears_at_once_of_engines_that_come_and_go() -> None:
    case = Case()
    load = Load(3, 5, 2, 8, 100, 1.0, 1, 0.1, 0.1)
    async with case.sending():
        case.add("inference-0", load=load)
        case.add("verifier-0")
        case.add("rollout-0")
        await until(lambda: "rollout-0" in case.heard)
        assert case.heard["rollout-0"].lease_epoch == 7
        assert case.peers("rollout-0") == {"inference-0", "verifier-0"}
        [engine] = [peer for peer in case.heard["rollout-0"].peers if peer.role == "inference"]
        assert engine.figures == EngineFigures(3, 7, 8, 100)
        case.add("inference-1")
        await until(lambda: len(case.peers("rollout-0")) == 3)
        case.lose("inference-0")
        await until(lambda: case.peers("rollout-0") == {"inference-1", "verifier-0"})
        case.members["inference-1"].exact_version = 4
        case.sender.look(case.members["inference-1"])
        await until(lambda: any(peer.exact_version == 4 for peer in case.heard["rollout-0"].peers))
        case.lose("rollout-0")
        case.add("inference-2")
        await anyio.sleep(patience(0.2))
        assert "inference-2" not in case.peers("rollout-0"), "a lost rollout worker is told nothing"


async def test_a_rollout_worker_is_lost_and_joins_again_while_others_get_their_routes() -> None:
    class Joining(Case):
        async def publish(self, subject: str, message: Routes) -> None:
            await super().publish(subject, message)
            if "rollout-1" not in self.heard and self.members["rollout-1"].callable:
                self.lose("rollout-1")
                beat = Heartbeat("rollout-1", "m", ready=False)
                self.members["rollout-1"] = FleetMember("rollout-1", "rollout", "m", "here", 0.0, beat)

    case = Joining()
    case.add("rollout-0")
    case.add("rollout-1")
    async with case.sending():
        await until(lambda: "rollout-0" in case.heard)
        case.add("inference-0")
        await until(lambda: case.peers("rollout-0") == {"inference-0"})
        assert "rollout-1" not in case.heard
        case.add("rollout-1")
        await until(lambda: "rollout-1" in case.heard)


async def test_a_busy_rollout_worker_may_finish_its_calls_at_a_former_candidate() -> None:
    case = Case()
    async with case.sending():
        for number in range(40):
            case.add(f"rollout-{number}", tickets=number % 2)
        for number in range(8):
            case.add(f"inference-{number}")
        await until(lambda: len(case.heard) == 40 and all(len(case.peers(each)) == 8 for each in case.heard))
        for number in range(8, 16):
            case.add(f"inference-{number}")
        await until(lambda: any(peer.closed for each in case.heard.values() for peer in each.peers))
        await anyio.sleep(patience(0.2))
        for number in range(40):
            routes = case.heard[f"rollout-{number}"]
            closed = {peer.worker for peer in routes.peers if peer.closed}
            if number % 2:
                first = {f"inference-{each}" for each in range(8)}
                assert first - closed <= case.peers(f"rollout-{number}"), "a call was cut off"
            else:
                assert not closed
        gone = next(peer.worker for each in case.heard.values() for peer in each.peers if peer.closed)
        case.lose(gone)
        await anyio.sleep(patience(0.2))
        async with anyio.create_task_group() as tasks:
            case.heard.clear()
            tasks.start_soon(case.sender.refresh)
            await until(lambda: len(case.heard) == 40)
            tasks.cancel_scope.cancel()
        assert all(peer.worker != gone for each in case.heard.values() for peer in each.peers)


async def test_an_engine_that_joins_is_told_to_few_of_many_rollout_workers() -> None:
    case = Case()
    for number in range(120):
        case.add(f"rollout-{number}")
    for number in range(360):
        case.add(f"inference-{number}")
    async with case.sending():
        await until(lambda: len(case.heard) == 120)
        assert max(len(each.peers) for each in case.heard.values()) < 30
        case.messages = 0
        case.add("inference-new")
        await until(lambda: any("inference-new" in case.peers(each) for each in case.heard))
        assert case.messages < 20
        for member in list(case.members.values()):
            case.sender.look(member)  # as after a swap: with many rollout workers that can wait a second
        await anyio.sleep(patience(0.2))
        assert case.messages < 20
