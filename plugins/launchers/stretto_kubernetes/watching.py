"""The workers' pods as Kubernetes reports them: one watch for all, and one stream of output for each."""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import IO

import anyio
import structlog

from stretto.errors import LaunchError
from stretto_kubernetes.cluster import Cluster, Gone
from stretto_kubernetes.manifests import Manifest

log = structlog.get_logger()

_AGAIN_S = 2.0
"""Seconds until a request is repeated that Kubernetes did not answer."""
_OVERLAP_S = 60
"""A stream of output that is opened again begins this much earlier; lines that are known are left out."""
_MAX_OUTPUT = 16 * 2**20
_SIGNAL_BASE = 128
_UNKNOWN = 1
_NO_START = ("StartError", "ContainerCannotRun", "RunContainerError")
_FINAL = (
    *_NO_START,
    *("ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"),
    *("CreateContainerConfigError", "CreateContainerError"),
)
"""Reasons of a container that will not start by itself."""


class PodView:
    """The newest known state of one pod. All its methods are called in the event loop."""

    def __init__(self, pod: Manifest) -> None:
        self.pod = pod
        self.name: str = pod["metadata"]["name"]
        self.deleted = False
        """Whether Kubernetes has forgotten the pod."""
        self._changed = anyio.Event()

    def update(self, pod: Manifest | None) -> None:
        """Take in the pod's new state; None if it is deleted and its last state is not known."""
        if pod is None:
            self.deleted = True
        else:
            self.pod = pod
        self._changed.set()
        self._changed = anyio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition on the state holds."""
        while not condition():
            await self._changed.wait()

    @property
    def node(self) -> str:
        """Name of its node; empty if it has none yet."""
        return self.pod["spec"].get("nodeName", "")

    @property
    def runs(self) -> bool:
        """Whether the container has started, and may have ended since."""
        return "running" in self._container or (self.ended and not self.refusal)

    @property
    def ended(self) -> bool:
        """Whether no process of the pod is left."""
        return self.deleted or "terminated" in self._container or self._phase in ("Succeeded", "Failed")

    @property
    def refusal(self) -> str:
        """Why the container will not start; empty if it may."""
        for state in ("waiting", "terminated"):
            reason = self._container.get(state, {})
            if reason.get("reason") in (_FINAL if state == "waiting" else _NO_START):
                return f"{reason['reason']}: {reason.get('message', '')}".rstrip(": ")
        if self.deleted and not self._container:
            return self.loss or "the pod was deleted"
        return ""

    @property
    def waits_for(self) -> str:
        """Why the container has not started yet, as Kubernetes says it."""
        for condition in self.pod.get("status", {}).get("conditions", ()):
            if condition["type"] == "PodScheduled" and condition["status"] == "False":
                return f"{condition.get('reason', '')}: {condition.get('message', '')}"
        reason = self._container.get("waiting", {})
        return (
            ": ".join(filter(None, (reason.get("reason"), reason.get("message"))))
            or "no news of its container"
        )

    @property
    def status(self) -> int:
        """Exit status of the container, negative for a signal; 1 if it is not known."""
        code = self._container.get("terminated", {}).get("exitCode")
        if code is None:
            return _UNKNOWN
        return _SIGNAL_BASE - code if code > _SIGNAL_BASE else code

    @property
    def loss(self) -> str:
        """What happened to the pod or the container from outside; empty if it ended by itself."""
        status = self.pod.get("status", {})
        for condition in status.get("conditions", ()):
            if condition["type"] == "DisruptionTarget" and condition["status"] == "True":
                return f"{condition.get('reason', '')}: {condition.get('message', '')}"
        if "reason" in status:  # of the pod, such as `Evicted` and `NodeLost`
            return f"{status['reason']}: {status.get('message', '')}"
        if self._container.get("terminated", {}).get("reason") == "OOMKilled":
            return "OOMKilled: its memory was full (`memory_gb`)"
        if "deletionTimestamp" in self.pod["metadata"] or self.deleted:
            return "the pod was deleted"
        return ""

    @property
    def _container(self) -> Manifest:
        """The state of the worker's container; empty if there is none yet."""
        statuses = self.pod.get("status", {}).get("containerStatuses", ())
        return statuses[0].get("state", {}) if statuses else {}

    @property
    def _phase(self) -> str:
        return self.pod.get("status", {}).get("phase", "")


