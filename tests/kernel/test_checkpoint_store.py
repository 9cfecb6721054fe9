"""Checkpoints whose files are in a store: whole or absent, checked, found, downloaded and removed."""

import hashlib
import shutil
from pathlib import Path

import pytest
from tests.kernel.test_checkpoint import newest, state

from stretto.bus.messages.training import LoadCheckpoint, Save
from stretto.component import Context
from stretto.errors import ConfigError, EngineError
from stretto.kernel.durable.checkpoint import (
    checkpoint_name,
    find_checkpoint,
    newest_intact,
    place_of,
    prune,
    writing,
)
from stretto.records.remote_folder import RemoteFolder
from stretto.workers.training.checkpoint_files import folder_to_load, folder_to_save

CONTEXT = Context(run="run-1", name="run", seed=1, worker="trainer-0")


class Stored:
    def __init__(self, folder: Path) -> None:
        self.run = folder / "run"
        self.root = self.run / "checkpoints"
        self.files = folder / "store" / "run-1"
        self.store = RemoteFolder(f"file://{self.files}")

    async def write(self, version: int) -> None:
        """As the kernel and two trainers do it."""
        async with writing(self.root, checkpoint_name(version), state(version), self.store) as draft:
            for name in ("model/weights", "optimizer"):
                message = Save(1, draft.place, version)
                async with folder_to_save(message, CONTEXT, draft.uploaded) as folder:
                    path = Path(folder, name)
                    path.parent.mkdir(exist_ok=True)
                    path.write_text(f"{name} {version}")

    async def load(self, version: int) -> dict[str, str]:
        """Name -> text of the files that a trainer gets."""
        place, manifest = place_of(self.root / checkpoint_name(version))
        async with folder_to_load(LoadCheckpoint(1, place, version, (), manifest), CONTEXT) as folder:
            return {
                str(path.relative_to(folder)): path.read_text()
                for path in Path(folder).rglob("*")
                if path.is_file()
            }

    def remote(self, version: int) -> Path:
        [found] = self.files.glob(f"{checkpoint_name(version)}-*")
        return found

    def names(self) -> list[str]:
        return sorted(path.name.rpartition("-")[0] for path in self.files.iterdir())


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stored:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Stored(tmp_path)


async def test_a_trainer_loads_what_the_trainers_have_saved(stored: Stored) -> None:
    await stored.write(10)
    expected = {"model/weights": "model/weights 10", "optimizer": "optimizer 10"}
    assert (await stored.load(10)).items() >= expected.items()
    names = {path.name for path in (stored.root / "step-000010").iterdir()}
    assert names == {"kernel.json", "manifest.json", "store.json"}
    assert newest(stored.root) == 10


async def test_the_folder_in_the_store_is_a_checkpoint_by_itself(stored: Stored, tmp_path: Path) -> None:
    await stored.write(10)
    shutil.copytree(stored.remote(10), tmp_path / "copy" / "step-000010")
    assert newest(tmp_path / "copy") == 10


async def test_one_without_its_manifest_does_not_count_and_is_removed(stored: Stored) -> None:
    await stored.write(10)

    async def interrupted() -> None:
        async with writing(stored.root, checkpoint_name(20), state(20), stored.store) as draft:
            assert draft.remote is not None
            draft.remote.write("model/weights", b"half")
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        await interrupted()
    assert stored.names() == ["step-000010", "step-000020"]
    await stored.write(30)
    assert stored.names() == ["step-000010", "step-000030"]


async def test_a_damaged_entry_does_not_stop_later_checkpoints(stored: Stored) -> None:
    await stored.write(10)
    (stored.root / "step-000010" / "store.json").write_text("{")
    assert newest_intact(stored.root) is None
    await stored.write(20)
    assert stored.names() == ["step-000020"]
    prune(stored.root, 1, checkpoint_name(20))
    assert [path.name for path in stored.root.iterdir()] == ["step-000020"]


async def test_what_the_store_lacks_is_damage(stored: Stored) -> None:
    for version in (10, 20, 30):
        await stored.write(version)
    (stored.remote(30) / "optimizer").unlink()
    (stored.remote(20) / "manifest.json").unlink()
    assert newest(stored.root) == 10
    with pytest.raises(ConfigError, match=r"step-000030 is damaged: .* has no optimizer"):
        find_checkpoint(stored.run, "30")


async def test_a_store_out_of_reach_is_no_damage(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a run would begin again because of an outage."""
    await stored.write(10)

    def refuse(folder: RemoteFolder, name: str) -> bytes:
        raise OSError(f"{folder.url}: no route to {name}")

    monkeypatch.setattr(RemoteFolder, "read", refuse)
    with pytest.raises(ConfigError, match=r"cannot be read: file://.*: no route to manifest.json"):
        newest_intact(stored.root)


async def test_a_trainer_refuses_files_that_were_changed(stored: Stored) -> None:
    await stored.write(10)
    (stored.remote(10) / "optimizer").write_text("optimizer 11")
    with pytest.raises(
        EngineError, match="optimizer differs from its hash; to continue from the checkpoint b"
    ):
        await stored.load(10)
    (stored.remote(10) / "manifest.json").write_text("{}")
    with pytest.raises(EngineError, match=r"manifest.json is not the one in the run's folder"):
        await stored.load(10)


async def test_pruning_removes_from_the_store(stored: Stored) -> None:
    for version in (10, 20, 30):
        await stored.write(version)
    prune(stored.root, 1, checkpoint_name(30), {10})
    assert stored.names() == ["step-000010", "step-000030"]


async def test_commands_get_a_copy_of_all_files(stored: Stored) -> None:
    await stored.write(10)
    folder = find_checkpoint(stored.run, None)
    assert folder.name == "step-000010"
    assert (folder / "model" / "weights").read_text() == "model/weights 10"
    shutil.rmtree(stored.remote(10) / "model")
    (stored.remote(10) / "model").mkdir()
    (stored.remote(10) / "model" / "weights").write_text("not read again")
    assert (find_checkpoint(stored.run, "10") / "model" / "weights").read_text() == "model/weights 10"


def test_no_file_is_written_outside_of_the_folder(tmp_path: Path) -> None:
    remote = RemoteFolder(f"file://{tmp_path}/store")
    remote.write("in/file", b"text")
    hashes = {"in/../../file": hashlib.sha256(b"text").hexdigest()}
    with pytest.raises(OSError, match="is not the name of a file in a folder"):
        remote.download(hashes, tmp_path / "local" / "folder")
    assert not (tmp_path / "local").exists()
