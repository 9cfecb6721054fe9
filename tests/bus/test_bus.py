"""The bus on a real nats-server: delivery, deadlines, storage, refusals, permissions, and its end."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import anyio
import msgspec
import numpy as np
import psutil
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from nats.aio.msg import Msg

from bus_testing import NO_LOCK, raw_client, server_pid, until
from stretto.array import Array
from stretto.bus import messages
from stretto.bus.client import Bus
from stretto.bus.messages.base import Message, Refusal
from stretto.bus.messages.inference import Confirm, Generate
from stretto.bus.messages.journal import KernelLease
from stretto.bus.messages.membership import Heartbeat, Join, Leaving, RunStatus, Welcome
from stretto.bus.messages.subjects import Subjects
from stretto.bus.messages.tickets import GroupDone, GroupFailed, Ticket, TrajectoryBundle, WireTrajectory
from stretto.bus.payloads import decoder
from stretto.bus.server import NatsServer, foreign_bootstrap, lock_run
from stretto.config import BusConfig
from stretto.errors import BusError, ConfigError, Malformed, NoAnswer, Refused
from stretto.launcher import ROLES

OpenBus = Callable[[str], AbstractAsyncContextManager[Bus]]


def bundle(size: int) -> TrajectoryBundle:
    tokens = np.arange(size, dtype=np.int32)
    trajectory = WireTrajectory(
        "1/1/0",
        Array.of(tokens),
        Array.of(tokens % 2 == 0),
        Array.of(tokens, np.float32),
        Array.of(tokens),
        1.0,
        {"accuracy": 1.0},
        "stop",
        "inference-0",
        1,
    )
    return TrajectoryBundle(1, 1, 0, (trajectory,))


# ------------------------------------------------------------------------------ what travels


@given(
    st.sampled_from(["<i4", "<f4", "|b1", "<i8", ">i2", "<f8", "|u1"]),
    st.lists(st.integers(0, 5), min_size=1, max_size=3),
    st.integers(0, 99),
)
def test_arrays_survive_the_wire(dtype: str, shape: list[int], seed: int) -> None:
    values = (np.random.default_rng(seed).normal(size=shape) * 50).astype(dtype)
    wired = msgspec.msgpack.decode(msgspec.msgpack.encode(Array.of(values)), type=Array)
    np.testing.assert_array_equal(wired.numpy(), values)
    assert wired.numpy().dtype == values.dtype.newbyteorder("<")


@pytest.mark.parametrize(
    "bad",
    [
        ("|O8", (1,), bytes(8)),
        ("<i4", (2,), bytes(4)),
        ("<i4", (-1, -1), bytes(4)),
        ("|V8", (1,), bytes(8)),
        ("no dtype", (1,), bytes(8)),
    ],
)
def test_arrays_that_cannot_be_are_refused(bad: tuple[str, tuple[int, ...], bytes]) -> None:
    reason = "is not accepted|bytes, not|is not a dtype"
    with pytest.raises(ValueError, match=reason):
        Array(bad[0], bad[1], memoryview(bad[2]))
    with pytest.raises(msgspec.ValidationError, match=reason):
        msgspec.msgpack.decode(msgspec.msgpack.encode(bad), type=Array)
    with pytest.raises(TypeError, match="cannot send an array"):
        Array.of(np.array([object()]))


def test_every_message_has_a_versioned_tag_of_its_own() -> None:
    for module in iter_modules(messages.__path__, f"{messages.__name__}."):
        import_module(module.name)
    tags = [kind.__struct_config__.tag for kind in Message.__subclasses__()]
    assert len(tags) == len(set(tags))
    assert all(re.fullmatch(r"\w+/[1-9]", str(tag)) for tag in tags)


async def test_published_messages_arrive_in_order(open_bus: OpenBus, names: Subjects) -> None:
    heartbeat = names.kernel("rollout", "heartbeat")
    got: list[Heartbeat] = []
    async with open_bus("kernel") as kernel, open_bus("rollout") as rollout:
        await kernel.subscribe(heartbeat, Heartbeat, got.append)
        for tickets in range(500):
            await rollout.publish(heartbeat, Heartbeat("rollout-0", "n", True, tickets=tickets))
        await until(lambda: len(got) == 500)
    assert [beat.tickets for beat in got] == list(range(500))


async def test_payloads_above_the_limit_travel_in_parts(open_bus: OpenBus, names: Subjects) -> None:
    join = names.kernel("trainer", "join")
    async with open_bus("kernel") as kernel, open_bus("trainer") as trainer:

        async def welcome(message: Join) -> Welcome:
            return Welcome(message.place.encode() * 2, "r", "", 1, 1.0, {}, 300.0, NO_LOCK)

        await kernel.serve(join, Join, welcome)
        place = "x" * 3_000_000  # the server takes 1 MiB
        answer = await trainer.request(
            join,
            Join("trainer-0", "trainer", place, "n", "t"),
            Welcome,
            who="kernel",
            deadline_s=20,
        )
        assert answer.config == place.encode() * 2


async def test_a_subscription_receives_what_is_published_once_it_is_made(
    open_bus: OpenBus, names: Subjects
) -> None:
    """The client's own `flush` overtakes a subscription that waits to be sent, now and then."""
    subject = names.kernel("rollout", "heartbeat")
    async with open_bus("kernel") as kernel, open_bus("rollout") as rollout:
        for _ in range(200):
            heard = anyio.Event()
            await kernel.subscribe(subject, Heartbeat, lambda _, heard=heard: heard.set())
            await rollout.publish(subject, Heartbeat("rollout-0", "n", ready=True))
            with anyio.fail_after(5):
                await heard.wait()


