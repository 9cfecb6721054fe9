"""Starts workers as steps of the Slurm job that the kernel runs in, and submits such a job."""

import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import anyio.to_thread

from stretto import Context, Problem
from stretto.errors import LaunchError, together
from stretto.launcher import Job, Submission
from stretto.nodes import Node, Spot, place
from stretto_slurm import SlurmConfig
from stretto_slurm.allocation import Allocation, ask_slurm, slurm_environment
from stretto_slurm.script import part_of, script_of, wait_for

# srun prints `Node failure` when a node is lost; the exit status of srun is then 0.
_LOST_NODE = "error: Node failure on"
_LOST = 1  # exit status of a lost worker
_SIGNAL_BASE = 128  # srun's exit status for a signal, minus the signal
_POLL_S = 0.05  # between two looks for the start of a step in its log
_KILLED_S = 30.0
"""Seconds that the srun of a killed step has to end."""
# The numbers of a step's GPUs vary, so GPUs are chosen by their position in the step's list. Not every Slurm
# kills processes that a worker leaves, so the wrapper does. `<&0`: bash gives a background command no input.
_WRAPPER = """\
IFS=, read -ra all <<< "${{CUDA_VISIBLE_DEVICES-}}"
chosen=""
for each in {gpus}; do chosen="$chosen,${{all[each]}}"; done
export CUDA_VISIBLE_DEVICES="${{chosen#,}}"
command -v "$1" > /dev/null || {{ echo "no program $1 on $SLURMD_NODENAME" >&2; exit 127; }}
setsid "$@" <&0 &
worker=$!
trap 'kill -TERM $worker' TERM
trap 'kill -USR1 $worker' USR1
echo "stretto: {worker} on $SLURMD_NODENAME, step $SLURM_STEP_ID, pid $worker"
{wait}kill -KILL -- -$worker 2> /dev/null
exit $status"""
_STARTED = re.compile(r"^stretto: (\S+) on (\S+), step (\d+), pid (\d+)$", re.MULTILINE)


@dataclass(eq=False, repr=False)
class SlurmHandle:
    """One step, and the `srun` that waits for it."""

    _job: Job
    _process: anyio.abc.Process
    _allocation: Allocation
    _part: int
    _spot: Spot
    _log_begin: int
    _step: str = ""
    _pid: str = ""

    @property
    def place(self) -> str:
        """The worker's node, step and process id."""
        return f"{self._spot.node} step {self._step} pid {self._pid}"

    @property
    def runs(self) -> bool:
        """True until the step has ended."""
        return self._process.returncode is None

    async def until_started(self, within_s: float) -> None:
        """Wait until the worker's program has started. Raise LaunchError if it does not."""
        worker, node = self._job.worker, self._spot.node
        with anyio.move_on_after(within_s):
            while not (started := _STARTED.search(self._output())):
                if not self.runs:
                    reason = f"{worker} cannot be started on {node}: {self._job.tail(5)}"
                    raise LaunchError(reason, worker=worker)
                await anyio.sleep(_POLL_S)
            self._step, self._pid = f"{self._allocation.jobs[self._part]}.{started[3]}", started[4]
            return
        raise LaunchError(
            f"{worker} did not start on {node} within {within_s:g} s (launcher.start_s): {self._job.tail(5)}",
            worker=worker,
        )

    async def wait(self) -> int:
        """Wait for the step's end and return the exit status of its process."""
        status = await self._process.wait()
        if status > _SIGNAL_BASE:
            return _SIGNAL_BASE - status
        return status or (_LOST if _LOST_NODE in self._output() else 0)

    async def stop(self, grace_s: float) -> None:
        """Send SIGTERM to the worker, and SIGKILL to all processes of its step after `grace_s` seconds."""
        if grace_s > 0:
            await self._signal(signal.SIGTERM)
        with anyio.move_on_after(grace_s):
            await self.wait()
            return
        await _ask_quietly("scancel", "--signal=KILL", self._step)
        with anyio.move_on_after(_KILLED_S):
            await self.wait()
            return
        with suppress(ProcessLookupError):  # the worker's node does not answer
            self._process.kill()
        await self.wait()

    async def dump_stacks(self) -> None:
        """Send SIGUSR1: the worker then writes the stacks of its threads to its output."""
        await self._signal(signal.SIGUSR1)

    async def _signal(self, number: signal.Signals) -> None:
        """Send a signal to the worker alone: `scancel` would send it to all processes of the step."""
        if self.runs:
            kill = ["kill", f"-{number.name.removeprefix('SIG')}", self._pid]
            options = [*self._allocation.step_options(self._part), "--gres=none", "--quiet"]
            await _ask_quietly("srun", *options, f"--nodelist={self._spot.node}", *kill)

    def _output(self) -> str:
        with Path(self._job.log).open("rb") as file:
            file.seek(self._log_begin)
            return file.read().decode(errors="replace")


