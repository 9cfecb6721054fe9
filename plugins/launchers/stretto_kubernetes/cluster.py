"""The Kubernetes API, by the official client: requests with deadlines, and errors as text for users."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import urllib3.exceptions
from kubernetes import client, config, stream, watch

from stretto.errors import LaunchError
from stretto_kubernetes.manifests import WORKER, Manifest

_CONNECT_S = 5.0
_ANSWER_S = 30.0
_WATCH_S = 60
_QUIET_S = 300.0
"""A stream of output is opened again after this many seconds without any."""
_ADVICE = {
    401: "log in to the cluster again",
    403: "the account may not do that (`kubectl auth can-i`); ask for the right, or give "
    "launcher.service_account, an account that has it",
    409: "the run was submitted before; `kubectl delete job` removes a Job that has ended",
}


class Gone(LaunchError):
    """The object does not exist any more."""


class Cluster:
    """The API of one cluster, as one account sees it. Its methods wait, so an event loop calls them in
    threads. They raise `LaunchError` if Kubernetes refuses, or does not answer."""

    def __init__(self, settings: client.Configuration, namespace: str) -> None:
        settings.retries = False  # a cluster that is out of reach is reported at once
        self._client = client.ApiClient(settings)
        self._core = client.CoreV1Api(self._client)
        self._batch = client.BatchV1Api(self._client)
        self._rights = client.RbacAuthorizationV1Api(self._client)
        self.namespace = namespace

    @classmethod
    def here(cls, namespace: str) -> Cluster:
        """Return the cluster that this process runs in, with the account of its pod."""
        settings = client.Configuration()
        try:
            config.load_incluster_config(client_configuration=settings)
        except config.ConfigException as error:
            raise LaunchError(f"this pod has no service account: {error}") from error
        return cls(settings, namespace)

    @classmethod
    def of_context(cls, context: str | None, namespace: str) -> Cluster:
        """Return the cluster of a context of the kubeconfig. In a pod without a kubeconfig, return that of
        the pod."""
        if context is None and "KUBERNETES_SERVICE_HOST" in os.environ and not _has_kubeconfig():
            return cls.here(namespace)
        settings = client.Configuration()
        try:
            config.load_kube_config(_kubeconfig(), context, client_configuration=settings)
        except config.ConfigException as error:
            raise LaunchError(
                f"no cluster: {error}; set KUBECONFIG, or name a context in launcher.context"
            ) from error
        return cls(settings, namespace)

    def version(self) -> str:
        """Return the version of the cluster's Kubernetes."""
        with _errors("its version cannot be read"):
            api = client.VersionApi(self._client)
            return api.get_code(_request_timeout=(_CONNECT_S, _CONNECT_S)).git_version

    def create(self, manifest: Manifest) -> Manifest:
        """Create an object, and return it as Kubernetes keeps it."""
        methods: dict[str, Callable[..., Any]] = {
            "Job": self._batch.create_namespaced_job,
            "Pod": self._core.create_namespaced_pod,
            "Secret": self._core.create_namespaced_secret,
            "Service": self._core.create_namespaced_service,
            "ServiceAccount": self._core.create_namespaced_service_account,
            "Role": self._rights.create_namespaced_role,
            "RoleBinding": self._rights.create_namespaced_role_binding,
        }
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        what = f"{kind} {name} cannot be created"
        return self._ask(what, methods[kind], self.namespace, model_of(manifest))

    def start_job(self, name: str) -> None:
        """Start a Job that was created suspended."""
        change = {"spec": {"suspend": False}}
        start = self._batch.patch_namespaced_job
        self._ask(f"Job {name} cannot be started", start, name, self.namespace, change)

    def delete_job(self, name: str) -> None:
        """Delete a Job, and all that belongs to it."""
        delete = self._batch.delete_namespaced_job
        what = f"Job {name} cannot be deleted"
        self._ask(what, delete, name, self.namespace, propagation_policy="Background")

    def delete_pod(self, name: str, grace_s: int) -> None:
        """Ask a pod to end, and kill it after `grace_s` seconds. With 0, Kubernetes forgets it at once, also
        if its node does not answer.

        Raises:
            Gone: if there is no such pod.
        """
        delete = self._core.delete_namespaced_pod
        what = f"pod {name} cannot be deleted"
        self._ask(what, delete, name, self.namespace, grace_period_seconds=grace_s)

    def own_pod(self, name: str, owners: Sequence[Manifest]) -> Manifest:
        """Add owners to those that a pod has, and return the pod.

        Raises:
            Gone: if there is no such pod.
        """
        change = {"metadata": {"ownerReferences": list(owners)}}
        patch = self._core.patch_namespaced_pod
        return self._ask(f"pod {name} cannot be changed", patch, name, self.namespace, change)

    def pods(self, selector: str) -> tuple[list[Manifest], str]:
        """Return the pods with these labels, and the version of the list."""
        list_pods = self._core.list_namespaced_pod
        answer = self._ask("pods cannot be listed", list_pods, self.namespace, label_selector=selector)
        return answer["items"], answer["metadata"]["resourceVersion"]

    def changes(self, selector: str, version: str) -> Iterator[tuple[str, Manifest]]:
        """Yield each change of a pod with these labels since a version of the list, for about a minute: its
        kind, such as `MODIFIED` or `DELETED`, and the pod."""
        with _errors("pods cannot be watched"):
            events = watch.Watch().stream(
                self._core.list_namespaced_pod,
                self.namespace,
                label_selector=selector,
                resource_version=version,
                timeout_seconds=_WATCH_S,
                deserialize=False,
                _request_timeout=(_CONNECT_S, _WATCH_S + _ANSWER_S),
            )
            for event in cast("Iterator[Manifest]", events):
                if event["type"] == "ERROR":
                    raise LaunchError(f"pods cannot be watched: {event['object'].get('message', '')}")
                yield event["type"], event["object"]

    def output(self, pod: str, since_s: int | None) -> Iterator[bytes]:
        """Yield the lines that a worker's container writes, each with its time in front, until it ends.

        Args:
            since_s: begin this many seconds ago; None for the container's beginning.

        Raises:
            Gone: if there is no such pod.
        """
        with _errors(f"the output of pod {pod} cannot be read"):
            read: Callable[..., Any] = self._core.read_namespaced_pod_log
            answer = read(
                pod,
                self.namespace,
                container=WORKER,
                follow=True,
                timestamps=True,
                since_seconds=since_s,
                _preload_content=False,
                _request_timeout=(_CONNECT_S, _QUIET_S),
            )
            _raise_for(answer)
            try:
                yield from answer  # its lines
            finally:
                answer.close()

    def execute(self, pod: str, command: Sequence[str]) -> None:
        """Run a command in a worker's container."""
        # `stream` changes the client that it gets, so it gets one of its own.
        core = client.CoreV1Api(client.ApiClient(self._client.configuration))
        with _errors(f"{command[0]!r} cannot run in pod {pod}"):
            socket: Any = stream.stream(
                core.connect_get_namespaced_pod_exec,
                pod,
                self.namespace,
                command=list(command),
                container=WORKER,
                stdout=True,
                stderr=True,
                _preload_content=False,
                _request_timeout=_ANSWER_S,
            )
            try:
                socket.run_forever(timeout=_ANSWER_S)
            finally:
                socket.sock.close()  # its own `close` does nothing once the server has closed

    def _ask(self, what: str, method: Callable[..., Any], *arguments: Any, **options: Any) -> Manifest:
        """Call a method of the client, and return the JSON of the answer. It may have fields of a newer
        Kubernetes, which the client's models do not know.

        Args:
            what: what has failed if it fails.
        """
        with _errors(what):
            answer = method(
                *arguments,
                **options,
                _preload_content=False,
                _request_timeout=(_CONNECT_S, _ANSWER_S),
            )
            _raise_for(answer)
            return json.loads(answer.data)


