"""TLS of the bus: who is refused, what a certificate holds, and where the bundled server listens."""

import asyncio
import socket
import ssl
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from bus_testing import running_server
from certificates import server_tls, write_certificates
from nats_cluster import LOGIN, Server, free_ports, login_file, outer_address
from patience import patience
from stretto.bus import connection
from stretto.bus.certificates import Authority
from stretto.bus.client import connect
from stretto.bus.connection import open_once
from stretto.bus.joining import write_bootstrap
from stretto.bus.listening import listening
from stretto.bus.messages.events import KernelLease
from stretto.bus.messages.subjects import Subjects
from stretto.bus.probe import faults_of_bus
from stretto.bus.server import Bootstrap, NatsServer
from stretto.bus.tls import TlsIdentity
from stretto.config import BusConfig, TlsConfig
from stretto.errors import BusError, ConfigError, NoAnswer
from stretto.machine.interfaces import is_loopback


def identity(folder: Path, client: str = "client") -> TlsIdentity:
    return TlsIdentity.of(tls_config(folder, client))


def tls_config(folder: Path, client: str = "client") -> TlsConfig:
    return TlsConfig(
        ca=f"{folder}/ca.pem", certificate=f"{folder}/{client}.pem", key=f"{folder}/{client}.key"
    )


@pytest.fixture
def certs(tmp_path: Path) -> Path:
    write_certificates(tmp_path / "certs", ["localhost", "127.0.0.1"], ["client"])
    return tmp_path / "certs"


@pytest.fixture
def tls_server(tmp_path: Path, certs: Path) -> Iterator[Server]:
    """A server with a store that asks its clients for certificates of `certs`."""
    store = {"store_dir": str(tmp_path / "store")}
    configuration = {"jetstream": store, "authorization": LOGIN, "tls": server_tls(certs)}
    with Server(tmp_path, "own", configuration) as server:
        yield server


def bootstrap(url: str, tls: TlsIdentity | None) -> Bootstrap:
    return Bootstrap(url=url, run="r", role="kernel", tls=tls, user=LOGIN["user"], password=LOGIN["password"])


# --------------------------------------------------------------------------------- who is refused


async def test_a_client_that_the_authority_has_certified_is_accepted(tls_server: Server, certs: Path) -> None:
    names = Subjects("r")
    async with connect(bootstrap(f"tls://{tls_server.address}", identity(certs))) as bus:
        await bus.store.make_log(names.journal_stream, names.of_journal)
        await bus.store.append(names.leases, KernelLease("here"), id="here1")


@pytest.mark.parametrize("client", ["none", "stranger"])
async def test_a_client_without_a_certificate_of_the_authority_is_refused(
    tls_server: Server, certs: Path, client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Authority.create("other", 1).client("client", 1)
    shown = TlsIdentity(ca=identity(certs).ca)
    if client == "stranger":
        shown = msgspec.structs.replace(shown, certificate=other.certificate, key=other.key)
    url = f"tls://{tls_server.address}"
    with pytest.raises(BusError, match="may want a client's certificate"):
        await open_once(bootstrap(url, shown), url, 10)
    monkeypatch.setattr(connection, "_CONNECT_S", 1.0)
    with pytest.raises(NoAnswer, match="may want a client's certificate"):
        async with connect(bootstrap(url, shown)):
            pytest.fail("it was let in")


async def test_a_server_of_another_authority_or_name_is_refused(
    tls_server: Server, certs: Path, tmp_path: Path
) -> None:
    url = f"tls://{tls_server.address}"
    believes_others = msgspec.structs.replace(identity(certs), ca=Authority.create("other", 1).text)
    with pytest.raises(BusError, match="its certificate is not accepted: unable to get local issuer"):
        await open_once(bootstrap(url, believes_others), url, 10)
    write_certificates(certs, ["elsewhere.example"])
    tls = {key: str(certs / name) for key, name in (("cert_file", "server.pem"), ("key_file", "server.key"))}
    with Server(tmp_path, "elsewhere", {"tls": tls}) as elsewhere:
        url = f"tls://{elsewhere.address}"
        with pytest.raises(BusError, match="its certificate is not accepted: IP address mismatch"):
            await open_once(bootstrap(url, identity(certs)), url, 10)


async def test_nothing_is_sent_to_a_server_that_offers_no_tls(certs: Path) -> None:
    """An attacker between client and server could offer none, to read the login."""
    received = asyncio.get_running_loop().create_future()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"version":"2.11.0","max_payload":1048576,"auth_required":true}\r\n')
        received.set_result(await reader.read())
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"tls://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    with pytest.raises(BusError, match="offers no TLS"):
        await open_once(bootstrap(url, identity(certs)), url, 10)
    assert await asyncio.wait_for(received, patience()) == b""
    server.close()


