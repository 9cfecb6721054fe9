"""Which processes of a former kernel the next one takes over."""

import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from patience import patience
from stretto.component import Context
from stretto.kernel.fleet.adoption import Adoption
from stretto.launcher import LauncherConfig
from stretto.machine.former_process import FormerProcess
from stretto_local import LocalLauncher
from worker_jobs import job

SLEEP = "import time; time.sleep(600)"


def launcher(folder: Path) -> LocalLauncher:
    return LocalLauncher(LauncherConfig(), Context(run="r", name="n", seed=1, folder=str(folder)))


async def test_the_workers_of_a_copied_folder_are_left_alone(tmp_path: Path) -> None:
    bus, copy, renamed = (tmp_path / name / "bus" for name in ("run", "copy", "renamed"))
    bus.mkdir(parents=True)
    first, rollout = launcher(tmp_path), job("rollout-0", code=SLEEP, folder=tmp_path)
    [worker] = await first.launch([rollout])
    Adoption(first, bus, 0).record(["rollout-0"])
    shutil.copytree(bus.parent, copy.parent)
    assert await Adoption(launcher(tmp_path), copy, 0).find([rollout]) == []
    bus.parent.rename(renamed.parent)
    [(found, handle)] = await Adoption(launcher(tmp_path), renamed, 0).find([rollout])
    assert (found, handle.place) == (rollout, worker.place)
    await worker.stop(0)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"values": 0}', b"\xff"])
async def test_a_damaged_record_adopts_nobody(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "processes.json").write_bytes(content)
    assert await Adoption(launcher(tmp_path), tmp_path, 0).find([job("rollout-0", code=SLEEP)]) == []


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere only the wall clock says when a process started"
)
def test_a_process_is_the_same_after_a_step_of_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    process = subprocess.Popen([sys.executable, "-c", SLEEP])
    try:
        created = FormerProcess(process.pid).created
        monkeypatch.setattr(psutil.Process, "create_time", Mock(return_value=3600.0))
        assert FormerProcess.find(process.pid, created) is not None
        assert FormerProcess.find(process.pid, f"{created}1") is None
    finally:
        process.kill()
        process.wait(patience())
    assert FormerProcess.find(process.pid, created) is None
