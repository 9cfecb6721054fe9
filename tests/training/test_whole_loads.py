"""A model is loaded whole: what is missing, has another shape or belongs to another head is refused."""

import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, LlamaModel

from fixture_types import Models
from stretto.algorithm import Loss
from stretto.component import Head, Problem
from stretto.errors import EngineError
from stretto.training.source_files import tensor_problems
from stretto_torch import TorchInferenceConfig
from stretto_torch.model import load_model as load_for_sampling
from tiny_types import tiny_config
from training_engines import batch_of, loaded_engine, squared

GATE = "model.layers.0.mlp.gate_proj.weight"
FILES: dict[str, tuple[dict[str, tuple[int, ...] | None], Head, str]] = {
    "cut": ({"model.norm.weight": None}, "policy", "lacks model.norm.weight"),
    "cut critic": ({GATE: None}, "value", f"lacks {GATE}"),
    "other width": ({GATE: (95, 64)}, "policy", rf"other shapes .*{GATE} \[95, 64\], not \[96, 64\]"),
    "value head in a policy": ({"v_head.summary.weight": (1, 64)}, "policy", "has v_head.summary.w"),
    "classes": ({"score.weight": (2, 64)}, "reward", r"score.weight \[2, 64\], not \[1, 64\]"),
    "two layers as a head": ({"score.0.weight": (64, 64), "score.2.weight": (1, 64)}, "value", "has score.0"),
    "value head": ({"v_head.summary.weight": (1, 64), "v_head.summary.bias": (1,)}, "value", ""),
    "score head": ({"score.weight": (1, 64)}, "reward", ""),
    "no head": ({}, "value", ""),
    "ignorable": ({"model.layers.0.self_attn.rotary_emb.inv_freq": (16,)}, "policy", ""),
    "more layers": ({"model.layers.3.x": (2,)}, "policy", "not used: model.layers.3.x"),
    "next tokens": ({"mtp.fc.weight": (2, 2)}, "policy", "not used: mtp.fc.weight"),
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tiny_models: Models, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Case -> the folder of a model with these changes of its files."""
    folders: dict[str, Path] = {}
    for case, (changes, *_) in FILES.items():
        folders[case] = Path(shutil.copytree(tiny_models("llama"), tmp_path_factory.mktemp("made") / "llama"))
        tensors = load_file(folders[case] / "model.safetensors")
        tensors |= {name: torch.full(shape, 0.5) for name, shape in changes.items() if shape}
        kept = {name: tensor for name, tensor in tensors.items() if changes.get(name, ()) is not None}
        save_file(kept, folders[case] / "model.safetensors", metadata={"format": "pt"})
    return folders


@pytest.fixture(scope="module")
def checked(made: Mapping[str, Path]) -> list[Problem]:
    """What `stretto check` says of all cases."""
    return [*tensor_problems([(case, str(folder), FILES[case][1]) for case, folder in made.items()])]


@pytest.mark.parametrize("case", FILES)
def test_what_the_files_have_and_the_class_has_not(
    case: str, made: Mapping[str, Path], checked: list[Problem]
) -> None:
    _, head, words = FILES[case]
    found = [problem for problem in checked if problem.path == case]
    assert len(found) == bool(words)
    assert all(re.search(words, problem.message) for problem in found)
    is_refused = any(problem.severity == "error" for problem in found)
    loads: list[Callable[[], Any]] = [lambda: loaded_engine(made[case], head=head)]
    if head == "policy":
        loads.append(lambda: load_for_sampling(str(made[case]), TorchInferenceConfig()))
    for load in loads:
        with capture_logs() as logs, pytest.raises(EngineError) if is_refused else nullcontext() as refused:
            loaded = load()
        if refused is not None:
            assert str(refused.value) == found[0].message
            continue
        unused = [line["tensors"] for line in logs if "tensors" in line]
        assert bool(unused) == bool(found)
        if head != "policy":
            assert bool(loaded.forward(batch_of([9]), temperature=1.0).any()) == (case != "no head")


@pytest.mark.parametrize("name", ["gpt_neox", "gpt2", "falcon"])
def test_a_critic_begins_with_the_head_of_a_classifier_whatever_its_name(name: str, tmp_path: Path) -> None:
    config = tiny_config(name, num_labels=1)
    scorer: Any = AutoModelForSequenceClassification.from_config(config).float().eval()
    scorer.save_pretrained(tmp_path)
    batch = batch_of([9])
    found = loaded_engine(tmp_path, head="reward").forward(batch, temperature=1.0)
    torch.testing.assert_close(found[-1], scorer(input_ids=batch["tokens"][None]).logits[0, 0])


class Noisy(nn.Module):
    """Adds noise in training, or always, under a name that no config has."""

    def __init__(self, inner: nn.Module, always: bool) -> None:
        super().__init__()
        self.inner, self.always = inner, always

    def forward(self, states: Tensor) -> Tensor:
        noise = torch.rand_like(states) if self.always or self.training else 0.0
        return self.inner(states) + noise


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("always", [False, True])
def test_noise_is_off_in_training_or_refused(
    always: bool, checkpointing: bool, tiny_models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = loaded_engine(tiny_models("llama")).forward(batch_of([9, 4]), temperature=1.0)
    made = LlamaModel.__init__

    def add_noise(self: Any, config: Any) -> None:
        made(self, config)
        self.layers[0].mlp.act_fn = Noisy(self.layers[0].mlp.act_fn, always)

    monkeypatch.setattr(LlamaModel, "__init__", add_noise)
    if always:
        with pytest.raises(EngineError, match=r"\(LlamaForCausalLM\) is random: .* off by"):
            loaded_engine(tiny_models("llama"), gradient_checkpointing=checkpointing)
        return
    engine = loaded_engine(tiny_models("llama"), gradient_checkpointing=checkpointing)
    torch.testing.assert_close(engine.forward(batch_of([9, 4]), temperature=1.0), plain)


def raising(error: Exception) -> Callable[..., Any]:
    def raise_it(*_: Any, **__: Any) -> Any:
        raise error

    return raise_it


@pytest.mark.parametrize("trial", ["packing", "prefixes", "logits", "sampling", "randomness"])
@pytest.mark.parametrize(
    "error", [KeyError("x"), ImportError("x"), MemoryError("x"), torch.OutOfMemoryError("x")]
)
def test_a_trial_that_raises_means_the_plain_way(
    trial: str, error: Exception, tiny_models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, numbers = tiny_models("llama"), Loss(squared, "token")
    expected = loaded_engine(folder, packing="padded").train(batch_of([9, 4]), numbers, temperature=1.0)
    places = {
        "packing": "stretto.training.packing.compare_with_plain",
        "prefixes": "stretto.training.prefix_tree.PrefixTree.plan",
        "logits": "stretto.training.token_head._compare",
        "sampling": "stretto_torch.model.FastDecoder",
        "randomness": "stretto.training.engine.compare_with_itself",
    }
    with monkeypatch.context() as patch, capture_logs() as logs:
        patch.setattr(places[trial], raising(error))
        load: Callable[[], Any] = lambda: loaded_engine(folder)  # noqa: E731
        if trial == "sampling":
            load = lambda: load_for_sampling(str(folder), TorchInferenceConfig())  # noqa: E731
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            with pytest.raises(type(error)):
                load()
            return
        loaded = load()
        if trial == "packing":
            with pytest.raises(EngineError, match=r"'packed', and .* does not allow it: \w+Error: '?x"):
                loaded_engine(folder, packing="packed")
    reasons = [line.get("reason", line.get("why")) for line in logs]
    assert reasons == [f"{type(error).__name__}: {error}"]
    if trial != "sampling":
        found = loaded.train(batch_of([9, 4]), numbers, temperature=1.0)
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)


@pytest.mark.parametrize("token", [96, 97, 5000])
def test_an_id_that_a_model_lacks_is_named(token: int, tiny_models: Models) -> None:
    engine = loaded_engine(tiny_models("llama"))
    batch = batch_of([4], tokens=torch.tensor([3, token, 5, 6]))
    if token < 97:
        engine.forward(batch, temperature=1.0)
        return
    words = rf"the token id {token}, and '.*llama.*' has a vocabulary of 97"
    with pytest.raises(EngineError, match=words):
        engine.forward(batch, temperature=1.0)
    with pytest.raises(EngineError, match=words):
        engine.train(batch, Loss(squared, "token"), temperature=1.0)
