"""`stretto watch`: the live view of a run that another process owns."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from fixture_types import OpenBus
from kept_samples import Kept
from made_run import make_run
from patience import patience
from sample_messages import failed, record
from statuses import make_status
from stretto.bus.messages.membership import RunStatus
from stretto.bus.messages.subjects import Subjects
from stretto.bus.server import lock_run
from stretto.cli.show.watch import bootstrap_elsewhere
from stretto.errors import ConfigError
from stretto.records.kept.samples import SampleStore
from stretto.records.status import STATUS
from stretto.samples.join import Joiner
from stretto.samples.segments import SegmentWriter
from terminals import Terminal, watching


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that a kernel owns as long as somebody holds its lock."""
    folder = tmp_path / "run"
    kept = Kept(folder)
    kept.group(3, text="2\x1b]0;x\x07")
    kept.flush()
    (folder / "config.yaml").write_text("name: quickstart\nsteps: 200\n")
    (folder / STATUS).write_bytes(msgspec.json.encode(make_status(folder=str(folder), pid=os.getpid())))
    return folder


def test_the_view_follows_the_folder_until_the_run_ends(run: Path) -> None:
    lock = lock_run(run / "bus")
    with watching(str(run)) as terminal:
        terminal.until_it_shows("step 60/200")
        terminal.until_it_shows("rollout-0 waits for verifier-0")
        terminal.until_it_shows("q: end the view")
        assert not terminal.is_as_before, "keys are read one at a time, without echo"
        (run / STATUS).write_bytes(msgspec.json.encode(make_status(version=61, pid=os.getpid())))
        terminal.until_it_shows("step 61/200")
        terminal.press("s")
        terminal.until_it_shows("→ 2\\x1b]0;x\\x07")
        (run / STATUS).write_bytes(msgspec.json.encode(make_status(written=time.time() - 40)))
        terminal.until_it_shows("another one is starting")
        late = make_status(written=time.time() - 40, pid=os.getpid())
        (run / STATUS).write_bytes(msgspec.json.encode(late))
        terminal.until_it_shows(f"(pid {os.getpid()}) stands still: it wrote its status ")
        lock.close()
        assert terminal.end() == 0
        assert terminal.is_as_before
        assert "no kernel owns the run; to continue it: stretto resume" in terminal.shown
    with watching(str(run)) as terminal:  # nobody stands still: nobody is there
        assert terminal.end() == 0
        assert "stands still" not in terminal.shown.replace("trainer-0 stands still", "")


def test_the_view_shows_a_kept_sample(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "made", steps=2, answer="8 17\x1b]0;x\x07")
    (folder / STATUS).write_bytes(msgspec.json.encode(make_status(folder=str(folder), pid=os.getpid())))
    with lock_run(folder / "bus"), watching(str(folder)) as terminal:
        terminal.until_it_shows("step 60/200")
        terminal.press("s")
        terminal.until_it_shows("sample  7/1/")
        terminal.until_it_shows("→ 8 17\\x1b]0;x\\x07")
        assert "3+5+9=" in terminal.shown
        assert "expected 8 17" in terminal.shown
        terminal.press("s")
        terminal.until_it_shows("keys")
        terminal.until(lambda: "3+5+9=" not in terminal.shown.rpartition("step 60/200")[2])


@pytest.mark.parametrize(
    ("newest", "shown"),
    [("failed", "sample  7/1, not scored, failed, no reward"), ("damaged", "cannot be read")],
)
def test_any_newest_sample_leaves_the_view_alive(tmp_path: Path, newest: str, shown: str) -> None:
    writer, joiner = SegmentWriter(tmp_path / "samples"), Joiner(1)
    joiner.add(1, record(7))
    joiner.add(2, failed(7, reason="no reward"))
    writer.write("samples", joiner.take()["samples"])
    if newest == "damaged":
        for file in (tmp_path / "samples").iterdir():
            file.write_bytes(b"PAR1")
    (tmp_path / "config.yaml").write_text("name: quickstart\n")
    (tmp_path / STATUS).write_bytes(msgspec.json.encode(make_status()))
    # The message names the folder, however long its name is, and no line may break within the words.
    with lock_run(tmp_path / "bus"), watching(str(tmp_path), columns=400) as terminal:
        terminal.until_it_shows("step 60/200")
        terminal.press("s")
        terminal.until_it_shows(shown)
        terminal.press("q")
        assert terminal.end() == 0


