"""How many tickets a rollout worker runs at once."""

from collections import Counter
from collections.abc import Callable

import anyio
import structlog

from stretto.bus.messages.membership import EngineFigures, Routes
from stretto.bus.messages.tickets import Purpose
from stretto.config import Bounds
from stretto.machine import clock

log = structlog.get_logger()

_LOOK_S = 5.0  # between two changes of the limit
_LESS = 0.8  # factor of a fall
_MORE = 1 / 8  # growth of the limit while `limit` tickets end


class Concurrency:
    """The number of tickets that run, and its limit.

    A limit with bounds begins at the lower bound, and follows the rules of TCP: slow start, then additive
    increase and multiplicative decrease (Jacobson, 1988, doi:10.1145/52324.52356). The signal is the number
    of lost tokens: engines compute them again because their prefix caches are too small for the conversations
    under way. The limit changes every 5 s.

    - The limit doubles while running tickets reach it, until engines have lost more tokens than they sampled.
      Then it falls to the half.
    - From then on the limit grows by an eighth in the time in which `limit` tickets end, and falls by a fifth
      when engines have lost more tokens than they sampled.
    - After a fall, earlier sampled tokens count by half, so that one lost text does not cause another fall.
      Whenever `limit` tickets have ended, all earlier tokens count by half, too.
    - After a fall, no tokens are counted until so few tickets run that they are within the limit.
    """

    def __init__(self, limit: int | Bounds, now: Callable[[], float] = clock.now) -> None:
        self._bounds = Bounds(min=limit, max=limit) if isinstance(limit, int) else limit
        self._limit: float = self._bounds.min
        self._is_slow_start = True
        self._running = Counter[Purpose]()
        self._changed = anyio.Event()
        self._closed = False
        self._now = now
        self._figures: dict[str, EngineFigures] = {}  # by the nonce of the process
        self._sampled = self._lost = 0.0
        self._round = 0
        """Number of tickets that have ended since `_sampled` and `_lost` were halved."""
        self._begin_look()

    @property
    def limit(self) -> int:
        """The largest number of tickets of each purpose now."""
        return int(self._limit)

    async def room(self, purpose: Purpose) -> int:
        """Wait until a ticket of this purpose may begin, and return how many may. After `close`, return 0."""
        while (room := self.limit - self._running[purpose]) <= 0 and not self._closed:
            await self._changed.wait()
        return 0 if self._closed else room

    def begin(self, purpose: Purpose) -> None:
        """Count a ticket as running. It may exceed the limit, if the limit fell in the meantime."""
        self._running[purpose] += 1
        self._was_reached = self._was_reached or self._running[purpose] >= self.limit

    def end(self, purpose: Purpose) -> None:
        self._was_reached = self._was_reached or self._running[purpose] >= self.limit
        self._running[purpose] -= 1
        self._ended += 1
        self._notify()

    def close(self) -> None:
        """Let no more tickets begin."""
        self._closed = True
        self._notify()

    def follow(self, routes: Routes) -> None:
        """Count tokens from the latest figures of the engines, and set the limit."""
        sampled = lost = 0
        for peer in routes.peers:
            if (latest := peer.figures) is not None:
                previous = self._figures.get(peer.nonce, latest)
                sampled += latest.generated_tokens - previous.generated_tokens
                lost += latest.lost_tokens - previous.lost_tokens
        self._figures = {peer.nonce: peer.figures for peer in routes.peers if peer.figures is not None}
        if max(self._running.values(), default=0) > self.limit:
            self._begin_look()  # the limit has fallen: count again when so few tickets run
            return
        self._sampled += sampled
        self._lost += lost
        self._has_sampled = self._has_sampled or sampled > 0
        if self._now() - self._looked_at >= _LOOK_S:
            self._look()
            self._begin_look()

    def _begin_look(self) -> None:
        self._looked_at, self._ended = self._now(), 0
        self._was_reached = max(self._running.values(), default=0) >= self.limit
        self._has_sampled = False

    def _look(self) -> None:
        if self._lost > self._sampled:
            self._set(self._limit * (1 / 2 if self._is_slow_start else _LESS))
            self._is_slow_start = False
            self._sampled, self._lost, self._round = self._sampled / 2, 0.0, 0
            return
        if self._was_reached and self._has_sampled:  # without both, the limit did not matter
            growth = self._limit if self._is_slow_start else self._ended * max(_MORE, 1 / self._limit)
            self._set(self._limit + growth)
        self._round += self._ended
        if self._round >= self._limit:
            self._sampled, self._lost, self._round = self._sampled / 2, self._lost / 2, 0

    def _set(self, limit: float) -> None:
        before = self.limit
        self._limit = min(max(limit, self._bounds.min), self._bounds.max)
        if self.limit != before:
            log.debug("concurrency", limit=self.limit, sampled=self._sampled, lost=self._lost)
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
