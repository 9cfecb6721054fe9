"""Runs in a real Slurm: two nodes on this machine, which slurm.sh starts (`make test-clusters`)."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.conftest import write_run_file

from cluster_page import Section, filled
from commands import STRETTO
from patience import patience
from stretto.cli.audit.audit import audit_run
from waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(patience(600))]

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SETTINGS = {
    "SLURM_NODES": "2",
    "SLURM_CPUS_PER_NODE": "8",
    "SLURM_FAKE_GPUS": "2",
    "SLURM_NODE_TIMEOUT": "10",
}
ON_TWO_NODES = "launcher.use=slurm", "launcher.nodes=2", "weights=bus"
# In the steps of engines, a private mount hides the run's folder: they then have no folder in common with the
# other workers.
HIDE = (
    "if [[ $SLURM_JOB_NAME == inference-* && -z $HIDDEN ]]; then HIDDEN=1 exec unshare --mount bash -c "
    '"$BASH_EXECUTION_STRING" "$0" "$@"; fi',
    "if [[ -n $HIDDEN ]]; then mount -t tmpfs none {out}; fi",
)


@pytest.fixture(scope="module", autouse=True)
def slurm() -> Iterator[None]:
    script = [str(HERE / "slurm.sh")]
    subprocess.run(script, env={**os.environ, **SETTINGS}, check=True)
    yield
    subprocess.run([*script, "stop"], env={**os.environ, **SETTINGS}, check=True)


def ask(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


class SlurmRun:
    def __init__(self, folder: Path, command: list[str]) -> None:
        self.folder = folder
        said = ask(*STRETTO, *command)
        found = re.match(r"Slurm job (\d+); the run's folder is (\S+)", said)
        assert found, said
        assert found[2] == str(folder)
        self.job = found[1]

    def state(self) -> str:
        return re.findall(r"JobState=(\w+)", ask("scontrol", "show", "job", "-o", self.job))[0]

    def until_step(self, step: int) -> None:
        path = self.folder / "metrics.jsonl"
        until(lambda: path.exists() and path.read_text().count('"ledger"') >= step, otherwise=self.text)

    def end(self, state: str = "COMPLETED") -> None:
        going_on = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING")
        until(lambda: self.state() not in going_on, otherwise=self.text)
        assert self.state() == state, self.text()

    def text(self) -> str:
        parts = sorted(self.folder.parent.glob(f"{self.folder.name}.slurm-*.out"))
        return "\n".join([*(part.read_text() for part in parts), ask("squeue"), ask("sinfo")])

    def nodes(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for log in (self.folder / "logs").glob("*.out"):
            started = re.findall(r"^stretto: (\S+) on (\S+), step", log.read_text(), re.MULTILINE)
            for worker, node in started:
                found.setdefault(worker, []).append(node)
        return found

    def assert_completed(self, steps: int) -> dict[str, Any]:
        self.end()
        summary = json.loads((self.folder / "summary.json").read_text())
        assert (summary["status"], summary["version"]) == ("completed", steps), self.text()
        assert audit_run(self.folder).status == "clean"
        return summary


Submit = Callable[..., SlurmRun]


@pytest.fixture
def submit(tmp_path: Path) -> Iterator[Submit]:
    """`submit("steps=30")`: a run of mock engines on two nodes; `submit(resume=run)` continues with one."""
    file, runs = write_run_file(tmp_path), list[SlurmRun]()

    def submit_run(*overrides: str, resume: SlurmRun | None = None, run_file: Path = file) -> SlurmRun:
        folder = resume.folder if resume else tmp_path / "out"
        begin = ["run", str(run_file), f"out={folder}", *ON_TWO_NODES]
        runs.append(SlurmRun(folder, [*(["resume", str(folder)] if resume else begin), *overrides]))
        return runs[-1]

    yield submit_run
    for run in runs:
        subprocess.run(["scancel", run.job], check=False)
        until(lambda run=run: run.state() not in ("RUNNING", "COMPLETING"))
    for node in ("node1", "node2"):
        if "drain" in ask("sinfo", "-h", "-N", "-n", node, "-o", "%T"):
            ask("scontrol", "update", f"nodename={node}", "state=resume")


def test_the_launcher_in_a_job() -> None:
    inside = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "inside_slurm.py")]
    resources = ["--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=4", "--gpus-per-node=2"]
    ask("salloc", *resources, *inside)


def test_the_commands_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    page, file, out = Section("Slurm"), tmp_path / "mine.yaml", tmp_path / "first"
    local = {"launcher.options": ["--partition=main", *page.keys["launcher"]["options"][1:]], "out": str(out)}
    local |= {"launcher.prologue": None, "steps": 100, "training.seconds_per_step": 0.3}
    page.write_run_file(write_run_file(tmp_path), file, local)
    values: dict[str, object] = {"run.yaml": file, "/shared/runs/first": out}
    text, begin, queue, watch, cancel, resume = page.commands
    script = ask(*filled(text, values))
    assert script.startswith("#!/bin/bash\n#SBATCH --job-name=stretto-test\n")
    assert "#SBATCH --partition=main\n#SBATCH --time=12:00:00\n" in script

    job = values["1234"] = ask(*filled(begin, values)).split()[2].rstrip(";")
    try:
        until(lambda: f" {job} " in (said := ask(*filled(queue, values))) and " R " in said)
        until((out / "status.json").exists)
        with subprocess.Popen(filled(watch, values), stdout=subprocess.PIPE, text=True) as view:
            assert view.stdout is not None
            assert next((line for line in view.stdout if re.match(r"step [1-9]\d* of 100 ", line)), "")
            ask(*filled(cancel, values))
            # Slurm ends steps and kernel in any order: the kernel sees lost workers, its own end, or nothing.
            ends = r"^(interrupted|failed) at step|to continue it: stretto resume"
            assert re.search(ends, view.stdout.read(), re.MULTILINE)
        until(lambda: not ask("squeue", "--noheader").strip())
        job = ask(*filled(resume, values)).split()[2].rstrip(";")
        until(lambda: not ask("squeue", "--noheader").strip(), otherwise=lambda: ask("squeue"))
        assert json.loads((out / "summary.json").read_text())["status"] == "completed"
        assert (tmp_path / f"first.slurm-{job}.out").exists()
    finally:
        subprocess.run(["scancel", str(job)], check=False)
        until(lambda: not ask("squeue", "--noheader").strip())


def test_the_quickstart_on_two_nodes_with_a_trainer_on_each(submit: Submit, tmp_path: Path) -> None:
    run = submit(
        *("steps=6", "training.use=fsdp2", "training.processes=2"),
        *("training.threads=1", "training.shard=false"),
        # Both ranks have no room on one node.
        *("training.memory_gb=5", "rollout.memory_gb=0.5", "verifier.memory_gb=0.5"),
        *("inference.memory_gb=1", "inference.threads=1", "inference.replicas=2"),
        *("evaluation=null", "queue.batch_size=8", "samples.keep=none"),
        "launcher.prologue=" + json.dumps([line.format(out=tmp_path) for line in HIDE]),
        run_file=ROOT / "examples/quickstart/run.yaml",
    )
    run.assert_completed(6)
    nodes = run.nodes()
    assert {*nodes["trainer-0"], *nodes["trainer-1"]} == {"node1", "node2"}
    assert {*nodes["inference-0"], *nodes["inference-1"]} == {"node1", "node2"}
    logs = {path.name for path in (run.folder / "logs").iterdir()}
    assert "trainer-1.jsonl" in logs
    assert "inference-0.jsonl" not in logs  # it does not see the folder
    if (address := ask("hostname", "-I").split()[:1]) and address[0] != "127.0.0.1":
        bootstrap = json.loads((run.folder / "bus" / "inference.json").read_text())
        assert bootstrap["url"].startswith(f"tls://{address[0]}:")


def test_a_cancelled_job_leaves_nothing_and_can_be_resumed(submit: Submit) -> None:
    run = submit("steps=400", "checkpoint.every=10")
    run.until_step(12)
    ask("scancel", run.job)
    run.end("CANCELLED")
    until(lambda: not ask("squeue", "--noheader", "--steps").strip())
    again = submit("steps=30", resume=run)
    again.assert_completed(30)


def kernel_of(run: SlurmRun) -> int:
    """The process id of the kernel, which holds the run's lock."""
    return int(re.findall(r"pid (\d+)", (run.folder / "bus" / "kernel.lock").read_text())[0])