class SlurmLauncher:
    """Starts workers on the nodes of a Slurm job."""

    def __init__(self, config: SlurmConfig, context: Context) -> None:
        self._config = config
        self._name = context.name
        self._allocation = Allocation.of(os.environ)
        self._handles: dict[str, tuple[Job, Spot, SlurmHandle]] = {}

    @property
    def address(self) -> str:
        """Address of the kernel's node, as Slurm's daemons reach it."""
        node = os.environ.get("SLURMD_NODENAME", "")
        described = ask_slurm("scontrol", "show", "node", "-o", node) if node else ""
        match = re.search(r"NodeAddr=(\S+)", described)
        return match[1] if match else socket.gethostname()

    def check(self, jobs: Sequence[Job]) -> Iterator[Problem]:
        """Compare the jobs' needs with the Slurm job's resources; outside of a job, check a submission."""
        try:
            if self._allocation is None:
                script_of(
                    self._config, self._name, Submission(begin=(), resume=(), folder="", jobs=tuple(jobs))
                )
                ask_slurm("sinfo", "--version")
            else:
                self._place(jobs, self._allocation)
        except LaunchError as error:
            yield Problem("launcher", str(error), "environment")

    def submission(self, submission: Submission) -> str | None:
        """Return the script of a Slurm job for the run; None inside of a Slurm job."""
        return script_of(self._config, self._name, submission) if self._allocation is None else None

    def submit(self, text: str) -> str:
        """Submit a job's script; return the job's id as text."""
        try:
            return f"Slurm job {ask_slurm('sbatch', '--parsable', text=text).strip()}"
        except LaunchError as error:
            raise LaunchError(
                f"{error}\n`stretto run --dry-run` shows the script; its options come from launcher.options, "
                "and `sinfo` lists the partitions"
            ) from error

    async def launch(self, jobs: Sequence[Job]) -> list[SlurmHandle]:
        """Start a step for each job. A worker gets its former spot if its node is still in the Slurm job."""
        if self._allocation is None:
            raise LaunchError("this process runs in no Slurm job, so it cannot start a step")
        spots = await anyio.to_thread.run_sync(self._place, jobs, self._allocation)
        handles: list[SlurmHandle] = []
        try:
            for job in jobs:
                handles.append(await self._start(job, spots[job.worker], self._allocation))
            await together(lambda handle: handle.until_started(self._config.start_s), handles)
        except BaseException:
            with anyio.CancelScope(shield=True):
                for handle in handles:
                    await handle.stop(0)
            raise
        for job, handle in zip(jobs, handles, strict=True):
            self._handles[job.worker] = job, spots[job.worker], handle
        return handles

    def _place(self, jobs: Sequence[Job], allocation: Allocation) -> dict[str, Spot]:
        spots: dict[str, Spot] = {}
        for part in range(len(allocation.jobs)):
            part_jobs = [job for job in jobs if part_of(self._config, job) == part]
            if not part_jobs:
                continue
            spots |= self._place_part(part_jobs, allocation.nodes(part))
        return spots

    def _place_part(self, jobs: Sequence[Job], nodes: Sequence[Node]) -> dict[str, Spot]:
        names, starting = {node.name for node in nodes}, {job.worker for job in jobs}
        taken = {
            worker: (job, spot)
            for worker, (job, spot, handle) in self._handles.items()
            if spot.node in names and (worker in starting or handle.runs)
        }
        former_spots = {worker: spot for worker, (_, spot) in taken.items() if worker in starting}
        return former_spots | place([job for job in jobs if job.worker not in former_spots], nodes, taken)

    async def _start(self, job: Job, spot: Spot, allocation: Allocation) -> SlurmHandle:
        config, part = self._config, part_of(self._config, job)
        options = [
            *allocation.step_options(part),
            *(f"--nodelist={spot.node}", f"--cpus-per-task={job.resources.threads}", "--cpu-bind=none"),
            *(f"--job-name={job.worker}", "--unbuffered", "--export=ALL"),
            *([] if spot.gpus else ["--gres=none"]),
            *config.srun,
        ]
        command, bootstrap = job.command, None
        if command[1:3] == ("-m", "stretto.workers"):
            command, bootstrap = (*command[:-1], "-"), command[-1]
        with Path(job.log).open("ab") as log, Path(bootstrap or os.devnull).open("rb") as text:
            begin = log.tell()
            process = await anyio.open_process(
                ["srun", *options, "bash", "-c", _wrapped(job, spot, config.prologue), "stretto", *command],
                stdin=text,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**slurm_environment(), **job.env},
                start_new_session=True,
            )
        return SlurmHandle(job, process, allocation, part, spot, begin)


def _wrapped(job: Job, spot: Spot, prologue: Sequence[str]) -> str:
    return "\n".join(
        [*prologue, _WRAPPER.format(gpus=" ".join(spot.gpus), worker=job.worker, wait=wait_for("worker"))]
    )


async def _ask_quietly(*command: str) -> None:
    """Run a command of Slurm. Ignore its failure, because the step may have ended."""
    with suppress(LaunchError):
        await anyio.to_thread.run_sync(ask_slurm, *command)
