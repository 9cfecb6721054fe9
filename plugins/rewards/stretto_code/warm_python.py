"""The process inside the sandbox that runs programs: a Python that is already warm, and forks.

`warm_python.py SETTINGS` gets one request at a time from its control socket: limits, and four files (the
program, its input, and the two pipes for its output). For each it forks a supervisor, which forks the
program, watches it against the limits, and answers how it ended. Only the last fork reads program and input,
so no program finds anything of an earlier one. This file imports only the standard library.

With namespaces, each program is the first process of its own process namespace, with its own `/tmp`,
`/dev/shm`, `/proc` and System V memory; when it ends the kernel ends all processes that it started. Before it
runs, the fork gives up all rights. Without namespaces (`sandbox: unsafe`), it has this user's rights.

A seccomp filter makes each new process and thread wait until the supervisor has counted all: the limit holds
also where the system's does not, as for root, and no program outruns the supervisor.
"""

import atexit
import ctypes
import fcntl
import functools
import gc
import importlib
import json
import os
import platform
import re
import resource
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

SCRIPT = Path(__file__)
"""The sandbox must show this file."""
REQUEST = struct.Struct("<dIII")
"""A request: seconds, MiB of memory, processes, MiB of files. With it: program, input, output, errors."""
REPLY = struct.Struct("<BiI")
"""A reply: index in `ENDINGS`, exit status or signal, length of a text that says why a start failed."""
FAILED = "failed"
"""The program did not start; the text says why."""
ENDINGS = ("exit", "signal", "time", "memory", "processes", "output", FAILED)
READY = b"+"

_POLL_MS = 10
"""Milliseconds between two counts of a program's processes and memory."""
_MAX_FILES = 128  # open at once in a process
_MAX_INODES = 4096  # files in the folder of a program
_OTHERS = 8
"""Processes of the sandbox besides those of a program, for the system's limit of processes."""
_MOST_KILLED = 1000
"""Maximum number of processes to kill before the ended ones are collected."""
_MIB = 2**20

_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWPID = 0x00020000, 0x08000000, 0x20000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 36, 38
_CAPABILITY_VERSION = 0x20080522

# The kernel's "user notification" of seccomp: a listener that must allow each call which the filter names.
_SYS_SECCOMP = {"x86_64": 317, "aarch64": 277}
_SECCOMP_SET_MODE_FILTER, _SECCOMP_FILTER_FLAG_NEW_LISTENER = 1, 8
_QUESTION, _DECISION = struct.Struct("=QIIiIQ6Q"), struct.Struct("=QqiI")
_ASKED, _ANSWER, _GO_ON = 0xC0502100, 0xC0182101, 1
_LONGEST_FAULT = 4096

_libc = ctypes.CDLL(None, use_errno=True)


class _Limits(NamedTuple):
    time_s: float
    memory_mb: int
    processes: int
    disk_mb: int


class _ProgramFiles(NamedTuple):
    program: int
    stdin: int
    output: int
    errors: int


def _serve(settings: dict[str, Any]) -> str:
    """Serve requests until the control socket ends, and exit. In a program's fork, return the program."""
    control = socket.socket(fileno=settings["control"])
    for name in settings["imports"]:
        importlib.import_module(name)
    if settings["namespaces"]:
        _shown_below_tmp()  # read once, before the forks
    gc.collect()
    gc.freeze()  # without this, garbage collection in forks would copy every shared page
    control.sendall(READY)
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, REQUEST.size, len(_ProgramFiles._fields))
        if len(data) < REQUEST.size:
            sys.exit()
        supervisor = os.fork()
        if not supervisor:
            limits, files = _Limits(*REQUEST.unpack(data)), _ProgramFiles(*descriptors)
            return _supervise(settings["namespaces"], settings["filter"], limits, files, control)
        for number in descriptors:
            os.close(number)
        if os.waitpid(supervisor, 0)[1]:
            sys.exit("the supervisor of a program failed")


# ----------------------------------------------------------------------------------- the supervisor


