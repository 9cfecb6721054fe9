"""The writers of a stream with three replicas, whose servers are killed one after the other."""

from itertools import cycle
from pathlib import Path

import anyio
import msgspec
import pytest

from nats_cluster import LOGIN, Cluster
from patience import patience
from stretto.bus.client import connect
from stretto.bus.messages.events import Event, EventBatch, VersionPublished
from stretto.bus.messages.subjects import Subjects
from stretto.bus.server import Bootstrap
from stretto.errors import Superseded
from stretto.kernel.durable.journal import JournalWriter, own_journal

KERNELS = 4
EVENTS, KILLED_AT, STARTED_AT = 60, 20, 40
"""Number of events of each kernel, and the events before which a server is killed and started again."""


@pytest.mark.slow
async def test_each_event_is_stored_once_and_by_the_newest_writer(tmp_path: Path) -> None:
    names = Subjects("r")
    with Cluster(tmp_path / "cluster") as cluster:
        nobody = Bootstrap(url=cluster.url, run="r", role="kernel", outage_s=patience(60.0), replicas=3)
        bootstrap = msgspec.structs.replace(nobody, **LOGIN)
        async with connect(bootstrap) as bus, anyio.create_task_group() as tasks:
            writers = [await own_journal(bus, names, "0")]
            for kernel, server in zip(range(KERNELS), cycle(cluster.servers), strict=False):
                for version in range(EVENTS):
                    if version == KILLED_AT:  # while events are on their way
                        tasks.start_soon(anyio.to_thread.run_sync, server.kill)
                    elif version == STARTED_AT:
                        await anyio.to_thread.run_sync(server.start)
                    await store(writers[-1], VersionPublished(0, version, f"of {kernel}"))
                writers.append(await own_journal(bus, names, str(kernel + 1)))
                for former in writers[:-1]:
                    await refused(former)
        for server in cluster.servers:
            server.kill()
            server.start()
        async with connect(bootstrap) as bus:
            last = await bus.store.last_sequence(names.journal_stream, names.events)
            found = list[Event]()
            reading = names.journal_stream, names.events, EventBatch
            async for sequence, batch in bus.store.follow(*reading, start=1):
                found += (msgspec.msgpack.decode(each, type=Event) for each in batch.events)
                if sequence == last:
                    break
    assert found == [
        VersionPublished(0, version, f"of {kernel}") for kernel in range(KERNELS) for version in range(EVENTS)
    ]


async def store(writer: JournalWriter, event: Event) -> None:
    writer.hear(event)
    await writer.flush()


async def refused(writer: JournalWriter) -> None:
    with pytest.raises(Superseded):
        await store(writer, VersionPublished(0, 0, "of a former kernel"))
