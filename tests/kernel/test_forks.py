"""The fork server: what its processes have for themselves, and what happens when it cannot fork."""

import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import psutil
import pytest

from bus_testing import until
from patience import patience
from stretto import Context, LauncherConfig
from stretto.kernel.fleet import forks as forks_module
from stretto.kernel.fleet.forks import ForkServer
from stretto.launcher import Resources, process_environment
from stretto_local import LocalLauncher
from worker_jobs import job

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs pidfds")

SHOW = """\
import json, os, random, sys, numpy
numbers = [random.random(), float(numpy.random.random())]
print(json.dumps([sys.argv, os.getsid(0), os.getppid(), sys.stdin.read(), numbers]), flush=True)
sys.exit(3)
"""
WAITS = "import sys, time\nprint('stretto' in sys.modules, flush=True)\ntime.sleep(100)\n"
THREADED = "import threading, time\nthreading.Thread(target=time.sleep, args=(100,), daemon=True).start()\n"


@pytest.fixture
def folder_with_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    (tmp_path / "waits.py").write_text(WAITS)
    (tmp_path / "threaded.py").write_text(THREADED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.fixture
async def forks(folder_with_modules: None, tmp_path: Path) -> AsyncIterator[ForkServer]:
    del folder_with_modules
    server = ForkServer(tmp_path, ["numpy.random"])
    yield server
    server.close()
    assert not psutil.pid_exists(server.pid)


def command(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, *arguments]


async def test_a_forked_process_is_like_one_that_was_started(forks: ForkServer, tmp_path: Path) -> None:
    logs = [tmp_path / f"{number}.out" for number in range(2)]
    for log in logs:
        process = await forks.fork(command("show", "a", "b"), log, [])
        assert process is not None
        assert await process.wait() == 3  # the exit status
        shown = json.loads(log.read_text())
        assert shown[0][1:] == ["a", "b"]
        assert shown[1] == process.pid  # its own session
        assert shown[2] == os.getpid()  # its parent
        assert shown[3] == ""
    first, second = (json.loads(log.read_text())[4] for log in logs)
    assert first[0] != second[0]  # no random state is shared
    assert first[1] != second[1]


async def test_processes_survive_the_server_and_their_end_is_seen(forks: ForkServer, tmp_path: Path) -> None:
    log = tmp_path / "w.out"
    process = await forks.fork(command("waits", str(tmp_path)), log, [])
    assert process is not None
    await until(log.read_text)
    assert psutil.Process(process.pid).cmdline()[1:4] == ["-m", "waits", str(tmp_path)]
    os.kill(forks.pid, signal.SIGKILL)
    assert await forks.fork(command("show"), tmp_path / "s.out", []) is None
    assert not forks.can_fork(command("show"), process_environment(Resources(), ()))
    assert process.poll() is None
    process.terminate()
    with anyio.fail_after(patience()):
        assert await process.wait() == -signal.SIGTERM


async def test_a_server_that_hangs_hides_no_end_and_is_used_no_more(
    forks: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = [await forks.fork(command("waits"), tmp_path / "w.out", []) for _ in range(2)]
    os.kill(forks.pid, signal.SIGSTOP)
    monkeypatch.setattr(forks_module, "_ANSWER_S", 5.0)  # the first answer waits for the server's start
    with anyio.fail_after(patience()):
        for process in processes:
            assert process is not None
            process.kill()
            assert await process.wait() == -signal.SIGKILL
        assert await forks.fork(command("show"), tmp_path / "s.out", []) is None
        assert not forks.can_fork(command("show"), process_environment(Resources(), ()))


async def test_the_server_refuses_to_fork_once_a_module_has_started_a_thread(
    forks: ForkServer, tmp_path: Path
) -> None:
    assert await forks.fork(command("show"), tmp_path / "s.out", ["threaded"]) is None
    assert not forks.can_fork(command("show"), process_environment(Resources(), ()))


@pytest.mark.usefixtures("folder_with_modules")
async def test_the_local_launcher_forks_only_workers_with_the_servers_environment(tmp_path: Path) -> None:
    forks = ForkServer(tmp_path, [])  # pytest changes the environment for each phase of a test
    launcher = LocalLauncher(LauncherConfig(), Context(run="run", name="run", seed=0))
    launcher.use_forks(forks)
    jobs = [
        job(f"rollout-{threads}", command=command("waits"), folder=tmp_path, threads=threads)
        for threads in (1, 2)
    ]
    handles = await launcher.launch(jobs)
    await until(lambda: all(job.tail(1) for job in jobs))
    assert [job.tail(1) for job in jobs] == ["True", "False"]  # a fork has what the server imported
    for handle in handles:
        await handle.stop(20)
        assert await handle.wait() == -signal.SIGTERM
    forks.close()


async def test_what_a_process_needs_is_imported_before_it_starts(forks: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "needed.py").write_text("import os\nprint('imported in', os.getpid(), flush=True)\n")
    (tmp_path / "uses.py").write_text("import needed\n")
    (tmp_path / "later.py").write_text("print('and later', flush=True)\n")
    process = await forks.fork(command("uses"), tmp_path / "u.out", ["needed", "absent_module"])
    assert process is not None
    assert await process.wait() == 0
    forks.keep_output(tmp_path / "forks.out")
    process = await forks.fork(command("uses"), tmp_path / "u.out", ["later"])
    assert process is not None
    assert await process.wait() == 0
    assert (tmp_path / "u.out").read_text() == ""
    output = (tmp_path / "forks.out").read_text()
    assert f"imported in {forks.pid}" in output
    assert "No module named 'absent_module'" in output
    assert "and later" in output
