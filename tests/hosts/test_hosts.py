"""Runs on two hosts (network namespaces, see `hosts.sh`) with a cable that is cut for a while, or for good.

`make test-hosts`; needs root and iproute2.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from commands import output_of

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SCRIPT = HERE / "hosts.sh"
SHORT_S, LONG_S = 8.0, 30.0
_MOCK = "{use: mock, seconds_per_step: 0.25}"
REFUSED_S = 20.0
"""Processes of lost workers have ended this many seconds after their host is back."""

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2"),
    pytest.mark.timeout(300),
]


def hosts(*arguments: str) -> None:
    """Run `hosts.sh`."""
    subprocess.run([SCRIPT, *arguments], check=True)


class RunOnHosts:
    """A run whose kernel is on host A."""

    def __init__(self, folder: Path, *overrides: str, training: str = _MOCK) -> None:
        self.folder = folder / "run"
        self.cut_file = folder / "cut"
        (folder / "rows.jsonl").write_text(
            "".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(40))
        )
        file = folder / "run.yaml"
        file.write_text(
            textwrap.dedent(
                f"""\
                name: hosts
                plugins: [{HERE}/hosts_launcher.py]
                launcher: {{use: hosts, folder: {folder}}}
                algorithm: {{use: grpo, group_size: 4}}
                training: {training}
                inference: {{use: mock, replicas: 2, tokens_per_s: 20000, slots: 64, mean_tokens: 24}}
                rollout: {{processes: 2}}
                verifier: {{processes: 2}}
                weights: {{use: bus, folder: /dev/shm}}
                reward: exact
                dataset: {{use: jsonl, path: {folder}/rows.jsonl}}
                queue: {{batch_size: 4, max_staleness: 2}}
                checkpoint: {{every: 10}}
                steps: 200
                """
            )
        )
        command = [SCRIPT, "run", "A", sys.executable, "-m", "stretto", "run", file, f"out={self.folder}"]
        with (folder / "out.txt").open("wb") as output:
            self.process = subprocess.Popen([*command, *overrides], stdout=output, stderr=subprocess.STDOUT)
        self._output = folder / "out.txt"

    def text(self) -> str:
        return self._output.read_text()

    def steps(self) -> int:
        """Number of complete steps."""
        file = self.folder / "metrics.jsonl"
        return file.read_text().count('"ledger"') if file.exists() else 0

    def until(self, condition: Callable[[], Any], deadline_s: float = 90) -> Any:
        """Wait until a condition holds, and return its value."""
        deadline = time.monotonic() + deadline_s
        while not (value := condition()):
            assert time.monotonic() < deadline, self.text()[-3000:]
            assert self.process.poll() is None, self.text()[-3000:]
            time.sleep(0.1)
        return value

    def on_b(self) -> list[psutil.Process]:
        """The workers' processes on host B."""
        pids = subprocess.run(
            ["ip", "netns", "pids", "strettoB"], capture_output=True, text=True, check=True
        ).stdout.split()
        found: list[psutil.Process] = []
        for pid in map(int, pids):
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if "stretto.workers" in process.cmdline():
                    found.append(process)
        return found

    def cut(self) -> None:
        """Cut the cable."""
        self.cut_file.touch()
        hosts("cut")

    def mend(self) -> None:
        """Mend the cable."""
        self.cut_file.unlink()
        hosts("mend")

    def complete(self) -> dict[str, Any]:
        """Wait until the run is complete; its summary."""
        assert self.process.wait(200) == 0, self.text()[-3000:]
        assert "error" not in output_of("audit", str(self.folder), cwd=ROOT).lower().replace("errors", "")
        summary: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        assert summary["ledger"]["trained"] == 4 * summary["version"]
        return summary


@pytest.fixture
def run_on_hosts() -> Generator[Callable[..., RunOnHosts]]:
    """Start a run on two hosts. Its folder is not in /tmp: hosts share it."""
    hosts("down")
    hosts("up")
    folder = ROOT / "build" / "hosts"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    runs: list[RunOnHosts] = []

    def start(*overrides: str, training: str = _MOCK) -> RunOnHosts:
        runs.append(RunOnHosts(folder, *overrides, training=training))
        return runs[-1]

    yield start
    for run in runs:
        run.process.kill()
        run.process.wait()
    for host in ("A", "B"):
        pids = subprocess.run(
            ["ip", "netns", "pids", f"stretto{host}"], capture_output=True, text=True, check=True
        ).stdout.split()
        for pid in map(int, pids):
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
    hosts("down")


def test_a_host_that_is_cut_off_for_a_moment_loses_nobody(run_on_hosts: Callable[..., RunOnHosts]) -> None:
    run = run_on_hosts()
    run.until(lambda: run.steps() >= 5)
    before = sorted(process.pid for process in run.on_b())
    assert len(before) == 3
    run.cut()
    time.sleep(SHORT_S)
    run.mend()
    at = run.steps()
    run.until(lambda: run.steps() >= at + 10)
    assert sorted(process.pid for process in run.on_b()) == before
    assert run.complete()["restarts"] == 0
    assert "worker lost" not in run.text()


def test_workers_of_a_host_that_is_cut_off_for_long_are_replaced(
    run_on_hosts: Callable[..., RunOnHosts],
) -> None:
    run = run_on_hosts("steps=400")
    run.until(lambda: run.steps() >= 5)
    former = run.on_b()
    run.cut()
    time.sleep(LONG_S)
    assert all(process.is_running() for process in former), "nobody could end them"
    at = run.until(lambda: run.text().count("worker lost") >= 3 and run.steps())
    run.until(lambda: run.steps() >= at + 5)
    run.mend()
    _, alive = psutil.wait_procs(former, timeout=REFUSED_S)
    assert alive == []
    assert run.complete()["restarts"] >= 3


def test_a_trainer_on_each_host_and_one_host_is_lost_for_good(
    run_on_hosts: Callable[..., RunOnHosts],
) -> None:
    """The ranks meet over gloo between the hosts; afterwards both are on one."""
    ranks = "{use: fsdp2, processes: 2, threads: 1}"
    run = run_on_hosts("steps=60", f"model={ROOT}/examples/quickstart/model", training=ranks)
    run.until(lambda: run.steps() >= 5, 150)
    assert any("trainer-1" in " ".join(process.cmdline()) for process in run.on_b())
    run.cut()
    at = run.until(lambda: "trainers replaced" in run.text() and run.steps(), 150)
    run.until(lambda: run.steps() >= at + 5)
    summary = run.complete()
    assert [each["lost"] for each in summary["recoveries"]] == ["trainer-1"]
