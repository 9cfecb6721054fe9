"""The launcher `kubernetes` without a cluster: the objects that it writes, and what it reads of pods."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import kubernetes_validate
import msgspec
import pytest
import yaml
from tests.conftest import write_run_file

from stretto import Context
from stretto.assembly.assembly import Assembly
from stretto.assembly.compose import compose
from stretto.cli.start.checks import faults_and_warnings
from stretto.cli.start.submit import submitted_run
from stretto.errors import ConfigError, LaunchError
from stretto.launcher import Submission
from stretto_kubernetes import KubernetesConfig, PodTemplate
from stretto_kubernetes.cluster import Cluster, context_namespace, model_of
from stretto_kubernetes.manifests import KernelPod, job_name, objects_of, secret_of, worker_pod
from stretto_kubernetes.pods import KubernetesLauncher
from stretto_kubernetes.watching import PodOutput, PodView
from worker_jobs import job as worker_job

CONFIG = KubernetesConfig(image="registry/stretto:1", claim="runs")
KERNEL = KernelPod("first-1a2b3c", "research", "first-1a2b3c-x", "uid-of-the-kernel", "uid-of-the-job")
OVERRIDES = (
    "launcher.use=kubernetes",
    "launcher.image=registry/stretto:1",
    "launcher.claim=runs",
    "weights=bus",
    "out=/runs/first",
)


job = partial(worker_job, env={"OMP_NUM_THREADS": "2"})


def valid(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest, which Kubernetes accepts."""
    kubernetes_validate.validate(manifest, "1.37", strict=True)
    return manifest


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No kubeconfig of the user's is read."""
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "no-kubeconfig"))


