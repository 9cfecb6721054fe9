"""`stretto report`: a file that holds the page, and answers of its server."""

import base64
import hashlib
import json
import re
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from aiohttp import CookieJar
from aiohttp.test_utils import TestClient, TestServer
from PIL import Image
from typer.testing import CliRunner
from yarl import URL

from browser import complaints, open_browser, requested
from made_run import make_run
from pages import Page, curve_of
from stretto.cli.main import app
from stretto.errors import ConfigError
from stretto.models.images import ImageFile, file_of
from stretto.records.samples.images import SampleImages
from stretto_ui.access import Access
from stretto_ui.saved import save_report
from stretto_ui.server import application

HOSTILE = "</script><script>document.title='owned'</script><!--<script><img src=x onerror=alert(1)>\x1b[31m"
PICTURE = ImageFile(file_of(Image.new("RGB", (500, 40), "red")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds of one configuration, and a hostile run whose samples have an image."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in (1, 2):
        make_run(folder / f"seed-{seed}", name="one", steps=40, seed=seed, lr=0.1)
    talk = [{"role": "user", "content": [HOSTILE, {"type": "image", "sha256": PICTURE.digest}]}]
    make_run(folder / "hostile", name=HOSTILE[:17], steps=3, answer=HOSTILE, messages=json.dumps(talk))
    SampleImages(folder / "hostile").write(PICTURE)
    return folder


@pytest.fixture(scope="module")
def file(folder: Path) -> Path:
    file = folder.parent / f"{folder.name}.html"
    assert save_report([folder, folder / "seed-1"], file) == ""
    return file


def held(file: Path) -> dict[str, Any]:
    [answers] = re.findall(r'<script type="application/json" id="saved">(.*?)</script>', file.read_text())
    assert "<" not in answers
    return json.loads(answers)


async def test_a_file_holds_what_the_server_answers(folder: Path, file: Path) -> None:
    access, kinds = Access("127.0.0.1"), set[str]()
    server = TestServer(application(folder, access))
    async with TestClient(server, cookie_jar=CookieJar(unsafe=True)) as client:
        await client.get(f"/?token={access.token}")
        for address, answer in held(file).items():
            kinds.add(re.sub(r"^runs/\w+|\?.*", "", address))
            if re.search(r"series|timeline|written", address):  # these depend on a number of points
                continue
            response = await client.get(URL(f"/api/{address}", encoded=True))
            if "/image" in address:
                content = base64.b64encode(await response.read()).decode()
                assert answer == {"address": f"data:image/png;base64,{content}"}
            else:
                assert await response.json() == answer, address
    of_run = ("", "config", "time", "staleness", "series", "timeline", "logs", "groups", "points", "group")
    assert kinds >= {"compare", "figures", *(f"/{name}".rstrip("/") for name in (*of_run, "image", "tokens"))}


def test_nothing_of_a_file_is_loaded_and_only_its_own_code_runs(file: Path) -> None:
    html = file.read_text()
    [policy] = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', html)
    assert html.index("http-equiv") < 1024 > html.index("charset"), "a browser looks no further"
    for kind, tags in (("script", r"<script(?: type=\"module\")?>"), ("style", "<style>")):
        found = re.findall(f"{tags}(.*?)</{kind}>", html, re.DOTALL)
        digests = [hashlib.sha256(each.encode()).digest() for each in found]
        hashes = [f"'sha256-{base64.b64encode(each).decode()}'" for each in digests]
        assert f"{kind}-src {' '.join(hashes)};" in policy
    assert policy.startswith("default-src 'none';")
    assert html.count("</script") == html.count("<script") == 3
    assert not re.search(r"^(import|export) ", html, re.MULTILINE)
    markup = re.sub(r"<(script|style).*?</\1>", "", html, flags=re.DOTALL)
    assert re.findall(r'(?:src|href)="(.{5})', markup) == ["data:", "#main"]


def test_what_has_no_room_is_left_out_and_named(tmp_path: Path) -> None:
    make_run(tmp_path / "large", steps=2, answer="8 17 " * 20_000)
    without = save_report([tmp_path / "large"], tmp_path / "report.html")
    assert without == "4 × tokens of a group"
    assert f"There was no room for {without}." in (tmp_path / "report.html").read_text()
    assert (tmp_path / "report.html").stat().st_size < 4_000_000


def test_a_run_that_cannot_be_read_is_named_in_the_file(tmp_path: Path) -> None:
    for name in ("good", "broken", "torn"):
        make_run(tmp_path / name, name=name, steps=2)
    (tmp_path / "broken" / "config.yaml").write_text("[")
    for each in (tmp_path / "torn" / "samples").iterdir():
        each.write_bytes(b"no parquet")
    save_report([tmp_path], tmp_path / "report.html")
    answers = held(tmp_path / "report.html")
    assert [row["name"] for row in answers["runs"]["runs"]] == ["good", "torn"]
    assert "broken" in answers["runs"]["problems"][0]
    assert [each for each in answers.values() if "samples cannot be read" in str(each)]
    with pytest.raises(ConfigError, match="broken"):
        save_report([tmp_path / "broken"], tmp_path / "report.html")


def test_the_command_replaces_no_report_unasked(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "written: report.html (0." in CliRunner().invoke(app, ["report", str(folder)]).output
    (tmp_path / "empty").mkdir()
    for arguments, message in (
        ([str(folder)], "report.html exists; name the file to write"),
        (["empty", "-o", "new.html"], "empty holds no run"),
        ([str(folder), "-o", "no/new.html"], "cannot write no/new.html"),
    ):
        with pytest.raises(ConfigError, match=message):
            CliRunner().invoke(app, ["report", *arguments], catch_exceptions=False)


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (375, True)])
def test_a_browser_shows_a_file_without_a_server(
    folder: Path, file: Path, tmp_path: Path, width: int, dark: bool
) -> None:
    ids = {Path(row["path"]).name: row["id"] for row in held(file)["runs"]["runs"]}
    one, hostile = ids["seed-1"], ids["hostile"]
    with open_browser(tmp_path / "profile", width=width, dark=dark) as browser:
        requested(browser)
        page = Page(browser, file.as_uri(), folder)

        def check(place: str, *selectors: str) -> None:
            page.open(place)
            for selector in selectors:
                page.one(selector)
            assert not [each for each in page.all(".asks") if each.is_displayed()]
            assert page.js("return document.documentElement.scrollWidth <= innerWidth")
            assert page.driver.title.endswith("stretto")

        check("", "#runs .pill", "footer")
        page.one("#compare").click()
        page.until(lambda: "2 seeds" in page.text(".legend.names"))
        page.js("arguments[0].scrollIntoView()", page.one(".chart"))
        page.one(".chart canvas")
        check(f"run/{one}/overview", "#time .column", "[data-staleness]")
        rewards = [line["reward"] for line in page.lines("seed-1") if "reward" in line]
        assert page.text("[data-tile=reward] .value") == f"{fmean(rewards[-10:]):.3f}"
        assert page.text(".live").startswith("report of 20")
        ground = page.js("return getComputedStyle(document.body).backgroundColor")
        assert ground == ("rgb(18, 19, 21)" if dark else "rgb(247, 247, 245)")
        check(f"run/{one}/curves?from=10&to=20")
        assert curve_of(page, "reward") == [(step, rewards[step - 1]) for step in range(9, 22)]
        check(f"run/{one}/timeline", "#share .legend")
        check(f"run/{one}/config", "[data-key='training.lr']")
        check(f"run/{one}/logs", "#lines .empty")
        check(f"run/{one}/samples?ticket=1&group=1", "main .note.bad")
        assert "This file does not hold this part of a run" in page.text("main")
        check(f"run/{hostile}/samples", "tr.link")
        page.one("tr.link").click()
        page.one("[data-value=text]").click()
        shown = HOSTILE.replace("\x1b", "\\x1b")
        page.until(lambda: page.text("[data-part=answer]") == shown)
        page.one("[data-value=conversation]").click()
        loaded = "return document.querySelector('.images img').naturalWidth"
        assert page.until(lambda: page.all(".images img") and page.js(loaded)) == 384
        page.one("[data-value=logprob]").click()
        page.until(lambda: page.text("[data-part=tokens]").endswith(shown))
        assert complaints(browser) == []
        assert set(requested(browser)) == {file.as_uri()}
