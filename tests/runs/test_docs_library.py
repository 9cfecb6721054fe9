"""The Python blocks of docs/library.md run, one after the other, as one program."""

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
    page = (ROOT / "docs" / "library.md").read_text()
    parts = re.split(r"^```(python)?\n", page, flags=re.MULTILINE)
    blocks = [
        part
        for before, fence, part in zip(parts, parts[1:], parts[2:], strict=False)
        if fence == "python" and _NOT_RUN not in before[-200:]
    ]
    assert len(blocks) == 11
    monkeypatch.chdir(tmp_path)
    with copy_quickstart(Path("quickstart")):
        pass
    command = [sys.executable, "-c", "\n".join(blocks)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "[info " not in line]  # the engine's log
    alone, answers, lines = lines[:7], lines[7], lines[8:]
    relative, clipped = re.findall(r"\[.*?\]", alone[0])
    assert [round(float(each), 3) for each in relative[1:-1].split(",")] == [0.707, -0.707]
    assert clipped == "[False, True, False, False, False]"
    # exp(-0.5 + 0.7) = 1.22, cut to 1.1; exp(0) = 1; exp(-2.5 + 2.3) = 0.8187. A third of the KL's rate.
    assert alone[1:] == [
        "tensor([1.1000, 1.0000, 0.8187]) 0.333",
        "[3, 2]",
        "[0 2 1] every sampled token is one of its kept ids",
        "8 17 <|im_end|> shown",
        "38 tensors",
        "[] True",
    ]
    assert re.fullmatch(r"answers \['\d.*'(, '\d.*'){3}\]", answers)
    assert lines[0].startswith("completed [")
    assert "'trained': 16" in lines[1]
    unknown = "override training.learning_rate: unknown key 'learning_rate'; did you mean 'training.lr'?"
    assert lines[2].startswith(unknown)
    assert lines[3] == "training.learning_rate"
    firsts = [line.split()[0] for line in lines[4:]]
    assert firsts[:2] == ["1", "2"]
    assert lines[6].startswith("completed [")
    assert firsts[3:5] == ["1", "2"]
    assert re.fullmatch(r"\d+/\d+", firsts[5]), "the slowest attempt, whichever it was"
