"""NVIDIA's driver decides which build of a server is installed; `stretto doctor` names what does not fit."""

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from commands import called
from stretto.assembly.plugins import Plugins
from stretto.cli.make.doctor import Observation, examine_machine
from stretto.machine.gpus import listed_gpus, nvidia_driver
from stretto.serving.environment import environment_of
from stretto_vllm import VllmConfig

VLLM = VllmConfig.requirements or Path()
SMI = "| NVIDIA-SMI {0}     Driver Version: {0}     CUDA Version: {1}     |"
DRIVERS = [("535.183.01", 12.2), ("570.86.15", 12.8), ("580.65.06", 13.0)]
INDEX = "https://wheels.vllm.ai/0.32.0/cu129"
NONE_KNOWN = "no build of sglang-0.5.23 for a driver with CUDA {} is known; use driver 580 or newer, or set"
Program = Callable[[str, str], None]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Program]:
    """A function that makes a program which prints a text. PATH and CUDA_HOME have no others."""

    def make(name: str, text: str) -> None:
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\necho '{text}'\n")
        (tmp_path / "bin" / name).chmod(0o755)

    (tmp_path / "bin").mkdir()
    for name, value in {"PATH": "bin", "CUDA_HOME": "", "XDG_CACHE_HOME": "cache"}.items():
        monkeypatch.setenv(name, str(tmp_path / value))
    listed_gpus.cache_clear()
    yield make
    listed_gpus.cache_clear()


def write_torch(folder: Path, cuda: float) -> None:
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").touch()
    (folder / "torch" / "version.py").write_text(f"cuda: Optional[str] = '{cuda}'\n")


def write_vllm(cuda: float) -> None:
    """An environment of vLLM that is ready."""
    environment = environment_of(VLLM, cpu=False, cuda=cuda)
    write_torch(environment.folder / "lib" / "python3.11" / "site-packages", environment.cuda or 0)
    environment.folder.parent.chmod(0o700)
    environment.mark.write_bytes(environment.requirements.read_bytes())


def examined() -> dict[str, Observation]:
    return {each.subject: each for each in examine_machine(Plugins())}


@pytest.mark.parametrize(("version", "cuda"), DRIVERS)
def test_the_build_that_the_driver_runs_is_installed(version: str, cuda: float, program: Program) -> None:
    program("nvidia-smi", SMI.format(version, cuda))
    vllm, sglang = (called("engine", "install", name, "--dry-run") for name in ("vllm", "sglang"))
    others = f"--extra-index-url={INDEX} --extra-index-url=https://download.pytorch.org/whl/cu129 -r "
    assert vllm.stdout.count(others) == vllm.stdout.count("/cu129.txt") == int(cuda < 13)
    assert vllm.stdout.count("/gpu.txt") == sglang.stdout.count("/gpu.txt") == int(cuda >= 13)
    assert (NONE_KNOWN.format(cuda) in sglang.stderr, sglang.returncode) == (cuda < 13, int(cuda < 13))


def test_without_a_driver_the_user_may_say_which_one_runs_have(program: Program) -> None:
    plain = called("engine", "install", "vllm", "--dry-run").stdout
    assert plain.endswith("requirements/gpu.txt\n")
    assert INDEX in called("engine", "install", "vllm", "--dry-run", "--cuda", "12.8").stdout
    program("nvidia-smi", SMI.format("535.183.01", 12.2))
    assert called("engine", "install", "vllm", "--dry-run", "--cuda", "13").stdout == plain


@pytest.mark.parametrize(("version", "cuda"), DRIVERS)
def test_doctor_names_what_does_not_fit(
    version: str, cuda: float, program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    write_torch(tmp_path, 13.0)
    assert {"driver", "torch", "nvcc"}.isdisjoint(examined())
    program("nvidia-smi", SMI.format(version, cuda))
    before, level = examined(), "fault" if cuda < 13 else "ok"
    assert before["driver"].text == f"NVIDIA {version}, CUDA {cuda}"
    assert before["torch"].level == level
    assert ("torch==2.13.*' --index-url https://download" in before["torch"].text) == (cuda < 13)
    assert (NONE_KNOWN.format(cuda) in before["server sglang"].text) == (cuda < 13)
    assert (before["nvcc"].level, before["ninja"].level) == ("note", "note")

    write_vllm(13.0)  # as pip alone would
    assert (wrong := examined()["server vllm"]).level == level
    advice = f"`stretto engine install vllm` takes the build for CUDA 12.9, of {INDEX}"
    assert (advice in wrong.text, advice in before["server vllm"].text) == (cuda < 13, cuda < 13)
    write_vllm(12.2)
    program("nvcc", "Cuda compilation tools, release 13.0, V13.0.88")
    after = examined()
    assert (after["server vllm"].level, after["server vllm"].text) == ("ok", "built for CUDA 12.9")
    assert after["nvcc"].level == ("warning" if cuda < 13 else "ok")


def test_a_driver_is_read_in_both_forms(program: Program) -> None:
    assert nvidia_driver() is None
    program("nvidia-smi", "| NVIDIA-SMI 610.43.02     KMD Version: 610.43.02     CUDA UMD Version: 13.3 |")
    assert nvidia_driver() == ("610.43.02", 13.3)


def test_the_builds_have_one_version_and_other_packages_are_pinned() -> None:
    server, *others = re.findall(r"^[^#\s-]\S+", (VLLM / "cu129.txt").read_text(), re.MULTILINE)
    assert server == (VLLM / "gpu.txt").read_text().split()[0] + "+cu129"
    assert all(re.fullmatch(r"torch\w*==[\d.]+\+cu129", other) for other in others)
