"""Make the pictures of docs/images: `python docs/screenshots.py [PICTURE]...`.

Runs the quickstart twice, with two learning rates, into a folder of temporary files, unless these runs are
there already; then opens what stretto shows of them in headless Chromium. Pictures say `~` for that folder.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text
from selenium.webdriver import Chrome

from stretto.observe.view import drawing
from stretto.records.run_folder import RunFolder
from stretto.records.status import decode_status, read_status
from stretto_views.plot import draw_text, wanted_panels

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

from browser import open_browser  # noqa: E402
from pages import Page, served  # noqa: E402

IMAGES = ROOT / "docs" / "images"
HOME = Path(tempfile.gettempdir()) / "stretto-screenshots"
RUNS = HOME / "runs"
LIVE = HOME / "live.json"
"""What the live view of the first run drew, so that the picture of the terminal shows a run that trains."""
RATES = {"quickstart": 3e-4, "higher-rate": 1e-3}
STEPS, LIVE_AT = 80, 48
SIZE = (1280, 860)
"""Width and greatest height of a picture, in pixels."""
_MARGIN = 24

_WITHOUT_HOME = """
document.documentElement.style.scrollbarGutter = "auto";
const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (texts.nextNode()) {
  const text = texts.currentNode;
  if (text.data.includes(arguments[0])) text.data = text.data.replaceAll(arguments[0], "~");
}
"""
_CONTENT_BOTTOM = """
const shown = [...document.querySelectorAll('main *, section *, pre')].filter((each) => each.offsetParent);
return Math.max(...shown.map((each) => each.getBoundingClientRect().bottom));
"""
"""Where the content of a page ends, in pixels from the top."""


def main(names: list[str]) -> None:
    """Make the named pictures; all without names."""
    make_runs()
    IMAGES.mkdir(exist_ok=True)
    with (
        served(RUNS) as address,
        tempfile.TemporaryDirectory() as folder,
        open_browser(Path(folder) / "profile", width=SIZE[0], height=SIZE[1]) as driver,
    ):
        driver.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})
        page = Page(driver, address, RUNS)
        for name, (picture, (width, height)) in PICTURES.items():
            if not names or name in names:
                resize(driver, width, height)
                picture(page)
                driver.execute_script(_WITHOUT_HOME, str(HOME))
                resize(driver, width, min(height, int(driver.execute_script(_CONTENT_BOTTOM)) + _MARGIN))
                driver.save_screenshot(str(IMAGES / f"{name}.png"))
                print(IMAGES / f"{name}.png")


# ---------------------------------------------------------------------------------------------- runs


def make_runs() -> None:
    """Run the quickstart with each learning rate, as far as its runs are not there."""
    for name, rate in RATES.items():
        folder = RUNS / name
        if not (folder / "summary.json").exists():
            values = [f"name={name}", f"training.lr={rate}", f"steps={STEPS}", "evaluation.every=20"]
            command = ["run", "examples/quickstart/run.yaml", *values, f"out={folder}"]
            with subprocess.Popen([sys.executable, "-m", "stretto", *command], cwd=ROOT) as run:
                if name == "quickstart":
                    keep_live_view(folder, run)
            if run.returncode:
                raise RuntimeError(f"the run in {folder} failed; its logs are there")


def keep_live_view(folder: Path, run: subprocess.Popen[bytes]) -> None:
    """Keep what the live view shows in the middle of the run."""
    while run.poll() is None:
        status = read_status(folder)
        if status is not None and status.version >= LIVE_AT and status.verdict:
            LIVE.write_bytes(msgspec.json.encode(status))
            return
        time.sleep(0.5)


def stretto(*arguments: str) -> str:
    """Run the command in the folder of the runs' folder; return what it prints."""
    command = [sys.executable, "-m", "stretto", *arguments]
    return subprocess.run(command, cwd=HOME, check=True, stdout=subprocess.PIPE, text=True).stdout


# ------------------------------------------------------------------------------------------ pictures


def overview(page: Page) -> None:
    """The first view of a run."""
    show(page, "overview", ".chart canvas", "[data-staleness]")
    page.until(lambda: len(page.all(".chart canvas")) > 5)


def samples(page: Page) -> None:
    """A group whose samples differ in their rewards, with tokens coloured by their logprob."""
    show(page, "samples?step_from=20&step_to=20&purpose=train", "#samples tbody tr.link")
    ticket = page.driver.execute_script(
        "const rows = [...document.querySelectorAll('#samples tbody tr')];"
        "return rows.find((row) => /[1-7].8 right/.test(row.textContent)).dataset.id.split('/')[0]"
    )
    show(page, f"samples?ticket={ticket}&group=1", "[data-value=logprob]")
    page.one("[data-value=logprob]").click()
    page.one("#legend .ramp")  # drawn when all tokens are


def groups(page: Page) -> None:
    """The groups of a step."""
    show(page, "samples?step_from=20&step_to=20&purpose=train", "#samples tbody tr.link")


def timeline(page: Page) -> None:
    """Generation and training over the newest steps."""
    show(page, "timeline", "#share .legend")


def comparison(page: Page) -> None:
    """Two runs over each other."""
    page.open(f"compare?runs={','.join(page.run(name) for name in RATES)}")
    page.until(lambda: len(page.all(".chart canvas")) > 4)


def terminal(page: Page) -> None:
    """The live view, and what commands print."""
    console = Console(record=True, width=116, file=io.StringIO(), force_terminal=True)
    status = decode_status(LIVE.read_bytes())
    status = msgspec.structs.replace(status, folder="runs/quickstart", written=time.time())
    console.print(Text("$ stretto watch runs/quickstart", style="bold"))
    console.print(drawing(status, stopped=False))
    console.print(Text("\n$ stretto runs runs", style="bold"))
    console.print(Text(stretto("runs", "runs").rstrip()))
    console.print(Text("\n$ stretto plot runs/quickstart runs/higher-rate --key reward", style="bold"))
    panels = wanted_panels([RunFolder(RUNS / name) for name in RATES], ["reward"], 1)
    console.print(Text.from_ansi(draw_text(panels, 100, coloured=True)))
    file = HOME / "terminal.html"
    file.write_text(console.export_html(theme=MONOKAI, inline_styles=True))
    page.driver.get(file.as_uri())
    page.driver.execute_script("document.body.style.margin = '0'; document.body.style.padding = '20px'")


PICTURES: dict[str, tuple[Callable[[Page], None], tuple[int, int]]] = {
    "page": (overview, (1280, 955)),
    "page-groups": (groups, SIZE),
    "page-samples": (samples, SIZE),
    "page-timeline": (timeline, SIZE),
    "page-comparison": (comparison, SIZE),
    "terminal": (terminal, (1080, 1200)),
}
"""Name -> what opens it, and its width and greatest height in pixels."""


def show(page: Page, place: str, *selectors: str) -> None:
    """Open a view of the first run, and wait until it has what the selectors name."""
    page.open(f"run/{page.run('quickstart')}/{place}")
    for selector in selectors:
        page.one(selector)


def resize(driver: Chrome, width: int, height: int) -> None:
    """Give the browser's view a size in pixels."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


if __name__ == "__main__":
    main(sys.argv[1:])
