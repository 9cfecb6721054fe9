"""Who may read the page, and what its answers allow."""

import hashlib
import signal
import socket
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.error import HTTPError

import psutil
import pytest
from aiohttp import CookieJar, web
from aiohttp.test_utils import TestClient, TestServer
from yarl import URL

from certificates import write_certificates
from commands import STRETTO, output_of
from made_run import make_run
from patience import patience
from stretto_ui.access import Access
from stretto_ui.server import application

Client = TestClient[web.Request, web.Application]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "one", steps=3)
    return folder


@pytest.fixture
def access() -> Access:
    return Access("127.0.0.1")


def _open(folder: Path, access: Access) -> Client:
    jar = CookieJar(unsafe=True)  # addresses may have cookies
    return TestClient(TestServer(application(folder, access)), cookie_jar=jar)


@pytest.fixture
async def client(runs: Path, access: Access) -> AsyncIterator[Client]:
    async with _open(runs, access) as client:
        yield client


@pytest.fixture
async def admitted(client: Client, access: Access) -> Client:
    """A client that has had the token."""
    await client.get(f"/?token={access.token}")
    return client


async def test_without_the_token_no_request_is_answered(client: Client) -> None:
    for path in ("/", "/api/runs", "/static/app.js", "/?token=guess", "/api/runs?token=guess", "/nothing"):
        response = await client.get(path)
        assert response.status == 401, path
        assert "quickstart" not in await response.text()


async def test_the_token_becomes_a_cookie_and_leaves_the_address(client: Client, access: Access) -> None:
    response = await client.get(f"/?token={access.token}")

    cookie = response.headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert 'http-equiv="refresh" content="0;url=/"' in await response.text()
    assert (await client.get("/api/runs")).status == 200
    assert access.token not in await (await client.get("/")).text()


async def test_a_foreign_host_name_is_refused(admitted: Client) -> None:
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example", ""):
        response = await admitted.get("/api/runs", headers={"Host": host})
        assert response.status == 421, host
    cookie = {"Cookie": "; ".join(f"{each.key}={each.value}" for each in admitted.session.cookie_jar)}
    for host in ("localhost", "localhost:9999", "127.0.0.1:8888", "[::1]:80", "[::1]"):
        assert (await admitted.get("/api/runs", headers={"Host": host} | cookie)).status == 200, host


async def test_nothing_can_be_written(admitted: Client) -> None:
    for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"):
        response = await admitted.request(method, "/api/runs")
        assert response.status == 405, method


async def test_a_browser_gets_an_icon_where_a_document_names_none(admitted: Client) -> None:
    response = await admitted.get("/favicon.ico")

    assert response.status == 200
    assert response.content_type == "image/svg+xml"
    assert (await response.text()).startswith("<svg ")


async def test_every_answer_forbids_foreign_scripts_and_frames(client: Client, access: Access) -> None:
    refused, unknown = await client.get("/"), await client.post("/")
    await client.get(f"/?token={access.token}")
    answers = [await client.get(path) for path in ("/", "/api/runs", "/api/none", "/static/app.js")]

    for response in (refused, unknown, *answers):
        policy = response.headers["Content-Security-Policy"].split("; ")
        assert {"default-src 'none'", "script-src 'self'", "frame-ancestors 'none'"} <= set(policy)
        assert "unsafe" not in response.headers["Content-Security-Policy"]
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert response.headers["Referrer-Policy"] == "no-referrer"
        assert "Access-Control-Allow-Origin" not in response.headers


async def test_a_request_reaches_only_the_page_and_the_runs(admitted: Client, runs: Path) -> None:
    (runs.parent / "secret.txt").write_text("secret")

    for path in (
        *("/static/../server.py", "/static/%2e%2e/server.py", "/static//etc/passwd"),
        *("/api/runs/..%2f..%2fsecret.txt", f"/api/runs/{'%2f'.join(runs.parts[1:])}"),
        *("/api/runs/one", "/api/runs/one/config"),
    ):
        response = await admitted.get(URL(path, encoded=True))
        assert response.status == 404, path
        assert "secret" not in await response.text()


async def test_links_do_not_lead_out_of_the_folder(tmp_path: Path, access: Access) -> None:
    secret = make_run(tmp_path / "elsewhere" / "secret", name="secret", steps=2)
    folder = tmp_path / "shown"
    linked = make_run(folder / "linked", steps=2)
    (linked / "summary.json").unlink()
    (linked / "summary.json").symlink_to(secret / "summary.json")
    (folder / "run").symlink_to(secret)
    async with _open(folder, access) as client:
        await client.get(f"/?token={access.token}")
        index = await (await client.get("/api/runs")).json()

    assert index["runs"] == []
    assert index["problems"] == ["linked/summary.json is a link that leads out of the run's folder"]


async def test_long_answers_are_compressed(admitted: Client) -> None:
    response = await admitted.get("/static/charts.js", headers={"Accept-Encoding": "gzip"})

    assert response.headers["Content-Encoding"] == "gzip"


def test_the_command_listens_on_loopback_alone_and_ends_with_an_interrupt(runs: Path) -> None:
    with subprocess.Popen([*STRETTO, "ui", runs], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        address = process.stdout.readline().strip()
        connections = psutil.Process(process.pid).net_connections()
        try:
            with urllib.request.urlopen(address) as page:
                assert page.status == 200
            with pytest.raises(HTTPError, match="401"):
                urllib.request.urlopen(address.partition("?")[0])
        finally:
            process.send_signal(signal.SIGINT)

    assert [each.laddr.ip for each in connections if each.status == "LISTEN"] == ["127.0.0.1"]
    assert process.returncode == 0


def test_the_server_ends_while_a_reader_waits_for_ever(runs: Path) -> None:
    program = (
        "import threading; from stretto.cli.main import app; from stretto_ui.runs import Runs\n"
        "Runs.get = lambda *_: (print('reading', flush=True), threading.Event().wait())\n"
        f"app(['ui', {str(runs)!r}])"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        address = URL(process.stdout.readline().strip())
        token = address.query["token"]
        cookie = f"stretto-{hashlib.sha256(token.encode()).hexdigest()[:8]}={token}"
        head = f"GET /api/runs/1 HTTP/1.1\r\nHost: localhost\r\nCookie: {cookie}\r\n\r\n"
        with socket.create_connection((address.host, address.port)) as request:
            request.sendall(head.encode())
            assert process.stdout.readline() == "reading\n"
            process.send_signal(signal.SIGTERM)
            try:
                assert process.wait(patience()) == 0
            finally:
                process.kill()


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    assert f"no folder '{tmp_path / 'none'}'" in output_of("ui", tmp_path / "none", status=2)


def test_other_machines_reach_the_page_with_tls_only(runs: Path, tmp_path: Path) -> None:
    arguments = ["ui", str(runs), "--host", "0.0.0.0"]
    assert "would read the page and its token" in output_of(*arguments, status=2)
    write_certificates(tmp_path / "certs", ["127.0.0.1"])
    command = [*STRETTO, *arguments, "--certificate", str(tmp_path / "certs" / "server.pem")]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout
        address = server.stdout.readline().strip()
        assert address.startswith("https://0.0.0.0:")
        trusted = ssl.create_default_context(cafile=tmp_path / "certs" / "ca.pem")
        with urllib.request.urlopen(address.replace("0.0.0.0", "127.0.0.1"), context=trusted) as answer:
            assert answer.status == 200
    finally:
        server.terminate()
        server.communicate()
    command[-1] = str(tmp_path / "none.pem")
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (refused.returncode, "none.key" in refused.stderr) == (2, True)
