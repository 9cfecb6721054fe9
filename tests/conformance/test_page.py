"""docs/testing.md is true: all its tests pass."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
TAPES = Path(__file__).parents[1] / "simulation" / "tapes"


@pytest.mark.slow
def test_every_test_of_the_page_passes(tmp_path: Path) -> None:
    page = (DOCS / "testing.md").read_text()
    (tmp_path / "test_page.py").write_text("\n\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)))
    plugins = (DOCS / "plugins.md").read_text()
    reward = re.findall(r"```python\n(# my_reward\.py\n.*?)```", plugins, re.DOTALL)
    (tmp_path / "my_reward.py").write_text(reward[0])
    for name, last in (("rows", 3), ("other", 4)):
        rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(last)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tape-7.json").write_bytes((TAPES / "r3-a-signal-between-two-kernels.json").read_bytes())
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "test_page.py"]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
