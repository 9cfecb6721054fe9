"""Durations have one form, and a figure of a run one meaning."""

from __future__ import annotations

import pytest

from stretto.records.figures import change, duration_text, recent


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
