"""What the tests of models share."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from vision_models import ARCHITECTURES, make_vision_model


@pytest.fixture(scope="session")
def vision_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`vision_models("llava")`: folder of a random vision-language model with tokenizer and processor."""

    @cache
    def folder(architecture: str) -> Path:
        make_vision_model(architecture, made := tmp_path_factory.mktemp(architecture))
        return made

    return folder


@pytest.fixture(params=ARCHITECTURES)
def vision_folder(vision_models: Callable[[str], Path], request: pytest.FixtureRequest) -> Path:
    """The folder of such a model; a test runs with each architecture."""
    return vision_models(request.param)
