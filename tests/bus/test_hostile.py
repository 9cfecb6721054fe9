"""Hostile messages: names that are protocol, replies to foreign subjects, counts that would take memory."""

import os
import struct
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
import nats
import nats.errors
import psutil
import pytest
from nats.aio.client import Client

from bus_testing import NO_LOCK, raw_client, until
from fixture_types import OpenBus
from patience import SOON_S, patience
from stretto.array import Array
from stretto.bus.joining import check_operator, is_token_of, operator_bootstrap, write_bootstrap
from stretto.bus.messages.base import Party
from stretto.bus.messages.events import KernelLease
from stretto.bus.messages.inference import ChunkBatch, Generate
from stretto.bus.messages.membership import Beacon, Heartbeat, Join, Leaving, Peer, Ranks, Routes, Welcome
from stretto.bus.messages.operation import RunScaled, ScaleRun
from stretto.bus.messages.scoring import Scored, ScoreSamples
from stretto.bus.messages.subjects import Subjects
from stretto.bus.messages.tickets import GroupFailed, Ticket
from stretto.bus.payloads import Parts, decoder
from stretto.bus.server import Bootstrap, NatsServer
from stretto.engine import GenerateRequest, Sampling
from stretto.errors import BusError, ConfigError, NoAnswer
from stretto.launcher import ROLES

INJECTION = "rollout-0 0\r\n\r\nPUB $JS.API.STREAM.PURGE.JOURNAL_test-run 0\r\n\r\nPUB x"
PART = struct.Struct(">B16sII")


@pytest.fixture
async def raw(server: NatsServer, tmp_path: Path) -> Any:
    """`await raw("rollout")`: a plain NATS client with the credentials of a role."""
    clients: list[Client] = []

    async def connect(role: str) -> Client:
        clients.append(await raw_client(tmp_path, role))
        return clients[-1]

    yield connect
    for client in clients:
        await client.close()


