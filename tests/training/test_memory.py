"""The memory of training, counted before a run, against the bytes that a real step holds."""

import json
import shutil
import subprocess
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fixture_types import Models
from stretto.algorithm import Loss
from stretto.engine import HeldModel, Memory
from stretto.training import activations, memory
from stretto.training.config import LoraConfig
from stretto.training.engine import HFTraining
from stretto.training.memory import Counted, MicroBatchShape
from stretto_torch import TorchTrainingConfig
from training_engines import batch_of, loaded_engine, plain_loss

TOKENS, LENGTH = 1024, 64
ADAPTERS = {
    "gpt2": LoraConfig(rank=4, targets=("c_attn", "c_proj")),
    "qwen2": LoraConfig(rank=4),
    "gemma2": LoraConfig(rank=4, targets=("q_proj", "down_proj")),
}


SIZES = {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 64),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 2),
    "num_hidden_layers": 8,
}


class PeakBytes(TorchDispatchMode):
    """The most bytes that tensors hold at once, of those that operators return inside it."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self.known = known
        """Addresses of tensors from before."""
        self.live: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key, address = id(storage), storage.data_ptr()
                if key not in self.live and address not in self.known and address:
                    self.live[key] = storage.nbytes()
                    weakref.finalize(storage, self.live.pop, key)
        self.most = max(self.most, sum(self.live.values()))
        return result


@pytest.fixture(autouse=True)
def counting_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Count also small models, in this process."""

    def here(micro_batches: Sequence[MicroBatchShape]) -> list[Counted]:
        return [activations.count(micro_batch) for micro_batch in micro_batches]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(memory, "_SMALL", 0)
    monkeypatch.setattr(memory, "_ask_child", here)


def counted(model: Path, *, trainable: bool = True, **options: Any) -> Memory:
    config = TorchTrainingConfig(micro_batch_tokens=TOKENS, **options)
    found = config.memory([HeldModel(str(model), "policy", trainable)], LENGTH)
    assert found is not None
    assert "not known" not in found.settings, found.settings
    assert ("fragments" in found.parts) == (not config.gpus)
    return found._replace(parts={name: size for name, size in found.parts.items() if name != "fragments"})