def test_the_steps_of_a_killed_kernel_leave_before_others_start(submit: Submit) -> None:
    run = submit("steps=60", "checkpoint.every=10", "inference.replicas=2")
    run.until_step(15)
    before = run.nodes()
    os.kill(kernel_of(run), signal.SIGKILL)

    def have_started_again() -> bool:
        steps = ask("squeue", "--noheader", "--steps", "--format=%j").split()
        assert all(steps.count(worker) < 2 for worker in before), "a worker runs twice"
        return all(len(nodes) == 2 for nodes in run.nodes().values())

    until(have_started_again, otherwise=run.text)
    summary = run.assert_completed(60)
    assert "all workers start again: the launcher takes over none of a former kernel" in run.text()
    assert summary["restarts"] == 0


def test_a_job_without_kernel_and_supervisor_leaves_nothing(submit: Submit) -> None:
    run = submit("steps=400")
    run.until_step(5)
    kernel = psutil.Process(kernel_of(run))
    supervisor = kernel.parent()
    assert supervisor is not None
    assert "--supervise" in supervisor.cmdline()
    for process in (supervisor, kernel):
        process.kill()
    run.end("FAILED")
    workers = [path.stem for path in (run.folder / "logs").glob("*-0.out")]
    assert len(workers) == 4
    folder = str(run.folder)
    until(lambda: not [each for each in psutil.process_iter(["cmdline"]) if folder in str(each.info)])


