"""What the bus promises, on a real nats-server and on the simulated one. The real one is the truth."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import msgspec
import nats.aio.client
import nats.js.client
import nats.nuid
import numpy as np
import pytest
from nats.aio.client import Client

from bus_testing import NO_LOCK, bundle, one_at_a_time, until
from fixture_types import OpenBus
from patience import patience
from stretto.bus.client import Bus
from stretto.bus.messages import events
from stretto.bus.messages.membership import Heartbeat, Join, Welcome
from stretto.bus.messages.subjects import Subjects
from stretto.bus.messages.tickets import (
    GroupDone,
    GroupFailed,
    Progress,
    Ticket,
    TicketStarted,
    TrajectoryBundle,
)
from stretto.bus.store import Delivery, StreamEnd
from stretto.errors import BusError, Malformed, MessageGone, NoAnswer, Refused, Superseded
from stretto.kernel.durable.journal import newest_epoch, own_journal
from stretto.machine import clock

NAMES = Subjects("test-run")
HEARTBEAT = NAMES.kernel("rollout", "heartbeat")
JOIN = NAMES.kernel("trainer", "join")
OUTCOMES = GroupDone | GroupFailed


async def join(bus: Bus, seconds: float, place: str = "p") -> Welcome:
    question = Join("trainer-0", "trainer", place, "n", "t")
    return await bus.request(JOIN, question, Welcome, deadline_s=patience(seconds))


async def welcome(message: Join) -> Welcome:
    return Welcome(message.place.encode() * 2, message.worker, "", 1, 1.0, {}, 300.0, NO_LOCK)


def failure(ticket: int, reason: str = "") -> GroupFailed:
    return GroupFailed("train", ticket, 1, "w", reason)


def ticket_of(number: int) -> Ticket:
    return Ticket(number, 1, "train", 0, 0, 8)


whole_and_in_parts = pytest.mark.parametrize("size", [10, 3_000_000], ids=["whole", "in parts"])


async def test_published_messages_arrive_in_order(open_bus: OpenBus) -> None:
    got: list[Heartbeat] = []
    async with open_bus("kernel") as kernel, open_bus("rollout") as rollout:
        await kernel.subscribe(HEARTBEAT, Heartbeat, got.append)
        for tickets in range(500):
            await rollout.publish(HEARTBEAT, Heartbeat("rollout-0", "n", True, tickets=tickets))
        await until(lambda: len(got) == 500)
    assert [beat.tickets for beat in got] == list(range(500))


async def test_payloads_above_the_limit_travel_in_parts(open_bus: OpenBus) -> None:
    async with open_bus("kernel") as kernel, open_bus("trainer") as trainer:
        await kernel.serve(JOIN, Join, welcome)
        place = "x" * 3_000_000  # the server takes 1 MiB
        assert (await join(trainer, 20, place)).config == place.encode() * 2


async def test_a_subscription_receives_what_is_published_once_it_is_made(open_bus: OpenBus) -> None:
    """The client's own `flush` overtakes a subscription that waits to be sent, now and then."""
    async with open_bus("kernel") as kernel, open_bus("rollout") as rollout:
        for _ in range(200):
            heard = anyio.Event()
            await kernel.subscribe(HEARTBEAT, Heartbeat, lambda _, heard=heard: heard.set())
            await rollout.publish(HEARTBEAT, Heartbeat("rollout-0", "n", ready=True))
            with anyio.fail_after(patience(5)):
                await heard.wait()


async def test_a_client_reads_on_after_a_cancelled_subscription(open_bus: OpenBus) -> None:
    """nats-py's task that reads ends at the answer to a ping for which nobody waits any more."""
    heard = anyio.Event()
    async with open_bus("kernel") as kernel, open_bus("rollout") as rollout:
        for _ in range(20):
            with anyio.move_on_after(patience(1e-4)):
                await kernel.subscribe(NAMES.kernel("trainer", "heartbeat"), Heartbeat, lambda _: None)
        with anyio.fail_after(patience(3)):  # pings would notice later
            await kernel.subscribe(HEARTBEAT, Heartbeat, lambda _: heard.set())
            await rollout.publish(HEARTBEAT, Heartbeat("rollout-0", "n", ready=True))
            await heard.wait()


