"""Numbers of workers that change while a run lives: `scale`, also in a loop, workers by hand, and `stop`."""

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from commands import STRETTO, called, output_of
from fixture_types import Start
from patience import patience
from processes import Spawn, spawning
from stretto.bus.client import connect
from stretto.bus.joining import write_bootstrap
from stretto.bus.messages.events import FleetChanged
from stretto.bus.messages.membership import Join, Welcome
from stretto.bus.messages.subjects import Subjects
from stretto.bus.server import Bootstrap
from stretto.cli.make.operate import numbers_of
from stretto.errors import ConfigError, Refused
from stretto.records.run_folder import RunFolder
from stretto.records.status import read_status
from worlds import in_both_worlds


def changes(folder: Path) -> list[tuple[str, str]]:
    """(worker, new state) of the run's workers, in order."""
    events = RunFolder(folder).events()
    return [(each.worker, each.state) for _, each in events if isinstance(each, FleetChanged)]


def of(folder: Path, state: str) -> set[str]:
    return {worker for worker, reached in changes(folder) if reached == state}


def assert_nothing_went_wrong(run: Any) -> None:
    summary = run.assert_balanced()
    assert summary["restarts"] == 0
    assert not of(run.folder, "lost")
    assert summary["ledger"]["failed"] == summary["ledger"]["expired"] == 0
    run.assert_audit_is_clean()
    run.assert_nothing_is_left()


@in_both_worlds
def test_a_run_gets_more_workers_and_fewer(start: Start) -> None:
    run = start("steps=2000", "checkpoint.every=0")
    run.until_step(1)
    refused = run.operate("scale", "trainer=2", status=2)
    assert "trainers are scaled by their worker group" in refused
    assert "expected one of rollout, inference" in run.operate("scale", "engine=2", status=2)
    done = run.operate("scale", "rollout=3", "inference=2", "verifier=2")
    assert done.splitlines() == [
        "rollout: 1 -> 3; starting rollout-1, rollout-2",
        "inference: 1 -> 2; starting inference-1",
        "verifier: 1 -> 2; starting verifier-1",
    ]
    added = {"rollout-1", "rollout-2", "inference-1", "verifier-1"}
    run.until(lambda: added <= of(run.folder, "ready"))
    assert "rollout: 3 already" in run.operate("scale", "rollout=3")
    done = run.operate("scale", "rollout=1", "inference=1", "verifier=1")
    assert "rollout: 3 -> 1; rollout-1, rollout-2 will leave, with their work finished" in done
    run.until(lambda: added <= of(run.folder, "left"))
    run.until_step(len(run.metrics()) + 3)
    run.operate("scale", "rollout=2")  # the number of a worker that left is free again
    run.until(lambda: Counter(changes(run.folder))["rollout-1", "ready"] == 2)
    assert json.loads((run.folder / "workers.json").read_text())["rollout.processes"] == {"file": 1, "now": 2}
    assert "writes a checkpoint" in run.operate("stop")
    assert run.end() == 130
    assert run.summary()["reason"] == "stretto stop"
    assert_nothing_went_wrong(run)
    no_kernel = run.operate("scale", "rollout=2", status=2)
    assert "no kernel owns the run" in no_kernel


