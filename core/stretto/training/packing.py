"""(torch) How a batch becomes the input of a Hugging Face model: one packed row, or padded rows.

A packed row holds all tokens end to end, with attention in each sequence separately: the fastest way on CPU,
without padding. With shared prefixes the row is a tree. Both are valid where attention is full and causal.
Every other model gets rows padded on the right, with a mask.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel

from stretto.errors import EngineError
from stretto.rl.batch import Batch
from stretto.training.prefix_tree import (
    BIAS_BYTES,
    AttentionBlock,
    AttentionPlan,
    PrefixTree,
    VarlenBounds,
    reads,
    split_batch,
)
from stretto.training.token_head import ModelInputs, Wanted
from stretto.training.trial import Unsuitable

__all__ = [
    "ATTENTION",
    "InputRows",
    "PackedRows",
    "PaddedRows",
    "PrefixRows",
    "compare_varlen",
    "compare_with_itself",
    "compare_with_plain",
    "trial_inputs",
]

ATTENTION = "stretto_packed"

# T tokens, S sequences, L longest sequence, N tokens at which the output is wanted.


def _attend(
    module: nn.Module,
    query: Tensor,  # (1, heads, T, dim)
    key: Tensor,  # (1, kv_heads, T, dim)
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    attention_plan: AttentionPlan | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention within each block of a packed row, as an attention function of transformers."""
    del module, attention_mask
    if attention_plan is None or dropout or options.get("sliding_window") or options.get("softcap"):
        raise ValueError("packed attention is full, causal and without dropout")
    if attention_plan.keys is not None:
        key, value = _gather(key, attention_plan.keys), _gather(value, attention_plan.keys)
    if attention_plan.varlen is not None:
        attended = _attend_at_once(query, key, value, attention_plan.varlen, scaling)
    else:
        attended = _attend_in_blocks(query, key, value, attention_plan.blocks, scaling)
    return attended.contiguous(), None


def _attend_at_once(
    query: Tensor, key: Tensor, value: Tensor, bounds: VarlenBounds, scaling: float | None
) -> Tensor:
    """Attend in one call of a kernel for GPUs and 16-bit numbers. Return (1, T, heads, dim)."""
    if torch.__version__ < "2.12":
        raise RuntimeError(
            f"torch is {torch.__version__}, and varlen attention of grouped queries needs 2.12"
        )
    from torch.nn.attention import varlen

    device = query.device.type
    # Autocast does not know the kernel, and rotary positions leave queries and keys in float32.
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
    packed = [states[0].transpose(0, 1).to(dtype) for states in (query, key, value)]
    # The window is that of causal attention: the last query of a block reads up to its last key.
    attend: Any = varlen.varlen_attn
    return attend(*packed, *bounds, scale=scaling, window_size=(-1, 0), enable_gqa=True)[None]