async def test_a_request_without_a_server_names_who_is_silent(open_bus: OpenBus) -> None:
    async with open_bus("trainer") as trainer:
        began = anyio.current_time()
        with pytest.raises(NoAnswer, match=r"kernel did not answer on .*join.* within [\d.]+ s"):
            await join(trainer, 0.5)
    assert anyio.current_time() - began < patience(3)


async def test_a_request_waits_for_a_server_that_comes_late(open_bus: OpenBus) -> None:
    async with open_bus("kernel") as kernel, open_bus("trainer") as trainer:

        async def late() -> None:
            await anyio.sleep(patience(0.3))
            await kernel.serve(JOIN, Join, welcome)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(late)
            assert (await join(trainer, 10)).run == "trainer-0"


async def test_a_repeated_request_is_served_once(open_bus: OpenBus) -> None:
    served = 0
    async with open_bus("kernel") as kernel, open_bus("trainer") as trainer:

        async def slow(message: Join) -> Welcome:
            nonlocal served
            served += 1
            await anyio.sleep(patience(4.5))  # the asker repeats itself twice meanwhile
            return await welcome(message)

        await kernel.serve(JOIN, Join, slow)
        await join(trainer, 20)
    assert served == 1


async def test_what_a_server_raises_reaches_the_asker(open_bus: OpenBus) -> None:
    async with open_bus("kernel") as kernel, open_bus("trainer") as trainer:

        async def refuse(message: Join) -> Welcome:
            raise ZeroDivisionError(message.worker)

        await kernel.serve(JOIN, Join, refuse)
        with pytest.raises(Refused, match="kernel refused: ZeroDivisionError: trainer-0"):
            await join(trainer, 5)


async def test_a_handler_that_raises_ends_the_bus(open_bus: OpenBus) -> None:
    def broken(message: Heartbeat) -> None:
        raise LookupError(message.worker)

    with pytest.RaisesGroup(LookupError):
        async with open_bus("kernel") as kernel, open_bus("rollout") as rollout:
            await kernel.subscribe(HEARTBEAT, Heartbeat, broken)
            await rollout.publish(HEARTBEAT, Heartbeat("rollout-0", "n", True))
            with anyio.fail_after(patience(60)):
                await anyio.sleep_forever()


async def test_the_log_is_read_by_sequence_and_stores_each_id_once(open_bus: OpenBus) -> None:
    async with open_bus("kernel") as kernel, open_bus("rollout") as rollout, open_bus("trainer") as trainer:
        await kernel.store.make_log(NAMES.log_stream, [NAMES.trajectories, NAMES.groups])
        small = await rollout.store.append(NAMES.trajectories, bundle(10), id="a")
        again = await rollout.store.append(NAMES.trajectories, bundle(10), id="a")
        large = await rollout.store.append(NAMES.trajectories, bundle(200_000), id="b")  # 2.6 MB
        assert small == again
        read = await trainer.store.read(NAMES.log_stream, small, TrajectoryBundle)
        assert read.trajectories[0].tokens.numpy().tolist() == list(range(10))
        read = await trainer.store.read(NAMES.log_stream, large, TrajectoryBundle)
        np.testing.assert_array_equal(read.trajectories[0].versions.numpy(), np.arange(200_000))
        with pytest.raises(Malformed, match="expected GroupDone"):
            await trainer.store.read(NAMES.log_stream, small, GroupDone)
        await kernel.store.purge(NAMES.log_stream, below=large)
        with pytest.raises(BusError, match="is gone"):
            await trainer.store.read(NAMES.log_stream, small, TrajectoryBundle)


