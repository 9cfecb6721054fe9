"""The contract of program runners: they run Python programs that a model wrote, where these can do no harm.

The reward `code` runs every test of an answer as one program: a text, with an input and limits. stretto's own
runner is in the plugin of that reward, and uses bubblewrap. Another package can run programs in containers
or on a service: it offers a function `factory(parallel, **options)` that returns a `ProgramRunner`, and the
run file names it (`reward: {use: code, runner: "acme_docker:make"}`).
"""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

__all__ = ["Ending", "Execution", "ProgramLimits", "ProgramRunner"]

Ending = Literal["exit", "signal", "time", "memory", "processes", "output"]
"""How a program ended: by itself (`exit`), by a signal, or because it exceeded a limit."""


class ProgramLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one program, with all processes that it starts."""

    time_s: float
    """Seconds by the clock until the program must have ended."""
    memory_mb: int
    """Memory in MiB."""
    processes: int
    """Processes and threads at the same time, the program itself included."""
    output_kb: int
    """Bytes of standard output in KiB."""
    disk_mb: int
    """Bytes of files in MiB."""


class Execution(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one program."""

    ending: Ending
    """How the program ended. A refused allocation of memory, a refused process or a full disk may appear as
    an error in the program instead, which then ends as the program decides."""
    status: int = 0
    """Exit status for `exit`, number of the signal for `signal`, else 0."""
    output: bytes = b""
    """Standard output, up to the limit."""
    errors: bytes = b""
    """The beginning of standard error, for people."""


class ProgramRunner(Protocol):
    """Runs programs. A scoring process makes one and keeps it; it ends with that process."""

    def run(self, source: str, stdin: bytes, limits: ProgramLimits) -> Execution:
        """Run a text as the Python program `__main__`, wait for its end, and return the result.

        Up to `parallel` threads call this at the same time. Each program starts in an empty folder of its
        own, to which it can write, without network and without the environment of stretto. When this returns,
        no process of the program is left, and no later program finds anything that it wrote.

        Args:
            source: text of the program. The runner does not trust it.
            stdin: the program's standard input.

        Raises:
            RewardError: the runner failed, not the program: the answer has no score.
        """
        ...

    def close(self) -> None:
        """End all programs and free everything. Nothing is called afterwards."""
        ...
