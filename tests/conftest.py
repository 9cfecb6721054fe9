"""Fixtures shared by all tests: a real nats-server, and a bus on it for any role."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from stretto.bus.client import Bus, connect
from stretto.bus.messages import Subjects
from stretto.bus.server import Bootstrap, NatsServer, lock_run
from stretto.config import BusConfig

RUN = "test-run"


@pytest.fixture
def bus_config() -> BusConfig:
    """Overridden by tests that want another."""
    return BusConfig(grace_s=2.0, max_payload_mb=1)


@pytest.fixture
async def server(tmp_path: Path, bus_config: BusConfig) -> AsyncIterator[NatsServer]:
    """A real server on a free port, under its guard, owned by this process."""
    folder = tmp_path / "bus"
    lock = lock_run(folder)
    running = await NatsServer.start(folder, RUN, bus_config, tmp_path / "logs")
    yield running
    await running.stop()
    lock.close()


OpenBus = Callable[[str], AbstractAsyncContextManager[Bus]]


@pytest.fixture
def open_bus(server: NatsServer, tmp_path: Path) -> OpenBus:
    """`async with open_bus("rollout") as bus`: a bus with the credentials of a role."""
    del server

    def open_as(role: str) -> AbstractAsyncContextManager[Bus]:
        return connect(Bootstrap.read(tmp_path / "bus" / f"{role}.json"), f"st.{RUN}.inbox.{role}")

    return open_as


@pytest.fixture
def names() -> Subjects:
    """Subjects of the test's run."""
    return Subjects(RUN)
