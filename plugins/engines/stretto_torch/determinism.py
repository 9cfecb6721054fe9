"""The test, at the start of a deterministic engine, that a row's bits do not depend on the other rows.

No library promises this; on the machines tested so far it holds for shapes padded as in `shapes.py`. The
prompts of the test are computed in prefills like those of the engine.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import structlog
import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.errors import EngineError
from stretto_torch.decoder import Decoder
from stretto_torch.shapes import Shapes, padded_prompt
from stretto_torch.size_classes import SizeClasses

log = structlog.get_logger(__name__)

_PROMPT = 21
_STEPS = 3


def stable_shapes(decoder: Decoder, shapes: Shapes) -> Shapes:
    """Return shapes with which a row gives the same bits alone, among other rows, and at another position."""
    if _same_bits(decoder, shapes):
        return shapes
    shapes = dataclasses.replace(shapes, solo_prompts=True)
    if _same_bits(decoder, shapes):
        log.info("prompts of a prefill are not independent here: every prompt is computed separately")
        return shapes
    log.warning("rows of a step are not independent here: shapes are fixed, so the bits depend on `slots`")
    shapes = dataclasses.replace(shapes, fixed=True, trimmed=True)
    if _same_bits(decoder, shapes):
        return shapes
    shapes = dataclasses.replace(shapes, trimmed=False)
    max_tokens = shapes.most_rows * shapes.length
    if max_tokens > decoder.cache.tokens:
        raise EngineError(
            f"inference.deterministic: here all slots must be computed at full length, {max_tokens} tokens;"
            f" inference.cache_gb holds {decoder.cache.tokens}: raise it, or lower inference.slots"
        )
    if _same_bits(decoder, shapes):
        return shapes
    threads = torch.get_num_threads()
    hint = f" with inference.threads={threads}; try 1" if threads > 1 else ""
    raise EngineError(f"inference.deterministic: here a row's bits depend on the other rows{hint}")


def _same_bits(decoder: Decoder, shapes: Shapes) -> bool:
    longest = shapes.context - _STEPS
    prompt = min(_PROMPT, longest)
    expected = _logprobs(decoder, shapes, _Company(live=1, row=0, prompt=prompt, other_tokens=0))
    assert expected is not None, "the cache holds at least one sample"
    companies = [
        _Company(live, row, prompt, min(other_tokens, longest))
        for live in sorted({shapes.slots, min(shapes.slots, 9), min(shapes.slots, 17)})
        for row in sorted({0, live // 2, live - 1})
        for other_tokens in (5, 30, 140)  # of these, 30 shares prefills with the sample
    ]
    logprobs = (_logprobs(decoder, shapes, company) for company in companies)
    return all(torch.equal(expected, result) for result in logprobs if result is not None)


@dataclass(frozen=True, slots=True)
class _Company:
    """One sample among others, for the test."""

    live: int
    """Number of rows of the step."""
    row: int
    """Row of the sample."""
    prompt: int
    """Tokens of the sample before the first step."""
    other_tokens: int
    """Tokens of each other row before the first step."""


def _logprobs(decoder: Decoder, shapes: Shapes, company: _Company) -> Tensor | None:
    """Return the logprobs of the sample, (1 + steps, V); None if the cache has no room for all rows."""
    device = decoder.cache.device
    texts = torch.arange(company.live * shapes.length).mul(7919).remainder(decoder.vocabulary)
    texts = texts.view(company.live, shapes.length)
    texts[company.row] = torch.arange(shapes.length).mul(104_729).remainder(decoder.vocabulary)
    lengths = torch.full((company.live,), company.other_tokens)
    lengths[company.row] = company.prompt
    needs = (lengths + _STEPS).tolist()
    size_classes = SizeClasses(shapes, decoder.cache.tokens, one_size_class=decoder.one_size_class)
    if not size_classes.fits(needs):
        return None
    plan = size_classes.plan(needs, [None] * company.live)
    decoder.cache.place(plan.blocks)
    texts, lengths = texts[plan.order], lengths[plan.order]
    row = plan.order.index(company.row)
    logprobs: list[Tensor] = []
    for batch in shapes.prompt_batches(lengths.tolist()):
        indices = torch.tensor(batch)
        tokens = texts[indices, : padded_prompt(int(lengths[indices].max()))]
        logits = decoder.prefill(tokens.to(device), lengths[indices].to(device), indices.to(device))
        if row in batch:
            logprobs.append(logits.log_softmax(-1)[batch.index(row)])

    rows = shapes.rows(company.live)
    for step in range(_STEPS):
        positions = F.pad(lengths + step, (0, rows - company.live))
        tokens = F.pad(texts[torch.arange(company.live), lengths + step], (0, rows - company.live))
        spans = shapes.spans(positions[: company.live].numpy(), plan.size_classes)
        logits = decoder.decode(tokens.to(device), positions.to(device), spans)[: company.live]
        logprobs.append(logits.log_softmax(-1)[row])
    return torch.stack(logprobs)