# --------------------------------------------------------------------------- request and serve


async def test_a_request_without_a_server_names_who_is_silent(open_bus: OpenBus, names: Subjects) -> None:
    join = names.kernel("trainer", "join")
    async with open_bus("trainer") as trainer:
        began = time.monotonic()
        with pytest.raises(NoAnswer, match=r"kernel did not answer on .*join.* within 0\.5 s"):
            await trainer.request(
                join,
                Join("trainer-0", "trainer", "p", "n", "t"),
                Welcome,
                who="kernel",
                deadline_s=0.5,
            )
    assert time.monotonic() - began < 3


async def test_a_request_waits_for_a_server_that_comes_late(open_bus: OpenBus, names: Subjects) -> None:
    join = names.kernel("trainer", "join")
    async with open_bus("kernel") as kernel, open_bus("trainer") as trainer:

        async def welcome(message: Join) -> Welcome:
            return Welcome(b"", message.worker, "", 1, 1.0, {}, 300.0, NO_LOCK)

        async with anyio.create_task_group() as tasks:

            async def late() -> None:
                await anyio.sleep(0.3)
                await kernel.serve(join, Join, welcome)

            tasks.start_soon(late)
            answer = await trainer.request(
                join,
                Join("trainer-0", "trainer", "p", "n", "t"),
                Welcome,
                who="kernel",
                deadline_s=10,
            )
            assert answer.run == "trainer-0"


async def test_a_repeated_request_is_served_once(open_bus: OpenBus, names: Subjects) -> None:
    join = names.kernel("rollout", "join")
    served = 0
    async with open_bus("kernel") as kernel, open_bus("rollout") as rollout:

        async def slow(message: Join) -> Welcome:
            nonlocal served
            served += 1
            await anyio.sleep(4.5)  # the asker repeats itself twice meanwhile
            return Welcome(b"", message.worker, "", 1, 1.0, {}, 300.0, NO_LOCK)

        await kernel.serve(join, Join, slow)
        await rollout.request(
            join,
            Join("rollout-0", "rollout", "p", "n", "t"),
            Welcome,
            who="kernel",
            deadline_s=20,
        )
    assert served == 1