def bytes_of_step(engine: HFTraining) -> dict[str, int]:
    """The rows of `check` that a second step of three micro-batches really has."""
    inner: Any = engine
    number = 3 * TOKENS // LENGTH
    batch = batch_of([LENGTH] * number, loss_mask=torch.ones(number * LENGTH, dtype=torch.bool))
    loss = Loss(plain_loss, "token")
    engine.train(batch, loss, temperature=1.0)
    parameters = list(inner._model.parameters())
    gradients = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
    states = [value for state in inner._optimizer.state.values() for value in state.values() if value.ndim]
    with PeakBytes({parameter.data_ptr() for parameter in parameters}) as peak:
        engine.train(batch, loss, temperature=1.0)
    return {
        "weights": sum(parameter.nbytes for parameter in parameters),
        "gradients": gradients,
        "optimizer": sum(state.nbytes for state in states),
        "passes": peak.most - gradients,
    }


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [("qwen2", "float32"), ("qwen2", "bfloat16"), ("gpt2", "bfloat16"), ("gemma2", "float32")],
)
def test_each_row_is_what_a_step_holds(
    tiny_models: Models, architecture: str, adapters: bool, dtype: str, checkpointing: bool
) -> None:
    options: dict[str, Any] = {"dtype": dtype, "gradient_checkpointing": checkpointing}
    if adapters:
        options["lora"] = ADAPTERS[architecture]
    model = tiny_models(architecture)
    rows = dict(counted(model, **options).parts)
    rows["passes"] = rows.pop("casts", 0) + rows.pop("activations")
    held = bytes_of_step(loaded_engine(model, micro_batch_tokens=TOKENS, **options))
    assert rows == pytest.approx(held, rel=0.1)
    assert sum(rows.values()) == pytest.approx(sum(held.values()), rel=0.1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_state_on_the_host_is_counted_there(tiny_models: Models, dtype: str) -> None:
    model = tiny_models("qwen2")
    rows = counted(model, state="host", dtype=dtype).parts
    held = bytes_of_step(loaded_engine(model, micro_batch_tokens=TOKENS, state="host", dtype=dtype))
    assert (rows["weights"], rows["optimizer"]) == (held["weights"], held["optimizer"])
    assert rows["masters"] == rows["gradients"] == held["optimizer"] // 2
    passes = held["passes"] + held["gradients"] - rows["gradients"]  # a step makes the float32 sums
    assert rows.get("casts", 0) + rows["activations"] == pytest.approx(passes, rel=0.1)
    on_gpu = counted(model, state="host", dtype=dtype, gpus=1)
    assert on_gpu.parts.keys() <= {"weights", "casts", "activations"}
    assert on_gpu.parts["weights"] == rows["weights"]
    assert f"and {4 * rows['masters'] / 2**30:.2g} GiB of the host" in on_gpu.settings


def test_a_small_model_is_bounded_without_count(tiny_models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    every = [(dtype, state) for dtype in ("float32", "bfloat16") for state in ("device", "host")]
    exact = {pair: counted(tiny_models("llama"), dtype=pair[0], state=pair[1]).parts for pair in every}
    monkeypatch.setattr(memory, "_SMALL", 2**40)
    monkeypatch.setattr(memory, "_ask_child", None)
    for (dtype, state), parts in exact.items():
        bound = dict(counted(tiny_models("llama"), dtype=dtype, state=state).parts)
        assert parts["activations"] <= bound.pop("activations") <= 40 * parts["activations"]
        assert bound.pop("casts", 0) >= parts.get("casts", 0)
        assert bound == {name: size for name, size in parts.items() if name in bound}


def test_a_config_is_counted_once_and_by_one_child(
    tiny_models: Models, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Wherever the model is, with or without weights. The child's answers are those of this process."""
    models = [tiny_models("qwen2"), tmp_path / "same", tmp_path / "no weights", tiny_models("gpt2")]
    shutil.copytree(models[0], models[1])
    models[2].mkdir()
    shutil.copy(models[0] / "config.json", models[2])
    here = [counted(model) for model in models]
    monkeypatch.undo()
    monkeypatch.setattr(memory, "_SMALL", 0)
    started: list[object] = []
    start: Any = subprocess.Popen

    def noted(*arguments: Any, **options: Any) -> Any:
        started.append(arguments)
        return start(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", noted)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert [counted(model) for model in models] == here
    memory.end_counting()
    assert [counted(model) for model in models] == here, "the cache has all answers"
    assert len(started) == 1
    assert len([*(tmp_path / "cache").rglob("*.json")]) == 2, "two configurations"


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True, "dtype": "bfloat16"}], ids=str)
@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama", **SIZES},
        {"model_type": "qwen3", **SIZES, "use_sliding_window": True, "max_window_layers": 5},
        {"model_type": "gpt2", "vocab_size": 100, "n_embd": 64, "n_head": 2, "n_layer": 8},
        {"model_type": "gemma2", **SIZES, "head_dim": 32, "sliding_window": 8},  # layers take turns
    ],
    ids=lambda config: config["model_type"],
)
def test_a_few_equal_layers_tell_what_all_hold(
    config: dict[str, Any], options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    few = counted(tmp_path, **options)
    monkeypatch.setattr(activations, "_equal_layers", lambda *_: torch.nn.ModuleList())  # pyright: ignore
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert few == counted(tmp_path, **options)


def test_a_model_that_cannot_be_counted_is_said(
    tiny_models: Models, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("an operator without a fake")

    monkeypatch.setattr(activations, "empty_model", refuse)
    config = TorchTrainingConfig(micro_batch_tokens=TOKENS)
    found = config.memory([HeldModel(str(tiny_models("qwen2")), "policy", trainable=True)], LENGTH)
    assert found is not None
    assert found.settings.endswith("; activations are not known: RuntimeError: an operator without a fake")
    assert found.parts.keys() == {"weights", "gradients", "optimizer"}
    assert not list(tmp_path.rglob("*.json"))  # the next check tries again
