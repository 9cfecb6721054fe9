"""The built-in datasets keep the promises of datasets."""

import json
from collections.abc import Mapping
from typing import Any

import datasets
import pytest

from stretto.testing import DatasetConformance

ROWS = [{"question": f"{n}+1=", "answer": str(n + 1), "n": n} for n in range(20)]


class TestJsonLines(DatasetConformance):
    use = "jsonl"

    @pytest.fixture(scope="class")
    @classmethod
    def section(cls, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
        folder = tmp_path_factory.mktemp("rows")
        for name, rows in (("rows", ROWS), ("other", [*ROWS[:-1], {**ROWS[-1], "answer": "?"}])):
            (folder / f"{name}.jsonl").write_text("\n\n".join(json.dumps(row) for row in rows))
        return {"use": cls.use, "path": f"{folder}/rows.jsonl", "prompt_column": "question"}

    @pytest.fixture(scope="class")
    @classmethod
    def changed_section(cls, section: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**section, "path": section["path"].replace("rows.jsonl", "other.jsonl")}


class TestHuggingFace(DatasetConformance):
    use = "hf"
    changed = {"split": "train[1:]"}

    @pytest.fixture(scope="class")
    @classmethod
    def section(cls, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
        folder = tmp_path_factory.mktemp("rows")
        datasets.Dataset.from_list(ROWS).to_parquet(folder / "train-00000.parquet")
        return {"use": cls.use, "path": str(folder), "prompt_template": "{n}: {question}", "chat": True}


@pytest.mark.slow
class TestReasoningGym(DatasetConformance):
    use = "reasoning_gym"
    options = {"tasks": [{"task": "word_ladder"}, {"task": "gcd", "weight": 2}], "size": 12}
    changed = {"seed": 2}
