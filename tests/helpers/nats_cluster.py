"""Real nats-servers of a test's own: a cluster with JetStream on loopback, whose servers a test can kill and
start again, and single servers with any configuration."""

import json
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from patience import SOON_S, patience
from stretto.bus.listening import own_hosts
from stretto.bus.server import binary
from stretto.machine.interfaces import is_loopback

LOGIN = {"user": "me", "password": "secret"}


def login_file(folder: Path) -> str:
    """A file with the login of these servers, as `bus.credentials` names it."""
    file = folder / "login.json"
    file.write_text(json.dumps(LOGIN))
    return str(file)


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def outer_address() -> str:
    for host in own_hosts():
        if host[0].isdigit() and not is_loopback(host):
            return host
    pytest.skip("this machine has no address but loopback")


class Server:
    def __init__(self, folder: Path, name: str, configuration: Mapping[str, Any]) -> None:
        self.name = name
        self.port: int = configuration.get("port") or free_ports(1)[0]
        self.log = folder / f"{name}.log"
        self._file = folder / f"{name}.conf"
        here = {"server_name": name, "host": "127.0.0.1", "port": self.port, "log_file": str(self.log)}
        self._file.write_text(json.dumps({**here, **configuration}))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        self._process = subprocess.Popen([binary(), "-c", str(self._file)], stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + patience()
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                assert self._process.poll() is None, self.log.read_text()
                assert time.monotonic() < deadline, "a nats-server does not start"
                time.sleep(SOON_S)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def __enter__(self) -> "Server":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class Cluster:
    """Three servers of one cluster with JetStream, for the duration of a `with` block.

    Args:
        tls: the section `tls` of their configuration; None for connections without TLS.
    """

    def __init__(self, folder: Path, tls: Mapping[str, Any] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        clients, routes = (ports := free_ports(6))[:3], ports[3:]
        encrypted = {"tls": tls} if tls else {}
        common = {"authorization": LOGIN, "max_payload": 8 * 2**20, **encrypted}
        addresses = [f"nats-route://127.0.0.1:{port}" for port in routes]
        self.servers: list[Server] = []
        for number, (port, route) in enumerate(zip(clients, routes, strict=True)):
            of_cluster = {
                "name": "test",
                "host": "127.0.0.1",
                "port": route,
                "routes": addresses,
                **encrypted,
            }
            store = {"store_dir": str(folder / f"store-{number}")}
            own = {"port": port, "jetstream": store, "cluster": of_cluster}
            self.servers.append(Server(folder, f"n{number}", {**common, **own}))
        scheme = "tls" if tls else "nats"
        self.url = ",".join(f"{scheme}://{server.address}" for server in self.servers)

    def __enter__(self) -> "Cluster":
        for server in self.servers:
            server.start()
        return self

    def __exit__(self, *_: object) -> None:
        for server in self.servers:
            server.kill()
