"""Wait in a test without an event loop: `from waiting import until`."""

import time
from collections.abc import Callable
from typing import Any

from patience import SOON_S, patience


def until(condition: Callable[[], Any], otherwise: Callable[[], Any] = str) -> Any:
    """Wait until a condition holds, and return what it found; show `otherwise` if it does not in time."""
    deadline = time.monotonic() + patience()
    while not (found := condition()):
        assert time.monotonic() < deadline, otherwise()
        time.sleep(SOON_S)
    return found
