"""Launcher `kubernetes`: each worker is a pod (see docs/cluster.md).

Outside of its Job, `stretto run` submits a Job, and the run starts when Kubernetes starts the Job's pod. In
that pod, the kernel's process starts a pod for each worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, get_args

import msgspec

from stretto import Component, LauncherConfig, Problem, hookimpl
from stretto.component import NonNegativeInt, PositiveFloat, PositiveInt
from stretto.config import RunConfig
from stretto.launcher import Resources, Role

__all__ = ["ALL", "KERNEL", "KubernetesConfig", "PodTemplate"]

ALL = "all"
KERNEL = "kernel"
_OURS = {
    "spec": ("containers", "restartPolicy", "serviceAccountName"),
    "container": ("name", "image", "command", "args"),
}
"""Fields of a pod that the launcher sets, and that would not work with other values."""


class PodTemplate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of Kubernetes for some pods. Mappings are merged with those that the launcher writes, and lists
    are appended to them."""

    spec: Mapping[str, Any] = {}
    """Fields of the pod's `spec`, such as `nodeSelector`, `tolerations`, `priorityClassName` and
    `volumes`."""
    container: Mapping[str, Any] = {}
    """Fields of the container, such as `workingDir`, `env`, `envFrom` and `volumeMounts`."""
    labels: Mapping[str, str] = {}
    """Labels of the pod."""
    annotations: Mapping[str, str] = {}
    """Annotations of the pod."""


class KubernetesConfig(LauncherConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the launcher `kubernetes`. The number of processor cores and GPUs and the memory of a pod
    are those of its role's section."""

    use: str = "kubernetes"
    """Name of the launcher."""
    image: Annotated[str, msgspec.Meta(min_length=1)]
    """Container image of all pods, with the kernel's version of stretto."""
    claim: Annotated[str, msgspec.Meta(min_length=1)]
    """Name of the PersistentVolumeClaim for the run's folder. The kernel and the trainers mount it."""
    mount: str = "/runs"
    """Path at which the pods see the claim. `out` is a folder in it."""
    namespace: str | None = None
    """Namespace of all objects. Default: that of the kubeconfig's context."""
    context: str | None = None
    """Context of the kubeconfig with which the run is submitted. Default: its current one."""
    service_account: str | None = None
    """Service account of the kernel's pod, which has to start and stop pods. Default: a new one, with a role
    of its own."""
    image_pull_secrets: tuple[str, ...] = ()
    """Names of secrets with which the image is pulled."""
    python: str = "python"
    """Python of the image."""
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 4222
    """Port of the bundled nats-server in the kernel's pod, and of its service."""
    kernel: Resources = Resources(threads=2, memory_gb=4.0)
    """Resources of the kernel's pod."""
    templates: Mapping[str, PodTemplate] = {}
    """Fields of Kubernetes for the pods of `all`, of the `kernel`, of a role (`inference`, `rollout`,
    `verifier`, `trainer`) or of a worker group (`training`, or a key of `groups`). The later in this list are
    applied after the earlier."""
    retries: NonNegativeInt = 3
    """Number of times that the Job starts the kernel again after it failed. The run then resumes. Preempted
    and evicted pods do not count."""
    stop_s: PositiveInt = 120
    """Seconds that the kernel has to write a checkpoint when its pod is stopped."""
    keep_s: NonNegativeInt = 86_400
    """Seconds after which Kubernetes deletes the Job of a run that has ended, with all that belongs to it.
    The claim stays."""
    start_s: PositiveFloat = 600.0
    """Time limit for the start of a worker, in seconds. It includes the wait for a node and the pull of the
    image."""

    def __post_init__(self) -> None:
        """Check the templates and the path."""
        if not PurePosixPath(self.mount).is_absolute():
            raise ValueError(f"mount: {self.mount!r} is not an absolute path")
        for name, template in self.templates.items():
            for part, fields in _OURS.items():
                for field in getattr(template, part):
                    if field in fields:
                        raise ValueError(
                            f"templates.{name}.{part}: {field!r} cannot be set: stretto sets it itself"
                        )


def check(config: KubernetesConfig, run: RunConfig) -> Iterator[Problem]:
    """Find a folder outside of the claim, a weight transport that needs a common disk, and templates for pods
    that the run does not have."""
    if run.out is None or config.mount not in map(str, PurePosixPath(run.out).parents):
        found = "is not set" if run.out is None else f"is {run.out}"
        yield Problem(
            "out",
            f"{found}; give a folder in the claim, such as {config.mount}/{run.name}: launcher.mount is "
            f"{config.mount}",
        )
    known = (ALL, KERNEL, *get_args(Role), "training", *run.groups.__struct_fields__)
    for name in config.templates:
        if name not in known:
            yield Problem(
                f"launcher.templates.{name}", f"no pods {name!r} in this run; expected {', '.join(known)}"
            )
    if run.weights.use == "file" and getattr(run.weights, "folder", None) is None:
        yield Problem(
            "weights",
            "`file` keeps versions in the memory of one machine, and pods share none; write `weights: bus`, "
            "or give `weights.folder` on a volume that the pods of trainers and engines mount "
            "(launcher.templates)",
        )


@hookimpl
def stretto_launcher() -> Iterator[Component[KubernetesConfig]]:
    """The component of this package."""
    yield Component(
        "kubernetes",
        "stretto_kubernetes.pods:KubernetesLauncher",
        KubernetesConfig,
        "Kubernetes, with a Job for the kernel and a pod for each worker",
        check=check,
        requires={"kubernetes": "stretto[kubernetes]"},
    )