@pytest.mark.slow
def test_the_view_follows_a_real_run(start: Callable[..., Any], tmp_path: Path) -> None:
    evaluation = f"evaluation.dataset={{use: jsonl, path: {tmp_path}/rows.jsonl}}"
    run = start("steps=150", evaluation, "evaluation.every=20", "samples.keep=all")
    run.until(lambda: run.evaluations() and SampleStore(run.folder).newest())
    with watching(str(run.folder)) as terminal:
        for row in (
            "left (until",
            "workers  4 ready",
            "verdict  ",
            "now  ",
            "(version 0)",
            "reward  0",
        ):
            terminal.until_it_shows(row)
        terminal.press("s")
        terminal.until(lambda: re.search(r"sample  (\S+), reward .*", terminal.shown))
        id = terminal.shown.rpartition("sample  ")[2].partition(",")[0]
        terminal.until(lambda: "expected" in terminal.shown.rpartition("sample  ")[2])
        shown = terminal.shown.rpartition("sample  ")[2]
        ticket, _, _ = id.removeprefix("eval-").partition("/")
        purpose = "eval" if id.startswith("eval-") else "train"
        [row] = [row for row in SampleStore(run.folder).ticket(int(ticket), purpose) if row["id"] == id]
        assert f"reward {row['reward']:g}, ended by {row['finish']}, " in shown
        assert row["prompt_text"] in shown
        assert f"expected {row['dataset_row']['answer']}" in shown
        run.process.send_signal(signal.SIGINT)
        assert terminal.end() == 0
        assert "interrupted at step" in terminal.shown


@pytest.mark.parametrize(
    ("how", "status"), [("q", 0), ("damage", 2), (signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_the_terminal_is_as_before_however_the_view_ends(
    run: Path, how: str | signal.Signals, status: int
) -> None:
    with lock_run(run / "bus"), watching(str(run)) as terminal:
        terminal.until_it_shows("step 60/200")
        terminal.until(lambda: not terminal.is_as_before)
        if isinstance(how, signal.Signals):
            terminal.process.send_signal(how)
        elif how == "q":
            terminal.press("q")
        else:
            (run / STATUS).write_bytes(b"{")
        assert terminal.end() == status
        assert terminal.is_as_before
        assert (how == "damage") == ("status.json is not the status of a run" in terminal.shown)


async def test_a_viewer_follows_the_run_over_the_bus(
    open_bus: OpenBus, names: Subjects, tmp_path: Path
) -> None:
    viewer = tmp_path / "elsewhere.json"
    async with open_bus("kernel") as kernel:
        viewer.write_bytes((tmp_path / "bus" / "viewer.json").read_bytes())
        terminal = Terminal("watch", str(viewer))
        contents = [b"\xff", msgspec.json.encode(make_status(now="\x1b]0;x\x07"))]

        async def tell() -> None:
            while True:
                for content in contents:
                    await kernel.publish(names.status, RunStatus(content))
                await anyio.sleep(patience(0.1))

        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(tell)
                await anyio.to_thread.run_sync(terminal.until_it_shows, "step 60/200")
                terminal.press("s")
                await anyio.to_thread.run_sync(terminal.until_it_shows, "on the kernel's machine")
                assert "now  \\x1b]0;x\\x07" in terminal.shown
                contents[:] = [b"{}"]
                await anyio.to_thread.run_sync(terminal.until_it_shows, "sent what is not a status")
                contents[:] = [msgspec.json.encode(make_status(state="completed", version=200))]
                assert await anyio.to_thread.run_sync(terminal.end) == 0
                tasks.cancel_scope.cancel()
            assert "step 200/200" in terminal.shown
            assert "\x07" not in terminal.shown
            assert terminal.is_as_before
        finally:
            terminal.close()


def test_only_the_file_of_a_viewer_is_taken(tmp_path: Path) -> None:
    file = tmp_path / "kernel.json"
    file.write_text('{"url": "nats://127.0.0.1:1", "run": "r", "role": "kernel"}')
    with pytest.raises(ConfigError, match="is not a file for the party 'viewer'"):
        bootstrap_elsewhere(file, "viewer", None, None, None)
