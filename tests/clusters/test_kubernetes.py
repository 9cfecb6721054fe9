"""Runs in a stand-in for Kubernetes, whose pods are processes on this machine (tests/helpers)."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import write_run_file

from cluster_page import Section, filled
from commands import STRETTO
from fake_kubernetes import NODES, ROOT, FakeKubernetes
from stretto.bus.server import free_port
from stretto.cli.audit.audit import audit_run
from stretto.launcher import ROLES, Submission
from stretto_kubernetes import KERNEL, KubernetesConfig, PodTemplate
from stretto_kubernetes.manifests import objects_of
from terminals import Terminal
from waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[FakeKubernetes]:
    """Two nodes, and the claim `runs`. Nothing invalid was posted, and nobody did what he may not."""
    cluster = FakeKubernetes(tmp_path / "cluster")
    (cluster.claims / "runs").mkdir()
    (tmp_path / "mnt").mkdir()
    with cluster.running():
        yield cluster
    assert cluster.invalid == []
    assert cluster.refused == []


class KubernetesRun:
    """A submitted run."""

    def __init__(self, cluster: FakeKubernetes, folder: Path, run_file: Path, *overrides: str) -> None:
        self.cluster = cluster
        self.folder = cluster.claims / "runs" / "first"
        launcher = {
            "image": "stretto",
            "claim": "runs",
            "mount": str(folder / "mnt"),
            "python": sys.executable,
            "port": free_port(),
        }
        command = [
            *STRETTO,
            "run",
            str(run_file),
            f"out={folder}/mnt/first",
            "launcher.use=kubernetes",
            *(f"launcher.{key}={value}" for key, value in launcher.items()),
            "weights=bus",
            *overrides,
        ]
        env = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig)}
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.startswith("Kubernetes job "), done.stdout
        self.said = done.stdout
        self.job = done.stdout.split()[2]

    def pods(self, role: str) -> list[str]:
        """The names of the pods of a role, the oldest first."""
        return [pod["metadata"]["name"] for pod in self.cluster.pods(run=self.job, role=role)]

    def steps(self) -> int:
        path = self.folder / "metrics.jsonl"
        return path.read_text().count('"ledger"') if path.exists() else 0

    def until_step(self, step: int) -> None:
        until(lambda: self.steps() >= step, otherwise=self.text)

    def end(self) -> str:
        return until(lambda: self.cluster.job_state(self.job), otherwise=self.text)

    def text(self) -> str:
        logs = sorted((self.folder / "logs").glob("*.out"))
        outputs = [f"{pod}:\n{self.cluster.output(pod)[-3000:]}" for pod in self.pods(KERNEL)]
        return "\n".join([*outputs, *(f"{log.name}:\n{log.read_text()[-1500:]}" for log in logs)])

    def assert_completed(self, steps: int) -> dict[str, Any]:
        assert self.end() == "Complete", self.text()
        summary = json.loads((self.folder / "summary.json").read_text())
        assert (summary["status"], summary["version"]) == ("completed", steps), self.text()
        assert audit_run(self.folder).status == "clean"
        return summary


def test_the_launcher_in_a_pod(cluster: FakeKubernetes, tmp_path: Path) -> None:
    inside = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-p",
        "no:cacheprovider",
        "--timeout=60",
        "--durations=20",
    ]
    mount, take = tmp_path / "mnt", tmp_path / "take"
    env = [{"name": "MOUNT", "value": str(mount)}, {"name": "TAKE", "value": str(take)}]
    config = KubernetesConfig(
        image="stretto",
        claim="runs",
        mount=str(mount),
        python=sys.executable,
        retries=0,
        templates={KERNEL: PodTemplate(container={"env": env})},
    )
    begin = (*inside, str(ROOT / "tests/clusters/inside_kubernetes.py"))
    submission = Submission(begin=begin, resume=(), folder=str(mount / "first"), jobs=())
    job, *others = objects_of(config, "inside", "research", submission)
    name = job["metadata"]["name"]
    for manifest in (job, *others):
        cluster.create(manifest)

    def output() -> str:
        return "".join(cluster.output(pod["metadata"]["name"]) for pod in cluster.pods(role=KERNEL))

    def state() -> str:
        if take.exists():
            cluster.preempt(take.read_text())
            take.unlink()
        return cluster.job_state(name)

    assert until(state, within_s=300, otherwise=output) == "Complete", output()[-6000:]


@pytest.mark.skipif(
    shutil.which("kubectl") is None,
    reason="needs kubectl: `apt-get install kubernetes-client`, or see k8s.io",
)
def test_the_commands_of_the_page(
    cluster: FakeKubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)  # also in the pods
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    page, file, seen = Section("Kubernetes"), tmp_path / "mine.yaml", tmp_path / "mnt" / "first"
    local = {"launcher.mount": str(tmp_path / "mnt"), "launcher.port": free_port(), "out": str(seen)}
    page.write_run_file(write_run_file(tmp_path), file, {**local, "steps": 5000})
    folder = cluster.claims / "runs" / "first"
    values: dict[str, object] = {"run.yaml": file, "/runs/first": seen}
    text, begin, logs, watch, stop, delete = page.commands

    def said(command: str) -> str:
        done = subprocess.run(
            filled(command, values), capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    objects = said(text)
    assert objects.startswith("apiVersion: batch/v1\nkind: Job\n")
    create = ["kubectl", "create", "--dry-run=client", "--validate=false", "--output=name", "--filename=-"]
    read = subprocess.run(create, input=objects, capture_output=True, text=True, check=False)
    assert "job.batch/test-" in read.stdout, read.stderr
    values["quickstart-1a2b3c"] = said(begin).split()[2]
    job = str(values["quickstart-1a2b3c"])
    until(lambda: "Running" in [pod["status"]["phase"] for pod in cluster.pods(run=job, role=KERNEL)])
    with subprocess.Popen(filled(logs, values), stdout=subprocess.PIPE, text=True) as follow:
        assert follow.stdout is not None
        first = next((line for line in follow.stdout if " step " in line), "")
        assert "step=1" in first
        terminal = Terminal(program=filled(watch, values))
        try:
            terminal.until_it_shows("step ")
            terminal.press("q")
            assert terminal.end() == 0
        finally:
            terminal.close()
        assert "writes a checkpoint" in said(stop)
        assert "interrupted at step" in follow.stdout.read()  # and it ends with the pod
    assert json.loads((folder / "summary.json").read_text())["reason"] == "stretto stop"
    until(lambda: cluster.job_state(job))
    assert said(delete) == f'job.batch "{job}" deleted\n'
    until(lambda: cluster.kinds() == set())


def test_the_quickstart_with_lost_pods(cluster: FakeKubernetes, tmp_path: Path) -> None:
    run = KubernetesRun(
        cluster,
        tmp_path,
        ROOT / "examples/quickstart/run.yaml",
        *("steps=30", "training.threads=1", "inference.threads=1", "inference.replicas=2"),
        *("evaluation=null", "queue.batch_size=8", "samples.keep=none"),
    )
    run.until_step(2)
    [lost] = run.pods("rollout")
    cluster.lose(lost)
    until(lambda: run.pods("rollout") not in ([], [lost]), otherwise=run.text)
    nodes = {pod["spec"]["nodeName"] for pod in cluster.pods(run=run.job, role="inference")}
    assert nodes == set(NODES)
    cluster.preempt(run.pods("inference")[0])
    summary = run.assert_completed(30)
    assert summary["restarts"] == 2
    logs = {path.name: path.read_text() for path in (run.folder / "logs").iterdir()}
    assert "rollout-0 was lost" in logs["rollout-0.out"]
    assert "DeletionByTaintManager" in logs["rollout-0.out"]
    assert "trainer-0.jsonl" in logs
    assert "inference-0.jsonl" not in logs  # it does not see the folder
    assert f'"url":"tls://{run.job}.research.svc:' in (run.folder / "bus" / "inference.json").read_text()
    secrets = [each for each in cluster.posted if each["kind"] == "Secret" and each.get("immutable")]
    assert {each["metadata"]["ownerReferences"][0]["kind"] for each in secrets} == {"Pod"}
    cluster.delete_job(run.job)
    until(lambda: cluster.kinds() == set())


def test_the_workers_of_a_killed_kernel_live_on(cluster: FakeKubernetes, tmp_path: Path) -> None:
    run = KubernetesRun(cluster, tmp_path, write_run_file(tmp_path), "steps=60", "checkpoint.every=10")
    run.until_step(15)
    [first] = run.pods(KERNEL)
    before = {role: run.pods(role) for role in ROLES}
    cluster.kill(first)
    summary = run.assert_completed(60)
    [_, second] = run.pods(KERNEL)
    assert "workers of the former kernel live on" in cluster.output(second)
    assert {role: run.pods(role) for role in ROLES} == before
    assert summary["restarts"] == 0
    assert summary["recoveries"][0]["repeated"] <= 1  # the step under way
    log = (run.folder / "logs" / "trainer-0.out").read_text()
    assert log == cluster.output(before["trainer"][0])  # each line once
    assert all(pod["status"]["phase"] == "Succeeded" for pod in cluster.pods(role="trainer"))


def test_the_workers_of_a_kernel_that_stays_away_end(cluster: FakeKubernetes, tmp_path: Path) -> None:
    """No other kernel starts, and they have waited for `bus.outage_s`."""
    limits = ("launcher.retries=0", "bus.outage_s=5")
    run = KubernetesRun(cluster, tmp_path, write_run_file(tmp_path), "steps=4000", *limits)
    run.until_step(2)
    cluster.kill(run.pods(KERNEL)[0])
    assert run.end() == "Failed"
    phases = ("Succeeded", "Failed")
    until(lambda: all(pod["status"]["phase"] in phases for pod in cluster.pods()), otherwise=run.text)


def test_a_run_whose_job_is_deleted_ends_with_a_checkpoint(cluster: FakeKubernetes, tmp_path: Path) -> None:
    """Also if the workers are those of a former kernel."""
    run = KubernetesRun(cluster, tmp_path, write_run_file(tmp_path), "steps=4000", "checkpoint.every=0")
    run.until_step(2)
    cluster.kill(run.pods(KERNEL)[0])
    until(lambda: len(run.pods(KERNEL)) == 2, otherwise=run.text)
    run.until_step(run.steps() + 2)
    cluster.delete_job(run.job)
    until(lambda: cluster.kinds() == set())
    summary = json.loads((run.folder / "summary.json").read_text())
    assert (summary["status"], summary["problems"]) == ("interrupted", [])
    assert (run.folder / "checkpoints" / f"step-{summary['version']:06d}").is_dir()
    cluster.refused.clear()  # the rights of the kernel were deleted before its pod


def test_a_preempted_kernel_writes_a_checkpoint_and_goes_on(cluster: FakeKubernetes, tmp_path: Path) -> None:
    run = KubernetesRun(cluster, tmp_path, write_run_file(tmp_path), "steps=60", "launcher.retries=0")
    run.until_step(15)
    cluster.preempt(run.pods(KERNEL)[0])
    until(lambda: (run.folder / "summary.json").exists(), otherwise=run.text)
    assert json.loads((run.folder / "summary.json").read_text())["status"] == "interrupted"
    run.assert_completed(60)


def test_a_run_that_was_stopped_does_not_start_again(cluster: FakeKubernetes, tmp_path: Path) -> None:
    run = KubernetesRun(cluster, tmp_path, write_run_file(tmp_path), "steps=400")
    run.until_step(5)
    cluster.kill(run.pods(KERNEL)[0], signal.SIGTERM)
    assert run.end() == "Failed"
    assert json.loads((run.folder / "summary.json").read_text())["status"] == "interrupted"
    assert len(run.pods(KERNEL)) == 1
