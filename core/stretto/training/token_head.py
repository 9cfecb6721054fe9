"""(torch) A model's head at the wanted tokens: logprob and entropy of each, without the logits of all.

The logits of a batch, tokens x vocabulary, are its largest tensor. They are computed in chunks of tokens, and
again in the backward pass, so memory does not depend on the number of tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import structlog
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from stretto.component import Head
from stretto.rl.batch import Drawn
from stretto.rl.functional import entropy_of, logprobs_of
from stretto.training.device import is_gpu
from stretto.training.memory import CHUNK_BYTES
from stretto.training.trial import Unsuitable, attempt

__all__ = ["ModelInputs", "Support", "Wanted", "return_figures"]

log = structlog.get_logger()

# N wanted tokens, H size of a hidden state, V size of the vocabulary, C tokens of a chunk.

_KEPT_BYTES = 1 << 25
"""Logits of up to this many bytes are kept for the backward pass: with a small vocabulary, all of them."""


_OUT = -1e9
"""Logit of an id that is not kept. Its probability is exactly 0; 0 times this finite logit is 0, not NaN."""


@dataclass(frozen=True)
class Support:
    """How the sampler's distribution of the wanted tokens differed from softmax(logits / temperature)."""

    bias_ids: Tensor
    """(B,) int64, the ids with a bias."""
    bias: Tensor
    """(B,) float32, the value that is added to the logit of each of these ids."""
    kept: Tensor | None
    """(E,) int64, ids from which each token was drawn, token after token; None: the whole vocabulary."""
    ends: Tensor
    """(N + 1,) int64, on the CPU: token n has the kept ids `ends[n]` to `ends[n + 1]`; if empty: all ids."""

    @classmethod
    def of(cls, drawn: Drawn, places: Tensor) -> Support:
        """Make the support of the tokens at these ascending indices of a batch."""
        kept = drawn.kept_at(places)
        counts = torch.zeros(0) if kept is None else torch.from_numpy(kept.counts.astype("int64"))
        return cls(
            torch.tensor([*drawn.logit_bias], dtype=torch.long),
            torch.tensor([*drawn.logit_bias.values()], dtype=torch.float32),
            None if kept is None else torch.from_numpy(kept.ids.astype("int64")),
            F.pad(counts.long().cumsum(0), (1, 0)),
        )

    def to(self, device: torch.device) -> Support:
        """Return the support on a device."""
        kept = None if self.kept is None else self.kept.to(device)
        return Support(self.bias_ids.to(device), self.bias.to(device), kept, self.ends)

    def part(self, part: slice) -> Support:
        """Return the support of a slice of the tokens."""
        if self.kept is None:
            return self
        ends = self.ends[part.start : part.stop + 1]
        return replace(self, kept=self.kept[ends[0] : ends[-1]], ends=ends - ends[0])

    @property
    def counts(self) -> Tensor:
        """(N,) int64, on the CPU: the number of kept ids of each token."""
        return self.ends.diff()

    @property
    def is_sparse(self) -> bool:
        """Whether each token was drawn from only a part of the vocabulary."""
        return self.kept is not None and bool((self.counts > 0).all())

    def bias_of(self, ids: Tensor) -> Tensor:
        """Return the values that are added to the logits of these ids."""
        return (ids[:, None] == self.bias_ids).float() @ self.bias

    def restrict(self, scaled: Tensor, temperature: float) -> Tensor:
        """Return scaled logits, (N, V), with the bias over temperature added; `_OUT` for ids not kept."""
        if len(self.bias_ids):
            bias = (self.bias / temperature).expand(len(scaled), -1)
            scaled = scaled.index_add(-1, self.bias_ids, bias)
        if self.kept is None:
            return scaled
        counts = self.counts
        places = torch.arange(len(counts)).repeat_interleave(counts).to(scaled.device), self.kept
        restricted = torch.full_like(scaled, _OUT).index_put_(places, scaled[places])
        if self.is_sparse:
            return restricted
        return torch.where((counts == 0).to(scaled.device)[:, None], scaled, restricted)


