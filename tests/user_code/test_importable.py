"""Files that a run file names are loaded once, and whole."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

from stretto.user_code.importable import load_module


def test_threads_get_a_file_only_when_it_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "slow.py"
    file.write_text("import time\ntime.sleep(0.2)\nscore = 1\n")
    together = Barrier(4)

    def load(_: int) -> int:
        together.wait()
        return load_module(str(file)).score

    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(load, range(4))] == [1] * 4
