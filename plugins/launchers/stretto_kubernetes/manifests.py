"""What the launcher writes to Kubernetes: the objects of a run, and the pod of a worker."""

from __future__ import annotations

import copy
import hashlib
import re
import secrets
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from stretto.errors import LaunchError
from stretto.launcher import Job, Resources, Submission
from stretto_kubernetes import ALL, KERNEL, KubernetesConfig

Manifest = dict[str, Any]

WORKER = "worker"
"""Name of the container of a worker."""
_RUN_LABEL = "stretto/run"
_ROLE_LABEL = "stretto/role"
_WORKER_LABEL = "stretto/worker"
_GROUP_LABEL = "stretto/group"
_UNIT_LABEL = "stretto/unit"
_HOST = "kubernetes.io/hostname"
_SECRETS = "/run/stretto"
"""Folder in which a pod sees the Secret that it gets."""
_RUN_FILE = "run.yaml"
_BOOTSTRAP = "bootstrap.json"
_OWNER_ONLY = 0o400
_UNBUFFERED = {"name": "PYTHONUNBUFFERED", "value": "1"}
"""What a process writes is in its pod's output at once, and stdout and stderr are in order."""
_MAX_RUN_FILE = 2**20
_MISTAKE, _INTERRUPTED = 2, 130
"""Exit statuses of `stretto run` with which the run must not start again by itself."""
_WEIGHT = 100
# What the kernel may do: start, adopt and stop the pods of its workers, read their state and output, and ask
# one for its stacks. Older servers want `get` for a command in a pod, and newer ones `create`.
_RULES: list[Manifest] = [
    {
        "apiGroups": [""],
        "resources": ["pods"],
        "verbs": ["create", "get", "list", "watch", "patch", "delete"],
    },
    {"apiGroups": [""], "resources": ["pods/log"], "verbs": ["get"]},
    {"apiGroups": [""], "resources": ["pods/exec"], "verbs": ["get", "create"]},
    {"apiGroups": [""], "resources": ["secrets"], "verbs": ["create"]},
]


@dataclass(frozen=True)
class KernelPod:
    """The pod that this kernel runs in."""

    job: str
    """Name of the Job, of its service, and of the run in labels."""
    namespace: str
    pod: str
    uid: str
    """Id of the pod."""
    job_uid: str
    """Id of the Job."""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> KernelPod | None:
        """Return the kernel's pod that a process with this environment runs in; None if it runs in none."""
        if "STRETTO_JOB" not in environment:
            return None
        return cls(
            environment["STRETTO_JOB"],
            environment["STRETTO_NAMESPACE"],
            environment["STRETTO_POD"],
            environment["STRETTO_POD_UID"],
            environment["STRETTO_JOB_UID"],
        )

    @property
    def owners(self) -> list[Manifest]:
        """The owners of a worker's pod. Kubernetes deletes the pod when none of them is left: it outlives the
        kernel's pod, and when the Job is deleted, it stays until the kernel has written its last
        checkpoint."""
        return [
            {"apiVersion": "batch/v1", "kind": "Job", "name": self.job, "uid": self.job_uid},
            {"apiVersion": "v1", "kind": "Pod", "name": self.pod, "uid": self.uid},
        ]


def job_name(name: str, folder: str) -> str:
    """Return the name of a run's Job, which is always the same for a run's folder: so a run cannot be
    submitted twice at a time.

    Args:
        name: of the run.
    """
    digest = hashlib.sha256(folder.encode()).hexdigest()[:6]
    return f"{_name(name)[:32].strip('-') or 'run'}-{digest}"


def objects_of(config: KubernetesConfig, name: str, namespace: str, submission: Submission) -> list[Manifest]:
    """Return the objects of a run. The first is the Job, to which the others belong.

    Args:
        name: of the run.

    Raises:
        LaunchError: if the run file is larger than a Secret can be.
    """
    job = job_name(name, submission.folder)

    def described(kind: str, version: str, **content: Any) -> Manifest:
        metadata = {"name": job, "namespace": namespace, "labels": _labels(job)}
        return {"apiVersion": version, "kind": kind, "metadata": metadata, **content}

    policy = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {
            "action": "FailJob",
            "onExitCodes": {
                "containerName": KERNEL,
                "operator": "In",
                "values": [_MISTAKE, _INTERRUPTED],
            },
        },
    ]
    spec = {
        "backoffLimit": config.retries,
        "podFailurePolicy": {"rules": policy},
        "ttlSecondsAfterFinished": config.keep_s,
        "template": _kernel_pod(config, job, submission),
    }
    service = {
        "selector": {_RUN_LABEL: job, _ROLE_LABEL: KERNEL},
        "ports": [{"name": "bus", "port": config.port, "targetPort": config.port, "protocol": "TCP"}],
        "publishNotReadyAddresses": True,  # a kernel that writes its last checkpoint still needs its workers
    }
    objects = [
        described("Job", "batch/v1", spec=spec),
        described("Service", "v1", spec=service),
    ]
    if submission.run_file:
        text = Path(submission.run_file).read_text()
        if len(text.encode()) > _MAX_RUN_FILE:
            raise LaunchError(
                f"{submission.run_file} has more than 1 MiB, which a Secret cannot hold; put long lists into "
                "files of their own"
            )
        objects.append(described("Secret", "v1", type="Opaque", stringData={_RUN_FILE: text}))
    if config.service_account is None:
        group = "rbac.authorization.k8s.io"
        objects += [
            described("ServiceAccount", "v1"),
            described("Role", f"{group}/v1", rules=copy.deepcopy(_RULES)),
            described(
                "RoleBinding",
                f"{group}/v1",
                roleRef={"apiGroup": group, "kind": "Role", "name": job},
                subjects=[{"kind": "ServiceAccount", "name": job, "namespace": namespace}],
            ),
        ]
    return objects


