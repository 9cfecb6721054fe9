"""The kernel's side of the sample writer, with writers that hang or cannot be started."""

import signal
import subprocess
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import psutil
import pytest

from bus_testing import until
from kernel_setup import make_setup
from stretto.kernel.fleet import sample_writer_supervisor
from stretto.kernel.fleet.sample_writer_supervisor import SampleWriterSupervisor


@asynccontextmanager
async def running(supervisor: SampleWriterSupervisor) -> AsyncGenerator[None]:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(supervisor.run)
        yield
        tasks.cancel_scope.cancel()


def make_supervisor(folder: Path) -> tuple[SampleWriterSupervisor, list[str]]:
    setup = make_setup(folder, steps=1)
    bus = cast(Any, SimpleNamespace(connected=True))  # over which nothing comes
    return SampleWriterSupervisor(setup, bus, 1), setup.facts.problems


async def test_a_writer_that_hangs_is_killed_started_again_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_writer_supervisor, "_FIRST_PAUSE_S", 0.1)
    monkeypatch.setattr(sample_writer_supervisor, "_SILENT_S", 1.0)
    monkeypatch.setattr(sample_writer_supervisor, "_IMPORTS_S", 0.0)
    monkeypatch.setattr(sample_writer_supervisor, "_STOP_S", 0.1)
    started: list[subprocess.Popen[bytes]] = []

    async def start() -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["sleep", "1000"]))
        started[-1].send_signal(signal.SIGSTOP)
        return started[-1]

    supervisor, problems = make_supervisor(tmp_path)
    monkeypatch.setattr(supervisor, "_start", start)
    async with running(supervisor):
        await until(lambda: len(started) == 3)
        # A signal that comes before the stop would end the process.
        await until(lambda: psutil.Process(started[2].pid).status() == psutil.STATUS_STOPPED)
        assert [process.poll() for process in started[:2]] == [-9, -9]
        await supervisor.stop(at_once=False)
        assert started[2].poll() is not None
    hung, missing = problems
    assert hung.startswith("the sample writer hung")
    assert missing.startswith("samples of the newest steps may be missing")


async def test_a_writer_that_cannot_be_started_is_tried_again_and_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    supervisor, problems = make_supervisor(tmp_path)
    output = tmp_path / "logs" / "samples.out"
    output.mkdir()  # cannot be opened as a file
    async with running(supervisor):
        await until(lambda: "is started again" in capfd.readouterr().out)
        await supervisor.stop(at_once=False)
    [problem] = problems
    assert "it cannot be started: [Errno 21] Is a directory" in problem
