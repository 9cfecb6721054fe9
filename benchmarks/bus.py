"""Typed messages against raw nats-py, publisher to subscriber over one real server.

    python benchmarks/bus.py

For each message size the two run in turn for several rounds, and their medians are compared: raw `publish`
and `subscribe` of bytes, and `Bus.publish` and `Bus.subscribe` of a struct of the same encoded size, which
the bus encodes, checks and decodes. The last line is one JSON object.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import msgspec
import numpy as np
from nats.aio.client import Client

from stretto.array import Array
from stretto.bus.client import connect
from stretto.bus.messages.base import Message
from stretto.bus.messages.subjects import Subjects
from stretto.bus.server import Bootstrap, NatsServer, lock_run
from stretto.config import BusConfig

ROUNDS = 7
COUNTS = {200: 40_000, 16_384: 10_000}


class Sample(Message, frozen=True):
    """A header and an array, like most messages of a run."""

    id: str
    worker: str
    version: int
    tokens: Array


def sample_of(size: int) -> Sample:
    """Make a message of `size` encoded bytes."""
    empty = Sample("0/1/0", "rollout-0", 3, Array.of(np.zeros(0, np.uint8)))
    rest = size - len(msgspec.msgpack.encode(empty))
    for length in range(rest - 8, rest + 1):
        message = Sample("0/1/0", "rollout-0", 3, Array.of(np.zeros(length, np.uint8)))
        if len(msgspec.msgpack.encode(message)) == size:
            return message
    raise AssertionError(f"no message of {size} bytes")


async def rate(count: int, publish: Callable[[], Awaitable[None]], done: anyio.Event) -> float:
    """Return the messages per second from the first publish until the last message is handled."""
    began = time.perf_counter()
    for _ in range(count):
        await publish()
    with anyio.fail_after(60):
        await done.wait()
    return count / (time.perf_counter() - began)


async def raw_rate(url: str, user: tuple[str, str], subject: str, size: int, count: int) -> float:
    publisher, subscriber = Client(), Client()
    for client in (publisher, subscriber):
        await client.connect(url, user=user[0], password=user[1])
    done, seen, payload = anyio.Event(), 0, bytes(size)

    async def handle(msg: object) -> None:
        nonlocal seen
        seen += 1
        if seen == count:
            done.set()

    await subscriber.subscribe(subject, cb=handle)
    await subscriber.flush()
    result = await rate(count, lambda: publisher.publish(subject, payload), done)
    for client in (publisher, subscriber):
        await client.close()
    return result


async def typed_rate(bootstrap: Bootstrap, subject: str, size: int, count: int) -> float:
    async with connect(bootstrap) as publisher, connect(bootstrap) as subscriber:
        done, seen, message = anyio.Event(), 0, sample_of(size)

        def handle(sample: Sample) -> None:
            nonlocal seen
            seen += 1
            if seen == count:
                done.set()

        await subscriber.subscribe(subject, Sample, handle)
        return await rate(count, lambda: publisher.publish(subject, message), done)


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        bus = Path(folder, "bus")
        lock = lock_run(bus)
        server = await NatsServer.start(bus, "bench", BusConfig(), Path(folder))
        bootstrap = Bootstrap.read(bus / "kernel.json")
        user = (bootstrap.user, bootstrap.password)
        beacon = Subjects(bootstrap.run).beacon
        ratios: dict[str, float] = {}
        print(f"{'bytes':>7} {'raw msg/s':>11} {'typed msg/s':>12} {'ratio':>6}")
        for size, count in COUNTS.items():
            raw: list[float] = []
            typed: list[float] = []
            for _ in range(ROUNDS):
                raw.append(await raw_rate(server.url, user, beacon, size, count))
                typed.append(await typed_rate(bootstrap, beacon, size, count))
            plain, ours = statistics.median(raw), statistics.median(typed)
            ratios[str(size)] = round(ours / plain, 3)
            print(f"{size:>7} {plain:>11,.0f} {ours:>12,.0f} {ours / plain:>6.2f}")
        await server.stop()
        lock.close()
    print(json.dumps({"ratio": ratios}))


if __name__ == "__main__":
    anyio.run(main)
