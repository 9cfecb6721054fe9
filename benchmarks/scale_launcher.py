"""A launcher for `benchmarks/scale.py`: it starts processes that each simulate many workers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import anyio
import msgspec
from anyio.abc import Process

from stretto import Component, Context, LauncherConfig, Problem, hookimpl
from stretto.component import PositiveFloat, PositiveInt
from stretto.launcher import Job

WORKERS = Path(__file__).with_name("scale_workers.py")


class SimulatedConfig(LauncherConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of this launcher."""

    each: PositiveInt = 2500
    """Workers of one process."""
    slots: PositiveInt = 4
    """Tickets that a simulated rollout worker works on at once."""
    ticket_s: PositiveFloat = 60.0
    """Mean time of a ticket."""


class Orders(msgspec.Struct, frozen=True):
    """What one process simulates."""

    bootstraps: list[str]
    slots: int
    ticket_s: float
    report: str
    """File with the counts so far, written every second."""
    go: str
    """Tickets are taken when this file is there."""


class SimulatedHandle:
    """One simulated worker: it lives as long as its process."""

    def __init__(self, process: Process) -> None:
        self.place = f"pid {process.pid}"
        self._process = process

    async def wait(self) -> int:
        """Wait for the end of the worker's process."""
        return await self._process.wait()

    async def stop(self, grace_s: float) -> None:
        """Do nothing: the process has other workers too. It ends with the kernel's last beacon."""

    async def dump_stacks(self) -> None:
        """Do nothing: the process has many workers."""


class SimulatedLauncher:
    """Starts simulated workers."""

    def __init__(self, config: SimulatedConfig, context: Context) -> None:
        self._config = config
        self._folder = Path(context.folder)

    def check(self, jobs: Sequence[Job]) -> Iterator[Problem]:
        """Find nothing."""
        return iter(())

    async def launch(self, jobs: Sequence[Job]) -> list[SimulatedHandle]:
        """Start the processes of all jobs."""
        handles: list[SimulatedHandle] = []
        for start in range(0, len(jobs), self._config.each):
            part = jobs[start : start + self._config.each]
            orders = Orders(
                [job.command[-1] for job in part],
                self._config.slots,
                self._config.ticket_s,
                str(self._folder / f"counts-{start}.json"),
                str(self._folder / "go"),
            )
            file = self._folder / f"orders-{start}.json"
            file.write_bytes(msgspec.json.encode(orders))
            with (self._folder / "logs" / f"simulated-{start}.out").open("ab") as log:
                process = await anyio.open_process(
                    [sys.executable, str(WORKERS), str(file)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            handles += [SimulatedHandle(process)] * len(part)
        return handles


@hookimpl
def stretto_launcher() -> Iterator[Component[SimulatedConfig]]:
    """The component of this file."""
    yield Component(
        "simulated", SimulatedLauncher, SimulatedConfig, "many simulated workers in few processes"
    )
