"""Attention of a packed row in one varlen call: bounds, gradients, the trial at the start.

No CPU has the kernel: `reference` takes its place, by the text of torch's documentation.
"""

from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from torch import Tensor
from transformers import AttentionInterface

import stretto_fsdp2
import stretto_pipeline
import stretto_torch
from fixture_types import Models
from stretto import Context
from stretto.algorithm import Loss
from stretto.rl.batch import Batch
from stretto.training.engine import HFTraining
from stretto.training.packing import ATTENTION, PackedRows, PrefixRows
from stretto.training.token_head import Wanted
from training_engines import batch_of_one_prompt, off, squared, step_of

KERNEL = "torch.nn.attention.varlen.varlen_attn"


def masked(states: Sequence[Tensor], scale: float, first: int) -> Tensor:
    """Attention of (Q, H, D) queries in float64; query i reads the keys up to first + i."""
    query, key, value = states
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", query.double(), key.double()) * scale
    reads = torch.arange(len(key)) <= first + torch.arange(len(query))[:, None]
    weights = scores.masked_fill(~reads, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value.double()).to(query.dtype)


def reference(
    *inputs: Any, scale: float, window_size: tuple[int, int], enable_gqa: bool, at_end: bool = True
) -> Tensor:
    """Causal attention within each sequence, aligned at its end."""
    *_, cu_seq_q, cu_seq_k, max_q, max_k = inputs
    assert (window_size, enable_gqa) == ((-1, 0), True)
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert (max_q, max_k) == (cu_seq_q.diff().max(), cu_seq_k.diff().max())
    counts = (bounds.diff().tolist() for bounds in (cu_seq_q, cu_seq_k, cu_seq_k))
    parts = zip(*map(torch.split, inputs, counts), strict=True)
    return torch.cat([masked(part, scale, at_end * (len(part[1]) - len(part[0]))) for part in parts])


def low_only(*inputs: Any, **options: Any) -> Tensor:
    """The reference, refusing what the kernel refuses."""
    if not all(each.dtype == torch.bfloat16 for each in inputs[:3]):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    return reference(*inputs, **options)


# Few different tokens, so that sequences often begin with the same ones.
@settings(max_examples=200)
@given(
    sequences=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), min_size=1, max_size=8),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    shared=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_row_has_the_numbers_of_each_whole_sequence_alone(
    sequences: list[list[int]], heads: tuple[int, int], shared: bool, seed: int
) -> None:
    batch = Batch([*map(len, sequences)], {"tokens": torch.tensor([*chain(*sequences)])}, {})
    rows = PrefixRows(1, varlen=True) if shared else PackedRows(varlen=True)
    wanted = Wanted(torch.arange(batch.num_tokens), batch["tokens"])
    inputs = rows.inputs(batch, wanted, torch.device("cpu"))
    torch.manual_seed(seed)
    shapes = [(inputs.arguments["input_ids"].numel(), count, 8) for count in (*heads, heads[1])]
    states = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    places = inputs.wanted.at  # of each token in the row
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KERNEL, reference)
        attend: Any = AttentionInterface()[ATTENTION]
        plan = inputs.arguments["attention_plan"]
        row = (each.transpose(0, 1)[None] for each in states)
        found, _ = attend(None, *row, None, scaling=0.4, attention_plan=plan)
    alone = places.split(batch.lengths)
    expected = torch.cat([masked([each[nodes] for each in states], 0.4, 0) for nodes in alone])
    torch.testing.assert_close(found[0, places], expected)
    weights = torch.randn(expected.shape, dtype=torch.float64)
    gradients = (torch.autograd.grad(output, states, weights) for output in (found[0, places], expected))
    torch.testing.assert_close(*gradients)


BATCH = batch_of_one_prompt([12, 30, 25, 1, 30], 10)


def engine_of(plugin: Any, model: Path, **options: Any) -> HFTraining:
    [component] = plugin.stretto_training()
    section = {"optimizer": "sgd", "lr": 1e-6, "clip_norm": None, "warmup_steps": 0, "dtype": "bfloat16"}
    context = Context(run="r", name="n", seed=1, model=str(model))
    engine = component.make(component.config(**{**section, **options}), context)
    engine.load(None)
    return engine


@pytest.mark.parametrize(
    ("plugin", "options"),
    [
        (stretto_torch, {"gradient_checkpointing": True}),
        (stretto_torch, {"shared_prefixes": False}),
        (stretto_fsdp2, {}),  # casts parameters; the others use autocast
        (stretto_pipeline, {"processes": 1, "stages": 1}),
    ],
)
def test_a_step_with_varlen_calls_is_close_to_one_with_separate_calls(
    tiny_models: Models, monkeypatch: pytest.MonkeyPatch, plugin: Any, options: dict[str, Any]
) -> None:
    calls = Mock(wraps=low_only)
    monkeypatch.setattr(KERNEL, calls)
    make = partial(engine_of, plugin, tiny_models("qwen2"), **options)
    with capture_logs() as logs:
        engines = [make(varlen_attention=varlen) for varlen in (True, False)]
    assert logs == []
    calls.reset_mock()
    found, expected = (step_of(engine, BATCH, Loss(squared, "sequence"))[0] for engine in engines)
    assert calls.call_count == 3 * (1 + ("gradient_checkpointing" in options))  # of three layers
    assert off(found, expected) < 0.02
    for engine in engines:
        engine.stop()


def without_gradient_of_keys(query: Tensor, key: Tensor, *inputs: Any, **options: Any) -> Tensor:
    return low_only(query, key.detach() + 0 * key, *inputs, **options)


@pytest.mark.parametrize(
    ("kernel", "dtype", "reason"),
    [
        (partial(reference, at_end=False), "bfloat16", "outputs or gradients are wrong (off by "),
        (without_gradient_of_keys, "bfloat16", "outputs or gradients are wrong (off by 1.0e+00)"),
        (low_only, "float32", "RuntimeError: FlashAttention only support"),
        (None, "bfloat16", "NotImplementedError: Could not run 'aten::_flash_attention_forward' with"),
    ],
)
def test_the_trial_at_the_start_finds_a_wrong_or_missing_kernel(
    tiny_models: Models, monkeypatch: pytest.MonkeyPatch, kernel: Any, dtype: str, reason: str
) -> None:
    if kernel is not None:
        monkeypatch.setattr(KERNEL, kernel)
    with capture_logs() as logs:
        engine = engine_of(stretto_torch, tiny_models("qwen2"), varlen_attention=True, dtype=dtype)
    [line] = logs
    assert line["event"] == "training.varlen_attention is not used"
    assert line["reason"].startswith(reason)
    engine.train(BATCH, Loss(squared, "sequence"), temperature=1.0)  # without the kernel