@dataclass(frozen=True)
class Wanted:
    """The tokens at which the head's output is wanted, and the figures to compute from this output."""

    at: Tensor
    """(N,) int64, indices into the model's output with its rows joined."""
    targets: Tensor
    """(N,) int64, the tokens whose logprobs are wanted. Only a policy reads them."""
    temperature: float = 1.0
    entropy_gradient: bool = False
    """Compute the entropy with gradient."""
    whole: bool = False
    """Compute the logprob over the whole vocabulary too."""
    support: Support | None = None
    """Distribution for logprob and entropy: the sampler's; None for softmax(logits / temperature)."""

    def moved(self, at: Tensor, device: torch.device) -> Wanted:
        """Return the same tokens on a device, with other indices `at`."""
        support = self.support and self.support.to(device)
        return replace(self, at=at.to(device), targets=self.targets.to(device), support=support)

    def part(self, part: slice) -> Wanted:
        """Return a slice of the tokens, without new indices `at`."""
        return replace(self, targets=self.targets[part], support=self.support and self.support.part(part))


@dataclass(frozen=True)
class ModelInputs:
    """A batch as the arguments of a model."""

    arguments: dict[str, Any]
    wanted: Wanted
    """The wanted tokens; `at` are indices into the model's output with its rows joined."""


def return_figures(
    model: PreTrainedModel, head: Head, trial: ModelInputs | None, *, chunk_bytes: int | None = None
) -> None:
    """Replace the model's `forward`, in place. The new one also needs `wanted`, and returns the wanted
    tokens' figures in float32: a policy's logprob and entropy, (N, 2), with `Wanted.whole` also the logprob
    over the whole vocabulary, (N, 3); or a value or reward, (N, 1).

    `trial`: inputs on which a policy's logits in chunks are compared with the model's own. If they differ,
    log the reason and compute all logits of a micro-batch together. None: do that without a trial.
    `chunk_bytes`: compute in chunks of this size without a trial, for a model without numbers."""
    compute: Any = _OtherHead(model) if head != "policy" else _WholeLogits(model)
    if head == "policy" and chunk_bytes is not None:
        compute = _ChunkedLogits(model, chunk_bytes=chunk_bytes)
    if head == "policy" and trial is not None:
        _, reason = attempt(lambda: _compare(_ChunkedLogits(model, chunk=7), compute, trial))
        if reason:
            log.info("the logits of a micro-batch are computed together", reason=reason)
        else:
            compute = _ChunkedLogits(model)
    model.forward = compute


class _OtherHead:
    def __init__(self, model: PreTrainedModel) -> None:
        self._forward: Any = model.forward

    def __call__(self, *, wanted: Wanted, **arguments: Any) -> Tensor:
        output: Tensor = self._forward(**arguments).logits
        return output.flatten(0, 1).index_select(0, wanted.at).float()


class _WholeLogits:
    def __init__(self, model: PreTrainedModel) -> None:
        self._forward: Any = model.forward
        self._selects = "logits_to_keep" in inspect.signature(model.forward).parameters

    def __call__(self, *, wanted: Wanted, **arguments: Any) -> Tensor:
        inputs: Tensor = arguments["inputs_embeds" if "inputs_embeds" in arguments else "input_ids"]
        if self._selects and len(inputs) == 1:
            return _figures(self._forward(**arguments, logits_to_keep=wanted.at).logits[0], wanted)
        return _figures(self._forward(**arguments).logits.flatten(0, 1).index_select(0, wanted.at), wanted)


