"""Shared prefixes: the tree of any sequences, and the plain forward's logprobs and gradients from it."""

from collections.abc import Callable
from functools import cache, partial
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from fixture_types import Models
from stretto.component import Head
from stretto.errors import EngineError
from stretto.rl.batch import Batch
from stretto.training import packing, prefix_tree
from stretto.training.config import LoraConfig
from stretto.training.engine import HFTraining
from stretto.training.packing import PackedRows, PaddedRows, PrefixRows
from stretto.training.prefix_tree import PrefixTree, split_batch
from training_engines import assert_equal_steps, batch_of, loaded_engine

# Few different tokens, so that sequences often begin with the same ones.
SEQUENCES = st.lists(st.lists(st.integers(2, 4), min_size=1, max_size=12), min_size=1, max_size=10)


def arrays(sequences: list[list[int]]) -> list[Any]:
    return [np.array(sequence, dtype=np.int64) for sequence in sequences]


def batch_from(sequences: list[list[int]], groups: list[int] | None = None) -> Batch:
    """About half of the tokens are trained on."""
    tokens = torch.tensor([*chain(*sequences)])
    mask = torch.rand(len(tokens), generator=torch.Generator().manual_seed(len(tokens))) < 0.5
    batch = batch_of([*map(len, sequences)], len(sequences), tokens=tokens, loss_mask=mask)
    return batch.with_columns({"group": torch.tensor(groups or [0] * len(sequences))})


# ---------------------------------------------------------------------------------------- the tree


def test_a_tree_by_hand() -> None:
    tree = PrefixTree(arrays([[1, 2, 4, 7], [1, 2, 3], [], [1, 2, 4], [5], [1, 2, 3]]))
    assert tree.tokens.tolist() == [1, 2, 3, 4, 7, 5]
    assert tree.depths.tolist() == [0, 1, 2, 2, 3, 0]
    nodes = [each.tolist() for each in tree.nodes]
    assert nodes == [[0, 1, 3, 4], [0, 1, 2], [], [0, 1, 3], [5], [0, 1, 2]]


@given(sequences=SEQUENCES, width=st.sampled_from([100, 20_000, 10**6]))
def test_nodes_are_distinct_prefixes_and_read_their_ancestors(sequences: list[list[int]], width: int) -> None:
    tree = PrefixTree(arrays(sequences))
    prefixes = {tuple(sequence[:end]) for sequence in sequences for end in range(1, len(sequence) + 1)}
    assert len(tree.tokens) == len(prefixes)
    reads: dict[int, set[int]] = {}
    for sequence, nodes in zip(sequences, tree.nodes, strict=True):
        assert tree.tokens[nodes].tolist() == sequence
        assert tree.depths[nodes].tolist() == list(range(len(sequence)))
        for depth, node in enumerate(nodes.tolist()):
            reads[node] = set(nodes[: depth + 1].tolist())
    plan = tree.plan(width, torch.device("cpu"))
    every_key = list(range(len(tree.tokens))) if plan.keys is None else plan.keys.tolist()
    start = read = 0
    for block in plan.blocks:
        own = list(range(start, start + block.queries))
        keys = every_key[read : read + block.keys]
        assert len(set(keys)) == len(keys)
        for row, node in enumerate(own):
            if block.bias is None:
                assert keys == own
                assert reads[node] == set(own[: row + 1])
            else:
                seen = {key for key, bias in zip(keys, block.bias[row], strict=True) if bias == 0}
                assert seen == reads[node]
        start, read = start + block.queries, read + block.keys
    assert start == len(tree.tokens)


@given(
    sequences=SEQUENCES,
    groups=st.lists(st.integers(0, 2), min_size=10, max_size=10),
    budget=st.integers(1, 60),
)
def test_micro_batches_hold_a_node_budget(sequences: list[list[int]], groups: list[int], budget: int) -> None:
    whole = batch_from(sequences, groups[: len(sequences)])

    def size(batch: Batch) -> int:
        return len(PrefixTree(np.split(batch["tokens"].numpy(), np.cumsum(batch.lengths)[:-1])).tokens)

    parts = split_batch(whole, budget, whole_groups=False)
    assert torch.equal(Batch.concat(parts)["tokens"], whole["tokens"])
    assert [length for part in parts for length in part.lengths] == whole.lengths
    assert all(size(part) <= budget or len(part) == 1 for part in parts)
    # A group that fits is in one part.
    runs = whole.split([count for count, _ in whole.groups()])
    ends = set(np.cumsum([len(part) for part in parts]).tolist())
    first = 0
    for run in runs:
        if size(run) <= budget:
            assert not ends & set(range(first + 1, first + len(run)))
        first += len(run)
    for part in split_batch(whole, budget, whole_groups=True)[:-1]:
        assert size(part) <= budget or len(part.groups()) == 1


