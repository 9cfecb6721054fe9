"""The sandbox, by what real processes in it can and cannot do."""

import gc
import json
import os
import platform
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from patience import patience
from processes import sleepers
from stretto.component import SandboxMode
from stretto.user_code import seccomp
from stretto.user_code.forwarded_port import ForwardedPort
from stretto.user_code.sandbox import kill, sandbox_command, sandbox_problem, systemd_works
from stretto.user_code.seccomp import seccomp_filter
from waiting import until

# What is in argv[1] is tried and told: Python expressions, by name.
LOOK = """
import json, os, socket, sys
from pathlib import Path

def tried(what):
    try:
        return eval(what)
    except OSError as error:
        return type(error).__name__

def call(number, *arguments):
    "The error of a system call."
    import ctypes, errno
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.syscall(number, *arguments) and errno.errorcode[ctypes.get_errno()]

print(json.dumps({name: tried(what) for name, what in json.loads(sys.argv[1]).items()}))
"""


def look(questions: dict[str, str], sandbox: SandboxMode = "bubblewrap", **options: Any) -> dict[str, Any]:
    made = sandbox_command([sys.executable, "-c", LOOK, json.dumps(questions)], sandbox=sandbox, **options)
    done = subprocess.run(
        made.argv, env=made.env, cwd=made.folder, capture_output=True, check=True, timeout=patience()
    )
    return json.loads(done.stdout)


def test_it_starts_here() -> None:
    assert sandbox_problem() == ""


def test_credentials_and_what_is_hidden_are_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "of the run")
    project, run = tmp_path / "project", tmp_path / "project" / "out"
    for folder in (run / "bus", run / "agent"):
        folder.mkdir(parents=True)
    (project / "tools.py").write_text("here")
    (run / "bus" / "rollout.json").write_text("password")
    (run / "agent" / "notes").write_text("shown after all")
    (tmp_path / "other").write_text("x")
    expected = {
        f"Path({str(project / 'tools.py')!r}).read_text()": "here",
        f"Path({str(run / 'bus' / 'rollout.json')!r}).read_text()": "FileNotFoundError",
        f"os.listdir({str(run)!r})": ["agent"],
        f"Path({str(run / 'agent' / 'notes')!r}).read_text()": "shown after all",
        f"Path({str(tmp_path / 'other')!r}).exists()": False,
        f"Path({str(project / 'tools.py')!r}).write_text('gone')": "OSError",  # a read-only file system
        "Path('/usr/x').write_text('x')": "OSError",
        "Path('/x').write_text('x')": "OSError",
        f"set(os.listdir({str(Path.home())!r})).isdisjoint(['.ssh', '.bashrc', '.cache'])": True,
        f"Path('/tmp/{tmp_path.name}').write_text('x')": 1,
        "os.getcwd()": "/tmp",
        "len([name for name in os.listdir('/proc') if name.isdigit()]) < 5": True,
        "__import__('stretto').__name__": "stretto",
    }
    inside_run, environment = f"Path({str(run / 'x')!r}).write_text('x')", "dict(os.environ)"
    seen = look(
        {question: question for question in (*expected, inside_run, environment)},
        readable=[project, run / "agent", Path.home(), Path("/tmp")],
        hidden=[run, tmp_path / "none"],
        env={"KEY": "k"},
    )
    assert {question: seen[question] for question in expected} == expected
    assert not (run / "x").exists()
    assert not Path("/tmp", tmp_path.name).exists()
    names = {"PATH", "HOME", "LANG", "KEY"}
    assert names <= seen[environment].keys() <= names | {"PWD", "SHLVL", "OLDPWD", "_", "LC_CTYPE"}


def test_settings_of_the_kernel_cannot_be_written() -> None:
    settings = ("/proc/sys/kernel/core_pattern", "/proc/sys/vm/swappiness", "/proc/self/oom_score_adj")
    seen = look({path: f"open({path!r}, 'w').close()" for path in settings})
    assert set(seen.values()) <= {"OSError", "PermissionError"}


