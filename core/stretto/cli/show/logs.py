"""`stretto logs`: the log of a run's kernel, or of one of its workers, as text."""

import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from stretto.records.logs import log_text, open_log, whole_lines
from stretto.records.run_folder import RunFolder

_LOOK_S = 0.3  # between two looks: soon enough for a reader, and a look costs a few file reads


def log_lines(folder: Path, worker: str, *, newest: int | None, follow: bool) -> Iterator[str]:
    """Yield the last `newest` lines of a log, or all; if `follow`, also new lines until the run has ended."""
    run = RunFolder(folder)
    with open_log(folder, worker) as log:
        yield from map(log_text, deque(whole_lines(log), maxlen=newest))
        while follow:
            run.refresh()
            is_running = run.state == "running"  # read before the file, so that the last look misses no line
            yield from map(log_text, whole_lines(log))
            if not is_running:
                return
            time.sleep(_LOOK_S)