async def test_following_a_log_begins_anywhere_and_goes_on(open_bus: OpenBus) -> None:
    async with open_bus("kernel") as kernel, open_bus("rollout") as rollout:
        await kernel.store.make_log(NAMES.log_stream, [NAMES.trajectories, NAMES.groups])
        messages = [failure(ticket, "x" * (2_000_000 if ticket == 3 else 1)) for ticket in range(4)]
        sequences = [await rollout.store.append(NAMES.groups, each, id=f"{each.ticket}") for each in messages]
        await rollout.store.append(NAMES.trajectories, bundle(1), id="beside")
        assert await kernel.store.last_sequence(NAMES.log_stream, NAMES.groups) == sequences[-1]
        got: list[int] = []
        async with anyio.create_task_group() as tasks:

            async def follow() -> None:
                reading = NAMES.log_stream, NAMES.groups, OUTCOMES
                async for sequence, message in kernel.store.follow(*reading, start=sequences[1]):
                    got.append(message.ticket)
                    assert sequence in sequences or message.ticket == 9

            tasks.start_soon(follow)
            await until(lambda: got == [1, 2, 3])
            await rollout.store.append(NAMES.groups, failure(9), id="9")
            await until(lambda: got == [1, 2, 3, 9])
            tasks.cancel_scope.cancel()


async def test_a_ticket_goes_to_one_taker_and_comes_back_if_it_is_not_done(open_bus: OpenBus) -> None:
    async with open_bus("kernel") as kernel, open_bus("rollout") as one, open_bus("rollout") as two:
        await kernel.store.make_queue(NAMES.tickets_stream, [NAMES.ticket("train")], redeliver_s=1)
        for ticket in map(ticket_of, (1, 2, 1)):
            await kernel.store.append(NAMES.ticket("train"), ticket, id=ticket.name)

        def take(bus: Bus) -> AsyncIterator[Delivery[Ticket]]:
            queue = NAMES.tickets_stream, NAMES.ticket("train"), Ticket
            return bus.store.take(*queue, room=one_at_a_time, until=anyio.Event())

        with anyio.fail_after(patience(10)):
            at_one, at_two = await anext(take(one)), await anext(take(two))
            assert {at_one.message.id, at_two.message.id} == {1, 2}
            await at_two.acknowledge()
            # `at_one` is forgotten: it comes again, and only it.
            again = await anext(take(two))
        assert again.message == at_one.message


async def test_a_taker_gets_as_many_tickets_as_it_has_room_for(open_bus: OpenBus) -> None:
    queue, stop = NAMES.ticket("train"), anyio.Event()
    rooms = iter([3, 2])
    taken: list[int] = []
    async with open_bus("kernel") as kernel, open_bus("rollout") as rollout:
        await kernel.store.make_queue(NAMES.tickets_stream, [queue], redeliver_s=30)

        async def room() -> int:
            if (number := next(rooms, 0)) == 0:
                await stop.wait()
            return number

        async def take() -> None:
            async for each in rollout.store.take(NAMES.tickets_stream, queue, Ticket, room=room, until=stop):
                taken.append(each.message.id)
                await each.acknowledge()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(take)
            for number in range(7):
                await kernel.store.append(queue, ticket_of(number), id=f"{number}")
            await until(lambda: len(taken) == 5)
            await anyio.sleep(patience(0.3))
            assert taken == [0, 1, 2, 3, 4]
            stop.set()  # `take` ends


async def test_a_taker_that_leaves_gives_back_what_it_has_asked_for(open_bus: OpenBus) -> None:
    queue, stop = NAMES.ticket("train"), anyio.Event()
    async with open_bus("kernel") as kernel, open_bus("rollout") as one, open_bus("rollout") as two:
        await kernel.store.make_queue(NAMES.tickets_stream, [queue], redeliver_s=30)

        async def leave() -> None:
            async def five() -> int:
                return 5

            async for _ in one.store.take(NAMES.tickets_stream, queue, Ticket, room=five, until=stop):
                stop.set()  # it has asked for four more

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(leave)
            await kernel.store.append(queue, ticket_of(0), id="0")
            await stop.wait()
            await kernel.store.append(queue, ticket_of(1), id="1")
            with anyio.fail_after(patience(10)):  # not after `redeliver_s`
                taken = NAMES.tickets_stream, queue, Ticket
                other = two.store.take(*taken, room=one_at_a_time, until=anyio.Event())
                assert (await anext(other)).message.id == 1


