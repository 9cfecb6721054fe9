"""Random operations on streams have the same results on a real nats-server and on the simulated one."""

import asyncio
import json
import os
from pathlib import Path
from random import Random
from typing import Any

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from nats_cluster import Server
from patience import patience
from stretto.bus.connection import NatsClient
from stretto.simulation.loop import SimulatedLoop
from stretto.simulation.patches import World, patched
from stretto.simulation.server import SimulatedServer

NUM_SEQUENCES = int(os.environ.get("STRETTO_SEQUENCES", "300"))
"""10,000 were compared once; as many as this in each run."""
AT_ONCE = 16
"""Number of sequences at the same time."""
KINDS = [*["store"] * 3, "delete", "purge", "get", "newest", "info", "reader", "pull", "pull", "answer"]


class Sequence:
    """Draws operations on a log, a queue and a bucket, carries them out, and notes what the server says."""

    def __init__(self, client: Client, number: int) -> None:
        self.client, self.number = client, number
        self.rng = Random(number)
        self.notes: list[Any] = []
        self.readers: list[str] = []
        self.open: list[Any] = []
        """Messages of the queue that are taken, and not answered."""
        self.last = 0

    async def run(self) -> list[Any]:
        await self._begin()
        for _ in range(self.rng.randint(5, 25)):
            kind = self.rng.choice(KINDS)
            self.notes.append((kind, await getattr(self, f"_{kind}")()))
        for stream in (self.log, self.queue):
            await self._ask(f"$JS.API.STREAM.DELETE.{stream}", b"")
        return self.notes

    async def _begin(self) -> None:
        self.log, self.queue = f"LOG_{self.number}", f"QUEUE_{self.number}"
        self.subjects = [f"l{self.number}.a", f"l{self.number}.b"]
        self.work = f"q{self.number}.work"
        log = {"name": self.log, "subjects": self.subjects, "allow_direct": True, "storage": "memory"}
        queue = {"name": self.queue, "subjects": [self.work], "retention": "workqueue", "storage": "memory"}
        for config in (log, queue):
            await self._api(f"STREAM.CREATE.{config['name']}", config)
        consumer = {"durable_name": "takers", "filter_subject": self.work, "ack_policy": "explicit"}
        consumer |= {"ack_wait": 60 * 10**9, "max_ack_pending": -1}
        creation = {"stream_name": self.queue, "config": consumer}
        await self._api(f"CONSUMER.DURABLE.CREATE.{self.queue}.takers", creation)

    async def _ask(self, subject: str, data: bytes, headers: dict[str, str] | None = None) -> Msg:
        return await self.client.request(subject, data, timeout=patience(10), headers=headers)

    async def _api(self, verb: str, question: dict[str, Any]) -> dict[str, Any]:
        return json.loads((await self._ask(f"$JS.API.{verb}", json.dumps(question).encode())).data)

    def _sequence(self) -> int:
        return self.rng.randint(1, self.last + 2)

    async def _store(self) -> Any:
        subject = self.rng.choice([*self.subjects, self.work])
        headers = {}
        if self.rng.random() < 0.5:
            headers["Nats-Msg-Id"] = str(self.rng.randint(1, 6))
        if self.rng.random() < 0.3:
            expected = self.rng.randint(max(0, self.last - 1), self.last + 1)
            headers["Nats-Expected-Last-Sequence"] = str(expected)
        data = self.rng.randbytes(self.rng.randint(0, 20))
        answer = json.loads((await self._ask(subject, data, headers or None)).data)
        if subject != self.work and "error" not in answer:
            self.last = max(self.last, answer["seq"])
        return _kept(answer, "seq", "duplicate", "error")

    async def _delete(self) -> Any:
        answer = await self._api(f"STREAM.MSG.DELETE.{self.log}", {"seq": self._sequence()})
        return _kept(answer, "success", "error")

    async def _purge(self) -> Any:
        if self.rng.random() < 0.7:
            return None
        below = self._sequence()
        answer = await self._api(f"STREAM.PURGE.{self.log}", {"seq": below})
        self.last = max(self.last, below - 1)
        return _kept(answer, "success", "purged", "error")

    async def _get(self) -> Any:
        return await self._found({"seq": self._sequence()})

    async def _newest(self) -> Any:
        return await self._found({"last_by_subj": self.rng.choice(self.subjects)})

    async def _found(self, question: dict[str, Any]) -> Any:
        if self.rng.random() < 0.5:
            answer = await self._api(f"STREAM.MSG.GET.{self.log}", question)
            message = answer.get("message", {})
            return _kept(answer, "error"), _kept(message, "subject", "seq", "data")
        answer = await self._ask(f"$JS.API.DIRECT.GET.{self.log}", json.dumps(question).encode())
        headers = answer.headers or {}
        return headers.get("Status"), headers.get("Nats-Subject"), headers.get("Nats-Sequence"), answer.data

    async def _info(self) -> Any:
        stream = self.rng.choice([self.log, self.queue])
        answer = await self._api(f"STREAM.INFO.{stream}", {"deleted_details": True})
        return _kept(answer["state"], "messages", "first_seq", "last_seq", "deleted", "num_deleted")

    async def _reader(self) -> Any:
        name = f"reader{len(self.readers)}"
        config = {"name": name, "deliver_policy": "by_start_sequence", "opt_start_seq": self._sequence()}
        config |= {"ack_policy": "none", "inactive_threshold": 120 * 10**9}
        subjects = self.rng.choice([self.subjects[:1], self.subjects])
        config |= {"filter_subject": subjects[0]} if len(subjects) == 1 else {"filter_subjects": subjects}
        creation = {"stream_name": self.log, "config": config}
        answer = await self._api(f"CONSUMER.CREATE.{self.log}.{name}", creation)
        self.readers.append(name)
        return answer["name"], answer.get("error")

    async def _pull(self) -> Any:
        """Take up to three messages, and no longer than there are any."""
        stream, consumer = self.queue, "takers"
        if self.readers and self.rng.random() < 0.6:
            stream, consumer = self.log, self.rng.choice(self.readers)
        number, got = self.rng.randint(1, 3), list[Any]()
        for attempt in range(5):  # a real consumer hears of a new message a moment after its sender
            await asyncio.sleep(0.01 * attempt)
            got = await self._taken(stream, consumer, number)
            if got != ["404"]:
                break
        return got

    async def _taken(self, stream: str, consumer: str, number: int) -> list[Any]:
        inbox = self.client.new_inbox()
        subscription = await self.client.subscribe(inbox)
        question = {"batch": number, "no_wait": True}
        ask = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        await self.client.publish(ask, json.dumps(question).encode(), reply=inbox)
        got: list[Any] = []
        for _ in range(number):
            message = await subscription.next_msg(10)
            status = (message.headers or {}).get("Status")
            if status is not None:
                got.append(status)
                break
            facts = message.metadata
            delivered = facts.num_delivered, facts.sequence.stream, facts.sequence.consumer
            got.append((message.subject, message.data, delivered))
            if stream == self.queue:
                self.open.append(message)
        await subscription.unsubscribe()
        return got

    async def _answer(self) -> Any:
        if not self.open:
            return None
        message = self.open.pop(self.rng.randrange(len(self.open)))
        word = self.rng.choice([b"+ACK", b"-NAK", b"+TERM"])
        await self.client.publish(message.reply, word)
        await self.client.flush()
        return word


