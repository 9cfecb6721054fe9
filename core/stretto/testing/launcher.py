"""The contract of launchers as tests."""

from __future__ import annotations

import fcntl
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import ClassVar

import anyio
import msgspec

from stretto.component import Kind, Problem
from stretto.errors import LaunchError
from stretto.launcher import Handle, Job, Launcher, Resources
from stretto.testing.component import ComponentConformance, ComponentUnderTest

__all__ = ["LauncherConformance"]

# Both processes hold a lock on the file, until the system ends them, or for the given number of seconds.
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


class LauncherConformance(ComponentConformance):
    """The contract of `stretto.launcher.Launcher`, tested with real processes: their output and exit status,
    an end on request and one by accident, and nothing left of them afterwards."""

    kind: ClassVar[Kind] = "launcher"
    resources: ClassVar[Resources] = Resources()
    """Resources of each process."""
    start_s: ClassVar[float] = 60.0
    """Maximum duration of a start, and of an end, in seconds."""

    def test_a_process_has_its_environment_and_its_output_can_be_read(
        self, under_test: ComponentUnderTest, tmp_path: Path
    ) -> None:
        """The log has stdout and stderr; `Job.tail` returns the last lines of it."""
        code = "import os, sys; print(1, 2, sep='\\n'); print(os.environ['OF_THE_JOB'], file=sys.stderr)"
        job = self._job(tmp_path, "rollout-0", code, env={"OF_THE_JOB": "three"})

        async def body(launcher: Launcher) -> None:
            [handle] = await launcher.launch([job])
            assert handle.place, "`place` is empty; users look there for the process"
            status = await handle.wait()
            assert status == 0, f"exit status {status}: {job.tail(20)}"
            assert job.tail(2) in ("2\nthree", "2\nthree\n"), f"tail(2) returned {job.tail(2)!r}"

        self._run(under_test, body)

    def test_a_lost_process_is_reported_with_its_status(
        self, under_test: ComponentUnderTest, tmp_path: Path
    ) -> None:
        """For an end by itself and by a signal, however often `wait` is called. Nothing is left."""
        kill = "os.kill(os.getpid(), signal.SIGKILL)"
        lock = tmp_path / "lock"
        jobs = [
            self._job(tmp_path, "rollout-0", "raise SystemExit(7)"),
            self._job(tmp_path, "rollout-1", _WITH_CHILD.format(handler="signal.SIG_DFL", then=kill), lock),
        ]

        async def body(launcher: Launcher) -> None:
            own, killed = await launcher.launch(jobs)
            statuses = [await own.wait(), await own.wait(), await killed.wait()]
            assert statuses == [7, 7, -9], (
                f"`wait` returned {statuses} for the statuses 7 and 7, and -9 for SIGKILL"
            )
            await _until_free(lock, self.start_s, "a child of a lost process still runs")
            await own.stop(1.0)
            await own.dump_stacks()

        self._run(under_test, body)

    def test_stop_asks_first_and_leaves_nothing_running(
        self, under_test: ComponentUnderTest, tmp_path: Path
    ) -> None:
        """Also a child that does not listen."""
        handler = 'lambda *_: (print("asked", flush=True), os._exit(5))'
        lock = tmp_path / "lock"
        job = self._job(tmp_path, "rollout-0", _WITH_CHILD.format(handler=handler, then=""), lock)

        async def body(launcher: Launcher) -> None:
            [handle] = await launcher.launch([job])
            await self._until_output(job, "ready")
            await handle.stop(self.start_s)
            assert "asked" in job.tail(5), "`stop` killed the process without asking it to end"
            assert await handle.wait() == 5, f"after `stop`, `wait` returned {await handle.wait()}, not 5"
            await _until_free(lock, self.start_s, "a child of the stopped process still runs")

        self._run(under_test, body)

    def test_stop_kills_what_does_not_end_in_time(
        self, under_test: ComponentUnderTest, tmp_path: Path
    ) -> None:
        """After the grace, not before."""
        lock = tmp_path / "lock"
        job = self._job(tmp_path, "rollout-0", _WITH_CHILD.format(handler="signal.SIG_IGN", then=""), lock)

        async def body(launcher: Launcher) -> None:
            [handle] = await launcher.launch([job])
            await self._until_output(job, "ready")
            start = time.monotonic()
            await handle.stop(0.3)
            took = time.monotonic() - start
            assert took >= 0.3, f"it was killed after {took:.2f} s of 0.3 s grace"
            await _until_free(lock, self.start_s, "the process still runs after `stop`")

        self._run(under_test, body)

    def test_a_worker_started_again_takes_the_place_of_the_former_one(
        self, under_test: ComponentUnderTest, tmp_path: Path
    ) -> None:
        """With the same launcher, and the same id."""
        job = self._job(tmp_path, "rollout-0", "print('here')")

        async def body(launcher: Launcher) -> None:
            for _ in range(2):
                [handle] = await launcher.launch([job])
                assert await handle.wait() == 0, job.tail(20)

        self._run(under_test, body)

    def test_a_job_that_cannot_start_stops_the_others(
        self, under_test: ComponentUnderTest, tmp_path: Path
    ) -> None:
        """And `launch` raises LaunchError."""
        lock = tmp_path / "lock"
        good = self._job(tmp_path, "rollout-0", _WITH_CHILD.format(handler="signal.SIG_DFL", then=""), lock)
        other = self._job(tmp_path, "rollout-1", "")
        bad = msgspec.structs.replace(other, command=(str(tmp_path / "no-such-program"),))

        async def body(launcher: Launcher) -> None:
            try:
                await launcher.launch([good, bad])
            except LaunchError:
                await _until_free(lock, self.start_s, "a job started before still runs")
                return
            raise AssertionError("`launch` started a program that does not exist")

        self._run(under_test, body)

    def test_stacks_are_written_to_the_output(self, under_test: ComponentUnderTest, tmp_path: Path) -> None:
        """`dump_stacks` sends SIGUSR1, at which a worker writes them."""
        code = (
            "import signal, time\n"
            "signal.signal(signal.SIGUSR1, lambda *_: print('stacks', flush=True))\n"
            "print('ready', flush=True)\n"
            "time.sleep(60)"
        )
        job = self._job(tmp_path, "rollout-0", code)

        async def body(launcher: Launcher) -> None:
            [handle] = await launcher.launch([job])
            await self._until_output(job, "ready")
            await handle.dump_stacks()
            await self._until_output(job, "stacks")
            await handle.stop(0)

        self._run(under_test, body)

    def test_check_starts_nothing(self, under_test: ComponentUnderTest, tmp_path: Path) -> None:
        """It yields problems."""
        mark = tmp_path / "mark"
        job = self._job(tmp_path, "rollout-0", f"open({str(mark)!r}, 'w')")

        async def body(launcher: Launcher) -> None:
            found = list(launcher.check([job]))
            assert all(isinstance(each, Problem) for each in found), f"`check` yields {found}"
            errors = [each.message for each in found if each.severity == "error"]
            assert not errors, f"`check` refuses one process of few resources: {errors[0]}"

        self._run(under_test, body)
        assert not mark.exists(), "`check` started the job"

    # ------------------------------------------------------------------------------------ private

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

    def _run(self, under_test: ComponentUnderTest, body: Callable[[Launcher], Awaitable[None]]) -> None:
        """Call `body` with a launcher whose processes are all stopped afterwards."""

        async def whole() -> None:
            launcher = _Stopping(under_test.make())
            try:
                with anyio.fail_after(4 * self.start_s):
                    await body(launcher)
            finally:
                with anyio.CancelScope(shield=True):
                    for handle in launcher.handles:
                        await handle.stop(0)

        anyio.run(whole)

    async def _until_output(self, job: Job, words: str) -> None:
        deadline = time.monotonic() + self.start_s
        while words not in job.tail(20):
            assert time.monotonic() < deadline, f"its output never had {words!r}; it is {job.tail(20)!r}"
            await anyio.sleep(0.01)


class _Stopping:
    """A launcher that keeps the handles of what it started."""

    def __init__(self, launcher: Launcher) -> None:
        self.check = launcher.check
        self.handles: list[Handle] = []
        self._launcher = launcher

    async def launch(self, jobs: Sequence[Job]) -> Sequence[Handle]:
        """Launch, and keep the handles."""
        handles = await self._launcher.launch(jobs)
        self.handles += handles
        return handles


async def _until_free(lock: Path, within_s: float, otherwise: str) -> None:
    """Wait until no process holds a lock on a file."""
    deadline = time.monotonic() + within_s
    with lock.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                assert time.monotonic() < deadline, otherwise
                await anyio.sleep(0.01)
            else:
                return
