"""Items that travel together in one message."""

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import anyio

T = TypeVar("T")


class Gathered(Generic[T]):
    """Sends items together, `pause_s` after the first item; with 0, those of one turn of the event loop."""

    def __init__(self, send: Callable[[tuple[T, ...]], Awaitable[None]], pause_s: float = 0.0) -> None:
        self._send = send
        self._pause_s = pause_s
        self._items: list[T] = []
        self._any = anyio.Event()

    def add(self, item: T) -> None:
        """Queue an item, to be sent together with others."""
        self._items.append(item)
        self._any.set()

    async def run(self) -> None:
        """Send the queued items, until cancelled."""
        while True:
            await self._any.wait()
            await anyio.sleep(self._pause_s)
            items, self._items, self._any = tuple(self._items), [], anyio.Event()
            await self._send(items)
