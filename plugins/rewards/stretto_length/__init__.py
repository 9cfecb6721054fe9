"""Reward `length`: a penalty for answers that come near a limit of tokens, for use in the reward `sum`.

The soft overlong punishment of DAPO (Yu et al. 2025, arXiv 2503.14476, eq. 13): 0 up to `limit - buffer`
tokens, from there linearly down to `-penalty` at `limit`, and `-penalty` beyond.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from stretto import Component, Context, Problem, RewardConfig, hookimpl
from stretto.component import PositiveFloat, PositiveInt
from stretto.config import RunConfig

__all__ = ["LengthConfig"]


class LengthConfig(RewardConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the reward `length`."""

    limit: PositiveInt
    """Length of an answer, in tokens, at which the full penalty applies; usually `sampling.max_tokens`."""
    buffer: PositiveInt
    """Number of tokens below the limit at which the penalty begins."""
    penalty: PositiveFloat = 1.0
    """Amount that the reward loses at the limit."""

    def __post_init__(self) -> None:
        if self.buffer > self.limit:
            raise ValueError(f"buffer ({self.buffer}) must be at most limit ({self.limit})")


def make(config: LengthConfig, context: Context) -> Callable[..., float]:
    del context

    def penalty(prompt: Any, completion: str, completion_tokens: int) -> float:
        share = (completion_tokens - (config.limit - config.buffer)) / config.buffer
        return -config.penalty * min(1.0, max(0.0, share))

    return penalty


def check(config: LengthConfig, run: RunConfig) -> Iterable[Problem]:
    """Warn of a limit that no answer reaches."""
    longest = run.sampling.max_tokens
    if config.limit - config.buffer >= longest:
        yield Problem(
            "reward.limit",
            f"is {config.limit}, and the penalty begins at {config.limit - config.buffer} tokens, which no "
            f"answer exceeds: sampling.max_tokens is {longest}",
            "warning",
        )


@hookimpl
def stretto_reward() -> Iterator[Component[LengthConfig]]:
    yield Component(
        "length", make, LengthConfig, "a penalty for answers near a limit of tokens (DAPO)", check
    )
