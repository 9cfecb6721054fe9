"""Check the bus before a run starts: the servers of `bus.url`, or the nats-server that the run will start."""

import secrets
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import anyio.to_thread
import nats.errors
from nats.js import JetStreamContext
from nats.js.api import StorageType
from nats.js.errors import APIError, ServiceUnavailableError

from stretto.bus.connection import open_once, without_logins
from stretto.bus.listening import listening
from stretto.bus.messages.subjects import Subjects
from stretto.bus.server import Bootstrap, binary, bootstrap_of
from stretto.component import Problem
from stretto.config import BusConfig
from stretto.errors import BusError, ConfigError, together
from stretto.machine import clock
from stretto.machine.interfaces import is_loopback

_CONNECT_S = 3.0

_ANSWER_S = 4.0
"""Seconds for one request to the store. A cluster without a leader answers nothing."""
_SILENT_S = 15.0
"""A cluster that has just started elects its leader within this many seconds."""
_NO_LEADER, _TOO_FEW_SERVERS, _NO_CLUSTER = 10008, 10005, 10074
_PASSING = {_NO_LEADER: _SILENT_S, _TOO_FEW_SERVERS: 5.0}
"""Error code -> seconds for which it is no fault: servers of a new cluster have to find each other."""


def bus_problems(bus: BusConfig) -> Iterator[Problem]:
    """Check that the servers store messages, or that a server can start. Warn of connections without TLS."""
    if bus.servers:
        try:
            yield from anyio.run(faults_of_bus, bus, _CONNECT_S)
        except ConfigError as error:
            yield Problem(error.path, str(error))
            return
        if (open_servers := _open_servers(bus)) and not bus.insecure:
            yield Problem(
                "bus.url",
                f"no TLS to {', '.join(open_servers)}: whoever can read the network reads the run's "
                "credentials and samples; use tls:// (see docs/nats.md), or set `bus.insecure: true` if you "
                "trust the network",
                "warning",
            )
        if bus.replicas > len(bus.servers):
            yield Problem(
                "bus.url",
                f"names {len(bus.servers)} of at least {bus.replicas} servers: while these are down, no new "
                "process can connect; name all of them",
                "warning",
            )
        return
    try:
        binary()
    except BusError as error:
        yield Problem("bus", str(error), "environment")
    try:
        public = listening(bus).public
    except ConfigError as error:
        yield Problem(error.path, str(error), "environment")
        return
    if public and bus.insecure:
        yield Problem(
            "bus.insecure",
            f"nats-server will listen at {bus.listen} without TLS: whoever can read the network reads the "
            "run's credentials and samples, and with them can do all that its workers can",
            "warning",
        )


def _open_servers(bus: BusConfig) -> list[str]:
    """Return the servers on other machines to which connections have no TLS, without logins."""
    places = [urlsplit(server) for server in bus.servers]
    return [
        f"{place.hostname}:{place.port or 4222}"
        for place in places
        if place.scheme == "nats" and not is_loopback(place.hostname or "")
    ]


async def faults_of_bus(config: BusConfig, timeout_s: float) -> list[Problem]:
    """Connect to each server of `bus.url`, and test the store on one. Raise ConfigError for a faulty file."""
    bootstrap = bootstrap_of(config, f"check-{secrets.token_hex(4)}", "kernel")

    async def look(address: str) -> str:
        return await _fault_of_server(bootstrap, address, timeout_s)

    faults = dict(zip(config.servers, await together(look, config.servers), strict=True))
    texts = [fault for fault in faults.values() if fault]
    usable = [address for address, fault in faults.items() if not fault]
    if not usable:
        return [Problem("bus.url", "; ".join(texts), "environment")]
    warnings = [Problem("bus.url", f"{text}; the run starts with the others", "warning") for text in texts]
    fault = await _fault_of_store(bootstrap, usable[0], config, timeout_s)
    return [*warnings, *([fault] if fault else [])]


async def _fault_of_server(bootstrap: Bootstrap, address: str, timeout_s: float) -> str:
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
) -> Problem | None:
    """Create a stream as the run will, store a message in it, and delete the stream. Return the fault."""
    names, complaints = Subjects(bootstrap.run), list[str]()

    async def complain(error: Exception) -> None:
        if "permissions violation" in str(error):
            complaints.append(str(error).removeprefix("nats: "))
            asking.cancel()  # the server does not answer what it forbids

    asking = anyio.CancelScope()
    client = await open_once(bootstrap, address, timeout_s, complain)
    store = client.jetstream(timeout=_ANSWER_S)
    place = without_logins(address)
    began = clock.now()
    try:
        while not complaints:
            waited_s = clock.now() - began
            try:
                with anyio.CancelScope() as asking:
                    await _try_store(store, names, config.replicas)
                    return None
            except APIError as error:
                if waited_s >= _PASSING.get(error.err_code or 0, 0.0):
                    return _refusal(error, config, place)
            except (TimeoutError, nats.errors.Error) as error:
                if waited_s > _SILENT_S:
                    silence = (
                        f"the store of nats-server at {place} does not answer: {_text(error)}; has "
                        "its cluster a leader?"
                    )
                    return Problem("bus.url", silence, "environment")
            await anyio.sleep(0.2)
    finally:
        await client.close()
    key = "bus.credentials" if config.credentials else "bus.url"
    refusal = (
        f"nats-server at {place} forbids what the run does: {complaints[0]}; docs/nats.md has the permissions"
    )
    return Problem(key, refusal, "environment")


def _refusal(error: APIError, config: BusConfig, place: str) -> Problem:
    if error.err_code in (_TOO_FEW_SERVERS, _NO_CLUSTER):
        shortage = f"is {config.replicas}, but the cluster has fewer servers with JetStream now"
        return Problem("bus.replicas", f"{shortage}: {error.description}", "environment")
    text = (
        f"the store of nats-server at {place} cannot be used: {_text(error)}; does the account of "
        "the login have JetStream?"
    )
    return Problem("bus.url", text, "environment")


async def _try_store(store: JetStreamContext, names: Subjects, replicas: int) -> None:
    await store.account_info()
    await store.add_stream(
        name=names.log_stream, subjects=[names.groups], storage=StorageType.MEMORY, num_replicas=replicas
    )
    await store.publish(names.groups, b"")
    await store.delete_stream(names.log_stream)


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
