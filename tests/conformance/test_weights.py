"""The built-in weight transports keep the promises of weight transports."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from patience import patience
from stretto.testing import WeightsConformance
from stretto.weights import WeightsNote


class TestFile(WeightsConformance):
    use = "file"


class TestFileInTheRunsFolder(WeightsConformance):
    use = "file"
    options = {"shard_gb": 1e-8}  # a file for each tensor

    @pytest.fixture(scope="class")
    @classmethod
    def section(cls, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
        return {"use": cls.use, "folder": str(tmp_path_factory.mktemp("weights")), **cls.options}

    @classmethod
    def stored(cls, note: WeightsNote, section: Mapping[str, Any]) -> list[Path]:
        return sorted(Path(section["folder"]).rglob("*.safetensors"))


class TestFileWithDeltas(TestFileInTheRunsFolder):
    options = {"deltas": True, "shard_gb": 1e-8}


class TestBusWithWholeFiles(TestFileInTheRunsFolder):
    use = "bus"
    options = {"deltas": False}


class TestBus(TestFileInTheRunsFolder):
    use = "bus"
    options = {"piece_kb": 4}


class TestCollective(TestFileInTheRunsFolder):
    use = "collective"
    options = {"bucket_mb": 1, "deadline_s": patience(20)}