async def test_check_says_who_refuses_and_why(tls_server: Server, certs: Path, tmp_path: Path) -> None:
    closed = f"127.0.0.1:{free_ports(1)[0]}"
    url = f"tls://{tls_server.address},tls://{closed}"
    whole = BusConfig(url=url, credentials=login_file(tmp_path), tls=tls_config(certs))
    [away] = await faults_of_bus(whole, 10)
    assert away.message.startswith(f"no nats-server at {closed} (")
    assert away.severity == "warning"
    [_, few] = await faults_of_bus(msgspec.structs.replace(whole, replicas=3), 10)
    assert (few.path, few.severity) == ("bus.replicas", "environment")
    assert few.message.startswith("is 3, but the cluster has fewer servers")
    nameless = msgspec.structs.replace(whole, tls=TlsConfig(ca=f"{certs}/ca.pem"))
    [refused] = await faults_of_bus(nameless, 10)
    assert refused.severity == "environment"
    assert "may want a client's certificate" in refused.message
    [wrong] = await faults_of_bus(msgspec.structs.replace(whole, credentials=None), 10)
    assert f"nats-server at {tls_server.address}: Authorization Violation" in wrong.message


async def test_check_finds_what_the_login_may_not_do(tmp_path: Path) -> None:
    permissions = {"publish": ["$JS.API.INFO", "st.>"], "subscribe": [">"]}
    configuration = {
        "jetstream": {"store_dir": str(tmp_path / "store")},
        "authorization": {"users": [{**LOGIN, "permissions": permissions}]},
    }
    with Server(tmp_path, "strict", configuration) as server:
        config = BusConfig(url=f"nats://{server.address}", credentials=login_file(tmp_path))
        [fault] = await faults_of_bus(config, 10)
    assert fault.path == "bus.credentials"
    assert 'forbids what the run does: permissions violation for publish to "$js.api.stream' in fault.message
    with Server(tmp_path, "plain", {}) as server:
        [fault] = await faults_of_bus(BusConfig(url=f"nats://{server.address}"), 10)
    assert "it has no JetStream, or none for this account" in fault.message


# ------------------------------------------------------------------------------- the certificates


def test_certs_are_private_and_name_their_hosts(certs: Path) -> None:
    files = {path.name: stat.S_IMODE(path.stat().st_mode) for path in certs.iterdir()}
    names = [f"{name}.{suffix}" for name in ("ca", "client", "server") for suffix in ("key", "pem")]
    assert files == dict.fromkeys(names, 0o600)
    assert stat.S_IMODE(certs.stat().st_mode) == 0o700
    certificate = ssl._ssl._test_decode_cert(certs / "server.pem")  # pyright: ignore - no public function
    assert certificate["subjectAltName"] == (("DNS", "localhost"), ("IP Address", "127.0.0.1"))
    begins = ssl.cert_time_to_seconds(certificate["notBefore"])
    ends = ssl.cert_time_to_seconds(certificate["notAfter"])
    assert round((ends - begins) / 86400) == 365


def test_certs_keep_their_authority(certs: Path) -> None:
    authority, server = (certs / "ca.pem").read_text(), (certs / "server.pem").read_text()
    write_certificates(certs, ["other"], ["viewer"])
    assert (certs / "ca.pem").read_text() == authority
    assert (certs / "server.pem").read_text() != server
    assert identity(certs, "viewer").ca == identity(certs, "client").ca