async def test_what_a_server_raises_reaches_the_asker(open_bus: OpenBus, names: Subjects) -> None:
    join = names.kernel("rollout", "join")
    async with open_bus("kernel") as kernel, open_bus("rollout") as rollout:

        async def refuse(message: Join) -> Welcome:
            raise ZeroDivisionError(message.worker)

        await kernel.serve(join, Join, refuse)
        with pytest.raises(Refused, match="kernel refused: ZeroDivisionError: rollout-0"):
            await rollout.request(
                join,
                Join("rollout-0", "rollout", "p", "n", "t"),
                Welcome,
                who="kernel",
                deadline_s=5,
            )


async def test_a_handler_that_raises_ends_the_bus(open_bus: OpenBus, names: Subjects) -> None:
    heartbeat = names.kernel("rollout", "heartbeat")

    def broken(message: Heartbeat) -> None:
        raise LookupError(message.worker)

    with pytest.RaisesGroup(LookupError):
        async with open_bus("kernel") as kernel, open_bus("rollout") as rollout:
            await kernel.subscribe(heartbeat, Heartbeat, broken)
            await rollout.publish(heartbeat, Heartbeat("rollout-0", "n", True))
            with anyio.fail_after(60):
                await anyio.sleep_forever()


# ----------------------------------------------------------------------------------- refusals


async def test_malformed_messages_are_counted_and_do_no_harm(
    open_bus: OpenBus, server: NatsServer, names: Subjects, tmp_path: Path
) -> None:
    heartbeat = names.kernel("rollout", "heartbeat")
    got: list[Heartbeat] = []
    async with open_bus("kernel") as kernel:
        await kernel.subscribe(heartbeat, Heartbeat, got.append)

        async def welcome(message: Join) -> Welcome:
            raise AssertionError("never served")

        await kernel.serve(names.kernel("rollout", "join"), Join, welcome)
        raw = await raw_client(tmp_path, "rollout")
        for bad in (
            b"",
            b"\x00garbage",
            b"\xc1",
            b"\xc1" + bytes(30),
            msgspec.msgpack.encode(["Heartbeat/2", "rollout-0", "n", True]),
            msgspec.msgpack.encode(["Leaving/1", "rollout-0", "n", "bye"]),
            msgspec.msgpack.encode(["Heartbeat/1", 7, "n", True]),
        ):
            await raw.publish(heartbeat, bad)
        inbox = f"{names.answers('rollout', 'kernel')}.x.1"
        answers = await raw.subscribe(inbox)
        await raw.publish(names.kernel("rollout", "join"), b"nonsense", reply=inbox)
        answer = await answers.next_msg(5)
        assert "malformed Join" in msgspec.msgpack.decode(answer.data, type=Refusal).reason
        await raw.publish(heartbeat, msgspec.msgpack.encode(Heartbeat("rollout-0", "n", True)))
        await until(lambda: len(got) == 1)
        assert kernel.refusals.count == 8
        await raw.close()


@given(st.binary(max_size=200))
@example(b"\x92\xa2\x00\x80")  # a string that is not UTF-8
@example(b"\x9a\xabGroupDone/1\xa5train\x01\x01\xa1w\x90\x00\x00\x00" + b"\x91" * 3000)  # nested deeply
def test_no_bytes_decode_to_anything_but_a_message_or_an_error(data: bytes) -> None:
    for kind in (Ticket, GroupDone, Generate, TrajectoryBundle, Confirm):
        with suppress(msgspec.DecodeError):
            assert isinstance(decoder(kind)(data), kind)


# ------------------------------------------------------------------------------------ storage


