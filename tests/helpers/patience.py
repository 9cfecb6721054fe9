"""How long a test waits: `with fail_after(patience(30))`.

A deadline in a test says what takes too long on a good machine that does nothing else. `patience` makes of
it the deadline on this machine, as busy as it is now. It measures a fixed piece of work when the tests
begin, and again while they run. The processes of one pytest share their measurements in a folder.

In the simulated world, `patience(seconds)` is `seconds`: its time does not depend on the machine.
"""

import asyncio
import json
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median

GOOD_MACHINE_S = 0.014
"""How long the piece of work takes on a good machine, where a small universe takes 0.67 processor seconds."""
LONG_S = 90.0
"""What nothing takes that works, on a good machine. A longer wait costs only a test that fails."""
SOON_S = 0.01
"""Pause between two looks at a condition. No test relies on it."""
_EVERY_S = 10.0
_FOLDER = "STRETTO_TEST_PATIENCE"

_recent: deque[float] = deque(maxlen=6)
"""Newest factors that this process measured."""
_measured_at = float("-inf")
_factor = 1.0
_simulated = 0


def patience(seconds: float = LONG_S) -> float:
    """The deadline here for what takes at most `seconds` on a good machine."""
    return seconds if _in_simulation() else seconds * factor()


def factor() -> float:
    """How many times longer work takes here than on a good machine; at least 1. It stays the same in a test,
    so that of two times the longer one stays the longer one."""
    if not _recent:
        measure_again()
    return _factor


def measure_again() -> None:
    """Measure, as a test begins, unless this process did so some seconds ago."""
    global _factor, _measured_at
    if time.monotonic() - _measured_at > _EVERY_S:
        _recent.append(measured_s() / GOOD_MACHINE_S)
        _measured_at = time.monotonic()
        file = _folder() / f"{os.getpid()}.json"
        written = file.with_suffix(".new")
        written.write_text(json.dumps(median(_recent)))
        written.replace(file)
    _factor = max(1.0, *(_read(file) for file in _folder().glob("*.json")))


def measured_s() -> float:
    """How long the piece of work takes, with what else the machine does meanwhile: the median of three."""
    return median(_piece_of_work() for _ in range(3))


def _piece_of_work() -> float:
    began = time.perf_counter()
    kept: dict[int, str] = {}
    for number in range(200_000):
        kept[number % 1009] = str(number * number)
    json.loads(json.dumps(list(kept.values())))
    return time.perf_counter() - began


def _folder() -> Path:
    if _FOLDER not in os.environ:
        os.environ[_FOLDER] = tempfile.mkdtemp(prefix="stretto-patience-")  # child processes share it
    return Path(os.environ[_FOLDER])


def _read(file: Path) -> float:
    with suppress(FileNotFoundError):  # its process replaces it
        return float(json.loads(file.read_text()))
    return 1.0


@contextmanager
def simulated_time() -> Generator[None]:
    global _simulated
    _simulated += 1
    try:
        yield
    finally:
        _simulated -= 1


def _in_simulation() -> bool:
    if _simulated:
        return True
    simulation = sys.modules.get("stretto.simulation.loop")
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return False
    return simulation is not None and isinstance(loop, simulation.SimulatedLoop)
