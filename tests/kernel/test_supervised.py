"""When a process that has failed is started again."""

from collections.abc import Sequence

import pytest

from stretto.kernel.supervised import Failure, supervised


@pytest.mark.parametrize(
    ("lives", "most", "pauses", "gives_up"),
    [
        ([False] * 6, 9, [1, 2, 4, 8, 10, 10], False),
        ([False, False, True, False], 9, [1, 2, 1, 2], False),
        ([False] * 3, 2, [1, 2], True),
        ([False, True, False, True, False], 2, [1, 1, 2, 1, 2], False),
        ([True], 0, [], True),
        ([], 0, [], False),
    ],
)
async def test_pauses_double_until_a_process_lasts_or_has_failed_too_often(
    lives: Sequence[bool], most: int, pauses: Sequence[float], gives_up: bool
) -> None:
    failures = iter([Failure("it fell", lasted) for lasted in lives])
    waited: list[float] = []

    async def live() -> Failure | None:
        return next(failures, None)

    async def restart(pause_s: float) -> bool:
        waited.append(pause_s)
        return True

    last = await supervised(live, restart, first_pause_s=1, longest_pause_s=10, most=most)
    assert waited == list(pauses)
    assert (last is not None) == gives_up
