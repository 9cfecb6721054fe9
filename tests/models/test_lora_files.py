"""Adapters that travel alone: what is put together beside an engine is what the trainer would have merged."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from fixture_types import Models, Start
from stretto.algorithm import Loss
from stretto.errors import WeightsError
from stretto.models.digest import digest_of, tensor_hash
from stretto.models.files import tensors_of_model
from stretto.models.lora_files import merge_adapter_files
from stretto.models.version_files import FolderPublisher, FolderUpdate, open_version
from stretto.training.config import LoraConfig
from stretto.training.engine import HFTraining
from training_engines import loaded_engine, push_up, random_batch


def engine_of(model: Path, send: Literal["adapter", "merged"], *targets: str, **options: Any) -> HFTraining:
    lora = LoraConfig(rank=4, alpha=8, targets=targets or ("q_proj", "down_proj"), send=send)
    return loaded_engine(model, lr=1e-2, lora=lora, **options)


def trained(engine: HFTraining) -> dict[str, Tensor]:
    """What an engine publishes after two steps."""
    for _ in range(2):
        engine.train(random_batch(1), Loss(push_up, "token"), temperature=1.0)
    return {name: tensor.clone() for name, tensor in engine.weights()}


def received(folder: Path, tensors: Mapping[str, Tensor]) -> FolderUpdate:
    note = FolderPublisher(folder, 3, 2.0).publish(7, tensors.items())
    return open_version(note, Path(note.address))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("architecture", "targets"), [("llama", ()), ("gpt2", ("c_attn", "c_proj"))])
def test_the_whole_is_what_the_trainer_merges(
    tiny_models: Models, tmp_path: Path, architecture: str, targets: tuple[str, ...], dtype: str
) -> None:
    model = tiny_models(architecture)
    alone = trained(engine_of(model, "adapter", *targets, dtype=dtype))
    merged = trained(engine_of(model, "merged", *targets, dtype=dtype))
    initial = load_file(model / "model.safetensors")
    assert not alone.keys() & merged.keys()
    assert sum(tensor.nbytes for tensor in alone.values()) < sum(each.nbytes for each in merged.values()) / 3

    whole = merge_adapter_files(received(tmp_path / "versions", alone), model, tmp_path / "whole")
    tensors = whole.tensors()
    assert whole.hashes() == {name: tensor_hash(tensor) for name, tensor in tensors.items()}
    assert whole.note.version == 7
    assert whole.note.digest == digest_of(whole.hashes().items())
    assert tensors.keys() == initial.keys()
    adapted = {name for name in merged if not torch.equal(merged[name].float(), initial[name].float())}
    if dtype == "float32":
        assert {name.split(".")[-2] for name in adapted} == set(targets or ("q_proj", "down_proj"))
    for name, tensor in merged.items():
        if f"{name.removesuffix('.weight')}.lora_A.weight" in alone:
            assert tensors[name].dtype == tensor.dtype
            rtol, atol = (1e-6, 1e-7) if dtype == "float32" else (2**-7, 1e-3)
            torch.testing.assert_close(tensors[name], tensor, rtol=rtol, atol=atol)
        else:
            assert torch.equal(tensors[name], initial[name])
    whole.close()
    assert not (tmp_path / "whole").exists()


def test_a_model_in_several_files_is_put_together_from_all(tiny_models: Models, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_models("llama"), dtype=torch.float32)
    model.save_pretrained(tmp_path / "split", max_shard_size="40KB")
    save_file({"not.of": torch.ones(1)}, tmp_path / "split" / "consolidated.safetensors")  # as Mistral's have
    assert len(list((tmp_path / "split").glob("model-*.safetensors"))) > 2
    update = received(tmp_path / "versions", trained(engine_of(tiny_models("llama"), "adapter")))
    one = merge_adapter_files(update, tiny_models("llama"), tmp_path / "one").tensors()
    several = merge_adapter_files(update, tmp_path / "split", tmp_path / "several").tensors()
    assert one.keys() == several.keys()
    assert all(torch.equal(tensor, several[name]) for name, tensor in one.items())


@pytest.mark.parametrize(
    ("name", "tensor", "error"),
    [
        ("model.layers.0.mlp.up_proj.lora_A.weight", torch.ones(4, 32), "the other one is missing"),
        ("model.layers.9.mlp.up_proj.weight", torch.ones(4, 32), "the other one is missing"),
        ("model.layers.0.self_attn.q_proj.lora_A.weight", torch.ones(4, 3), "its factors have"),
        (
            "model.layers.0.self_attn.q_proj.lora_A.weight",
            torch.ones(4, 64).double(),
            "is F64; expected F32, F16, BF16",
        ),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(
    tiny_models: Models, tmp_path: Path, name: str, tensor: Tensor, error: str
) -> None:
    alone = trained(engine_of(tiny_models("llama"), "adapter"))
    update = received(tmp_path / "versions", {**alone, name: tensor})
    with pytest.raises(WeightsError, match=rf"version 7 is an adapter, and cannot be merged into .*{error}"):
        merge_adapter_files(update, tiny_models("llama"), tmp_path / "whole")
    assert not (tmp_path / "whole").exists()


@pytest.mark.parametrize(
    ("lost", "fault"),
    [
        ("versions/v00000007/model-00000.safetensors", "version 7 cannot be read: files in .* were removed"),
        ("versions", "version 7 cannot be read: files in .* were removed"),
        ("later", "No such file or directory: '.*versions/v00000007/model-00000.safetensors'$"),
        ("target", "cannot be merged into .*No such file or directory: '.*whole'$"),
        ("model", "cannot be merged into .*has no tensor .*; set training.lora.send: merged$"),
    ],
)
def test_only_a_fault_of_the_model_has_the_cure_that_the_trainer_merges(
    tiny_models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str, fault: str
) -> None:
    model, whole = tmp_path / "model", tmp_path / ("none" if lost == "target" else "") / "whole"
    shutil.copytree(tiny_models("llama"), model)
    update = received(tmp_path / "versions", trained(engine_of(model, "adapter")))

    def find_model(path: str) -> Any:
        shutil.rmtree(tmp_path / "versions")  # between the look at the adapter and its use
        return tensors_of_model(path)

    if lost == "later":
        monkeypatch.setattr("stretto.models.lora_files.tensors_of_model", find_model)
    elif lost != "target":
        path = tmp_path / lost
        path.unlink() if path.is_file() else shutil.rmtree(path)
    with pytest.raises(WeightsError, match=fault):
        merge_adapter_files(update, model, whole)


def test_a_model_whose_files_name_their_tensors_otherwise(tiny_models: Models, tmp_path: Path) -> None:
    """As gpt2's on the hub do, and those of most models that read images."""
    shutil.copytree(tiny_models("gpt2"), tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    save_file({name.removeprefix("transformer."): each for name, each in load_file(file).items()}, file)
    own = load_file(file)
    alone = trained(engine_of(tmp_path / "model", "adapter", "c_attn"))
    whole = merge_adapter_files(
        received(tmp_path / "versions", alone), tmp_path / "model", tmp_path / "whole"
    )
    changed = [name for name, tensor in whole.tensors().items() if not torch.equal(tensor, own[name])]
    assert changed == [name for name in sorted(own) if name.endswith("c_attn.weight")]
    merged = trained(engine_of(tmp_path / "model", "merged", "c_attn"))
    assert merged.keys() == own.keys()
    torch.testing.assert_close(whole.tensors()["h.0.attn.c_attn.weight"], merged["h.0.attn.c_attn.weight"])


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["file", "bus"])
def test_a_run_sends_the_adapter_alone(start: Start, tiny_models: Models, weights: str) -> None:
    run = start(
        f"model={tiny_models('qwen2')}",
        *("training=torch", "training.lr=1e-2", "training.lora={rank: 4, alpha: 8}", "steps=3"),
        *("inference=torch", "inference.on_swap=recompute", "sampling.max_tokens=16", f"weights={weights}"),
    )
    assert run.assert_completed(3)["canary"]["max"] < 1e-4
    assert max(line["mismatch_max"] for line in run.metrics() if "mismatch_max" in line) < 1e-4


def test_an_adapter_of_another_model_than_the_engines_is_refused(
    refusals: Callable[..., list[str]], tiny_models: Models, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_models("qwen2"), other)
    model = f"model={tiny_models('qwen2')}"
    faults = refusals(model, "training=torch", "training.lora={}", f"models.actor.path={other}")
    assert "training.lora.send" in "\n".join(faults)
