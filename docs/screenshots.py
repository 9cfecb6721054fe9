"""Make the pictures of docs/images: `python docs/screenshots.py [PICTURE]...`.

Runs the quickstart twice, with two learning rates, into a folder of temporary files, unless these runs are
there already; then opens what stretto shows of them in headless Chromium.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

from browser import open_browser  # noqa: E402

IMAGES = ROOT / "docs" / "images"
RUNS = Path(tempfile.gettempdir()) / "stretto-pictures"  # pictures show the path
RATES = {"quickstart": 3e-4, "higher-rate": 1e-3}
_WAIT_S = 30.0


def main(names: list[str]) -> None:
    """Make the named pictures; all without names."""
    make_runs()
    IMAGES.mkdir(exist_ok=True)
    with (
        served(RUNS) as address,
        tempfile.TemporaryDirectory() as folder,
        open_browser(Path(folder) / "profile", width=1280, height=860) as driver,
    ):
        driver.get(address)
        until(lambda: "token" not in driver.current_url)
        base = address.partition("?")[0]
        for name, picture in PICTURES.items():
            if not names or name in names:
                picture(driver, base)
                driver.save_screenshot(str(IMAGES / f"{name}.png"))
                print(IMAGES / f"{name}.png")


def make_runs() -> None:
    """Run the quickstart with each learning rate."""
    for name, rate in RATES.items():
        if not (RUNS / name / "summary.json").exists():
            values = [f"name={name}", f"training.lr={rate}", "steps=80", "evaluation.every=20"]
            stretto("run", "examples/quickstart/run.yaml", *values, f"out={RUNS / name}")


def stretto(*arguments: str) -> str:
    """Run the command; return what it prints."""
    command = [sys.executable, "-m", "stretto", *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


@contextmanager
def served(folder: Path) -> Generator[str]:
    """Serve the page; yield its address with the token."""
    command = [sys.executable, "-m", "stretto", "ui", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        try:
            yield server.stdout.readline().strip()
        finally:
            server.terminate()


# ------------------------------------------------------------------------------------------ pictures


def overview(driver: Chrome, base: str) -> None:
    """The first view of a run."""
    show(driver, base, "overview", "canvas", "[data-staleness]")


def samples(driver: Chrome, base: str) -> None:
    """A group whose samples differ in their rewards, with tokens coloured by their logprob."""
    show(driver, base, "samples?step_from=20&step_to=20&purpose=train", "#samples tbody tr.link")
    ticket = driver.execute_script(
        "const rows = [...document.querySelectorAll('#samples tbody tr')].map((row) =>"
        " [row.dataset.id.split('/')[0], row.cells[3].textContent]);"
        "return rows.find(([one, reward]) => rows.some(([other, its]) => one === other && reward !== its))[0]"
    )
    show(driver, base, f"samples?ticket={ticket}&group=1", "[data-value=logprob]")
    driver.find_element(By.CSS_SELECTOR, "[data-value=logprob]").click()
    until(lambda: driver.find_elements(By.CSS_SELECTOR, "#legend .ramp"))  # drawn when all tokens are


def timeline(driver: Chrome, base: str) -> None:
    """Generation and training over the newest steps."""
    show(driver, base, "timeline", "#waits .bars")


def comparison(driver: Chrome, base: str) -> None:
    """Two runs over each other."""
    runs = driver.execute_script(
        "return fetch('/api/runs').then((answer) => answer.json())"
        ".then(({ runs }) => runs.map((run) => run.id))"
    )
    driver.get("about:blank")
    driver.get(f"{base}#/compare?runs={','.join(runs)}")
    until(lambda: len(driver.find_elements(By.CSS_SELECTOR, ".chart canvas")) > 4)


def report(driver: Chrome, base: str) -> None:
    """The beginning of a report."""
    del base
    file = RUNS / "report.html"
    stretto("report", str(RUNS / "quickstart"), "--out", str(file))
    driver.get(file.as_uri())


def terminal(driver: Chrome, base: str) -> None:
    """What commands print."""
    del base
    console = Console(record=True, width=110, file=io.StringIO())
    for command in (("runs", str(RUNS)), ("plot", str(RUNS / "quickstart"), "--key", "reward")):
        console.print(Text(f"$ stretto {' '.join(command)}", style="bold"))
        console.print(Text.from_ansi(stretto(*command)))
    file = RUNS / "terminal.html"
    file.write_text(console.export_html(theme=MONOKAI, inline_styles=True))
    driver.get(file.as_uri())


PICTURES: dict[str, Callable[[Chrome, str], None]] = {
    "page": overview,
    "page-samples": samples,
    "page-timeline": timeline,
    "page-comparison": comparison,
    "report": report,
    "terminal": terminal,
}


def show(driver: Chrome, base: str, place: str, *selectors: str) -> None:
    """Open a view of the first run, and wait until it has what the selectors name."""
    run = driver.execute_script(
        "return fetch('/api/runs').then((answer) => answer.json())"
        ".then(({ runs }) => runs.find((run) => run.name === 'quickstart').id)"
    )
    driver.get("about:blank")
    driver.get(f"{base}#/run/{run}/{place}")
    for selector in selectors:
        until(lambda selector=selector: driver.find_elements(By.CSS_SELECTOR, selector))


def until(condition: Callable[[], object]) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + _WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the page does not show what the picture needs")
        time.sleep(0.1)


if __name__ == "__main__":
    main(sys.argv[1:])
