"""What the server says of runs, against the files of the runs."""

import io
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import pytest
from aiohttp import CookieJar
from aiohttp.test_utils import TestClient, TestServer
from PIL import Image

from kept_runs import keep_run
from made_run import make_run
from stretto.bus.server import lock_run
from stretto.models.images import ImageFile, file_of
from stretto.records.comparison import compare_runs
from stretto.records.living import listed
from stretto.records.run_folder import RunFolder
from stretto.records.samples.images import SampleImages
from stretto_ui import runs as ui_runs
from stretto_ui.access import Access
from stretto_ui.server import application

Ask = Callable[..., Awaitable[Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "one", name="one", steps=40)
    make_run(folder / "deeper" / "two", name="two", steps=20, seed=2)
    return folder


@pytest.fixture
async def ask(folder: Path) -> AsyncIterator[Ask]:
    """`await ask("one/series", keys="loss")`: an answer about a run, or `await ask("")` for the list. A run
    that is not in the list is named by its id, `/<id>/series`."""
    async for each in _asking(folder):
        yield each


async def _asking(folder: Path | None) -> AsyncIterator[Ask]:
    access = Access("127.0.0.1")
    server = TestServer(application(folder, access))
    async with TestClient(server, cookie_jar=CookieJar(unsafe=True)) as client:
        await client.get(f"/?token={access.token}")

        async def ask(path: str, status: int = 200, **query: Any) -> Any:
            if path and not path.startswith("/"):
                name, _, rest = path.partition("/")
                index = await (await client.get("/api/runs")).json()
                run_id = next(run["id"] for run in index["runs"] if run["name"] == name)
                path = f"/{run_id}/{rest}".rstrip("/")
            response = await client.get(f"/api/runs{path}", params=query)
            assert response.status == status, await response.text()
            is_json = response.content_type == "application/json"
            return await response.json() if is_json else await response.read()

        yield ask


def _lines(folder: Path, name: str = "one") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


async def test_the_list_has_all_runs_below_the_folder(ask: Ask, folder: Path) -> None:
    index = await ask("")

    steps = [line for line in _lines(folder) if "reward" in line]
    assert [(run["name"], run["path"]) for run in index["runs"]] == [("two", "deeper/two"), ("one", "one")]
    one = index["runs"][1]
    assert (one["state"], one["step"], one["total"]) == ("completed", 40, 40)
    assert one["reward"] == pytest.approx(fmean(line["reward"] for line in steps[-10:]))
    assert (one["score"], one["best"], one["failed"]) == (0.9, 0.9, 0.0)
    assert one["curve"][-1] == [40, steps[-1]["reward"]]
    rates = ["0.0006", "0.0003"]
    assert index["differing"] == {"steps": ["20", "40"], "seed": ["2", "1"], "training.lr": rates}
    assert not index["single"]


async def test_the_key_by_which_most_runs_differ_comes_first(tmp_path: Path) -> None:
    for number, (seed, lr) in enumerate([(1, 1e-3), (2, 1e-3), (3, 1e-3), (3, 1e-4)]):
        make_run(tmp_path / str(number), steps=3, seed=seed, lr=lr)
    async for ask in _asking(tmp_path):
        index = await ask("")
        assert list(index["differing"]) == ["seed", "training.lr"]
        settings = [run["setting"] for run in index["runs"]]
        assert len({*settings[:3]}) == 1
        assert settings[3] != settings[0]


async def test_the_overview_has_the_newest_figures(ask: Ask, folder: Path) -> None:
    facts = await ask("one")

    lines = _lines(folder)
    assert facts["last"] == [line for line in lines if "reward" in line][-1]
    assert facts["evaluations"] == [line for line in lines if "evaluation/accuracy" in line]
    assert facts["summary"]["ledger"]["trained"] == 160
    rewards = [line["reward"] for line in lines if "reward" in line]
    last, first = fmean(rewards[-10:]), fmean(rewards[:10])
    assert (facts["recent"]["reward"], facts["change"]) == pytest.approx((last, last - first))
    newest = [line["step_s"] for line in lines if "step_s" in line][-10:]
    assert facts["recent"]["step_s"] == pytest.approx(fmean(newest))
    assert facts["recent"]["ticket_tool_s"] is None
    assert facts["not_trained"] == [["all rewards are equal", 4]]
    assert {"reward", "loss", "reward/part_0"} <= set(facts["keys"])
    assert not {"step", "time_s", "calls", "ledger"} & set(facts["keys"])


async def test_a_comparison_is_that_of_the_command(tmp_path: Path) -> None:
    runs = [RunFolder(keep_run(tmp_path / name, shift=shift)) for name, shift in (("one", 0.0), ("two", 0.5))]
    async for ask in _asking(tmp_path):
        ids = {run["path"]: run["id"] for run in (await ask(""))["runs"]}
        answer = await ask("/../compare", runs=f"{ids['one']},{ids['two']}")
        assert answer == msgspec.json.decode(msgspec.json.encode(compare_runs(runs)))
        assert [each["run"] for each in answer["between"]] == ["two", "two"]
        assert answer["differences"] == {}
        refused = await ask("/../compare", runs=f"{ids['one']},none", status=400)
        assert "no run 'none'" in refused["error"]


async def test_curves_are_the_lines(ask: Ask, folder: Path) -> None:
    answer = await ask("one/series", keys="loss,evaluation%2Faccuracy,none")

    lines = _lines(folder)
    assert answer["curves"]["loss"]["y"] == [line["loss"] for line in lines if "loss" in line]
    evaluations = [line for line in lines if "evaluation/accuracy" in line]
    assert answer["curves"]["evaluation/accuracy"]["x"] == [line["step"] for line in evaluations]
    assert answer["curves"]["none"]["x"] == []
    window = await ask("one/series", keys="loss", x="time_s", start=10, end=20)
    assert window["curves"]["loss"]["x"] == [8, 10, 12, 14, 16, 18, 20, 22]


@pytest.mark.parametrize(
    ("path", "query", "fault"),
    [
        ("series", {"keys": "loss", "x": "loss"}, "no x-axis 'loss'"),
        ("series", {"keys": "loss", "start": "nan"}, "start is not a number"),
        ("series", {"keys": "loss", "smoothing": "1"}, "smoothing is 0 to below 1"),
        ("series", {"keys": "loss", "points": "1000000"}, "points is 1 to 4000"),
        ("samples", {"reward_from": "high"}, "a filter cannot be read"),
        ("samples", {"outcome": "lost"}, "a filter cannot be read"),
        ("samples", {"limit": "9999"}, "limit is a number from 0 to 200"),
        ("samples", {"offset": "-1"}, "offset is a number from 0"),
        ("samples", {"order": "price"}, "cannot be ordered by 'price'"),
        ("group", {}, "names no ticket"),
        ("tokens", {}, "names no ticket"),
    ],
)
async def test_wrong_questions_are_refused(ask: Ask, path: str, query: dict[str, str], fault: str) -> None:
    assert fault in (await ask(f"one/{path}", 400, **query))["error"]


async def test_small_views_are_those_of_the_files(ask: Ask) -> None:
    assert (await ask("one/staleness"))["counts"] == [[0, 160], [1, 160], [2, 320]]
    values = dict((await ask("two/config"))["values"])
    assert (values["training.lr"], values["name"]) == ("0.0006", '"two"')


async def test_samples_are_found_by_their_conditions(ask: Ask) -> None:
    page = await ask("one/samples", step_from=3, step_to=4, reward_from=1, order="sequence", limit=200)

    assert page["total"] == len(page["rows"]) > 0
    assert {row["step"] for row in page["rows"]} == {3, 4}
    assert {row["reward"] for row in page["rows"]} == {1.0}
    assert page["rows"][0]["text"] == "8 17"


async def test_groups_have_all_samples_of_each_ticket_that_has_one_that_fits(ask: Ask) -> None:
    page = await ask("one/groups", step_from=3, step_to=4, reward_from=1)

    assert [group["ticket"] for group in page["groups"]] == sorted(
        {row["ticket"] for row in (await ask("one/samples", step_from=3, step_to=4, reward_from=1))["rows"]},
        reverse=True,
    )
    for group in page["groups"]:
        rewards = [row["reward"] for row in group["samples"]]
        assert len(rewards) == 4
        assert rewards == sorted(rewards, reverse=True)
        assert (group["expected"], group["prompt_text"], group["purpose"]) == ("8 17", "3+5+9=", "train")
    first, second = [await ask("one/groups", limit=30, offset=offset) for offset in (0, 30)]
    assert [each["ticket"] for each in first["groups"] + second["groups"]] == list(range(159, 99, -1))
    assert first["more"]
    assert not (await ask("one/groups", limit=30, offset=130))["more"]


async def test_pages_of_samples_follow_each_other_and_a_text_is_found(ask: Ask) -> None:
    first, second = [await ask("one/samples", limit=10, offset=offset) for offset in (0, 10)]

    assert len({row["id"] for row in (*first["rows"], *second["rows"])}) == 20
    assert (first["rows"][0]["ticket"], first["total"], first["more"]) == (159, 640, True)
    assert len((await ask("one/samples", text="5+9"))["rows"]) == 50
    assert await ask("one/samples", text="zebra") == {"rows": [], "more": False, "total": None}


async def test_a_group_and_the_tokens_of_its_samples(ask: Ask) -> None:
    group = await ask("one/group", ticket=7)
    samples = await ask("one/tokens", ticket=7)
    sample = samples[2]

    ids = ["7/1/0", "7/1/1", "7/1/2", "7/1/3"]
    assert [row["id"] for row in group] == [row["id"] for row in samples] == ids
    assert group[0]["dataset_row"] == {"prompt": "3+5+9=", "answer": "8 17"}
    assert "".join(sample["pieces"]) == "3+5+9=8 17"
    assert sample["loss_mask"] == [False] * 6 + [True] * 4
    assert sample["advantages"] == [None] * 6 + [group[2]["reward"] - 0.5] * 4
    assert len(sample["logprobs"]) == len(sample["versions"]) == 10


async def test_the_images_of_a_row_are_shown_small(tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("large.png", "missing.png", "notes.txt")]
    Image.new("RGB", (2000, 1000), "red").save(files[0])
    Path(files[2]).write_text("secret")
    row = json.dumps({"images": [*files, {"bytes": 3}]})
    make_run(tmp_path / "runs" / "one", name="one", steps=2, row=row)
    async for ask in _asking(tmp_path / "runs"):
        shown = Image.open(io.BytesIO(await ask("one/image", ticket=3, number=0)))
        assert (shown.size, shown.getpixel((0, 0))) == ((384, 192), (255, 0, 0))
        assert "no such file" in (await ask("one/image", 400, ticket=3, number=1))["error"]
        refused = (await ask("one/image", 400, ticket=3, number=2))["error"]
        assert "is no image that can be read" in refused
        assert "secret" not in refused
        assert "has no image 3 in a file" in (await ask("one/image", 400, ticket=3, number=3))["error"]
        assert "has no image 0 in a file" in (await ask("one/image", 400, ticket=99, number=0))["error"]


async def test_images_of_conversations_are_shown_by_their_names_alone(tmp_path: Path) -> None:
    """An image that the workflow added, or one of the row. A file with another content has no name."""
    colours = ("red", "blue", "green")
    added, of_row, other = (ImageFile(file_of(Image.new("RGB", (50, 30), each))) for each in colours)
    text = ImageFile(b"secret")
    (tmp_path / "row.png").write_bytes(of_row.file)
    (tmp_path / "other.png").write_bytes(other.file)
    images = [str(tmp_path / "missing.png"), str(tmp_path / "row.png")]
    run = make_run(tmp_path / "runs" / "one", name="one", steps=2, row=json.dumps({"images": images}))
    for image in (added, text):
        SampleImages(run).write(image)
    false = run / "samples" / "images" / other.digest
    false.write_bytes(added.file)
    async for ask in _asking(tmp_path / "runs"):
        refused = partial(ask, "one/image", 400, ticket=3)
        for image, colour in ((added, (255, 0, 0)), (of_row, (0, 0, 255))):
            shown = Image.open(io.BytesIO(await ask("one/image", ticket=3, sha256=image.digest)))
            assert (shown.size, shown.getpixel((0, 0))) == ((50, 30), colour)
        for name in ("../../../other.png", str(tmp_path / "other.png"), "", other.digest.upper(), "a" * 63):
            assert "is no image's name" in (await refused(sha256=name))["error"]
        assert "cannot identify image file" in (await refused(sha256=text.digest))["error"]
        assert "has no image" in (await refused(sha256=other.digest))["error"]
        false.unlink()
        false.symlink_to(tmp_path / "other.png")
        assert "cannot be read" in (await refused(sha256=other.digest))["error"]


async def test_a_running_run_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ui_runs, "_SEARCH_S", 0.0)
    run = make_run(tmp_path / "runs" / "one", name="one", steps=10, finished=False)
    async for ask in _asking(tmp_path / "runs"):
        before = await ask("one")
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 11, "time_s": 30.0, "loss": 0.5, "new_figure": 1.0}) + "\n")
        after = await ask("one")
        make_run(tmp_path / "runs" / "later", name="later", steps=2)
        index = await ask("")

        assert (before["state"], before["step"], after["step"]) == ("stopped", 10, 11)
        assert before["revision"] != after["revision"]
        assert "new_figure" in after["keys"]
        assert "new_figure" not in before["keys"]
        assert [run["name"] for run in index["runs"]] == ["later", "one"]
        # There is no summary yet, so the kept samples are counted.
        assert sum(count for _, count in (await ask("one/staleness"))["counts"]) == 160


