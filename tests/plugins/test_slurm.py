"""The launcher `slurm` without a Slurm: the script of a job, run by bash, and what its answers mean."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from tests.conftest import write_run_file

from patience import patience
from stretto.assembly.compose import compose
from stretto.assembly.worker_numbers import WorkerNumbers
from stretto.cli.start.submit import submitted_resume
from stretto.errors import LaunchError
from stretto.kernel.durable.changes import assemble_in_force, write_values
from stretto.launcher import Job, Submission
from stretto.nodes import Node
from stretto_slurm import SlurmConfig, SlurmPart
from stretto_slurm.allocation import Allocation, nodes_in
from stretto_slurm.script import script_of
from waiting import until
from worker_jobs import job


def submission(folder: Path, *jobs: Job, begin: tuple[str, ...] = ("echo", "begun")) -> Submission:
    return Submission(begin=begin, resume=("echo", "resumed"), folder=str(folder), jobs=jobs)


def header(config: SlurmConfig, *jobs: Job) -> list[str]:
    lines = script_of(config, "test", submission(Path("/shared/run"), *jobs)).splitlines()
    return [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")]


def test_the_resources_of_a_node_follow_from_the_workers() -> None:
    ranks = [job(f"trainer-{rank}", gpus=1, threads=4, memory_gb=20) for rank in range(4)]
    engines = [job(f"inference-{each}", gpus=2, threads=2, memory_gb=10) for each in range(2)]
    found = header(SlurmConfig(nodes=2, options=("--partition=gpu",)), *ranks, *engines)
    assert "--output=/shared/run.slurm-%j.out" in found
    # The ranks fill one node, with all its four GPUs; the engines need the other one.
    assert found[-6:] == [
        *("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=17", "--gpus-per-node=4"),
        *("--mem=82G", "--partition=gpu"),
    ]


def test_ranks_that_need_one_node_get_it() -> None:
    ranks = [job(f"trainer-{rank}", gpus=1, unit=f"training {rank // 3}") for rank in range(6)]
    assert "--gpus-per-node=3" in header(SlurmConfig(nodes=2), *ranks)
    assert "--gpus-per-node=6" in header(
        SlurmConfig(nodes=4), *(job(f"trainer-{n}", gpus=1, unit="a") for n in range(6))
    )


def test_a_part_has_options_of_its_own() -> None:
    parts = {"scorers": SlurmPart(workers=("verifier",), options=("--partition=cpu",))}
    found = header(
        SlurmConfig(parts=parts, requeue=False), job("trainer-0", gpus=1), job("verifier-0", threads=3)
    )
    first, second = found[: found.index("hetjob")], found[found.index("hetjob") + 1 :]
    assert {"--no-requeue", "--gpus-per-node=1", "--cpus-per-task=2"} <= set(first)
    assert second == ["--nodes=1", "--ntasks-per-node=1", "--cpus-per-task=3", "--partition=cpu"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"options": ("gpu",)}, "'gpu' is no option of sbatch"),
        ({"options": ("--nodes=3",)}, "'--nodes=3' cannot be set"),
        ({"prologue": ("a\nb",)}, "without line breaks"),
        ({"parts": dict.fromkeys("ab", SlurmPart(workers=("rollout",)))}, "in two parts"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SlurmConfig(**options)  # pyright: ignore[reportArgumentType]


def run(folder: Path, text: str, *, after: int = 0) -> tuple[int, str]:
    """Exit status and output of a job's script, with commands of Slurm that say what they were asked. The
    script gets the signal `after` when its command has begun."""
    commands = folder / "commands"
    commands.mkdir(exist_ok=True)
    for name in ("scontrol", "sleep"):
        (commands / name).write_text(f'#!/bin/bash\necho {name} "$@"\n')
        (commands / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{commands}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    output = folder / "output"
    with output.open("w") as file:
        process = subprocess.Popen(
            ["bash", "-c", text], env=environment, stdout=file, stderr=subprocess.STDOUT
        )
    try:
        if after:
            until(lambda: "begun" in output.read_text())
            process.send_signal(after)
        return process.wait(patience()), output.read_text()
    finally:
        process.kill()
        process.wait()


def test_a_job_begins_a_run_or_resumes_it(tmp_path: Path) -> None:
    text = script_of(SlurmConfig(prologue=("echo first",)), "test", submission(tmp_path))
    assert run(tmp_path, text) == (0, "first\nbegun --supervise\n")
    (tmp_path / "config.yaml").touch()
    assert run(tmp_path, text) == (0, "first\nresumed --supervise\n")
    failing = submission(tmp_path / "other", begin=("bash", "-c", "exit 3"))
    assert run(tmp_path, script_of(SlurmConfig(), "test", failing)) == (3, "")


@pytest.mark.parametrize(
    ("number", "requeue", "expected"),
    [
        (signal.SIGUSR1, True, "begun\nasked\nscontrol requeue 7\nsleep 60\n"),
        (signal.SIGUSR1, False, "begun\nasked\n"),
        (signal.SIGTERM, True, "begun\nasked\n"),  # somebody has cancelled the job
    ],
)
def test_a_job_near_its_time_limit_ends_with_a_checkpoint(
    tmp_path: Path, number: int, requeue: bool, expected: str
) -> None:
    kernel = "trap 'echo asked; exit 130' TERM; echo begun; while :; do read -t 0.05 <> <(:) || :; done"
    begun = submission(tmp_path, begin=("bash", "-c", kernel))
    text = script_of(SlurmConfig(requeue=requeue), "test", begun)
    assert run(tmp_path, text, after=number) == (130, expected)


def test_the_nodes_of_a_job_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scontrol").write_text(
        '#!/bin/bash\n[ "$3" = "a[1-2]" ] && printf "a1\\na2\\n" || echo "$3"\n'
    )
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    described = (
        "JobId=5 JobName=x NumNodes=3 Nodes=a[1-2] CPU_IDs=0-3,8 Mem=2048 GRES=gpu:h100:2(IDX:0-1) "
        "Nodes=b CPU_IDs=0 Mem=0 GRES= TresPerNode=gres:gpu:2"
    )
    alike = [Node(name, 5, ("0", "1"), 2.0) for name in ("a1", "a2")]
    assert nodes_in(described) == [*alike, Node("b", 1, (), None)]
    (tmp_path / "scontrol").write_text("#!/bin/bash\necho no controller >&2; exit 1\n")
    with pytest.raises(LaunchError, match="failed with status 1: no controller"):
        nodes_in(described)


def test_the_parts_of_a_job_are_found() -> None:
    assert Allocation.of({}) is None
    assert Allocation.of({"SLURM_JOB_ID": "5"}) == Allocation(("5",))
    parts = {"SLURM_JOB_ID_HET_GROUP_0": "5", "SLURM_JOB_ID_HET_GROUP_1": "6", "SLURM_HET_SIZE": "2"}
    found = Allocation.of({"SLURM_JOB_ID": "5", **parts})
    assert found is not None
    assert found == Allocation(("5", "6"))
    assert found.step_options(1)[:2] == ["--jobid=5", "--het-group=1"]


def test_a_resumed_run_gets_room_for_its_new_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    folder = tmp_path / "out"
    folder.mkdir()
    composed = compose(write_run_file(tmp_path), [f"out={folder}", "launcher.use=slurm"])
    write_values(folder, composed)

    def script(*overrides: str) -> str:
        assert submitted_resume(assemble_in_force(folder), overrides, ["--accept-dataset"], dry_run=True)
        return capsys.readouterr().out

    assert "--cpus-per-task=5\n" in script()
    changed = script("rollout.processes=4", "launcher.nodes=2", "weights=bus")
    assert "--nodes=2\n" in changed
    assert "--cpus-per-task=5\n" in changed  # nine on two nodes
    assert f"resume {folder} rollout.processes=4 launcher.nodes=2 weights=bus --accept-dataset" in changed
    WorkerNumbers(composed, folder).change("verifier.processes", 3)  # stretto scale
    assert "--cpus-per-task=7\n" in script()
