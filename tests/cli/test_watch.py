"""`stretto watch`: the live view of a run that another process owns."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Generator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path

import anyio
import msgspec
import pytest

from statuses import make_status
from stretto.bus.client import Bus
from stretto.bus.messages import RunStatus, Subjects
from stretto.bus.server import lock_run
from stretto.cli.watch import watch_bus
from stretto.errors import ConfigError
from stretto.records.status import STATUS

OpenBus = Callable[[str], AbstractAsyncContextManager[Bus]]


class Terminal:
    """A `stretto` process in a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self._here, self._there = pty.openpty()
        os.set_blocking(self._here, False)
        self._before = termios.tcgetattr(self._there)
        self.shown = ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "stretto", *arguments],
            stdin=self._there,
            stdout=self._there,
            stderr=self._there,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "50"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(self._there, termios.TIOCSCTTY, 0),
        )

    def until(self, condition: Callable[[], object], deadline_s: float = 60) -> None:
        deadline = time.monotonic() + deadline_s
        while not condition():
            assert time.monotonic() < deadline, self.shown
            try:
                shown = os.read(self._here, 1 << 16).decode(errors="replace")
                self.shown += re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", shown)
            except BlockingIOError:
                time.sleep(0.02)

    def until_it_shows(self, text: str) -> None:
        """Wait until it shows a text from now on."""
        self.shown = ""
        self.until(lambda: text in self.shown)

    def press(self, key: str) -> None:
        os.write(self._here, key.encode())

    @property
    def is_as_before(self) -> bool:
        return termios.tcgetattr(self._there) == self._before

    def end(self) -> int:
        """Its exit status, once it has ended by itself."""
        self.until(lambda: self.process.poll() is not None)
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._here)
        os.close(self._there)


@contextmanager
def watching(*arguments: str) -> Generator[Terminal]:
    terminal = Terminal("watch", *arguments)
    try:
        yield terminal
    finally:
        terminal.close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that a kernel owns as long as somebody holds its lock."""
    folder = tmp_path / "run"
    (folder / "answers").mkdir(parents=True)
    (folder / "config.yaml").write_text("name: quickstart\nsteps: 200\n")
    (folder / STATUS).write_bytes(msgspec.json.encode(make_status(folder=str(folder))))
    answer = {"row": 3, "sample": 0, "version": 50, "prompt": "1+1=", "completion": "2\x1b]0;x\x07"}
    answer |= {"reward": 1.0, "metrics": {}, "finish": "stop", "tokens": 3, "engine": "e", "columns": {}}
    (folder / "answers" / "step-000050.jsonl").write_text(json.dumps(answer) + "\n")
    return folder


def test_the_view_follows_the_folder_until_the_run_ends(run: Path) -> None:
    lock = lock_run(run / "bus")
    with watching(str(run)) as terminal:
        terminal.until_it_shows("step 60/200")
        terminal.until_it_shows("rollout-0 waits for verifier-0")
        assert not terminal.is_as_before, "keys are read one at a time, without echo"
        (run / STATUS).write_bytes(msgspec.json.encode(make_status(version=61)))
        terminal.until_it_shows("step 61/200")
        terminal.press("s")
        terminal.until_it_shows("→ 2\\x1b]0;x\\x07")
        (run / STATUS).write_bytes(msgspec.json.encode(make_status(written=time.time() - 40)))
        terminal.until_it_shows("(pid 7) stands still: it wrote its status 4")
        lock.close()
        assert terminal.end() == 0
        assert terminal.is_as_before
        assert "no kernel owns the run; to continue it: stretto resume" in terminal.shown


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
                await anyio.sleep(0.1)

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
    with pytest.raises(ConfigError, match=r"expected a copy of a run's bus/viewer\.json"):
        watch_bus(file, None, None)
