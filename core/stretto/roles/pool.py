"""The workers of a role that a rollout worker may call, as the kernel's beacons name them."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
import structlog

from stretto.bus.messages import Beacon
from stretto.errors import NoAnswer
from stretto.launcher import Role
from stretto.roles.setting import Setting

__all__ = ["Pool"]

log = structlog.get_logger()


class Pool:
    """The workers of a role that can be called now, by the kernel's latest beacon."""

    def __init__(self, setting: Setting, role: Role) -> None:
        self._role = role
        self._calls: dict[str, int] = {}
        self._scopes: dict[str, set[anyio.CancelScope]] = {}
        self._changed = anyio.Event()
        setting.on_beacon(self._hear)
        if setting.beacon is not None:
            self._hear(setting.beacon)

    def _hear(self, beacon: Beacon) -> None:
        members = {peer.worker for peer in beacon.peers if peer.role == self._role}
        for worker in self._calls.keys() - members:
            del self._calls[worker]
            for scope in self._scopes.pop(worker, set()):
                scope.cancel()
        for worker in members - self._calls.keys():
            self._calls[worker] = 0
            self._scopes[worker] = set()
            self._changed.set()
            self._changed = anyio.Event()

    @asynccontextmanager
    async def member(self) -> AsyncGenerator[str]:
        """The least busy worker, waited for if there is none. If it is lost, the block is left silently:
        call it in a loop."""
        while not self._calls:
            await self._changed.wait()
        fewest = min(self._calls.values())
        worker = random.choice([name for name, calls in self._calls.items() if calls == fewest])
        scopes = self._scopes[worker]
        with anyio.CancelScope() as scope:
            scopes.add(scope)
            self._calls[worker] += 1
            try:
                yield worker
            except NoAnswer:
                log.warning("no answer", peer=worker)
                raise
            finally:
                scopes.discard(scope)
                if worker in self._calls:
                    self._calls[worker] -= 1