async def test_logs_are_shown_as_text_and_filtered(tmp_path: Path) -> None:
    logs = make_run(tmp_path / "one", name="one", steps=2) / "logs"
    async for ask in _asking(tmp_path):
        assert (await ask("one/logs"))["names"] == []
        logs.mkdir()
        events = [{"event": f"line {number}", "level": "info"} for number in range(1500)]
        events += [{"event": "worker lost", "level": "warning", "worker": "trainer-0", "exception": "Trace"}]
        (logs / "kernel.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events) + "cut")
        (logs / "inference-0.jsonl").write_text("not JSON \x1b[31m\n")

        kernel = await ask("one/logs")
        assert (kernel["names"], kernel["name"]) == (["inference-0", "kernel"], "kernel")
        assert len(kernel["lines"]) == kernel["most"] == 1000
        assert kernel["lines"][-2] == "[info     ] line 1499"
        worst = await ask("one/logs", problems=1)
        assert worst["lines"] == ["[warning  ] worker lost worker=trainer-0\nTrace"]
        assert (await ask("one/logs", text="LINE 149"))["lines"][0] == "[info     ] line 149"
        assert (await ask("one/logs", name="inference-0"))["lines"] == ["not JSON \\x1b[31m"]
        assert "has no log of '../x'" in (await ask("one/logs", status=400, name="../x"))["error"]


async def test_a_log_is_cut_by_the_attempts_of_a_resumed_run(tmp_path: Path) -> None:
    logs = make_run(tmp_path / "one", name="one", steps=2) / "logs"
    logs.mkdir()
    times = [f"2026-11-30T10:00:0{second}.0Z" for second in range(6)]

    def written(name: str, *lines: tuple[str, int]) -> None:
        events = [{"folder": "here", "event": text, "timestamp": times[at]} for text, at in lines]
        (logs / name).write_text("".join(json.dumps(event) + "\n" for event in events))

    written("kernel.jsonl", ("run", 0), ("step", 1), ("run", 3), ("step", 4))
    written("trainer-0.jsonl", ("one", 2), ("two", 5))
    async for ask in _asking(tmp_path):
        assert (await ask("one/logs"))["attempts"] == [times[0], times[3]]
        seen = {
            (name, attempt): [
                line[:22] for line in (await ask("one/logs", name=name, attempt=attempt))["lines"]
            ]
            for name in ("kernel", "trainer-0")
            for attempt in (0, 1, 2, 3)
        }
        assert seen["kernel", 1] == times[:2]
        assert seen["kernel", 2] == times[3:5]
        assert (seen["trainer-0", 1], seen["trainer-0", 2]) == (times[2:3], times[5:])
        assert len(seen["kernel", 0]) == len(seen["kernel", 3]) == 4


async def test_a_hostile_run_is_a_problem_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad, _ = (make_run(tmp_path / name, name=name, steps=2) for name in ("bad", "good"))
    with (bad / "config.yaml").open("a") as file:
        file.write("begun: 2026-11-23\n")
    (bad / "metrics.jsonl").write_text(f'{{"step": 3, "loss": 1{"0" * 400}, "reward": 1.0}}\n')
    async for ask in _asking(tmp_path):
        runs = (await ask(""))["runs"]
        assert [(run["name"], run["step"]) for run in runs] == [("bad", 3), ("good", 2)]
        assert ["begun", '"2026-11-23"'] in (await ask("bad/config"))["values"]
        monkeypatch.setattr("stretto_ui.server.overview", None)
        fault = (await ask("bad", status=500))["error"]
        assert fault.startswith("the files of this run cannot be shown: TypeError")
        (bad / "metrics.jsonl").write_text("no figures\n")
        assert "metrics.jsonl:1: not JSON" in (await ask(""))["problems"][0]
        (bad / "metrics.jsonl").unlink()
        os.mkfifo(bad / "metrics.jsonl")
        index = await ask("")
        assert [run["name"] for run in index["runs"]] == ["good"]
        assert "bad/metrics.jsonl cannot be read" in index["problems"][0]
        series = await ask(f"/{runs[0]['id']}/series", status=400, keys="loss")
        assert "not a regular file" in series["error"]


async def test_the_folder_of_one_run_shows_it_also_with_a_status_that_cannot_be_read(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one", name="one", steps=2)
    (run / "status.json").write_text('{"pid": 7}')
    async for ask in _asking(run):
        index, facts = await ask(""), await ask("one")
        assert index["single"]
        assert [each["path"] for each in index["runs"]] == ["."]
        assert (facts["step"], facts["status"]) == (2, None)
        assert "status.json is not the status of a run" in facts["fault"]


async def test_without_a_folder_living_runs_join_those_in_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ui_runs, "_SEARCH_S", 0.0)
    async for ask in _asking(None):
        nothing = {"runs": [], "differing": {}, "caution": "", "problems": []}
        assert await ask("") == {"folder": None, "single": False, **nothing}
        make_run(tmp_path / "runs" / "ended", name="ended", steps=2)
        other = make_run(tmp_path / "elsewhere", name="living", steps=2)
        with lock_run(other / "bus"), listed(other):
            both = [(each["name"], each["path"]) for each in (await ask(""))["runs"]]
            assert both == [("ended", str(tmp_path / "runs" / "ended")), ("living", str(other))]
            assert (await ask("living"))["state"] == "running"
        assert (await ask("living"))["state"] == "completed"  # it stays in the list
