"""The launcher `ray` without a Ray: its section, the resources of workers, their placement groups, and
workers that outlive their kernel."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stretto import Context
from stretto.base.former_process import FormerProcess
from stretto.launcher import Job
from stretto_ray import RayConfig, warden
from stretto_ray.launcher import RayLauncher
from stretto_ray.messages import ClusterNode, Start
from stretto_ray.placement import group_of, groups_of, resources_of, shortage
from stretto_ray.sockets import connect
from waiting import until
from worker_jobs import job

Refusals = Callable[..., list[str]]

RAY = """\
# A cluster of one node, whose actors live in the client's process.
import asyncio
from types import SimpleNamespace

from ray import util

class RayError(Exception):
    pass

class Method:
    def __init__(self, method):
        self._method = method

    def remote(self, *arguments):
        return asyncio.ensure_future(self._method(*arguments))

class Actor:
    def __init__(self, actor_class):
        self._actor = actor_class()

    def __getattr__(self, name):
        return Method(getattr(self._actor, name))

def remote(**limits):
    return lambda of: SimpleNamespace(options=lambda **where: SimpleNamespace(remote=lambda: Actor(of)))

exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayError, ActorUnavailableError=RayError)
init = lambda **options: None
kill = lambda actor: None
nodes = lambda: [
    {"NodeID": "1", "NodeName": "here", "NodeManagerAddress": "::1", "Alive": True, "Resources": {}}
]
get_runtime_context = lambda: SimpleNamespace(
    get_accelerator_ids=lambda: {"GPU": []}, get_node_id=lambda: "1"
)
"""
PLACEMENT = """\
from types import SimpleNamespace

placement_group = lambda bundles, strategy: SimpleNamespace(wait=lambda seconds: True)
remove_placement_group = lambda group: None
PlacementGroupSchedulingStrategy = lambda group, bundle: None
"""
KERNEL = """\
import anyio, os, signal, sys
from pathlib import Path
from stretto import Context
from stretto_ray import RayConfig
from stretto_ray.launcher import RayLauncher
from worker_jobs import job

