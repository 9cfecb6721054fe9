"""The measurement of the cores that a run may use."""

from __future__ import annotations

import os
import signal
import subprocess
import time

from patience import patience
from stretto.base.cores import CoreMeter, available_cores


def test_cores_that_other_programs_use_are_neither_used_nor_idle() -> None:
    count = 2 * round(available_cores() + 0.5)
    busy = "timeout --foreground 9 sh -c 'while :; do :; done' > /dev/null 2>&1 &"
    script = f"for each in $(seq {count}); do {busy} done; echo $$"
    ended = subprocess.run(["setsid", "sh", "-c", script], capture_output=True, text=True, check=True)
    try:
        meter = CoreMeter()
        time.sleep(patience(0.5))
        cores = meter.read()
    finally:
        os.killpg(int(ended.stdout), signal.SIGKILL)
    assert cores.used < 0.2
    assert cores.idle < 0.2


def test_the_shares_of_the_cores_are_no_more_than_all() -> None:
    meter = CoreMeter()
    deadline = time.monotonic() + patience(0.1)
    while time.monotonic() < deadline:
        pass
    used, idle = meter.read()
    assert 0 < used <= 1
    assert 0 <= idle <= 1 - used
