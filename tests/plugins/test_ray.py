"""The launcher `ray` without a Ray: its section, the resources of workers, their placement groups, and the
actor of one worker."""

import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import anyio
import psutil
import pytest

from patience import patience
from processes import arguments_of
from stretto.launcher import Job
from stretto_ray import RayConfig
from stretto_ray.actor import WorkerActor
from stretto_ray.placement import ClusterNode, groups_of, resources_of, shortage
from waiting import until
from worker_jobs import job

ENDING = """\
import asyncio, os, sys, types

context = types.SimpleNamespace(get_accelerator_ids=lambda: {"GPU": []}, get_node_id=lambda: "1")
sys.modules["ray"] = types.SimpleNamespace(get_runtime_context=lambda: context)
from stretto_ray.actor import WorkerActor

async def main():
    _, pid = await WorkerActor().start([sys.executable, "-c", "import time; time.sleep(600)"], {}, b"", "")
    print(pid, flush=True)
    sys.stdin.read()
    os._exit(1)

asyncio.run(main())
"""
WORKER = """\
import os, signal, sys, time
print(sys.stdin.read(), os.environ["MINE"], "RAY_MINE" in os.environ, flush=True)
signal.signal(signal.SIGUSR1, lambda *_: print("stacks", flush=True))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
if not (child := os.fork()):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    print(f"child {child} is there", flush=True)
while True:
    time.sleep(0.1)
"""


def test_resources_follow_from_the_sections() -> None:
    config = RayConfig(address="auto", resources={"trainer": {"a100": 1}, "critic": {"big": 0.5}})
    found = resources_of(config, job("trainer-0", threads=4, gpus=2, memory_gb=1.5))
    assert found == {"CPU": 4, "GPU": 2, "memory": 1.5 * 2**30, "a100": 1}
    found = resources_of(config, job("trainer-critic-1", gpus=1, share=0.25))
    assert found == {"CPU": 1, "GPU": 0.25, "big": 0.5}
    assert resources_of(config, job("rollout-0")) == {"CPU": 1}
    assert resources_of(RayConfig(), job("rollout-0", memory_gb=5)) == {"CPU": 1}  # this machine's own
    training = RayConfig(address="auto", resources={"training": {"x": 1}, "trainer": {"y": 1}})
    assert resources_of(training, job("trainer-0")) == {"CPU": 1, "x": 1}


def test_each_role_has_a_placement_group() -> None:
    jobs = [job(f"trainer-{rank}", unit=f"training {rank // 2}", gpus=1) for rank in range(4)]
    jobs += [job("trainer-critic-0"), job("trainer-critic-1"), job("inference-0"), job("inference-1")]
    jobs += [job("rollout-0"), job("verifier-0")]
    groups = groups_of(RayConfig(), jobs)
    assert [(group.name, group.strategy) for group in groups] == [
        *(("trainer", "PACK"), ("trainer-critic", "PACK")),
        *((role, "SPREAD") for role in ("inference", "rollout", "verifier")),
    ]
    assert [(bundle.workers, bundle.resources) for bundle in groups[0].bundles] == [
        (("trainer-0", "trainer-1"), {"CPU": 2, "GPU": 2}),
        (("trainer-2", "trainer-3"), {"CPU": 2, "GPU": 2}),
    ]
    assert [bundle.workers for bundle in groups[1].bundles] == [("trainer-critic-0",), ("trainer-critic-1",)]


def test_a_shortage_names_what_is_missing() -> None:
    nodes = [ClusterNode(name, {"CPU": 4, "GPU": 1, "memory": 8 * 2**30}) for name in ("a", "b")]

    def lack(*jobs: Job, **resources: Any) -> str:
        config = RayConfig(address="auto", resources=resources)
        return shortage(groups_of(config, jobs), nodes)

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


def test_the_run_file_is_checked_against_what_ray_can_give(refusals: Callable[..., list[str]]) -> None:
    section = {"use": "ray", "resources": {"actor": {"x": 1}}}
    found = "\n".join(refusals(f"launcher={json.dumps(section)}", "training.gpus=2", "training.share=0.5"))
    if "pip install 'stretto[ray]'" in found:
        return  # it says what to install, and looks no further
    assert "launcher.resources.actor: no role or worker group 'actor'; expected trainer" in found
    assert "the cluster that the launcher starts on this machine has no custom resources" in found
    assert "training.share: is 0.5, with 2 GPUs: Ray gives a process whole GPUs, or a part of one" in found


@pytest.fixture
async def actor(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[WorkerActor]:
    gpus: dict[str, list[str]] = {"GPU": []}
    context = SimpleNamespace(get_accelerator_ids=lambda: gpus, get_node_id=lambda: "1")
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get_runtime_context=lambda: context))
    monkeypatch.setenv("RAY_MINE", "a login")
    actor = WorkerActor()
    yield actor
    with suppress(AttributeError):  # it has started nothing
        await actor.signal(signal.SIGKILL)


async def read_until(actor: WorkerActor, words: bytes) -> bytes:
    said = b""
    with anyio.fail_after(patience()):
        while words not in said:
            new = await actor.read()
            assert not isinstance(new, int), said
            said += new or b""
    return said


async def test_an_actor_passes_on_output_signals_and_status(actor: WorkerActor) -> None:
    await actor.start([sys.executable, "-c", WORKER], {"MINE": "mine"}, b"secret", "")
    secret, child = (await read_until(actor, b"is there")).splitlines()
    assert secret == b"secret mine False"
    child = psutil.Process(int(child.split()[1]))
    await actor.signal(signal.SIGUSR1)
    await read_until(actor, b"stacks")
    await actor.signal(signal.SIGTERM)
    with anyio.fail_after(patience()):
        assert await actor.read() == 5
    until(lambda: not arguments_of(child))


async def test_an_actor_kills_all_processes_of_a_worker(actor: WorkerActor) -> None:
    await actor.start([sys.executable, "-c", WORKER], {"MINE": ""}, b"", "")
    await read_until(actor, b"is there")
    await actor.signal(signal.SIGKILL)
    with anyio.fail_after(patience()):
        while (said := await actor.read()) != -signal.SIGKILL:
            assert not isinstance(said, int)


async def test_a_program_that_does_not_exist_is_told(actor: WorkerActor) -> None:
    with pytest.raises(FileNotFoundError, match="no program /no/such"):
        await actor.start(["/no/such"], {}, b"", "")


def test_a_worker_ends_with_its_actor() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ENDING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        worker = psutil.Process(int(process.stdout.readline()))
        assert "time.sleep(600)" in " ".join(arguments_of(worker))
    until(lambda: not arguments_of(worker))
