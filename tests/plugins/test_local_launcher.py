"""The local launcher with workers that come later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from stretto.errors import LaunchError
from stretto.launcher import Job
from stretto_local import LocalLauncher
from worker_jobs import job


def test_workers_that_are_added_later_get_the_gpus_that_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")

    def printing(number: int) -> Job:
        code = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
        return job(f"inference-{number}", 1, code=code, folder=tmp_path)

    async def start_one_after_the_other() -> list[str]:
        nothing: Any = None
        launcher = LocalLauncher(nothing, nothing)
        [first] = await launcher.launch([printing(0)])
        [second] = await launcher.launch([printing(1)])
        with pytest.raises(LaunchError, match="inference-2 needs 1 GPU"):
            await launcher.launch([printing(2)])
        await first.wait()
        [third] = await launcher.launch([printing(2)])  # the first one is gone
        [again] = await launcher.launch([printing(1)])
        for handle in (second, third, again):
            await handle.wait()
        return [printing(number).tail(1) for number in range(3)]

    assert anyio.run(start_one_after_the_other) == ["0", "1", "0"]