def _kept(answer: dict[str, Any], *keys: str) -> dict[str, Any]:
    kept = {key: answer[key] for key in keys if answer.get(key)}
    if "error" in kept:
        kept["error"] = kept["error"]["err_code"]
    return kept


async def _sequences(client: Client) -> list[list[Any]]:
    """Return the notes of all sequences. Each has streams of its own, so many may run at the same time."""
    limit = asyncio.Semaphore(AT_ONCE)

    async def run(number: int) -> list[Any]:
        async with limit:
            return await Sequence(client, number).run()

    return await asyncio.gather(*map(run, range(NUM_SEQUENCES)))


async def _connected(url: str) -> list[list[Any]]:
    client = NatsClient()
    await client.connect(url)
    try:
        return await _sequences(client)
    finally:
        await client.close()


def _on_a_real_server(folder: Path) -> list[list[Any]]:
    with Server(folder, "real", {"jetstream": {"store_dir": str(folder)}}) as server:
        return asyncio.run(_connected(f"nats://{server.address}"))


def _on_the_simulated_server() -> list[list[Any]]:
    loop = SimulatedLoop(0)
    SimulatedServer(loop, 0)
    with patched(World(loop, 0)):
        try:
            return loop.run_until_complete(_connected("nats://simulated:4222"))
        finally:
            loop.close()


@pytest.mark.timeout(patience(1800))
def test_the_same_operations_have_the_same_results(tmp_path: Path) -> None:
    simulated = _on_the_simulated_server()
    real = _on_a_real_server(tmp_path)
    for number, (expected, found) in enumerate(zip(real, simulated, strict=True)):
        assert found == expected, f"sequence {number}"