def _attend_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, blocks: list[AttentionBlock], scaling: float | None
) -> Tensor:
    """Attend in one call for each block. Return (1, T, heads, dim)."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    key_counts = [block.keys for block in blocks]
    parts = zip(
        blocks,
        query.split([block.queries for block in blocks], 2),
        key.split(key_counts, 2),
        value.split(key_counts, 2),
        strict=True,
    )
    attended = [_attend_in_block(*part, scaling) for part in parts]
    return torch.cat(attended, 2).transpose(1, 2)


def _attend_in_block(
    block: AttentionBlock, query: Tensor, key: Tensor, value: Tensor, scaling: float | None
) -> Tensor:
    if block.tree is not None:
        return _attend_in_tree(query, key, value, block.tree, scaling)
    bias = None if block.bias is None else block.bias.to(query.dtype)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=bias, is_causal=bias is None, scale=scaling
    )


def _attend_in_tree(query: Tensor, key: Tensor, value: Tensor, tree: Tensor, scaling: float | None) -> Tensor:
    """Attend in calls for some queries each. Both passes make the mask of each call: all masks together may
    take gigabytes."""
    (nodes, ends), queries = tree, query.shape[2]
    ancestors, size = len(nodes) - queries, max(1, BIAS_BYTES // (4 * len(nodes)))

    def attend(query: Tensor, first: int, last: int) -> Tensor:
        read = ancestors + last  # no later key is an ancestor
        mask = reads(nodes[ancestors + first : read], nodes[:read], ends[:read])
        states = query[:, :, first:last], key[:, :, :read], value[:, :, :read]
        return F.scaled_dot_product_attention(*states, attn_mask=mask, scale=scaling)

    bounds = [*range(0, queries, size), queries]
    parts = [
        checkpoint(attend, query, first, last, use_reentrant=False, preserve_rng_state=False)
        for first, last in pairwise(bounds)
    ]
    return torch.cat(parts, 2)


def _gather(states: Tensor, nodes: Tensor) -> Tensor:
    """(1, heads, T, dim) -> (1, heads, K, dim), with repetitions. `embedding` adds up the gradients of a
    repeated token much faster than `index_select`."""
    rows = F.embedding(nodes, states[0].transpose(0, 1).flatten(1))  # (K, heads * dim)
    return rows.unflatten(1, (states.shape[1], states.shape[3])).transpose(0, 1)[None]


# No mask function is registered for the name, so transformers builds no mask.
AttentionInterface.register(ATTENTION, _attend)


class InputRows(Protocol):
    """How batches become inputs: `PackedRows`, `PrefixRows` or `PaddedRows`."""

    def split(self, batch: Batch, max_tokens: int, *, whole_groups: bool) -> list[Batch]:
        """Split into consecutive micro-batches of at most `max_tokens` computed tokens, or one sequence;
        with `whole_groups`, never split between consecutive sequences of the same `group`."""
        return batch.micro_batches(max_tokens, whole_groups=whole_groups)

    def inputs(self, batch: Batch, wanted: Wanted, device: torch.device) -> ModelInputs:
        """Return a micro-batch's inputs. `wanted.at`: ascending indices into its tokens; both on the CPU."""
        ...


@dataclass(frozen=True)
class PackedRows(InputRows):
    """All sequences end to end in one row."""

    varlen: bool = False
    """Compute the attention of a layer in one varlen call, not in one call for each block."""
    recurrent: bool = False
    """Tell layers with a state, such as Gated DeltaNet and Mamba, where each sequence begins. transformers
    refuses this without the kernels that keep sequences apart."""

    def inputs(self, batch: Batch, wanted: Wanted, device: torch.device) -> ModelInputs:
        """See `InputRows`."""
        blocks = [AttentionBlock(length, length, None) for length in batch.lengths]
        plan = AttentionPlan(blocks, None, VarlenBounds.of(blocks, device) if self.varlen else None)
        row = _one_row(batch["tokens"], batch.positions(), plan, wanted.moved(wanted.at, device))
        if self.recurrent:
            bounds = torch.tensor([*batch.starts(), batch.num_tokens], dtype=torch.int32, device=device)
            row.arguments["cu_seq_lens_q"] = row.arguments["cu_seq_lens_k"] = bounds
            row.arguments["seq_idx"] = batch.sequence_index().int().to(device)[None]
        return row


@dataclass(frozen=True)
class PrefixRows(InputRows):
    """The tree of the sequences in one row: a shared prefix is computed once. Tokens that no wanted output
    depends on are left out."""

    width: int
    """Channels of the model's attention, over all heads."""
    varlen: bool = False
    """See `PackedRows`."""

    def split(self, batch: Batch, max_tokens: int, *, whole_groups: bool) -> list[Batch]:
        """See `InputRows`."""
        return split_batch(batch, max_tokens, whole_groups=whole_groups)

    def inputs(self, batch: Batch, wanted: Wanted, device: torch.device) -> ModelInputs:
        """See `InputRows`."""
        starts, ends = np.array(batch.starts()), np.cumsum(batch.lengths)
        at = wanted.at.numpy()
        # The last wanted token before the end of each sequence; it may be in an earlier sequence.
        last = np.concatenate([[-1], at])[np.searchsorted(at, ends)]
        sizes = np.maximum(last - starts + 1, 0)
        sizes[0] = max(1, sizes[0])  # a row has at least one token
        tokens = batch["tokens"].numpy()
        tree = PrefixTree([tokens[start : start + size] for start, size in zip(starts, sizes, strict=True)])
        node_of = np.zeros(len(tokens), np.int64)
        for start, nodes in zip(starts, tree.nodes, strict=True):
            node_of[start : start + len(nodes)] = nodes
        nodes = torch.from_numpy(node_of[at])
        ids, depths = torch.from_numpy(tree.tokens), torch.from_numpy(tree.depths)
        plan = tree.plan(self.width, device, varlen=self.varlen)
        return _one_row(ids, depths, plan, wanted.moved(nodes, device))


