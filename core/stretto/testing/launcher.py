"""The contract of launchers as tests."""

import fcntl
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import anyio
import msgspec
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal

from stretto.component import Kind, Problem
from stretto.errors import LaunchError
from stretto.launcher import Handle, Job, Launcher, Resources
from stretto.testing.component import ComponentConformance, ComponentUnderTest

__all__ = ["LauncherConformance"]

T = TypeVar("T")

# Both processes hold a lock on the file until they are killed, or for the given number of seconds.
_WITH_CHILD = """
import fcntl, os, signal, sys, time
signal.signal(signal.SIGTERM, {handler})
file = open(sys.argv[1], "a")
fcntl.flock(file, fcntl.LOCK_SH)
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(float(sys.argv[2]))
    os._exit(0)
print("ready", flush=True)
{then}
time.sleep(float(sys.argv[2]))
"""


class _Launched:
    """A launcher in its own event loop, and the handles of the processes that it started."""

    def __init__(self, launcher: Launcher, portal: BlockingPortal, within_s: float) -> None:
        self.check = launcher.check
        self.handles: list[Handle] = []
        self._launcher = launcher
        self._portal = portal
        self._within_s = within_s

    def launch(self, *jobs: Job) -> Sequence[Handle]:
        handles = self.call(self._launcher.launch, jobs)
        self.handles += handles
        return handles

    def call(self, function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        async def called() -> T:
            with anyio.fail_after(self._within_s):
                return await function(*arguments)

        return self._portal.call(called)


class LauncherConformance(ComponentConformance):
    """The contract of `stretto.launcher.Launcher` with real processes: their output, exit status, end on
    request or by accident, and no child processes left."""

    kind: ClassVar[Kind] = "launcher"
    resources: ClassVar[Resources] = Resources()
    """Resources of each process."""
    start_s: ClassVar[float] = 60.0
    """Maximum duration of a start or an end, in seconds."""

    @pytest.fixture
    def launcher(self, under_test: ComponentUnderTest) -> Iterator[_Launched]:
        """The launcher, whose processes are all stopped afterwards."""
        with start_blocking_portal("asyncio") as portal:
            launched = _Launched(portal.call(under_test.make), portal, 4 * self.start_s)
            yield launched
            for handle in launched.handles:
                launched.call(handle.stop, 0)

    def test_a_process_has_its_environment_and_its_output_can_be_read(
        self, launcher: _Launched, tmp_path: Path
    ) -> None:
        """The log has stdout and stderr; `Job.tail` returns its last lines."""
        code = "import os, sys; print(1, 2, sep='\\n'); print(os.environ['OF_THE_JOB'], file=sys.stderr)"
        job = self._job(tmp_path, "rollout-0", code, env={"OF_THE_JOB": "three"})
        [handle] = launcher.launch(job)
        assert handle.place, "`place` is empty; users look there for the process"
        status = launcher.call(handle.wait)
        assert status == 0, f"exit status {status}: {job.tail(20)}"
        assert job.tail(2) in ("2\nthree", "2\nthree\n"), f"tail(2) returned {job.tail(2)!r}"

    def test_a_lost_process_is_reported_with_its_status(self, launcher: _Launched, tmp_path: Path) -> None:
        """Tested for an exit and for a signal; `wait` may be called again. No child process is left."""
        kill = "os.kill(os.getpid(), signal.SIGKILL)"
        lock = tmp_path / "lock"
        jobs = [
            self._job(tmp_path, "rollout-0", "raise SystemExit(7)"),
            self._job(tmp_path, "rollout-1", _WITH_CHILD.format(handler="signal.SIG_DFL", then=kill), lock),
        ]
        exited, killed = launcher.launch(*jobs)
        statuses = [launcher.call(exited.wait), launcher.call(exited.wait), launcher.call(killed.wait)]
        assert statuses == [7, 7, -9], (
            f"`wait` returned {statuses} for the statuses 7 and 7, and -9 for SIGKILL"
        )
        _until_free(lock, self.start_s, "a child of a lost process still runs")
        launcher.call(exited.stop, 1.0)
        launcher.call(exited.dump_stacks)

    def test_stop_asks_first_and_leaves_nothing_running(self, launcher: _Launched, tmp_path: Path) -> None:
        """`stop` also ends a child process that ignores SIGTERM."""
        handler = 'lambda *_: (print("asked", flush=True), os._exit(5))'
        lock = tmp_path / "lock"
        job = self._job(tmp_path, "rollout-0", _WITH_CHILD.format(handler=handler, then=""), lock)
        [handle] = launcher.launch(job)
        self._until_output(job, "ready")
        launcher.call(handle.stop, self.start_s)
        assert "asked" in job.tail(5), "`stop` killed the process without asking it to end"
        status = launcher.call(handle.wait)
        assert status == 5, f"after `stop`, `wait` returned {status}, not 5"
        _until_free(lock, self.start_s, "a child of the stopped process still runs")

    def test_stop_kills_what_does_not_end_in_time(self, launcher: _Launched, tmp_path: Path) -> None:
        """`stop` kills after the grace period, not before."""
        lock = tmp_path / "lock"
        job = self._job(tmp_path, "rollout-0", _WITH_CHILD.format(handler="signal.SIG_IGN", then=""), lock)
        [handle] = launcher.launch(job)
        self._until_output(job, "ready")
        start = time.monotonic()
        launcher.call(handle.stop, 0.3)
        took = time.monotonic() - start
        assert took >= 0.3, f"it was killed after {took:.2f} s of 0.3 s grace"
        _until_free(lock, self.start_s, "the process still runs after `stop`")

    def test_a_worker_started_again_takes_the_place_of_the_former_one(
        self, launcher: _Launched, tmp_path: Path
    ) -> None:
        """Both starts use the same launcher and worker id."""
        job = self._job(tmp_path, "rollout-0", "print('here')")
        for _ in range(2):
            [handle] = launcher.launch(job)
            assert launcher.call(handle.wait) == 0, job.tail(20)

    def test_a_job_that_cannot_start_stops_the_others(self, launcher: _Launched, tmp_path: Path) -> None:
        """`launch` then raises LaunchError."""
        lock = tmp_path / "lock"
        good = self._job(tmp_path, "rollout-0", _WITH_CHILD.format(handler="signal.SIG_DFL", then=""), lock)
        template = self._job(tmp_path, "rollout-1", "")
        bad = msgspec.structs.replace(template, command=(str(tmp_path / "no-such-program"),))
        try:
            launcher.launch(good, bad)
        except LaunchError:
            _until_free(lock, self.start_s, "a job started before still runs")
            return
        raise AssertionError("`launch` started a program that does not exist")

    def test_stacks_are_written_to_the_output(self, launcher: _Launched, tmp_path: Path) -> None:
        """`dump_stacks` sends SIGUSR1, at which a worker writes them."""
        code = (
            "import signal, time\n"
            "signal.signal(signal.SIGUSR1, lambda *_: print('stacks', flush=True))\n"
            "print('ready', flush=True)\n"
            "time.sleep(60)"
        )
        job = self._job(tmp_path, "rollout-0", code)
        [handle] = launcher.launch(job)
        self._until_output(job, "ready")
        launcher.call(handle.dump_stacks)
        self._until_output(job, "stacks")
        launcher.call(handle.stop, 0)

    def test_check_starts_nothing(self, launcher: _Launched, tmp_path: Path) -> None:
        """`check` only yields problems."""
        mark = tmp_path / "mark"
        job = self._job(tmp_path, "rollout-0", f"open({str(mark)!r}, 'w')")
        problems = list(launcher.check([job]))
        assert all(isinstance(problem, Problem) for problem in problems), f"`check` yields {problems}"
        errors = [problem.message for problem in problems if problem.severity == "error"]
        assert not errors, f"`check` refuses one process of few resources: {errors[0]}"
        assert not mark.exists(), "`check` started the job"

    def _job(
        self, folder: Path, worker: str, code: str, *arguments: Path, env: dict[str, str] | None = None
    ) -> Job:
        return Job(
            worker=worker,
            role="rollout",
            command=(sys.executable, "-c", code, *map(str, arguments), str(8 * self.start_s)),
            env=env or {},
            resources=self.resources,
            log=str(folder / f"{worker}.log"),
        )

    def _until_output(self, job: Job, words: str) -> None:
        deadline = time.monotonic() + self.start_s
        while words not in job.tail(20):
            assert time.monotonic() < deadline, f"its output never had {words!r}; it is {job.tail(20)!r}"
            time.sleep(0.01)


def _until_free(lock: Path, within_s: float, otherwise: str) -> None:
    deadline = time.monotonic() + within_s
    with lock.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                assert time.monotonic() < deadline, otherwise
                time.sleep(0.01)
            else:
                return
