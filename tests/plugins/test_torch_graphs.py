"""Decode steps that a GPU replays as CUDA graphs. On a CPU the same steps run without graphs, which shows all
that a replay depends on: what a step reads, at which addresses, and what it computes."""

from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stretto.errors import EngineError
from stretto_torch import TorchInferenceConfig
from stretto_torch.batcher import Batcher
from stretto_torch.decoder_fast import FastDecoder
from stretto_torch.decoder_graphs import GraphDecoder
from stretto_torch.model import LoadedModel, load_model
from stretto_torch.shapes import Shapes
from torch_engine import make_model, perturbed, request, weights_of

CONTEXT, ROWS = 320, 24


class Tape(TorchDispatchMode):
    """The operations of a step, except views, with the addresses of tensors that were there before. The tape
    keeps all tensors, so that no address is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Any] = []
        self._before: dict[int, Tensor] = {}  # by address
        self._made: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs))
        tensors = {address(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
        self._before |= {key: tensor for key, tensor in tensors.items() if key not in self._made}
        if not func.is_view:
            self.operations.append((str(func), *map(self._described, leaves)))
        results = func(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            assert isinstance(result, Tensor), f"{func} reads a number on the host"
            if address(result) not in tensors:
                self._made[address(result)] = result
        return results

    def _described(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        place = () if address(leaf) in self._made else (leaf.data_ptr(),)
        return (*place, leaf.dtype, leaf.shape, leaf.stride())


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class TapedDecoder(GraphDecoder):
    """Checks that every run of a step does what its first run did, with the same tensors."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.first_runs: dict[Any, Tape] = {}
        self.runs = 0

    def compute(self, rows: int, length: int) -> None:
        with Tape() as tape:
            super().compute(rows, length)
        tape.operations.append(address(self._outputs))
        first = self.first_runs.setdefault((rows, length, self.cache.blocks[0]), tape)
        assert tape.operations == first.operations
        self.runs += 1


def answers(decoder: FastDecoder, steps: int) -> tuple[dict[str, list[Any]], int]:
    """Tokens, logprobs and versions of each answer, and the number of preemptions, while samples come and go
    and every 50th step has new weights."""
    model, random = make_model("qwen3"), np.random.default_rng(0)
    weights = [weights_of(perturbed(model, seed)) for seed in range(3)]
    loaded = LoadedModel(decoder, decoder.targets, Shapes(slots=20, context=CONTEXT), eos=())
    batcher = Batcher(loaded, lambda: None, deterministic=False, recompute_on_swap=False)
    found: dict[str, list[Any]] = {}
    for step in range(steps):
        if step % 50 == 0:
            batcher.swap(weights[step // 50 % 3], step // 50)
        if step % 12 == 0 and step % 200 < 150:  # then most of them leave
            prompt = int(random.integers(5, 40))
            length = int(random.integers(5, CONTEXT - prompt))
            temperature = 1 - step // 12 % 2 / 4
            asked = request(f"{step}", prompt, 1 + step % 5, max_tokens=length, temperature=temperature)
            batcher.take(asked, monotonic())
        batcher.step()
        for chunk in batcher.collect():
            columns = (chunk.tokens, chunk.logprobs, chunk.versions)
            rows = zip(*(column.tolist() for column in columns), strict=True)
            found.setdefault(f"{chunk.request}/{chunk.sample}", []).extend(rows)
    return found, batcher.figures.preemptions


@pytest.mark.parametrize(
    ("dtype", "tokens", "steps", "shapes"),
    [
        (torch.float32, ROWS * CONTEXT, 1000, 8),
        (torch.float32, ROWS * CONTEXT // 3, 400, 6),
        (torch.bfloat16, ROWS * CONTEXT, 200, 7),
    ],
)
@torch.inference_mode()
def test_steps_at_fixed_addresses_give_the_bits_of_other_steps(
    dtype: torch.dtype, tokens: int, steps: int, shapes: int
) -> None:
    model = make_model("qwen3").to(dtype)
    plain = FastDecoder(model, ROWS, CONTEXT, tokens, onednn=False)
    taped = TapedDecoder(model, ROWS, CONTEXT, tokens, onednn=False)
    expected, preemptions = answers(plain, steps)
    assert answers(taped, steps) == (expected, preemptions)
    has_room = tokens == ROWS * CONTEXT
    assert bool(preemptions) != has_room
    assert (taped.runs == steps) == has_room  # the others have rows in several classes
    assert len(taped.first_runs) == shapes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
@torch.inference_mode()
def test_a_step_reads_nothing_on_the_host(name: str, dtype: torch.dtype) -> None:
    """The device `meta` refuses every read, and every operation with a tensor on another device."""
    model = make_model(name).to("meta", dtype)
    decoder = GraphDecoder(model, ROWS, CONTEXT, ROWS * CONTEXT, onednn=False)
    decoder.cache.place_evenly(64, ROWS)
    decoder.compute(ROWS, 64)


def test_cuda_graphs_are_refused_if_transformers_runs_the_model(tiny_models: Callable[[str], Path]) -> None:
    config = TorchInferenceConfig(slots=4, context_length=64, device="cpu", cuda_graphs=True)
    assert isinstance(load_model(str(tiny_models("qwen2")), config).decoder, GraphDecoder)
    with pytest.raises(EngineError, match="cannot run this model: its architecture is not one of"):
        load_model(str(tiny_models("gpt2")), config)