@pytest.mark.parametrize(
    ("items", "error"),
    [
        (["rollout"], "expected ROLE=N"),
        (["rollout=0"], "expected ROLE=N with N from 1"),
        (["rollout=10001"], "expected ROLE=N with N from 1 to 10,000"),
        (["rollout=1", "rollout=2"], "rollout is given twice"),
    ],
)
def test_numbers_that_cannot_be(items: list[str], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        numbers_of(items)


# ------------------------------------------------------------------------------------- workers by hand


@pytest.fixture
def by_hand() -> Iterator[Spawn]:
    """`by_hand("--run", folder, "--role", "rollout")`: `stretto worker`, killed at the end."""
    with spawning() as spawn:
        yield lambda *arguments, **options: spawn([*STRETTO, "worker", *arguments], **options)


@pytest.mark.cluster
def test_workers_by_hand_join_and_leave(start: Start, by_hand: Any, tmp_path: Path) -> None:
    run = start("steps=2000", "checkpoint.every=0", "rollout.concurrency=2")
    run.until_step(1)
    guests = [by_hand("--run", run.folder, "--role", role) for role in ("rollout", "verifier")]
    invitation = Path(output_of("invite", run.folder, "inference").split()[-1])
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    bootstrap = Bootstrap.read(invitation)
    copy = msgspec.structs.replace(bootstrap, url="nats://127.0.0.1:9", logs="/no/such/folder")
    (elsewhere / "invitation.json").write_bytes(msgspec.json.encode(copy))
    guests.append(by_hand("--invitation", "invitation.json", "--bus", bootstrap.url, cwd=elsewhere))
    ids = {"rollout-h0", "verifier-h0", "inference-h0"}
    run.until(lambda: ids <= of(run.folder, "ready"))
    run.until(lambda: any(each.worker == "rollout-h0" for each in RunFolder(run.folder).history.attempts))
    done = output_of("scale", run.folder, "rollout=2")
    assert "rollout: 1 -> 2; starting rollout-1" in done  # the run's own workers count
    for guest in guests:
        guest.send_signal(signal.SIGINT)
    for guest in guests:
        text, _ = guest.communicate(timeout=patience())
        assert guest.returncode == 0, text
        assert "leaving" in text
    run.until(lambda: ids <= of(run.folder, "left"))
    assert not (run.folder / "bus" / "rollout-h0.json").exists()
    output_of("stop", run.folder)
    assert run.end() == 130
    assert_nothing_went_wrong(run)


@pytest.mark.cluster
def test_a_worker_that_cannot_work_here_says_why_and_the_run_goes_on(
    start: Start, by_hand: Any, tmp_path: Path
) -> None:
    run = start("steps=2000", "checkpoint.every=0")
    run.until_step(1)
    (tmp_path / "rows.jsonl").rename(tmp_path / "moved.jsonl")  # as on a machine that does not have it
    guest = by_hand("--run", run.folder, "--role", "rollout")
    text, _ = guest.communicate(timeout=patience())
    assert guest.returncode == 1
    remark = f"paths of the run file that do not exist on this machine: dataset.path={tmp_path}/rows.jsonl"
    assert remark in text
    run.until(lambda: remark in run.text())
    anyio.run(_join_with_another_version, Path(run.folder))
    run.until_step(len(run.metrics()) + 3)
    output_of("stop", run.folder)
    assert run.end() == 130
    assert run.summary()["restarts"] == 0


async def _join_with_another_version(folder: Path) -> None:
    bootstrap = Bootstrap.read(write_bootstrap(folder / "bus", "rollout-x"))
    join = Join("rollout-x", "rollout", "here", "nonce", bootstrap.token, "0.0.1")
    async with connect(bootstrap) as bus:
        subject = Subjects(bootstrap.run).kernel("rollout", "join")
        other = r"rollout-x has stretto 0\.0\.1, and the run has .*: install stretto"
        with pytest.raises(Refused, match=other):
            await bus.request(subject, join, Welcome, deadline_s=patience())


@pytest.mark.parametrize(
    "arguments", ["", "--role rollout", "--run x", "--run x --invitation y", "--invitation no.json"]
)
def test_a_worker_by_hand_needs_a_run_and_a_role_or_an_invitation(arguments: str) -> None:
    done = called("worker", *arguments.split())
    assert (done.returncode, done.stderr.count("error: ")) == (2, 1)


# ---------------------------------------------------------------------------- rollout as the bottleneck


@pytest.mark.slow
def test_the_loop_of_the_page_adds_workers_until_training_is_the_limit(start: Start) -> None:
    """A ticket takes 0.4 s and a step trains for 0.16 s: with two rollout workers, training is the limit."""
    run = start(
        *("steps=100000", "checkpoint.every=0", "training.seconds_per_step=0.16", "queue.batch_size=1"),
        *("inference.tokens_per_s=1000", "inference.slots=20", "inference.mean_tokens=20"),
        *("inference.sigma=0", "rollout.concurrency=1", "queue.max_staleness=7"),
    )
    page = Path(__file__).parents[2] / "docs" / "elastic.md"
    [text] = re.findall(r"^```bash\n(run=RUN .+?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    for shown, here in ("run=RUN", f"run={run.folder}"), ("sleep 10", "sleep 3"):
        assert shown in text
        text = text.replace(shown, here)
    run.until_step(1)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with spawning() as spawn:
        loop = spawn(["bash", "-c", text], env={**os.environ, "PATH": path})
        run.until(lambda: "rollout-1" in of(run.folder, "ready"))
        added = len(run.metrics())
        run.until_step(added + 80)  # the loop would add the next one after 60
        output_of("stop", run.folder, "--now")
        said, _ = loop.communicate(timeout=patience())
    assert said.splitlines() == ["rollout: 1 -> 2; starting rollout-1"]
    assert loop.returncode == 0
    assert run.end() == 130
    assert of(run.folder, "ready") & {"rollout-2", "inference-1", "verifier-1"} == set()


# --------------------------------------------------------------------------- a run in the background


@pytest.mark.cluster
def test_a_detached_run_is_followed_and_stopped(start: Start, tmp_path: Path) -> None:
    del start  # its fixture writes the run file
    file, out = tmp_path / "run.yaml", tmp_path / "detached"
    started = output_of("run", "--detach", file, f"out={out}", "steps=5000", "checkpoint.every=0")
    assert f"the run in {out} trains" in started
    assert read_status(out).started  # pyright: ignore[reportOptionalMemberAccess]
    try:
        again = output_of("run", "--detach", file, f"out={out}", status=2)
        assert "already holds a run" in again
        invitation = output_of("invite", out, "viewer").split()[-1]
        assert "rollout-0: ready" in output_of("status", invitation)
        assert "worker ready worker=rollout-0" in output_of("logs", out)
        assert len(output_of("logs", out, "-n", "2").splitlines()) == 2
        refused = output_of("logs", out, "--worker", "rollout-9", status=2)
        assert "logs: inference-0, kernel, rollout-0" in refused
        followed = subprocess.Popen([*STRETTO, "logs", "-f", out], stdout=subprocess.PIPE, text=True)
    finally:
        output_of("stop", out)
    text, _ = followed.communicate(timeout=patience())
    assert "asked to stop" in text
    assert "checkpoint" in text
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["status"], summary["reason"]) == ("interrupted", "stretto stop")
    assert "interrupted at step" in (out / "output.txt").read_text()
    resumed = output_of("resume", out, "--detach", f"steps={summary['version'] + 2}")
    assert "trains" in resumed
    output_of("logs", "-f", out)  # until it ends
    assert json.loads((out / "summary.json").read_text())["status"] == "completed"


def test_a_detached_run_that_cannot_start_says_why(start: Start, tmp_path: Path) -> None:
    del start  # its fixture writes the run file
    out = tmp_path / "detached"
    failed = output_of("run", "--detach", tmp_path / "run.yaml", f"out={out}", "trackers=[nope]", status=2)
    assert "no tracker 'nope'" in failed
    assert not out.exists()
    file = tmp_path / "file"
    file.touch()
    unwritable = output_of("run", "--detach", tmp_path / "run.yaml", f"out={file}/run", status=2)
    assert "cannot write to" in unwritable
