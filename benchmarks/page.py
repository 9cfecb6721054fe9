"""How long the views of `stretto ui` take to appear: those of a long run, and the list of many runs.

    python benchmarks/page.py [STEPS] [RUNS]    # default 1,000 and 500

The runs are made (`tests/helpers/made_run.py`). Each view is opened in a headless Chromium, twice: the first
time, the server has read no file yet. The last line is one JSON object; `factor` says how many times as long
a fixed piece of work takes on this machine as on a good one.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

from browser import open_browser
from made_run import make_run
from pages import Page, served
from patience import GOOD_MACHINE_S, measured_s

VIEWS = {  # name -> what is there when the view is complete
    "overview": ".chart[data-key=reward] canvas",
    "curves": ".chart[data-key=reward] canvas",
    "timeline": "#share .legend",
    "samples": "#count:not(:empty)",
    "config": "#config tr",
}


def seconds(page: Page, place: str, selector: str) -> float:
    page.driver.get("about:blank")
    start = time.perf_counter()
    page.driver.get(f"{page.base}#/{place}")
    page.one(selector)
    return time.perf_counter() - start


def main() -> None:
    steps, runs = (int(each) for each in sys.argv[1:3] or (1000, 500))
    factor = measured_s() / GOOD_MACHINE_S
    figures: dict[str, float] = {"factor": round(factor, 2)}
    with tempfile.TemporaryDirectory() as root:
        long, many = Path(root, "long"), Path(root, "many")
        make_run(long / "run", name="long", steps=steps)
        for number in range(runs):
            make_run(
                many / str(number),
                name=f"run-{number}",
                seed=1 + number % 3,
                lr=1e-5 * (1 + number // 3),
                steps=60,
                groups=1,
                samples=1,
            )
        with open_browser(Path(root, "profile"), width=1440) as driver:
            with served(many) as address:
                page = Page(driver, address, many)
                for when in ("first", "again"):
                    figures[f"runs {when}"] = seconds(page, "", "#runs tbody tr.link")
            with served(long) as address:
                page = Page(driver, address, long)
                run = page.run("long")
                for name, selector in VIEWS.items():
                    for when in ("first", "again"):
                        figures[f"{name} {when}"] = seconds(page, f"run/{run}/{name}", selector)
    for name, value in figures.items():
        print(f"{name:16} {value:.2f}")
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
