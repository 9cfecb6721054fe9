"""The torch engine keeps every promise of the conformance suite."""

from __future__ import annotations

import pytest

import seeing_engine
from stretto.testing import EngineUnderTest, InferenceConformance
from stretto.testing.tiny_model import TinyModel


class TestTorch(InferenceConformance):
    engine = EngineUnderTest("torch", {"slots": 8}, seeds=True, tolerance=1e-4)


@pytest.mark.slow
class TestTorchWithImages(InferenceConformance):
    """Every prompt of the suite comes after an image."""

    engine = EngineUnderTest(
        "seeing", {"slots": 8}, plugins=(seeing_engine.__file__,), seeds=True, tolerance=1e-4
    )

    @pytest.fixture(scope="class")
    @classmethod
    def models(cls, tmp_path_factory: pytest.TempPathFactory) -> tuple[TinyModel, TinyModel]:
        parent = tmp_path_factory.mktemp("seeing")
        first = seeing_engine.make_seeing_model(parent / "a", seed=0, layers=16)
        return first, seeing_engine.make_seeing_model(parent / "b", seed=1, layers=16)