async def test_the_log_is_read_by_sequence_and_stores_each_id_once(
    open_bus: OpenBus, names: Subjects
) -> None:
    async with open_bus("kernel") as kernel, open_bus("rollout") as rollout, open_bus("trainer") as trainer:
        await kernel.store.make_log(names.log_stream, [names.trajectories, names.groups])
        small = await rollout.store.append(names.trajectories, bundle(10), id="a")
        again = await rollout.store.append(names.trajectories, bundle(10), id="a")
        large = await rollout.store.append(names.trajectories, bundle(200_000), id="b")  # 2.6 MB
        assert small == again
        read = await trainer.store.read(names.log_stream, small, TrajectoryBundle)
        assert read.trajectories[0].tokens.numpy().tolist() == list(range(10))
        read = await trainer.store.read(names.log_stream, large, TrajectoryBundle)
        np.testing.assert_array_equal(read.trajectories[0].versions.numpy(), np.arange(200_000))
        with pytest.raises(Malformed, match="expected GroupDone"):
            await trainer.store.read(names.log_stream, small, GroupDone)
        await kernel.store.purge(names.log_stream, below=large)
        with pytest.raises(BusError, match="is gone"):
            await trainer.store.read(names.log_stream, small, TrajectoryBundle)


async def test_following_a_log_begins_anywhere_and_goes_on(open_bus: OpenBus, names: Subjects) -> None:
    def failure(ticket: int) -> GroupFailed:
        return GroupFailed("train", ticket, 1, "w", "x" * (2_000_000 if ticket == 3 else 1))

    async with open_bus("kernel") as kernel, open_bus("rollout") as rollout:
        await kernel.store.make_log(names.log_stream, [names.trajectories, names.groups])
        sequences = [await rollout.store.append(names.groups, failure(i), id=f"{i}") for i in range(4)]
        await rollout.store.append(names.trajectories, bundle(1), id="beside")
        assert await kernel.store.last_sequence(names.log_stream, names.groups) == sequences[-1]
        got: list[int] = []
        async with anyio.create_task_group() as tasks:

            async def follow() -> None:
                async for sequence, message in kernel.store.follow(
                    names.log_stream, names.groups, GroupDone | GroupFailed, start=sequences[1]
                ):
                    got.append(message.ticket)
                    assert sequence in sequences or message.ticket == 9

            tasks.start_soon(follow)
            await until(lambda: got == [1, 2, 3])
            await rollout.store.append(names.groups, failure(9), id="9")
            await until(lambda: got == [1, 2, 3, 9])
            tasks.cancel_scope.cancel()


async def test_a_ticket_goes_to_one_taker_and_comes_back_if_it_is_not_done(
    open_bus: OpenBus, names: Subjects
) -> None:
    async with open_bus("kernel") as kernel, open_bus("rollout") as one, open_bus("rollout") as two:
        await kernel.store.make_queue(names.tickets_stream, [names.ticket("train")], redeliver_s=1)
        first = Ticket(1, 1, "train", 0, 0, 8)
        second = Ticket(2, 1, "train", 0, 0, 8)
        for ticket in (first, second, first):
            await kernel.store.append(names.ticket("train"), ticket, id=ticket.name)
        with anyio.fail_after(10):
            at_one = await anext(
                one.store.take(names.tickets_stream, names.ticket("train"), Ticket, until=anyio.Event())
            )
            at_two = await anext(
                two.store.take(names.tickets_stream, names.ticket("train"), Ticket, until=anyio.Event())
            )
            assert {at_one.message.id, at_two.message.id} == {1, 2}
            await at_two.acknowledge()
            # `at_one` is forgotten: it comes again, and only it.
            again = await anext(
                two.store.take(names.tickets_stream, names.ticket("train"), Ticket, until=anyio.Event())
            )
        assert again.message == at_one.message


async def test_every_lease_has_a_higher_number(open_bus: OpenBus, names: Subjects) -> None:
    async with open_bus("kernel") as kernel:
        await kernel.store.make_log(names.leases_stream, [names.leases])
        first = await kernel.store.append(names.leases, KernelLease("here"), id="here1")
        second = await kernel.store.append(names.leases, KernelLease("there"), id="there2")
        assert second > first


# ------------------------------------------------------------------------- the server and its end


