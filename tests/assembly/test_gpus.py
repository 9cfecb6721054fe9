"""Which GPUs a machine, or its container, has: asked of a faked `nvidia-smi`, and of the files of devices."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stretto.errors import EngineError
from stretto.launcher import Resources
from stretto.machine import gpus
from stretto.machine.gpus import gpu_variables, visible_gpus
from stretto.training.device import compute_device

TWO = "GPU 0: NVIDIA A100 (UUID: GPU-aa)\nGPU 1: NVIDIA A100 (UUID: GPU-bb)\n"
SLICED = TWO + "  MIG 1g.5gb      Device  0: (UUID: MIG-cc)\n  MIG 3g.20gb     Device  1: (UUID: MIG-dd)\n"
Machine = Callable[..., None]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Yield a function that makes a machine of what `nvidia-smi` prints, and of files in /dev."""

    def make(listing: str = "", free: str = "", devices: tuple[str, ...] = (), chosen: str = "") -> None:
        program, files = tmp_path / "nvidia-smi", tmp_path / "dev"
        program.write_text(f"#!/bin/sh\n[ $1 = -L ] && printf '{listing}' || printf '{free}'\n")
        program.chmod(0o755 if listing else 0o644)
        for device in (*devices, "nvidiactl", "nvidia-uvm"):
            (files / device).parent.mkdir(parents=True, exist_ok=True)
            (files / device).touch()
        monkeypatch.setattr(gpus, "_PROGRAMS", (str(program),))
        monkeypatch.setattr(gpus, "_DEV", files)
        monkeypatch.setattr(gpus, "_KFD", tmp_path / "nodes")
        for number, minor in enumerate((0, 128, 129, 130)):  # node 0 is the processor
            (node := tmp_path / "nodes" / str(number)).mkdir(parents=True, exist_ok=True)
            (node / "properties").write_text(f"simd_count 8\ndrm_render_minor {minor}\n")
        monkeypatch.setenv("ROCR_VISIBLE_DEVICES", chosen)
        gpus.listed_gpus.cache_clear()

    yield make
    gpus.listed_gpus.cache_clear()


def test_gpus_are_named_by_position_whatever_their_files_are_called(machine: Machine) -> None:
    machine(devices=("nvidia3", "nvidia5"))  # a container with two of eight
    assert visible_gpus({}) == ["0", "1"]
    machine(TWO, devices=("nvidia3", "nvidia5", "nvidia7"))  # the program knows better
    assert visible_gpus({}) == ["0", "1"]
    assert gpu_variables(["1"], {}) == {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    machine(SLICED)
    assert visible_gpus({}) == ["GPU-aa", "MIG-cc", "MIG-dd"]


def test_entries_of_the_user_pass_unchanged(machine: Machine) -> None:
    machine(TWO)
    given = {"CUDA_VISIBLE_DEVICES": "GPU-bb, 0"}
    assert visible_gpus(given) == ["GPU-bb", "0"]
    assert gpu_variables(["GPU-bb"], given) == {"CUDA_VISIBLE_DEVICES": "GPU-bb"}
    for hidden in ("", "-1", "NoDevFiles", "-1,0"):
        assert visible_gpus({"CUDA_VISIBLE_DEVICES": hidden}) == []
    of_amd = {"HIP_VISIBLE_DEVICES": "2,3"}
    assert visible_gpus(of_amd) == ["2", "3"]
    assert gpu_variables(["3"], of_amd) == {"CUDA_VISIBLE_DEVICES": "3", "HIP_VISIBLE_DEVICES": "3"}


def test_amd_gpus_are_those_whose_files_the_container_has(machine: Machine) -> None:
    machine(devices=("kfd", "dri/renderD128", "dri/renderD130"))
    assert visible_gpus({}) == ["0", "1"]
    machine(devices=("kfd",), chosen="7")
    assert visible_gpus({}) == ["0"]


def test_memory_is_what_these_gpus_have_free(machine: Machine) -> None:
    machine(TWO, "GPU-aa, 1000\nGPU-bb, 9000\nWARNING: infoROM is corrupted\n")
    free = [gpus.gpu_memory(each) for each in (["1"], ["0", "1"], ["GPU-bb"])]
    assert free == [9000 << 20, 1000 << 20, 9000 << 20]
    machine(SLICED, "GPU-aa, [N/A]\nGPU-bb, 9000\n")
    assert gpus.gpu_memory(["GPU-aa"]) is None
    assert gpus.gpu_memory(["MIG-dd"]) == 19 << 30
    machine()
    assert (visible_gpus({}), gpus.gpu_memory(["0"])) == ([], None)


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_section_that_asks_for_a_gpu_never_computes_on_processors(device: str, machine: Machine) -> None:
    machine(TWO)
    with pytest.raises(
        EngineError, match=r"gpus is 1 .* sees no GPU .* lists \['NVIDIA A100', 'NVIDIA A100'\]"
    ):
        compute_device(device, Resources(gpus=1))  # type: ignore[arg-type]
    assert compute_device("auto", Resources()).type == compute_device("cpu", Resources(gpus=1)).type == "cpu"
