"""The bus on a real nats-server: delivery, deadlines, storage, refusals, permissions, and its end."""

import re
import shutil
import stat
import subprocess
from contextlib import suppress
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
from structlog.testing import capture_logs

from bus_testing import lock_holder, raw_client, running_server, server_pid, until
from fixture_types import OpenBus
from patience import patience
from processes import spawning
from stretto.array import Array
from stretto.bus import messages
from stretto.bus.guard import folder_id
from stretto.bus.messages.base import KernelMessage, Message, Refusal
from stretto.bus.messages.inference import Confirm, Generate
from stretto.bus.messages.membership import Heartbeat, Join, Welcome
from stretto.bus.messages.subjects import Subjects
from stretto.bus.messages.tickets import GroupDone, Ticket, TrajectoryBundle
from stretto.bus.payloads import decoder
from stretto.bus.server import Bootstrap, NatsServer, foreign_bootstrap, lock_run
from stretto.config import BusConfig
from stretto.errors import ConfigError

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
    kinds = [*Message.__subclasses__(), *KernelMessage.__subclasses__()]
    tags = [kind.__struct_config__.tag for kind in kinds]
    assert len(tags) == len(set(tags))
    assert all(re.fullmatch(r"\w+/[1-9]", str(tag)) for tag in tags)


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


# ------------------------------------------------------------------------- the server and its end


def test_a_viewer_gets_no_login_of_a_server_of_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "login.json").write_text('{"user": "me", "password": "secret"}')
    for credentials in ("login.json", "me.creds"):
        config = BusConfig(url="nats://127.0.0.1:1", credentials=str(tmp_path / credentials))
        foreign_bootstrap(tmp_path / "bus", "run", config, tmp_path)
        viewer = (tmp_path / "bus" / "viewer.json").read_text()
        assert not any(word in viewer for word in ("secret", 'creds"', '"me"'))
        assert stat.S_IMODE((tmp_path / "bus" / "viewer.json").stat().st_mode) == 0o600


async def test_a_verifier_may_answer_and_nobody_comes_in_without_a_login(
    server: NatsServer, names: Subjects, tmp_path: Path
) -> None:
    errors: list[Exception] = []
    raw = await raw_client(tmp_path, "verifier", errors)
    await raw.publish(f"{names.inbox('rollout')}.from.verifier.x.1", b"x")
    await raw.flush()
    await raw.close()
    assert errors == []
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
    viewer = Bootstrap.read(tmp_path / "bus" / "viewer.json")
    assert not any((viewer.store_user, viewer.store_password, viewer.token, viewer.logs, viewer.worker))
    for process in psutil.process_iter(["cmdline", "environ"]):
        seen = f"{process.info['cmdline']} {process.info['environ']}"
        assert not any(password in seen for password in passwords)
    assert "127.0.0.1" in server.url
    connections = psutil.Process(server_pid(tmp_path)).net_connections()
    listening = [each.laddr[0] for each in connections if each.status == psutil.CONN_LISTEN]
    assert listening == ["127.0.0.1"]


async def test_the_guard_ends_the_server_when_the_kernel_was_killed(tmp_path: Path) -> None:
    with spawning() as spawn:
        kernel = lock_holder(spawn, tmp_path / "bus")
        guard = await NatsServer.start(tmp_path / "bus", "r", BusConfig(grace_s=patience(1)), tmp_path)
        with pytest.raises(ConfigError, match=f"owned by pid {kernel.pid}"):
            lock_run(tmp_path / "bus")
        server = psutil.Process(server_pid(tmp_path))
        await anyio.sleep(patience(1.5))
        assert guard.process.poll() is None
        kernel.kill()
        await until(lambda: guard.process.poll() is not None and not server.is_running())


async def test_a_kernel_that_takes_over_uses_the_formers_server(tmp_path: Path) -> None:
    """Its workers are connected to it. With other values of the bus, there is another server."""
    async with running_server(tmp_path, BusConfig()) as first:
        former, login = psutil.Process(server_pid(tmp_path)), (tmp_path / "bus" / "rollout.json").read_bytes()
        second = await NatsServer.start(tmp_path / "bus", "r", BusConfig(), tmp_path)
        assert (second.url, server_pid(tmp_path)) == (first.url, former.pid)
        assert (tmp_path / "bus" / "rollout.json").read_bytes() == login
        third = await NatsServer.start(tmp_path / "bus", "r", BusConfig(max_payload_mb=16), tmp_path)
        assert not former.is_running()
        assert isinstance(first.process, subprocess.Popen)
        assert first.process.wait(patience()) is not None
        await third.stop()


@pytest.mark.parametrize("is_copy", [True, False])
async def test_the_guard_of_another_run_is_left_alone(tmp_path: Path, is_copy: bool) -> None:
    """A copy of a living run's folder brings its guard's id along; after a restart of a container, another
    run's guard has the id that a killed one has left."""
    other = tmp_path / "other" / "bus"
    async with running_server(tmp_path / "living", BusConfig()) as living:
        if is_copy:
            shutil.copytree(tmp_path / "living" / "bus", other, ignore=shutil.ignore_patterns("*.lock"))
        else:
            other.mkdir(parents=True)
            (other / "guard.pid").write_text(f"{living.process.pid} {folder_id(other)}")
        with capture_logs() as logs:
            async with running_server(tmp_path / "other", BusConfig()) as second:
                assert living.process.poll() is None
                assert psutil.pid_exists(server_pid(tmp_path / "living"))
                assert second.url != living.url
    assert "the guard of another run is left alone" in [each["event"] for each in logs]
