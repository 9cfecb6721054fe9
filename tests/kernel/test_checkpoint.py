"""Checkpoint folders: whole or absent, found and pruned."""

from pathlib import Path

import pytest

from stretto.errors import ConfigError
from stretto.kernel.durable import checkpoint
from stretto.kernel.schedule.scheduler import Snapshot
from stretto.runs.life import newest_checkpoint


def state(version: int, lowest: int = 1) -> checkpoint.KernelState:
    snapshot = Snapshot(version)
    return checkpoint.KernelState(
        *(version, 0, "digest", snapshot, 9, lowest, "layout", 1, 0, 0, 0.0), lowest_event=10 * lowest
    )


def newest(root: Path) -> int | None:
    found = checkpoint.newest_intact(root)
    return found and found[1].version


async def write(root: Path, version: int, lowest: int = 1) -> None:
    async with checkpoint.writing(root, checkpoint.checkpoint_name(version), state(version, lowest)) as draft:
        (draft.folder / "model").mkdir()
        (draft.folder / "model" / "weights").write_text(str(version))


async def test_checkpoints_are_whole_or_not_there(tmp_path: Path) -> None:
    await write(tmp_path, 10)

    async def interrupted() -> None:
        async with checkpoint.writing(tmp_path, checkpoint.checkpoint_name(20), state(20)) as draft:
            (draft.folder / "half").write_text("")
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        await interrupted()
    assert [path.name for path in tmp_path.iterdir()] == ["step-000010"]
    assert newest(tmp_path) == 10


async def test_the_newest_intact_checkpoint_is_found(tmp_path: Path) -> None:
    for version in (10, 20, 30):
        await write(tmp_path, version)
    (tmp_path / "step-000030" / "model" / "weights").write_text("31")
    (tmp_path / "step-000020" / "manifest.json").unlink()
    assert newest(tmp_path) == 10
    assert newest(tmp_path / "nowhere") is None


async def test_a_version_with_changed_values_is_found_by_its_number(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    for version, values in ((2, None), (4, 2), (4, 10)):
        async with checkpoint.writing(root, checkpoint.checkpoint_name(version, values), state(version)):
            pass
    assert checkpoint.find_checkpoint(tmp_path, "4").name == "step-000004-values-10"
    assert checkpoint.find_checkpoint(tmp_path, "2").name == "step-000002"


async def test_a_checkpoint_of_another_format_is_refused_in_one_sentence(tmp_path: Path) -> None:
    await write(tmp_path / "checkpoints", 10)
    with pytest.raises(ConfigError, match=r"step-000010 was written by a stretto .*resume the run with that"):
        newest_checkpoint(tmp_path)


async def test_pruning_keeps_the_newest_and_says_what_they_need(tmp_path: Path) -> None:
    for version, lowest in ((10, 5), (20, 17), (30, 25)):
        await write(tmp_path, version, lowest)
    needed = 17, 170  # nobody continues from one that is spared
    assert checkpoint.prune(tmp_path, 2, checkpoint.checkpoint_name(30), {10}) == needed
    assert (tmp_path / "step-000010").exists()
    assert checkpoint.prune(tmp_path, 2, checkpoint.checkpoint_name(30)) == needed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000020", "step-000030"]
