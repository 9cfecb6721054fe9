"""The launcher `kubernetes` in the pod of a kernel, in which test_kubernetes.py runs this file."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import anyio
import pytest

from stretto import Context
from stretto.errors import LaunchError
from stretto.launcher import Job
from stretto.testing import LauncherConformance
from stretto_kubernetes import KubernetesConfig
from stretto_kubernetes.pods import KubernetesLauncher
from worker_jobs import job as worker_job

# A launcher has no end of its own: the garbage collector closes the connections of previous tests.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

CONFIG = KubernetesConfig(image="stretto", claim="runs", mount=os.environ["MOUNT"], python=sys.executable)


class TestKubernetes(LauncherConformance):
    """It keeps the promises of launchers."""

    use = "kubernetes"
    options = {"image": "stretto", "claim": "runs", "mount": os.environ["MOUNT"]}
    run = {"out": f"{os.environ['MOUNT']}/run", "weights": "bus"}


def job(folder: Path, worker: str, code: str = "", *, command: tuple[str, ...] = ()) -> Job:
    return worker_job(worker, code=code, command=command, folder=folder)


def launcher() -> KubernetesLauncher:
    return KubernetesLauncher(CONFIG, Context(run="r", name="n", seed=0))


async def test_only_trainers_see_the_claim(tmp_path: Path) -> None:
    Path(os.environ["MOUNT"], "here").touch()
    code = f"import os; print(os.listdir({os.environ['MOUNT']!r}))"
    workers = ("trainer-0", "inference-0", "rollout-0", "verifier-0")
    jobs = [job(tmp_path, worker, code) for worker in workers]
    handles = await launcher().launch(jobs)
    with anyio.fail_after(60):
        assert [await handle.wait() for handle in handles] == [0] * 4
    assert [each.tail(1) for each in jobs] == ["['here']", "[]", "[]", "[]"]


async def test_a_pod_that_is_lost_is_no_good_end(tmp_path: Path) -> None:
    """Not even if the worker leaves in good order when its pod is preempted."""
    code = (
        "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(0)); "
        "print('ready', flush=True); time.sleep(60)"
    )
    worker = job(tmp_path, "rollout-0", code)
    [handle] = await launcher().launch([worker])
    with anyio.fail_after(60):
        while "ready" not in worker.tail(1):
            await anyio.sleep(0.02)
        Path(os.environ["TAKE"]).write_text(handle.place.split()[1])  # the test outside preempts it
        assert await handle.wait() == 1
    assert worker.tail(1).endswith("PreemptionByScheduler: a pod of higher priority needs the room")


async def test_a_pod_that_does_not_start_says_why(tmp_path: Path) -> None:
    lost = job(tmp_path, "rollout-0", command=("/no/such",))
    with pytest.raises(LaunchError, match=r"rollout-0 cannot be started in pod .*: StartError: .*/no/such"):
        await launcher().launch([lost])


async def test_bootstraps_are_files_that_only_the_worker_reads(tmp_path: Path) -> None:
    (tmp_path / "rollout-0.json").write_text(json.dumps({"secret": 1}))
    command = (sys.executable, "-m", "stretto.workers", str(tmp_path / "rollout-0.json"))
    worker = job(tmp_path, "rollout-0", command=command)
    [handle] = await launcher().launch([worker])
    with anyio.fail_after(60):
        assert await handle.wait() != 0  # the file is no bootstrap
    assert "/run/stretto/bootstrap.json is not a bootstrap file" in worker.tail(20)


async def test_a_pod_that_runs_is_adopted(tmp_path: Path) -> None:
    first = launcher()
    worker = job(
        tmp_path, "rollout-0", "import time; print('once', flush=True); time.sleep(3); raise SystemExit(7)"
    )
    await first.launch([worker])
    second = launcher()
    adopted = await second.adopt(worker, first.record("rollout-0"))
    assert adopted is not None
    assert await second.launch([]) == []  # what was not adopted is deleted now
    with anyio.fail_after(60):
        assert await adopted.wait() == 7
    assert second.record("rollout-0") == first.record("rollout-0")
    assert await launcher().adopt(worker, first.record("rollout-0")) is None, "it has ended"
    assert await launcher().adopt(worker, "no-such-pod") is None
    assert await launcher().adopt(worker, "") is None