# --------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    "message",
    [
        Join(INJECTION, "rollout", "p", "n", "t"),
        Join("rollout-0", "rollout", "p", INJECTION, "t"),
        Heartbeat(INJECTION, "n", True),
        Leaving("inference-0.x", "n", "bye"),
        Routes(1, (Peer(INJECTION, "n"),)),
        Routes(1, (Peer("inference-0", INJECTION),)),
        Ranks({"trainer-0": INJECTION}),
        ChunkBatch("nobody-0", (), *[Array.of([], "<i4")] * 3),
        Generate(GenerateRequest("q", Array.of([1]), (1,), Sampling(), 0), INJECTION),
        Generate(GenerateRequest("q", Array.of([1]), (1,), Sampling(), 0), "a.b"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_names_that_are_no_names_are_malformed(message: Any) -> None:
    with pytest.raises(msgspec.ValidationError, match="matching regex"):
        decoder(type(message))(msgspec.msgpack.encode(message))


@pytest.mark.parametrize(
    "name", [INJECTION, "", "rollout", "rollout-", "kernel-0", "rollout-0\n", "rollout-*", "rollout-0.x"]
)
def test_no_subject_is_made_from_such_a_name(name: str) -> None:
    with pytest.raises(BusError, match="is not the id of a worker"):
        Subjects("r").worker("rollout", name, "n", "generate")


@pytest.mark.parametrize("nonce", ["", "*", ">", "a.b", "a b", "n\n"])
def test_no_subject_is_made_from_such_a_nonce(nonce: str) -> None:
    with pytest.raises(BusError, match="is not the nonce of a process"):
        Subjects("r").worker("rollout", "rollout-0", nonce, "image")


async def test_the_client_checks_subjects_too(open_bus: OpenBus, names: Subjects) -> None:
    async with open_bus("rollout") as rollout:
        with pytest.raises(nats.errors.BadSubjectError):
            await rollout.publish(f"{names.progress} 0\r\n\r\nPING", Leaving("rollout-0", "n", ""))


def test_a_worker_joins_only_under_the_id_of_its_token(tmp_path: Path, server: NatsServer) -> None:
    del server
    bus = tmp_path / "bus"
    file = write_bootstrap(bus, "rollout-7")
    assert file.stat().st_mode & 0o777 == 0o600
    bootstrap = Bootstrap.read(file)
    assert (bootstrap.role, bootstrap.worker, bootstrap.user) == ("rollout", "rollout-7", "rollout")
    assert is_token_of(bus, "rollout", "rollout-7", bootstrap.token)
    assert not is_token_of(bus, "rollout", "rollout-8", bootstrap.token)
    assert not is_token_of(bus, "trainer", "rollout-7", bootstrap.token)
    assert not is_token_of(bus, "rollout", "rollout-7", "")
    assert not is_token_of(bus, "rollout", "rollout-7", "é" * 64)
    assert Bootstrap.read(write_bootstrap(bus, "rollout-7")).token == bootstrap.token
    with pytest.raises(ConfigError, match="is not the id of a worker"):
        write_bootstrap(bus, "../rollout-7")


# --------------------------------------------------------------------------- replies


async def test_an_answer_goes_only_to_an_inbox_of_those_who_may_ask(
    open_bus: OpenBus, names: Subjects, raw: Any
) -> None:
    joins: list[str] = []

    async def welcome(message: Join) -> Welcome:
        joins.append(message.worker)
        return Welcome(b"", "r", "", 1, 1.0, {}, 1.0, NO_LOCK)

    async with open_bus("kernel") as kernel:
        await kernel.store.make_log(names.journal_stream, names.of_journal)
        lease = await kernel.store.append(names.leases, KernelLease("here"), id="here1")
        await kernel.serve(names.kernel("rollout", "join"), Join, welcome)
        attacker = await raw("rollout")
        join = msgspec.msgpack.encode(Join("rollout-0", "rollout", "p", "n", "t"))
        foreign = (
            *(names.events, names.leases, f"$JS.API.STREAM.PURGE.{names.log_stream}"),
            *(names.beacon, f"{names.answers('trainer', 'kernel')}.x.1", "", "x"),
            f"{names.answers('rollout', 'kernel')}.x.1.y",
            f"{names.answers('rollout', 'inference')}.x.1",
        )
        for subject in foreign:
            await attacker.publish(names.kernel("rollout", "join"), join, reply=subject)
        await until(lambda: kernel.refusals.count == len(foreign))
        assert not joins
        assert await kernel.store.last_sequence(names.journal_stream, names.events) == 0
        assert await kernel.store.append(names.leases, KernelLease("here"), id="here2") == lease + 1


async def test_only_the_operator_commands_a_run(open_bus: OpenBus, names: Subjects, tmp_path: Path) -> None:
    received: list[ScaleRun] = []

    async def scale(message: ScaleRun) -> RunScaled:
        received.append(message)
        return RunScaled(("done",))

    command = ScaleRun(operator_bootstrap(tmp_path / "bus").token, {"rollout": 2})
    subject = names.kernel("operator", "scale")
    async with open_bus("kernel") as kernel:
        await kernel.serve(subject, ScaleRun, scale)
        for role in (*ROLES, "samples", "viewer"):
            async with open_bus(role) as other:
                with pytest.raises(NoAnswer):
                    await other.request(subject, command, RunScaled, deadline_s=patience(0.5))
        assert not received
        async with open_bus("operator") as operator:
            answer = await operator.request(subject, command, RunScaled, deadline_s=patience())
            assert answer.done == ("done",)
            heard: list[Beacon] = []
            for mine in (names.beacon, names.kernel("rollout", "leaving"), names.ticket("train")):
                await kernel.subscribe(mine, Beacon, heard.append)
                await operator.publish(mine, Beacon(1, "over"))
            await operator.request(subject, command, RunScaled, deadline_s=patience())
            assert not heard
    assert received == [command] * 2


def test_a_command_needs_the_token_of_the_operator(tmp_path: Path, server: NatsServer) -> None:
    """On a server of the user's own, workers may have the same credentials as the operator."""
    del server
    bus = tmp_path / "bus"
    assert (bus / "operator.json").stat().st_mode & 0o777 == 0o600
    assert Bootstrap.read(bus / "operator.json").token == ""
    token = operator_bootstrap(bus).token
    check_operator(bus, token)
    worker = Bootstrap.read(write_bootstrap(bus, "rollout-0"))
    for other in ("", "é", worker.token, worker.password):
        with pytest.raises(ConfigError, match="token of the run's operator"):
            check_operator(bus, other)


async def test_what_jetstream_answers_reaches_no_stream_and_no_state(
    open_bus: OpenBus, names: Subjects, raw: Any
) -> None:
    """The server answers on any subject that a request names. The attacker names those of the kernel."""
    async with open_bus("kernel") as kernel, open_bus("rollout") as honest:
        await kernel.store.make_log(names.journal_stream, names.of_journal)
        await kernel.store.make_log(names.log_stream, [names.trajectories, names.groups])
        await kernel.store.make_queue(names.tickets_stream, [names.ticket("train")], redeliver_s=60)
        lease = await kernel.store.append(names.leases, KernelLease("here"), id="here3")
        await honest.store.append(names.groups, GroupFailed("train", 1, 1, "w", ""), id="1")
        attacker, trainer = await raw("rollout"), await raw("trainer")
        purge = f"$JS.API.STREAM.PURGE.{names.log_stream}"
        for index, target in enumerate((names.events, names.groups, names.leases, purge)):
            ticket = Ticket(index, 1, "train", 0, 0, 1)
            await kernel.store.append(names.ticket("train"), ticket, id=ticket.name)
            consumer = names.ticket("train").replace(".", "_")
            take = f"$JS.API.CONSUMER.MSG.NEXT.{names.tickets_stream}.{consumer}"
            await attacker.publish(take, b"1", reply=target)
            await attacker.publish(names.trajectories, b"acknowledged", reply=target)
            await trainer.publish(f"$JS.API.DIRECT.GET.{names.log_stream}", b'{"seq": 1}', reply=target)
        await attacker.flush()
        await trainer.flush()
        # The store answers in order: an append after the attacks is after their effects.
        await honest.store.append(names.groups, GroupFailed("train", 2, 1, "w", ""), id="2")
        assert await kernel.store.last_sequence(names.journal_stream, names.events) == 0
        assert await kernel.store.append(names.leases, KernelLease("here"), id="here4") == lease + 1
        following = kernel.store.follow(names.log_stream, names.groups, GroupFailed, start=1)
        with anyio.fail_after(patience()):
            assert [(await anext(following))[1].ticket for _ in range(2)] == [1, 2]
        assert kernel.refusals.count == 0


async def test_no_other_role_can_answer_a_request(open_bus: OpenBus, names: Subjects, raw: Any) -> None:
    """An inference worker knows the inbox of a rollout worker; it must not give rewards."""
    score = names.worker("verifier", "verifier-0", "n", "score")
    async with open_bus("rollout") as rollout:
        forger = await raw("inference")
        forged = msgspec.msgpack.encode(Scored(((1.0, {}),)))

        async def forge() -> None:
            for _ in range(20):
                await forger.publish(f"{names.answers('rollout', 'inference')}.{rollout.inbox}.1", forged)
                await anyio.sleep(SOON_S)

        asked = ScoreSamples(b"", ("x",), b"")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(forge)
            with pytest.raises(NoAnswer):
                await rollout.request(score, asked, Scored, deadline_s=patience(0.5))


N = Subjects("test-run")
INFERENCE, TRAINER = (partial(N.worker, role, f"{role}-0", "n") for role in ("inference", "trainer"))
LOG = N.log_stream
MAY_NOT_SAY: dict[Party, list[str]] = {
    "rollout": [
        *(INFERENCE("swap"), INFERENCE("load"), TRAINER("call"), N.trained, N.retired),
        f"$JS.API.CONSUMER.CREATE.{LOG}",
    ],
    "inference": [TRAINER("column"), N.groups],
    "trainer": [N.groups, INFERENCE("swap"), N.records],
    "kernel": ["anything", N.events, f"$JS.API.STREAM.PURGE.{LOG}"],
    "verifier": [
        *(N.beacon, N.events, N.trajectories, N.ticket("train"), INFERENCE("generate")),
        N.kernel("trainer", "join"),  # in another's name
        *(f"{N.inbox('kernel')}.from.trainer.x.1", f"{N.inbox('rollout')}.from.inference.x.1"),
    ],
    "samples": [
        *(N.events, N.groups, N.trained, N.beacon, TRAINER("call")),
        *(f"$JS.API.STREAM.PURGE.{LOG}", f"$JS.API.CONSUMER.CREATE.{LOG}"),
    ],
    "viewer": [
        *(N.status, N.beacon, N.events, N.trajectories, N.ticket("train"), INFERENCE("generate")),
        *(N.kernel(role, "join") for role in ROLES),
        *(f"{N.inbox('kernel')}.from.trainer.x.1", f"$JS.API.STREAM.MSG.GET.{LOG}", "$JS.API.INFO", "x"),
    ],
}
MAY_NOT_HEAR: dict[Party, list[str]] = {
    "verifier": [f"{N.inbox('trainer')}.>", f"{N.root}.worker.inference.>"],
    "viewer": [">", f"{N.root}.>", N.beacon, N.groups, f"{N.inbox('rollout')}.>"],
}


@pytest.mark.parametrize("party", MAY_NOT_SAY)
async def test_a_party_may_say_and_hear_only_its_own(
    open_bus: OpenBus, names: Subjects, tmp_path: Path, party: Party
) -> None:
    errors: list[Exception] = []
    said, heard = MAY_NOT_SAY[party], MAY_NOT_HEAR.get(party, [])
    async with open_bus("kernel") as kernel:
        await kernel.store.make_log(names.log_stream, names.of_log)
        client = await raw_client(tmp_path, party, errors)
        for subject in said:
            await client.publish(subject, b"x", reply=f"{names.inbox(party)}.1")
        for subject in heard:
            await client.subscribe(subject)
        await until(lambda: len(errors) == len(said) + len(heard))
        assert all("permissions violation" in str(error).lower() for error in errors)
        await client.close()
        for subject in (names.trained, names.retired, names.records):
            assert await kernel.store.last_sequence(names.log_stream, subject) == 0


# ---------------------------------------------------------------------- parts and the log


async def test_a_message_of_the_log_whose_parts_are_not_there_is_passed_over(
    open_bus: OpenBus, names: Subjects, raw: Any
) -> None:
    async with open_bus("kernel") as kernel, open_bus("rollout") as rollout:
        await kernel.store.make_log(names.log_stream, [names.trajectories, names.groups])
        attacker = await raw("rollout")
        stream = attacker.jetstream()
        heads = [PART.pack(0xC1, bytes(16), index, 3) for index in range(2)]
        parts = [(await stream.publish(f"{names.groups}.part", head + bytes(2**19))).seq for head in heads]
        plain = (await stream.publish(names.trajectories, b"no part")).seq
        for sequences in ([99_999_999], [0], [-1], [plain], parts, parts[:1] * 2, parts * 2500, ["x"], 7, []):
            await stream.publish(names.groups, b"\xc1" + msgspec.msgpack.encode(sequences))
        await stream.publish(names.groups, b"\xc1")
        await rollout.store.append(names.groups, GroupFailed("train", 1, 1, "w", ""), id="1")
        following = kernel.store.follow(names.log_stream, names.groups, GroupFailed, start=1)
        with anyio.fail_after(patience()):
            assert (await anext(following))[1].ticket == 1
        assert kernel.refusals.count == 11


def test_parts_that_are_too_large_together_are_refused() -> None:
    parts, large = Parts(), [PART.pack(0xC1, bytes(16), index, 8) + bytes(2**23) for index in range(7)]
    assert all(parts.add(part) is None for part in large[:5])
    with pytest.raises(ValueError, match="more than 50,331,648 bytes together"):
        [parts.add(part) for part in large[5:]]
    assert parts.add(PART.pack(0xC1, bytes(16), 0, 1) + b"next") == b"next"


async def test_announced_parts_take_no_memory(open_bus: OpenBus, names: Subjects, raw: Any) -> None:
    """A part says how many parts there are: 25 bytes that announce 2^32, and 200 MiB that never end."""
    beats: list[Heartbeat] = []
    async with open_bus("kernel") as kernel:
        await kernel.subscribe(names.kernel("rollout", "heartbeat"), Heartbeat, beats.append)
        attacker = await raw("rollout")
        before = psutil.Process().memory_info().rss
        for index in range(300):
            head = PART.pack(0xC1, os.urandom(16), index % 2, 2**32 - 1)
            await attacker.publish(names.kernel("rollout", "heartbeat"), head)
        await until(lambda: kernel.refusals.count == 300)
        for index in range(400):
            head = PART.pack(0xC1, os.urandom(16), 0, 2 + index)
            await attacker.publish(names.kernel("rollout", "heartbeat"), head + bytes(2**19))
            if index % 20 == 0:
                await attacker.flush()
        beat = Heartbeat("rollout-0", "n", True)
        await attacker.publish(names.kernel("rollout", "heartbeat"), msgspec.msgpack.encode(beat))
        await until(lambda: beats == [beat])
        assert psutil.Process().memory_info().rss - before < 100 * 2**20


async def test_a_payload_that_nobody_would_accept_is_refused_by_its_sender(
    open_bus: OpenBus, names: Subjects
) -> None:
    async with open_bus("rollout") as rollout:
        with pytest.raises(BusError, match="cannot be sent"):
            await rollout.publish(names.progress, Leaving("rollout-0", "n", "x" * (49 * 2**20)))
