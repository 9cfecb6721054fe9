"""The training engine `torch`: the numbers of plain forwards, and one gradient however it is split."""

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from fixture_types import Models
from stretto.algorithm import Loss, Reduction
from stretto.component import Head
from stretto.errors import EngineError
from stretto.launcher import Resources
from stretto.rl.batch import Batch
from stretto.training.checkpoint import Copies, write_tensors
from stretto.training.config import LoraConfig
from stretto.training.device import compute_device
from stretto.training.engine import HFTraining
from training_engines import NEARLY_LINEAR, batch_of, loaded_engine, plain_loss, squared

engine_of = partial(loaded_engine, **NEARLY_LINEAR)


def parameters(engine: HFTraining) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.weights()}


def reference_logprobs(model: Any, batch: Batch, temperature: float) -> Tensor:
    """Each sequence by itself through the untouched model."""
    parts: list[Tensor] = []
    for sequence in batch.split([1] * len(batch)):
        ids = sequence["tokens"]
        logits = model(input_ids=ids[None]).logits[0].float() / temperature
        chosen = torch.log_softmax(logits[:-1], -1).gather(-1, ids[1:, None]).squeeze(-1)
        parts.append(torch.cat([torch.zeros(1), chosen]))
    return torch.cat(parts)


@pytest.mark.parametrize("architecture", ["qwen2", "llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_forward_equals_the_model_on_each_sequence_alone(
    tiny_models: Models, architecture: str, temperature: float
) -> None:
    engine = engine_of(tiny_models(architecture), micro_batch_tokens=24)
    batch = batch_of([5, 1, 17, 9, 30])
    plain = AutoModelForCausalLM.from_pretrained(tiny_models(architecture), dtype=torch.float32).eval()
    with torch.no_grad():
        expected = reference_logprobs(plain, batch, temperature)
    found = engine.forward(batch, temperature=temperature)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("reduction", ["token", "sequence", "sequence_sum"])
def test_one_step_equals_the_gradient_of_the_plain_loop(tiny_models: Models, reduction: Reduction) -> None:
    engine = engine_of(tiny_models("qwen2"), micro_batch_tokens=20)
    batch = batch_of([6, 13, 4, 9])
    before = parameters(engine)
    statistics = engine.train(batch, Loss(plain_loss, reduction), temperature=1.0)
    update = {name: value - before[name] for name, value in parameters(engine).items()}

    # By hand: the loss as its definition reads, in one piece.
    model = AutoModelForCausalLM.from_pretrained(tiny_models("qwen2"), dtype=torch.float32).eval()
    logprobs = reference_logprobs(model, batch, 1.0)
    losses = torch.split(-batch["advantages"] * logprobs, batch.lengths)
    masks = torch.split(batch["loss_mask"], batch.lengths)
    sums = [loss[mask].sum() for loss, mask in zip(losses, masks, strict=True)]
    counts = [int(mask.sum()) for mask in masks]
    total = {
        "token": sum(sums) / sum(counts),
        "sequence": sum(s / c for s, c in zip(sums, counts, strict=True)) / 4,
        "sequence_sum": sum(sums) / 4,
    }[reduction]
    assert isinstance(total, Tensor)
    total.backward()
    assert statistics["loss"] == pytest.approx(float(total.detach()), rel=1e-5)
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None
        expected = -0.1 * gradient / (gradient.abs() + 1.0)  # AdamW's first step with eps 1
        torch.testing.assert_close(update[name], expected, atol=2e-6, rtol=1e-4)


def test_a_loss_scales_the_learning_rate_by_the_statistics_of_the_whole_batch(tiny_models: Models) -> None:
    engine = engine_of(tiny_models("qwen2"), lr=1.0, micro_batch_tokens=10)
    batch, seen = batch_of([6, 13, 4]), list[float]()

    def halve(statistics: Mapping[str, float], former: float) -> float:
        seen.append(statistics["advantage"])
        return former / 2

    before = parameters(engine)
    statistics = engine.train(batch, Loss(plain_loss, "token", lr_scale=halve), temperature=1.0)
    assert (statistics["lr"], statistics["micro_batches"]) == (0.5, 3)
    assert 0 < statistics["entropy"] < math.log(97)
    assert seen == [pytest.approx(float(batch["advantages"][batch["loss_mask"]].mean()), rel=1e-5)]
    whole = engine_of(tiny_models("qwen2"), lr=0.5, micro_batch_tokens=10)
    whole.train(batch, Loss(plain_loss, "token"), temperature=1.0)
    for name, value in parameters(engine).items():
        assert torch.equal(value, parameters(whole)[name])
        assert not torch.equal(value, before[name])


def test_a_checkpoint_has_the_tokenizer_of_the_model(tiny_models: Models, tmp_path: Path) -> None:
    """A Qwen2 model gets the tokenizer of Qwen2 from `AutoTokenizer`, whatever its own files say."""
    folder = shutil.copytree(tiny_models("qwen2"), tmp_path / "own")
    own = json.loads((folder / "tokenizer.json").read_text())
    own["normalizer"], own["pre_tokenizer"] = {"type": "NFD"}, {"type": "Whitespace"}
    (folder / "tokenizer.json").write_text(json.dumps(own))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend"}')
    engine_of(folder).save(tmp_path / "saved")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "saved" / "model" / name).read_bytes() == (folder / name).read_bytes()


