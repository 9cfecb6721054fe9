"""The dataset `hf` on what the `datasets` library writes itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest

from stretto import Context
from stretto.errors import ConfigError
from stretto_hf import HFConfig, HFDataset

ROWS = [{"question": f"{n}+1=", "answer": str(n + 1), "n": n} for n in range(20)]


def opened(path: Path, **options: Any) -> HFDataset:
    config = HFConfig(use="hf", path=str(path), prompt_column="question", **options)
    return HFDataset(config, Context(run="r", name="n", seed=1))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder of `save_to_disk`, one of parquet files, and one with splits."""
    table = datasets.Dataset.from_list(ROWS)
    table.save_to_disk(tmp_path / "disk")
    datasets.DatasetDict({"train": table, "test": table.select([3, 4])}).save_to_disk(tmp_path / "splits")
    (tmp_path / "files").mkdir()
    table.to_parquet(tmp_path / "files" / "train-00000.parquet")
    return tmp_path


@pytest.mark.parametrize("folder", ["disk", "files", "splits"])
def test_rows_come_from_whatever_the_library_reads(saved: Path, folder: str) -> None:
    dataset = opened(saved / folder)
    assert len(dataset) == 20
    assert dataset[7] == {"prompt": "7+1=", "answer": "8", "n": 7}
    assert dataset.fingerprint == opened(saved / "disk").fingerprint


def test_splits_limits_and_streams(saved: Path) -> None:
    assert [row["n"] for row in opened(saved / "splits", split="test")] == [3, 4]  # type: ignore[attr-defined]
    assert len(opened(saved / "disk", limit=5)) == 5
    streamed = opened(saved / "files", streaming=True, limit=5)
    assert (len(streamed), streamed[4]["prompt"]) == (5, "4+1=")
    assert streamed.fingerprint == opened(saved / "files", limit=5).fingerprint
    with pytest.raises(ConfigError, match="no split 'dev'; it has train, test"):
        opened(saved / "splits", split="dev")


def test_what_cannot_be_loaded_is_one_clear_error(saved: Path) -> None:
    with pytest.raises(ConfigError, match="cannot load the dataset"):
        opened(saved / "nowhere")
    config = HFConfig(use="hf", path=str(saved / "disk"))
    with pytest.raises(ConfigError, match="no column 'prompt'; its columns: question, answer, n"):
        HFDataset(config, Context(run="r", name="n", seed=1))


def test_it_imports_no_torch(saved: Path) -> None:
    code = (
        "import sys; from stretto import Context; from stretto_hf import HFConfig, HFDataset;"
        f"HFDataset(HFConfig(use='hf', path={str(saved / 'disk')!r}, prompt_column='question'),"
        "Context(run='r', name='n', seed=1))[0]; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
