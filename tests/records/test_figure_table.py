"""Figures of a run, and the one table that views, dashboard and documentation follow to show them."""

# The keys that a view shows are its own matter.
# pyright: reportPrivateUsage=false

import json
import re
from pathlib import Path
from typing import Any

import pytest

from stretto.bus.messages.events import CAUSES
from stretto.cli.make import export
from stretto.observe import prometheus, view
from stretto.records.figures import FIGURES, Figure, change, duration_text, figure, recent
from stretto.records.metrics import ACCURACY, MAIN_FIGURES
from stretto_trace import drawing

ROOT = Path(__file__).parents[2]
UNITS = {"s": "s", "share": "percentunit"}
"""Unit of the table -> unit of Grafana; `short` for others."""


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        *(("reward", 0.12345, "0.123"), ("loss", -0.0312, "-0.0312"), ("loss", 12345.6, "12,346")),
        *(("loss", 1e300, "1e+300"), ("lr", 3e-6, "3e-06"), ("train_tokens_per_s", 4000, "4,000")),
        *(("truncated", 0.125, "12.5 %"), ("step_s", 0.5, "500 ms"), ("step_s", -1.0, "?")),
        *(("reward", value, "-") for value in (None, float("nan"), "0.5", True, 10**400)),
        ("reward/parts", 0.123456, "0.1235"),
    ],
)
def test_a_value_is_text(key: str, value: Any, text: str) -> None:
    assert figure(key).text(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((None, "-"), (0.35, "350 ms"), (0.9999, "1.0 s"), (9.94, "9.9 s"), (9.96, "10 s"), (59.4, "59 s")),
        *((59.6, "1 min 0 s"), (297.666, "4 min 58 s"), (599.7, "10 min"), (3599, "1 h 0 min")),
        *((3725, "1 h 2 min"), (47 * 3600, "47 h 0 min"), (51 * 3600, "2 d 3 h"), (float("nan"), "?")),
    ],
)
def test_a_duration_is_text(seconds: float | None, text: str) -> None:
    assert duration_text(seconds) == text


def test_a_figure_is_the_mean_of_ten_steps_and_its_change_from_the_first_ten() -> None:
    values = [0.0] * 10 + [4.0] * 5 + [1.0] * 10
    assert recent(values) == 1.0
    assert change(values) == 1.0
    assert recent([1.0, 2.0]) == 1.5
    assert (recent([]), change([1.0, 2.0])) == (None, None)


def test_a_figure_has_a_name_and_a_title() -> None:
    entropy, step = FIGURES["entropy"], FIGURES["step_s"]
    assert (entropy.name, entropy.title) == ("entropy, nats per token", "Entropy, nats per token")
    assert (step.name, step.title) == ("step time", "Step time, s")
    assert figure("reward/parts") == Figure("reward/parts")
    assert figure("reward/parts").title == "reward/parts"


def test_no_two_figures_have_one_name() -> None:
    assert len({each.label for each in FIGURES.values()}) == len(FIGURES)


def test_views_show_figures_of_the_table() -> None:
    shown = {
        *(*drawing._FIGURES, *export._FIGURES, *view._CURVES),
        *(*view._OF_STEP, *MAIN_FIGURES, *(f"wait/{cause}_s" for cause in CAUSES)),
    }
    assert shown <= FIGURES.keys()


def test_the_dashboard_has_the_names_and_units_of_the_table() -> None:
    keys = {f"stretto_{prometheus.gauge_of(key)}": key for key in FIGURES}
    keys["stretto_evaluation_accuracy"] = ACCURACY
    panels = json.loads((ROOT / "examples" / "grafana" / "stretto.json").read_text())["panels"]
    found: list[str] = []
    for panel in panels:
        first = panel.get("targets", [{"expr": ""}])[0]["expr"].partition("{")[0]
        if first in keys:
            known = FIGURES[keys[first]]
            assert panel["title"] == known.name[0].upper() + known.name[1:]
            assert panel["fieldConfig"]["defaults"]["unit"] == UNITS.get(known.unit, "short")
            found.append(first)
    assert len(found) > 10


def test_the_documentation_has_the_meanings_of_the_table() -> None:
    figures, _, waits = (ROOT / "docs" / "metrics.md").read_text().partition("### Waits")
    documented = dict(re.findall(r"^\| `([^`]+)` \| ([^|]*) \| [^|]* \| [^|]* \|$", figures, re.MULTILINE))
    assert len(documented) > 60
    assert documented == {key: FIGURES[key].meaning for key in documented}
    for key, each in FIGURES.items():
        if key.startswith("wait/"):
            assert f"| `{key}` | {each.label} | {each.meaning} |" in waits