def test_a_checkpoint_goes_on_bit_for_bit(tiny_models: Models, tmp_path: Path) -> None:
    loss = Loss(plain_loss, "token", lr_scale=lambda _, former: former / 2)
    options: Any = {"eps": 1e-8, "lr": 1e-3, "schedule": "cosine", "decay_steps": 9, "warmup_steps": 2}
    engine, again = (engine_of(tiny_models("qwen2"), **options) for _ in range(2))

    def train(engine: HFTraining, seed: int) -> Mapping[str, float]:
        return engine.train(batch_of([6, 13], seed), loss, temperature=1.0)

    for seed in range(2):
        train(engine, seed)
    engine.save(tmp_path)
    again.load(tmp_path)
    assert [train(again, seed) for seed in (2, 3)] == [train(engine, seed) for seed in (2, 3)]
    for name, value in parameters(engine).items():
        assert torch.equal(value, parameters(again)[name]), name


def test_schedules_warm_up_and_come_down(tiny_models: Models) -> None:
    engine = engine_of(
        tiny_models("qwen2"), lr=1.0, schedule="linear", warmup_steps=1, decay_steps=3, final_lr_ratio=0.2
    )
    rates = [engine.train(batch_of([4]), Loss(plain_loss, "token"), temperature=1.0)["lr"] for _ in range(5)]
    assert rates == pytest.approx([0.5, 1.0, 0.6, 0.2, 0.2])


def test_clipping_bounds_the_update(tiny_models: Models) -> None:
    engine = engine_of(tiny_models("qwen2"), clip_norm=1e-3)
    before = parameters(engine)
    statistics = engine.train(batch_of([9, 9]), Loss(plain_loss, "token"), temperature=1.0)
    assert statistics["grad_norm"] > 1e-3  # as it was before
    moved = torch.cat([(value - before[name]).flatten() for name, value in parameters(engine).items()])
    assert float(moved.norm()) <= 0.1 * 1e-3 * 1.01


