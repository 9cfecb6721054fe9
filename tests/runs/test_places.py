"""Runs in folders whose names have what names of folders may have."""

import json
import os
from pathlib import Path

import pytest

from commands import called, stretto
from kernel_setup import write_run

NAME = 'Größe 数据 it\'s "a" $HOME #b {c} \n\t\\ %s ;*[1] -d ~e a:b'


def fill(folder: Path) -> Path:
    for name in ("home", "tmp"):
        (folder / name).mkdir(parents=True)
    (folder / "rew.py").write_text("def score(prompt, completion): return float(len(completion) % 2)\n")
    dataset = {"use": "jsonl", "path": "rows.jsonl"}
    reward = {"use": "function", "function": "rew.py:score"}
    sections = {"dataset": dataset, "reward": reward, "sampling": {"max_tokens": 8}}
    write_run(folder, **sections, queue={"batch_size": 2}, steps=2, out="out")
    rows = (json.dumps({"prompt": f"{row}+1=", "answer": str(row + 1)}) for row in range(8))
    (folder / "rows.jsonl").write_text("\n".join(rows))
    return folder


@pytest.mark.slow
def test_a_run_goes_on_anywhere(tmp_path: Path) -> None:
    """Also where the home folder and that of temporary files have such names."""
    folder = fill(tmp_path / NAME)
    env = {**os.environ, "HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp")}
    for command in (["check", "run.yaml"], ["run", "run.yaml"], ["audit", "out"], ["status", "out"]):
        done = stretto(*command, cwd=folder, env=env)
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_name_that_no_text_has_is_refused(tmp_path: Path) -> None:
    folder = fill(tmp_path / os.fsdecode(b"a\xffb"))
    done = called("check", "run.yaml", cwd=folder)
    assert done.returncode == 2
    assert "is not UTF-8: rename the file or folder" in done.stderr
