"""The launcher `slurm` in a job of two nodes with two GPUs each, in which test_slurm.py runs this file."""

from pathlib import Path

import anyio

from patience import patience
from stretto import Context
from stretto.testing import LauncherConformance
from stretto_slurm import SlurmConfig
from stretto_slurm.slurm import SlurmLauncher
from worker_jobs import job


class TestSlurm(LauncherConformance):
    use = "slurm"


async def test_each_process_sees_gpus_of_its_own(tmp_path: Path) -> None:
    code = "import os; print(os.environ['SLURMD_NODENAME'], os.environ['CUDA_VISIBLE_DEVICES'])"
    jobs = [
        job(f"inference-{number}", gpus, code=code, folder=tmp_path)
        for number, gpus in enumerate((1, 1, 1, 1, 0))
    ]
    launcher = SlurmLauncher(SlurmConfig(nodes=2), Context(run="r", name="n", seed=0))
    handles = await launcher.launch(jobs)
    with anyio.fail_after(patience()):
        assert [await handle.wait() for handle in handles] == [0] * 5
    seen = [job.tail(1).split() for job in jobs]
    assert sorted(map(tuple, seen[:4])) == [(node, gpu) for node in ("node1", "node2") for gpu in "01"]
    assert len(seen[4]) == 1  # no GPU
