"""The built-in trackers keep the promises of trackers; tests/plugins reads back what they have sent."""

import pytest

from stretto.testing import TrackerConformance


class TestTensorBoard(TrackerConformance):
    use = "tensorboard"


@pytest.mark.slow
class TestWandb(TrackerConformance):
    use = "wandb"
    options = {"mode": "offline"}


@pytest.fixture
def elsewhere(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores of libraries that keep their data outside of a run."""
    folder = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(folder / "store"))
    monkeypatch.setenv("TRACKIO_DIR", str(folder / "trackio"))


@pytest.mark.slow
@pytest.mark.usefixtures("elsewhere")
class TestMlflow(TrackerConformance):
    use = "mlflow"


@pytest.mark.slow
@pytest.mark.usefixtures("elsewhere")
class TestTrackio(TrackerConformance):
    use = "trackio"