def model_of(manifest: Manifest) -> Any:
    """Return an object as the client's model of it.

    Raises:
        LaunchError: if it has fields that Kubernetes does not have, or values of another type.
    """
    try:
        return getattr(client, f"V1{manifest['kind']}").model_validate(manifest)
    except ValueError as error:
        raise LaunchError(str(error)) from error


def context_namespace(context: str | None) -> str:
    """Return the namespace of a context of the kubeconfig; `default` if there is none."""
    if not _has_kubeconfig():
        return "default"
    try:
        contexts, current = cast(
            "tuple[list[Manifest], Manifest]", config.list_kube_config_contexts(_kubeconfig())
        )
    except config.ConfigException as error:
        raise LaunchError(f"the kubeconfig cannot be read: {error}") from error
    chosen = next((each for each in contexts if each["name"] == context), None) if context else current
    if chosen is None:
        names = ", ".join(each["name"] for each in contexts)
        raise LaunchError(f"the kubeconfig has no context {context!r} (launcher.context); it has {names}")
    return chosen["context"].get("namespace") or "default"


# ------------------------------------------------------------------------------------------ private


def _kubeconfig() -> str:
    """Return the path of the kubeconfig, or several with a colon between them."""
    return os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")


def _has_kubeconfig() -> bool:
    return any(Path(each).exists() for each in _kubeconfig().split(os.pathsep))


@contextmanager
def _errors(what: str) -> Generator[None]:
    """Turn errors of the client into `LaunchError`."""
    try:
        yield
    except client.ApiException as error:
        raise _refusal(what, error) from error
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise LaunchError(f"{what}: Kubernetes does not answer: {error}") from error


def _refusal(what: str, error: client.ApiException) -> LaunchError:
    status = error.status or 0
    try:
        said = str(json.loads(error.body or "")["message"])
    except (ValueError, TypeError, KeyError):
        said = str(error.body or error.reason or "")
    if status in (404, 410):
        return Gone(f"{what}: Kubernetes does not have it (status {status}): {said.strip()}")
    advice = f"; {_ADVICE[status]}" if status in _ADVICE else ""
    return LaunchError(f"{what}: Kubernetes refuses with status {status}: {said.strip()}{advice}")


def _raise_for(answer: Any) -> None:
    if not 200 <= answer.status <= 299:
        raise client.ApiException(http_resp=answer)
