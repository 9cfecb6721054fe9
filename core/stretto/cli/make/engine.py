"""`stretto engine install`: make the environment of a server with the versions that were tested."""

import fcntl
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.text import Text

from stretto.assembly.plugins import Plugins
from stretto.errors import ConfigError, EngineError
from stretto.machine.gpus import nvidia_driver
from stretto.serving.config import ServerEngineConfig
from stretto.serving.environment import ServerEnvironment, environment_of, is_private

_PYTHON = (3, 11)  # for which the lists for CPUs are pinned
_CPU_BUILDS = "https://download.pytorch.org/whl/cpu"  # PyPI's torch for Linux is a build for CUDA
_COMPLETE = Path(__file__).with_name("complete_cpu_server.py")
_HINTS = {
    "No space left on device": "the disk is full; make room, or set XDG_CACHE_HOME to a folder elsewhere",
    "connection broken by": "a package index does not answer; is there a network? PIP_INDEX_URL sets another",
    "ensurepip is not": "this Python has no module venv (on Debian: apt install python3-venv)",
}
"""Text of an error, or in what a program printed -> what is wrong, and what to do."""


def install(engine: str, *, cpu: bool, cuda: float | None = None) -> Path:
    """Install the server of an inference engine if it is not, and return its interpreter. A failed or
    interrupted installation leaves only its log. Raise EngineError with the reason of a failure."""
    environment = environment_for(engine, cpu=cpu, cuda=cuda)
    folder = environment.folder
    log_file = folder.with_name(f"{folder.name}.log")
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not is_private(folder.parent):
            raise EngineError(f"other users can write to {folder.parent}, or own it: move it away")
        with log_file.open("a") as log:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if environment.is_ready():
                return environment.python
            log.truncate(0)
            shutil.rmtree(folder, ignore_errors=True)
            try:
                _install_all(commands_of(environment, cpu=cpu), folder.name, log)
                shutil.copyfile(environment.requirements, environment.mark)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
    except BlockingIOError:
        raise EngineError(f"another process installs into {folder}; wait for it") from None
    except (OSError, subprocess.CalledProcessError) as error:
        text = str(error) if isinstance(error, OSError) else error.output
        raise EngineError(f"{folder.name} is not installed: {_reason(text)}; log: {log_file}") from error
    return environment.python


def environment_for(engine: str, *, cpu: bool, cuda: float | None) -> ServerEnvironment:
    """Return the environment of an engine's server; `cuda`: by default that of this machine's driver."""
    config = Plugins().get("inference", engine).config
    if not issubclass(config, ServerEngineConfig) or config.requirements is None:
        raise ConfigError(f"the inference engine {engine!r} needs no environment of its own", value=engine)
    driver = None if cpu or cuda else nvidia_driver()
    return environment_of(config.requirements, cpu=cpu, cuda=driver.cuda if driver else cuda)


def _install_all(commands: Iterator[list[str]], title: str, log: TextIO) -> None:
    console = Console(stderr=True, highlight=False)
    console.print(Text(f"installing {title}; this takes minutes; log: {log.name}"), soft_wrap=True)
    with console.status(title) as status:
        for command in commands:
            # The program inherits the log, and with it the lock: it may outlive this process.
            with subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                pass_fds=[log.fileno()],
            ) as process:
                lines: list[str] = []
                try:
                    for line in process.stdout or ():
                        lines.append(line)
                        log.write(line)
                        status.update(Text(f"{title}: {line.strip()[:80]}"))
                except BaseException:
                    process.kill()
                    raise
            log.flush()
            if process.returncode:
                raise subprocess.CalledProcessError(process.returncode, command, "".join(lines))


def commands_of(environment: ServerEnvironment, *, cpu: bool) -> Iterator[list[str]]:
    """Yield the commands that make an environment."""
    # With -I, Python ignores the caller's PYTHONPATH and working directory.
    yield [_base_python(cpu=cpu), "-I", "-m", "venv", str(environment.folder)]
    python, requirements = [str(environment.python), "-I"], str(environment.requirements)
    # Compiling all that is installed takes half of the time, and most of it is never imported.
    pip = [*python, "-m", "pip", "install", "--progress-bar=off", "--no-compile"]
    if not cpu:
        # The file names its indexes too; here they are for readers of the command.
        yield [*pip, *(f"--extra-index-url={index}" for index in environment.indexes), "-r", requirements]
        return
    torch = re.findall(r"^torch\S*", environment.requirements.read_text(), re.MULTILINE)
    yield [*pip, "--no-deps", "--extra-index-url", _CPU_BUILDS, *torch]
    yield [*pip, "--no-deps", "-r", requirements]
    yield [*python, str(_COMPLETE), environment.folder.name.partition("-")[0]]


def _base_python(*, cpu: bool) -> str:
    name = "python{}.{}".format(*_PYTHON)
    found = sys.executable if not cpu or sys.version_info[:2] == _PYTHON else shutil.which(name)
    if found is None:
        raise EngineError(f"the versions for CPUs were tested with {name}, which is not installed")
    return found


def _reason(text: str) -> str:
    """Return the last error in a text, after what to do about it."""
    errors = re.findall(r"^ERROR: *(.+)$", text, re.MULTILINE) or text.strip().splitlines()
    hints = [hint for part, hint in _HINTS.items() if part in text]
    return ": ".join([*hints[:1], *errors[-1:]])
