"""The Python blocks of docs/python.md run, one after the other, as one program."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from stretto.cli.start.quickstart import copy_quickstart

ROOT = Path(__file__).parents[2]
_NOT_RUN = "<!-- not run: "


@pytest.mark.slow
def test_the_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "python.md").read_text()
    parts = re.split(r"^```(python)?\n", page, flags=re.MULTILINE)
    blocks = [
        part
        for before, fence, part in zip(parts, parts[1:], parts[2:], strict=False)
        if fence == "python" and _NOT_RUN not in before[-200:]
    ]
    assert len(blocks) == 6
    monkeypatch.chdir(tmp_path)
    with copy_quickstart(Path("quickstart")):
        pass
    command = [sys.executable, "-c", "\n".join(blocks)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("completed [")
    assert "'trained': 16" in lines[1]
    unknown = "override training.learning_rate: unknown key 'learning_rate'; did you mean 'training.lr'?"
    assert lines[2].startswith(unknown)
    assert lines[3] == "training.learning_rate"
    assert lines[4].startswith("completed [")
    firsts = [line.split()[0] for line in lines[5:]]
    assert re.fullmatch(r"\d+/\d+", firsts.pop(2)), "the slowest attempt, whichever it was"
    assert firsts == ["1", "2", "1", "2"]
