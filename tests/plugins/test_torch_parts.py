"""Parts of the torch inference engine that can be tested alone: shapes, drawing, the test of a decoder."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from torch import Tensor
from transformers import AutoModelForCausalLM

from stretto.array import Array
from stretto.engine import GenerateRequest, Sampling
from stretto.errors import EngineError
from stretto_torch import TorchInferenceConfig
from stretto_torch import model as model_module
from stretto_torch.batcher import Batcher
from stretto_torch.decoder_fast import FastDecoder
from stretto_torch.determinism import kept_shapes, stable_shapes, what_was_found
from stretto_torch.kv import Block, LayerShape, Move, SlotCache
from stretto_torch.model import LoadedModel, difference, load_model
from stretto_torch.norm import Norm
from stretto_torch.prefixes import Prefixes
from stretto_torch.sampling import Bias, SamplingSettings, draw, uniforms
from stretto_torch.shapes import Shapes, TokenSpan
from stretto_torch.size_classes import SizeClasses
from stretto_torch.sleep import DeviceMemory
from torch_engine import make_model

# ------------------------------------------------------------------------- shapes, size classes, the pool


@pytest.mark.parametrize(
    ("config", "in_flight", "memory_gb", "slots"),
    [
        ({}, 768, 16, 128),
        ({}, 96, 16, 96),
        ({}, 768, 0.03, 64),
        ({}, 768, 0.0001, 32),
        ({}, 16, 0.0001, 16),
        ({}, 0, 16, 32),
        ({"cache_gb": 0.001}, 768, 0.0001, 128),
        ({"deterministic": True}, 768, 16, 32),
        ({"slots": 7}, 768, 16, 7),
    ],
)
def test_the_slots_follow_the_samples_in_flight_and_the_memory(
    tiny_models: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, Any],
    in_flight: int,
    memory_gb: float,
    slots: int,
) -> None:
    def memory(device: Any, share: float) -> float:
        return share * memory_gb * 2**30

    monkeypatch.setattr(model_module, "_memory", memory)
    chosen = TorchInferenceConfig(context_length=64, device="cpu", **config)
    loaded = load_model(str(tiny_models("qwen2")), chosen, in_flight)
    assert loaded.shapes.slots == slots
    token, cache = 3 * 2 * 32 * 4, loaded.decoder.cache.tokens
    if "cache_gb" not in config:
        assert cache * token <= max(memory_gb / 8 * 2**30, 64 * token)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_on_a_processor_takes_memory_where_it_is_written(dtype: torch.dtype) -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    cache = SlotCache([LayerShape(4, 64)] * 2, 8, 500_000, torch.device("cpu"), dtype)
    assert process.memory_info().rss - before < 100e6  # of 2 GB, or 1
    assert {(layer.dtype, layer[-1].tolist() == [0] * 64) for layer in cache.layers} == {(dtype, True)}


def test_fixed_shapes_do_not_depend_on_who_is_there() -> None:
    shapes = Shapes(slots=20, context=500, fixed=True)
    for positions in (np.array([3]), np.array([400, 3, 2])):
        (span,) = shapes.spans(positions, [(0, len(positions))])
        assert (span.start, span.stop, span.length) == (0, 24, 512)
        assert shapes.rows(len(positions)) == 24


@dataclass(eq=False)
class Row:
    block: Any
    text: int
    had: int  # tokens in the pool
    need: int  # and so many soon


class Pool:
    """A pool whose every position holds the text that was written there, and what should be in it."""

    def __init__(self, tokens: int) -> None:
        shape = LayerShape(kv_heads=2, head_dim=1)
        self.cache = SlotCache([shape], 64, tokens, torch.device("cpu"), torch.float32)

    def write(self, block: Block, text: int, start: int, stop: int) -> None:
        """Keys and values of both heads say which text they are of, and which position."""
        for head in range(4):
            at = self._at(block, head) + start
            values = torch.arange(start, stop) + 1000 * text + 0.125 * head
            self.cache.layers[0][at : at + stop - start, 0] = values

    def holds(self, block: Block, text: int, length: int) -> bool:
        found = [self.cache.layers[0][self._at(block, head) :][:length, 0] for head in range(4)]
        return all(
            torch.equal(part, torch.arange(length) + 1000 * text + 0.125 * head)
            for head, part in enumerate(found)
        )

    def _at(self, block: Block, head: int) -> int:
        half = 2 * (self.cache.tokens + 1) * (head >= 2)
        return half + block.start * 2 + (head % 2) * block.capacity


@pytest.mark.parametrize(
    ("needs", "classes"),
    [
        ([10] * 40 + [50] * 30, {32: 40, 64: 30}),
        ([10] * 4 + [50] * 30, {64: 34}),  # four rows need no call of attention of their own
        ([10] * 4 + [50] * 30 + [500], {64: 34, 512: 1}),  # reading 30 short texts up to 512 would cost more
        ([10, 500], {512: 2}),
    ],
)
def test_a_size_class_that_does_not_pay_joins_the_next(needs: list[int], classes: dict[int, int]) -> None:
    size_classes = SizeClasses(Shapes(128, context=512), 128 * 512, one_size_class=False)
    plan = size_classes.plan(needs, [None] * len(needs))
    assert {plan.blocks[start].capacity: stop - start for start, stop in plan.size_classes} == classes


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32), length=st.sampled_from([96, 512, 608, 2080]), together=st.booleans())
def test_rows_and_kept_texts_stay_whole_wherever_they_go(seed: int, length: int, together: bool) -> None:
    random, slots = np.random.default_rng(seed), 24
    tokens = int(random.integers(8 * length, 28 * length))
    size_classes = SizeClasses(Shapes(slots, context=length), tokens, one_size_class=together)
    pool, prefixes = Pool(tokens), Prefixes(tokens)
    running: list[Row] = []
    gone: list[Row] = []
    for text in range(1, 13):
        for row in running:
            row.need = min(row.had + int(random.integers(length // 2)), length)
        left = [row for row in running if random.random() < 0.3]
        new = [Row(None, 100 * text + i, 0, int(random.integers(1, length))) for i in range(slots)]
        running = [row for row in running if row not in left] + new[: random.integers(slots)]
        while len(running) > slots or not size_classes.fits([row.need for row in running]):
            running.pop()

        plan = size_classes.plan([row.need for row in running], [row.block for row in running])
        assert sorted(plan.order) == list(range(len(running)))
        running = [running[i] for i in plan.order]
        moves = [
            Move(row.block, target, row.had)
            for row, target in zip(running, plan.blocks, strict=False)
            if row.block not in (None, target)
        ]
        moves += prefixes.arrange(
            plan.free, [(row.block, np.full(row.had, row.text, np.int32)) for row in left]
        )
        if moves:
            pool.cache.copy(moves)

        assert_disjoint(plan.blocks, plan.free, tokens)
        assert [row for rows in plan.size_classes for row in range(*rows)] == list(range(len(running)))
        for start, stop in plan.size_classes:
            first, capacity = plan.blocks[start]
            assert plan.blocks[start:stop] == [
                Block(first + i * capacity, capacity) for i in range(stop - start)
            ]
        for row, block in zip(running, plan.blocks, strict=False):
            assert row.need <= block.capacity
            assert pool.holds(block, row.text, row.had)
            pool.write(block, row.text, row.had, row.need)
            row.block, row.had = block, row.need
        gone += left
        for row in gone:
            found = prefixes.find(np.full(row.had + 1, row.text, np.int32))
            if found is not None:
                block, shared = found
                assert isinstance(block, Block)
                assert plan.free[0] <= block.start <= sum(block) <= plan.free[1]
                assert shared == row.had
                assert pool.holds(block, row.text, shared)


def assert_disjoint(blocks: list[Block], free: tuple[int, int], tokens: int) -> None:
    ends = sorted([(block.start, sum(block)) for block in blocks] + [free])
    assert [start for start, _ in ends] == [0, *(stop for _, stop in ends[:-1])]
    assert ends[-1][1] == tokens


def test_the_longest_beginning_is_found() -> None:
    prefixes, text = Prefixes(300), np.arange(1000, dtype=np.int32)
    fork = np.concatenate([text[:70], text[500:570]])
    block = Block(0, 512)
    prefixes.arrange((0, 300), [(block, text[:98])])
    prefixes.arrange((0, 300), [(block, fork)])

    assert prefixes.find(text[:200]) == (Block(0, 98), 98)
    assert prefixes.find(fork) == (Block(98, 140), 139)  # something is left to compute
    assert prefixes.find(np.append(fork[:100], text[:50])) == (Block(98, 140), 100)
    assert prefixes.find(text[:64]) is None
    assert prefixes.find(text[1:200]) is None
    assert prefixes.arrange((0, 300), [(block, text[:63]), (block, text[:301])]) == []  # too short, too long
    assert prefixes.lost_tokens == 0
    prefixes.clear()
    assert prefixes.find(text[:200]) is None
    assert prefixes.lost_tokens == 0  # other weights: nothing that is computed now was lost


def test_the_text_whose_last_use_is_longest_ago_goes_first() -> None:
    prefixes, block = Prefixes(300), Block(0, 512)
    one, two, three, four = (np.arange(start, start + 101, dtype=np.int32) for start in (0, 200, 400, 600))
    prefixes.arrange((0, 300), [(block, text[:100]) for text in (one, two, three)])
    assert prefixes.find(one) == (Block(0, 100), 100)
    assert prefixes.arrange((0, 300), [(block, four[:100])]) == [Move(block, Block(100, 100), 100)]
    assert prefixes.find(two) is None
    assert prefixes.lost_tokens == 96  # whole pieces of it
    assert [prefixes.find(text) is not None for text in (one, three, four)] == [True] * 3

    # Rows take the first part: what was there goes to where the text is that was used longest ago.
    assert prefixes.arrange((100, 300)) == []  # `one` was
    assert prefixes.find(four)
    assert prefixes.find(three)
    assert prefixes.arrange((200, 400)) == [Move(Block(100, 100), Block(300, 100), 100)]
    assert prefixes.find(four) == (Block(300, 100), 100)


def test_on_a_processor_texts_take_more_of_the_pool_only_where_that_is_of_use() -> None:
    prefixes, block = Prefixes(100_000, saves=True), Block(90_000, 512)
    texts = [np.arange(start, start + 500, dtype=np.int32) for start in range(0, 5000, 500)]

    def ends(free: tuple[int, int]) -> int:
        moves = prefixes.arrange(free, [(block, text) for text in texts])
        return max(move.target.start + move.length for move in moves)

    assert ends((0, 100_000)) == 2000
    assert prefixes.find(texts[0]) is None  # a text comes again, and had no room
    assert ends((0, 100_000)) == 4000
    assert ends((0, 100_000)) == 4000
    prefixes.arrange((9000, 100_000))  # rows take as much: then texts may, too
    assert 4096 < ends((0, 100_000)) < 9000


def test_a_text_that_another_continues_gives_up_its_room() -> None:
    prefixes, block, text = Prefixes(300), Block(0, 512), np.arange(1000, dtype=np.int32)
    other = text[500:]
    prefixes.arrange((0, 300), [(block, other[:100]), (block, text[:100])])
    prefixes.arrange((0, 300), [(block, text[:200])])
    assert prefixes.find(other[:101]) == (Block(0, 100), 100)
    assert prefixes.find(text[:300]) == (Block(100, 200), 200)


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
    tokens, logprobs, _ = draw(logits, np.array([0, largest], np.float32), None)
    assert tokens.tolist() == [1, 2]
    np.testing.assert_allclose(logprobs, np.log([1 / (1 + np.e), np.e / (1 + np.e)]), rtol=1e-6)


def test_a_row_that_is_not_finite_is_said_so_and_spoils_no_other() -> None:
    logits = torch.tensor([[torch.nan, 0.0, 0.0], [0.0, 0.0, 0.0], [torch.inf, 0.0, 0.0]])
    tokens, logprobs, _ = draw(logits, np.array([0.5, 0.5, 0.5], np.float32), None)
    assert tokens[1] == 1
    assert np.isfinite(logprobs).tolist() == [False, True, False]


def test_a_flat_distribution_keeps_more_tokens_than_are_looked_at_first() -> None:
    vocabulary = 1000
    logits = torch.zeros(1, vocabulary).repeat(400, 1)
    logits[::2] = torch.linspace(20, 0, vocabulary)
    uniform = np.linspace(0, 0.999, 400, dtype=np.float32)
    ones, zeros = np.ones(400, np.float32), np.zeros(400, np.float32)
    settings = SamplingSettings(ones, np.zeros(400, np.int64), 0.5 * ones, zeros)
    tokens, logprobs, _ = draw(logits, uniform, settings)

    np.testing.assert_allclose(logprobs[1::2], np.log(1 / 500), atol=1e-5)
    assert len(set(tokens[1::2].tolist())) > 180
    assert tokens[::2].max() < 40


def test_bias_comes_first_then_temperature_then_min_p_then_top_p() -> None:
    # Row 0: softmax([0, 1, 2, 1] / 0.5) = e^[0, 2, 4, 2]; min_p 0.1 keeps what is over e^4 / 10 = 5.46, which
    # leaves tokens 1, 2, 3; of their 69.4 the likeliest has 0.787, so top_p 0.8 keeps one more.
    # Row 1 is greedy: bias alone counts, token 3, with the logprob of the plain distribution.
    # Row 2 is as if nothing were asked of it.
    logits = torch.tensor([[0.0, 3.0, 0.0, 1.0], [0.0, 1.0, 2.0, 0.0], [0.0, 1.0, 2.0, 1.0]])
    bias = Bias(rows=np.array([0, 0, 1]), tokens=np.array([1, 2, 3]), values=np.array([-2, 2, 4], np.float32))
    settings = SamplingSettings(
        temperature=np.array([0.5, 0, 1], np.float32),
        top_k=np.array([0, 2, 0]),
        top_p=np.array([0.8, 0.5, 1], np.float32),
        min_p=np.array([0.1, 0.9, 0], np.float32),
        bias=bias,
    )
    seen: list[set[int]] = [set(), set(), set()]
    for uniform in np.linspace(0, 0.999, 50, dtype=np.float32):
        tokens, logprobs, _ = draw(logits.clone(), np.full(3, uniform), settings)
        for row, token in enumerate(tokens.tolist()):
            seen[row].add(token)
        weights = np.exp([2.0, 4.0])
        if tokens[0] == 2:
            np.testing.assert_allclose(logprobs[0], np.log(weights[1] / weights.sum()), rtol=1e-5)
        np.testing.assert_allclose(logprobs[1], 4 - np.log(np.exp([0, 1, 2, 4]).sum()), rtol=1e-5)
        np.testing.assert_allclose(
            logprobs[2], logits[2, tokens[2]] - np.log(np.exp([0, 1, 2, 1]).sum()), rtol=1e-5
        )

    assert seen[0] - {1, 3} == {2}
    assert len(seen[0]) == 2
    assert seen[1:] == [{3}, {0, 1, 2, 3}]


# --------------------------------------------------------------------------------------- decoders


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_is_the_root_mean_square_norm(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 3, 40, dtype=dtype), torch.randn(40, dtype=dtype)
    x[0] *= 1e-3  # here eps counts
    norm = Norm(weight * Norm.factor(40, weight), 1e-6)

    torch.testing.assert_close(norm(x), torch.nn.functional.rms_norm(x, (40,), weight, 1e-6))


def test_a_decoder_that_computes_something_else_is_seen() -> None:
    model = make_model("qwen2")
    decoder = FastDecoder(model, rows=8, length=64, tokens=512, onednn=False)
    right = difference(decoder, model)
    model.model.rotary_emb.inv_freq *= 1.1
    wrong = difference(decoder, model)

    assert right < 1e-5
    assert wrong > 1e-4


class Leaking(FastDecoder):
    """A decoder whose rows know something of each other, as bad kernels would have it."""

    def __init__(self, leak: Callable[[Tensor, Sequence[TokenSpan]], Tensor | float]) -> None:
        super().__init__(make_model("qwen2"), rows=24, length=160, tokens=24 * 160, onednn=False)
        self._leak = leak

    def decode(
        self, tokens: Tensor, positions: Tensor, spans: Sequence[TokenSpan], shifts: Tensor | None = None
    ) -> Tensor:
        return super().decode(tokens, positions, spans, shifts) * (1 + self._leak(tokens, spans))


def test_rows_and_lengths_are_fixed_where_bits_depend_on_them() -> None:
    shapes = Shapes(slots=9, context=160)
    assert stable_shapes(Leaking(lambda tokens, spans: 0.0), shapes) == shapes
    by_rows = stable_shapes(Leaking(lambda tokens, spans: 1e-6 * len(tokens)), shapes)
    by_length = stable_shapes(Leaking(lambda tokens, spans: 1e-6 * spans[0].length), shapes)
    assert (by_rows.fixed, by_rows.trimmed) == (True, True)
    assert (by_length.fixed, by_length.trimmed) == (True, False)
    assert "depend on inference.slots" in what_was_found(by_rows)
    with pytest.raises(EngineError, match="depend on the other rows"):
        stable_shapes(Leaking(lambda tokens, spans: 1e-6 * tokens.sum()), shapes)


class LeakingPrompts(FastDecoder):
    """A decoder whose prompts know how many others are computed with them."""

    def __init__(self) -> None:
        super().__init__(make_model("qwen2"), rows=24, length=160, tokens=24 * 160, onednn=False)
        self.prefills: list[int] = []

    def prefill(self, tokens: Tensor, *more: Any, **images: Any) -> Tensor:
        self.prefills.append(len(tokens))
        return super().prefill(tokens, *more, **images) * (1 + 1e-6 * len(tokens))


def test_prompts_are_computed_separately_where_their_bits_depend_on_each_other_and_that_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the same model, processor and values."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said: list[str] = []
    first, other = LeakingPrompts(), LeakingPrompts()
    shapes = kept_shapes(first, Shapes(slots=20, context=160), ["model", "dtype"], said.append)
    assert shapes == Shapes(slots=20, context=160, solo_prompts=True)
    assert "each is computed by itself" in what_was_found(shapes)
    assert max(first.prefills) > 1  # before it was known
    assert re.fullmatch(r"tries that .* other: \d+ of \d+, about \d+ s left", said[-1])
    assert kept_shapes(other, Shapes(slots=20, context=160), ["model", "dtype"], said.append) == shapes
    assert not other.prefills
    kept_shapes(other, Shapes(slots=20, context=160), ["model", "other dtype"], said.append)
    assert other.prefills
    [file, _] = sorted(
        (tmp_path / "stretto" / "deterministic").iterdir(), key=lambda each: each.stat().st_mtime_ns
    )
    file.write_text("{")  # cut short
    other.prefills.clear()
    assert kept_shapes(other, Shapes(slots=20, context=160), ["model", "dtype"], said.append) == shapes
    assert other.prefills


def make_batcher(model: Any, decoder: FastDecoder | None = None, **shapes: bool) -> Batcher:
    """A deterministic batcher of 20 slots."""
    decoder = decoder or FastDecoder(model, rows=24, length=160, tokens=24 * 160, onednn=False)
    batcher = Batcher(
        LoadedModel(decoder, decoder.targets, Shapes(slots=20, context=160, **shapes), eos=()),
        tokenizer=lambda: None,
        deterministic=True,
        recompute_on_swap=False,
    )
    batcher.swap(dict(model.named_parameters()), 0)
    return batcher


def take(batcher: Batcher, name: str, prompt: int, max_tokens: int) -> None:
    sampling = Sampling(max_tokens=max_tokens)
    batcher.take(GenerateRequest(name, Array.of(range(prompt)), (prompt,), sampling, 0), monotonic())


def test_deterministic_prompts_of_one_padded_length_share_a_prefill() -> None:
    decoder = LeakingPrompts()
    for solo in (False, True):
        batcher = make_batcher(make_model("qwen2"), decoder, solo_prompts=solo)
        for i, length in enumerate((17, 3, 32, 16, 33)):
            take(batcher, f"{i}", length, 9)
        decoder.prefills.clear()
        with torch.inference_mode():
            batcher.step()
        assert decoder.prefills == ([1] * 5 if solo else [2, 2, 1])


def test_a_model_whose_weights_are_not_finite_is_refused_by_name(
    tiny_models: Callable[[str], Path], tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_models("qwen2"))
    model.model.layers[1].mlp.up_proj.weight.data[3, 5:7] = torch.nan
    model.save_pretrained(tmp_path)
    fault = (
        "cannot serve the model: weights are not finite: 2 of 6144 values of tensor"
        " 'model.layers.1.mlp.up_proj.weight' are NaN or infinite"
    )
    with capture_logs(), pytest.raises(EngineError, match=fault):
        load_model(str(tmp_path), TorchInferenceConfig(slots=4, device="cpu"))


def test_fixed_shapes_give_the_same_answers() -> None:
    def answers(*, fixed: bool) -> dict[str, list[int]]:
        batcher = make_batcher(model, fixed=fixed)
        for i in range(30):
            take(batcher, f"{i}", 1 + i, 5 + 4 * i)
        while batcher.busy:
            batcher.step()
        return {chunk.request: chunk.tokens.tolist() for chunk in batcher.collect()}

    model = make_model("qwen2")
    with torch.inference_mode():
        free = answers(fixed=False)
        assert answers(fixed=True) == free
    assert {name: len(tokens) for name, tokens in free.items()} == {f"{i}": 5 + 4 * i for i in range(30)}


def test_memory_that_is_freed_is_the_systems_and_comes_back_as_zeros() -> None:
    """Of memory that torch or numpy allocated, whole or as a part, and of weights that a file holds."""
    size = 2**24
    tensors = [torch.ones(size), torch.from_numpy(np.ones(size, np.float32))[5:], torch.ones(2, size)[1]]
    memory, views = DeviceMemory([*tensors, tensors[0][7:], torch.ones(3)]), [t[:size:99] for t in tensors]
    DeviceMemory([]).free()  # what other tests have left in this process
    before = psutil.Process().memory_full_info().uss
    memory.free()
    freed = before - psutil.Process().memory_full_info().uss
    assert freed == pytest.approx(4 * 4 * size, rel=0.01)
    memory.restore()
    for tensor, view in zip(tensors, views, strict=True):
        assert not view[20:-20].any()  # a page may be shared with other memory at both ends
        tensor.fill_(2)
        assert (view == 2).all()