def test_a_dry_run_prints_valid_objects(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_run_file(tmp_path)
    assert submitted_run(Assembly(compose(file, OVERRIDES)), file, OVERRIDES, dry_run=True)
    text = capsys.readouterr().out
    objects = [valid(each) for each in yaml.safe_load_all(text)]
    kinds = ["Job", "Service", "Secret", "ServiceAccount", "Role", "RoleBinding"]
    assert [each["kind"] for each in objects] == kinds
    assert {each["metadata"]["name"] for each in objects} == {job_name("test", "/runs/first")}
    assert objects[2]["stringData"] == {"run.yaml": file.read_text()}
    [port] = objects[1]["spec"]["ports"]
    assert port["port"] == 4222
    spec = objects[0]["spec"]["template"]["spec"]
    assert spec["volumes"][0] == {"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}}
    line = spec["containers"][0]["command"][2]
    assert f"exec python -m stretto run /run/stretto/run.yaml {' '.join(OVERRIDES)}" in line
    assert sys.executable not in line
    assert "\n  run.yaml: |\n    name: test\n" in text  # readable


def test_the_kernels_pod_begins_a_run_or_resumes_it(tmp_path: Path) -> None:
    begin, resume = ("echo", "begun", "a b"), ("echo", "resumed")
    folder = tmp_path / "run"
    submission = Submission(begin=begin, resume=resume, folder=str(folder), jobs=())
    kernel, *others = objects_of(CONFIG, "test", "research", submission)
    [container] = valid(kernel)["spec"]["template"]["spec"]["containers"]

    def said() -> str:
        return subprocess.run(container["command"], capture_output=True, text=True, check=True).stdout

    assert said() == "begun a b\n"
    folder.mkdir()
    (folder / "config.yaml").touch()
    assert said() == "resumed\n"
    assert "Secret" not in [each["kind"] for each in others]  # a resume needs no run file


def test_a_service_account_of_the_users_gets_no_role() -> None:
    config = msgspec.structs.replace(CONFIG, service_account="trainer", image_pull_secrets=("registry",))
    submission = Submission(begin=(), resume=(), folder="/runs/first", jobs=())
    objects = objects_of(config, "test", "research", submission)
    assert [valid(each)["kind"] for each in objects] == ["Job", "Service"]
    spec = objects[0]["spec"]["template"]["spec"]
    assert spec["serviceAccountName"] == "trainer"
    assert spec["imagePullSecrets"] == [{"name": "registry"}]


def test_a_run_has_one_job_name() -> None:
    assert job_name("My run_2", "/runs/a") == job_name("My run_2", "/runs/a")
    assert job_name("My run_2", "/runs/a") != job_name("My run_2", "/runs/b")
    assert job_name("My run_2", "/runs/a").startswith("my-run-2-")
    assert job_name("日本", "/runs/a").startswith("run-")
    assert len(job_name("x" * 200, "/runs/a")) < 40  # with a worker's name it is still a name


def test_a_workers_pod_asks_for_its_resources() -> None:
    pod = valid(worker_pod(CONFIG, KERNEL, job("inference-0", threads=4, gpus=2, memory_gb=1.5)))
    [container] = pod["spec"]["containers"]
    expected = {"cpu": "4", "memory": "1536Mi", "nvidia.com/gpu": "2"}
    assert container["resources"] == {"requests": expected, "limits": expected}
    assert {"name": "OMP_NUM_THREADS", "value": "2"} in container["env"]
    assert "CUDA_VISIBLE_DEVICES" not in [each["name"] for each in container["env"]]
    owners = [each["uid"] for each in pod["metadata"]["ownerReferences"]]
    assert owners == ["uid-of-the-job", "uid-of-the-kernel"]
    assert pod["spec"]["automountServiceAccountToken"] is False
    small = valid(worker_pod(CONFIG, KERNEL, job("rollout-0")))
    [container] = small["spec"]["containers"]
    assert {"name": "CUDA_VISIBLE_DEVICES", "value": ""} in container["env"]
    assert container["resources"]["requests"] == {"cpu": "1"}
    again = worker_pod(CONFIG, KERNEL, job("rollout-0"))
    assert again["metadata"]["name"] != small["metadata"]["name"]


def test_ranks_of_a_unit_need_one_node_and_engines_are_spread() -> None:
    rank = valid(worker_pod(CONFIG, KERNEL, job("trainer-critic-1", gpus=1, unit="critic 0")))
    labels = rank["metadata"]["labels"]
    assert (labels["stretto/group"], labels["stretto/unit"]) == ("critic", "critic-0")
    rules = rank["spec"]["affinity"]["podAffinity"]
    [term] = rules["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    assert term["labelSelector"]["matchLabels"].items() <= labels.items()
    engine = valid(worker_pod(CONFIG, KERNEL, job("inference-0", gpus=1)))
    assert list(engine["spec"]["affinity"]) == ["podAntiAffinity"]


def test_only_trainers_mount_the_claim() -> None:
    for role in ("trainer", "inference", "rollout", "verifier"):
        volumes = worker_pod(CONFIG, KERNEL, job(f"{role}-0"))["spec"]["volumes"]
        assert [each["name"] for each in volumes] == (["runs"] if role == "trainer" else [])


def test_a_workers_credentials_are_in_a_secret_of_its_pod() -> None:
    command = (sys.executable, "-m", "stretto.workers", "/runs/first/bus/rollout-0.json")
    pod = valid(worker_pod(CONFIG, KERNEL, job("rollout-0", command=command)))
    secret = valid(secret_of(pod, "uid-of-the-pod", "{}"))
    assert pod["spec"]["containers"][0]["command"] == ["python", *command[1:3], "/run/stretto/bootstrap.json"]
    assert pod["spec"]["volumes"] == [
        {"name": "bootstrap", "secret": {"secretName": secret["metadata"]["name"], "defaultMode": 0o400}}
    ]
    assert secret["metadata"]["ownerReferences"][0]["uid"] == "uid-of-the-pod"
    assert secret["stringData"] == {"bootstrap.json": "{}"}


def test_templates_are_merged_from_the_general_to_the_special() -> None:
    templates = {
        "training": PodTemplate(spec={"nodeSelector": {"gpu": "h100"}}),
        "all": PodTemplate(
            spec={"nodeSelector": {"gpu": "any", "zone": "a"}, "tolerations": [{"operator": "Exists"}]},
            container={"env": [{"name": "A", "value": "1"}], "workingDir": "/app"},
            labels={"team": "rl"},
        ),
        "trainer": PodTemplate(spec={"tolerations": [{"key": "gpu", "operator": "Exists"}]}),
    }
    config = msgspec.structs.replace(CONFIG, templates=templates)
    pod = valid(worker_pod(config, KERNEL, job("trainer-0")))
    assert pod["spec"]["nodeSelector"] == {"gpu": "h100", "zone": "a"}
    assert len(pod["spec"]["tolerations"]) == 2
    container = pod["spec"]["containers"][0]
    assert container["workingDir"] == "/app"
    assert {"name": "OMP_NUM_THREADS", "value": "2"} in container["env"]
    assert {"name": "A", "value": "1"} in container["env"]
    assert pod["metadata"]["labels"].items() >= {"team": "rl", "stretto/role": "trainer"}.items()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["launcher.image="], ["launcher.image"]),
        (["launcher.mount=runs"], ["mount: 'runs' is not an absolute path"]),
        (
            ["launcher.templates={rollout: {container: {image: x}}}"],
            ["templates.rollout.container: 'image' cannot be set"],
        ),
    ],
)
def test_values_that_cannot_be_are_refused(tmp_path: Path, overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        compose(write_run_file(tmp_path), [*OVERRIDES, *overrides])
    assert all(word in str(refused.value) for word in words), str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["out=/elsewhere/run"], "out: is /elsewhere/run; give a folder in the claim, such as /runs/test"),
        (
            ["weights=file"],
            "weights: `file` keeps versions in the memory of one machine, and pods share none",
        ),
        (
            ["launcher.templates={engines: {}}"],
            "no pods 'engines' in this run; expected all, kernel, trainer",
        ),
        (
            ["inference.gpus=1", "inference.share=0.5"],
            "inference-0: `share` is below 1, and a pod gets whole GPUs only",
        ),
        (["launcher.templates={all: {spec: {tolerationz: []}}}"], "tolerationz"),
    ],
)
def test_problems_of_a_run_file_are_found(tmp_path: Path, overrides: list[str], words: str) -> None:
    composed = compose(write_run_file(tmp_path), [*OVERRIDES, *overrides])
    faults, _ = faults_and_warnings(Assembly(composed), starting=False)
    assert words in "\n".join(faults)


