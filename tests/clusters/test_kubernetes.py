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
from stretto_kubernetes import KERNEL
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

    def until_step(self, step: int) -> None:
        path = self.folder / "metrics.jsonl"
        until(lambda: path.exists() and path.read_text().count('"ledger"') >= step, otherwise=self.text)

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
    take = tmp_path / "take"
    name, namespace = "inside", "research"
    labels = {"stretto/run": name, "stretto/role": KERNEL}
    fields = {"STRETTO_NAMESPACE": "namespace", "STRETTO_POD": "name", "STRETTO_POD_UID": "uid"}
    env = [
        {"name": "STRETTO_JOB", "value": name},
        {"name": "MOUNT", "value": str(tmp_path / "mnt")},
        {"name": "TAKE", "value": str(take)},
        *(
            {"name": key, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.{path}"}}}
            for key, path in fields.items()
        ),
    ]
    container = {
        "name": KERNEL,
        "image": "stretto",
        "command": [*inside, str(ROOT / "tests/clusters/inside_kubernetes.py")],
        "env": env,
        "volumeMounts": [{"name": "runs", "mountPath": str(tmp_path / "mnt")}],
    }
    claim = {"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}}
    spec = {
        "serviceAccountName": name,
        "containers": [container],
        "volumes": [claim],
        "restartPolicy": "Never",
    }
    for manifest in rights(name, namespace):
        cluster.create(manifest)
    metadata = {"name": name, "namespace": namespace, "labels": labels}
    cluster.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})

    def state() -> dict[str, Any] | None:
        if take.exists():
            cluster.preempt(take.read_text())
            take.unlink()
        pod = cluster.object("Pod", name)
        assert pod is not None
        return pod["status"]["containerStatuses"][0]["state"].get("terminated")

    ended = until(state, within_s=300, otherwise=lambda: cluster.output(name))
    assert ended["exitCode"] == 0, cluster.output(name)[-6000:]


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


def rights(name: str, namespace: str) -> list[dict[str, Any]]:
    """The service account of a kernel, with its role."""
    from stretto.launcher import Submission
    from stretto_kubernetes import KubernetesConfig
    from stretto_kubernetes.manifests import objects_of

    config = KubernetesConfig(image="stretto", claim="runs")
    objects = objects_of(config, name, namespace, Submission(begin=(), resume=(), folder="", jobs=()))
    found = [each for each in objects if each["kind"] in ("ServiceAccount", "Role", "RoleBinding")]
    for each in found:
        each["metadata"]["name"] = name
        for subject in each.get("subjects", ()):
            subject["name"] = name
        if "roleRef" in each:
            each["roleRef"]["name"] = name
    return found


def test_the_quickstart_with_lost_pods(cluster: FakeKubernetes, tmp_path: Path) -> None:
    run = KubernetesRun(
        cluster,
        tmp_path,
        ROOT / "examples/quickstart/run.yaml",
        *("steps=8", "training.threads=1", "inference.threads=1", "inference.replicas=2"),
        *("evaluation=null", "queue.batch_size=8", "samples.keep=none"),
    )
    run.until_step(2)
    [lost] = run.pods("rollout")
    cluster.lose(lost)
    until(lambda: run.pods("rollout") not in ([], [lost]), otherwise=run.text)
    nodes = {pod["spec"]["nodeName"] for pod in cluster.pods(run=run.job, role="inference")}
    assert nodes == set(NODES)
    cluster.preempt(run.pods("inference")[0])
    summary = run.assert_completed(8)
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


def test_a_killed_kernel_starts_again_and_resumes(cluster: FakeKubernetes, tmp_path: Path) -> None:
    run = KubernetesRun(cluster, tmp_path, write_run_file(tmp_path), "steps=60", "checkpoint.every=10")
    run.until_step(15)
    [first] = run.pods(KERNEL)
    left = {name for role in ("rollout", "inference", "trainer", "verifier") for name in run.pods(role)}
    cluster.kill(first)
    run.assert_completed(60)
    assert len(run.pods(KERNEL)) == 2
    assert not left & {pod["metadata"]["name"] for pod in cluster.pods()}  # their place was needed


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
