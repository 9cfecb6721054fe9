"""Files that a run file names are loaded once, and whole."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

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


POOL = """
import multiprocessing, pickle
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
import beside

@dataclass
class Value:
    number: int

def inner(text):
    return Value(beside.length(text))

def score(prompt, completion):
    context = multiprocessing.get_context(METHOD)
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pickle.loads(pickle.dumps(pool.submit(inner, completion).result())).number
"""


@pytest.mark.parametrize(
    ("files", "reference"),
    [
        ({"pool.py": POOL.replace("METHOD", "'fork'"), "beside.py": "length = len"}, "pool.py:score"),
        ({"my.pool.py": POOL.replace("METHOD", "'spawn'"), "beside.py": "length = len"}, "my.pool.py:score"),
        ({"rewards/__init__.py": "", "rewards/deep/__init__.py": "", "rewards/util.py": "length = len",
          "rewards/deep/main.py": "from ..util import length\ndef score(_, text): return length(text)"},
         "rewards/deep/main.py:score"),
    ],
    ids=["fork", "spawn", "package"],
)  # fmt: skip
def test_a_file_is_a_module_like_any_other(files: dict[str, str], reference: str, tmp_path: Path) -> None:
    """From any folder; also in the processes of a pool, which get its functions by their names."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    main = tmp_path / "elsewhere" / "main.py"
    main.parent.mkdir()
    main.write_text(
        "from stretto.user_code.importable import load_importable\n"
        f"if __name__ == '__main__': print(load_importable({str(tmp_path / reference)!r})('', 'four'))\n"
    )
    assert subprocess.check_output([sys.executable, main], cwd=main.parent, text=True) == "4\n"