def test_a_preempted_job_resumes_the_run(submit: Submit) -> None:
    run = submit("steps=120", "checkpoint.every=10")
    run.until_step(15)
    ask("scontrol", "requeue", run.job)
    until(lambda: run.state() == "PENDING")
    ask("scontrol", "update", f"jobid={run.job}", "StartTime=now")
    run.assert_completed(120)
    assert "Restarts=1" in ask("scontrol", "show", "job", "-o", run.job)


def test_a_run_goes_on_after_its_time_limit(submit: Submit) -> None:
    run = submit("steps=120")
    run.until_step(15)
    ask("scancel", "--signal=USR1", "--batch", run.job)  # as Slurm does `stop_before_s` before the limit
    until(lambda: run.state() == "PENDING", otherwise=run.text)
    assert json.loads((run.folder / "summary.json").read_text())["status"] == "interrupted"
    ask("scontrol", "update", f"jobid={run.job}", "StartTime=now")
    run.assert_completed(120)


def test_a_lost_node_costs_its_workers_only(submit: Submit) -> None:
    run = submit("steps=150", "inference.replicas=2", "rollout.processes=2")
    run.until_step(15)
    lost = {worker for worker, nodes in run.nodes().items() if nodes == ["node2"]}
    assert {"inference", "rollout"} <= {worker.partition("-")[0] for worker in lost}
    ask("scontrol", "update", "nodename=node2", "state=down", "reason=test")
    summary = run.assert_completed(150)
    assert summary["restarts"] == len(lost)
    assert all(run.nodes()[worker] == ["node2", "node1"] for worker in lost)


def test_no_worker_starts_on_a_drained_node(submit: Submit) -> None:
    run = submit("steps=150", "inference.replicas=2", "rollout.processes=2")
    run.until_step(15)
    ask("scontrol", "update", "nodename=node2", "state=drain", "reason=test")
    worker = next(
        worker for worker, nodes in run.nodes().items() if nodes == ["node2"] and "rollout" in worker
    )
    output = (run.folder / "logs" / f"{worker}.out").read_text()
    [step] = re.findall(r", step (\d+), pid", output)
    ask("scancel", "--signal=KILL", f"{run.job}.{step}")
    run.assert_completed(150)
    assert run.nodes()[worker] == ["node2", "node1"]


def test_parts_of_a_job_have_nodes_of_their_own(submit: Submit) -> None:
    parts = json.dumps({"scorers": {"workers": ["rollout", "verifier"], "options": ["--nodelist=node2"]}})
    run = submit("steps=20", "launcher.nodes=1", f"launcher.parts={parts}")
    run.assert_completed(20)
    nodes = run.nodes()
    assert nodes["rollout-0"] == nodes["verifier-0"] == ["node2"]
    assert nodes["trainer-0"] == nodes["inference-0"] == ["node1"]