async def test_everything_goes_on_after_the_server_was_killed(
    open_bus: OpenBus, names: Subjects, tmp_path: Path
) -> None:
    leaving = names.kernel("rollout", "leaving")
    got: list[str] = []
    async with open_bus("kernel") as kernel, open_bus("rollout") as rollout:
        await kernel.store.make_log(names.log_stream, [names.trajectories, names.groups])
        await kernel.subscribe(leaving, Leaving, lambda message: got.append(message.reason))
        sequence = await rollout.store.append(names.trajectories, bundle(5), id="a")
        async with anyio.create_task_group() as tasks:
            outcomes: list[int] = []

            async def follow() -> None:
                async for _, message in kernel.store.follow(
                    names.log_stream, names.groups, GroupDone | GroupFailed, start=1
                ):
                    outcomes.append(message.ticket)

            tasks.start_soon(follow)
            await rollout.store.append(names.groups, GroupFailed("train", 1, 1, "w", ""), id="1")
            await until(lambda: outcomes == [1])
            os.kill(server_pid(tmp_path), signal.SIGKILL)
            await until(lambda: not kernel.connected)
            with anyio.fail_after(40):
                await rollout.store.append(names.groups, GroupFailed("train", 2, 1, "w", ""), id="2")
                assert (await kernel.store.read(names.log_stream, sequence, TrajectoryBundle)).ticket == 1
                await rollout.publish(leaving, Leaving("rollout-0", "n", "bye"))
            await until(lambda: outcomes == [1, 2] and got == ["bye"], 40)
            tasks.cancel_scope.cancel()


async def test_a_viewer_hears_the_status_and_can_do_nothing_else(
    open_bus: OpenBus, names: Subjects, tmp_path: Path
) -> None:
    errors: list[str] = []
    heard: list[bytes] = []

    async def note(error: Exception) -> None:
        errors.append(str(error).lower())

    async def hear(message: Msg) -> None:
        heard.append(message.data)

    async with open_bus("kernel") as kernel:
        await kernel.store.make_log(names.log_stream, [names.trajectories])
        raw = await raw_client(tmp_path, "viewer", error_cb=note)
        forbidden = (
            *(names.status, names.beacon, names.journal, names.trajectories, names.ticket("train")),
            *(names.kernel(role, "join") for role in ROLES),
            names.worker("inference", "inference-0", "n", "generate"),
            f"{names.inbox('kernel')}.from.trainer.x.1",
            f"$JS.API.STREAM.MSG.GET.{names.log_stream}",
            "$JS.API.INFO",
            "anything",
        )
        for subject in forbidden:
            await raw.publish(subject, b"x", reply=f"{names.inbox('viewer')}.1")
        deaf = (">", f"{names.root}.>", names.beacon, names.groups, f"{names.inbox('rollout')}.>")
        for subject in deaf:
            await raw.subscribe(subject)
        await until(lambda: len(errors) == len(forbidden) + len(deaf))
        assert all("permissions violation" in error for error in errors)
        await raw.subscribe(names.status, cb=hear)
        await raw.flush()
        await kernel.publish(names.status, RunStatus(b"{}"))
        await until(lambda: len(heard) == 1)
        await raw.close()
    login = json.loads((tmp_path / "bus" / "viewer.json").read_text())
    assert not any(login[key] for key in ("store_user", "store_password", "token", "logs", "worker"))


def test_a_viewer_gets_no_login_of_a_server_of_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "login.json").write_text('{"user": "me", "password": "secret"}')
    for credentials in ("login.json", "me.creds"):
        config = BusConfig(url="nats://127.0.0.1:1", credentials=str(tmp_path / credentials))
        foreign_bootstrap(tmp_path / "bus", "run", config, tmp_path)
        viewer = (tmp_path / "bus" / "viewer.json").read_text()
        assert not any(word in viewer for word in ("secret", 'creds"', '"me"'))
        assert stat.S_IMODE((tmp_path / "bus" / "viewer.json").stat().st_mode) == 0o600