# ------------------------------------------------------------------------------------- the numbers


engine_of = partial(loaded_engine, lr=1e-6, optimizer="sgd", clip_norm=None)


@pytest.fixture(scope="module")
def sides(tiny_models: Models) -> Callable[[str, int], tuple[HFTraining, HFTraining]]:
    """Engines with and without shared prefixes; several examples train the same two."""

    @cache
    def engines(architecture: str, budget: int) -> tuple[HFTraining, HFTraining]:
        make = partial(engine_of, tiny_models(architecture), micro_batch_tokens=budget)
        return make(), make(shared_prefixes=False)

    return engines


@settings(max_examples=25)
@given(
    sequences=SEQUENCES,
    budget=st.sampled_from([9, 30, 4096]),
    architecture=st.sampled_from(["qwen2", "gpt2"]),
)
def test_any_sequences_in_any_split_give_the_numbers_of_each_alone(
    sides: Callable[[str, int], tuple[HFTraining, HFTraining]],
    sequences: list[list[int]],
    budget: int,
    architecture: str,
) -> None:
    batch = batch_from(sequences)
    if not batch["loss_mask"][batch.positions() > 0].any():
        batch["loss_mask"].fill_(True)
    shared, plain = sides(architecture, budget)
    assert_equal_steps(shared, plain, batch, 0.1)


GROUPS = [[*range(5, 25), end, *range(end, end + 9)] for end in (30, 31, 31, 40)]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's
@pytest.mark.parametrize(
    ("head", "options"),
    [
        ("policy", {"gradient_checkpointing": True}),
        ("policy", {"lora": LoraConfig(rank=4, targets=("q_proj", "down_proj"), send="merged")}),
        ("value", {}),
        ("reward", {}),
    ],
)
def test_other_options_share_prefixes_too(tiny_models: Models, head: Head, options: dict[str, Any]) -> None:
    model = tiny_models("llama")
    one, other = (engine_of(model, head=head, shared_prefixes=shared, **options) for shared in (True, False))
    assert _count_nodes(one, batch_from(GROUPS)) < 0.5 * _count_nodes(other, batch_from(GROUPS))
    assert_equal_steps(one, other, batch_from(GROUPS), 0.1 if head == "policy" else 0.0)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("limit", [0, 1000])
def test_masks_above_a_limit_are_made_for_some_queries_at_a_time(
    limit: int, checkpointing: bool, tiny_models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_tree, "BIAS_BYTES", 0)
    monkeypatch.setattr(packing, "BIAS_BYTES", limit)
    blocks = PrefixTree([np.array(group) for group in GROUPS]).plan(8, torch.device("cpu")).blocks
    assert any(block.tree is not None for block in blocks)
    options: dict[str, Any] = {"gradient_checkpointing": checkpointing}
    one, other = (
        engine_of(tiny_models("qwen2"), shared_prefixes=shared, **options) for shared in (True, False)
    )
    assert_equal_steps(one, other, batch_from(GROUPS), 0.1)


def _count_nodes(engine: HFTraining, batch: Batch) -> int:
    counts: list[int] = []

    def count(module: Any, arguments: Any, named: dict[str, Any]) -> None:
        counts.append(named["input_ids"].numel())

    model: Any = engine._model  # pyright: ignore[reportPrivateUsage]
    handle = model.register_forward_pre_hook(count, with_kwargs=True)
    engine.forward(batch, temperature=1.0)
    handle.remove()
    return sum(counts)


def test_rows_are_as_the_model_and_the_section_allow(tiny_models: Models) -> None:
    with capture_logs() as logs:
        padded = engine_of(tiny_models("gemma2"))
    assert [line["event"] for line in logs] == ["rows are padded, and each sequence computes its prefix"]
    packed = engine_of(tiny_models("qwen2"), shared_prefixes=False)
    shared = [engine_of(tiny_models(architecture)) for architecture in ("qwen2", "gpt2")]
    found = [type(engine._packing) for engine in (padded, packed, *shared)]  # pyright: ignore[reportPrivateUsage]
    assert found == [PaddedRows, PackedRows, PrefixRows, PrefixRows]
    with pytest.raises(EngineError, match="does not allow it"):
        engine_of(tiny_models("gemma2"), packing="packed")
