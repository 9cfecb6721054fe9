"""Fixtures of the plugins' tests."""

import pytest

from torch_engine import Folders


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("models"))