def test_the_network_is_there_only_if_asked_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        question = {"reached": f"socket.create_connection({server.getsockname()!r}, 5).close()"}
        assert look(question) == {"reached": "ConnectionRefusedError"}  # of a loopback of its own
        assert look(question, network=True) == {"reached": None}


# What argv[1] asks is tried, once the forwarded port has answered.
CALL_HOME = f"""
import socket
with socket.create_connection(("127.0.0.1", 2000), 20) as home:
    assert home.recv(5) == b"hello"
{LOOK}
"""


async def test_a_forwarded_port_leads_to_this_process_and_nothing_else_does() -> None:
    name = f"\0stretto-{os.getpid()}"
    gc.collect()  # descriptors of earlier tests must not end meanwhile
    files = psutil.Process().num_fds()
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        socket.socket(socket.AF_UNIX) as abstract,
        ForwardedPort(2000) as port,
    ):
        abstract.bind(name)
        abstract.listen()
        questions = {
            "other": f"socket.create_connection({other.getsockname()!r}, 5).close()",
            "abstract": f"socket.socket(socket.AF_UNIX).connect({name!r})",
            "outside": "socket.create_connection(('192.0.2.1', 80), 5).close()",
            "routes": "Path('/proc/net/route').read_text().splitlines()[1:]",
            "interfaces": "[name for _, name in socket.if_nameindex()]",
            "machine": "socket.socket(40, socket.SOCK_STREAM).close()",
            "files": "[name for name in os.listdir('/proc/self/fd') if os.path.exists('/dev/fd/' + name)]",
        }
        argv = [sys.executable, "-c", CALL_HOME, json.dumps(questions)]
        command = sandbox_command(argv, sandbox="bubblewrap", forwarded_port=port)
        with anyio.fail_after(patience()):
            process = await command.start()
            with await port.listener() as listener:
                listener.setblocking(True)
                client, _ = await anyio.to_thread.run_sync(listener.accept)
                client.sendall(b"hello")
                client.close()
            assert process.stdout is not None
            seen = json.loads(b"".join([part async for part in process.stdout]))
            await process.aclose()
    assert seen == {
        "other": "ConnectionRefusedError",
        "abstract": "ConnectionRefusedError",
        "outside": "OSError",  # no route
        "routes": [],
        "interfaces": ["lo"],
        "machine": "PermissionError",
        "files": ["0", "1", "2"],  # neither the channel nor the listening socket
    }
    assert psutil.Process().num_fds() == files


def test_unsafe_scrubs_the_environment_all_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SECRET", "of the run")
    questions = {"env": "dict(os.environ)", "cwd": "os.getcwd()"}
    seen = look(questions, "unsafe", env={"KEY": "k"}, folder=tmp_path)
    assert "SECRET" not in seen["env"]
    assert seen["env"]["KEY"] == "k"
    assert seen["cwd"] == str(tmp_path)


def test_memory_is_bounded() -> None:
    with pytest.raises(subprocess.CalledProcessError) as failed:
        look({"much": "len(bytearray(2**30))"}, memory_mb=512)
    assert b"MemoryError" in failed.value.stderr


def test_system_calls_that_lead_out_are_refused_and_ordinary_programs_run() -> None:
    assert seccomp_filter("riscv64") == b""
    column = list(seccomp.ARCHITECTURES).index(platform.machine())
    new_user = 0x10000000
    # Without the filter the kernel accepts these calls, or finds fault with their arguments.
    refused = ("ptrace", "keyctl", "add_key", "io_uring_setup", "name_to_handle_at", "process_vm_readv")
    seen = look(
        {
            **{name: f"call({seccomp.REFUSED[name][column]}, 0, 0, 0, 0, 0)" for name in refused},
            "unshare": f"call({seccomp.REFUSED_BY_FLAGS['unshare'][column]}, {new_user})",
            "clone": f"call({seccomp.REFUSED_BY_FLAGS['clone'][column]}, {new_user}, 0, 0, 0, 0)",
            "clone3": "call(435, 0, 0)",
            "unshare files": f"call({seccomp.REFUSED_BY_FLAGS['unshare'][column]}, 0x400)",
            "git": "__import__('subprocess').check_output(['git', '--version']).decode()[:3]",
            "pool": "__import__('multiprocessing').get_context('fork').Pool(2).map(abs, [-1, 2])",
            "threads": "__import__('multiprocessing.pool').pool.ThreadPool(2).map(abs, [-1, 2])",
        }
    )
    works = {"unshare files": 0, "git": "git", "pool": [1, 2], "threads": [1, 2]}
    assert seen == {**dict.fromkeys((*refused, "unshare", "clone"), "EPERM"), "clone3": "ENOSYS", **works}


