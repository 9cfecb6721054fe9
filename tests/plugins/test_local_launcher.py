"""The local launcher with workers that come later."""

from pathlib import Path
from typing import Any

import psutil
import pytest

from stretto.errors import LaunchError
from stretto.launcher import UNKNOWN_STATUS, Job
from stretto_local import LocalLauncher
from worker_jobs import job


async def test_workers_that_are_added_later_get_the_gpus_that_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    nothing: Any = None
    launcher = LocalLauncher(nothing, nothing)

    def printing(number: int) -> Job:
        code = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
        return job(f"inference-{number}", 1, code=code, folder=tmp_path)

    [first] = await launcher.launch([printing(0)])
    [second] = await launcher.launch([printing(1)])
    with pytest.raises(LaunchError, match="inference-2 needs 1 GPU"):
        await launcher.launch([printing(2)])
    await first.wait()
    [third] = await launcher.launch([printing(2)])  # the first one is gone
    [again] = await launcher.launch([printing(1)])
    for handle in (second, third, again):
        await handle.wait()
    assert [printing(number).tail(1) for number in range(3)] == ["0", "1", "0"]


async def test_a_later_launcher_takes_over_a_process_with_its_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    nothing: Any = None
    worker = job("inference-0", 1, code="import time; time.sleep(600)", folder=tmp_path)
    first, second = LocalLauncher(nothing, nothing), LocalLauncher(nothing, nothing)
    [handle] = await first.launch([worker])
    record = first.record("inference-0")

    adopted = await second.adopt(worker, record)

    assert adopted is not None
    assert adopted.place == handle.place
    with pytest.raises(LaunchError):
        await second.launch([job("inference-1", 2, folder=tmp_path)])
    assert second.record("inference-0") == record
    await adopted.stop(0)
    assert await adopted.wait() == UNKNOWN_STATUS
    assert await handle.wait() < 0
    assert not psutil.pid_exists(handle.pid)
    assert await second.adopt(worker, record) is None, "it has ended"
    assert await second.adopt(worker, "") is None