@whole_and_in_parts
async def test_messages_are_read_together_by_their_numbers(open_bus: OpenBus, size: int) -> None:
    stream, subject = NAMES.log_stream, NAMES.trajectories
    async with open_bus("kernel") as kernel, open_bus("rollout") as rollout, open_bus("trainer") as trainer:
        await kernel.store.make_log(stream, [subject, NAMES.groups])
        written: dict[int, TrajectoryBundle] = {}
        for number in range(6 if size > 1000 else 50):
            message = bundle(size + number)
            written[await rollout.store.append(subject, message, id=f"{number}")] = message
            await rollout.store.append(NAMES.groups, failure(number), id=f"{number}e")
        store = trainer.store
        assert await store.read_some(stream, subject, written.keys(), TrajectoryBundle) == written
        first, *_, last = written
        few = await store.read_some(stream, subject, [first, last], TrajectoryBundle)
        assert few == {first: written[first], last: written[last]}
        assert await store.read_some(stream, subject, [], TrajectoryBundle) == {}
        await kernel.store.purge(stream, below=first + 1)
        with pytest.raises(MessageGone):
            await store.read_some(stream, subject, written.keys(), TrajectoryBundle)


@whole_and_in_parts
async def test_only_the_newest_writer_of_a_stream_appends(open_bus: OpenBus, size: int) -> None:
    stream = NAMES.journal_stream
    async with open_bus("kernel") as kernel:
        store = kernel.store
        await store.make_log(stream, NAMES.of_journal)
        former = StreamEnd(stream, 0)
        first = await store.append(NAMES.leases, events.KernelLease("here"), id="a", after=former)
        newer = StreamEnd(stream, former.sequence)
        second = await store.append(NAMES.leases, events.KernelLease("x" * size), id="b", after=newer)
        assert (await store.extent(stream)).last == newer.sequence == second > first
        with pytest.raises(Superseded):
            await store.append(NAMES.leases, events.KernelLease("x" * size), id="c", after=former)
        third = await store.append(NAMES.leases, events.KernelLease("there"), id="d", after=newer)
        assert third == second + 1
        assert await store.read(stream, second, events.KernelLease) == events.KernelLease("x" * size)
        await store.purge(stream, below=third + 1)  # nothing says any more what was stored there
        with pytest.raises(Superseded):
            await store.append(NAMES.leases, events.KernelLease("here"), id="c", after=former)


@whole_and_in_parts
async def test_what_was_stored_without_an_acknowledgement_is_recognised(open_bus: OpenBus, size: int) -> None:
    """Also if another writer came meanwhile: then the next append is refused."""
    stream = NAMES.journal_stream
    async with open_bus("kernel") as kernel:
        store = kernel.store
        await store.make_log(stream, NAMES.of_journal)
        end = StreamEnd(stream, 0)
        await store.append(NAMES.leases, events.KernelLease("x" * size), id="a", after=end)
        again = StreamEnd(stream, 0)  # as if no acknowledgement had come
        await store.append(NAMES.leases, events.KernelLease("x" * size), id="a", after=again)
        assert again == end
        assert (await store.extent(stream)).last == end.sequence

        newer = StreamEnd(stream, end.sequence)
        await store.append(NAMES.leases, events.KernelLease("there"), id="b", after=newer)
        again = StreamEnd(stream, 0)
        await store.append(NAMES.leases, events.KernelLease("x" * size), id="a", after=again)
        assert again == end
        with pytest.raises(Superseded):
            await store.append(NAMES.leases, events.KernelLease("here"), id="c", after=again)
        assert (await store.extent(stream)).last == newer.sequence


