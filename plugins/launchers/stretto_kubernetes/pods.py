"""Starts workers as pods beside the kernel's pod, and submits the Job of a run."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import anyio
import anyio.to_thread
import yaml

from stretto import Context, Problem
from stretto.errors import LaunchError, one_job
from stretto.launcher import Job, Submission
from stretto_kubernetes import KubernetesConfig
from stretto_kubernetes.cluster import Cluster, Gone, context_namespace, model_of
from stretto_kubernetes.manifests import (
    KernelPod,
    Manifest,
    bootstrap_of,
    job_name,
    objects_of,
    secret_of,
    worker_pod,
    workers_of,
)
from stretto_kubernetes.watching import PodOutput, PodView, PodWatch

_LOST = 1
"""Exit status of a worker that has ended in good order because its pod was taken from it."""
_OUTPUT_S = 10.0
"""The output of a container that has ended is complete within this many seconds, if its node answers."""
_KILLED_S = 30.0
"""A pod whose grace is over is gone within this many seconds, if its node answers."""


class KubernetesHandle:
    """One pod with a worker."""

    def __init__(self, job: Job, cluster: Cluster, view: PodView) -> None:
        self._job = job
        self._cluster = cluster
        self._view = view
        self._output: PodOutput | None = None
        self._stopping = False
        self._reported = False

    @property
    def place(self) -> str:
        """Its pod and node."""
        return f"pod {self._view.name} on {self._view.node or 'no node yet'}"

    async def until_started(self, within_s: float) -> None:
        """Wait until the container has started its program.

        Raises:
            LaunchError: if it does not start within this many seconds.
        """
        view, worker = self._view, self._job.worker
        with anyio.move_on_after(within_s):
            await view.until(lambda: bool(view.runs or view.refusal))
            if view.refusal:
                reason = f"{worker} cannot be started in pod {view.name}: {view.refusal}"
                raise LaunchError(reason, worker=worker)
            self.copy_output(continues=False)
            return
        raise LaunchError(
            f"{worker} did not start in pod {view.name} within {within_s:g} s (launcher.start_s): "
            f"{view.waits_for}",
            worker=worker,
        )

    def copy_output(self, *, continues: bool) -> None:
        """Begin to copy its output into the log, or continue where a former kernel has ended."""
        self._output = PodOutput(self._cluster, self._view.name, Path(self._job.log), continues=continues)

    async def wait(self) -> int:
        """Wait until the container has ended and its output is in the log. Return its exit status."""
        await self._view.until(lambda: self._view.ended)
        if self._output is not None:
            self._output.end()
            with anyio.move_on_after(_OUTPUT_S):
                await self._output.complete.wait()
        if self._stopping or not self._view.loss:
            return self._view.status
        self._report_loss()
        return self._view.status or _LOST

    async def stop(self, grace_s: float) -> None:
        """Delete the pod: Kubernetes sends SIGTERM to the worker, and kills the container after `grace_s`
        seconds."""
        self._stopping = True
        # With a grace of 0, Kubernetes would not wait until the container has ended.
        await self._delete(max(1, math.ceil(grace_s)))
        with anyio.move_on_after(grace_s + _KILLED_S):
            await self.wait()
            await self._view.until(lambda: self._view.deleted)
            return
        await self._delete(0)  # its node does not answer
        await self.wait()

    async def dump_stacks(self) -> None:
        """Send SIGUSR1, at which a worker writes the stacks of its threads to its output."""
        if not self._view.ended:
            kill = ("/bin/sh", "-c", "kill -USR1 1")
            with suppress(LaunchError):  # it has ended, or its node does not answer
                await anyio.to_thread.run_sync(self._cluster.execute, self._view.name, kill)

    async def _delete(self, grace_s: int) -> None:
        try:
            await anyio.to_thread.run_sync(self._cluster.delete_pod, self._view.name, grace_s)
        except Gone:
            self._view.update(None)

    def _report_loss(self) -> None:
        """Write into the log why the pod was lost, once: the worker itself may not have known."""
        if not self._reported:
            self._reported = True
            with Path(self._job.log).open("a") as file:
                file.write(f"stretto: {self._job.worker} was lost, {self.place}: {self._view.loss}\n")


class KubernetesLauncher:
    """Starts workers as pods, beside the pod of the kernel."""

    def __init__(self, config: KubernetesConfig, context: Context) -> None:
        self._config = config
        self._name = context.name
        self._kernel = KernelPod.of(os.environ)
        self._cluster: Cluster | None = None
        self._watch: PodWatch | None = None
        self._pods: dict[str, str] = {}
        """The latest pod of each worker."""
        self._has_launched = False

    @property
    def address(self) -> str:
        """Name of the service that leads to the kernel's pod."""
        return f"{self._kernel.job}.{self._kernel.namespace}.svc" if self._kernel else socket.gethostname()

    @property
    def port(self) -> int:
        """Port of this service, and of the bundled nats-server."""
        return self._config.port

    def check(self, jobs: Sequence[Job]) -> Iterator[Problem]:
        """See whether the pods can be written, and outside of the cluster, whether it answers."""
        shared = [job.worker for job in jobs if job.resources.gpus and job.resources.share < 1]
        if shared:
            yield Problem(
                "launcher",
                f"{', '.join(shared)}: `share` is below 1, and a pod gets whole GPUs only; leave `share` out",
            )
        kernel = self._kernel or KernelPod("check", "default", "check", "check", "check")
        try:
            submission = Submission(begin=(), resume=(), folder="", jobs=tuple(jobs))
            for manifest in objects_of(self._config, self._name, kernel.namespace, submission):
                model_of(manifest)
            for job in jobs:
                model_of(worker_pod(self._config, kernel, job))
        except LaunchError as error:
            yield Problem("launcher.templates", str(error))
        try:
            if self._kernel is None:
                Cluster.of_context(self._config.context, self._namespace).version()
        except LaunchError as error:
            yield Problem("launcher", str(error), "environment")

    def submission(self, submission: Submission) -> str | None:
        """Return the objects of the run as YAML; None in the kernel's pod."""
        if self._kernel is not None:
            return None
        objects = objects_of(self._config, self._name, self._namespace, submission)
        return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=110)

    def submit(self, text: str) -> str:
        """Create the objects. The Job begins when all are there, and the others are deleted with it."""
        job, *others = cast("list[Manifest]", list(yaml.safe_load_all(text)))
        name, namespace = job["metadata"]["name"], job["metadata"]["namespace"]
        cluster = Cluster.of_context(self._config.context, namespace)
        created = cluster.create(job | {"spec": job["spec"] | {"suspend": True}})
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": created["metadata"]["uid"]}
        try:
            for each in others:
                cluster.create(each | {"metadata": each["metadata"] | {"ownerReferences": [owner]}})
            cluster.start_job(name)
        except LaunchError:
            cluster.delete_job(name)
            raise
        return f"Kubernetes job {name} in namespace {namespace}"

    def follow(self, submission: Submission) -> str:
        """Return the command that shows the kernel's output."""
        name = job_name(self._name, submission.folder)
        context = f" --context {self._config.context}" if self._config.context else ""
        return f"kubectl{context} --namespace {self._namespace} logs --follow job/{name}"

    async def launch(self, jobs: Sequence[Job]) -> list[KubernetesHandle]:
        """Start a pod for each job. A worker that ran before gets a new pod in place of the previous one. The
        first call deletes the pods that a former kernel has left and this one has not adopted: the new ones
        need the room.

        Raises:
            LaunchError: if Kubernetes refuses a pod, or a pod does not start.
        """
        if self._kernel is None:
            raise LaunchError("this process runs in no pod of a run's Job, so it cannot start a worker's pod")
        cluster, watch = self._ready(self._kernel)
        if not self._has_launched:
            await anyio.to_thread.run_sync(_delete_former, cluster, self._kernel)
            self._has_launched = True
        handles: list[KubernetesHandle] = []
        try:
            for job in jobs:
                pod = await anyio.to_thread.run_sync(partial(self._create, cluster, self._kernel, job))
                view = PodView(pod)
                watch.add(view)
                handles.append(KubernetesHandle(job, cluster, view))
            async with one_job() as tasks:
                for handle in handles:
                    tasks.start_soon(handle.until_started, self._config.start_s)
        except BaseException:
            with anyio.CancelScope(shield=True):
                async with anyio.create_task_group() as tasks:
                    for handle in handles:
                        tasks.start_soon(handle.stop, 0)
            raise
        return handles

    def record(self, worker: str) -> str:
        """Return the name of a worker's pod."""
        return self._pods[worker]

    async def adopt(self, job: Job, record: str) -> KubernetesHandle | None:
        """Take over a pod whose container runs.

        Raises:
            LaunchError: if Kubernetes refuses to make this kernel its owner.
        """
        if self._kernel is None or not record:
            return None
        cluster, watch = self._ready(self._kernel)
        try:
            pod = await anyio.to_thread.run_sync(cluster.own_pod, record, self._kernel.owners)
        except Gone:
            return None
        self._pods[job.worker] = record  # if it does not run, the worker's next pod takes its place
        view = PodView(pod)
        if not view.runs or view.ended:
            return None
        watch.add(view)
        handle = KubernetesHandle(job, cluster, view)
        handle.copy_output(continues=True)
        return handle

    @property
    def _namespace(self) -> str:
        return self._config.namespace or context_namespace(self._config.context)

    def _ready(self, kernel: KernelPod) -> tuple[Cluster, PodWatch]:
        """Return the cluster and the watch of the run's pods."""
        if self._cluster is None or self._watch is None:
            self._cluster = Cluster.here(kernel.namespace)
            self._watch = PodWatch(self._cluster, workers_of(kernel.job))
        return self._cluster, self._watch

    def _create(self, cluster: Cluster, kernel: KernelPod, job: Job) -> Manifest:
        """Create the pod of a worker, then the Secret for which its start waits, and return the pod."""
        if job.worker in self._pods:
            with suppress(Gone):
                cluster.delete_pod(self._pods[job.worker], 1)
        manifest = worker_pod(self._config, kernel, job)
        pod = cluster.create(manifest)
        self._pods[job.worker] = manifest["metadata"]["name"]
        if (path := bootstrap_of(job)) is not None:
            cluster.create(secret_of(manifest, pod["metadata"]["uid"], Path(path).read_text()))
        return pod


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines, such as the run file, as they are."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """Return the node of a text."""
        style = "|" if "\n" in text else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    def ignore_aliases(self, data: Any) -> bool:
        """Write what occurs twice twice, for readers."""
        del data
        return True


_Dumper.add_representer(str, _Dumper.represent_text)


def _delete_former(cluster: Cluster, kernel: KernelPod) -> None:
    """Delete the workers' pods of the run that do not belong to this kernel."""
    pods, _ = cluster.pods(workers_of(kernel.job))
    for pod in pods:
        owners: Any = pod["metadata"].get("ownerReferences", ())
        if all(owner["uid"] != kernel.uid for owner in owners):
            with suppress(Gone):
                cluster.delete_pod(pod["metadata"]["name"], 1)
