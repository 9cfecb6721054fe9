"""Tests that run on a real nats-server, and on the simulated one in virtual time."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import pytest

from bus_testing import running_server
from fixture_types import OpenBus
from patience import patience
from stretto.bus.client import connect
from stretto.bus.server import Bootstrap, restart_server
from stretto.config import BusConfig
from stretto.simulation.loop import SimulatedLoop
from stretto.simulation.patches import World, patched
from stretto.simulation.server import SimulatedServer
from stretto.simulation.transport import SimulatedTransport

RUN = "test-run"


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"nats-server": asyncio.new_event_loop, "simulated": lambda: SimulatedLoop(0)}


@pytest.fixture
async def open_bus(tmp_path: Path) -> AsyncIterator[OpenBus]:
    """`async with open_bus("rollout") as bus`: a bus of a role, on the server that belongs to the loop."""
    loop = asyncio.get_running_loop()
    if isinstance(loop, SimulatedLoop):
        SimulatedServer(loop, 0)
        with patched(World(loop, 0)):
            yield lambda role: connect(Bootstrap(url="nats://simulated:4222", run=RUN, role=role))
    else:
        async with running_server(tmp_path, BusConfig(grace_s=patience(2.0), max_payload_mb=1), RUN):
            yield lambda role: connect(Bootstrap.read(tmp_path / "bus" / f"{role}.json"))


@pytest.fixture
def kill_server(tmp_path: Path) -> Callable[[], None]:
    """Kill the server that belongs to the loop. It starts again by itself, with what it has on disk."""

    def kill() -> None:
        if isinstance(asyncio.get_running_loop(), SimulatedLoop):
            SimulatedTransport.server.go_down(1.0)
        else:
            restart_server(tmp_path / "bus")

    return kill