async def test_an_append_that_was_cancelled_is_no_other_writer(open_bus: OpenBus) -> None:
    stream = NAMES.journal_stream
    async with open_bus("kernel") as kernel:
        store = kernel.store
        await store.make_log(stream, NAMES.of_journal)
        end = StreamEnd(stream, 0)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await store.append(NAMES.leases, events.KernelLease("sent"), id="a", after=end)
        assert end == StreamEnd(stream, 0, {"a"})  # no acknowledgement has come
        assert await store.append(NAMES.leases, events.KernelLease("next"), id="b", after=end) == 2
        assert end == StreamEnd(stream, 2)
        assert await store.read(stream, 1, events.KernelLease) == events.KernelLease("sent")


async def test_a_kernel_that_takes_the_lease_becomes_the_only_writer(open_bus: OpenBus) -> None:
    async with open_bus("kernel") as kernel:
        former = await own_journal(kernel, NAMES, "here")
        async with anyio.create_task_group() as tasks:  # each waits for the one before
            for version in (1, 2, 3):
                former.hear(events.VersionPublished(0, version, "digest"))
                tasks.start_soon(former.flush)
        newer = await own_journal(kernel, NAMES, "there")
        assert newer.epoch > former.epoch == 1
        assert await newest_epoch(kernel, NAMES) == newer.epoch
        former.hear(events.VersionPublished(0, 5, "digest"))
        with pytest.raises(Superseded):
            await former.flush()
        newer.hear(events.VersionPublished(0, 5, "another digest"))
        await newer.flush()
        assert (await kernel.store.extent(NAMES.journal_stream)).last == newer.epoch + 1


