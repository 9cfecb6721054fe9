"""Curves for the page: smoothing, points for pixels, windows."""

from typing import Any

import numpy as np
import pytest

from stretto.records.charts import thin
from stretto_ui.curves import ShownCurve, curve, smooth


def shown(*runs: list[dict[str, Any]], key: str = "loss", x: str = "step", **window: Any) -> ShownCurve:
    """The curve of runs, by default whole and without smoothing."""
    usual: dict[str, Any] = {"start": None, "end": None, "points": 100, "smoothing": 0}
    return curve(runs, key, x=x, **{**usual, **window})


def test_smoothing_is_a_mean_that_forgets_and_leaves_a_constant_as_it_is() -> None:
    # weights of the values at the third point: 0.25, 0.5, 1 -> (0.25 * 1 + 0.5 * 2 + 1 * 4) / 1.75
    np.testing.assert_allclose(smooth(np.array([1.0, 2.0, 4.0]), 0.5), [1, 5 / 3, 3])
    np.testing.assert_allclose(smooth(np.full(50, 7.0), 0.97), 7.0)


def test_points_far_apart_leave_no_part_without_its_values() -> None:
    xs = np.array([0.0, 1, 2, 1e6, 1e6 + 1, 1e6 + 2])

    kept, _ = thin(xs, np.array([0.0, 5, 0, 0, 5, 0]), 6)

    assert kept.tolist() == xs.tolist()


@pytest.mark.parametrize(
    ("start", "end", "expected"), [(3, 5, [2, 3, 4, 5, 6]), (None, 2, [1, 2, 3]), (9, None, [8, 9])]
)
def test_a_window_has_the_nearest_points_outside(
    start: float | None, end: float | None, expected: list[float]
) -> None:
    lines = [{"step": step, "loss": step / 10} for step in range(1, 10)]

    found = shown(lines, start=start, end=end)

    assert found.x == expected
    assert found.y == [step / 10 for step in expected]


def test_the_mean_in_a_window_knows_what_was_before_it() -> None:
    lines = [{"step": step, "loss": 100.0 if step < 50 else 0.0} for step in range(100)]

    found = shown(lines, start=50, end=60, smoothing=0.9)

    assert found.smooth_y[1] == pytest.approx(90, abs=1)


def test_lines_without_the_figure_are_left_out() -> None:
    values = [{"loss": 1.0}, {}, {"loss": None}, {"loss": True}, {"loss": 2}]
    lines = [{"step": step, **value} for step, value in enumerate(values, start=1)]

    found, none = shown(lines), shown(lines[1:2], smoothing=0.5)

    assert (found.x, found.y) == ([1, 5], [1, 2])
    assert (none.x, none.smooth_x, none.total) == ([], [], 0)


def test_the_curve_of_several_seeds_is_their_mean_where_all_have_a_value() -> None:
    runs = [
        [{"step": n, "time_s": n * (1.0 + seed), "loss": float(n + seed)} for n in range(5 + seed)]
        for seed in range(3)
    ]

    found, smoothed = shown(*runs, x="time_s"), shown(*runs, smoothing=0.5)

    assert found.x == [step * 2.0 for step in range(5)]
    assert found.y == [step + 1.0 for step in range(5)]
    assert found.sd == pytest.approx([1.0] * 5)
    assert (smoothed.x, smoothed.smooth_x) == ([*range(5)], [*range(5)])
    assert smoothed.sd == pytest.approx([1.0] * 5)
    assert shown(runs[0]).sd == []