class _ChunkedLogits:
    """Logprobs and entropies from the hidden states, in chunks of `chunk` tokens; None: as many as fit
    into `chunk_bytes`, or into `CHUNK_BYTES`.

    The backward pass of a plain head, a matrix, is written by hand. Any other head, such as one split over
    ranks or with an adapter, is called as a module, under activation checkpointing."""

    def __init__(
        self, model: PreTrainedModel, chunk: int | None = None, chunk_bytes: int | None = None
    ) -> None:
        config: Any = model.config.get_text_config()
        self._chunk_bytes = chunk_bytes
        self._model: Any = model
        self._vocabulary: int = config.vocab_size
        self._chunk = chunk
        self._scale = float(getattr(config, "logit_scale", None) or 1.0)
        self._scale /= float(getattr(config, "logits_scaling", None) or 1.0)
        self._cap: float | None = getattr(config, "final_logit_softcapping", None)

    def __call__(self, *, wanted: Wanted, **arguments: Any) -> Tensor:
        states: Tensor = self._model.base_model(**arguments).last_hidden_state
        hidden = states.flatten(0, 1).index_select(0, wanted.at)  # (N, H)
        head = self._model.get_output_embeddings()
        size = self._chunk_size(hidden.device, self._vocabulary)
        is_plain = type(head) is nn.Linear and not isinstance(head.weight, DTensor)
        if is_plain and wanted.support is not None and wanted.support.is_sparse and not wanted.whole:
            return self._of_kept_ids(head, hidden, wanted)
        if is_plain:
            form = _Form(
                *(self._scale, self._cap, wanted.temperature, size), wanted.entropy_gradient, wanted.whole
            )
            return _LinearFigures.apply(hidden, head.weight, head.bias, wanted.targets, form, wanted.support)
        if len(hidden) <= size:
            return self._by_module(head, hidden, wanted)
        return _in_chunks(self._by_module, head, hidden, wanted, size)

    def _chunk_size(self, device: torch.device, floats: int) -> int:
        budget = self._chunk_bytes or CHUNK_BYTES[is_gpu(device)]
        return self._chunk or max(1, budget // (4 * floats))

    def _of_kept_ids(self, head: nn.Linear, hidden: Tensor, wanted: Wanted) -> Tensor:
        """Compute only the logits of the kept ids, which are far fewer than the vocabulary."""
        assert wanted.support is not None
        mean = max(1, int(wanted.support.ends[-1]) // len(hidden))
        size = self._chunk_size(hidden.device, mean * hidden.shape[-1])
        return _in_chunks(self._kept_figures, head, hidden, wanted, size)

    def _kept_figures(self, head: nn.Linear, hidden: Tensor, wanted: Wanted) -> Tensor:
        support = wanted.support
        assert support is not None
        assert support.kept is not None
        ids, counts = support.kept, support.counts.to(hidden.device)
        rows = torch.arange(len(hidden), device=hidden.device).repeat_interleave(counts)
        with torch.autocast(hidden.device.type, enabled=False):
            states, vectors = F.embedding(rows, hidden).float(), F.embedding(ids, head.weight).float()
            logits = torch.linalg.vecdot(states, vectors)  # (E,)
            bias: Any = head.bias
            if bias is not None:
                logits = logits + bias[ids].float()
            logits = self._formed(logits)
            logits = (logits + support.bias_of(ids)) / wanted.temperature
            largest = torch.segment_reduce(logits.detach(), "max", lengths=counts)
            shifted = logits - largest[rows]
            logprobs = shifted - torch.segment_reduce(shifted.exp(), "sum", lengths=counts).log()[rows]
            masked = torch.where(ids == wanted.targets[rows], logprobs, 0.0)
            target_logprobs = torch.segment_reduce(masked, "sum", lengths=counts)
            entropy_logprobs = logprobs if wanted.entropy_gradient else logprobs.detach()
            entropy = -torch.segment_reduce(entropy_logprobs.exp() * entropy_logprobs, "sum", lengths=counts)
            return torch.stack([target_logprobs, entropy], -1)

    def _formed(self, logits: Tensor) -> Tensor:
        logits = logits * self._scale
        return logits if self._cap is None else torch.tanh(logits / self._cap) * self._cap

    def _by_module(self, head: nn.Module, hidden: Tensor, wanted: Wanted) -> Tensor:
        return _figures(self._formed(head(hidden).float()), wanted)


def _in_chunks(
    compute: Callable[..., Tensor], head: nn.Module, hidden: Tensor, wanted: Wanted, size: int
) -> Tensor:
    """Compute the figures in chunks of `size` tokens, each again in the backward pass."""
    return torch.cat(
        [
            checkpoint(compute, head, hidden[part], wanted.part(part), use_reentrant=False)
            for part in _chunks(len(hidden), size)
        ]
    )


def _figures(logits: Tensor, wanted: Wanted) -> Tensor:
    """Return logprob and entropy from logits, (N, V) -> (N, 2) float32; with `whole` a third column."""
    whole = [logprobs_of(logits, wanted.targets, wanted.temperature)] if wanted.whole else []
    temperature = wanted.temperature
    if wanted.support is not None:
        logits, temperature = wanted.support.restrict(logits.float() / temperature, temperature), 1.0
    logprobs = logprobs_of(logits, wanted.targets, temperature)
    with torch.set_grad_enabled(torch.is_grad_enabled() and wanted.entropy_gradient):
        entropy = entropy_of(logits, temperature)
    return torch.stack([logprobs, entropy, *whole], -1)


@dataclass(frozen=True)
class _Form:
    """How a head's output x becomes probabilities, softmax(cap(scale * x) / temperature) with
    cap(x) = c tanh(x / c), and how many tokens are computed together."""

    scale: float
    cap: float | None
    temperature: float
    chunk: int  # number of tokens of a chunk, C
    entropy_gradient: bool
    whole: bool


class _LinearFigures(torch.autograd.Function):
    """The figures of `_figures` for a linear head; `_Form` has the formula of the logits. With s the scaled
    logits, p the softmax over the kept ids, H its entropy, y the target: d logprob / ds_j = [j = y] - p_j
    and dH / ds_j = -p_j (log p_j + H), where p_j is 0 for ids that are not kept."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        form: _Form,
        support: Support | None,
    ) -> Tensor:
        device = hidden.device.type
        ctx.dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        ctx.form, ctx.device, ctx.support = form, device, support
        ctx.kept = []
        needs_gradient = any(ctx.needs_input_grad)
        keep = needs_gradient and not form.whole and 4 * len(hidden) * len(weight) <= _KEPT_BYTES
        figures = torch.empty(len(hidden), 2 + form.whole, device=hidden.device)
        normalisers = torch.empty(len(hidden), 2, device=hidden.device)
        with torch.autocast(device, enabled=False):
            matrix = weight.to(ctx.dtype)
            for part in _chunks(len(hidden), form.chunk):
                scaled, slope = _scaled_logits(hidden[part].to(ctx.dtype), matrix, bias, form)
                if form.whole:
                    normalisers[part, 1] = scaled.logsumexp(-1)
                    figures[part, 2] = scaled.gather(-1, targets[part, None])[:, 0] - normalisers[part, 1]
                if support is not None:
                    scaled = support.part(part).restrict(scaled, form.temperature)
                normalisers[part, 0] = scaled.logsumexp(-1)
                logprobs = scaled.sub_(normalisers[part, :1])  # (C, V)
                figures[part, 0] = logprobs.gather(-1, targets[part, None]).squeeze(-1)
                figures[part, 1] = -torch.linalg.vecdot(logprobs.exp(), logprobs)
                if keep:
                    ctx.kept.append((logprobs, slope))
        if needs_gradient:
            ctx.save_for_backward(hidden, weight, bias, targets, normalisers, figures[:, 1].clone())
        return figures

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        form: _Form = ctx.form
        hidden, weight, bias, targets, normalisers, entropy = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        hidden_gradient = torch.empty_like(hidden) if wants_hidden else None
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        bias_gradient = torch.zeros_like(bias, dtype=torch.float32) if wants_bias else None
        with torch.autocast(ctx.device, enabled=False):
            matrix = weight.to(ctx.dtype)
            for number, part in enumerate(_chunks(len(hidden), form.chunk)):
                states = hidden[part].to(ctx.dtype)
                whole_gradient = None
                if ctx.kept:
                    logprobs, slope = ctx.kept[number]
                    ctx.kept[number] = None  # the memory of the chunk is reused below
                else:
                    scaled, slope = _scaled_logits(states, matrix, bias, form)
                    if form.whole:
                        probabilities = (scaled - normalisers[part, 1:]).exp_()
                        whole_gradient = probabilities.mul_(-gradient[part, 2:])
                        whole_gradient.scatter_add_(-1, targets[part, None], gradient[part, 2:])
                    if ctx.support is not None:
                        scaled = ctx.support.part(part).restrict(scaled, form.temperature)
                    logprobs = scaled.sub_(normalisers[part, :1])
                logits_gradient = _gradient_of_logits(
                    logprobs, targets[part], gradient[part, 0], gradient[part, 1], entropy[part], form
                )
                if whole_gradient is not None:
                    logits_gradient.add_(whole_gradient)
                if slope is not None:
                    logits_gradient.mul_(slope)
                if bias_gradient is not None:
                    bias_gradient += logits_gradient.sum(0)
                logits_gradient = logits_gradient.to(ctx.dtype)
                if hidden_gradient is not None:
                    hidden_gradient[part] = logits_gradient @ matrix
                if weight_gradient is not None:
                    _add_product(weight_gradient, logits_gradient.t(), states)
        if weight_gradient is not None:
            weight_gradient = weight_gradient.to(weight.dtype)
        if bias_gradient is not None:
            bias_gradient = bias_gradient.to(bias.dtype)
        return hidden_gradient, weight_gradient, bias_gradient, None, None, None


def _chunks(count: int, size: int) -> list[slice]:
    return [slice(start, min(count, start + size)) for start in range(0, count, size)]


def _scaled_logits(
    states: Tensor, matrix: Tensor, bias: Tensor | None, form: _Form
) -> tuple[Tensor, Tensor | None]:
    """Return logits over temperature, (C, V) float32, and their derivative by the head's output; None: 1."""
    logits = F.linear(states, matrix, None if bias is None else bias.to(matrix.dtype)).float()
    factor = form.scale
    slope: Tensor | None = None
    if form.cap is not None:
        capped = logits.mul_(form.scale / form.cap).tanh_()
        slope = capped.square().neg_().add_(1.0).mul_(form.scale / form.temperature)
        factor, logits = form.cap, capped
    factor /= form.temperature
    if factor != 1.0:
        logits = logits.mul_(factor)
        slope = slope if slope is not None else torch.full((), factor, device=logits.device)
    return logits, slope


def _gradient_of_logits(
    logprobs: Tensor, targets: Tensor, of_logprob: Tensor, of_entropy: Tensor, entropy: Tensor, form: _Form
) -> Tensor:
    """Return the gradient of the scaled logits, (C, V), from the gradients of logprob and entropy, (C,). With
    probabilities p: of_logprob (onehot(target) - p) - of_entropy p (log p + entropy). Uses up `logprobs`."""
    probabilities = logprobs.exp()
    if form.entropy_gradient:
        factor = logprobs.add_(entropy[:, None]).mul_(-of_entropy[:, None]).sub_(of_logprob[:, None])
        result = factor.mul_(probabilities)
    else:
        result = probabilities.mul_(-of_logprob[:, None])
    return result.scatter_add_(-1, targets[:, None], of_logprob[:, None])


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += (left @ right).float()


@torch.no_grad()
def _compare(chunked: _ChunkedLogits, whole: _WholeLogits, trial: ModelInputs) -> None:
    figures = chunked(**trial.arguments, wanted=trial.wanted)
    expected = whole(**trial.arguments, wanted=trial.wanted)
    off = float((figures - expected).abs().max() / expected.abs().max().clamp(min=1))
    if not off <= 1e-4:
        raise Unsuitable(f"this model's logits have another form (off by {off:.1e})")