async def test_events_whose_append_fails_are_stored_by_the_next_one(
    open_bus: OpenBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_bus("kernel") as kernel:
        store, writer = kernel.store, await own_journal(kernel, NAMES, "here")
        append = store.append

        async def refused(*args: Any, **options: Any) -> int:
            raise BusError("insufficient resources")

        writer.hear(events.VersionPublished(0, 1, "digest"))
        monkeypatch.setattr(store, "append", refused)
        with pytest.raises(BusError, match="insufficient"):
            await writer.flush()
        monkeypatch.setattr(store, "append", append)
        writer.hear(events.VersionPublished(0, 2, "digest"))
        await writer.settle()
        assert writer.stored_to == 3  # the lease, and both messages
        messages = [await store.read(NAMES.journal_stream, number, events.EventBatch) for number in (2, 3)]
    assert [(each.first, len(each.events)) for each in messages] == [(0, 1), (1, 1)]
    assert messages[1].former == messages[0].digest


async def test_events_are_stored_in_order(open_bus: OpenBus) -> None:
    heard: list[events.Event] = [
        events.ScheduleStarted(),
        TicketStarted("rollout-0", "train", 1, 1),
        Progress("rollout-0", ((1, 1, 0),)),
        events.OutcomeRead(7),
        events.StepTrained(1, hold=True, divergence=float("inf")),
        events.WorkerGone("rollout-0", drained=False),
    ]
    messages: list[events.EventBatch] = []
    began = clock.wall()
    async with open_bus("kernel") as kernel, anyio.create_task_group() as tasks:
        store, stream = kernel.store, NAMES.journal_stream
        writer = await own_journal(kernel, NAMES, "here")
        for event in heard[:2]:
            writer.hear(event)
        await writer.flush()
        assert await store.last_sequence(stream, NAMES.events) == writer.epoch + 1
        writer.hear(heard[2])
        before = writer.stored_to
        await writer.flush()
        await writer.flush()  # has nothing to do
        assert writer.stored_to == before + 1
        tasks.start_soon(writer.keep)
        for event in heard[3:]:
            writer.hear(event)  # nobody waits for it
        async for _, message in store.follow(stream, NAMES.events, events.EventBatch, start=1):
            messages.append(message)
            if sum(len(each.events) for each in messages) == len(heard):
                break
        newer = await own_journal(kernel, NAMES, "there")
        newer.hear(events.BatchesReleased())
        await newer.flush()
        await store.purge(stream, below=newer.stored_to)
        newest = await store.read_newest(stream, NAMES.events, events.EventBatch)
        assert newest is not None
        released = (msgspec.Raw(msgspec.msgpack.encode(events.BatchesReleased())),)
        assert newest == events.EventBatch(newer.epoch, 0, released, newest.times, messages[-1].digest)
        writer.hear(events.RunClosing())
        with pytest.raises(Superseded):
            await writer.flush()
        tasks.cancel_scope.cancel()
    assert [each.first for each in messages] == [0, 2, 3]
    decode = msgspec.msgpack.Decoder(events.Event).decode
    assert [decode(event) for each in messages for event in each.events] == heard
    times = [time for each in messages for time in each.times]
    assert len(times) == len(heard)
    assert times == sorted(round(time, 4) for time in times)
    assert began - 0.001 <= times[0] <= times[-1] <= clock.wall() + 0.001


async def test_everything_goes_on_after_the_server_was_killed(
    open_bus: OpenBus, kill_server: Callable[[], None]
) -> None:
    queue = NAMES.ticket("train")
    heard: list[int] = []
    outcomes: list[int] = []

    async with open_bus("kernel") as kernel, open_bus("rollout") as rollout:
        await kernel.store.make_log(NAMES.log_stream, [NAMES.trajectories, NAMES.groups])
        await kernel.store.make_queue(NAMES.tickets_stream, [queue], redeliver_s=30)
        await kernel.subscribe(HEARTBEAT, Heartbeat, lambda beat: heard.append(beat.tickets))
        for number in (1, 2):
            await kernel.store.append(queue, ticket_of(number), id=f"ticket {number}")
        taken = NAMES.tickets_stream, queue, Ticket
        tickets = rollout.store.take(*taken, room=one_at_a_time, until=anyio.Event())
        first = await anext(tickets)
        async with anyio.create_task_group() as tasks:

            async def follow() -> None:
                reading = NAMES.log_stream, NAMES.groups, OUTCOMES
                async for _, message in kernel.store.follow(*reading, start=1):
                    outcomes.append(message.ticket)

            tasks.start_soon(follow)
            sequence = await rollout.store.append(NAMES.groups, failure(1), id="1")
            await until(lambda: outcomes == [1])
            kill_server()
            await until(lambda: not kernel.connected and not rollout.connected)
            with anyio.fail_after(patience(40)):
                assert await rollout.store.append(NAMES.groups, failure(1), id="1") == sequence
                assert await rollout.store.append(NAMES.groups, failure(2), id="2") == sequence + 1
                assert (await kernel.store.read(NAMES.log_stream, sequence, GroupFailed)).ticket == 1
                await first.acknowledge()
                assert (await anext(tickets)).message.id == 2
                await rollout.publish(HEARTBEAT, Heartbeat("rollout-0", "n", ready=True, tickets=7))
            await until(lambda: outcomes == [1, 2] and heard == [7], patience(40))
            assert (await kernel.store.extent(NAMES.tickets_stream)).first == 2
            tasks.cancel_scope.cancel()


def test_nats_py_still_has_the_private_names_that_are_used() -> None:
    """Below the upper bound of `nats-py` in pyproject.toml, `NatsClient` and the simulation rely on them."""
    methods = ("_process_info", "_send_ping", "_process_pong", "_send_command", "_flush_pending")
    assert [name for name in methods if not hasattr(Client, name)] == []
    assert Client()._pongs == []  # pyright: ignore[reportPrivateUsage]
    assert [name for name in ("TcpTransport", "token_hex") if not hasattr(nats.aio.client, name)] == []
    assert [name for name in ("token_bytes", "randbelow") if not hasattr(nats.nuid, name)] == []
    assert hasattr(nats.js.client, "token_hex")
