"""This process's connection to a Ray cluster, which may be one that it starts on this machine.

Three habits of Ray in the kernel's process would harm a run:

- In the main thread, `ray.init` replaces the handler of SIGTERM. So another thread connects. It waits until
  the process ends: the processes of a cluster on this machine end with the thread that started them.
- Ray's crash handler catches SIGTERM, writes stacks, and forwards the signal only once (`keep_sigterm`).
- Ray ends a process that has not reached the cluster's head for a minute, before the kernel can write its
  summary. `_SETTINGS` makes this time longer; the run ends when its workers are lost and cannot start again.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from stretto.errors import LaunchError
from stretto_ray import RayConfig
from stretto_ray.actor import WorkerActor
from stretto_ray.reservations import Reservations

_CONNECT_S = 120.0  # includes the start of a cluster on this machine
_PROBE_S = 10.0  # time limit for a connection to the port of a head
_CPUS = 10_000
"""CPUs of a cluster on this machine: workers may have more threads than cores, as with `local`."""
_STORE = 100 * 2**20
"""Bytes of the object store of a cluster on this machine. The launcher hardly uses it."""
_SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_gcs_rpc_server_reconnect_timeout_s": "1000000"}
# Other users reach the ports of a cluster on this machine, so the cluster requires a login. It is constant,
# because Ray keeps the first login of a process.
_LOGIN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}

T = TypeVar("T")

_lock = threading.Lock()
_current: Connection | None = None


@dataclass(frozen=True)
class Connection:
    """A connection to a cluster. A process has one at a time."""

    address: str | None
    runtime_env: Mapping[str, Any]
    reservations: Reservations
    actors: Any
    """Ray's class of the actors, which Ray sends to the cluster once."""


def connect(config: RayConfig, log: Path | None) -> Connection:
    """Return the connection to the config's cluster. It lasts until the process ends or connects to another
    cluster. Ray's messages go to `log`. Raise LaunchError if the connection fails."""
    global _current
    with _lock:
        cluster = config.address, config.runtime_env
        if _current is None or (_current.address, _current.runtime_env) != cluster:
            _current = None
            try:
                call(lambda: _init(config, log), stays=True).result(_CONNECT_S)
            except Exception as error:
                where = f" at {config.address}" if config.address else ""
                reason = str(error) or f"no answer within {_CONNECT_S:g} s"
                raise LaunchError(f"no connection to the Ray cluster{where}: {reason}") from error
            # `read` waits in the actor while `signal` is called.
            options = {"max_restarts": 0, "max_task_retries": 0, "max_concurrency": 8}
            actors = import_module("ray").remote(**options)(WorkerActor)
            _current = Connection(*cluster, Reservations(), actors)
        return _current


def call(function: Callable[[], T], *, stays: bool = False) -> Future[T]:
    """Call a function of Ray in a new thread; with `stays` this thread lives until the process ends. While
    the cluster's head is lost, Ray blocks; neither the kernel nor its end may wait for the head."""
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()  # nobody can cancel it

    def live() -> None:
        try:
            outcome.set_result(function())
            if stays:
                threading.Event().wait()
        except BaseException as error:  # noqa: BLE001 - Ray raises many kinds, and the caller gets it
            outcome.set_exception(error)

    threading.Thread(target=live, name="ray", daemon=True).start()
    return outcome


def keep_sigterm() -> None:
    """Restore Python's handler of SIGTERM. Call this in the main thread, after `connect`."""
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


def _init(config: RayConfig, log: Path | None) -> None:
    if config.address not in (None, "auto"):  # Ray itself tries for minutes, without a message
        host, _, port = config.address.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_S).close()
    settings = _SETTINGS | (_LOGIN if config.address is None else {})
    previous_values = {name: os.environ[name] for name in settings if name in os.environ}
    os.environ |= settings
    try:
        ray: Any = import_module("ray")
        logger = logging.getLogger("ray._private")  # `ray.init` resets the logger `ray`
        handler = logging.FileHandler(log, delay=True) if log else logging.NullHandler()
        logger.handlers, logger.propagate = [handler], False
        ray.shutdown()
        cluster_options = {"num_cpus": _CPUS, "object_store_memory": _STORE, "include_dashboard": False}
        ray.init(
            address=config.address or "local",
            runtime_env=dict(config.runtime_env) or None,
            configure_logging=False,
            log_to_driver=False,
            **(cluster_options if config.address is None else {}),
        )
    finally:
        for name in settings:  # no other process gets the login
            del os.environ[name]
        os.environ |= previous_values