def _one_row(ids: Tensor, positions: Tensor, plan: AttentionPlan, wanted: Wanted) -> ModelInputs:
    device = wanted.at.device
    arguments = {
        "input_ids": ids.to(device)[None],
        "position_ids": positions.to(device)[None],
        "attention_plan": plan,
        "use_cache": False,  # with a cache, transformers does not treat restarting positions as new sequences
    }
    return ModelInputs(arguments, wanted)


class PaddedRows(InputRows):
    """Each sequence in its own row, padded on the right. `image_arguments`: (batch, ids (S, L)) -> arguments
    for the images; None for a model that reads text only."""

    def __init__(self, image_arguments: Callable[[Batch, Tensor], dict[str, Tensor]] | None = None) -> None:
        self._image_arguments = image_arguments

    def inputs(self, batch: Batch, wanted: Wanted, device: torch.device) -> ModelInputs:
        """See `InputRows`."""
        longest = max(batch.lengths)
        mask = torch.arange(longest)[None] < torch.tensor(batch.lengths)[:, None]  # (S, L)
        ids = torch.zeros_like(mask, dtype=torch.long)
        ids[mask] = batch["tokens"]
        arguments = {"input_ids": ids, "attention_mask": mask.long()}
        if self._image_arguments is not None:
            arguments |= self._image_arguments(batch, ids)
        on_device = {name: tensor.to(device) for name, tensor in arguments.items()}
        at = batch.sequence_index()[wanted.at] * longest + batch.positions()[wanted.at]
        return ModelInputs({**on_device, "use_cache": False}, wanted.moved(at, device))


def trial_inputs(rows: InputRows, model: PreTrainedModel) -> ModelInputs:
    """Return a model's inputs for 20 random tokens; the figures of all tokens but the last are wanted. They
    need no varlen call, so a model in float32 on any device can compute them."""
    if isinstance(rows, PackedRows | PrefixRows):
        rows = replace(rows, varlen=False)
    tokens = _random_tokens(model, 20, torch.Generator().manual_seed(0))
    wanted = Wanted(torch.arange(19), tokens[1:], temperature=0.7)
    return rows.inputs(Batch([20], {"tokens": tokens}, {}), wanted, model.device)


def _random_tokens(model: PreTrainedModel, number: int, generator: torch.Generator) -> Tensor:
    return torch.randint(model.config.get_text_config().vocab_size, (number,), generator=generator)


def _hidden_states(model: Any, arguments: dict[str, Any]) -> Tensor:
    """Return the input of a model's head, (1, T, H). Trials compare it: the output of a new head is 0."""
    return model.base_model(**arguments).last_hidden_state


@torch.no_grad()
def compare_with_itself(rows: InputRows, model: PreTrainedModel) -> None:
    """Compute the input of the model's head twice as in training, and twice as in evaluation. Raise
    EngineError if the results differ: the model is random, or another one in training."""
    arguments = trial_inputs(rows, model).arguments
    modes = [(module, module.training) for module in model.modules()]
    states = [_hidden_states(model, arguments).nan_to_num() for _ in range(2)]
    model.eval()
    states += [_hidden_states(model, arguments).nan_to_num() for _ in range(2)]
    for module, mode in modes:
        module.training = mode
    off = max(float((each - states[-1]).abs().max()) for each in states[:-1])
    if not off <= 1e-4 * max(1.0, float(states[-1].abs().max())):
        raise EngineError(
            f"model {model.name_or_path!r} ({type(model).__name__}) is random: of four forward passes over "
            f"the same tokens, two as in training and two as in evaluation, one is off by {off:.1e}; look in "
            "its config.json for what adds noise, and set it to 0"
        )


