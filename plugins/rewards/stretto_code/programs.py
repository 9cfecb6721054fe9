"""stretto's own program runner: programs run as forks of a warm Python in the bubblewrap sandbox.

Each of the `parallel` warm Pythons (`warm_python.py`) has a sandbox and runs one program at a time in its own
namespaces, with files in memory. A warm Python that ends or hangs is replaced.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from queue import SimpleQueue

from stretto.component import Problem, SandboxMode
from stretto.config import RunConfig
from stretto.errors import RewardError, printable
from stretto.program_runner import Ending, Execution, ProgramLimits
from stretto.user_code.sandbox import sandbox_command
from stretto.user_code.seccomp import ARCHITECTURES, seccomp_filter
from stretto_code.warm_python import ENDINGS, FAILED, READY, REPLY, REQUEST, SCRIPT

_START_S = 60.0  # a warm Python imports its modules, on a busy machine beside many others
_ATTEMPTS = 2
"""Number of times that a program is tried if its warm Python ends by itself."""
_GRACE_S = 5.0
"""Seconds beyond the time limit of a program after which its warm Python is replaced."""
_END_S = 10.0  # a sandbox that has not ended after this time is killed
_TRIAL = ProgramLimits(time_s=20, memory_mb=64, processes=1, output_kb=1, disk_mb=1)  # of `check`
_CHUNK = 65536  # bytes of one read
_MAX_ERRORS = 8192
"""Bytes of standard error that are kept."""
_FIRST_DESCRIPTOR = 10
"""Shells may use smaller descriptors."""
_ENVIRONMENT = {
    "PYTHONHASHSEED": "0",  # the order of a set is the same in every run
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


class SandboxRunner:
    """A `stretto.program_runner.ProgramRunner` with `parallel` warm sandboxes, all started at once. With
    `unsafe`, programs have this user's rights. Raises RewardError if a sandbox cannot start."""

    def __init__(self, sandbox: SandboxMode, parallel: int, imports: Sequence[str] = ()) -> None:
        self._sandbox: SandboxMode = sandbox
        self._imports = tuple(imports)
        # A sandbox ends with the thread that started it, so one thread starts them all.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="sandboxes")
        self._started: set[_WarmPython] = set()
        self._free: SimpleQueue[_WarmPython] = SimpleQueue()
        try:
            started = [self._start() for _ in range(parallel)]
            for warm in started:
                warm.wait_until_ready()
                self._free.put(warm)
        except BaseException:
            self.close()
            raise

    def run(self, source: str, stdin: bytes, limits: ProgramLimits) -> Execution:
        """Run a program in a free warm Python (see `ProgramRunner.run`)."""
        warm = self._free.get()
        try:
            for _ in range(_ATTEMPTS):
                try:
                    return warm.run(source, stdin, limits)
                except TimeoutError:
                    warm = self._replace(warm)
                    return Execution(ending="time")
                except _SandboxLost:
                    warm = self._replace(warm)
            raise RewardError(
                f"the sandbox of a program ended by itself, {_ATTEMPTS} times: usually memory "
                "ran out; lower `parallel` or `memory_mb`"
            )
        finally:
            self._free.put(warm)

    def close(self) -> None:
        """End all warm Pythons."""
        for warm in self._started:
            warm.end()
        self._starter.shutdown()

    def _start(self) -> _WarmPython:
        warm = self._starter.submit(_WarmPython, self._sandbox, self._imports).result()
        self._started.add(warm)
        return warm

    def _replace(self, warm: _WarmPython) -> _WarmPython:
        warm.end()
        self._started.discard(warm)
        new_warm = self._start()
        new_warm.wait_until_ready()
        return new_warm


def program_problems(run: RunConfig) -> Iterator[Problem]:
    """Yield problems of the sandbox, for the `check` of a component that uses `SandboxRunner`."""
    if run.sandbox == "unsafe":
        yield Problem(
            "sandbox",
            "unsafe: programs of the policy run with this user's rights, and see its files",
            "warning",
        )
        return
    try:
        with closing(SandboxRunner(run.sandbox, 1)) as runner:
            runner.run("", b"", _TRIAL)
    except RewardError as error:
        yield Problem(
            "sandbox",
            f"{error}. It needs Linux 5.5 and user namespaces (`sysctl user.max_user_namespaces`; in a "
            "container, permission to create them and network namespaces); if you trust the programs of the "
            "policy, write `sandbox: unsafe`",
            "environment",
        )


class _SandboxLost(Exception):
    """The sandbox of a warm Python ended by itself."""