def worker_pod(config: KubernetesConfig, kernel: KernelPod, job: Job) -> Manifest:
    """Return the pod of a worker. Its name is new in each call. Its credentials are in the Secret of the same
    name."""
    name = f"{kernel.job}-{_name(job.worker)}-{secrets.token_hex(3)}"
    command = list(_with_python(config, job.command))
    env = [_UNBUFFERED, *({"name": key, "value": value} for key, value in job.env.items())]
    if not job.resources.gpus:  # an image may ask for all GPUs of its node
        env.append({"name": "CUDA_VISIBLE_DEVICES", "value": ""})
    container: Manifest = {
        "name": WORKER,
        "image": config.image,
        "env": env,
        "resources": _resources(job.resources),
        "volumeMounts": [],
    }
    spec = _spec(config, container)
    spec["automountServiceAccountToken"] = False  # workers ask Kubernetes for nothing
    spec["affinity"] = _affinity(kernel.job, job)
    if bootstrap_of(job) is not None:
        command[-1] = f"{_SECRETS}/{_BOOTSTRAP}"
        secret = {"secretName": name, "defaultMode": _OWNER_ONLY}
        _mount(spec, "bootstrap", {"secret": secret}, _SECRETS, read_only=True)
    container["command"] = command
    if job.role == "trainer":
        _mount_claim(spec, config)
    labels = {
        **_labels(kernel.job),
        _ROLE_LABEL: job.role,
        _WORKER_LABEL: _label(job.worker),
        _GROUP_LABEL: _label(job.group),
        **({_UNIT_LABEL: _label(job.unit)} if job.unit else {}),
    }
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": kernel.namespace,
            "labels": labels,
            "ownerReferences": kernel.owners,
        },
        "spec": spec,
    }
    return _overlaid(pod, config, (ALL, job.role, job.group))


def secret_of(pod: Manifest, uid: str, bootstrap: str) -> Manifest:
    """Return the Secret with a worker's credentials. It belongs to the worker's pod, and is deleted with it.

    Args:
        uid: the pod's id.
        bootstrap: text of the worker's bootstrap file.
    """
    metadata = pod["metadata"]
    owner = {"apiVersion": "v1", "kind": "Pod", "name": metadata["name"], "uid": uid}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "labels": metadata["labels"],
            "ownerReferences": [owner],
        },
        "type": "Opaque",
        "immutable": True,
        "stringData": {_BOOTSTRAP: bootstrap},
    }


def workers_of(run: str) -> str:
    """Return what selects the workers' pods of a run: the pods with these labels.

    Args:
        run: name of its Job.
    """
    return f"{_RUN_LABEL}={run},{_WORKER_LABEL}"


def bootstrap_of(job: Job) -> str | None:
    """Return the path of a worker's bootstrap file; None if its command has none."""
    return job.command[-1] if job.command[1:3] == ("-m", "stretto.workers") else None


# ------------------------------------------------------------------------------------------ private


