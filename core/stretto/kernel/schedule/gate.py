"""The divergence gate limits how far generation runs ahead, by the divergence of trained batches, one figure
per step. No I/O; docs/staleness.md describes the figure and gives the reasons for the constants."""

import msgspec

_WINDOW = 3
"""Number of newest figures in the median. With three, one outlier never moves the limit; two in a row do."""
_CAP = 100.0
"""A figure counts as at most this multiple of the bound. NaN counts as this multiple."""
_WIDEN_BELOW = 0.5
"""The limit widens only while the median is below this fraction of the bound."""
_PATIENCE = 4  # initial value of `DivergenceGate.patience`
_MAX_PATIENCE = 64  # maximum value of `DivergenceGate.patience`


class DivergenceGate(msgspec.Struct):
    """The limit and the gate's state between steps; every checkpoint contains them. A changed limit affects
    batches only after the tickets that were issued under the previous limit are trained, so the gate waits
    for that number of steps before the next change."""

    limit: int
    """η_eff: number of train steps that generation may run ahead now, 0 to `queue.max_staleness`."""
    recent: tuple[float, ...] = (0.0,) * _WINDOW
    """The newest figures, in nats per token, oldest first."""
    settling: int = 0
    """Number of steps until the last change affects the batches."""
    calm: int = 0
    """Number of steps in a row in which the median was low enough to widen the limit."""
    patience: int = _PATIENCE
    """Number of calm steps before the limit widens. It doubles when a widening has to be undone."""
    widened: bool = False
    """Whether the last change was a widening."""

    def observe(self, divergence: float, *, bound: float, max_staleness: int) -> None:
        """Take in the figure of one step, KL(behaviour || current) minus the engines' error, and change the
        limit if needed. `bound` is `queue.max_divergence`. Both are in nats per token."""
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
        """Lower the limit in proportion to the excess: KL grows at least as fast as the lag."""
        if self.limit == 0:
            return
        self.patience = min(2 * self.patience, _MAX_PATIENCE) if self.widened else self.patience
        self._move(min(self.limit - 1, int(self.limit * factor)), widened=False)

    def _widen(self) -> None:
        """Raise the limit by 1. After two widenings in a row, the patience returns to its initial value."""
        self.patience = _PATIENCE if self.widened else self.patience
        self._move(self.limit + 1, widened=True)

    def _move(self, limit: int, *, widened: bool) -> None:
        self.settling = max(self.limit, limit) + 1
        self.limit, self.widened, self.calm = limit, widened, 0
