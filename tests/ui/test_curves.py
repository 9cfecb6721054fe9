"""Curves for the page: smoothing, points for pixels, windows."""

from __future__ import annotations

import numpy as np
import pytest

from stretto.charts import thin
from stretto_ui.curves import curve, smooth


def test_smoothing_is_a_mean_that_forgets() -> None:
    # weights of the values at the third point: 0.25, 0.5, 1 -> (0.25 * 1 + 0.5 * 2 + 1 * 4) / 1.75
    np.testing.assert_allclose(smooth(np.array([1.0, 2.0, 4.0]), 0.5), [1, 5 / 3, 3])


def test_smoothing_leaves_a_constant_as_it_is() -> None:
    np.testing.assert_allclose(smooth(np.full(50, 7.0), 0.97), 7.0)


def test_no_spike_is_lost_when_points_are_left_out() -> None:
    xs, ys = np.arange(10_000.0), np.zeros(10_000)
    ys[[1234, 5678]] = 9, -9

    shown_x, shown_y = thin(xs, ys, 200)

    assert len(shown_x) <= 200
    assert (shown_x[0], shown_x[-1]) == (0, 9999)
    assert {(1234.0, 9.0), (5678.0, -9.0)} <= set(zip(shown_x.tolist(), shown_y.tolist(), strict=True))
    assert (np.diff(shown_x) > 0).all()


def test_few_points_are_all_kept() -> None:
    xs = np.arange(5.0)

    shown, _ = thin(xs, xs**2, 5)

    assert shown.tolist() == xs.tolist()


def test_points_far_apart_leave_no_part_without_its_values() -> None:
    xs = np.array([0.0, 1, 2, 1e6, 1e6 + 1, 1e6 + 2])

    shown, _ = thin(xs, np.array([0.0, 5, 0, 0, 5, 0]), 6)

    assert shown.tolist() == xs.tolist()


@pytest.mark.parametrize(
    ("start", "end", "expected"), [(3, 5, [2, 3, 4, 5, 6]), (None, 2, [1, 2, 3]), (9, None, [8, 9])]
)
def test_a_window_has_the_nearest_points_outside(
    start: float | None, end: float | None, expected: list[float]
) -> None:
    lines = [{"step": step, "loss": step / 10} for step in range(1, 10)]

    found = curve([lines], "loss", x="step", start=start, end=end, points=100, smoothing=0)

    assert found.x == expected
    assert found.y == [step / 10 for step in expected]


def test_the_mean_in_a_window_knows_what_was_before_it() -> None:
    lines = [{"step": step, "loss": 100.0 if step < 50 else 0.0} for step in range(100)]

    found = curve([lines], "loss", x="step", start=50, end=60, points=100, smoothing=0.9)

    assert found.smooth_y[1] == pytest.approx(90, abs=1)


def test_lines_without_the_figure_are_left_out() -> None:
    lines = [
        {"step": 1, "kl": 1.0},
        {"step": 2},
        {"step": 3, "kl": None},
        {"step": 4, "kl": True},
        {"step": 5, "kl": 2},
    ]

    found = curve([lines], "kl", x="step", start=None, end=None, points=10, smoothing=0)

    assert (found.x, found.y) == ([1, 5], [1, 2])


def test_a_figure_that_no_line_has_is_an_empty_curve() -> None:
    found = curve([[{"step": 1}]], "kl", x="step", start=None, end=None, points=10, smoothing=0.5)

    assert (found.x, found.smooth_x, found.total) == ([], [], 0)


def test_the_curve_of_several_seeds_is_their_mean_where_all_have_a_value() -> None:
    runs = [
        [
            {"step": step, "time_s": step * (1.0 + seed), "loss": float(step + seed)}
            for step in range(5 + seed)
        ]
        for seed in range(3)
    ]

    found = curve(runs, "loss", x="time_s", start=None, end=None, points=100, smoothing=0)
    smoothed = curve(runs, "loss", x="step", start=None, end=None, points=100, smoothing=0.5)

    assert found.x == [step * 2.0 for step in range(5)]
    assert found.y == [step + 1.0 for step in range(5)]
    assert found.sd == pytest.approx([1.0] * 5)
    assert (smoothed.x, smoothed.smooth_x) == ([*range(5)], [*range(5)])
    assert smoothed.sd == pytest.approx([1.0] * 5)
    assert curve(runs[:1], "loss", x="step", start=None, end=None, points=9, smoothing=0).sd == []