def test_a_loss_that_was_reduced_already_is_refused(tiny_models: Models) -> None:
    def reduced(logprobs: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        return -logprobs.mean(), {}

    with pytest.raises(EngineError, match="expected one number for each token"):
        engine_of(tiny_models("qwen2")).train(batch_of([9]), Loss(reduced, "token"), temperature=1.0)


def test_a_gradient_that_is_not_finite_changes_nothing(tiny_models: Models) -> None:
    def broken(logprobs: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        return logprobs * math.inf, {}

    engine = engine_of(tiny_models("qwen2"))
    before = parameters(engine)
    assert engine.train(batch_of([9]), Loss(broken, "token"), temperature=1.0)["skipped"] == 1
    assert all(torch.equal(value, before[name]) for name, value in parameters(engine).items())
    assert engine.train(batch_of([9]), Loss(plain_loss, "token"), temperature=1.0)["skipped"] == 0


def test_bfloat16_computes_in_it_and_keeps_float32_parameters(tiny_models: Models) -> None:
    engine = engine_of(tiny_models("qwen2"), dtype="bfloat16", lr=1e-4, eps=1e-8)
    exact = engine_of(tiny_models("qwen2"))
    batch = batch_of([12, 20])
    off = (engine.forward(batch, temperature=1.0) - exact.forward(batch, temperature=1.0)).abs().max()
    assert 0 < float(off) < 0.1
    engine.train(batch, Loss(plain_loss, "token"), temperature=1.0)
    assert {tensor.dtype for _, tensor in engine.weights()} == {torch.bfloat16}
    kept = {parameter.dtype for parameter in engine._model.parameters()}  # pyright: ignore[reportPrivateUsage]
    assert kept == {torch.float32}


def test_tied_weights_are_published_once(tiny_models: Models) -> None:
    names = [name for name, _ in engine_of(tiny_models("qwen2")).weights()]
    assert "lm_head.weight" not in names
    assert len(names) == len(set(names))
    assert "lm_head.weight" in [name for name, _ in engine_of(tiny_models("llama")).weights()]


# ------------------------------------------------------------------------------------------ heads


@pytest.mark.parametrize("architecture", ["qwen2", "gpt2", "gemma2"])  # packed, packed, padded
@pytest.mark.parametrize("head", ["value", "reward"])
def test_heads_say_one_number_of_every_token(
    tiny_models: Models, architecture: str, head: Head, tmp_path: Path
) -> None:
    engine = engine_of(tiny_models(architecture), head=head, micro_batch_tokens=24)
    batch = batch_of([5, 1, 17, 9, 30])
    assert not engine.forward(batch, temperature=0.5).any()  # a new head says 0
    engine.train(batch, Loss(squared, "token"), temperature=1.0)
    engine.save(tmp_path)

    plain = AutoModelForTokenClassification.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    expected: list[Tensor] = []
    for sequence in batch.split([1] * len(batch)):
        with torch.no_grad():
            scores = plain(input_ids=sequence["tokens"][None]).logits[0, :, 0]
        expected.append(scores if head == "reward" else torch.cat([torch.zeros(1), scores[:-1]]))
    found = engine.forward(batch, temperature=0.5)
    assert found.any()
    torch.testing.assert_close(found, torch.cat(expected), atol=2e-5, rtol=1e-5)


def test_figures_of_a_head(tiny_models: Models) -> None:
    batch = batch_of([6, 13, 4])
    rewards = engine_of(tiny_models("qwen2"), head="reward", micro_batch_tokens=10)
    rewards.train(batch, Loss(squared, "token"), temperature=1.0)
    said = rewards.forward(batch, temperature=1.0)
    statistics = rewards.train(batch, Loss(squared, "token"), temperature=1.0)
    assert statistics["said_max"] == pytest.approx(float(said[batch["loss_mask"]].max()), rel=1e-4)
    assert "entropy" not in statistics


def test_a_model_that_is_only_asked_has_no_gradients(tiny_models: Models) -> None:
    engine, trained = engine_of(tiny_models("qwen2"), trainable=False), engine_of(tiny_models("qwen2"))
    batch = batch_of([6, 13])
    assert torch.equal(engine.forward(batch, temperature=1.0), trained.forward(batch, temperature=1.0))
    assert parameters(engine).keys() == parameters(trained).keys()
    with pytest.raises(EngineError, match="frozen model cannot be trained"):
        engine.train(batch, Loss(plain_loss, "token"), temperature=1.0)


def test_a_loss_of_groups_sees_them_whole(tiny_models: Models) -> None:
    seen: list[list[int]] = []

    def watching(logprobs: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        seen.append(batch["group"].tolist())
        return -logprobs, {}

    engine = engine_of(tiny_models("qwen2"), micro_batch_tokens=10)
    engine.train(batch_of([6, 13, 4, 4, 3]), Loss(watching, "token", unit="group"), temperature=1.0)
    assert seen == [[0, 0], [1, 1], [2]]


# --------------------------------------------------------------------------------------- adapters


@pytest.mark.parametrize(
    ("architecture", "targets"), [("llama", ["q_proj", "down_proj"]), ("gpt2", ["c_attn", "c_proj"])]
)
def test_adapters_are_published_merged_and_resume(
    tiny_models: Models, architecture: str, targets: list[str], tmp_path: Path
) -> None:
    adapter = LoraConfig(rank=4, alpha=8, targets=tuple(targets), send="merged")
    options: dict[str, Any] = {"eps": 1e-8, "lr": 1e-2, "lora": adapter}
    engine = engine_of(tiny_models(architecture), **options)
    whole = parameters(engine_of(tiny_models(architecture)))
    before = parameters(engine)
    assert before.keys() == whole.keys()
    assert all(torch.equal(value, whole[name]) for name, value in before.items())  # B A is 0 at first
    loss, batch = Loss(plain_loss, "token"), batch_of([6, 13])
    engine.train(batch, loss, temperature=1.0)
    changed = {name for name, value in parameters(engine).items() if not torch.equal(value, before[name])}
    assert {name.split(".")[-2] for name in changed} == set(targets)

    engine.save(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    with torch.no_grad():
        expected = reference_logprobs(plain, batch, 1.0)
    torch.testing.assert_close(engine.forward(batch, temperature=1.0), expected, atol=2e-5, rtol=1e-5)
    again = engine_of(tiny_models(architecture), **options)
    again.load(tmp_path)
    assert again.train(batch, loss, temperature=1.0) == engine.train(batch, loss, temperature=1.0)

    options["lora"] = msgspec.structs.replace(adapter, adapter=str(tmp_path / "adapter"))
    for trainable in (True, False):  # another run continues the adapter, and its reference begins there too
        next_run = engine_of(tiny_models(architecture), trainable=trainable, **options)
        torch.testing.assert_close(next_run.forward(batch, temperature=1.0), expected, atol=2e-5, rtol=1e-5)
    critic = engine_of(tiny_models(architecture), head="value", **options)
    options["lora"] = adapter
    other = engine_of(tiny_models(architecture), head="value", **options)
    values = [each.forward(batch, temperature=1.0) for each in (critic, other)]
    assert torch.equal(*values)  # it is an adapter of the policy


@pytest.mark.parametrize("architecture", ["qwen2", "gpt2", "llama"])
def test_frozen_linear_weights_in_bfloat16_change_no_bit(
    tiny_models: Models, architecture: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.copytree(tiny_models(architecture), tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "model")  # as most models are published
    target = "c_attn" if architecture == "gpt2" else "v_proj"
    options: dict[str, Any] = {"dtype": "bfloat16", "lr": 1e-2, "lora": LoraConfig(rank=4, targets=(target,))}
    loss, batch = Loss(plain_loss, "token"), batch_of([6, 13])

    def results() -> Iterator[Any]:
        engine = engine_of(tmp_path / "model", **options)
        yield from (engine.train(batch, loss, temperature=1.0) for _ in range(3))
        yield engine.forward(batch, temperature=1.0).tolist()
        engine.save(folder := tmp_path / f"saved-{len(sizes)}")
        saved = load_file(folder / "model" / "model.safetensors")
        yield {name: (str(value.dtype), value.tolist()) for name, value in saved.items()}
        reference = engine_of(tmp_path / "model", trainable=False, dtype="bfloat16")
        yield reference.forward(batch, temperature=0.7).tolist()
        sizes.append(
            [param.nbytes for each in (engine, reference) for param in vars(each)["_model"].parameters()]
        )

    def leave(model: Any, dtype: torch.dtype) -> None:
        del model, dtype

    sizes: list[list[int]] = []
    now = list(results())
    monkeypatch.setattr("stretto.training.engine.cast_frozen", leave)
    assert now == list(results())
    halved = sum(2 * one == other for one, other in zip(*sizes, strict=True))
    assert halved >= 10
    assert sum(sizes[0]) < 0.75 * sum(sizes[1])


# -------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("room", [0, 90, 1000])  # bytes
@pytest.mark.parametrize("ranks", [1, 2])
def test_large_weights_are_split_over_files_with_an_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, room: int
) -> None:
    """Also if copies are written later, for which there may be no room."""
    monkeypatch.setattr("stretto.training.checkpoint._FILE_BYTES", 80)
    tensors = {f"t{index}": torch.full((10,), float(index)) for index in range(5)}
    writers: list[Callable[[], None] | None] = []
    for rank in range(ranks):
        later = {name: tensor.clone() for name, tensor in tensors.items()}
        copies = Copies(room)
        own = {number: number % ranks == rank for number in range(5)}
        options: dict[str, Any] = {"writes": own.__getitem__, "copies": copies}
        assert not write_tensors(tmp_path / "m", "model", later.items(), **options)
        writers.append(copies.writer())
        for tensor in later.values():
            tensor.zero_()  # as the next step does
    shares = {1: [200], 2: [120, 80]}[ranks]
    assert [writer is not None for writer in writers] == [share < room for share in shares]
    for writer in writers:
        if writer is not None:
            writer()
    index = json.loads((tmp_path / "m/model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 200}
    assert sorted(set(index["weight_map"].values())) == [
        f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)
    ]
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "m" / file)[name], tensors[name])


@pytest.mark.parametrize("head", ["policy", "value"])
def test_tensors_are_aligned_in_memory_however_they_are_in_a_file(
    tiny_models: Models, tmp_path: Path, head: Head
) -> None:
    """Else a step that is repeated from a checkpoint may give other bits."""
    engine = engine_of(tiny_models("qwen2"), head=head)
    engine.save(tmp_path)
    for folder in (None, tmp_path):
        engine.load(folder)
        model: Any = engine._model  # pyright: ignore[reportPrivateUsage]
        tensors = dict(model.named_parameters())
        assert [name for name, tensor in tensors.items() if tensor.data_ptr() % 64] == []


def test_a_folder_that_cannot_be_written_is_an_os_error(tiny_models: Models, tmp_path: Path) -> None:
    (tmp_path / "model").write_text("in the way")
    with pytest.raises(OSError, match="cannot be written"):
        engine_of(tiny_models("qwen2")).save(tmp_path)


def test_a_model_without_the_head_that_is_wanted_is_refused(tiny_models: Models, tmp_path: Path) -> None:
    """Its logprobs would be those of a head drawn at random."""
    scorer = engine_of(tiny_models("llama"), head="reward")  # its embeddings are not tied
    scorer.save(tmp_path)
    with pytest.raises(EngineError, match=r"lacks lm_head.weight, and has score.*another head"):
        engine_of(tmp_path / "model")


def test_weights_that_would_be_unpickled_are_refused(tiny_models: Models, tmp_path: Path) -> None:
    for file in tiny_models("qwen2").glob("*.json"):
        shutil.copy(file, tmp_path)
    torch.save(load_file(tiny_models("qwen2") / "model.safetensors"), tmp_path / "pytorch_model.bin")
    with pytest.raises(EngineError, match="safetensors"):
        engine_of(tmp_path)


def test_a_checkpoint_is_written_with_any_generation_config(tiny_models: Models, tmp_path: Path) -> None:
    """Many models of the hub come with one that transformers refuses to save."""
    source = tmp_path / "source"
    shutil.copytree(tiny_models("qwen2"), source)
    (source / "generation_config.json").write_text(json.dumps({"do_sample": False, "temperature": 0.6}))
    engine_of(source).save(tmp_path / "saved")
    written = tmp_path / "saved" / "model" / "generation_config.json"
    assert json.loads(written.read_text())["temperature"] == 0.6
    engine_of(tmp_path / "saved" / "model")


def test_on_a_gpu_cudnn_does_not_plan_attention_for_each_new_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: `make test-gpu` measures what it is for."""
    shares, enabled = list[float](), list[bool]()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", shares.append)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", enabled.append)
    assert compute_device("cpu", Resources(share=0.5)).type == "cpu"
    assert (shares, enabled) == ([], [])
    assert compute_device("auto", Resources(share=0.5)).type == "cuda"
    assert (shares, enabled) == ([0.5], [False])
