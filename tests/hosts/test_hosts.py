"""Runs on two hosts (network namespaces, see `hosts.sh`) with a cable that is cut for a while, or for good.

`make test-hosts`; needs root and iproute2.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.conftest import write_run_file

from nats_cluster import LOGIN, login_file
from patience import SOON_S, patience
from stretto.config import BusConfig

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SCRIPT = HERE / "hosts.sh"
SHORT_S, LONG_S = 8.0, 30.0
REFUSED_S = 20.0
"""Processes of lost workers have ended this many seconds after their host is back."""
SETTINGS = (
    *(f"plugins=[{HERE}/hosts_launcher.py]", "weights={use: bus, folder: /dev/shm}"),
    *("inference.replicas=2", "inference.sigma=0", "rollout.processes=2", "verifier.processes=2"),
    *(f"bus.grace_s={BusConfig().grace_s}", "samples.keep=all", "checkpoint.every=10", "steps=200"),
)

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2"),
    pytest.mark.timeout(patience(300)),
]


def hosts(*arguments: str) -> None:
    subprocess.run([SCRIPT, *arguments], check=True)


def processes_on(host: str, module: str = "") -> list[psutil.Process]:
    pids = subprocess.check_output(["ip", "netns", "pids", f"stretto{host}"], text=True).split()
    found: list[psutil.Process] = []
    for pid in map(int, pids):
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if not module or module in process.cmdline():
                found.append(process)
    return found


class RunOnHosts:
    """A run whose kernel is on one of the hosts, where a command of stretto owns it."""

    def __init__(self, folder: Path, host: str, *command: str) -> None:
        self.folder = folder
        self.cut_file = folder.parent / "cut"
        self._output = folder.with_suffix(".out")
        self._program = [SCRIPT, "run", host, sys.executable, "-m", "stretto"]
        with self._output.open("wb") as output:
            whole = [*self._program, *command]
            self.process = subprocess.Popen(whole, stdout=output, stderr=subprocess.STDOUT)

    def text(self) -> str:
        return self._output.read_text()

    def steps(self) -> int:
        file = self.folder / "metrics.jsonl"
        return file.read_text().count('"ledger"') if file.exists() else 0

    def until(self, condition: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + patience()
        while not (value := condition()):
            assert time.monotonic() < deadline, self.text()[-3000:]
            assert self.process.poll() is None, self.text()[-3000:]
            time.sleep(SOON_S)
        return value

    def cut(self) -> None:
        self.cut_file.touch()
        hosts("cut")

    def mend(self) -> None:
        self.cut_file.unlink()
        hosts("mend")

    def complete(self) -> dict[str, Any]:
        assert self.process.wait(patience(200)) == 0, self.text()[-3000:]
        audit = [*self._program, "audit", str(self.folder)]
        done = subprocess.run(audit, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        summary: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        assert summary["ledger"]["trained"] == 4 * summary["version"]
        return summary


Start = Callable[..., RunOnHosts]


@pytest.fixture
def folder() -> Generator[Path]:
    """Two hosts, and a folder that both see: not in /tmp, where each has its own. At the end nothing runs on
    them."""
    hosts("down")
    hosts("up")
    folder = ROOT / "build" / "hosts"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    yield folder
    for host in ("A", "B"):
        for process in processes_on(host):
            with suppress(psutil.NoSuchProcess):
                process.kill()
    hosts("down")


@pytest.fixture
def runs() -> Generator[list[RunOnHosts]]:
    """The runs of a test. Their kernels are killed at its end."""
    runs: list[RunOnHosts] = []
    yield runs
    for run in runs:
        run.process.kill()
        run.process.wait()


@pytest.fixture
def run_on_hosts(folder: Path, runs: list[RunOnHosts]) -> Start:

    def start(*overrides: str, training: str = "training.seconds_per_step=0.25") -> RunOnHosts:
        file, out = write_run_file(folder), folder / "run"
        more = (f"out={out}", f"launcher={{use: hosts, folder: {folder}}}", *SETTINGS, training, *overrides)
        runs.append(RunOnHosts(out, "A", "run", str(file), *more))
        return runs[-1]

    return start


@pytest.fixture
def continue_on_b(runs: list[RunOnHosts]) -> Start:
    """Resume a run on host B with a copy of its folder, as a host has it that shares no disk with A; without
    the files with the given names."""

    def start(run: RunOnHosts, *without: str) -> RunOnHosts:
        copy = run.folder.with_name("copy")
        ignored = shutil.ignore_patterns("*.lock", "processes.json", "logs", *without)
        shutil.copytree(run.folder, copy, ignore=ignored)
        (copy / "logs").mkdir(exist_ok=True)
        runs.append(RunOnHosts(copy, "B", "resume", str(copy), "--trust-plugins"))
        return runs[-1]

    return start


def test_a_host_that_is_cut_off_for_a_moment_loses_nobody(run_on_hosts: Start) -> None:
    run = run_on_hosts()
    run.until(lambda: run.steps() >= 5)
    before = sorted(process.pid for process in processes_on("B", "stretto.workers"))
    assert len(before) == 3
    run.cut()
    time.sleep(SHORT_S)
    run.mend()
    at = run.steps()
    run.until(lambda: run.steps() >= at + 10)
    assert sorted(process.pid for process in processes_on("B", "stretto.workers")) == before
    assert run.complete()["restarts"] == 0
    assert "worker lost" not in run.text()


def test_workers_of_a_host_that_is_cut_off_for_long_are_replaced(run_on_hosts: Start) -> None:
    run = run_on_hosts("steps=400")
    run.until(lambda: run.steps() >= 5)
    former = processes_on("B", "stretto.workers")
    run.cut()
    time.sleep(LONG_S)
    assert all(process.is_running() for process in former), "nobody could end them"
    at = run.until(lambda: run.text().count("worker lost") >= 3 and run.steps())
    run.until(lambda: run.steps() >= at + 5)
    run.mend()
    _, alive = psutil.wait_procs(former, timeout=REFUSED_S)
    assert alive == []
    assert run.complete()["restarts"] >= 3


def test_a_trainer_on_each_host_and_one_host_is_lost_for_good(run_on_hosts: Start) -> None:
    """The ranks meet over gloo between the hosts; afterwards both are on one."""
    ranks = "training={use: fsdp2, processes: 2, threads: 1}"
    run = run_on_hosts("steps=60", f"model={ROOT}/examples/quickstart/model", training=ranks)
    run.until(lambda: run.steps() >= 5)
    assert any("trainer-1" in " ".join(process.cmdline()) for process in processes_on("B", "stretto.workers"))
    run.cut()
    at = run.until(lambda: "trainers replaced" in run.text() and run.steps())
    run.until(lambda: run.steps() >= at + 5)
    summary = run.complete()
    assert [each["lost"] for each in summary["recoveries"]] == ["trainer-1"]


def files_of(folder: Path) -> dict[str, str]:
    """The digest of each file of a run, without those of the bus and those that only copy from there what
    happens."""
    copied = {"logs", "bus", "samples", "status.json"}
    files = (path for path in folder.rglob("*") if path.is_file() and not copied & set(path.parts))
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture
def server_on_b(folder: Path) -> Generator[list[str]]:
    """A nats-server of one's own on host B; the overrides of a run that uses it."""
    settings = {"host": "10.77.0.2", "port": 4333, "jetstream": {"store_dir": str(folder / "store")}}
    settings |= {"max_payload": 8 * 2**20, "authorization": {"users": [LOGIN]}}
    (folder / "own.conf").write_text(json.dumps(settings))
    command = [SCRIPT, "run", "B", Path(sys.executable).with_name("nats-server"), "-c", folder / "own.conf"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
        yield ["bus.url=nats://10.77.0.2:4333", f"bus.credentials={login_file(folder)}"]
        server.kill()


def test_of_two_kernels_the_later_one_owns_the_run(
    run_on_hosts: Start, continue_on_b: Start, server_on_b: list[str], folder: Path
) -> None:
    """Host A is cut off, host B continues the run, and A comes back."""
    checkpoints = folder / "checkpoints"
    run = run_on_hosts(*server_on_b, f"checkpoint.store=file://{checkpoints}", "steps=120")
    run.until(lambda: run.steps() >= 15)
    former = [*processes_on("A", "stretto.workers"), *processes_on("B", "stretto.workers")]
    run.cut()
    at = run.steps()
    continued = continue_on_b(run)
    continued.until(lambda: continued.steps() >= at + 20)
    of_a = files_of(run.folder)
    hosts("mend")
    assert run.process.wait(patience()) != 0
    assert "it heard the beacon of the kernel of lease" in run.text()
    assert files_of(run.folder) == of_a
    _, alive = psutil.wait_procs(former, timeout=REFUSED_S)
    assert alive == []
    summary = continued.complete()
    assert summary["version"] == 120
    assert set(summary["lost"].values()) == {0}
    [store] = checkpoints.iterdir()
    names = sorted(path.name.rpartition("-")[0] for path in store.iterdir())
    assert names == ["step-000110", "step-000120"], "what A had, B has removed"


def test_a_host_that_is_lost_with_the_server_costs_the_steps_since_the_checkpoint(
    run_on_hosts: Start, continue_on_b: Start, folder: Path
) -> None:
    run = run_on_hosts(f"checkpoint.store=file://{folder}/checkpoints", "steps=60")
    run.until(lambda: run.steps() >= 15)
    run.cut()
    for process in processes_on("A"):
        process.kill()
    run.process.wait()
    at = run.steps()
    continued = continue_on_b(run, "bus", "store")
    summary = continued.complete()
    assert summary["version"] == 60
    assert summary["lost"]["steps"] == at - at // 10 * 10
