"""`stretto logs`: the log of a run's kernel, or of one of its workers, as text."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from stretto.records.logs import log_text, open_log, whole_lines
from stretto.records.run_folder import RunFolder

_LOOK_S = 0.3  # a line is seen soon enough for a reader, and a look costs a few file reads


def log_lines(folder: Path, worker: str, *, newest: int | None, follow: bool) -> Iterator[str]:
    """Yield a log's `newest` lines, or all; with `follow`, also new ones until the run has ended."""
    run = RunFolder(folder)
    with open_log(folder, worker) as log:
        yield from map(log_text, deque(whole_lines(log), maxlen=newest))
        while follow:
            run.refresh()
            lives = run.state == "running"  # before the last look at the file
            yield from map(log_text, whole_lines(log))
            if not lives:
                return
            time.sleep(_LOOK_S)