def _kernel_pod(config: KubernetesConfig, job: str, submission: Submission) -> Manifest:
    def command(words: Sequence[str]) -> str:
        here = f"{_SECRETS}/{_RUN_FILE}"
        return shlex.join(
            here if word == submission.run_file else word for word in _with_python(config, words)
        )

    present = shlex.quote(f"{submission.folder}/config.yaml")
    line = (
        f"if [ -e {present} ]; then exec {command(submission.resume)}; "
        f"else exec {command(submission.begin)}; fi"
    )
    fields = {
        "STRETTO_NAMESPACE": "metadata.namespace",
        "STRETTO_POD": "metadata.name",
        "STRETTO_POD_UID": "metadata.uid",
        "STRETTO_JOB_UID": "metadata.labels['batch.kubernetes.io/controller-uid']",
    }
    container: Manifest = {
        "name": KERNEL,
        "image": config.image,
        "command": ["/bin/sh", "-c", line],
        "env": [
            _UNBUFFERED,
            {"name": "STRETTO_JOB", "value": job},
            *({"name": key, "valueFrom": {"fieldRef": {"fieldPath": path}}} for key, path in fields.items()),
        ],
        "ports": [{"name": "bus", "containerPort": config.port}],
        "resources": _resources(config.kernel),
        "volumeMounts": [],
    }
    spec = _spec(config, container)
    spec |= {
        "serviceAccountName": config.service_account or job,
        "terminationGracePeriodSeconds": config.stop_s,
    }
    _mount_claim(spec, config)
    if submission.run_file:
        secret = {"secretName": job, "defaultMode": _OWNER_ONLY}
        _mount(spec, "run", {"secret": secret}, _SECRETS, read_only=True)
    pod: Manifest = {"metadata": {"labels": {**_labels(job), _ROLE_LABEL: KERNEL}}, "spec": spec}
    return _overlaid(pod, config, (ALL, KERNEL))


def _with_python(config: KubernetesConfig, words: Sequence[str]) -> Iterable[str]:
    """Replace the Python of this process by that of the image."""
    return (config.python if word == sys.executable else word for word in words)


def _spec(config: KubernetesConfig, container: Manifest) -> Manifest:
    """Return what is the same in the `spec` of all pods."""
    spec: Manifest = {
        "restartPolicy": "Never",
        "enableServiceLinks": False,
        "containers": [container],
        "volumes": [],
    }
    if config.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in config.image_pull_secrets]
    return spec


def _mount(spec: Manifest, name: str, source: Manifest, path: str, *, read_only: bool = False) -> None:
    spec["volumes"].append({"name": name, **source})
    mounted = {"name": name, "mountPath": path, **({"readOnly": True} if read_only else {})}
    spec["containers"][0]["volumeMounts"].append(mounted)


def _mount_claim(spec: Manifest, config: KubernetesConfig) -> None:
    _mount(spec, "runs", {"persistentVolumeClaim": {"claimName": config.claim}}, config.mount)


def _resources(resources: Resources) -> Manifest:
    """Return requests and limits. A pod gets what it asks for, and no more."""
    quantities = {"cpu": str(resources.threads)}
    if resources.memory_gb:
        quantities["memory"] = f"{round(resources.memory_gb * 1024)}Mi"
    if resources.gpus:
        quantities["nvidia.com/gpu"] = str(resources.gpus)
    return {"requests": quantities, "limits": dict(quantities)}


def _affinity(run: str, job: Job) -> Manifest:
    """Return the rules for a worker's node: ranks of one unit need one node, the ranks of a worker group
    prefer it, and all others of a group prefer different nodes."""

    def near(label: str, value: str) -> Manifest:
        selector = {"matchLabels": {_RUN_LABEL: run, label: _label(value)}}
        return {"labelSelector": selector, "topologyKey": _HOST}

    preferred = [{"weight": _WEIGHT, "podAffinityTerm": near(_GROUP_LABEL, job.group)}]
    if job.role != "trainer":
        return {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}
    rules: Manifest = {"preferredDuringSchedulingIgnoredDuringExecution": preferred}
    if job.unit:
        rules["requiredDuringSchedulingIgnoredDuringExecution"] = [near(_UNIT_LABEL, job.unit)]
    return {"podAffinity": rules}


def _overlaid(pod: Manifest, config: KubernetesConfig, names: Iterable[str]) -> Manifest:
    """Return a pod with the user's fields."""
    for name in names:
        if name not in config.templates:
            continue
        template = config.templates[name]
        container = _merged(pod["spec"]["containers"][0], template.container)
        spec = _merged(pod["spec"] | {"containers": [container]}, template.spec)
        metadata = _merged(
            pod["metadata"],
            {
                key: dict(value)
                for key, value in (("labels", template.labels), ("annotations", template.annotations))
                if value
            },
        )
        pod = pod | {"metadata": metadata, "spec": spec}
    return pod


def _merged(base: Any, over: Any) -> Any:
    """Merge mappings key by key, append lists, and let any other value replace the previous one."""
    if isinstance(base, Mapping) and isinstance(over, Mapping):
        former, present = cast("Mapping[str, Any]", base), cast("Mapping[str, Any]", over)
        changed = {
            key: _merged(former[key], value) if key in former else value for key, value in present.items()
        }
        return {**former, **changed}
    if isinstance(base, list) and isinstance(over, list | tuple):
        return [*cast("list[Any]", base), *cast("list[Any]", over)]
    return over


def _labels(run: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": "stretto", _RUN_LABEL: run}


def _name(text: str) -> str:
    """Return a text as part of the name of an object: small letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _label(text: str) -> str:
    """Return a text as the value of a label, which has at most 63 characters."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text)[:63].strip("-_.")
