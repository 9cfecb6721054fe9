"""The page in a browser: what it shows is what the run's files hold."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from PIL import Image
from selenium.webdriver import ActionChains, Keys
from selenium.webdriver.common.by import By

from browser import complaints, open_browser, requested, resize
from made_run import make_run
from pages import Page, curve_of, served
from stretto.models.images import ImageFile, file_of
from stretto.records.comparison import compare_runs
from stretto.records.figures import FIGURES, duration_text, figure
from stretto.records.run_folder import RunFolder, SampleFilter, SampleStore
from stretto.records.samples.images import SampleImages

pytestmark = pytest.mark.slow

AXE = (files("axe_core_python") / "axe.min.js").read_text()
HOSTILE = '<script>document.title="owned"</script><img src=x onerror="document.title=1">\x1b[31m'
TEXT = {"type": "text", "text": HOSTILE}
PICTURE = ImageFile(file_of(Image.new("RGB", (500, 40), "red")))
SMALL: dict[str, Any] = {"steps": 20, "groups": 1, "samples": 1}
"""A run with enough steps for means, for tests that look at several."""
OTHERS = [{"type": "image", "sha256": "../config.yaml"}, {"type": "image"}, None]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "one", name="one", steps=40)
    make_run(folder / "two", name="two", steps=30, seed=2)
    chat = [{"role": "user", "content": [TEXT, {"type": "image", "sha256": PICTURE.digest}, *OTHERS]}]
    make_run(folder / "hostile", name="hostile", steps=3, answer=HOSTILE, messages=json.dumps(chat))
    SampleImages(folder / "hostile").write(PICTURE)
    with (
        served(folder) as address,
        open_browser(tmp_path_factory.mktemp("browser") / "profile") as driver,
    ):
        yield Page(driver, address, folder)


@pytest.fixture(autouse=True)
def clean(page: Page) -> Iterator[None]:
    """After each test: the browser found no fault, and asked no other server."""
    complaints(page.driver)
    requested(page.driver)
    yield
    assert complaints(page.driver) == []
    assert [url for url in requested(page.driver) if not url.startswith(page.base)] == []


@contextmanager
def other_runs(page: Page, folder: Path) -> Generator[Page]:
    """The runs of another folder, in the same browser. They ask no other server either."""
    with served(folder) as address:
        other = Page(page.driver, address, folder)
        yield other
        page.driver.get("about:blank")  # asks no more, before its server ends
        assert [url for url in requested(page.driver) if not url.startswith((other.base, page.base))] == []
    page.driver.get(page.base)


@contextmanager
def sized(page: Page, width: int, height: int) -> Generator[None]:
    resize(page.driver, width, height)
    yield
    resize(page.driver)


def test_the_overview_shows_means_of_ten_steps_and_the_token_leaves_the_address(page: Page) -> None:
    assert "token" not in page.driver.current_url
    assert page.js("return document.cookie") == ""
    page.open(f"run/{page.run('one')}/overview")

    rewards = [line["reward"] for line in page.lines("one") if "reward" in line]
    last, first = fmean(rewards[-10:]), fmean(rewards[:10])
    assert page.text("[data-tile=reward] .value") == f"{last:.3f}"
    assert page.text("[data-tile=reward] .sub") == f"first 10 steps: {first:.3f}"
    assert page.text("[data-tile=zero_variance_groups] .value") == "25.0 %"
    assert not page.all("[data-tile=loss]")
    assert page.text("#steps") == "step 40 of 40"
    assert page.text("#state") == "completed"
    assert page.text("[data-account=trained]") == "trained 160"
    assert page.until(lambda: page.text("[data-staleness='2']")) == "320 · 50.0 %"
    assert page.text("#verdict") == "finished, learned: reward +0.300; bound by training"


def test_the_time_of_a_step_is_stacked(page: Page) -> None:
    page.open(f"run/{page.run('one')}/overview")

    lines = [line for line in page.lines("one") if line["step"] > 1 and "reward" in line]
    waited = fmean(line["wait/evaluation_s"] for line in lines)
    page.until(lambda: page.all("#time .column"))
    shown = [each.text for each in page.all("#share .legend [data-part]")]
    assert shown == [each.text for each in page.all("#time .legend [data-part]")]
    widths = [each.size["width"] for each in page.all("#share .stack > div")]
    assert [round(100 * each / sum(widths)) for each in widths] == pytest.approx(
        [int(each.rpartition("· ")[2].removesuffix(" %")) for each in shown], abs=1
    )
    parts = {"training time": 1.2, "wait for stretto itself": 0.3, "wait for groups": 0.5}
    parts["wait for evaluations"] = waited
    whole = sum(parts.values())
    assert shown == [f"{name} {duration_text(s)} · {100 * s / whole:.0f} %" for name, s in parts.items()]
    titles = [str(each.get_attribute("title")) for each in page.all("#time .column")]
    assert len(titles) == 39
    assert titles[8] == (
        "step 10: training time 1.2 s, wait for stretto itself 300 ms, wait for groups 500 ms, "
        "wait for evaluations 3.0 s"
    )
    heights = [each.size["height"] for each in page.all("#time .column:nth-child(10) > div")]
    assert [each / sum(heights) for each in heights] == pytest.approx([0.24, 0.06, 0.1, 0.6], abs=0.02)
    colours = {each.value_of_css_property("background-color") for each in page.all("#time .column > div")}
    assert len(colours) == 4


def test_advice_leads_to_samples_and_keys_and_marks_the_curves(page: Page) -> None:
    overview = f"run/{page.run('one')}/overview"
    page.open(overview)

    said = "12 % of the answers are truncated; raise sampling.max_tokens from 32 to 64"
    words = page.until(lambda: page.text("[data-rule=truncation]"))  # the page may draw it again meanwhile
    assert words == f"truncation since step 3 · samples\n{said}"
    plot = page.one(".chart[data-key=reward] .u-over")
    page.js("arguments[0].scrollIntoView({block: 'center'})", plot)
    moved = ActionChains(page.driver).move_to_element_with_offset(plot, -(plot.size["width"] // 2) + 1, 0)
    for _ in range(plot.size["width"] // 8):  # the mark is at step 3 of 40
        moved = moved.move_by_offset(1, 0)
        moved.perform()
        if page.text(".chart[data-key=reward] .at") == "step 3 · truncation":
            break
        moved = ActionChains(page.driver)
    assert page.text(".chart[data-key=reward] .at") == "step 3 · truncation"
    page.until(lambda: page.one("[data-rule=truncation] .wrap a").click() or True)
    assert page.until(lambda: page.one("[data-search]").get_attribute("value")) == "sampling.max_tokens"
    page.open(overview)
    page.until(lambda: page.one("[data-rule=truncation] h3 a").click() or True)
    page.until(lambda: page.all("#f-step_from"))
    assert page.one("#f-step_from").get_attribute("value") == "3"
    assert {row[2] for row in page.until(lambda: page.cells("#samples"))} == {"3"}


def test_figures_have_the_text_and_the_meaning_of_the_table(page: Page) -> None:
    page.open(f"run/{page.run('one')}/overview")
    values = (0.0, 0.12344, -7.3, 42, 98765.4, 3e-6)
    cases = [(key, value) for key in FIGURES for value in values if FIGURES[key].unit != "s" or value >= 0]
    cases += [("reward/part_1", 0.5), ("constructor", 0.5)]
    script = (
        "const [cases, done] = arguments; import('/static/figures.js')"
        ".then(async (page) => { await page.loadFigures(); return page; })"  # the view may be slower
        ".then((page) => done(cases.map(([key, value]) => page.figureText(key, value))))"
    )
    shown = page.driver.execute_async_script(script, cases)
    expected = [re.sub(r"e-0", "e-", figure(key).text(value)) for key, value in cases]
    assert [re.sub(r"\.?0*e", "e", each) for each in shown] == expected
    assert page.text(".chart[data-key=entropy] h2") == FIGURES["entropy"].title
    tip = page.one(".chart[data-key=entropy] h2").get_attribute("title")  # pyright: ignore[reportUnknownMemberType]
    assert tip == f"{FIGURES['entropy'].meaning} (entropy)"


def test_a_wide_tile_leaves_no_empty_column(page: Page) -> None:
    page.open(f"run/{page.run('one')}/overview")
    page.one("#tiles .tile")
    wide = "Object.assign(document.createElement('div'), {className: 'tile wide'})"
    page.js(f"document.querySelector('#tiles').append({wide})")
    style = "getComputedStyle(document.querySelector('#tiles'))"
    for width, expected in ((1440, 8), (1000, 4), (390, 2)):
        with sized(page, width, 900):
            assert page.js(f"return {style}.gridTemplateColumns.split(' ').length") == expected


def test_a_drag_over_a_chart_shows_the_part_in_all_charts(page: Page) -> None:
    page.open(f"run/{page.run('one')}/curves")
    plot = page.one(".chart[data-key=reward] .u-over")
    requested(page.driver)

    ActionChains(page.driver).move_to_element_with_offset(plot, 0, 0).click_and_hold().move_by_offset(
        plot.size["width"] // 4, 10
    ).release().perform()

    page.until(lambda: any("start=" in url for url in requested(page.driver)))
    page.until(lambda: page.one(".tools button:not([data-value])").is_enabled())
    assert 5 < len(curve_of(page, "reward")) < 35
    assert 5 < len(curve_of(page, "reward_std")) < 35


def test_the_address_holds_the_view_of_curves(page: Page) -> None:
    run = page.run("one")
    page.open(f"run/{run}/curves?find=gradient&y=log&from=3&to=9")
    page.until(lambda: len(page.all(".chart canvas")) == 1)
    assert page.one("[data-value=log]").get_attribute("aria-pressed") == "true"
    norms = {line["step"]: line["grad_norm"] for line in page.lines("one") if "grad_norm" in line}
    shown = {step: norms[step] for step in range(2, 11)}
    assert dict(curve_of(page, "grad_norm")) == pytest.approx(shown, abs=1e-6)
    page.open(f"run/{run}/curves")
    page.one("[data-value=time_s]").click()
    page.one("[data-value=log]").click()
    page.until(lambda: "x=time_s&y=log" in page.driver.current_url)


def test_a_chart_is_downloaded_with_its_intervals(page: Page) -> None:
    page.open(f"run/{page.run('one')}/curves?find=accuracy")
    chart = ".chart[data-key='evaluation/accuracy']"
    assert page.until(lambda: page.text(f"{chart} .values")) == "0.900 at version 40"
    page.until(lambda: page.all(".chart canvas"))
    page.js(
        "window.saved = []; const real = URL.createObjectURL;"
        "URL.createObjectURL = (blob) => {"
        "  blob.text().then((text) => saved.push([blob.type, text])); return real(blob); }"
    )
    page.one(f"{chart} [title*=width]").click()
    for each in page.all(f"{chart} .files button"):
        each.click()
    page.until(lambda: page.js("return saved.length") == 2)
    (kind, csv), (picture, _) = sorted(page.js("return saved"), reverse=True)
    assert (kind, picture) == ("text/csv", "image/png")
    assert csv.splitlines()[0] == "run,figure,step,value,ci95,sd"
    evaluations = [line for line in page.lines("one") if "evaluation/accuracy" in line]
    for line, row in zip(evaluations, csv.splitlines()[1:], strict=True):
        run, key, version, value, half, _ = row.split(",")
        accuracy, count = line["evaluation/accuracy"], line["evaluation/samples"]
        assert (run, key, version) == ('"one"', '"evaluation/accuracy"', str(line["step"]))
        assert float(value) == accuracy
        assert float(half) == pytest.approx(1.96 * (accuracy * (1 - accuracy) / count) ** 0.5, rel=1e-3)


def test_smoothing_adds_a_mean(page: Page) -> None:
    page.open(f"run/{page.run('one')}/curves")
    page.one(".chart[data-key=reward] canvas")

    slider = page.one("#smoothing")
    slider.send_keys(Keys.END)
    page.until(lambda: page.all(".chart[data-key=reward] .values .faint")[0].text)

    last = [line for line in page.lines("one") if "reward" in line][-1]["reward"]
    values = page.text(".chart[data-key=reward] .values").split()
    assert float(values[1]) == pytest.approx(last, rel=1e-3)
    assert float(values[0]) < last
    slider.send_keys(Keys.HOME)


def test_runs_are_sorted_selected_and_compared(page: Page) -> None:
    page.open("")
    page.one("#runs tbody tr")
    page.driver.find_element(By.XPATH, "//th//button[text()='step']").click()
    steps = "return [...document.querySelectorAll('#runs td.step')].map((cell) => cell.textContent)"
    assert page.js(steps) == ["40 / 40", "30 / 30", "3 / 3"]

    best = page.js("return document.querySelector('.highest').closest('tr').dataset.id")
    found = RunFolder(page.folder / "one"), RunFolder(page.folder / "two")
    newest = [run.evaluations[-1]["evaluation/accuracy"] for run in found]
    assert best == page.run(("one", "two")[newest.index(max(newest))])

    for name in ("one", "two"):
        page.one(f"[aria-label='Select {name}']").click()
    page.one("#compare").click()

    figures = {row[0]: row for row in page.until(lambda: page.cells("#figures"))}
    for run in compare_runs([RunFolder(page.folder / name) for name in ("one", "two")]).runs:
        duration, reward, last = figures[run.label][3:6]
        assert (duration, reward) == (duration_text(run.wall_s), f"{run.reward:.3f}")
        assert run.last is not None
        assert last == f"{run.last.score} v{run.last.version}"
    assert page.cells("#differing") == [["one", "40", "1", "0.0003"], ["two", "30", "2", "0.0006"]]
    assert page.until(lambda: page.text(".chart[data-key=reward] .values")).count("\n") <= 1
    points = curve_of(page, "reward")
    assert len(points) == 70

    page.open(f"compare?runs={page.run('one')},{page.run('two')}&tab=config")
    rows = [row for row in page.until(lambda: page.cells("#config")) if len(row) == 3]
    assert rows == [["steps", "40", "30"], ["seed", "1", "2"], ["lr", "0.0003", "0.0006"]]


def test_runs_that_differ_in_their_seed_are_one_row(page: Page, tmp_path: Path) -> None:
    runs = [
        RunFolder(make_run(tmp_path / f"swept-{n}", name="swept", seed=seed, lr=lr, **SMALL))
        for n, (seed, lr) in enumerate([(1, 1e-3), (2, 1e-3), (3, 1e-3), (3, 1e-4)])
    ]
    last = [[value for _, value in run.series("reward")][-10:] for run in runs]
    with other_runs(page, tmp_path) as swept:
        swept.until(lambda: len(swept.all("#runs tr.link")) == 2)
        values = {each.text: each for each in swept.all("#runs td.value")}
        assert values.keys() == {"1 2 3", "0.001", "3", "0.0001"}
        [group] = [row for row in swept.all("#runs tr.link") if "3 seeds" in row.text]
        means = [fmean(each) for each in last[:3]]
        assert f"{fmean(means):.3f} ± {stdev(means):.3f}" in group.text
        assert len(group.find_elements(By.CSS_SELECTOR, ".spark path")) == 3

        group.find_element(By.CSS_SELECTOR, "button").click()
        members = [row.text.split()[1] for row in swept.all("#runs tr.member")]
        assert members == ["swept-2", "swept-1", "swept-0"]
        swept.one("tr.member [aria-label='Hide swept']").click()
        swept.until(lambda: "2 seeds" in swept.text("#runs"))
        swept.open("")
        swept.until(lambda: "2 seeds" in swept.text("#runs"))
        swept.one("#hidden").click()
        swept.until(lambda: "3 seeds" in swept.text("#runs"))
        swept.one("#together").click()
        swept.until(lambda: len(swept.all("#runs tr.link")) == 4)
        swept.all("[aria-label='Pin swept']")[3].click()
        swept.one("th [type=button]").click()
        pinned = swept.until(lambda: swept.all("#runs tr.link [aria-pressed=true]"))
        assert pinned[0].get_attribute("title") == "Pin"


def test_the_runs_of_a_sweep_stand_together_below_its_name(page: Page, tmp_path: Path) -> None:
    for number, place in enumerate(["sweep-one/a", "alone", "sweep-one/b"]):
        make_run(tmp_path / place, name=place[-1], seed=1, lr=1e-4 * (1 + number), **SMALL)
    with other_runs(page, tmp_path) as swept:
        swept.until(lambda: swept.all("#runs tr.folder"))
        names = [row[1].partition(" ")[0] for row in swept.cells("#runs")]
        assert sorted(names[names.index("sweep-one") :][:3]) == ["a", "b", "sweep-one"]
        swept.one("[aria-label='Select all in sweep-one']").click()
        swept.until(lambda: swept.text("#compare") == "Compare 2")
        with sized(page, 390, 844):
            assert swept.text("#runs tr.folder") == "sweep-one 2 runs"
            assert _unreadable(swept) == []
        swept.open("run/none/overview")
        assert "there is no such run" in swept.text("[role=alert]")
        complaints(swept.driver)  # the browser notes that the answer was 404
        swept.driver.find_element(By.LINK_TEXT, "All runs").click()
        swept.one("#runs tr.folder")


def test_seeds_are_compared_as_a_mean_with_its_band(page: Page, tmp_path: Path) -> None:
    runs = [
        RunFolder(make_run(tmp_path / f"r{n}", name=f"r{n}", seed=seed, lr=lr, **SMALL))
        for n, (seed, lr) in enumerate([(1, 1e-3), (2, 1e-3), (1, 1e-4), (2, 1e-4)])
    ]
    last = [dict(run.series("reward"))[20] for run in runs]
    with other_runs(page, tmp_path) as swept:
        swept.open(f"compare?runs={','.join(swept.run(f'r{number}') for number in range(4))}")
        legend = swept.until(lambda: swept.text(".legend.names"))
        assert legend.split("\n") == ["training.lr 0.001 (2 seeds)", "training.lr 0.0001 (2 seeds)"]
        values = swept.until(lambda: swept.text(".chart[data-key=reward] .values"))
        assert values.split() == [f"{fmean(each):.3f}" for each in (last[:2], last[2:])]
        [_, group] = compare_runs(runs).groups
        assert group.difference is not None
        first, second = legend.splitlines()
        said = f"{second} minus {first}: +{group.difference}, paired by 2 seeds"
        assert said in swept.text("#differences")
        swept.one("[data-value=apart]").click()
        swept.until(lambda: len(swept.text(".chart[data-key=reward] .values").split()) == 4)
        assert swept.text(".legend.names").split() == ["r0", "r1", "r2", "r3"]
        swept.driver.refresh()
        swept.until(lambda: len(swept.text(".chart[data-key=reward] .values").split()) == 4)


def test_twenty_runs_are_compared_and_no_two_look_the_same(page: Page, tmp_path: Path) -> None:
    for number in range(20):
        make_run(tmp_path / str(number), name=f"swept-{number}", seed=number, **SMALL)
    with other_runs(page, tmp_path) as many:
        many.open(f"compare?runs={','.join(many.run(f'swept-{number}') for number in range(20))}")
        many.until(lambda: len(many.all("#figures tbody tr")) == 20)
        chart = many.one(".chart[data-key=reward]")
        page.js("arguments[0].scrollIntoView()", chart)
        signs = "[...document.querySelectorAll('.chart[data-key=reward] .values line')]"
        looks = "((each) => each.style.stroke + ' ' + each.getAttribute('stroke-dasharray'))"
        script = f"return {signs}.map({looks})"
        assert len(set(many.until(lambda: page.js(script)))) == 20


def test_the_configuration_begins_with_what_the_user_has_set(page: Page) -> None:
    file = page.folder / "two" / "origin.json"
    origin = {
        "written": ["steps", "training.lr"],
        "defaults": {"steps": "30", "training.lr": "1e-06", "seed": "1"},
        "host": "vm",
        "packages": {"torch": "2.13"},
    }
    file.write_text(json.dumps(origin))
    page.open(f"run/{page.run('two')}/config")
    assert page.text("#origin") == "host\nvm\npackages\ntorch 2.13"
    rows = page.cells("#config")
    assert [row[0] for row in rows[:5]] == ["set by you", "steps", "training.lr", "defaults", "name"]
    assert [row[1] for row in rows[1:3]] == ["30 (the default)", "0.0006 (default: 1e-06)"]
    file.unlink()


def test_the_timeline_names_what_is_below_the_pointer(page: Page) -> None:
    page.open(f"run/{page.run('one')}/timeline")
    canvas = page.one("#timeline")
    page.until(lambda: page.text("#share"))
    assert page.text("#share").endswith("7.2 s · 30 %")  # 0.6 s of each of 12 steps of 2 s

    middle: int = canvas.size["height"] // 2
    ActionChains(page.driver).move_to_element_with_offset(canvas, 560, 30 - middle).perform()
    page.until(lambda: "step 40: 4 tickets" in page.text(".tip"))

    window = page.js(
        "return fetch(`/api/runs/${arguments[0]}/timeline?width=1000`).then((answer) => answer.json())",
        page.run("one"),
    )
    left, width = 132, int(canvas.size["width"])
    for step in RunFolder(page.folder / "one").history.steps[-12:]:
        share = ((step.began + step.ended) / 2 - window["start"]) / (window["end"] - window["start"])
        across = round(left + share * (width - left) - width / 2)
        ActionChains(page.driver).move_to_element_with_offset(canvas, across, 30 - middle).perform()
        text = f"step {step.version}: {len(step.figures.tickets)} tickets"
        page.until(lambda: text in page.text(".tip"))  # noqa: B023 - called in this turn
        assert page.text(".tip").endswith(f", {duration_text(step.ended - step.began)}")
    before = page.text(".tools .mono")
    canvas.send_keys("+")
    page.until(lambda: page.text(".tools .mono") != before)


def test_the_timeline_shows_no_figures_of_another_window(page: Page) -> None:
    page.open(f"run/{page.run('one')}/timeline")
    page.until(lambda: page.text("#share").endswith("7.2 s · 30 %"))
    page.js(
        "const real = window.fetch; window.fetch = (...call) => String(call[0]).includes('/timeline?')"
        " ? new Promise((done) => { window.release = () => done(real(...call)); }) : real(...call);"
    )

    page.driver.find_element(By.XPATH, "//button[text()='Whole run']").click()

    page.until(lambda: page.js("return window.release !== undefined"))
    assert page.text(".tools .mono").endswith("loading")
    assert page.text("#share").endswith("Loading.")
    assert "loading" in (page.one("#timeline").get_attribute("class") or "")  # pyright: ignore[reportUnknownMemberType]
    page.js("window.release()")
    page.until(lambda: page.text("#share").endswith("24 s · 30 %"))
    assert not page.text(".tools .mono").endswith("loading")
    assert page.one("#timeline").get_attribute("class") == ""  # pyright: ignore[reportUnknownMemberType]


def test_samples_are_filtered_and_shown_with_their_group(page: Page) -> None:
    run = page.run("one")
    page.open(f"run/{run}/samples")
    assert page.until(lambda: page.text("#count")) == "1 to 4"
    rows = RunFolder(page.folder / "one").samples.find(SampleFilter(step=(40, 40)), limit=None)
    for ticket, outcome, step, rewards, prompt, expected, answer in page.cells("#samples"):
        right = [row["reward"] for row in rows if row["ticket"] == int(ticket)].count(1.0)
        assert (outcome, step, rewards) == ("trained", "40", f" {right}/4 right")
        assert (prompt, expected, answer) == ("3+5+9=", "8 17", "8 17")
    right = [row["reward"] for row in rows].count(1.0)
    assert page.text("#right") == f"4 groups: {right}/16 right"
    page.one("#f-step").send_keys(Keys.HOME)
    page.until(lambda: {row[2] for row in page.cells("#samples")} == {"1"})

    page.open(f"run/{run}/samples?view=list&purpose=train")
    assert page.until(lambda: page.text("#count")) == "1 to 50 of 640"
    page.one("summary").click()
    page.one("#f-ticket").send_keys("7")
    page.until(lambda: page.text("#count") == "1 to 4 of 4")
    assert [row[0] for row in page.cells("#samples")] == ["7/1/0", "7/1/1", "7/1/2", "7/1/3"]

    page.driver.find_element(By.XPATH, "//summary[text()='Reward against length']").click()
    points = page.until(lambda: page.all("#scatter circle"))
    store = SampleStore(page.folder / "one")
    assert {each.get_attribute("textContent") for each in points} == {
        f"{row['id']}: reward {row['reward']:g}, {row['sampled']} tokens" for row in store.ticket(7)
    }
    page.js("arguments[0].parentElement.dispatchEvent(new MouseEvent('click'))", points[0])
    page.until(lambda: len(page.all(".group article")) == 4)
    page.driver.back()
    page.one("tr[data-id='7/1/2']").click()
    page.until(lambda: len(page.all(".group article")) == 4)
    rewards = [each.text.split("\n")[0] for each in page.all(".group article h2")]
    assert rewards == sorted(rewards, reverse=True)
    assert page.text("#rewards") == f"{rewards.count('reward 1')}/4 right"
    assert page.text("#prompt") == "3+5+9="
    assert page.text(".group article [data-part=answer]") == "8 17"
    assert page.text("#row") == "answer\n8 17", "the prompt is shown once"


def test_the_first_word_that_differs_from_the_row_is_marked(page: Page, tmp_path: Path) -> None:
    marked = {"8 19 3": "19", "8 17 5": "5", "8 1": "", "9 17": ""}
    for number, answer in enumerate(marked):
        make_run(tmp_path / str(number), name=f"said-{number}", steps=2, answer=answer, lr=number + 1)
    with other_runs(page, tmp_path) as shown:
        for number, (answer, wrong) in enumerate(marked.items()):
            shown.open(f"run/{shown.run(f'said-{number}')}/samples?ticket=3&group=1")
            answers = ".group article [data-part=answer]"
            shown.until(lambda: {each.text for each in shown.all(answers)} == {answer})  # noqa: B023
            rewards = [each.text.split("\n")[0] for each in shown.all(".group article h2")]
            wrongs = [each.text.strip() for each in shown.all(f"{answers} .wrong")]
            assert wrongs == [wrong] * rewards.count("reward 0") if wrong else wrongs == []


def test_tokens_have_the_colours_and_figures_of_the_sample(page: Page) -> None:
    run = page.run("one")
    page.open(f"run/{run}/samples?ticket=7&group=1")
    sample = page.js(
        f"return fetch('/api/runs/{run}/tokens?ticket=7').then((answer) => answer.json())"
        ".then((samples) => samples.find((sample) => sample.id === '7/1/1'))"
    )

    weights = sample["importance_weights"]
    sample["mismatches"] = [None if weight is None else math.log(weight) for weight in weights]
    for mode, name in (("logprob", "logprobs"), ("advantage", "advantages"), ("mismatch", "mismatches")):
        page.one(f"[data-value={mode}]").click()
        token = page.one("article[data-sample='7/1/1'] .tok[data-at='8']")
        assert token.text == "1"
        assert token.value_of_css_property("background-color") != "rgba(0, 0, 0, 0)"
        ActionChains(page.driver).move_to_element(token).perform()
        shown = page.until(lambda: page.text("#token"))
        said = "trainer's logprob less the engine's" if mode == "mismatch" else mode
        assert f"{said} {float(f'{sample[name][8]:.4g}'):g}" in shown
    page.one("[data-value=mask]").click()
    tokens = "[...document.querySelectorAll(\"article[data-sample='7/1/1'] .tok\")]"
    colours = f"return {tokens}.map((each) => each.style.backgroundColor !== '')"
    page.until(lambda: page.js(colours) == sample["loss_mask"])
    page.one("article[data-sample='7/1/1'] .tok[data-at='8']").click()
    page.press(Keys.ARROW_RIGHT)
    page.until(lambda: page.text("#token").startswith("token 9 "))
    prompt = page.one("article[data-sample='7/1/1'] .tok[data-at='0']")
    assert prompt.value_of_css_property("background-color") == "rgba(0, 0, 0, 0)"
    page.one("[data-value=text]").click()


def test_text_of_a_model_is_no_markup(page: Page) -> None:
    run = page.run("hostile")
    for place in (f"run/{run}/samples", f"run/{run}/samples?ticket=3&group=1"):
        page.open(place)
        page.until(lambda: "<script>" in page.text("main"))
        assert "\\x1b[31m" in page.text("main")
    page.one("[data-value=logprob]").click()
    page.one("#legend .ramp")  # drawn when all tokens are

    assert page.driver.title == "hostile · stretto"
    assert page.all("main script, main img") == []
    page.one("[data-value=conversation]").click()
    page.until(lambda: "<script>" in page.text(".turn"))
    assert page.all("main script") == []
    assert page.text(".turn .text").splitlines()[-3:] == ["[image]", "[image]", "[part]"]
    shown = "return [...document.querySelectorAll('main img')].map((image) => image.naturalWidth)"
    page.until(lambda: page.js(shown) == [384] * 4)
    page.one("[data-value=text]").click()


def test_a_run_that_failed_names_the_command_to_go_on(page: Page, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "it's bad", name="bad", steps=3)
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"status": "failed", "reason": "no room"}))
    (folder / "logs").mkdir()
    events = [{"event": "step", "level": "info"}, {"event": "the disk is full", "level": "error"}]
    (folder / "logs" / "kernel.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events))
    with other_runs(page, folder) as bad:
        bad.open(f"run/{bad.run('bad')}/overview")
        command = bad.text("#go-on")
        assert shlex.split(command) == ["stretto", "resume", str(folder)]
        assert bad.text(".note.bad") == "no room"
        assert bad.text("#tail") == "[error    ] the disk is full"
        assert _unreadable(bad) == []
        bad.one("#go-on").click()
        assert page.js("return getSelection().toString()") == command


def test_the_keyboard_reaches_everything(page: Page) -> None:
    page.open("")
    page.one("#runs tbody tr")
    page.press("?")
    page.until(lambda: page.all("dialog[open]"))
    page.press(Keys.ESCAPE)
    page.until(lambda: not page.all("dialog[open]"))

    page.press("j", Keys.ENTER)
    page.one("#tiles")
    for number, view in enumerate(("smoothing", "timeline", "samples", "config", "lines"), start=2):
        page.press(str(number))
        page.one(f"#{view}")
    page.press("/")
    page.until(lambda: page.driver.switch_to.active_element.get_attribute("type") == "search")
    page.press(Keys.ESCAPE, "g", "r")
    page.one("#runs")


def test_the_theme_changes_and_stays(page: Page) -> None:
    page.open("")
    theme = "return document.documentElement.dataset.theme"
    assert page.js(theme) == "light"

    page.press("t")
    page.open("")

    assert page.js(theme) == "dark"
    page.one("#theme").click()


@pytest.mark.parametrize(("width", "height"), [(1440, 900), (390, 844)])
def test_every_view_fits_and_can_be_read_by_everybody(page: Page, width: int, height: int) -> None:
    run = f"run/{page.run('one')}"
    views = {
        "": "#runs tbody tr",
        f"{run}/overview": "#time .column",
        f"{run}/curves": ".chart canvas",
        f"{run}/timeline": "#share .legend",
        f"{run}/samples": "#samples tbody tr",
        f"{run}/samples?view=list": "#samples tbody tr",
        f"{run}/samples?ticket=7&group=1": ".group article",
        f"run/{page.run('hostile')}/samples?ticket=3&group=1": ".group article",
        f"{run}/config": "#config tr",
        f"{run}/logs": "#lines",
        f"compare?runs={page.run('one')},{page.run('two')}": ".chart canvas",
    }
    found: dict[str, list[str]] = {}
    with sized(page, width, height):
        for place, selector in views.items():
            page.open(place)
            page.one(selector)
            assert page.js("return document.documentElement.scrollWidth") <= width, place
            for theme in ("light", "dark")[: 2 if width > 400 else 1]:  # colours do not depend on the size
                page.js("document.documentElement.dataset.theme = arguments[0]", theme)
                if violations := _unreadable(page):
                    found[f"{place} ({theme})"] = violations
    assert found == {}


def _unreadable(page: Page) -> list[str]:
    """What the page lacks of level AA of the Web Content Accessibility Guidelines, by axe-core."""
    page.js(AXE)
    rules = '{ runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"] }'
    script = f"axe.run({rules}).then(({{ violations }}) => arguments[0](violations))"
    violations = page.driver.execute_async_script(script)
    return [
        f"{each['id']}: {node['html'][:200]} {node['failureSummary'][-200:]}"
        for each in violations
        for node in each["nodes"][:3]
    ]


def test_a_run_that_goes_on_is_followed(page: Page) -> None:
    folder = make_run(page.folder / "going", name="going", steps=10, finished=False)
    page.open("")
    page.until(lambda: any("going" in row[1] for row in page.cells("#runs")))
    page.open(f"run/{page.run('going')}/overview")
    page.until(lambda: page.text("#steps") == "step 10 of 10")

    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 11, "time_s": 30.0, "reward": 0.125, "loss": 1.5}) + "\n")

    rewards = [line["reward"] for line in page.lines("going") if "reward" in line]
    page.until(lambda: page.text("[data-tile=reward] .value") == f"{fmean(rewards[-10:]):.3f}")
    page.until(lambda: page.text(".chart[data-key=loss] .values") == "1.5")


def test_a_real_run_is_shown_while_it_trains(start: Callable[..., Any], tmp_path: Path) -> None:
    run = start("steps=60")
    run.until_step(2)
    with served(run.folder) as address, open_browser(tmp_path / "profile") as driver:
        page = Page(driver, address, tmp_path)
        assert page.text("#state") == "running"
        before = page.text("#steps")
        page.until(lambda: page.text("#steps") != before)
        page.press("3")
        page.one("#timeline")
        page.until(lambda: page.text("#share .legend"))
        page.press("1")
        page.until(lambda: page.text("#state") == "completed")
        summary = run.assert_completed(60)

        assert page.text("[data-account=trained]") == f"trained {summary['ledger']['trained']}"
        for staleness, count in summary["staleness"].items():
            assert page.text(f"[data-staleness='{staleness}']").startswith(f"{count} ·")
        page.press("6")
        log = RunFolder(run.folder).log("kernel", 10)
        page.until(lambda: [each.text for each in page.all("#lines div")][-10:] == log)
        assert len(page.all("#lines .begins")) == 1
        assert complaints(driver) == []
