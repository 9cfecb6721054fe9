"""Parts of the torch inference engine that can be told by themselves: order, shapes, drawing, the test
of a decoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from stretto.array import Array
from stretto.engine import GenerateRequest, Sampling
from stretto.errors import EngineError
from stretto_torch.batcher import Batcher
from stretto_torch.decoder_fast import FastDecoder
from stretto_torch.determinism import stable_shapes
from stretto_torch.model import Model, difference
from stretto_torch.requests import Job, open_job
from stretto_torch.sampling import Settings, draw, uniforms
from stretto_torch.shapes import Shapes, Span
from stretto_torch.waiting import WaitingLine

# ----------------------------------------------------------------------------------------- order


def line(delay_s: float, *arrivals: tuple[str, float, int]) -> WaitingLine:
    """A line that serves version 0, with requests of (id, arrival, priority)."""
    waiting = WaitingLine(delay_s)
    waiting.set_version(0)
    for name, arrived, priority in arrivals:
        waiting.add(job(name, priority=priority), arrived)
    return waiting


def job(name: str, *, priority: int = 0, min_version: int = 0) -> Job:
    request = GenerateRequest(name, Array.of([5]), (0,), Sampling(), min_version, priority=priority)
    return open_job(request, 0.0, vocabulary=10, context=512, deterministic=False)


def order(waiting: WaitingLine) -> list[str]:
    served: list[str] = []
    while waiting.ready:
        served.append(waiting.pop().job.request.id)
    return served


def test_who_comes_first_is_served_first() -> None:
    assert order(line(2.0, ("a", 0.0, 0), ("b", 1.0, 0), ("c", 1.0, 0))) == ["a", "b", "c"]


def test_evaluation_lets_training_pass_for_its_delay_and_no_longer() -> None:
    waiting = line(2.0, ("eval", 0.0, 1), ("t1", 0.5, 0), ("t2", 1.9, 0), ("t3", 2.1, 0), ("t4", 9.0, 0))
    assert order(waiting) == ["t1", "t2", "eval", "t3", "t4"]


def test_who_has_ended_while_waiting_is_passed_over() -> None:
    waiting = WaitingLine(0.0)
    waiting.set_version(0)
    jobs = [job(name) for name in "abc"]
    for arrived, each in enumerate(jobs):
        waiting.add(each, arrived)
    for ended in (jobs[0], jobs[1]):
        ended.samples[0].ended = True
        waiting.leave()

    assert len(waiting) == 1
    assert order(waiting) == ["c"]


def test_who_needs_newer_weights_keeps_the_place_of_arrival() -> None:
    waiting = WaitingLine(0.0)
    for arrived, (name, min_version) in enumerate([("a", 1), ("b", 0), ("c", 2), ("d", 1)]):
        waiting.add(job(name, min_version=min_version), arrived)

    assert order(waiting) == []
    waiting.set_version(0)
    assert order(waiting) == ["b"]
    waiting.set_version(2)
    assert (len(waiting), order(waiting)) == (3, ["a", "c", "d"])


# ---------------------------------------------------------------------------------------- shapes


@given(
    positions=st.lists(st.integers(1, 2000), min_size=1, max_size=64),
    classes=st.lists(st.integers(32, 1024), max_size=3, unique=True).map(sorted),
)
def test_spans_cover_every_row_as_far_as_it_reaches(positions: list[int], classes: list[int]) -> None:
    ordered = np.array(sorted(positions, reverse=True))
    shapes = Shapes(slots=64, context=2048)
    spans = shapes.spans(ordered, tuple(classes))

    assert [row for span in spans for row in range(span.start, span.stop)] == list(range(len(ordered)))
    for span in spans:
        longest = ordered[span.start : span.stop].max()
        assert longest < span.length <= longest + 32
        assert span.length % 32 == 0
    assert len(spans) <= len(classes) + 1
    assert len(ordered) <= shapes.rows(len(ordered)) < len(ordered) + 8


def test_fixed_shapes_do_not_depend_on_who_is_there() -> None:
    shapes = Shapes(slots=20, context=500, fixed=True)
    for positions in (np.array([3]), np.array([400, 3, 2])):
        (span,) = shapes.spans(positions, (128,))
        assert (span.start, span.stop, span.length) == (0, 24, 512)
        assert shapes.rows(len(positions)) == 24


# -------------------------------------------------------------------------------------- sampling


@given(seed=st.integers(-(2**63), 2**64 - 1), count=st.integers(1, 300), more=st.integers(0, 9))
def test_uniforms_depend_on_seed_and_position_alone(seed: int, count: int, more: int) -> None:
    table = uniforms(seed, count + more)
    assert table[:count].tolist() == uniforms(seed, count).tolist()
    assert table.min() >= 0
    assert table.max() < 1


def test_uniforms_are_uniform() -> None:
    table = np.concatenate([uniforms(seed, 500) for seed in range(40)])
    seen = np.histogram(table, bins=20, range=(0, 1))[0]
    assert ((seen - 1000) ** 2 / 1000).sum() < 19 + 4 * 38**0.5
    assert abs(np.corrcoef(table[:-1], table[1:])[0, 1]) < 0.03


def test_the_ends_of_the_unit_interval_give_tokens_that_have_a_probability() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf]] * 2)
    largest = np.float32(1 - 2**-23)
    tokens, logprobs = draw(logits, np.array([0, largest], np.float32), None)
    assert tokens.tolist() == [1, 2]
    np.testing.assert_allclose(logprobs, np.log([1 / (1 + np.e), np.e / (1 + np.e)]), rtol=1e-6)


def test_a_row_that_is_not_finite_is_said_so_and_spoils_no_other() -> None:
    logits = torch.tensor([[torch.nan, 0.0, 0.0], [0.0, 0.0, 0.0], [torch.inf, 0.0, 0.0]])
    tokens, logprobs = draw(logits, np.array([0.5, 0.5, 0.5], np.float32), None)
    assert tokens[1] == 1
    assert np.isfinite(logprobs).tolist() == [False, True, False]


def test_a_flat_distribution_keeps_more_tokens_than_are_looked_at_first() -> None:
    vocabulary = 1000
    logits = torch.zeros(1, vocabulary).repeat(400, 1)
    logits[::2] = torch.linspace(20, 0, vocabulary)
    uniform = np.linspace(0, 0.999, 400, dtype=np.float32)
    settings = Settings(np.ones(400, np.float32), np.zeros(400, np.int64), np.full(400, 0.5, np.float32))
    tokens, logprobs = draw(logits, uniform, settings)

    np.testing.assert_allclose(logprobs[1::2], np.log(1 / 500), atol=1e-5)
    assert len(set(tokens[1::2].tolist())) > 180
    assert tokens[::2].max() < 40


# --------------------------------------------------------------------------------------- decoders


def tiny_model() -> Any:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=160,
        initializer_range=0.2,
        eos_token_id=None,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config).eval().requires_grad_(False)


def test_a_decoder_that_computes_something_else_is_seen() -> None:
    model = tiny_model()
    decoder = FastDecoder(model, rows=8, length=64, onednn=False)
    right = difference(decoder, model)
    model.model.rotary_emb.inv_freq *= 1.1
    wrong = difference(decoder, model)

    assert right < 1e-5
    assert wrong > 1e-4


class Leaking(FastDecoder):
    """A decoder whose rows know something of each other, as bad kernels would have it."""

    def __init__(self, leak: Callable[[Tensor, Sequence[Span]], Tensor | float]) -> None:
        super().__init__(tiny_model(), rows=24, length=160, onednn=False)
        self._leak = leak

    def decode(self, tokens: Tensor, positions: Tensor, spans: Sequence[Span]) -> Tensor:
        return super().decode(tokens, positions, spans) * (1 + self._leak(tokens, spans))


def test_shapes_are_fixed_where_bits_depend_on_them() -> None:
    shapes = Shapes(slots=20, context=160)
    assert stable_shapes(Leaking(lambda tokens, spans: 0.0), shapes) == shapes
    with capture_logs() as logs:
        by_rows = stable_shapes(Leaking(lambda tokens, spans: 1e-6 * len(tokens)), shapes)
        by_length = stable_shapes(Leaking(lambda tokens, spans: 1e-6 * spans[0].length), shapes)

    assert by_rows.fixed
    assert by_length.fixed
    assert [entry["log_level"] for entry in logs] == ["warning"] * 2


def test_bits_that_depend_on_the_neighbours_themselves_are_refused() -> None:
    with capture_logs(), pytest.raises(EngineError, match="depend on the other rows"):
        stable_shapes(Leaking(lambda tokens, spans: 1e-6 * tokens.sum()), Shapes(slots=20, context=160))


def test_fixed_shapes_give_the_same_answers() -> None:
    def answers(*, fixed: bool) -> dict[str, list[int]]:
        decoder = FastDecoder(model, rows=24, length=160, onednn=False)
        batcher = Batcher(
            Model(decoder, Shapes(slots=20, context=160, fixed=fixed), eos=()),
            tokenizer=lambda: None,
            deterministic=True,
            recompute_on_swap=False,
            evaluation_delay_s=0.0,
        )
        batcher.swap(dict(model.named_parameters()), 0)
        for i in range(30):
            prompt, sampling = Array.of(range(1 + i)), Sampling(max_tokens=5 + 4 * i)
            batcher.take(GenerateRequest(f"{i}", prompt, (i,), sampling, 0), monotonic())
        found: dict[str, list[int]] = {}
        while batcher.busy:
            batcher.step()
        for chunk in batcher.collect():
            found[chunk.request] = chunk.tokens.tolist()
        return found

    model = tiny_model()
    with torch.inference_mode():
        free = answers(fixed=False)
        assert answers(fixed=True) == free
    assert {name: len(tokens) for name, tokens in free.items()} == {f"{i}": 5 + 4 * i for i in range(30)}
