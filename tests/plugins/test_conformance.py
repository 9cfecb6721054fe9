"""The torch engine keeps every promise of the conformance suite."""

import pytest

import seeing_engine
from stretto.testing import InferenceConformance
from stretto.testing.tiny_model import TinyModel


class TestTorch(InferenceConformance):
    use, options, seeds, tolerance = "torch", {"slots": 8}, True, 1e-4


@pytest.mark.slow
class TestTorchWithImages(TestTorch):
    """Every prompt of the suite comes after an image."""

    use, plugins = "seeing", (seeing_engine.__file__,)

    @pytest.fixture(scope="class")
    @classmethod
    def models(cls, tmp_path_factory: pytest.TempPathFactory) -> tuple[TinyModel, TinyModel]:
        parent = tmp_path_factory.mktemp("seeing")
        first = seeing_engine.make_seeing_model(parent / "a", seed=0, layers=16)
        return first, seeing_engine.make_seeing_model(parent / "b", seed=1, layers=16)
