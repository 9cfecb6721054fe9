"""The page in a browser: what it shows is what the run's files hold."""

import json
import math
import os
import re
import shlex
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from operator import itemgetter
from pathlib import Path
from random import Random
from statistics import fmean, stdev
from typing import Any

import msgspec
import pytest
import yaml
from PIL import Image
from pyarrow import parquet as pq
from selenium.webdriver import ActionChains, Keys
from selenium.webdriver.common.by import By

from browser import complaints, open_browser, requested, resize
from made_run import make_run
from pages import Page, curve_of, served
from statuses import make_status
from stretto.bus.messages.events import CallEnded, GroupFigures, OutcomeRead, StepMeasured, WeightsServed
from stretto.models.images import ImageFile, file_of
from stretto.records.comparison import compare_runs
from stretto.records.figures import FIGURES, duration_text, figure
from stretto.records.run_folder import RunFolder, SampleStore
from stretto.records.samples.images import SampleImages

pytestmark = pytest.mark.slow

AXE = (files("axe_core_python") / "axe.min.js").read_text()
HOSTILE = '<script>document.title="owned"</script><img src=x onerror="document.title=1">\x1b[31m'
TEXT = {"type": "text", "text": HOSTILE}
PICTURE = ImageFile(file_of(Image.new("RGB", (500, 40), "red")))
SMALL: dict[str, Any] = {"steps": 20, "groups": 1, "samples": 1}
"""A run with enough steps for means, for tests that look at several."""
ACCURACY = "evaluation/accuracy"
OTHERS = [{"type": "image", "sha256": "../config.yaml"}, {"type": "image"}, None]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "one", name="one", steps=40)
    make_run(folder / "two", name="two", steps=30, seed=2)
    chat = [{"role": "user", "content": [TEXT, {"type": "image", "sha256": PICTURE.digest}, *OTHERS]}]
    make_run(folder / "hostile", name="hostile", steps=3, answer=HOSTILE, messages=json.dumps(chat))
    SampleImages(folder / "hostile").write(PICTURE)
    with served(folder) as address, open_browser(tmp_path_factory.mktemp("browser") / "profile") as driver:
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


def test_the_time_of_a_step_is_stacked(page: Page) -> None:
    page.open(f"run/{page.run('one')}/overview")

    page.until(lambda: page.all("#time .column"))
    shown = [each.text for each in page.all("#share .legend [data-part]")]
    assert shown == [each.text for each in page.all("#time .legend [data-part]")]
    widths = [each.size["width"] for each in page.all("#share .stack > div")]
    assert [round(100 * each / sum(widths)) for each in widths] == pytest.approx(
        [int(each.rpartition("· ")[2].removesuffix(" %")) for each in shown], abs=1
    )
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
        assert float(half) == pytest.approx(_half_interval(accuracy, count), rel=1e-3)


def test_smoothing_adds_a_mean(page: Page) -> None:
    page.open(f"run/{page.run('one')}/curves")
    page.one(".chart[data-key=reward] canvas")

    slider = page.one("#smoothing")
    slider.send_keys(Keys.END)
    page.until(lambda: page.all(".chart[data-key=reward] .values .faint")[0].text)
    slider.send_keys(Keys.HOME)


def test_runs_are_sorted_selected_and_compared(page: Page) -> None:
    page.open("")
    page.one("#runs tbody tr")
    page.driver.find_element(By.XPATH, "//th//button[text()='step']").click()
    steps = "return [...document.querySelectorAll('#runs td.step')].map((cell) => cell.textContent)"
    assert page.js(steps) == ["40 / 40", "30 / 30", "3 / 3"]
    assert page.driver.current_url.endswith("/#/?order=-step")
    page.open("?find=o&order=step")  # in `one`, `two` and `hostile`
    assert page.until(lambda: page.js(steps)) == ["3 / 3", "30 / 30", "40 / 40"]
    page.one("[data-search]").send_keys("n")
    page.until(lambda: page.js(steps) == ["40 / 40"])
    assert page.driver.current_url.endswith("/#/?find=on&order=step")

    page.open("")
    for name in ("one", "two"):
        page.one(f"[aria-label='Select {name}']").click()
    page.one("#compare").click()

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


