"""The divergence gate: how far generation may run ahead, from how far the trained batches were off-policy.

A plain controller without I/O: one figure a step goes in, a limit on staleness comes out. docs/staleness.md
describes the figure and gives the reasons for the constants.
"""

from __future__ import annotations

import msgspec

__all__ = ["DivergenceGate"]

_WINDOW = 3
"""Figures whose median is judged: of three, so that one outlier never moves the limit and two in a row do."""
_CAP = 100.0
"""A figure counts as at most this many bounds, and so does one that is not a number."""
_WIDEN_BELOW = 0.5
"""Part of the bound that the median must stay below for the limit to widen."""
_PATIENCE = 4
_MAX_PATIENCE = 64


class DivergenceGate(msgspec.Struct):
    """The limit and what the controller remembers between two steps; part of every checkpoint.

    A change of the limit shows in the batches only after those issued under the former limit are trained.
    So the controller waits that many steps after each change before it judges again.
    """

    limit: int
    """η_eff: train steps that generation may run ahead now, 0 to `queue.max_staleness`."""
    recent: tuple[float, ...] = (0.0,) * _WINDOW
    """The newest figures, in nats a token, the oldest first."""
    settling: int = 0
    """Steps until the last change shows in the batches."""
    calm: int = 0
    """Steps in a row in which the median was low enough to widen."""
    patience: int = _PATIENCE
    """Calm steps before the limit widens. It doubles each time a widening has to be undone."""
    widened: bool = False
    """Whether the last change was a widening."""

    def observe(self, divergence: float, *, bound: float, max_staleness: int) -> None:
        """Take in the figure of one step, and perhaps move the limit.

        Args:
            divergence: KL(behaviour || current) of the batch less the engine's error, in nats a token.
            bound: `queue.max_divergence`, in the same unit.
        """
        capped = divergence if divergence < _CAP * bound else _CAP * bound
        self.recent = (*self.recent[1:], capped)
        median = sorted(self.recent)[_WINDOW // 2]
        if self.settling:
            self.settling -= 1
        elif median > bound:
            self._narrow(bound / median)
        elif median >= _WIDEN_BELOW * bound:
            self.calm = 0
        else:
            self.calm += 1
            if self.calm >= self.patience and self.limit < max_staleness:
                self._widen()

    def _narrow(self, factor: float) -> None:
        """In proportion to the excess, by at least one step: KL grows at least as fast as the lag."""
        if self.limit == 0:
            return
        self.patience = min(2 * self.patience, _MAX_PATIENCE) if self.widened else self.patience
        self._move(min(self.limit - 1, int(self.limit * factor)), widened=False)

    def _widen(self) -> None:
        """By one step. Where another widening came before, that one held, and caution ends."""
        self.patience = _PATIENCE if self.widened else self.patience
        self._move(self.limit + 1, widened=True)

    def _move(self, limit: int, *, widened: bool) -> None:
        self.settling = max(self.limit, limit) + 1
        self.limit, self.widened, self.calm = limit, widened, 0
