"""A run on mock engines: its file, and what its kernel makes of it. `from kernel_setup import make_setup`."""

import json
from pathlib import Path
from typing import Any

from stretto.assembly.assembly import Assembly
from stretto.assembly.compose import compose
from stretto.kernel.setup import RunSetup


def write_run(folder: Path, **values: Any) -> Path:
    """Write the file of a run with these values, over one row of a dataset, and return it."""
    (folder / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    document = {
        "name": "test",
        "algorithm": {"use": "grpo", "group_size": 2},
        "training": "mock",
        "inference": "mock",
        "reward": "exact",
        "dataset": {"use": "jsonl", "path": str(folder / "rows.jsonl")},
    }
    file = folder / "run.yaml"
    file.write_text(json.dumps({**document, **values}))
    return file


def make_setup(folder: Path, run: str = "test", **values: Any) -> RunSetup:
    return RunSetup(Assembly(compose(write_run(folder, **values)), folder=folder, run=run), resumed=None)
