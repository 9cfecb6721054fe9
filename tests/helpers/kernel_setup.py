"""A run on mock engines as its kernel sets it up: `from kernel_setup import make_setup`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stretto.assembly.assembly import Assembly
from stretto.assembly.compose import compose
from stretto.kernel.setup import RunSetup


def make_setup(folder: Path, run: str = "test", **values: Any) -> RunSetup:
    """Return the set-up of a run with this id and these values, over one row of a dataset."""
    (folder / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    document = {
        "name": "test",
        "algorithm": {"use": "grpo", "group_size": 2},
        "training": "mock",
        "inference": "mock",
        "reward": "exact",
        "dataset": {"use": "jsonl", "path": str(folder / "rows.jsonl")},
    }
    (folder / "run.yaml").write_text(json.dumps({**document, **values}))
    return RunSetup(Assembly(compose(folder / "run.yaml"), folder=folder, run=run), resumed=None)
