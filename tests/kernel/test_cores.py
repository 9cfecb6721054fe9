"""The measurement of the cores that a run may use."""

import os
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from patience import patience
from stretto.machine import cores as cores_module
from stretto.machine.cores import CoreMeter, available_cores, available_memory


def test_cores_that_other_programs_use_are_neither_used_nor_idle() -> None:
    count = 2 * round(available_cores() + 0.5)
    busy = "timeout --foreground 9 sh -c 'while :; do :; done' > /dev/null 2>&1 &"
    script = f"for each in $(seq {count}); do {busy} done; echo $$"
    ended = subprocess.run(["setsid", "sh", "-c", script], capture_output=True, text=True, check=True)
    try:
        meter = CoreMeter()
        time.sleep(patience(0.5))
        cores = meter.read()
    finally:
        os.killpg(int(ended.stdout), signal.SIGKILL)
    assert cores.used < 0.2
    assert cores.idle < 0.2


def test_processes_that_start_after_the_meter_count_from_its_first_reading() -> None:
    began, meter = time.monotonic(), CoreMeter()
    busy = subprocess.Popen(["sh", "-c", "while :; do :; done"])
    try:
        while psutil.Process(busy.pid).cpu_times().user < 0.5:
            time.sleep(patience(0.05))
        used = meter.read().used
    finally:
        busy.kill()
        busy.wait()
    assert used * available_cores() * (time.monotonic() - began) > 0.4


def test_the_shares_of_the_cores_are_no_more_than_all() -> None:
    meter = CoreMeter()
    deadline = time.monotonic() + patience(0.1)
    while time.monotonic() < deadline:
        pass
    used, idle, memory, of_roles = meter.read()
    assert 0 < used <= 1
    assert sum(of_roles.values()) == pytest.approx(used)
    assert 0 <= idle <= 1 - used
    assert 0 < memory < 1


def test_a_worker_works_with_its_children(tmp_path: Path) -> None:
    worker = subprocess.Popen(["sh", "-c", "sleep 99 & echo; wait", tmp_path / "trainer-0.json"], stdout=-1)
    other = subprocess.Popen(["sleep", "99"])
    try:
        assert worker.stdout is not None
        worker.stdout.readline()  # its child has started
        roles = cores_module._roles_of_family(psutil.Process())  # pyright: ignore[reportPrivateUsage]
        [child] = psutil.Process(worker.pid).children()
        assert roles[child] == roles[psutil.Process(worker.pid)] == "trainer"
        assert roles[psutil.Process(other.pid)] == "other"
        assert roles[psutil.Process()] == "kernel"
    finally:
        for process in (*psutil.Process(worker.pid).children(), worker, other):
            process.kill()
        worker.communicate()
        other.wait()


@pytest.mark.parametrize(
    ("groups", "file", "limit", "expected"),
    [
        ("0::/\n", "memory.max", "4096", 4096),
        ("0::/user.slice/a\n", "user.slice/memory.max", "4096", 4096),
        ("0::/\n", "memory.max", "max", 9999),
        ("4:memory:/docker/1\n1:cpu:/\n", "memory/memory.limit_in_bytes", "4096", 4096),
        ("4:memory:/docker/1\n", "memory/docker/1/memory.limit_in_bytes", "9223372036854771712", 9999),
        ("4:cpu:/\n", "memory.max", "4096", 9999),
    ],
)
def test_the_memory_is_that_of_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: str, file: str, limit: str, expected: int
) -> None:
    (tmp_path / "groups").write_text(groups)
    (tmp_path / "fs" / file).parent.mkdir(parents=True)
    (tmp_path / "fs" / file).write_text(f"{limit}\n")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=9999))
    limits = [*cores_module.memory_limits(tmp_path / "groups", tmp_path / "fs")]
    monkeypatch.setattr(cores_module, "memory_limits", lambda: limits)
    assert available_memory() == expected
