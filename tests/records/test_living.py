"""The list of living runs: a run is in it while its kernel has its lock."""

import stat
from pathlib import Path

import pytest

from stretto.bus.server import lock_run
from stretto.records.living import listed, living


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "stretto" / "runs"


def test_a_run_is_listed_while_it_lives(tmp_path: Path, home: Path) -> None:
    assert living() == []
    with lock_run(tmp_path / "one" / "bus"), listed(tmp_path / "one"):
        assert living() == [tmp_path / "one"]
        [file] = home.iterdir()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert living() == []
    assert list(home.iterdir()) == []


def test_what_a_killed_kernel_left_is_no_living_run(tmp_path: Path, home: Path) -> None:
    home.mkdir(parents=True)
    (home / "left").write_text(str(tmp_path / "gone"))
    lock_run(tmp_path / "ended" / "bus").close()
    (home / "ended").write_text(str(tmp_path / "ended"))
    assert living() == []
    assert list(home.iterdir()) == []


def test_a_user_without_a_home_that_can_be_written_runs_all_the_same(tmp_path: Path, home: Path) -> None:
    home.parent.parent.write_text("no folder")
    with lock_run(tmp_path / "one" / "bus"), listed(tmp_path / "one"):
        assert living() == []
