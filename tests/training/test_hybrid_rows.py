"""Packed rows of models with recurrent layers, where kernels keep the sequences of a row apart.

No CPU has the kernels: transformers' own functions, once for each sequence, take their place.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3_next import modeling_qwen3_next

from stretto.algorithm import Loss
from stretto.models.files import needs_padding
from stretto.training.engine import HFTraining
from stretto.training.packing import PackedRows, PaddedRows
from tiny_sizes import tiny_sizes
from training_engines import batch_of, loaded_engine, plain_loss, step_of

RULE: Any = modeling_qwen3_next.torch_chunk_gated_delta_rule
CONVOLUTION: Any = modeling_qwen3_next.causal_conv1d_fn
STATES = ("query", "key", "value", "g", "beta")


def rule_of_each_sequence(
    *given: Tensor, cu_seqlens: Tensor | None = None, seq_idx: Tensor | None = None, **options: Any
) -> Any:
    if cu_seqlens is None:
        return RULE(*given, **options)
    assert cu_seqlens.dtype == torch.int32
    states = dict(zip(STATES, given, strict=False)) | {
        name: options.pop(name) for name in STATES[len(given) :]
    }
    sizes = cu_seqlens.diff().tolist()
    parts = zip(*(states[name].split(sizes, 1) for name in STATES), strict=True)
    return torch.cat([RULE(*part[:3], g=part[3], beta=part[4], **options)[0] for part in parts], 1), None


def convolution_of_each_sequence(
    states: Tensor, *weights: Any, seq_idx: Tensor | None = None, activation: str, **_: Any
) -> Tensor:
    sizes = [states.shape[2]] if seq_idx is None else seq_idx[0].bincount().tolist()
    assert seq_idx is None or seq_idx.dtype == torch.int32
    return torch.cat(
        [CONVOLUTION(part, *weights, activation=activation) for part in states.split(sizes, 2)], 2
    )


def rule_with_a_gradient_across_sequences(*given: Tensor, **options: Any) -> Any:
    right, _ = rule_of_each_sequence(*given, **options)
    leak = right.flatten(2).mean(2).cumsum(1)[:, :, None, None]
    return right + leak - leak.detach(), None


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of Gated DeltaNet around one of full attention."""
    folder = tmp_path_factory.mktemp("hybrid")
    sizes = tiny_sizes(32, layers=3, head_dim=16, vocab_size=97)
    state = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16}
    experts = {"num_experts": 0, "mlp_only_layers": [0, 1, 2], "decoder_sparse_step": 1}
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    common = {"layer_types": kinds, "linear_value_head_dim": 16, "initializer_range": 0.2}
    config = AutoConfig.for_model("qwen3_next", **sizes, **state, **experts, **common)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def install(monkeypatch: pytest.MonkeyPatch, rule: Callable[..., Any] = rule_of_each_sequence) -> None:
    monkeypatch.setattr(modeling_qwen3_next, "torch_chunk_gated_delta_rule", rule)
    monkeypatch.setattr(modeling_qwen3_next, "causal_conv1d_fn", convolution_of_each_sequence)


def form_of(engine: HFTraining) -> Any:
    return engine._packing  # pyright: ignore[reportPrivateUsage]


def test_a_packed_row_has_the_gradients_of_padded_ones(hybrid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of([20, 7, 1, 33])
    padded = loaded_engine(hybrid, packing="padded")
    expected, _ = step_of(padded, batch, Loss(plain_loss, "token"))
    install(monkeypatch)
    packed = loaded_engine(hybrid)
    assert form_of(packed) == PackedRows(recurrent=True)
    found, _ = step_of(packed, batch, Loss(plain_loss, "token"))
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kernels", ["none", "leak gradients"])
def test_rows_are_padded_without_kernels_that_keep_them_apart(
    kernels: str, hybrid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels == "leak gradients":
        install(monkeypatch, rule_with_a_gradient_across_sequences)
    with capture_logs() as logs:
        engine = loaded_engine(hybrid)
    assert isinstance(form_of(engine), PaddedRows)
    [reason] = [line["reason"] for line in logs if "padded" in line["event"]]
    assert ("can't keep packed sequences apart" if kernels == "none" else "not independent") in reason


def test_check_knows_which_kernels_are_installed(
    hybrid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert needs_padding(str(hybrid))
    for package in ("fla", "causal_conv1d"):
        (tmp_path / f"{package}.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert not needs_padding(str(hybrid))
