"""Try the servers of `bus.url` before a run starts: each address, the login, the store and its replicas."""

from __future__ import annotations

import secrets
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
import nats.errors
from nats.js.api import StorageType, StreamConfig
from nats.js.errors import APIError, ServiceUnavailableError

from stretto.bus.client import open_once, without_logins
from stretto.bus.messages import Subjects
from stretto.bus.server import Bootstrap, login_of
from stretto.bus.tls import TlsIdentity
from stretto.config import BusConfig
from stretto.errors import BusError

__all__ = ["BusFault", "faults_of_bus"]

_STORE_S = 10.0
"""Time limit of each question to the store. A cluster that has just started elects its leader first."""
_TOO_FEW_SERVERS = (10005, 10074)
"""Error codes of the server: too few servers for the replicas, and no cluster."""


@dataclass(frozen=True)
class BusFault:
    """Something that is wrong with the servers of `bus.url`."""

    key: str
    """The key of the run file, such as `bus.url`."""
    message: str
    fatal: bool = True
    """Whether the run cannot work. A cluster can with some of its servers."""


async def faults_of_bus(config: BusConfig, timeout_s: float) -> list[BusFault]:
    """Connect to each server of `bus.url`, and try the store on one of them.

    Args:
        timeout_s: time limit of each connection.

    Raises:
        ConfigError: if a file of `bus.credentials` or `bus.tls` is not what it should be.
    """
    bootstrap = _bootstrap(config)
    faults: dict[str, str] = {}
    with_login: list[str] = []

    async def look(address: str) -> None:
        fault = await _fault_of_server(bootstrap, address, timeout_s)
        if fault:
            faults[address] = fault
        else:
            with_login.append(address)

    async with anyio.create_task_group() as tasks:
        for address in config.servers:
            tasks.start_soon(look, address)
    texts = [faults[address] for address in config.servers if address in faults]
    if not with_login:
        return [BusFault("bus.url", "; ".join(texts))]
    missing = [BusFault("bus.url", f"{text}; the run starts with the others", fatal=False) for text in texts]
    fault = await _fault_of_store(bootstrap, with_login[0], config, timeout_s)
    return [*missing, *([fault] if fault else [])]


def _bootstrap(config: BusConfig) -> Bootstrap:
    user = password = creds = ""
    if config.credentials is not None:
        user, password, creds = login_of(config.credentials, "bus.credentials")
    return Bootstrap(
        url=",".join(config.servers),
        run=f"check-{secrets.token_hex(4)}",
        role="kernel",
        user=user,
        password=password,
        credentials_file=creds,
        tls=TlsIdentity.of(config.tls) if config.tls is not None else None,
    )


async def _fault_of_server(bootstrap: Bootstrap, address: str, timeout_s: float) -> str:
    """Return why the run cannot use the server at an address; empty if it can."""
    parts = urlsplit(address)
    host, port = parts.hostname or "", parts.port or 4222
    if fault := await anyio.to_thread.run_sync(_fault_of_address, host, port, timeout_s):
        return fault
    try:
        client = await open_once(bootstrap, address, timeout_s)
    except BusError as error:
        return f"nats-server at {host}:{port}: {error}"
    await client.close()
    return ""


async def _fault_of_store(
    bootstrap: Bootstrap, address: str, config: BusConfig, timeout_s: float
) -> BusFault | None:
    """Make a stream as the run will, store a message in it, and remove it. Return what does not work."""
    names, complaints = Subjects(bootstrap.run), list[str]()

    async def complain(error: Exception) -> None:
        complaints.append(str(error).removeprefix("nats: "))
        asking.cancel()  # the server does not answer what it forbids

    asking = anyio.CancelScope()
    client = await open_once(bootstrap, address, timeout_s, complain)
    store = client.jetstream(timeout=_STORE_S)
    stream = StreamConfig(
        name=names.log_stream,
        subjects=[names.groups],
        storage=StorageType.MEMORY,
        num_replicas=config.replicas,
    )
    try:
        with asking:
            await store.account_info()
            await store.add_stream(stream)
            await store.publish(names.groups, b"")
            await store.delete_stream(names.log_stream)
    except APIError as error:
        if error.err_code in _TOO_FEW_SERVERS:
            text = f"is {config.replicas}, and the cluster has not so many servers with JetStream now"
            return BusFault("bus.replicas", f"{text}: {error.description}")
        return BusFault(
            "bus.url", f"the store of nats-server at {without_logins(address)} cannot be used: {_text(error)}"
        )
    except (TimeoutError, nats.errors.Error) as error:
        return BusFault(
            "bus.url",
            f"the store of nats-server at {without_logins(address)} does not answer: {_text(error)}",
        )
    finally:
        await client.close()
    if complaints:
        key = "bus.credentials" if config.credentials else "bus.url"
        return BusFault(
            key, f"nats-server at {without_logins(address)} forbids what the run does: {complaints[0]}"
        )
    return None


def _text(error: Exception) -> str:
    if isinstance(error, ServiceUnavailableError) and not error.description:
        return "it has no JetStream, or none for this account"
    if isinstance(error, APIError) and error.description:
        return error.description
    return str(error).removeprefix("nats: ") or type(error).__name__


def _fault_of_address(host: str, port: int, timeout_s: float) -> str:
    try:
        with socket.create_connection((host, port), timeout_s) as probe:
            if probe.recv(4) == b"INFO":  # a nats-server sends first, even before TLS
                return ""
        return f"what answers at {host}:{port} is no nats-server"
    except OSError as error:
        return f"no nats-server at {host}:{port} ({error})"
