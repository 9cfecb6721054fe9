"""`state: host`: float32 parameters and the optimizer on the host give the bits of `state: device`."""

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fixture_types import Models
from stretto.algorithm import Loss
from stretto.training.config import LoraConfig
from stretto.training.engine import HFTraining
from training_engines import batch_of, loaded_engine, off, squared, step_of

ADAPTER = LoraConfig(rank=4, targets=("q_proj", "down_proj"))
# The norm is above the limit, and each step has four micro-batches.
OPTIONS: dict[str, Any] = {"lr": 1e-3, "clip_norm": 1e-2, "micro_batch_tokens": 24, "weight_decay": 0.1}
LENGTHS, LOSS = [6, 13, 20, 9, 17], Loss(squared, "token")


def steps(engine: HFTraining, *seeds: int) -> list[dict[str, float]]:
    return [dict(engine.train(batch_of(LENGTHS, seed), LOSS, temperature=0.7)) for seed in seeds]


def assert_equal_bits(engine: HFTraining, other: HFTraining, folder: Path) -> None:
    """In what they publish, and in their checkpoints."""
    tensors: list[dict[str, Tensor]] = []
    for name, each in (("one", engine), ("other", other)):
        each.save(folder / name)
        files = sorted((folder / name).rglob("*.safetensors"))
        in_files = {f"{file.stem}:{key}": value for file in files for key, value in load_file(file).items()}
        tensors.append({**dict(each.weights()), **in_files})
    assert tensors[0].keys() == tensors[1].keys()
    for name, value in tensors[0].items():
        assert value.dtype == tensors[1][name].dtype, name
        assert torch.equal(value, tensors[1][name]), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("qwen2", {"gradient_checkpointing": True}),
        ("qwen2", {"head": "value"}),
        ("qwen2", {"lora": ADAPTER}),
        ("llama", {}),  # its head is a matrix of its own
        (
            "gpt2",
            {"lora": LoraConfig(rank=4, targets=("c_attn",), send="merged"), "gradient_checkpointing": True},
        ),
    ],
)
def test_steps_have_the_bits_of_the_device_path(
    tiny_models: Models, architecture: str, changes: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    """In bfloat16 too: both compute with linear weights in it, and sum gradients in float32."""
    options: dict[str, Any] = {**OPTIONS, **changes, "dtype": dtype}
    host, device = (loaded_engine(tiny_models(architecture), state=s, **options) for s in ("host", "device"))
    found, expected = steps(host, 0, 1, 2), steps(device, 0, 1, 2)
    assert found == expected
    assert all(step["grad_norm"] > OPTIONS["clip_norm"] for step in expected)
    assert torch.equal(*(engine.forward(batch_of([9, 12]), temperature=1.0) for engine in (host, device)))
    assert_equal_bits(host, device, tmp_path)
    inner: Any = host
    is_low = [each.dtype == torch.bfloat16 for each in inner._model.parameters() if each.requires_grad]
    assert (any(is_low), all(is_low)) == (dtype == "bfloat16", dtype == "bfloat16" and "lora" in changes)


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
def test_a_checkpoint_goes_on_with_either_value(tiny_models: Models, adapters: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {**OPTIONS, "dtype": "bfloat16", "lora": ADAPTER if adapters else None}
    host, device, never = (
        loaded_engine(tiny_models("qwen2"), state=state, **options) for state in ("host", "device", "device")
    )
    for engine, folder in ((host, tmp_path / "host"), (device, tmp_path / "device")):
        steps(engine, 0, 1)
        engine.save(folder)
    host.load(tmp_path / "device")
    device.load(tmp_path / "host")
    expected = steps(never, 0, 1, 2)[2]
    for engine in (host, device):
        assert steps(engine, 2) == [expected]
        assert_equal_bits(engine, never, tmp_path / "resumed")
    if adapters:  # the next run continues the adapter
        options["lora"] = msgspec.structs.replace(ADAPTER, adapter=str(tmp_path / "host" / "adapter"))
        one, other = (loaded_engine(tiny_models("qwen2"), state=s, **options) for s in ("host", "device"))
        assert steps(one, 3) == steps(other, 3)


def copy_to(copies: list[Tensor], gradient: Tensor) -> None:
    copies.append(gradient.clone())


def test_gradients_of_16_bits_are_summed_in_float32(tiny_models: Models) -> None:
    engine: Any = loaded_engine(tiny_models("qwen2"), **OPTIONS, dtype="bfloat16", state="host")
    seen: dict[str, list[Tensor]] = {name: [] for name, _ in engine._model.named_parameters()}
    for name, parameter in engine._model.named_parameters():
        parameter.register_hook(partial(copy_to, seen[name]))
    found, statistics = step_of(engine, batch_of(LENGTHS), LOSS, 0.7)
    assert {len(each) for each in seen.values()} == {statistics["micro_batches"]} == {4}
    assert seen["model.layers.0.mlp.up_proj.weight"][0].dtype == torch.bfloat16
    sums = {name: torch.stack(each).double().sum(0) for name, each in seen.items()}
    norm = float(torch.cat([each.flatten() for each in sums.values()]).norm())
    assert statistics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert off(found, {name: total * OPTIONS["clip_norm"] / norm for name, total in sums.items()}) < 1e-6
    assert all(parameter.grad is None for parameter in engine._model.parameters())
