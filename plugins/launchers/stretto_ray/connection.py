"""This process's connection to a Ray cluster, or to one that it starts on this machine.

Three habits of Ray in the kernel's process would harm a run:

- In the main thread, `ray.init` takes SIGTERM over. So another thread connects, and waits until the process
  ends: the processes of a cluster on this machine end with the thread that has started them.
- Ray's handler for crashes takes SIGTERM, writes stacks, and hands the signal on once (`keep_sigterm`).
- Ray ends a process that has not reached the cluster's head for a minute, before it could write its summary.
  It gets a longer time (`_SETTINGS`); the run ends when its workers are lost and do not start again.
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
_PROBE_S = 10.0  # for the connection to the port of a head, which is there or not
_CPUS = 10_000
"""CPUs of a cluster on this machine: as with `local`, more threads than cores are no error."""
_STORE = 100 * 2**20
"""Bytes of its object store, which the launcher hardly uses."""
_SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_gcs_rpc_server_reconnect_timeout_s": "1000000"}
# The ports of a cluster on this machine are open to others, so it asks for a login of its own processes. Ray
# keeps a process's first one.
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
    """Ray's class of the actors, sent to the cluster once."""


def connect(config: RayConfig, log: Path | None) -> Connection:
    """Return the connection to a section's cluster, until the process ends or connects to another one. Ray's
    messages go to `log`. Raise LaunchError if there is none."""
    global _current
    with _lock:
        wanted = config.address, config.runtime_env
        if _current is None or (_current.address, _current.runtime_env) != wanted:
            _current = None
            try:
                call(lambda: _init(config, log), stays=True).result(_CONNECT_S)
            except Exception as error:
                at = f" at {config.address}" if config.address else ""
                reason = str(error) or f"no answer within {_CONNECT_S:g} s"
                raise LaunchError(f"no connection to the Ray cluster{at}: {reason}") from error
            # `read` waits in the actor while it gets signals.
            options = {"max_restarts": 0, "max_task_retries": 0, "max_concurrency": 8}
            actors = import_module("ray").remote(**options)(WorkerActor)
            _current = Connection(*wanted, Reservations(), actors)
        return _current


def call(function: Callable[[], T], *, stays: bool = False) -> Future[T]:
    """Call a function of Ray in a thread of its own, which `stays` keeps until the process ends. Ray blocks
    while the cluster's head is away; neither the kernel nor its end may wait for that."""
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
    """Give SIGTERM back to its handler in Python. Call this in the main thread, after `connect`."""
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


def _init(config: RayConfig, log: Path | None) -> None:
    if config.address not in (None, "auto"):  # Ray tries for minutes without a word
        host, _, port = config.address.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_S).close()
    settings = _SETTINGS | (_LOGIN if config.address is None else {})
    former = {name: os.environ[name] for name in settings if name in os.environ}
    os.environ |= settings
    try:
        ray: Any = import_module("ray")
        logger = logging.getLogger("ray._private")  # `ray.init` resets that of `ray`
        logger.handlers, logger.propagate = [_handler(log)], False
        ray.shutdown()
        own = {"num_cpus": _CPUS, "object_store_memory": _STORE, "include_dashboard": False}
        ray.init(
            address=config.address or "local",
            runtime_env=dict(config.runtime_env) or None,
            configure_logging=False,
            log_to_driver=False,
            **(own if config.address is None else {}),
        )
    finally:
        for name in settings:  # no other process gets the login
            del os.environ[name]
        os.environ |= former


def _handler(log: Path | None) -> logging.Handler:
    return logging.FileHandler(log, delay=True) if log else logging.NullHandler()