async def main():
    launcher = RayLauncher(RayConfig(), Context(run="r", name="n", seed=0, folder=sys.argv[1]))
    [handle] = await launcher.launch([job("rollout-0", code=sys.argv[2], folder=Path(sys.argv[1]))])
    print(handle.place, launcher.record("rollout-0"), sep="\\n", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

anyio.run(main)
"""
WORKER = """\
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
print("ready", flush=True)
while not pathlib.Path({file!r}).exists():
    time.sleep(0.05)
print("done", flush=True)
"""


def start_of(job: Job, config: RayConfig) -> Start:
    return Start(
        run=0,
        worker=job.worker,
        command=(),
        env={},
        text=b"",
        group=group_of(job),
        unit=job.unit,
        resources=resources_of(config, job),
        log=job.log,
    )


def test_resources_follow_from_the_sections() -> None:
    config = RayConfig(address="auto", resources={"trainer": {"a100": 1}, "critic": {"big": 0.5}})
    assert resources_of(config, job("trainer-0", threads=4, gpus=2, memory_gb=1.5)) == {
        "CPU": 4,
        "GPU": 2,
        "memory": 1.5 * 2**30,
        "a100": 1,
    }
    assert resources_of(config, job("trainer-critic-1", gpus=1, share=0.25)) == {
        "CPU": 1,
        "GPU": 0.25,
        "big": 0.5,
    }
    assert resources_of(config, job("rollout-0")) == {"CPU": 1}
    assert resources_of(RayConfig(), job("rollout-0", memory_gb=5)) == {"CPU": 1}  # this machine's own
    training = RayConfig(address="auto", resources={"training": {"x": 1}, "trainer": {"y": 1}})
    assert resources_of(training, job("trainer-0")) == {"CPU": 1, "x": 1}


def test_each_role_has_a_placement_group() -> None:
    jobs = [job(f"trainer-{rank}", unit=f"training {rank // 2}", gpus=1) for rank in range(4)]
    jobs += [job("trainer-critic-0"), job("trainer-critic-1"), job("inference-0"), job("inference-1")]
    jobs += [job("rollout-0"), job("verifier-0")]
    groups = groups_of(start_of(each, RayConfig()) for each in jobs)
    assert [(group.name, group.strategy) for group in groups] == [
        ("trainer", "PACK"),
        ("trainer-critic", "PACK"),
        ("inference", "SPREAD"),
        ("rollout", "SPREAD"),
        ("verifier", "SPREAD"),
    ]
    assert [(bundle.workers, bundle.resources) for bundle in groups[0].bundles] == [
        (("trainer-0", "trainer-1"), {"CPU": 2, "GPU": 2}),
        (("trainer-2", "trainer-3"), {"CPU": 2, "GPU": 2}),
    ]
    assert [bundle.workers for bundle in groups[1].bundles] == [("trainer-critic-0",), ("trainer-critic-1",)]


def test_a_shortage_names_what_is_missing() -> None:
    nodes = [
        ClusterNode(name=name, address="", own=False, resources={"CPU": 4, "GPU": 1, "memory": 8 * 2**30})
        for name in ("a", "b")
    ]

    def lack(*jobs: Job, **resources: Any) -> str:
        config = RayConfig(address="auto", resources=resources)
        return shortage(groups_of(start_of(each, config) for each in jobs), nodes)

    assert lack(job("trainer-0", gpus=1, threads=4, memory_gb=8), job("rollout-0")) == ""
    assert lack(job("trainer-0", gpus=1, unit="t"), job("trainer-1", gpus=1, unit="t")) == (
        "trainer-0, trainer-1 needs 2 CPUs (`threads`) and 2 GPUs (`gpus`) together on one node; the Ray "
        "cluster has a: 4 CPUs (`threads`) and 1 GPUs (`gpus`), b: 4 CPUs (`threads`) and 1 GPUs (`gpus`)"
    )
    assert "inference-0 needs 1 CPUs (`threads`) and 9 GiB of memory" in lack(job("inference-0", memory_gb=9))
    assert "and 1 x on one node" in lack(job("rollout-0"), rollout={"x": 1})
    assert lack(*(job(f"rollout-{n}", threads=3) for n in range(3))).startswith(
        "the workers need 9 CPUs (`threads`); the Ray cluster has a: 4 CPUs"
    )


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"address": "ray://a:1"}, "is an address for Ray Client"),
        ({"address": "node7"}, "expected HOST:PORT or `auto`; found 'node7'"),
        ({"resources": {"rollout": {"GPU": 1}}}, "'GPU' follows from `gpus`"),
        ({"resources": {"rollout": {"x": 1.5}}}, "fractions below 1 only; found 1.5"),
    ],
)
def test_values_that_cannot_work_are_refused(section: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RayConfig(**section)


def test_the_run_file_is_checked_against_what_ray_can_give(refusals: Refusals) -> None:
    section = {"use": "ray", "resources": {"actor": {"x": 1}}}
    found = "\n".join(refusals(f"launcher={json.dumps(section)}", "training.gpus=2", "training.share=0.5"))
    if "pip install 'stretto[ray]'" in found:
        return  # it says what to install, and looks no further
    assert "launcher.resources.actor: no role or worker group 'actor'; expected trainer" in found
    assert "the cluster that the launcher starts on this machine has no custom resources" in found
    assert "training.share: is 0.5, with 2 GPUs: Ray gives a process whole GPUs, or a part of one" in found


def started_by_warden(code: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", warden.__file__, sys.executable, "-c", code]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0)


def test_a_worker_ends_with_its_actor() -> None:
    """The process that starts a worker for an actor kills the worker's session when the actor is gone."""
    code = (
        "import os, sys, time\nprint(sys.stdin.read(), flush=True)\n"
        "if os.fork(): print(os.getpid(), flush=True)\ntime.sleep(600)"
    )
    with started_by_warden(code) as process:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        process.stdin.write(len(b"secret").to_bytes(8, "big") + b"secret")
        pid = json.loads(process.stdout.readline())["pid"]
        assert process.stderr.readline() == b"secret\n"
        assert process.stderr.readline() == f"{pid}\n".encode()
        process.stdin.close()
        assert json.loads(process.stdout.readline()) == {"status": -signal.SIGKILL}
        assert process.stderr.read() == b""  # the child is gone too: it held the pipe
        assert process.wait() == 0


def test_a_worker_gets_the_signals_of_its_actor() -> None:
    code = (
        "import signal, time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: print('stacks', flush=True))\n"
        "signal.signal(signal.SIGTERM, lambda *_: exit(5))\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(0.1)"
    )
    with started_by_warden(code) as process:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        process.stdin.write(bytes(8))
        assert "pid" in json.loads(process.stdout.readline())
        assert process.stderr.readline() == b"ready\n"
        process.stdin.write(bytes([signal.SIGUSR1]))
        assert process.stderr.readline() == b"stacks\n"
        process.stdin.write(bytes([signal.SIGTERM]))
        assert json.loads(process.stdout.readline()) == {"status": 5}


def test_a_program_that_does_not_exist_is_told() -> None:
    done = subprocess.run(
        [sys.executable, "-I", warden.__file__, "/no/such"], input=bytes(8), capture_output=True, check=True
    )
    assert "No such file" in json.loads(done.stdout)["error"]


# ------------------------------------------------------------------------- workers that outlive their kernel


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's folder, whose name is too long for the address of a socket. Its clients find `RAY`."""
    folder, ray = tmp_path / ("long" * 30), tmp_path / "modules" / "ray"
    (folder / "bus").mkdir(parents=True)
    (ray / "util").mkdir(parents=True)
    (ray / "__init__.py").write_text(RAY)
    (ray / "util" / "__init__.py").write_text(PLACEMENT)
    (ray / "util" / "scheduling_strategies.py").write_text(PLACEMENT)
    helpers = Path(__file__).parent.parent / "helpers"
    monkeypatch.setenv("PYTHONPATH", f"{ray.parent}{os.pathsep}{helpers}")
    return folder


def kill_a_kernel(folder: Path) -> tuple[Job, str, str, FormerProcess]:
    """Return a worker whose kernel has killed itself, with its place, its record, and its client. The worker
    ends when there is a file `end` in the folder."""
    code = WORKER.format(file=str(folder / "end"))
    command = [sys.executable, "-c", KERNEL, str(folder), code]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    place, record = done.stdout.splitlines()
    [path] = (folder / "bus").glob("*.sock")
    connected, pid = connect(path)
    connected.close()
    return job("rollout-0", code=code, folder=folder), place, record, FormerProcess(pid)


def launcher_in(folder: Path, **section: Any) -> RayLauncher:
    return RayLauncher(RayConfig(**section), Context(run="r", name="n", seed=0, folder=str(folder)))


async def test_the_next_kernel_takes_over_the_workers_of_a_killed_one(folder: Path) -> None:
    worker, place, record, client = kill_a_kernel(folder)
    launcher = launcher_in(folder)
    handle = await launcher.adopt(worker, record)
    assert handle is not None
    assert handle.place == place
    assert launcher.record("rollout-0") == record
    assert await launcher.adopt(job("rollout-1"), str(int(record) + 1)) is None
    assert await launcher.adopt(job("rollout-1"), "") is None
    other = job("rollout-1", code="print('beside it')", folder=folder)
    [beside] = await launcher.launch([other])  # by the same client
    assert await beside.wait() == 0
    assert other.tail(1) == "beside it"
    until(lambda: "ready" in worker.tail(1))
    await handle.stop(60)
    assert await handle.wait() == 5
    assert client.poll() is None
    launcher.close()
    assert client.poll() is not None
    assert list((folder / "bus").iterdir()) == []


async def test_a_client_obeys_one_kernel_at_a_time(folder: Path) -> None:
    worker, _, record, client = kill_a_kernel(folder)
    first, second = launcher_in(folder), launcher_in(folder)
    handle = await first.adopt(worker, record)
    assert handle is not None
    assert await second.adopt(worker, record) is None
    second.close()  # which has a client of its own
    assert client.poll() is None
    await handle.stop(0)
    assert await handle.wait() == -signal.SIGKILL
    first.close()


def test_a_client_without_a_kernel_leaves_with_its_last_worker(folder: Path) -> None:
    worker, _, _, client = kill_a_kernel(folder)
    until(lambda: "ready" in worker.tail(1))
    assert client.poll() is None
    (folder / "end").touch()
    until(client.poll)
    assert worker.tail(1) == "done"  # also what it wrote while no kernel was there
    assert list((folder / "bus").iterdir()) == []


async def test_the_client_of_another_cluster_is_left_alone(folder: Path) -> None:
    worker, _, record, former = kill_a_kernel(folder)
    launcher = launcher_in(folder, runtime_env={"env_vars": {"NCCL_DEBUG": "INFO"}})
    assert await launcher.adopt(worker, record) is None
    assert former.poll() is None
    (folder / "end").touch()
    until(former.poll)
    launcher.close()
    assert list((folder / "bus").iterdir()) == []


async def test_workers_end_with_a_client_that_is_killed(folder: Path) -> None:
    worker, place, record, client = kill_a_kernel(folder)
    process = FormerProcess(int(place.split()[-1]))
    client.kill()
    until(process.poll)
    launcher = launcher_in(folder)
    assert await launcher.adopt(worker, record) is None
    launcher.close()
    assert list((folder / "bus").iterdir()) == []  # nor the socket of the killed one