def test_a_cluster_that_is_out_of_reach_is_only_a_warning_of_check(tmp_path: Path) -> None:
    faults, warnings = faults_and_warnings(
        Assembly(compose(write_run_file(tmp_path), OVERRIDES)), starting=False
    )
    assert faults == []
    assert any("set KUBECONFIG, or name a context in launcher.context" in each for each in warnings)


def test_the_namespace_is_that_of_the_context(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert context_namespace(None) == "default"
    context = {"name": "lab", "context": {"cluster": "c", "user": "u", "namespace": "research"}}
    content = {
        "current-context": "lab",
        "contexts": [context],
        "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
    }
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(content))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    assert context_namespace(None) == context_namespace("lab") == "research"
    with pytest.raises(LaunchError, match=r"no context 'other' \(launcher\.context\); it has lab"):
        context_namespace("other")
    with pytest.raises(LaunchError, match="Kubernetes does not answer"):
        Cluster.of_context("lab", "research").version()


def test_an_object_with_fields_that_do_not_exist_is_refused() -> None:
    pod = worker_pod(CONFIG, KERNEL, job("rollout-0"))
    model_of(pod)
    pod["spec"]["tolerationz"] = []
    with pytest.raises(LaunchError, match="tolerationz"):
        model_of(pod)


async def test_outside_of_a_pod_no_worker_starts() -> None:
    launcher = KubernetesLauncher(CONFIG, Context(run="r", name="n", seed=0))
    with pytest.raises(LaunchError, match="this process runs in no pod of a run's Job"):
        await launcher.launch([job("rollout-0")])


# ---------------------------------------------------------------------------- the state of a pod


def view(state: dict[str, Any] | None = None, **status: Any) -> PodView:
    statuses = [{"name": "worker", "state": state}] if state else []
    status = {"phase": "Pending", "containerStatuses": statuses, **status}
    return PodView({"metadata": {"name": "x"}, "spec": {"nodeName": "node1"}, "status": status})


def test_exit_codes_above_128_are_signals() -> None:
    assert view({"terminated": {"exitCode": 7}}).status == 7
    assert view({"terminated": {"exitCode": 137}}).status == -9
    assert view({"terminated": {"exitCode": 0}}).status == 0


def test_a_pod_that_is_gone_without_a_status_is_lost() -> None:
    gone = view({"running": {}})
    assert not gone.ended
    gone.update(None)
    assert (gone.ended, gone.status, gone.loss) == (True, 1, "the pod was deleted")


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ({"reason": "Evicted", "message": "the disk is full"}, "Evicted: the disk is full"),
        (
            {
                "conditions": [
                    {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
                ]
            },
            "PreemptionByScheduler",
        ),
    ],
)
def test_a_loss_is_named(status: dict[str, Any], words: str) -> None:
    assert view(phase="Failed", **status).loss.startswith(words)
    assert view(phase="Failed", **status).ended
    assert view({"terminated": {"exitCode": 137, "reason": "OOMKilled"}}).loss.startswith("OOMKilled")
    assert view({"terminated": {"exitCode": 1, "reason": "Error"}}).loss == ""


def test_a_container_that_cannot_start_is_told_from_one_that_waits() -> None:
    pulling = view({"waiting": {"reason": "ErrImagePull", "message": "no such host"}})
    assert (pulling.refusal, pulling.waits_for) == ("", "ErrImagePull: no such host")
    failed = view({"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}})
    assert failed.refusal == "ImagePullBackOff: no such image"
    full = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes"}
    assert view(conditions=[full]).waits_for == "Unschedulable: 0/2 nodes"
    assert view({"terminated": {"exitCode": 128, "reason": "StartError"}}).refusal == "StartError"
    assert view({"terminated": {"exitCode": 1, "reason": "Error"}}).runs


async def test_the_output_of_an_adopted_pod_continues(tmp_path: Path) -> None:
    lines = [b"2026-11-26T14:55:39.123456%d+02:00 line %d\n" % (number, number) for number in range(100, 104)]
    log = tmp_path / "rollout-0.out"

    class Output:
        """A cluster of which a pod's output is known."""

        def __init__(self, lines: list[bytes]) -> None:
            self._lines = lines

        def output(self, pod: str, since_s: int | None) -> list[bytes]:
            del pod, since_s
            return self._lines

    for count, continues in ((2, False), (4, True)):
        cluster: Any = Output(lines[:count])
        output = PodOutput(cluster, "x", log, continues=continues)
        output.end()
        with anyio.fail_after(5):
            await output.complete.wait()
    assert log.read_text().split("\n") == [*(f"line {number}" for number in range(100, 104)), ""]
