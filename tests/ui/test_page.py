"""The page in a browser: what it shows is what the run's files hold."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from PIL import Image
from selenium.webdriver import ActionChains, Keys
from selenium.webdriver.common.by import By

from browser import complaints, open_browser, requested
from made_run import make_run
from pages import Page, curve_of, served
from stretto.models.images import ImageFile, file_of
from stretto.records.comparison import compare_runs
from stretto.records.figures import FIGURES, duration_text, figure
from stretto.records.kept.sample_images import SampleImages
from stretto.run_folder import RunFolder

pytestmark = pytest.mark.slow

HOSTILE = '<script>document.title="owned"</script><img src=x onerror="document.title=1">\x1b[31m'
TEXT = {"type": "text", "text": HOSTILE}
PICTURE = ImageFile(file_of(Image.new("RGB", (500, 40), "red")))
OTHERS = [{"type": "image", "sha256": "../config.yaml"}, {"type": "image"}, None]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """Three runs in a browser."""
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


def test_the_token_leaves_the_address(page: Page) -> None:
    assert "token" not in page.driver.current_url
    assert page.driver.execute_script("return document.cookie") == ""


def test_the_overview_shows_means_of_ten_steps(page: Page) -> None:
    page.open(f"run/{page.run('one')}/overview")

    rewards = [line["reward"] for line in page.lines("one") if "reward" in line]
    last, first = fmean(rewards[-10:]), fmean(rewards[:10])
    assert page.text("[data-tile=reward] .value") == f"{last:.3f}"
    assert page.text("[data-tile=reward] .sub") == f"{last - first:+.3f} from the first 10 steps"
    assert page.text("[data-tile=zero_variance_groups] .value") == "25.0 %"
    assert not page.all("[data-tile=loss]")
    assert page.text("#steps") == "step 40 of 40"
    assert page.text("#state") == "completed"
    assert page.text("[data-account=trained]") == "trained 160"
    assert page.until(lambda: page.text("[data-staleness='2']")) == "320 · 50.0 %"
    assert page.text("[data-rule=truncation]") == "truncation since step 3\n12 % of the answers are truncated"


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
    page.driver.execute_script(f"document.querySelector('#tiles').append({wide})")
    columns = (
        "return getComputedStyle(document.querySelector('#tiles')).gridTemplateColumns.split(' ').length"
    )
    try:
        for width, expected in ((1440, 8), (1000, 4), (390, 2)):
            size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
            page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            assert page.driver.execute_script(columns) == expected
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_curve_has_every_step(page: Page) -> None:
    page.open(f"run/{page.run('one')}/curves")

    expected = {line["step"]: line["loss"] for line in page.lines("one") if "loss" in line}
    assert dict(curve_of(page, "loss")) == pytest.approx(expected, abs=1e-6)


def test_evaluations_are_points_with_their_version(page: Page) -> None:
    page.open(f"run/{page.run('one')}/curves")

    accuracy = [line for line in page.lines("one") if "evaluation/accuracy" in line]
    values = page.until(lambda: page.text(".chart[data-key='evaluation/accuracy'] .values"))
    assert values == "0.900 at version 40"
    expected = {line["step"]: line["evaluation/accuracy"] for line in accuracy}
    assert dict(curve_of(page, "evaluation/accuracy")) == pytest.approx(expected)


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
    assert [row[3].split()[0] for row in page.cells("#runs")] == ["40", "30", "3"]

    for name in ("one", "two"):
        page.one(f"[aria-label='Select {name}']").click()
    page.one("#compare").click()

    figures = {row[0]: row for row in page.until(lambda: page.cells("#figures"))}
    for run in compare_runs([RunFolder(page.folder / name) for name in ("one", "two")]).runs:
        duration, reward, last = figures[run.label][3:6]
        assert (duration, reward) == (duration_text(run.wall_s), f"{run.reward:.3f}")
        assert run.last is not None
        assert last == f"{run.last.accuracy} v{run.last.version}"
    assert page.cells("#differing") == [["one", "40", "1", "0.0003"], ["two", "30", "2", "0.0006"]]
    assert page.until(lambda: page.text(".chart[data-key=reward] .values")).count("\n") <= 1
    points = curve_of(page, "reward")
    assert len(points) == 70


def test_twenty_runs_are_compared_and_no_two_look_the_same(page: Page, tmp_path: Path) -> None:
    for number in range(20):
        make_run(tmp_path / str(number), name=f"swept-{number}", steps=12, groups=1, samples=1, seed=number)
    with served(tmp_path) as address:
        many = Page(page.driver, address, tmp_path)
        many.open(f"compare?runs={','.join(many.run(f'swept-{number}') for number in range(20))}")
        many.until(lambda: len(many.all("#figures tbody tr")) == 20)
        chart = many.one(".chart[data-key=reward]")
        page.driver.execute_script("arguments[0].scrollIntoView()", chart)
        signs = "[...document.querySelectorAll('.chart[data-key=reward] .values line')]"
        looks = "((each) => each.style.stroke + ' ' + each.getAttribute('stroke-dasharray'))"
        script = f"return {signs}.map({looks})"
        assert len(set(many.until(lambda: page.driver.execute_script(script)))) == 20
        assert [url for url in requested(page.driver) if not url.startswith(many.base)] == []
    page.driver.get(page.base)


def test_what_differs_between_configurations(page: Page) -> None:
    page.open(f"compare?runs={page.run('one')},{page.run('two')}&tab=config")

    rows = [row for row in page.until(lambda: page.cells("#config")) if len(row) == 3]
    assert rows == [
        ["steps", "40", "30"],
        ["seed", "1", "2"],
        ["lr", "0.0003", "0.0006"],
    ]


def test_the_timeline_names_what_is_below_the_pointer(page: Page) -> None:
    page.open(f"run/{page.run('one')}/timeline")
    canvas = page.one("#timeline")
    page.until(lambda: page.text("#waits"))
    assert page.text("#waits").endswith("7.2 s · 30.0 %")  # 0.6 s of each of 12 steps of 2 s

    middle: int = canvas.size["height"] // 2
    ActionChains(page.driver).move_to_element_with_offset(canvas, 560, 30 - middle).perform()
    page.until(lambda: "step 40: 4 tickets" in page.text(".tip"))

    before = page.text(".tools .mono")
    canvas.send_keys("+")
    page.until(lambda: page.text(".tools .mono") != before)


def test_the_timeline_shows_no_figures_of_another_window(page: Page) -> None:
    page.open(f"run/{page.run('one')}/timeline")
    page.until(lambda: page.text("#waits").endswith("7.2 s · 30.0 %"))
    page.driver.execute_script(
        "const real = window.fetch; window.fetch = (...call) => String(call[0]).includes('/timeline?')"
        " ? new Promise((done) => { window.release = () => done(real(...call)); }) : real(...call);"
    )

    page.driver.find_element(By.XPATH, "//button[text()='Whole run']").click()

    page.until(lambda: page.driver.execute_script("return window.release !== undefined"))
    assert page.text(".tools .mono").endswith("loading")
    assert page.text("#waits").endswith("Loading.")
    assert "loading" in (page.one("#timeline").get_attribute("class") or "")  # pyright: ignore[reportUnknownMemberType]
    page.driver.execute_script("window.release()")
    page.until(lambda: page.text("#waits").endswith("24 s · 30.0 %"))
    assert not page.text(".tools .mono").endswith("loading")
    assert page.one("#timeline").get_attribute("class") == ""  # pyright: ignore[reportUnknownMemberType]


def test_samples_are_filtered_and_shown_with_their_group(page: Page) -> None:
    page.open(f"run/{page.run('one')}/samples")
    assert page.until(lambda: page.text("#count")) == "1 to 50 of 640"

    page.one("#f-ticket").send_keys("7")
    page.until(lambda: page.text("#count") == "1 to 4 of 4")
    assert [row[0] for row in page.cells("#samples")] == ["7/1/0", "7/1/1", "7/1/2", "7/1/3"]

    page.one("tr[data-id='7/1/2']").click()
    page.until(lambda: len(page.all(".group article")) == 4)
    assert page.text("#prompt") == "3+5+9="
    assert page.text(".group article [data-part=answer]") == "8 17"
    assert page.text("#row") == "answer\n8 17", "the prompt is shown once"


def test_tokens_have_the_colours_and_figures_of_the_sample(page: Page) -> None:
    run = page.run("one")
    page.open(f"run/{run}/samples?ticket=7&group=1")
    sample = page.driver.execute_script(
        f"return fetch('/api/runs/{run}/tokens?ticket=7&sample=7/1/1').then((answer) => answer.json())"
    )

    for mode, name in (("logprob", "logprobs"), ("advantage", "advantages")):
        page.one(f"[data-value={mode}]").click()
        token = page.one("article[data-sample='7/1/1'] .tok[data-at='8']")
        assert token.text == "1"
        assert token.value_of_css_property("background-color") != "rgba(0, 0, 0, 0)"
        ActionChains(page.driver).move_to_element(token).perform()
        shown = page.until(lambda: page.text("#token"))
        assert f"{mode} {float(f'{sample[name][8]:.4g}'):g}" in shown
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
    page.until(lambda: page.all(".tok"))

    assert page.driver.title == "hostile · stretto"
    assert page.all("main script, main img") == []
    page.one("[data-value=conversation]").click()
    page.until(lambda: "<script>" in page.text(".turn"))
    assert page.all("main script") == []
    assert page.text(".turn .text").splitlines()[-3:] == ["[image]", "[image]", "[part]"]
    shown = "return [...document.querySelectorAll('main img')].map((image) => image.naturalWidth)"
    page.until(lambda: page.driver.execute_script(shown) == [384] * 4)
    page.one("[data-value=text]").click()


def test_the_keyboard_reaches_everything(page: Page) -> None:
    page.open("")
    page.one("#runs tbody tr")
    page.press("?")
    page.until(lambda: page.all("dialog[open]"))
    page.press(Keys.ESCAPE)
    page.until(lambda: not page.all("dialog[open]"))

    page.press("j", Keys.ENTER)
    page.one("#tiles")
    for key, selector in (("2", "#smoothing"), ("3", "#timeline"), ("4", "#samples"), ("5", "#config")):
        page.press(key)
        page.one(selector)
    page.press("/")
    page.until(lambda: page.driver.switch_to.active_element.get_attribute("type") == "search")
    page.press(Keys.ESCAPE, "g", "r")
    page.one("#runs")


def test_the_theme_changes_and_stays(page: Page) -> None:
    page.open("")
    theme = "return document.documentElement.dataset.theme"
    assert page.driver.execute_script(theme) == "light"

    page.press("t")
    page.open("")

    assert page.driver.execute_script(theme) == "dark"
    page.one("#theme").click()


def test_a_phone_needs_no_sideways_scrolling(page: Page) -> None:
    run = page.run("one")
    places = [f"run/{run}/{tab}" for tab in ("overview", "curves", "timeline", "samples", "config")]
    places += ["", f"run/{run}/samples?ticket=7&group=1", f"compare?runs={run},{page.run('two')}"]
    size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": False}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        for place in places:
            page.open(place)
            page.until(lambda: page.all("main h1"))
            width = page.driver.execute_script("return document.documentElement.scrollWidth")
            assert width <= 390, place
    finally:
        page.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride", size | {"width": 1280, "height": 900}
        )


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
        page.until(lambda: page.text("#waits .bars"))
        page.press("1")
        page.until(lambda: page.text("#state") == "completed", seconds=60)
        summary = run.assert_completed(60)

        assert page.text("[data-account=trained]") == f"trained {summary['ledger']['trained']}"
        for staleness, count in summary["staleness"].items():
            assert page.text(f"[data-staleness='{staleness}']").startswith(f"{count} ·")
        assert complaints(driver) == []


@pytest.mark.timeout(600)
def test_a_long_run_opens_in_two_seconds(page: Page, tmp_path: Path) -> None:
    """10,000 steps and 1,000,000 samples: from the request until figures and curves are drawn. Other tests
    take the processors meanwhile, so one of three tries is enough."""
    make_run(tmp_path / "runs" / "long", name="long", steps=10_000, groups=25, samples=4)
    with served(tmp_path / "runs") as address, open_browser(tmp_path / "profile") as driver:
        long = Page(driver, address, tmp_path / "runs")
        run = long.run("long")
        drawn = (
            "const done = arguments[0], count = () => document.querySelectorAll('.chart canvas').length;"
            "const look = () => count() >= 5 ? done(performance.now() / 1000) : requestAnimationFrame(look);"
            "look();"
        )
        tries: list[float] = []
        while min(tries, default=inf) >= 2 and len(tries) < 3:
            driver.get("about:blank")
            long.open(f"run/{run}/overview")
            tries.append(driver.execute_async_script(drawn))
        print(f"overview after {tries} s")
        assert curve_of(long, "loss")[-1][0] == 10_000

        long.open(f"run/{run}/samples")
        long.until(lambda: long.text("#count") == "1 to 50 of 1,000,000")

    assert min(tries) < 2