async def test_each_role_may_do_its_own_work_only(
    open_bus: OpenBus, server: NatsServer, names: Subjects, tmp_path: Path
) -> None:
    errors: list[str] = []

    async def note(error: Exception) -> None:
        errors.append(str(error).lower())

    async with open_bus("kernel") as kernel:
        await kernel.store.make_log(names.journal_stream, [names.journal])
        raw = await raw_client(tmp_path, "verifier", error_cb=note)
        forbidden = (
            *(names.beacon, names.journal, names.trajectories, names.ticket("train")),
            names.worker("inference", "inference-0", "n", "generate"),
            names.kernel("trainer", "join"),  # in another's name
            f"{names.inbox('kernel')}.from.trainer.x.1",
            f"{names.inbox('rollout')}.from.inference.x.1",
        )
        for subject in forbidden:
            await raw.publish(subject, b"x")
        await raw.subscribe(f"{names.inbox('trainer')}.>")
        await raw.subscribe(f"{names.root}.worker.inference.>")
        await until(lambda: len(errors) == len(forbidden) + 2)
        assert all("permissions violation" in error for error in errors)
        await raw.publish(f"{names.inbox('rollout')}.from.verifier.x.1", b"x")  # an answer
        await raw.flush()
        assert len(errors) == len(forbidden) + 2
        await raw.close()
    async with await anyio.connect_tcp("127.0.0.1", int(server.url.rpartition(":")[2])) as nobody:
        assert b'"auth_required":true' in await nobody.receive()
        await nobody.send(b"CONNECT {}\r\nPING\r\n")
        assert b"Authorization Violation" in await nobody.receive()


def test_credentials_are_private_and_differ_between_roles(server: NatsServer, tmp_path: Path) -> None:
    files = [tmp_path / "bus" / f"{role}.json" for role in ("kernel", "trainer", "verifier")]
    for file in (*files, tmp_path / "bus" / "nats.conf"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    passwords = {msgspec.json.decode(file.read_bytes())["password"] for file in files}
    assert len(passwords) == 3
    for process in psutil.process_iter(["cmdline", "environ"]):
        seen = f"{process.info['cmdline']} {process.info['environ']}"
        assert not any(password in seen for password in passwords)
    assert "127.0.0.1" in server.url
    [connection] = [
        connection
        for connection in psutil.Process(server_pid(tmp_path)).net_connections()
        if connection.status == psutil.CONN_LISTEN
    ]
    assert connection.laddr[0] == "127.0.0.1"


HOLDER = """
import sys, time
from pathlib import Path
import anyio
from stretto.bus.server import NatsServer, lock_run
from stretto.config import BusConfig
async def main(folder):
    lock = lock_run(folder / "bus")
    await NatsServer.start(folder / "bus", "r", BusConfig(grace_s=1.0), folder)
    print("up", flush=True)
    time.sleep(600)
anyio.run(main, Path(sys.argv[1]))
"""


def test_the_guard_ends_the_server_when_the_kernel_was_killed(tmp_path: Path) -> None:
    kernel = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert kernel.stdout is not None
    assert kernel.stdout.readline() == "up\n"
    guard = psutil.Process(int((tmp_path / "bus" / "guard.pid").read_text()))
    server = psutil.Process(server_pid(tmp_path))
    with pytest.raises(ConfigError, match=f"owned by pid {kernel.pid}"):
        lock_run(tmp_path / "bus")
    kernel.kill()
    kernel.wait()
    kernel.stdout.close()
    gone, alive = psutil.wait_procs([guard, server], timeout=8)
    assert len(gone) == 2, alive


async def test_a_kernel_that_takes_over_finds_nothing_of_the_former(tmp_path: Path) -> None:
    lock = lock_run(tmp_path / "bus")
    first = await NatsServer.start(tmp_path / "bus", "r", BusConfig(), tmp_path)
    former = psutil.Process(server_pid(tmp_path))
    second = await NatsServer.start(tmp_path / "bus", "r", BusConfig(), tmp_path)
    assert not former.is_running()
    assert first.process.wait(5) is not None
    await second.stop()
    lock.close()


async def test_a_server_goes_with_its_guard(server: NatsServer, tmp_path: Path) -> None:
    process = psutil.Process(server_pid(tmp_path))
    server.process.kill()
    await until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)