def _supervise(
    namespaces: bool, seccomp: str, limits: _Limits, files: _ProgramFiles, control: socket.socket
) -> str:
    """Start a program, follow it, report its ending, and exit. In the program's fork, return the program."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    scratch = "/tmp" if namespaces else tempfile.mkdtemp()  # noqa: S108 - in a namespace of its own
    ours, theirs = socket.socketpair()
    if namespaces:
        _check(_libc.unshare(_CLONE_NEWPID), "unshare")
    child = os.fork()
    if not child:
        return _prepare(namespaces, seccomp, limits, files, scratch, theirs)
    theirs.close()
    for number in (files.program, files.stdin, files.errors):
        os.close(number)
    fault, listeners, _, _ = socket.recv_fds(ours, _LONGEST_FAULT, 1)
    if listeners:
        fault = b""
        ending, status = _follow(child, limits, files.output, listeners[0], control)
    else:
        ending, status = FAILED, 0
    _end_all(child)
    if not namespaces:
        shutil.rmtree(scratch, ignore_errors=True)
    control.sendall(REPLY.pack(ENDINGS.index(ending), status, len(fault)) + fault)
    os._exit(0)


def _follow(
    child: int, limits: _Limits, output: int, listener: int, control: socket.socket
) -> tuple[str, int]:
    """Follow a program until it ends; return (ending, status). `listener` asks before each new process."""
    deadline = time.monotonic() + limits.time_s
    process = os.pidfd_open(child)
    poll = select.poll()
    poll.register(process, select.POLLIN)
    poll.register(output, 0)  # reports when the reader has closed the pipe, after too much output
    poll.register(control, 0)
    poll.register(listener, select.POLLIN)
    try:
        while True:
            events = dict(poll.poll(_POLL_MS))
            if process in events:
                _, status = os.waitpid(child, 0)
                code = os.waitstatus_to_exitcode(status)
                return ("signal", -code) if code < 0 else ("exit", code)
            if control.fileno() in events:
                os._exit(1)  # the program ends with this process
            if output in events:
                return "output", 0
            if time.monotonic() > deadline:
                return "time", 0
            processes, memory = _usage(limits.processes)
            asks = bool(events.get(listener, 0) & select.POLLIN)
            if processes + asks > limits.processes:
                return "processes", 0
            if memory > limits.memory_mb * _MIB:
                return "memory", 0
            if asks:
                _allow_one(listener)
    finally:
        os.close(process)


def _allow_one(listener: int) -> None:
    """Let the program start the process or thread that it waits for."""
    question = bytearray(_QUESTION.size)
    with suppress(FileNotFoundError):  # the process that asked has been killed
        fcntl.ioctl(listener, _ASKED, question)
        number, *_ = _QUESTION.unpack(question)
        fcntl.ioctl(listener, _ANSWER, _DECISION.pack(number, 0, 0, _GO_ON))


def _usage(most: int) -> tuple[int, int]:
    """Return the program's number of processes and threads, and their memory in bytes beyond that of this
    process, which they share; 0 for one process, which the system limits. Read only `most` processes and one
    more: a tree may grow as fast as it is read."""
    processes = list(islice(_descendants(os.getpid()), most + 1))
    shared = _resident(os.getpid())
    threads = memory = 0
    for pid in processes:
        with suppress(OSError):
            threads += len(list(Path(f"/proc/{pid}/task").iterdir()))
            memory += max(0, _resident(pid) - shared)
    return threads, memory if len(processes) > 1 else 0


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def _descendants(pid: int) -> Iterator[int]:
    with suppress(OSError):  # the process has just ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield int(child)
                yield from _descendants(int(child))


def _end_all(child: int) -> None:
    """Kill the fork and all that is left of its processes, and collect them."""
    has_children = True
    while has_children:
        for pid in {child, *islice(_descendants(os.getpid()), _MOST_KILLED)}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            has_children = False


# ------------------------------------------------------------------------ in the fork of a program


def _prepare(
    namespaces: bool, seccomp: str, limits: _Limits, files: _ProgramFiles, scratch: str, report: socket.socket
) -> str:
    """Prepare the fork for the program, and return the program. `report` gets the listener, or the error."""
    try:
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if namespaces:
            _own_folders(limits)
        with os.fdopen(files.program, "rb") as file:
            source = file.read().decode()
        for number, descriptor in enumerate(files[1:]):
            os.dup2(descriptor, number)
        report = socket.socket(fileno=os.dup2(report.detach(), 3, inheritable=False))
        os.closerange(4, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        os.chdir(scratch)
        _limit(limits, namespaces)
        if namespaces:
            _drop_capabilities()
        listener = _take_filter(bytes.fromhex(seccomp))
        socket.send_fds(report, [b"+"], [listener])
        os.close(listener)
    except BaseException as error:  # noqa: BLE001 - nothing may continue to the program
        report.sendall(f"{type(error).__name__}: {error}".encode()[:_LONGEST_FAULT])
        os._exit(1)
    report.close()
    return source


def _own_folders(limits: _Limits) -> None:
    """Give the fork its own scratch folder, `/proc` and System V memory."""
    _check(_libc.unshare(_CLONE_NEWNS | _CLONE_NEWIPC), "unshare")
    _mount("none", "/", "", _MS_REC | _MS_PRIVATE)
    shown = {folder: os.open(folder, os.O_PATH) for folder in _shown_below_tmp()}
    size = f"size={limits.disk_mb}m,nr_inodes={_MAX_INODES},mode=700"
    _mount("tmpfs", "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, size)  # noqa: S108
    for folder, number in shown.items():
        Path(folder).mkdir(parents=True, exist_ok=True)
        _mount(f"/proc/self/fd/{number}", folder, "", _MS_BIND | _MS_REC)
        os.close(number)
    _mount("/tmp", "/dev/shm", "", _MS_BIND)  # noqa: S108 - one size for both
    _mount("proc", "/proc", "proc", _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)


@functools.cache
def _shown_below_tmp() -> list[str]:
    """Return folders of Python below the sandbox's `/tmp`, which the program's own `/tmp` would hide."""
    places: list[str] = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        place = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), line.split()[4])
        is_inside = any(place.startswith(f"{folder}/") for folder in places)
        if place.startswith("/tmp/") and Path(place).is_dir() and not is_inside:  # noqa: S108
            places.append(place)
    return places


def _limit(limits: _Limits, namespaces: bool) -> None:
    """Set the system's limits, which all processes of the program inherit."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    values = {
        resource.RLIMIT_AS: pages * resource.getpagesize() + limits.memory_mb * _MIB,
        resource.RLIMIT_FSIZE: limits.disk_mb * _MIB,
        resource.RLIMIT_NOFILE: _MAX_FILES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    if namespaces:  # elsewhere it would count all processes of the user
        values[resource.RLIMIT_NPROC] = limits.processes + _OTHERS
    for name, value in values.items():
        hard = resource.getrlimit(name)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (value, value))


