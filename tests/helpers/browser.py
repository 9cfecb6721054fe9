"""A headless Chromium for tests of pages: `from browser import open_browser`."""

import json
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

_OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


@contextmanager
def open_browser(
    profile: Path, *, width: int = 1280, height: int = 900, dark: bool = False
) -> Generator[webdriver.Chrome]:
    """Run a browser for the duration of the block. Without Chromium, the test fails and says what to install.
    The profile is an empty folder; `dark` prefers dark colours."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    assert browser, "no browser to test pages with: apt-get install chromium"
    server = shutil.which("chromedriver")
    assert server, "no driver for the browser: apt-get install chromium-driver"
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for option in (*_OPTIONS, f"--window-size={width},{height}", f"--user-data-dir={profile}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, Service(server))
    try:
        driver.set_page_load_timeout(60)
        resize(driver, width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        yield driver
    finally:
        driver.quit()


def resize(driver: webdriver.Chrome, width: int = 1280, height: int = 900) -> None:
    """Give pages another size: a window is no narrower than 500 pixels, and a phone is."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def complaints(driver: webdriver.Chrome) -> list[str]:
    """Errors and warnings of the page since the last call: exceptions, and what its policy refused."""
    entries: list[dict[str, Any]] = driver.get_log("browser")  # pyright: ignore[reportUnknownMemberType]
    return [str(entry["message"]) for entry in entries if entry["level"] in ("SEVERE", "WARNING")]


def requested(driver: webdriver.Chrome) -> list[str]:
    """Addresses that pages have asked for since the last call, also in vain; those of the browser's own pages
    do not count."""
    entries: list[dict[str, Any]] = driver.get_log("performance")  # pyright: ignore[reportUnknownMemberType]
    messages = [json.loads(entry["message"])["message"] for entry in entries]
    sent = [each for each in messages if each["method"] == "Network.requestWillBeSent"]
    urls = [str(each["params"]["request"]["url"]) for each in sent]
    return [url for url in urls if not url.startswith(("chrome", "data:", "about:"))]