def test_damaged_files_are_named_with_their_key(certs: Path) -> None:
    (certs / "text.pem").write_text("no certificate")
    with pytest.raises(ConfigError, match=r"bus\.tls\.ca: expected certificates as PEM text"):
        TlsIdentity.of(TlsConfig(ca=f"{certs}/text.pem"))
    with pytest.raises(ConfigError, match=r"bus\.tls\.certificate: expected a certificate and its own key"):
        TlsIdentity.of(TlsConfig(certificate=f"{certs}/client.pem", key=f"{certs}/server.key"))
    with pytest.raises(ConfigError, match=r"bus\.tls\.ca: .* cannot be read"):
        TlsIdentity.of(TlsConfig(ca=f"{certs}/nothing.pem"))


# ------------------------------------------------------------------------------ the bundled server


def test_only_loopback_counts_as_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.5", "localhost.example", "")))


def test_the_parts_of_a_listening_address() -> None:
    assert listening(BusConfig()).public is False
    assert listening(BusConfig(listen="127.0.0.1:4222")).public is False
    everywhere = listening(BusConfig(listen="0.0.0.0:4222", address="node7"))
    assert (everywhere.host, everywhere.port, everywhere.near) == ("0.0.0.0", 4222, "127.0.0.1")
    assert (everywhere.far, everywhere.public) == ("node7", True)
    assert {"node7", "127.0.0.1", "localhost", socket.gethostname()} <= set(everywhere.hosts)
    assert listening(BusConfig(listen="10.0.0.5")).far == "10.0.0.5"
    sixth = listening(BusConfig(listen="[::]:4222", address="node7"))
    assert (sixth.host, sixth.port, sixth.near) == ("::", 4222, "::1")
    assert replace(sixth, host="fe80::1").public


async def test_a_server_for_other_machines_admits_bootstrap_files_of_its_run_alone(tmp_path: Path) -> None:
    address = outer_address()
    folder, names = tmp_path / "bus", Subjects("r")
    async with running_server(tmp_path, BusConfig(listen="0.0.0.0", address=address)):
        kernel = Bootstrap.read(folder / "kernel.json")
        worker = Bootstrap.read(write_bootstrap(folder, "rollout-7"))
        assert kernel.url.startswith("tls://127.0.0.1:")
        assert worker.url.startswith(f"tls://{address}:")
        assert kernel.tls
        assert worker.tls
        assert kernel.tls.key != worker.tls.key
        assert not (folder / "ca.key").exists()  # nobody can make more certificates
        for file in (*folder.glob("*.key"), *folder.glob("*.json"), folder / "nats.conf"):
            assert stat.S_IMODE(file.stat().st_mode) & 0o077 == 0, file
        async with connect(kernel) as bus, connect(worker) as other:
            await bus.store.make_log(names.journal_stream, names.of_journal)
            assert await bus.store.append(names.leases, KernelLease("here"), id="here2")
            assert other.connected
        bare = msgspec.structs.replace(worker, tls=TlsIdentity(ca=worker.tls.ca))
        with pytest.raises(BusError, match="may want a client's certificate"):
            await open_once(bare, bare.url, 10)
        unencrypted = msgspec.structs.replace(worker, url=worker.url.replace("tls:", "nats:"), tls=None)
        with pytest.raises(BusError):
            await open_once(unencrypted, unencrypted.url, 10)


async def test_a_port_in_use_is_not_taken_for_ones_own(server: NatsServer, tmp_path: Path) -> None:
    place = server.url.removeprefix("nats://")
    with pytest.raises(ConfigError, match=rf"bus.listen: {place} is in use by another nats-server, test-run"):
        async with running_server(tmp_path / "second", BusConfig(listen=place), "second"):
            pytest.fail("it took the port")


async def test_a_server_listens_without_tls_only_if_told_to(tmp_path: Path) -> None:
    address = outer_address()
    async with running_server(tmp_path, BusConfig(listen=address, insecure=True)) as server:
        assert server.url.startswith(f"nats://{address}:")
        async with connect(Bootstrap.read(tmp_path / "bus" / "kernel.json")) as bus:
            assert bus.connected


async def test_an_address_that_the_machine_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"bus\.listen: cannot listen at 203\.0\.113\.9"):
        async with running_server(tmp_path, BusConfig(listen="203.0.113.9")):
            pytest.fail("it listens")
