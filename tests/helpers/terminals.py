"""`stretto` in a terminal of its own: `from terminals import Terminal`."""

import fcntl
import os
import pty
import re
import subprocess
import termios
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from commands import STRETTO
from patience import SOON_S, patience


class Terminal:
    def __init__(self, *arguments: str, columns: int = 120, program: Sequence[str] = STRETTO) -> None:
        self._here, self._there = pty.openpty()
        termios.tcsetwinsize(self._here, (50, columns))
        os.set_blocking(self._here, False)
        self._before = termios.tcgetattr(self._there)
        self.shown = ""
        self.process = subprocess.Popen(
            [*program, *arguments],
            stdin=self._there,
            stdout=self._there,
            stderr=self._there,
            env={**os.environ, "TERM": "xterm", "COLUMNS": f"{columns}", "LINES": "50"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(self._there, termios.TIOCSCTTY, 0),
        )

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + patience()
        while not condition():
            assert time.monotonic() < deadline, self.shown
            try:
                shown = os.read(self._here, 1 << 16).decode(errors="replace")
                self.shown += re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", shown)
            except BlockingIOError:
                time.sleep(SOON_S)

    def until_it_shows(self, text: str) -> None:
        self.shown = ""
        self.until(lambda: text in self.shown)

    def press(self, key: str) -> None:
        os.write(self._here, key.encode())

    @property
    def is_as_before(self) -> bool:
        return termios.tcgetattr(self._there) == self._before

    def end(self) -> int:
        self.until(lambda: self.process.poll() is not None)
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._here)
        os.close(self._there)


@contextmanager
def watching(*arguments: str, columns: int = 120) -> Generator[Terminal]:
    terminal = Terminal("watch", *arguments, columns=columns)
    try:
        yield terminal
    finally:
        terminal.close()
