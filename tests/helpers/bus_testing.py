"""For tests of what runs on the bus: waiting, plain clients, and the kernel's first message to a worker."""

import subprocess
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import anyio
import msgspec
import numpy as np
from nats.aio.client import Client

from patience import SOON_S, patience
from processes import Spawn
from stretto.array import Array
from stretto.bus.connection import NatsClient
from stretto.bus.lock import KernelLock
from stretto.bus.messages.membership import Welcome
from stretto.bus.messages.subjects import Subjects
from stretto.bus.messages.tickets import TrajectoryBundle, WireTrajectory
from stretto.bus.server import NatsServer, lock_run
from stretto.config import BusConfig
from stretto.workers.context import WorkerContext
from stretto.workers.process import HostProcess

T = TypeVar("T")

NO_LOCK = KernelLock("", "", "")


async def one_at_a_time() -> int:
    """The room of a process that takes one message at a time."""
    return 1


async def until(condition: Callable[[], T], within_s: float | None = None) -> T:
    with anyio.fail_after(within_s or patience()):
        while not (value := condition()):
            await anyio.sleep(SOON_S)
        return value


@asynccontextmanager
async def running_server(folder: Path, config: BusConfig, run: str = "r") -> AsyncGenerator[NatsServer]:
    """A server with its files in `folder / "bus"`, for the duration of the block. The lock is ours."""
    with lock_run(folder / "bus"):
        server = await NatsServer.start(folder / "bus", run, config, folder)
        try:
            yield server
        finally:
            await server.stop()


def lock_holder(spawn: Spawn, bus: Path) -> subprocess.Popen[str]:
    """A process that holds the lock of a run, as its kernel does, until it is killed."""
    code = "import sys, time; from pathlib import Path; from stretto.bus.server import lock_run\n"
    code += "lock = lock_run(Path(sys.argv[1])); print('locked', flush=True); time.sleep(600)"
    holder = spawn([sys.executable, "-c", code, bus])
    assert holder.stdout is not None
    assert holder.stdout.readline() == "locked\n"
    return holder


def server_pid(folder: Path) -> int:
    """The nats-server of the bus in `folder / "bus"`; 0 while it writes its number."""
    file = folder / "bus" / "nats.pid"
    return int(file.read_text() or 0) if file.exists() else 0


async def raw_client(folder: Path, role: str, errors: list[Exception] | None = None) -> Client:
    """A plain NATS client with the credentials of a role, which sends whatever a test wants. What the server
    says against it goes into the list."""
    noted = [] if errors is None else errors

    async def note(error: Exception) -> None:
        noted.append(error)

    login = msgspec.json.decode((folder / "bus" / f"{role}.json").read_bytes())
    client = NatsClient()
    await client.connect(
        login["url"],
        user=login["user"],
        password=login["password"],
        inbox_prefix=f"st.{login['run']}.inbox.{role}".encode(),
        error_cb=note,
    )
    return client


def context_of(bus: Any, worker: str, nonce: str = "n", lease_epoch: int = 0) -> WorkerContext:
    """What a worker has after the welcome to such a run."""
    role: Any = worker.partition("-")[0]
    given = welcome("test-run", lease_epoch)
    return WorkerContext(bus, Subjects("test-run"), worker, role, nonce, given, HostProcess())


def welcome(run: str, lease_epoch: int, **sections: Any) -> Welcome:
    """The kernel's welcome to a worker of a small run of the mocks, with further sections."""
    document = {
        "name": "test",
        "steps": 1,
        "algorithm": {"use": "grpo"},
        "dataset": {"use": "jsonl", "path": __file__},
        "training": {"use": "mock"},
        "inference": {"use": "mock"},
        **sections,
    }
    return Welcome(msgspec.msgpack.encode(document), run, "", lease_epoch, 10.0, {}, 300.0, NO_LOCK)


def bundle(size: int) -> TrajectoryBundle:
    tokens = np.arange(size, dtype=np.int32)
    arrays = Array.of(tokens), Array.of(tokens % 2 == 0), Array.of(tokens, np.float32), Array.of(tokens)
    trajectory = WireTrajectory("1/1/0", *arrays, 1.0, {"accuracy": 1.0}, "stop", "inference-0", 1)
    return TrajectoryBundle(1, 1, 0, (trajectory,))
