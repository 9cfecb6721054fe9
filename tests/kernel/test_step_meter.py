"""Figures of a step as `metrics.jsonl` has them."""

from stretto.kernel.step_meter import _figure  # pyright: ignore[reportPrivateUsage]


def test_small_figures_keep_their_digits_and_whole_numbers_stay_whole() -> None:
    rates = [1e-6 * step / 8 for step in (8, 4, 1)]  # the default rate, and its decay
    assert [_figure(rate) for rate in rates] == [1e-6, 5e-7, 1.25e-7]
    assert _figure(0.12345678) == 0.123457
    assert isinstance(_figure(4), int)
