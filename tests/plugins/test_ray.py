"""The launcher `ray` without a Ray: its section, the resources of workers, and their placement groups."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from stretto.launcher import Job
from stretto_ray import RayConfig, warden
from stretto_ray.messages import ClusterNode, Start
from stretto_ray.placement import group_of, groups_of, resources_of, shortage
from worker_jobs import job

Refusals = Callable[..., list[str]]


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


def test_a_worker_ends_with_its_actor() -> None:
    """The process that starts a worker for an actor kills the worker's session when the actor is gone."""
    code = (
        "import os, sys, time\nprint(sys.stdin.read(), flush=True)\n"
        "if os.fork(): print(os.getpid(), flush=True)\ntime.sleep(600)"
    )
    process = subprocess.Popen(
        [sys.executable, "-I", warden.__file__, sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        process.stdin.write(len(b"secret").to_bytes(8, "big") + b"secret")
        process.stdin.flush()
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
    process = subprocess.Popen(
        [sys.executable, "-I", warden.__file__, sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
    )
    with process:
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