def compare_with_plain(rows: InputRows, model: PreTrainedModel) -> None:
    """Compare three sequences in one row with each sequence alone; the first and the last share a prefix.
    Raise Unsuitable if the input of the model's head, or the gradients of its embeddings, differ."""
    lengths, embedding = [7, 1, 12], model.get_input_embeddings()
    tokens = _random_tokens(model, sum(lengths), torch.Generator().manual_seed(0))
    tokens[8:13] = tokens[:5]
    batch = Batch(lengths, {"tokens": tokens}, {})

    def output(rows: InputRows, part: Batch) -> tuple[Tensor, Tensor]:
        """Return the states (T, H) of all tokens, and the sum of the gradients of each token id (T, H)."""
        every_token = Wanted(torch.arange(part.num_tokens), part["tokens"])
        inputs = rows.inputs(part, every_token, model.device)
        with torch.no_grad():
            leaf: Tensor = embedding(inputs.arguments["input_ids"])
        hook = embedding.register_forward_hook(lambda *_: leaf.requires_grad_())  # pyright: ignore[reportUnknownLambdaType]
        try:
            states = _hidden_states(model, inputs.arguments).flatten(0, 1)[inputs.wanted.at]
        finally:
            hook.remove()
        [gradient] = torch.autograd.grad(states.square().sum(), leaf)
        is_same = tokens.to(model.device)[:, None] == inputs.arguments["input_ids"]  # (T, tokens of the row)
        return states.detach(), is_same.to(gradient.dtype) @ gradient[0]

    together = output(rows, batch)
    alone = [output(PackedRows(), part) for part in batch.split([1] * len(lengths))]
    separate = torch.cat([states for states, _ in alone]), torch.stack([each for _, each in alone]).sum(0)
    for found, expected, limit in zip(together, separate, (1e-4, 1e-3), strict=True):
        off = float((found - expected).float().abs().max() / expected.float().abs().max().clamp(min=1))
        # bfloat16 rounds each number to within 0.4 %; a leak across sequences gives a far larger difference.
        if not off <= (limit if found.dtype == torch.float32 else 0.03):
            raise Unsuitable(f"sequences of a row are not independent (off by {off:.1e})")


def compare_varlen(
    rows: PackedRows | PrefixRows, model: PreTrainedModel, trains_on: torch.device, dtype: torch.dtype
) -> None:
    """Compare a varlen call with a call for each block: outputs and gradients, in the dtype and on the device
    of the training, for random states in the shapes of each layer of the model. Raise Unsuitable if they
    differ by more than rounding."""
    generator = torch.Generator().manual_seed(0)
    lengths = [300, 1, 260]  # they and the shared prefix are longer than a kernel's tiles
    tokens = _random_tokens(model, sum(lengths), generator)
    tokens[301:501] = tokens[:200]
    batch, every_token = Batch(lengths, {"tokens": tokens}, {}), Wanted(torch.arange(len(tokens)), tokens)
    plans: list[AttentionPlan] = [
        replace(rows, varlen=varlen).inputs(batch, every_token, trains_on).arguments["attention_plan"]
        for varlen in (False, True)
    ]
    size = sum(block.queries for block in plans[0].blocks)
    differences: list[Tensor] = []

    def compare(module: nn.Module, *given: Any, **options: Any) -> tuple[Tensor, None]:
        shapes = [(1, each.shape[1], size, each.shape[3]) for each in given[:3]]
        drawn = (torch.randn(shape, generator=generator).to(trains_on, dtype) for shape in shapes)
        states: Any = [each.requires_grad_() for each in drawn]
        attend = partial(_attend, module, *states, None, options.get("scaling"))
        with torch.enable_grad():
            outputs = [attend(attention_plan=plan)[0] for plan in plans]
            results = [(each, *torch.autograd.grad(each.square().sum(), states)) for each in outputs]
        pairs = zip(*results, strict=True)
        differences.extend((found - expected).norm() / expected.norm() for expected, found in pairs)
        return _attend(module, *given, **options)

    AttentionInterface.register(ATTENTION, compare)
    try:
        with torch.no_grad():
            _hidden_states(model, trial_inputs(rows, model).arguments)
    finally:
        AttentionInterface.register(ATTENTION, _attend)
    off = float(torch.stack(differences).max())  # NaN if any is
    if not off <= 0.03:
        raise Unsuitable(f"outputs or gradients are wrong (off by {off:.1e})")
