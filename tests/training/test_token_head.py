"""Logits in chunks: the logprobs, entropies and gradients of the whole logits, for every form of a head."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from stretto.algorithm import WHOLE, Loss
from stretto.array import KeptTokens
from stretto.rl.batch import Batch, Drawn
from stretto.training import token_head
from stretto.training.config import LoraConfig
from stretto.training.memory import CHUNK_BYTES
from tiny_sizes import IDS, tiny_sizes
from training_engines import assert_equal_steps, batch_of, loaded_engine, off, squared, step_of

VOCABULARY = 97
SIZES = {**tiny_sizes(32, layers=1, vocab_size=VOCABULARY, initializer_range=0.2), **IDS}
FORMS: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "llama": {"tie_word_embeddings": False},
    "phi": {},  # a bias
    "gemma2": {"head_dim": 16, "final_logit_softcapping": 2.0},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 4.0},
}


@pytest.fixture
def model_of(tmp_path: Path) -> Callable[..., Path]:
    """`model_of("phi")`: the folder of a random model."""

    def folder(architecture: str, **options: Any) -> Path:
        torch.manual_seed(3)
        config = AutoConfig.for_model(architecture, **SIZES, **FORMS[architecture], **options)
        model: Any = AutoModelForCausalLM.from_config(config).float()
        if architecture == "phi":
            torch.nn.init.normal_(model.lm_head.bias)
        model.save_pretrained(tmp_path / architecture)
        return tmp_path / architecture

    return folder


@pytest.fixture(params=["kept", "recomputed"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of seven tokens, kept for the backward pass or computed again."""
    monkeypatch.setitem(CHUNK_BYTES, False, 7 * 4 * VOCABULARY)
    if request.param == "recomputed":
        monkeypatch.setattr(token_head, "_KEPT_BYTES", 0)


engine_of = partial(loaded_engine, lr=1.0, optimizer="sgd", clip_norm=None)


def batch() -> Batch:
    return batch_of([9, 14, 6], 5, loss_mask=torch.arange(29) % 5 > 0)


def chunks_are_exact(model: Path, entropy_coef: float, **options: Any) -> None:
    one, other = (engine_of(model, chunked_logits=chunked, **options) for chunked in (True, False))
    assert_equal_steps(one, other, batch(), entropy_coef)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("entropy_coef", [0.0, 0.3])
