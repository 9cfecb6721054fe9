"""Single keys that the user presses while a view draws in the terminal."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
from contextlib import suppress
from types import TracebackType
from typing import Any

_STOPPING = (signal.SIGTTIN, signal.SIGTTOU)
"""Their default action stops a process in the background that uses the terminal."""


class Keyboard:
    """Reads single keys from the terminal at standard input for the duration of a block.

    It reads only while this process is in the terminal's foreground, so a process in the background is not
    stopped and takes no key from the shell. The end of the block puts the terminal back. Without a terminal
    there are no keys.
    """

    def __init__(self) -> None:
        self._terminal: int | None = None
        self._former: list[Any] | None = None
        """The terminal's attributes before this process changed them."""
        self._handlers: dict[signal.Signals, Any] = {}
        self.works = False
        """Whether keys can be read."""

    def __enter__(self) -> Keyboard:
        if sys.stdin.isatty():
            self._terminal = sys.stdin.fileno()
            self._handlers = {each: signal.signal(each, signal.SIG_IGN) for each in _STOPPING}
            self.works = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.works = False
        if self._terminal is not None and self._former is not None:
            with suppress(OSError, termios.error):  # the terminal was closed
                if _in_foreground(self._terminal):
                    termios.tcsetattr(self._terminal, termios.TCSADRAIN, self._former)
        for each, handler in self._handlers.items():
            signal.signal(each, handler)

    def pressed(self) -> str:
        """Return the keys pressed since the last call, without waiting."""
        if self._terminal is None or not self.works:
            return ""
        keys = b""
        try:
            if _in_foreground(self._terminal):
                self._read_single_keys(self._terminal)
                while select.select([self._terminal], [], [], 0)[0]:
                    part = os.read(self._terminal, 64)
                    keys += part
                    if not part:
                        raise OSError("the terminal was closed")
        except (OSError, termios.error):
            self.works = False
        return keys.decode(errors="ignore")

    def _read_single_keys(self, terminal: int) -> None:
        """Switch the terminal to single keys without echo. A shell switches back while the process is
        stopped. Ctrl-C and Ctrl-Z keep their meaning."""
        attributes = termios.tcgetattr(terminal)
        if attributes[3] & termios.ICANON:
            self._former = list(attributes)
            attributes[3] &= ~(termios.ICANON | termios.ECHO)
            termios.tcsetattr(terminal, termios.TCSADRAIN, attributes)


def _in_foreground(terminal: int) -> bool:
    """Return whether this process is in the foreground of its terminal.

    Raises:
        OSError: if this is not the terminal of the process's session.
    """
    return os.tcgetpgrp(terminal) == os.getpgrp()
