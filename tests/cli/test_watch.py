"""`stretto watch`: the live view of a run that another process owns."""

import os
import signal
import time
from pathlib import Path

import anyio
import msgspec
import pytest

from fixture_types import OpenBus
from patience import patience
from statuses import make_status
from stretto.bus.messages.membership import RunStatus
from stretto.bus.messages.subjects import Subjects
from stretto.bus.server import lock_run
from stretto.cli.show.watch import bootstrap_elsewhere
from stretto.errors import ConfigError
from stretto.records.status import STATUS
from terminals import Terminal, watching


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that a kernel owns as long as somebody holds its lock."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("name: quickstart\nsteps: 200\n")
    (folder / STATUS).write_bytes(msgspec.json.encode(make_status(folder=str(folder), pid=os.getpid())))
    return folder


def test_the_view_follows_the_folder_until_the_run_ends(run: Path) -> None:
    lock = lock_run(run / "bus")
    with watching(str(run)) as terminal:
        terminal.until_it_shows("step 60/200")
        terminal.until_it_shows("rollout-0 waits for verifier-0")
        (run / STATUS).write_bytes(msgspec.json.encode(make_status(version=61, pid=os.getpid())))
        terminal.until_it_shows("step 61/200")
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


@pytest.mark.parametrize(
    ("how", "status"), [("^C", 130), ("damage", 2), (signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_the_terminal_is_as_before_however_the_view_ends(
    run: Path, how: str | signal.Signals, status: int
) -> None:
    with lock_run(run / "bus"), watching(str(run)) as terminal:
        terminal.until_it_shows("step 60/200")
        if isinstance(how, signal.Signals):
            terminal.process.send_signal(how)
        elif how == "^C":
            terminal.press("\x03")
        else:
            (run / STATUS).write_bytes(b"{")
        assert terminal.end() == status
        assert terminal.is_as_before
        assert (how == "damage") == ("status.json is not the status of a run" in terminal.shown)


async def test_a_viewer_follows_a_run_by_the_bus(open_bus: OpenBus, names: Subjects, tmp_path: Path) -> None:
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
                await anyio.to_thread.run_sync(terminal.until_it_shows, "now  \\x1b]0;x\\x07")
                assert "step 60/200" in terminal.shown
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
        bootstrap_elsewhere(file, None, None, None)
