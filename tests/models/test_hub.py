"""Models of the hub are downloaded before a run starts, and the user is told."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from stretto.models.hub import download

SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
INDEX = json.dumps({"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}})


class Hub:
    """What the hub has, and what this machine has of it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, int]) -> None:
        self._folder, self._files = folder, files
        self.asked = 0
        self.downloaded: list[str] = []
        self.said: list[str] = []
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: self)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self._download)
        monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", self._cached)

    def model_info(self, model: str, **options: Any) -> Any:
        self.asked += 1
        if not self._files:
            raise OSError("no route to huggingface.co")
        return SimpleNamespace(
            siblings=[SimpleNamespace(rfilename=k, size=v) for k, v in self._files.items()]
        )

    def download(self) -> None:
        download("org/name", lambda level, text: self.said.append(f"{level}: {text}"))

    def _download(self, model: str, *, allow_patterns: list[str]) -> None:
        self.downloaded = sorted(allow_patterns)

    def _cached(self, model: str, name: str) -> str | None:
        return str(self._folder / name) if (self._folder / name).exists() else None


def test_only_what_runs_load_is_downloaded_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = dict.fromkeys([*SHARDS, "original/consolidated.safetensors", "pytorch_model.bin"], 10**9)
    hub = Hub(tmp_path, monkeypatch, files | {"config.json": 10, "tokenizer.model": 10, "README.md": 10})
    hub.download()
    assert hub.downloaded == ["config.json", *SHARDS, "tokenizer.model"]
    [text] = hub.said
    assert text.startswith("note: downloading org/name from the hub: 2.00 GB, into ")


def test_complete_models_ask_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(tmp_path, monkeypatch, {})
    (tmp_path / "model.safetensors.index.json").write_text(INDEX)
    (tmp_path / SHARDS[0]).touch()
    hub.download()  # one of two: the last download was interrupted
    assert hub.asked == 1
    [text] = hub.said
    assert text.startswith("warning: org/name is not downloaded yet")
    assert text.endswith("no route to huggingface.co")
    (tmp_path / SHARDS[1]).touch()
    hub.download()
    assert (hub.asked, len(hub.said)) == (1, 1)