def _drop_capabilities() -> None:
    header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
    _check(_libc.capset(header, bytes(24)), "capset")


def _take_filter(program: bytes) -> int:
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    text = ctypes.create_string_buffer(program, len(program))
    rules = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(text))
    call = _SYS_SECCOMP[platform.machine()]
    listener = _libc.syscall(call, _SECCOMP_SET_MODE_FILTER, _SECCOMP_FILTER_FLAG_NEW_LISTENER, rules)
    _check(listener < 0, "seccomp")
    return listener


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    result = _libc.mount(
        source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()
    )
    _check(result, f"mount {target}")


def _prctl(option: int, value: int) -> None:
    _check(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), "prctl")


def _check(result: int, call: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


def _run(source: str) -> NoReturn:
    """Run a program as Python runs a file, and end the process as Python would. Shutting the interpreter down
    would take longer than most programs: it touches every page that the fork shares."""
    module = sys.modules["__main__"] = ModuleType("__main__")
    sys.argv = ["program.py"]
    status = 0
    try:
        exec(compile(source, "program.py", "exec"), module.__dict__)  # noqa: S102
    except BaseException as error:  # noqa: BLE001 - the program may raise anything
        status = _report(error)
    threading._shutdown()  # type: ignore  # waits for the program's threads
    atexit._run_exitfuncs()  # type: ignore
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            status = status or 120  # as Python does
    os._exit(status)


def _report(error: BaseException) -> int:
    """Print an error that ended the program, and return the exit status."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    trace = error.__traceback__
    error = error.with_traceback(trace and trace.tb_next)  # without the frame above
    sys.excepthook(type(error), error, error.__traceback__)
    return 1


if __name__ == "__main__":
    _run(_serve(json.loads(sys.argv[1])))
