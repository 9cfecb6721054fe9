"""Two fsdp2 ranks that share no folder, killed and resumed from a store."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.conftest import Start

pytestmark = pytest.mark.cluster

HIDDEN = Path(__file__).parent.parent / "helpers" / "hidden_folder.py"


def test_ranks_without_a_folder_go_on_from_the_store(
    start: Start, tmp_path: Path, tiny_models: Callable[[str], Path]
) -> None:
    run = start(
        *(f"plugins=[{HIDDEN}]", "launcher.use=hidden", "weights=bus", f"model={tiny_models('llama')}"),
        "training={use: fsdp2, processes: 2, threads: 1, lr: 0.001}",
        "inference={use: torch, threads: 1, slots: 16}",
        *("checkpoint.every=2", f"checkpoint.store=file://{tmp_path}/store"),
        *("sampling.max_tokens=16", "steps=400"),
    )
    run.until_step(5)
    run.kill()
    again = start("steps=8", resume=run)
    assert again.end() == 0, again.text()
    assert again.assert_balanced()["version"] == 8
    assert not again.summary()["problems"]
    again.assert_audit_is_clean()
    [folder] = (tmp_path / "store").iterdir()
    newest = max(folder.iterdir(), key=lambda path: path.name)
    names = set(json.loads((newest / "manifest.json").read_text()))
    assert {"model/model.safetensors", "optimizer.safetensors", "random.safetensors"} <= names
    uploads = [(run.folder / "logs" / f"trainer-{rank}.out").read_text() for rank in (0, 1)]
    assert "model/model.safetensors" in uploads[0]
    assert "optimizer.safetensors" not in uploads[0]
    assert "optimizer.safetensors" in uploads[1]
    assert "model/model.safetensors" not in uploads[1]