class _WarmPython:
    def __init__(self, sandbox: SandboxMode, imports: Sequence[str]) -> None:
        if sys.platform != "linux" or platform.machine() not in ARCHITECTURES:
            raise RewardError(
                f"programs cannot run on {sys.platform}, {platform.machine()}; expected linux and one of "
                f"{', '.join(ARCHITECTURES)}"
            )
        self._control, theirs = socket.socketpair()
        with theirs:
            descriptor = fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, _FIRST_DESCRIPTOR)
        settings = {
            "control": descriptor,
            "imports": imports,
            "namespaces": sandbox != "unsafe",
            "filter": seccomp_filter(platform.machine(), supervised=True).hex(),
        }
        command = sandbox_command(
            [sys.executable, "-P", "-s", str(SCRIPT), json.dumps(settings)],
            sandbox=sandbox,
            readable=[SCRIPT],
            env=_ENVIRONMENT,
            nests=True,
        )
        try:
            self._process = subprocess.Popen(
                command.argv,
                env=command.env,
                cwd=command.folder,
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
        finally:
            os.close(descriptor)

    def wait_until_ready(self) -> None:
        self._control.settimeout(_START_S)
        silence = "it ended without a reason"
        try:
            is_ready = self._control.recv(len(READY)) == READY
        except TimeoutError:
            is_ready, silence = False, f"it was not ready within {_START_S:g} s, as on a busy machine"
        except OSError:
            is_ready = False
        if not is_ready:
            self._process.terminate()
            errors = self._process.communicate(timeout=_END_S)[1]
            self.end()
            last_line = errors.decode(errors="replace").strip().rpartition("\n")[2]
            raise RewardError(
                f"the sandbox of programs cannot start: {last_line or silence}; see `stretto doctor`"
            )

    def run(self, source: str, stdin: bytes, limits: ProgramLimits) -> Execution:
        """Run a program. Raise `_SandboxLost` if the sandbox ended by itself, TimeoutError if it hangs."""
        with ExitStack() as stack:
            output, errors = _Output(), _Output()
            stack.callback(output.close)
            stack.callback(errors.close)
            files = [_file(source.encode(errors="replace")), _file(stdin), output.writing, errors.writing]
            request = REQUEST.pack(limits.time_s, limits.memory_mb, limits.processes, limits.disk_mb)
            try:
                socket.send_fds(self._control, [request], files)
            except OSError as error:
                raise _SandboxLost from error
            finally:
                for descriptor in files:
                    os.close(descriptor)
            self._read(output, errors, limits)
            ending, status = self._reply()
            output.read()
            errors.read()
            if len(output.data) > limits.output_kb * 1024:
                ending, status = "output", 0
            data = bytes(output.data[: limits.output_kb * 1024])
            return Execution(
                ending=ending, status=status, output=data, errors=bytes(errors.data[:_MAX_ERRORS])
            )

    def _read(self, output: _Output, errors: _Output, limits: ProgramLimits) -> None:
        """Read the output until the reply has arrived. Close the pipes if there is too much output."""
        deadline = time.monotonic() + limits.time_s + _GRACE_S
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        for pipe in (output, errors):
            poll.register(pipe.reading, select.POLLIN)
        while True:
            events = dict(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
            if not events:
                raise TimeoutError
            if self._control.fileno() in events:
                return
            for pipe in (output, errors):
                if pipe.reading in events and not pipe.read():
                    poll.unregister(pipe.reading)
            if len(output.data) + len(errors.data) > limits.output_kb * 1024:
                for pipe in (output, errors):
                    with suppress(KeyError):
                        poll.unregister(pipe.reading)
                    pipe.close()

    def _reply(self) -> tuple[Ending, int]:
        try:
            head = self._control.recv(REPLY.size, socket.MSG_WAITALL)
        except OSError as error:
            raise _SandboxLost from error
        if len(head) < REPLY.size:
            raise _SandboxLost
        index, status, length = REPLY.unpack(head)
        ending = ENDINGS[index]
        if ending == FAILED:
            text = self._control.recv(length, socket.MSG_WAITALL).decode(errors="replace")
            raise RewardError(
                f"a program cannot start in the sandbox: {printable(text)}; see `stretto doctor`"
            )
        return ending, status

    def end(self) -> None:
        self._control.close()
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stderr is not None
        self._process.stderr.close()


class _Output:
    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()
        os.set_blocking(self.reading, False)
        self.data = bytearray()
        self._open = True

    def read(self) -> bool:
        """Read the bytes that have arrived. Return False at the end of the pipe."""
        while self._open:
            try:
                chunk = os.read(self.reading, _CHUNK)
            except BlockingIOError:
                return True
            self.data += chunk
            if len(chunk) < _CHUNK:
                return bool(chunk)
        return False

    def close(self) -> None:
        if self._open:
            os.close(self.reading)
            self._open = False


def _file(data: bytes) -> int:
    """Return the descriptor of a file in memory with this content, which nobody can change."""
    descriptor = os.memfd_create("program", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor
