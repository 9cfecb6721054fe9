"""Draw tokens: turn logits and one uniform number per row into a token and its logprob.

Each row is drawn separately, so its token never depends on other rows. R: rows, V: vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Tokens that top_p tries first. They are mostly enough, and topk is ten times cheaper than to sort all.
_LIKELIEST = 256


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """Sampling settings of each row: `temperature`, `top_k`, `top_p` and `min_p`, each (R,)."""

    temperature: NDArray[np.float32]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    bias: Bias | None = None
    wants_kept: NDArray[np.bool_] | None = None
    """Rows for which `draw` returns the kept tokens, (R,); None for no row."""


@dataclass(frozen=True, slots=True)
class Bias:
    """Values to add to single logits: `rows`, `tokens` and `values`, each (entries,), no entry twice."""

    rows: NDArray[np.int64]
    tokens: NDArray[np.int64]
    values: NDArray[np.float32]


def uniforms(seed: int, count: int) -> NDArray[np.float32]:
    """Return the first `count` numbers in [0, 1) of a sample; they depend only on seed and position. They are
    multiples of 2^-23: the largest times a sum near 1 stays below that sum in float32, so the search in
    `draw` never passes the last token that has a probability."""
    raw = np.random.Philox(key=seed % 2**64).random_raw((count + 1) // 2)
    return (raw.view(np.uint32)[:count] >> 9).astype(np.float32) * np.float32(2**-23)


def draw(
    logits: Tensor, uniform: NDArray[np.float32], settings: SamplingSettings | None
) -> tuple[NDArray[np.int64], NDArray[np.float32], dict[int, NDArray[np.int32]]]:
    """Draw one token a row by inverting the cumulative distribution.

    Args:
        logits: (R, V) float32; may be overwritten.
        uniform: (R,) in [0, 1).
        settings: None if every row has temperature 1 and keeps every token.

    Returns: tokens (R,); logprobs (R,) of the distribution that they were drawn from, not finite where a
    row's logits are not; and row -> kept ids, of which one was drawn, for rows in `wants_kept`.
    """
    kept_ids: dict[int, NDArray[np.int32]] = {}
    if settings is not None:
        logits = _shape(logits, settings)
        kept_ids = _kept(logits, settings.wants_kept)
    logprobs = logits.log_softmax(-1)
    # A GPU sums in parallel; in float32, rounding could give an impossible token a tiny probability.
    cumulative = logprobs.exp().cumsum(-1, dtype=None if logits.device.type == "cpu" else torch.float64)
    # Does not wait for the logits, so that the kernels below start as soon as a GPU has computed them.
    numbers = torch.from_numpy(uniform).to(logits.device, non_blocking=True)
    threshold = numbers.unsqueeze(1) * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, threshold.to(cumulative.dtype), right=True)
    tokens.clamp_(max=logits.shape[1] - 1)  # if the logits are not finite, the search may end there
    if settings is not None and not settings.temperature.all():
        greedy = torch.from_numpy(settings.temperature == 0).to(logits.device)
        tokens[greedy] = logits[greedy].argmax(-1, keepdim=True)
    token_logprobs = logprobs.gather(1, tokens)
    return _host(tokens), _host(token_logprobs), kept_ids


def _kept(logits: Tensor, wanted: NDArray[np.bool_] | None) -> dict[int, NDArray[np.int32]]:
    """Return, for each wanted row, the ids of the tokens that its sampling settings have left."""
    if wanted is None:
        return {}
    rows = wanted.nonzero()[0]
    places = (logits[torch.from_numpy(rows).to(logits.device)] > -inf).nonzero().cpu().numpy()
    ids = np.split(places[:, 1].astype(np.int32), np.searchsorted(places[:, 0], np.arange(1, len(rows))))
    return dict(zip(rows.tolist(), ids, strict=True))


def _host(column: Tensor) -> NDArray[Any]:
    return column.squeeze(1).cpu().numpy()


def _shape(logits: Tensor, settings: SamplingSettings) -> Tensor:
    """Add the bias, divide by the temperature, and set logits that min_p, top_k and top_p remove to -inf. A
    greedy row gets only the bias: its logprobs are of the plain distribution."""
    device = logits.device
    if settings.bias is not None:
        index = (torch.from_numpy(settings.bias.rows), torch.from_numpy(settings.bias.tokens))
        logits[index[0].to(device), index[1].to(device)] += torch.from_numpy(settings.bias.values).to(device)
    sampled = settings.temperature > 0
    divisor = torch.from_numpy(np.where(sampled, settings.temperature, np.float32(1)))
    logits = logits / divisor.to(device).unsqueeze(1)
    if settings.min_p.any():
        with np.errstate(divide="ignore"):
            # The smallest kept logit, relative to that of the likeliest token.
            log_min_p = np.log(np.where(sampled, settings.min_p, np.float32(0)))
        threshold = logits.amax(-1, keepdim=True) + torch.from_numpy(log_min_p).to(device).unsqueeze(1)
        logits.masked_fill_(logits < threshold, -inf)
    restricted = sampled & ((settings.top_k > 0) | (settings.top_p < 1))
    restrictions = {(int(settings.top_k[row]), float(settings.top_p[row])) for row in restricted.nonzero()[0]}
    for top_k, top_p in restrictions:
        rows = restricted & (settings.top_k == top_k) & (settings.top_p == np.float32(top_p))
        index = torch.from_numpy(rows.nonzero()[0]).to(device)
        logits[index] = _keep_likeliest(logits[index], top_k, top_p)
    return logits


def _keep_likeliest(logits: Tensor, top_k: int, top_p: float, width: int = _LIKELIEST) -> Tensor:
    """Return (R, V) with -inf outside the `top_k` likeliest tokens (0: all, of which `width` are tried first)
    and, among these, outside the smallest set with at least `top_p` of the probability."""
    width = min(top_k or width, logits.shape[1])
    values, tokens = logits.topk(width)  # (R, width), descending
    normaliser = (values if top_k else logits).logsumexp(-1, keepdim=True)
    probabilities = (values - normaliser).exp()
    cumulative = probabilities.cumsum(-1)
    top_values = values.masked_fill(cumulative - probabilities >= top_p, -inf)
    result = torch.full_like(logits, -inf).scatter_(1, tokens, top_values)
    if not top_k and width < logits.shape[1]:
        too_flat = cumulative[:, -1] < top_p  # rows whose set is larger than `width`
        if bool(too_flat.any()):
            result[too_flat] = _keep_likeliest(logits[too_flat], top_k, top_p, logits.shape[1])
    return result