@pytest.mark.parametrize("architecture", FORMS)
def test_chunks_give_the_numbers_of_the_whole_logits(
    architecture: str, entropy_coef: float, model_of: Callable[..., Path]
) -> None:
    with capture_logs() as logs:
        chunks_are_exact(model_of(architecture), entropy_coef)
    assert not [line for line in logs if "logits" in line["event"]]


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("architecture", ["qwen2", "phi", "gemma2"])
def test_logprobs_and_gradients_over_kept_tokens_are_those_of_dense_masks(
    architecture: str, chunked: bool, whole: bool, model_of: Callable[..., Path]
) -> None:
    # With `whole`, some tokens were drawn from the whole vocabulary, and the loss reads those logprobs too.
    rng, plain, temperature, entropy_coef = np.random.default_rng(1), batch(), 0.7, 0.3
    lengths, tokens, mask = plain.lengths, plain["tokens"], plain["loss_mask"] & (plain.positions() > 0)
    masks = torch.zeros(len(tokens), VOCABULARY, dtype=torch.bool)
    for place in mask.nonzero()[:: 2 if whole else 1, 0].tolist():
        masks[place, rng.choice(VOCABULARY, rng.integers(1, 9))] = True
        masks[place, tokens[place]] = True
    kept = [
        KeptTokens(part.sum(1).numpy().astype(np.uint16), part.nonzero()[:, 1].numpy().astype(np.int32))
        for part in masks.split(lengths)
    ]
    bias = {5: 1.5, 40: -2.0}
    drawn = Batch(lengths, {**plain.tokens, "loss_mask": mask}, {}, drawn=Drawn(bias, kept))

    def function(said: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        targets = batch["advantages"]
        more = 0.5 * (batch[WHOLE] + targets) ** 2 if whole else 0.0
        return (said - targets) ** 2 + more, {}

    folder = model_of(architecture)
    engine = engine_of(folder, chunked_logits=chunked)
    found = engine.forward(drawn, temperature=temperature)
    loss = Loss(function, "token", entropy_coef=entropy_coef, whole_vocabulary=whole)
    gradients, statistics = step_of(engine, drawn, loss, temperature)

    model: Any = AutoModelForCausalLM.from_pretrained(folder).float()
    model.train(False)
    added = torch.zeros(VOCABULARY).index_put((torch.tensor([*bias]),), torch.tensor([*bias.values()]))
    dense = masks | ~masks.any(1, keepdim=True)
    alone = [model(part[None]).logits[0, :-1] for part in tokens.split(list(lengths))]
    logits = torch.cat([torch.cat([part.new_zeros(1, VOCABULARY), part]) for part in alone])
    inside = ((logits + added) / temperature).masked_fill(~dense, -torch.inf).log_softmax(-1)
    at = tokens[:, None]
    said = inside.gather(1, at)[:, 0]
    said_whole = (logits / temperature).log_softmax(-1).gather(1, at)[:, 0]
    targets = plain["advantages"]
    entropy = -(inside.exp() * inside.masked_fill(~dense, 0.0)).sum(-1)
    losses = (said - targets) ** 2 + 0.5 * whole * (said_whole + targets) ** 2 - entropy_coef * entropy
    losses[mask].mean().backward()
    assert statistics["loss"] == pytest.approx(losses[mask].mean().item(), rel=1e-5)
    assert statistics["entropy"] == pytest.approx(entropy[mask].mean().item(), rel=1e-5)
    torch.testing.assert_close(found[mask], said[mask], atol=1e-6, rtol=1e-6)
    assert off(gradients, {name: each.grad for name, each in model.named_parameters()}) < 1e-6


@pytest.mark.usefixtures("chunks")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's
@pytest.mark.parametrize("targets", [("lm_head", "q_proj"), ("q_proj",)], ids=["adapted", "frozen"])
def test_heads_with_an_adapter_and_frozen_heads_are_computed_in_chunks(
    targets: tuple[str, ...], model_of: Callable[..., Path]
) -> None:
    lora = LoraConfig(rank=4, targets=targets, send="merged")
    chunks_are_exact(model_of("llama"), 0.3, lora=lora)


@pytest.mark.usefixtures("chunks")
def test_bfloat16_is_as_close_as_with_whole_logits(model_of: Callable[..., Path]) -> None:
    model = model_of("qwen2")
    exact = engine_of(model).forward(batch(), temperature=0.7)
    engines = [engine_of(model, dtype="bfloat16", chunked_logits=chunked) for chunked in (True, False)]
    off = [(engine.forward(batch(), temperature=0.7) - exact).abs().max() for engine in engines]
    assert 0 < float(off[0]) <= 1.5 * float(off[1])


def test_a_head_of_an_unknown_form_is_computed_whole(model_of: Callable[..., Path]) -> None:
    folder = model_of("qwen2")
    config = json.loads((folder / "config.json").read_text())
    # Qwen2 ignores this key, so its logits are not those that the key describes.
    (folder / "config.json").write_text(json.dumps({**config, "final_logit_softcapping": 1.0}))
    with capture_logs() as logs:
        engine = engine_of(folder)
    [line] = [line for line in logs if "logits" in line["event"]]
    assert line["event"] == "the logits of a micro-batch are computed together"
    assert "another form" in line["reason"]
    chunks_are_exact(folder, 0.3)
    assert engine.forward(batch(), temperature=1.0).any()


def test_no_tensor_holds_all_logits(model_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CHUNK_BYTES, False, 4 * 4 * VOCABULARY)
    monkeypatch.setattr(token_head, "_KEPT_BYTES", 0)

    def most(chunked: bool) -> int:
        engine = engine_of(model_of("llama"), chunked_logits=chunked)
        rows: list[int] = []

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
            ) -> Any:
                result = func(*args, **(kwargs or {}))
                of_tokens = isinstance(result, Tensor) and result.dim() == 2 and len(result) != 32
                if of_tokens and result.shape[1] == VOCABULARY:  # 32 rows are the transposed head
                    rows.append(len(result))
                return result

        with Watch():
            engine.train(batch(), Loss(squared, "token"), temperature=0.7)
        return max(rows)

    assert most(chunked=False) >= 16
    assert most(chunked=True) == 4