class PodWatch:
    """Keeps the views of all workers' pods up to date, in a thread that lives as long as the process."""

    def __init__(self, cluster: Cluster, selector: str) -> None:
        self._cluster = cluster
        self._selector = selector
        self._views: dict[str, PodView] = {}
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._watch, name="pods", daemon=True).start()

    def add(self, view: PodView) -> None:
        """Keep a view up to date until its pod is deleted."""
        self._views[view.name] = view

    def _watch(self) -> None:
        failed = False
        while True:
            try:
                self._follow()
            except LaunchError as error:
                if not failed:
                    log.warning("pods cannot be seen now", error=str(error))
                failed = True
                time.sleep(_AGAIN_S)
            except RuntimeError:  # the event loop is closed: the run is over
                return
            else:
                failed = False

    def _follow(self) -> None:
        """List the pods, then follow their changes for a while."""
        known = set(self._views)  # pods that are made during the request may not be in its answer
        pods, version = self._cluster.pods(self._selector)
        for pod in pods:
            self._loop.call_soon_threadsafe(self._take, pod["metadata"]["name"], pod, False)
        for name in known - {pod["metadata"]["name"] for pod in pods}:
            self._loop.call_soon_threadsafe(self._take, name, None, True)
        for change, pod in self._cluster.changes(self._selector, version):
            if change != "BOOKMARK":
                self._loop.call_soon_threadsafe(self._take, pod["metadata"]["name"], pod, change == "DELETED")

    def _take(self, name: str, pod: Manifest | None, deleted: bool) -> None:
        view = self._views.get(name)
        if view is None:
            return
        if pod is not None:
            view.update(pod)
        if deleted:
            view.update(None)
            del self._views[name]


class PodOutput:
    """Copies what a worker's container writes into its log, in a thread, until the container has ended. The
    file's time is that of its newest line, so that the next kernel can continue.

    Args:
        continues: whether a former kernel has begun to copy.
    """

    def __init__(self, cluster: Cluster, pod: str, path: Path, *, continues: bool) -> None:
        self._cluster = cluster
        self._pod = pod
        self._path = path
        self._last_ns = path.stat().st_mtime_ns if continues and path.exists() else 0
        """Unix time of the newest line."""
        self._read_at: float | None = None
        self._loop = asyncio.get_running_loop()
        self._ended = threading.Event()
        self.complete = anyio.Event()
        """Set when all is copied."""
        threading.Thread(target=self._copy, name=f"output of {pod}", daemon=True).start()

    def end(self) -> None:
        """The container has ended: copy what is left."""
        self._ended.set()

    def _copy(self) -> None:
        while True:
            last = self._ended.is_set()
            try:
                self._follow()
            except Gone:
                break
            except (LaunchError, ValueError) as error:  # also a node's error in place of a line
                log.debug("output cannot be seen now", pod=self._pod, error=str(error))
            if last:
                break
            self._ended.wait(_AGAIN_S)
        with suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self.complete.set)

    def _follow(self) -> None:
        since_s = None
        if self._read_at is not None:
            since_s = math.ceil(time.monotonic() - self._read_at) + _OVERLAP_S
        file = self._path.open("ab")
        try:
            for line in self._cluster.output(self._pod, since_s):
                when, _, text = line.partition(b" ")
                when_ns = _unix_ns(when)
                if when_ns <= self._last_ns:
                    continue
                self._last_ns, self._read_at = when_ns, time.monotonic()
                file.write(text)
                file.flush()
                os.utime(file.fileno(), ns=(when_ns, when_ns))
                if file.tell() > _MAX_OUTPUT:
                    file = self._rotated(file)
        finally:
            file.close()

    def _rotated(self, file: IO[bytes]) -> IO[bytes]:
        """Keep the log as `NAME.1`, and begin a new one."""
        file.close()
        self._path.replace(f"{self._path}.1")
        return self._path.open("ab")


def _unix_ns(when: bytes) -> int:
    """Return a time that Kubernetes wrote, such as `2026-11-26T14:55:39.123456789Z`, as Unix time.

    Raises:
        ValueError: if it is none.
    """
    moment = datetime.fromisoformat(when.decode())  # to the microsecond
    return round(moment.timestamp() * 1e6) * 1000 + int(when[26:29])
