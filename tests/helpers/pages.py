"""The page of `stretto ui` in a browser: `from pages import Page, served`."""

import json
import subprocess
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver import ActionChains, Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from commands import STRETTO
from patience import SOON_S, patience

T = TypeVar("T")


class Page:
    """A browser that has the token of a server, and shows one of its addresses."""

    def __init__(self, driver: Chrome, address: str, folder: Path) -> None:
        self.driver = driver
        self.base = address.partition("?")[0]
        self.folder = folder
        driver.get(address)
        self.until(lambda: driver.current_url.startswith(f"{self.base}#") or driver.current_url == self.base)

    def open(self, place: str) -> None:
        self.driver.get("about:blank")
        self.driver.get(f"{self.base}#/{place}")

    def until(self, found: Callable[[], T]) -> T:
        within_s = patience()
        deadline = time.monotonic() + within_s
        while True:
            try:
                value = found()
            except StaleElementReferenceException:  # the page has drawn again
                value = None
            if value:
                return value  # pyright: ignore[reportReturnType]
            assert time.monotonic() < deadline, f"not in {within_s} s: {self.driver.page_source[-3000:]}"
            time.sleep(SOON_S)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> WebElement:
        return self.until(lambda: self.all(selector))[0]

    def text(self, selector: str) -> str:
        return self.one(selector).text

    def cells(self, selector: str) -> list[list[str]]:
        script = (
            "return [...document.querySelectorAll(arguments[0] + ' tbody tr')]"
            ".map((row) => [...row.cells].map((cell) => cell.textContent))"
        )
        return self.js(script, selector)

    def press(self, *keys: str) -> None:
        ActionChains(self.driver).send_keys(*keys).perform()

    def js(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)

    def run(self, name: str) -> str:
        script = (
            "return fetch('/api/runs').then((answer) => answer.json())"
            ".then(({ runs }) => runs.find((run) => run.name === arguments[0]).id)"
        )
        return self.js(script, name)

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name / "metrics.jsonl").read_text().splitlines()]


@contextmanager
def served(folder: Path) -> Generator[str]:
    with subprocess.Popen([*STRETTO, "ui", folder], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def curve_of(page: Page, key: str) -> list[tuple[float, float]]:
    chart = f".chart[data-key='{key}']"
    page.js("arguments[0].scrollIntoView()", page.one(chart))  # what is not seen is not loaded
    page.one(f"{chart} canvas")
    page.js("arguments[0].click()", page.one(f"{chart} [title*=table]"))
    rows = page.until(lambda: page.cells(f"{chart} .data"))
    return [(float(x.replace(",", "")), float(y.replace(",", ""))) for x, y in rows]