def test_the_timeline_shows_no_figures_of_another_window(page: Page) -> None:
    page.open(f"run/{page.run('one')}/timeline")
    page.one("#timeline").send_keys("+")
    page.until(lambda: page.text("#share").endswith("3.6 s · 30 %"))
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


Figures = Iterator[tuple[str, str]]
"""(selector, text). After `@` stands an attribute, or a place on the timeline whose tip has the text: the
share of the time, and pixels from the top."""
SHOWN = """
const [selector, detail = ""] = arguments[0].split("@"), element = document.querySelector(selector);
document.querySelector(selector.split(" ")[0])?.scrollIntoView(); // what is not seen is not loaded
if (!element?.checkVisibility()) return null;
if (!detail.includes(",")) return detail ? element.getAttribute(detail) : element.textContent.trim();
const [share, y] = detail.split(",").map(Number), box = element.getBoundingClientRect(); // 132: names
const at = { clientX: box.left + 132 + share * (box.width - 132), clientY: box.top + y, bubbles: true };
document.elementFromPoint(at.clientX, at.clientY).dispatchEvent(new PointerEvent("pointermove", at));
return document.querySelector(".tip:not([hidden])")?.textContent;
"""


@pytest.fixture(scope="module")
def distinct(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs in which no two keys of a file, and no two steps, have the same figure."""
    runs = tmp_path_factory.mktemp("distinct")
    for seed, name in enumerate(("one", "two"), start=1):
        folder = make_run(runs / name, name=name, steps=85 - 3 * seed, samples=6, seed=seed)
        draw, (config, steps, scores, summary) = Random(seed), _read(folder)
        for line in steps:
            line |= {key: draw.uniform(60, 599) for key in FIGURES if not key.startswith("evaluation/")}
        for line in scores:
            line |= {ACCURACY: draw.random(), "evaluation/samples": draw.randrange(50, 99)}
        for part in ("ledger", "staleness"):
            summary[part] = {key: draw.randrange(1000, 9999) for key in summary[part]}
        summary["wall_s"] = 1000 * seed
        summary["verdict"]["text"] = f"finished, learned: reward +0.{seed}; bound by training"
        origin = {"written": ["steps", "training.lr"], "defaults": {"steps": "102", "training.lr": "1e-06"}}
        (folder / "logs").mkdir()
        for file, lines in {
            "config.yaml": [config | {"steps": 100 + seed}],
            "metrics.jsonl": steps + scores,
            "summary.json": [summary],
            "status.json": [msgspec.to_builtins(make_status())],
            "origin.json": [origin | {"host": "vm", "python": "3.11", "packages": {"torch": "2.13"}}],
            "logs/kernel.jsonl": [{"event": f"at {n}", "level": ("info", "error")[n % 2]} for n in range(24)],
        }.items():
            (folder / file).write_text("".join(json.dumps(line) + "\n" for line in lines))
            os.utime(folder / file, times=(0, time.time() - 400_000 * seed))
    return runs


def _read(run: Path) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """Return the configuration, the lines of steps and of evaluations, and the summary."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps, scores = ([line for line in lines if key in line] for key in ("reward", ACCURACY))
    config = yaml.safe_load((run / "config.yaml").read_text())
    return config, steps, scores, json.loads((run / "summary.json").read_text())


def _mean(steps: list[dict[str, Any]], key: str) -> str:
    return FIGURES[key].text(fmean(line[key] for line in steps[-10:]))


def _nth(selector: str, texts: Iterable[object], start: int = 1) -> Figures:
    return ((selector % place, str(text)) for place, text in enumerate(texts, start))


def list_figures(runs: Path) -> Figures:
    highest = max(_read(runs / name)[2][-1][ACCURACY] for name in ("one", "two"))
    for name in ("one", "two"):
        row, (config, steps, scores, summary) = f"#runs tr:has([title={name}])", _read(runs / name)
        score, best = scores[-1][ACCURACY], max(line[ACCURACY] for line in scores)
        yield f"{row} .said", summary["verdict"]["text"].removeprefix("finished, ").partition(";")[0]
        yield f"{row} .step", f"{steps[-1]['step']} / {config['steps']}"
        yield f"{row} .reward", _mean(steps, "reward")
        yield f"{row} .score", f"{'highest ' if score == highest else ''}{score:.3f}"
        yield f"{row} .score@title", f"held-out accuracy, best {best:.3f}"
        ago = f"{duration_text(time.time() - (runs / name / 'metrics.jsonl').stat().st_mtime)} ago"
        values = config["steps"], config["seed"], config["training"]["lr"]
        yield from _nth(f"{row} td:nth-child(%d)", (*values, duration_text(summary["wall_s"]), ago), 9)


def overview_figures(runs: Path) -> Figures:
    config, steps, scores, summary = _read(runs / "one")
    best, of = max((line[ACCURACY], line["step"]) for line in scores)
    yield "#state", summary["status"]
    yield "#verdict", summary["verdict"]["text"]
    yield "#steps", f"step {steps[-1]['step']} of {config['steps']}"
    yield "#steps + .muted", duration_text(summary["wall_s"])
    yield f"[data-tile='{ACCURACY}'] .value", f"{scores[-1][ACCURACY]:.3f}"
    yield f"[data-tile='{ACCURACY}'] .sub", f"version {scores[-1]['step']}; best {best:.3f} at version {of}"
    yield "[data-tile=reward] .sub", f"first 10 steps: {_mean(steps[:10], 'reward')}"
    yield ".tile:nth-child(4) .label", "entropy, nats per token"  # there is no tile of the loss
    for key in ("reward", "zero_variance_groups", "entropy", "staleness", "step_tokens_per_s"):
        yield f"[data-tile={key}] .value", _mean(steps, key)
    for tile, key in (("entropy", "behaviour_kl"), ("length", "truncated"), ("step_s", "train_s")):
        yield f"[data-tile={tile}] .sub", f"{FIGURES[key].label} {_mean(steps, key)}"
    for account in ("trained", "in_flight", "filtered", "expired", "failed"):
        yield f"[data-account={account}]", f"{account.replace('_', ' ')} {summary['ledger'][account]:,}"
    for age, count in summary["staleness"].items():
        share = count / sum(summary["staleness"].values())
        yield f"[data-staleness='{age}']", f"{count:,} · {100 * share:.1f} %"
    [wait] = json.loads((runs / "one" / "status.json").read_text())["waits"]
    yield "#workers td:nth-child(4)", f"{wait['who']} ({wait['verb']}) for {duration_text(wait['seconds'])}"
    speed = ("generate_busy_s", "verify_busy_s", "train_s", "swap_pause_s", "slots_used", "kv_used")
    yield from _nth("#speed dd:nth-of-type(%d)", (FIGURES[key].text(steps[-1][key]) for key in speed))
    keys = ["train_s", *(key for key in FIGURES if key.startswith("wait/"))]
    parts = {key: fmean(line[key] for line in steps[-60:]) for key in keys}
    yield from _shares(parts, sum(parts.values()))


def _shares(parts: dict[str, float], whole: float) -> Figures:
    for key, seconds in parts.items():
        share = f"{duration_text(seconds)} · {100 * seconds / whole:.0f} %"
        yield f"#share [data-part='{key}']", f"{FIGURES[key].label} {share}"


def curves_figures(runs: Path) -> Figures:
    _, steps, scores, _ = _read(runs / "one")
    yield f".chart[data-key='{ACCURACY}'] .values b", f"{scores[-1][ACCURACY]:.3f}"
    yield f".chart[data-key='{ACCURACY}'] .values .faint", f"at version {scores[-1]['step']}"
    weights = [0.9 ** (len(steps) - place) for place in range(len(steps))]
    for key in ("reward", "loss", "entropy", "kv_used", "step_s", "tokens"):
        smooth = sum(weight * line[key] for weight, line in zip(weights, steps, strict=True)) / sum(weights)
        yield f".chart[data-key={key}] .values b", FIGURES[key].text(smooth)
        yield f".chart[data-key={key}] .values .faint", FIGURES[key].text(steps[-1][key])


def timeline_figures(runs: Path) -> Figures:
    events, start = list(RunFolder(runs / "one").events()), _read(runs / "one")[1][-13]["time"]
    begun, end = events[0][0], events[-1][0]

    def clocks(since: float, until: float) -> str:
        return " to ".join(f"{at // 60:.0f}:{at % 60:04.1f}" for at in (since - begun, until - begun))

    def span(y: float, text: str, since: float, until: float) -> tuple[str, str]:
        share = ((since + until) / 2 - start) / (end - start)
        return f"#timeline@{share},{y}", f"{text}\n{clocks(since, until)}, {duration_text(until - since)}"

    yield ".tools .mono", f"{clocks(start, end)} · {duration_text(end - start)}"
    trained = sum(at - event.began for at, event in events if isinstance(event, StepMeasured) and at > start)
    yield from _shares({"train_s": trained, "wait/groups_s": end - start - trained}, end - start)
    for at, event in events:
        match event:
            case StepMeasured(version=version, began=began) if at > start:
                yield span(31, f"steps\nstep {version}: {len(event.tickets)} tickets", began, at)
            case CallEnded(version=72 | 79 as version):
                text = f"training\ntrain(actor) at version {version}: {event.seconds:.3f} s of work"
                yield span(193, text, event.began, at)  # between it and the steps: five lanes of shares
            case WeightsServed(version=72 | 80 as version):
                text = f"inference-0\nswap to version {version}: paused {event.pause_s:.4f} s"
                yield span(220, text, event.began, at)
            case OutcomeRead(_, GroupFigures(ticket=287 | 318 as ticket) as group):
                text = (
                    f"rollout-0\nticket {ticket}: {group.seconds:.3f} s, generation {group.generate_s:.3f} s"
                )
                text += f", scoring {group.score_s:.3f} s; {group.samples} samples, {group.tokens} tokens, "
                text += f"reward {group.reward}, oldest token of version {group.oldest}"
                yield span(240.5 + 5 * (ticket % 4), text, at - group.seconds, at)
            case _:
                pass


def samples_figures(runs: Path) -> Figures:
    newest = _read(runs / "one")[1][-1]["step"]
    rows = pq.read_table(runs / "one" / "samples", filters=[("step", "=", newest)]).to_pylist()
    rows.sort(key=itemgetter("reward"), reverse=True)
    yield "#right", f"4 groups: {sum(row['reward'] for row in rows):.0f}/24 right"
    for place, ticket in enumerate(sorted({row["ticket"] for row in rows}, reverse=True), start=1):
        cells, group = f"#samples tr:nth-child({place})", [row for row in rows if row["ticket"] == ticket]
        right = f"{sum(row['reward'] for row in group):.0f}/6 right"
        texts = group[0]["prompt_text"], json.loads(group[0]["dataset_row"])["answer"], group[0]["text"]
        yield from _nth(f"{cells} td:nth-child(%d)", (ticket, group[0]["outcome"], newest, right, *texts))
        for number, row in enumerate(group, start=1):
            yield f"{cells} .dot:nth-child({number})@title", f"{row['id']}: reward {row['reward']:.0f}"


def _half_interval(score: float, count: int) -> float:
    share = (score * count + 2) / (count + 4)
    return 1.959964 * math.sqrt(max(score * (1 - score) / count, share * (1 - share) / (count + 4)))


def comparison_figures(runs: Path) -> Figures:
    found: list[tuple[float, float, int]] = []
    for row, name in enumerate(("one", "two"), start=1):
        config, steps, scores, summary = _read(runs / name)
        cells = [f"{steps[-1]['step']} of {config['steps']}", duration_text(summary["wall_s"])]
        cells += [_mean(steps, key) for key in ("reward", "staleness", "step_tokens_per_s")]
        for line in (scores[-1], max(scores, key=itemgetter(ACCURACY))):
            score, count = line[ACCURACY], line["evaluation/samples"]
            found.append((score, _half_interval(score, count), line["step"]))
            cells.insert(-2, "{:.4f} ± {:.4f} v{}".format(*found[-1]))
        yield from _nth(f"#figures tbody tr:nth-child({row}) td:nth-child(%d)", cells, 3)
        values = config["steps"], config["seed"], config["training"]["lr"]
        yield from _nth(f"#differing tbody tr:nth-child({row}) td:nth-child(%d)", values, 2)
        yield f".chart[data-key=reward] .values span:nth-child({row}) b", f"{steps[-1]['reward']:.3f}"
    (one, half, version), _, (two, other_half, other), _ = found
    difference = f"two minus one: {two - one:+.4f} ± {math.hypot(half, other_half):.4f}"
    yield "#differences p", f"held-out accuracy, {difference}, of versions {other} and {version}, not paired"


def configuration_figures(runs: Path) -> Figures:
    config, origin = _read(runs / "two")[0], json.loads((runs / "two" / "origin.json").read_text())
    written = f"training.lr{config['training']['lr']} (default: {origin['defaults']['training.lr']})"
    rows = ["set by you", f"steps{config['steps']} (the default)", written, "defaults"]
    rows += [f"{key}{json.dumps(config[key])}" for key in ("name", "seed")]
    for part in ("algorithm", "training"):
        values = [f"{key}{json.dumps(value)}" for key, value in config[part].items() if key != "lr"]
        rows += [f"{part}: defaults", *values]
    yield from _nth("#config tbody tr:nth-child(%d)", rows)
    facts = origin["host"], origin["python"], *(" ".join(each) for each in origin["packages"].items())
    yield from _nth("#origin dd:nth-of-type(%d)", facts)


def logs_figures(runs: Path) -> Figures:
    lines = (runs / "one" / "logs" / "kernel.jsonl").read_text().splitlines()
    events = [event for event in map(json.loads, lines) if event["level"] != "info"]
    yield from _nth("#lines div:nth-child(%d)", (f"[{each['level']:<9}] {each['event']}" for each in events))
    yield ".tools .muted", f"{len(events)} lines"


VIEWS: dict[str, Callable[[Path], Figures]] = {
    "": list_figures,
    "run/{one}/overview": overview_figures,
    "run/{one}/curves?smoothing=0.9": curves_figures,
    "run/{one}/timeline": timeline_figures,
    "run/{one}/samples": samples_figures,
    "compare?runs={one},{two}": comparison_figures,
    "run/{two}/config": configuration_figures,
    "run/{one}/logs?problems=1": logs_figures,
}


@pytest.mark.parametrize("place", VIEWS)
def test_a_view_shows_the_figures_of_the_files(page: Page, distinct: Path, place: str) -> None:
    expected = dict(VIEWS[place](distinct))
    with other_runs(page, distinct) as shown:
        shown.open(place.format(one=shown.run("one"), two=shown.run("two")))
        assert {each: shown.until(lambda each=each: shown.js(SHOWN, each)) for each in expected} == expected
    assert len({*expected.values()}) >= 10