def test_devices_and_shared_memory_take_little_memory() -> None:
    questions = {name: f"Path('/dev/{name}').write_text('x')" for name in ("x", "null", "shm/x")}
    size = "(lambda s: s.f_blocks * s.f_frsize)(os.statvfs('/dev/shm'))"
    assert look({**questions, "size": size}) == {"x": "OSError", "null": 1, "shm/x": 1, "size": 64 * 2**20}


@pytest.fixture
def fresh_trial() -> Iterator[None]:
    """The trial of systemd is repeated, and its result is forgotten afterwards."""
    systemd_works.cache_clear()
    yield
    systemd_works.cache_clear()


LIMIT = "__import__('resource').getrlimit(__import__('resource').RLIMIT_NPROC)"


@pytest.mark.usefixtures("fresh_trial")
def test_without_systemd_processes_are_limited_for_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert look({"limit": LIMIT}) == {"limit": [1024, 1024]}


@pytest.mark.usefixtures("fresh_trial")
def test_systemd_limits_a_whole_sandbox_if_it_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # In place of systemd, which test machines rarely run: it notes its arguments and runs the command.
    (tmp_path / "systemd-run").write_text(
        '#!/bin/sh\nline="$XDG_RUNTIME_DIR"\nwhile [ "$1" != -- ]; do line="$line $1"; shift; done\n'
        f'shift\necho "$line" >> {tmp_path}/called\nexec "$@"\n'
    )
    (tmp_path / "systemd-run").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/of-tests")
    assert "XDG_RUNTIME_DIR" not in look({"env": "dict(os.environ)"})["env"]
    look({}, memory_mb=4096)
    _, default, limited = (tmp_path / "called").read_text().splitlines()  # the first is the trial
    for line in (default, limited):
        assert line.startswith("/run/user/of-tests --user --scope")
        assert "--property=TasksMax=1024" in line
    assert "--property=MemoryMax=50%" in default
    assert "--property=MemoryMax=4096M" in limited


BOTH = pytest.mark.parametrize("sandbox", ["bubblewrap", "unsafe"])


@BOTH
async def test_kill_ends_all_that_was_started(sandbox: SandboxMode) -> None:
    mark = f"1000.{os.getpid()}1"
    process = await sandbox_command(["sh", "-c", f"sleep {mark} & sleep {mark}"], sandbox=sandbox).start()
    until(lambda: len(sleepers(mark)) == 2)
    kill(process)
    with anyio.fail_after(patience()):
        await process.wait()
    until(lambda: not sleepers(mark))
    await process.aclose()


PARENT = """
import sys, anyio
from stretto.user_code.sandbox import sandbox_command

async def main():
    await sandbox_command(["sh", "-c", "sleep {mark}; true"], sandbox="{sandbox}").start()
    await anyio.sleep(1000)

anyio.run(main)
"""


@BOTH
def test_it_ends_with_whoever_started_it(sandbox: SandboxMode) -> None:
    mark = f"1000.{os.getpid()}2"
    parent = subprocess.Popen([sys.executable, "-c", PARENT.format(mark=mark, sandbox=sandbox)])
    try:
        until(lambda: sleepers(mark))
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    until(lambda: not sleepers(mark))


def test_a_machine_without_it_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create a new namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert sandbox_problem() == "bubblewrap cannot start: bwrap: No permissions to create a new namespace"
