"""The reason of a run that ended on a full disk."""

from pathlib import Path

import pytest

from stretto.runs.life import _full_disk  # pyright: ignore[reportPrivateUsage]


@pytest.mark.skipif(not Path("/dev/shm").is_mount(), reason="needs a second disk")
def test_the_disk_of_the_file_that_the_error_names_is_named(tmp_path: Path) -> None:
    told = _full_disk(tmp_path, "cannot write /dev/shm/weights-1/model.safetensors: No space left on device")
    assert told.startswith("; the run writes to the disk at /dev/shm, which has ")


def test_without_a_file_it_is_the_disk_of_the_runs_folder_even_if_that_is_gone(tmp_path: Path) -> None:
    disk = next(path for path in tmp_path.parents if path.is_mount())
    told = _full_disk(tmp_path / "gone", "the store: insufficient resources (1/2)")
    assert told.startswith(f"; the run writes to the disk at {disk}, which has ")
    assert _full_disk(tmp_path / "gone", "another reason") == ""
