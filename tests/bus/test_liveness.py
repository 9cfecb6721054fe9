"""What tells a silent bus from a silent process: a real server that is out, its guard, the kernel's lock."""

import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Generator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import psutil
import pytest
from anyio.from_thread import start_blocking_portal
from structlog.testing import capture_logs

from bus_testing import context_of, lock_holder, one_at_a_time, server_pid, until, welcome
from fixture_types import OpenBus
from patience import patience
from processes import spawning
from stretto.assembly.assembly import Worker
from stretto.bus import connection, store
from stretto.bus import server as server_module
from stretto.bus.client import connect
from stretto.bus.joining import write_bootstrap
from stretto.bus.lock import KernelLock
from stretto.bus.messages.base import Message, Refusal
from stretto.bus.messages.events import KernelLease
from stretto.bus.messages.inference import AskLoad, LoadReport
from stretto.bus.messages.membership import SERVER, Beacon, Dismissal, Heartbeat, Join, Leaving
from stretto.bus.messages.subjects import Subjects
from stretto.bus.messages.training import EndStep, StepEnded
from stretto.bus.server import Bootstrap, NatsServer, foreign_bootstrap, lock_run, restart_server
from stretto.config import BusConfig
from stretto.engine import Load
from stretto.kernel.fleet import fleet
from stretto.kernel.fleet.fleet import Fleet, late_workers
from stretto.launcher import Job, Resources
from stretto.machine.cores import MemoryKills
from stretto.workers.context import WorkerContext
from stretto.workers.kernel_watch import KernelWatch
from stretto.workers.process import HostProcess
from stretto_local import LocalLauncher
from worker_jobs import job


@contextmanager
def standing_still(pid: int) -> Generator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


# --------------------------------------------------------------------------- a bus that is out


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients give up a connection after a second without an answer to their pings."""
    monkeypatch.setattr(connection, "_PING_S", 0.2)
    monkeypatch.setattr(connection, "_UNANSWERED_PINGS", 5)


@pytest.mark.usefixtures("impatient")
async def test_an_outage_does_not_count_as_the_silence_of_a_process(
    open_bus: OpenBus, names: Subjects, tmp_path: Path
) -> None:
    subject = names.worker("inference", "inference-0", "n", "load")
    asked = anyio.Event()

    async def answer(message: Message) -> LoadReport:
        asked.set()
        await anyio.sleep(patience(1.5))  # the server stands still meanwhile
        return LoadReport(Load(0, 0, 0, 1, 0, 0.0, 0, 0.0, 0.0))

    async with open_bus("kernel") as kernel, open_bus("inference") as inference:
        await kernel.store.make_log(names.journal_stream, names.of_journal)
        await inference.serve(subject, AskLoad, answer)
        async with anyio.create_task_group() as tasks:
            done: list[object] = []

            async def finish(waited_for: Awaitable[object]) -> None:
                done.append(await waited_for)

            asking = kernel.request(subject, AskLoad(), LoadReport, deadline_s=patience(3))
            tasks.start_soon(finish, asking)
            await asked.wait()
            with standing_still(server_pid(tmp_path)):
                await until(lambda: not kernel.connected and not inference.connected)
                tasks.start_soon(finish, kernel.store.append(names.leases, KernelLease("here"), id="here1"))
                await anyio.sleep(patience(3))  # with the time before, longer than the request's deadline
                assert not done
            await until(lambda: len(done) == 2)


async def test_a_killed_guard_is_started_again_with_the_same_server(
    open_bus: OpenBus, names: Subjects, server: NatsServer, tmp_path: Path
) -> None:
    pid_file = tmp_path / "bus" / "guard.pid"
    async with open_bus("kernel") as kernel, anyio.create_task_group() as tasks:
        await kernel.store.make_log(names.journal_stream, names.of_journal)
        before = await kernel.store.append(names.leases, KernelLease("before"), id="before2")
        tasks.start_soon(server.look_after_guard)
        former = psutil.Process(int(pid_file.read_text().split()[0]))
        former.kill()
        await until(lambda: not kernel.connected)
        await until(lambda: kernel.connected)
        after = await kernel.store.append(names.leases, KernelLease("after"), id="after3")
        assert after > before  # the same store, and the same credentials
        assert int(pid_file.read_text().split()[0]) == server.process.pid != former.pid
        tasks.cancel_scope.cancel()


async def test_a_store_that_a_full_disk_has_broken_is_named_and_works_after_a_restart(
    open_bus: OpenBus, names: Subjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit of file sizes fails the server's writes as a full disk does."""
    monkeypatch.setattr(store, "_ANSWER_S", 1.0)

    def message(number: int) -> Refusal:
        return Refusal(f"{number}" * 100_000)

    async with open_bus("kernel") as kernel, anyio.create_task_group() as tasks:
        await kernel.store.make_log(names.journal_stream, names.of_journal)
        await kernel.store.append(names.events, message(0), id="0")
        assert kernel.unanswered.longest() is None
        server = psutil.Process(server_pid(tmp_path))
        server.rlimit(psutil.RLIMIT_FSIZE, (50_000, psutil.RLIM_INFINITY))
        sequences: list[int] = []

        async def append() -> None:
            sequences.append(await kernel.store.append(names.events, message(1), id="1"))

        tasks.start_soon(append)
        await until(lambda: (wait := kernel.unanswered.longest()) is not None and wait.seconds > 1.5)
        wait = kernel.unanswered.longest()
        assert wait is not None
        assert (wait.who, wait.verb) == (SERVER, f"append to {names.events}")
        server.rlimit(psutil.RLIMIT_FSIZE, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY))
        await anyio.sleep(patience(3))
        assert not sequences, "the server stores again by itself: no restart is needed"
        restart_server(tmp_path / "bus")
        await until(lambda: sequences == [2])
        assert kernel.unanswered.longest() is None


async def test_a_waiting_worker_gets_what_comes_after_the_server_has_started_again(
    open_bus: OpenBus, names: Subjects, tmp_path: Path
) -> None:
    """The former server's question for the next message is lost with it."""
    subject, gone, taken = names.ticket("train"), anyio.Event(), list[Refusal]()
    async with open_bus("kernel") as kernel, anyio.create_task_group() as tasks:
        await kernel.store.make_queue(names.tickets_stream, [subject], redeliver_s=60)

        async def take() -> None:
            async for delivery in kernel.store.take(
                names.tickets_stream, subject, Refusal, room=one_at_a_time, until=gone
            ):
                taken.append(delivery.message)
                await delivery.acknowledge()

        tasks.start_soon(take)
        await kernel.store.append(subject, Refusal("before"), id="0")
        await until(lambda: len(taken) == 1)
        await anyio.sleep(patience(0.1))  # it asks again
        former = server_pid(tmp_path)
        restart_server(tmp_path / "bus")
        await until(lambda: server_pid(tmp_path) not in (0, former))
        await kernel.store.append(subject, Refusal("after"), id="1")
        await until(lambda: len(taken) == 2, patience(6))  # without asking again it would be 10 s
        tasks.cancel_scope.cancel()


async def test_a_guard_ends_a_server_that_outlived_the_former_one(server: NatsServer, tmp_path: Path) -> None:
    """As on systems where a server does not die with its guard: it still has the port."""
    former = psutil.Process(server_pid(tmp_path))
    server.process.kill()
    psutil.wait_procs([former])
    with (tmp_path / "orphan.log").open("wb") as log:
        orphan = subprocess.Popen([server.command[2], "-c", server.command[3]], stdout=log, stderr=log)
    await until(lambda: server_pid(tmp_path) == orphan.pid)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.look_after_guard)
        await until(lambda: orphan.poll() == -signal.SIGKILL)
        await until(lambda: server_pid(tmp_path) != orphan.pid)
        tasks.cancel_scope.cancel()


async def test_a_kernel_ends_a_former_guard_that_hangs(
    server: NatsServer, bus_config: BusConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_GUARD_END_S", 0.5)
    os.kill(server.process.pid, signal.SIGSTOP)
    await until(lambda: psutil.Process(server.process.pid).status() == psutil.STATUS_STOPPED)
    second = await NatsServer.start(tmp_path / "bus", "test-run", bus_config, tmp_path / "logs")
    assert isinstance(server.process, subprocess.Popen)
    assert server.process.wait(patience(10)) == -signal.SIGKILL
    assert second.process.poll() is None
    await second.stop()


# ------------------------------------------------------------------- the fleet while the bus is out


Lost = list[tuple[str, str, bool]]
"""Worker, how it was lost, and whether that ends the run."""


def fleet_of(folder: Path, launcher: Any = None, *, max_restarts: int = 0) -> tuple[Fleet, Lost]:
    workers, lost = Fleet(launcher, folder, folder, lambda worker: (), max_restarts=max_restarts), Lost()
    workers.on_lost = lambda member, how, final: lost.append((member.worker, how, final))
    return workers, lost


def join(workers: Fleet, bus: Path, worker: str = "rollout-0") -> None:
    role: Any = worker.partition("-")[0]
    foreign_bootstrap(bus, "r", BusConfig(url="nats://127.0.0.1:1"), bus)
    (bus / "kernel.lock").touch()
    token = Bootstrap.read(write_bootstrap(bus, worker)).token
    workers.join(role, Join(worker, role, "here", "n", token))


@asynccontextmanager
async def watched(workers: Fleet) -> AsyncGenerator[None]:
    """Let the fleet look for silent workers for the duration of the block."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(workers.watch)
        yield
        tasks.cancel_scope.cancel()


def test_tokens_computed_again_are_counted_for_each_sampled_token(tmp_path: Path) -> None:
    workers, _ = fleet_of(tmp_path)
    for number in (0, 1):
        join(workers, tmp_path, f"inference-{number}")

    def beat(number: int, sampled: int, lost: int | None) -> None:
        load = Load(0, 4, 0, 8, sampled, 0.0, 0, 0.0, 0.0, lost_tokens=lost)
        workers.beat(Heartbeat(f"inference-{number}", "n", ready=True, load=load))

    beat(0, 100, 1000)  # totals, since before
    beat(1, 100, None)
    assert "lost_per_token" not in workers.load_figures()
    beat(0, 300, 1600)
    beat(1, 200, None)
    assert workers.load_figures()["lost_per_token"] == 600 / 300
    beat(0, 300, 1600)
    assert "lost_per_token" not in workers.load_figures()


def test_the_note_of_an_engine_is_its_state_while_it_starts_and_then_in_the_log(tmp_path: Path) -> None:
    workers, _ = fleet_of(tmp_path)
    join(workers, tmp_path, "inference-0")

    def beat(note: str, *, ready: bool) -> None:
        load = Load(-1, 0, 0, 8, 0, 0.0, 0, 0.0, 0.0, note=note)
        workers.beat(Heartbeat("inference-0", "n", ready=ready, load=load))

    for note in ("tries: 3 of 27", "tries: 4 of 27\x1b[2J"):
        beat(note, ready=False)
    [late] = late_workers(workers)
    assert late.startswith("inference-0 (tries: 4 of 27")
    assert "\x1b" not in late
    with capture_logs() as logs:
        for _ in range(2):
            beat("bits depend on inference.slots", ready=True)
    assert [entry["note"] for entry in logs] == ["bits depend on inference.slots"]


def test_the_used_share_of_verifiers_is_a_mean_over_heartbeats(tmp_path: Path) -> None:
    workers, _ = fleet_of(tmp_path)
    join(workers, tmp_path, "verifier-0")

    def beat(used: float, *, ready: bool = True) -> None:
        workers.beat(Heartbeat("verifier-0", "n", ready=ready, used=used))

    beat(0.0, ready=False)  # it loads
    assert workers.load_figures() == {}
    for used in (0.25, 0.75, 9.0, -9.0, math.nan):  # what a process of a run says of itself
        beat(used)
    assert workers.load_figures() == {"verifiers_used": (0.25 + 0.75 + 1 + 0 + 0) / 5}
    assert workers.load_figures() == {}


async def test_a_worker_by_hand_is_lost_without_ending_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "_SILENT_S", 0.5)
    (workers, lost), left = fleet_of(tmp_path), list[str]()
    workers.on_left = lambda member, why: left.append(member.worker)
    join(workers, tmp_path)
    async with watched(workers):
        await until(lambda: len(lost) == 1)
    join(workers, tmp_path)
    workers.leaving(Leaving("rollout-0", "n", "the dataset is not here", final=True))
    assert [(worker, final) for worker, _, final in lost] == [("rollout-0", False)] * 2
    join(workers, tmp_path)
    workers.beat(Heartbeat("rollout-0", "n", ready=True))
    changes: list[bool] = []
    workers.on_change = lambda member: changes.append(member.leaving)
    for _ in range(2):
        workers.beat(Heartbeat("rollout-0", "n", ready=True, leaving=True))
    workers.leaving(Leaving("rollout-0", "n", "asked by SIGINT", drained=True))
    assert (changes, left, len(lost)) == ([True], ["rollout-0"], 2)
    assert not workers.members
    assert not workers.starting


async def test_a_worker_that_looks_for_another_server_is_not_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "_SILENT_S", 0.1)
    workers, lost = fleet_of(tmp_path)
    workers.reconnect_s = 2.5
    join(workers, tmp_path)
    async with watched(workers):
        await until(lambda: bool(lost))
    [(_, how, _)] = lost
    assert int(how.removeprefix("silent for ").removesuffix(" s")) >= 3


@pytest.mark.usefixtures("server")
async def test_servers_that_stand_still_keep_a_client_only_shortly_from_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sockets that take connections and say nothing, as the system does for a stopped server."""
    monkeypatch.setattr("nats.aio.client.shuffle", list)  # leaves them in their order
    bootstrap = Bootstrap.read(tmp_path / "bus" / "rollout.json")
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        still = [f"nats://127.0.0.1:{each.getsockname()[1]}" for each in (first, second)]
        url = ",".join((*still, bootstrap.url))
        began = time.monotonic()
        async with connect(msgspec.structs.replace(bootstrap, url=url)) as bus:
            assert time.monotonic() - began < patience(8)
            assert bus.server == bootstrap.url
            assert bus.reconnect_s == 12


async def test_no_worker_counts_as_silent_while_the_bus_is_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "_SILENT_S", 2.0)
    (workers, lost), out = fleet_of(tmp_path), True
    workers.hears = lambda: not out
    join(workers, tmp_path)
    async with watched(workers):
        await anyio.sleep(patience(4))
        assert not lost
        out = False  # from now on it is silent by itself
        await until(lambda: bool(lost))
    [(worker, how, _)] = lost
    assert worker == "rollout-0"
    assert how.startswith("silent for")


# ----------------------------------------------------------------------- processes and event loops


@pytest.mark.parametrize("work", ["sleep", pytest.param("spin", marks=pytest.mark.slow)])
async def test_heartbeats_come_while_the_event_loop_stands_still(
    open_bus: OpenBus, names: Subjects, tmp_path: Path, work: str
) -> None:
    arrivals: list[tuple[float, Heartbeat]] = []
    bootstrap = Bootstrap.read(tmp_path / "bus" / "rollout.json")
    first = Heartbeat("rollout-0", "n", ready=False)

    def note(beat: Heartbeat) -> None:
        arrivals.append((time.monotonic(), beat))

    async def receive() -> None:
        async with open_bus("kernel") as kernel:
            await kernel.subscribe(names.kernel("rollout", "heartbeat"), Heartbeat, note)
            await anyio.sleep_forever()

    with start_blocking_portal() as portal:  # the kernel has a loop of its own here
        receiving = portal.start_task_soon(receive)
        with HostProcess().heartbeats(bootstrap, "rollout", first) as beats:
            await until(lambda: bool(arrivals))
            beats.update(first)
            stopped, stands_s = time.monotonic(), patience(5)
            while time.monotonic() < stopped + stands_s:  # as imports and loading do
                if work == "sleep":
                    time.sleep(stands_s / 5)
            during = [beat for at, beat in arrivals if stopped < at < stopped + stands_s]
        receiving.cancel()
    assert len(during) >= 3
    assert during[0].blocked_s < during[-1].blocked_s
    assert 2 <= during[-1].blocked_s <= stands_s


@pytest.mark.slow
async def test_a_worker_whose_loop_hangs_is_ended_after_it_has_written_its_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "_HUNG_S", 5.0)
    monkeypatch.setattr(fleet, "_STACKS_S", 2.0)
    script = (
        "import faulthandler, signal\nfaulthandler.register(signal.SIGUSR1)\n"
        "def hang_here():\n    print('up', flush=True)\n    while True: pass\nhang_here()"
    )
    rollout = job("rollout-0", code=script, folder=tmp_path)
    config: Any = None
    launcher = LocalLauncher(config, config)
    [handle] = await launcher.launch([rollout])
    await until(lambda: rollout.tail(1) == "up")
    workers, lost = fleet_of(tmp_path, launcher)
    workers._handles["rollout-0"] = handle  # pyright: ignore[reportPrivateUsage]
    join(workers, tmp_path)
    async with watched(workers):
        workers.beat(Heartbeat("rollout-0", "n", ready=True, blocked_s=4.0))
        await anyio.sleep(patience(1.5))
        assert not lost
        workers.beat(Heartbeat("rollout-0", "n", ready=True, blocked_s=6.0))
        with anyio.fail_after(patience(30)):
            assert await handle.wait() < 0
    [(_, how, _)] = lost
    assert how == "its event loop stood still for 6 s"
    assert "in hang_here" in rollout.tail(20)


class Endless:
    """The handle of a process that no signal ends."""

    place = "pid 1"

    async def wait(self, grace_s: float = 0.0) -> int:
        await anyio.sleep_forever()
        return 0

    stop = wait

    async def dump_stacks(self) -> None: ...


class EndlessLauncher:
    def __init__(self) -> None:
        self.launched: list[str] = []

    async def launch(self, jobs: Sequence[Job]) -> list[Endless]:
        self.launched += [job.worker for job in jobs]
        return [Endless() for _ in jobs]


async def test_a_process_that_does_not_end_after_sigkill_is_replaced_and_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "_SILENT_S", 0.5)
    monkeypatch.setattr(fleet, "_STACKS_S", 0.0)
    monkeypatch.setattr(fleet, "_KILLED_S", 3.0)
    launcher = EndlessLauncher()
    workers, lost = fleet_of(tmp_path, launcher, max_restarts=3)
    join(workers, tmp_path)
    with anyio.fail_after(patience(30)):
        async with anyio.create_task_group() as tasks:
            await workers.launch([Worker("rollout-0", "rollout", Resources())], tasks)
            tasks.start_soon(workers.watch)
            await until(lambda: len(lost) == 1)
            join(workers, tmp_path)  # this one falls silent while the previous one is waited for
            await until(lambda: len(lost) == 2)
            assert launcher.launched == ["rollout-0"]
            await until(lambda: launcher.launched == ["rollout-0"] * 2)
            await workers.stop(0)
            tasks.cancel_scope.cancel()


# ---------------------------------------------------------------------- workers and the kernel's lock


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    with spawning() as spawn:
        yield lock_holder(spawn, tmp_path)


async def test_a_worker_waits_for_a_kernel_that_stands_still_and_leaves_a_dead_one(
    kernel: subprocess.Popen[str], tmp_path: Path
) -> None:
    watch = KernelWatch(KernelLock.of(tmp_path), grace_s=patience(1), outage_s=patience(1))
    with standing_still(kernel.pid), anyio.move_on_after(patience(3)) as waiting:
        await watch.until_gone()
    assert waiting.cancelled_caught
    kernel.kill()
    with anyio.fail_after(patience(30)):
        assert "its lock is free" in await watch.until_gone()


@pytest.mark.usefixtures("kernel")
async def test_a_worker_leaves_when_another_kernel_has_taken_the_lock(tmp_path: Path) -> None:
    former = msgspec.structs.replace(KernelLock.of(tmp_path), owner="pid 1, since the day before")
    assert former.visible
    assert not former.is_held()


async def test_a_worker_on_another_machine_stays_while_beacons_come_and_leaves_after_the_outage_time(
    kernel: subprocess.Popen[str], tmp_path: Path
) -> None:
    del kernel
    elsewhere = msgspec.structs.replace(KernelLock.of(tmp_path), machine="another")
    watch = KernelWatch(elsewhere, grace_s=patience(0.1), outage_s=patience(1.0))

    async def hear() -> None:
        for _ in range(30):
            await anyio.sleep(patience(0.1))
            watch.hear()
        heard.set()

    heard = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(hear)
        assert "no beacon" in await watch.until_gone()
        assert heard.is_set()


async def test_a_worker_that_starts_after_the_kernels_death_does_not_wait_to_join(tmp_path: Path) -> None:
    bus = tmp_path / "bus"
    lock = lock_run(bus)
    server = await NatsServer.start(bus, "r", BusConfig(grace_s=patience(1.0)), tmp_path)
    bootstrap = write_bootstrap(bus, "rollout-0")
    lock.close()
    with spawning() as spawn:
        worker = spawn([sys.executable, "-m", "stretto.workers", bootstrap])
        output, _ = worker.communicate(timeout=patience(30))
    await server.stop()
    assert worker.returncode == 1
    assert "kernel did not answer on 'join'" in output


async def test_a_process_of_a_former_kernel_hears_no_request_to_its_successor(
    open_bus: OpenBus, names: Subjects
) -> None:
    """Both are `trainer-0`; the previous one stood still, and has not heard yet that its kernel is gone."""
    heard: list[str] = []

    async with open_bus("kernel") as kernel, open_bus("trainer") as former, open_bus("trainer") as present:
        for bus, nonce, lease_epoch in ((former, "former", 1), (present, "present", 2)):
            context = context_of(bus, "trainer-0", nonce, lease_epoch)

            async def end(message: EndStep, context: WorkerContext = context) -> StepEnded:
                heard.append(context.nonce)
                return StepEnded()

            await context.obey("end", EndStep, end)
        subject = names.worker("trainer", "trainer-0", "present", "end")
        await kernel.request(subject, EndStep(2, 0), StepEnded, deadline_s=patience(10))
        await former.subscribe(names.beacon, Beacon, lambda beacon: None)  # it has read all messages before
    assert heard == ["present"]


def test_a_worker_works_for_a_later_kernel_when_that_has_welcomed_it() -> None:
    context = context_of(None, "rollout-0", lease_epoch=1)
    context.receive_beacon(Beacon(1, "running"))
    assert not context.leave.is_set()
    context.receive_beacon(Beacon(2, "running"))
    assert context.has_successor.is_set()
    context.receive_dismissal(Dismissal(2))
    assert not context.leave.is_set(), "the later kernel does not know this process yet"
    context.welcome(welcome("test-run", 2))
    assert not context.has_successor.is_set()
    context.receive_dismissal(Dismissal(2))
    assert context.leave.is_set()


async def test_a_worker_killed_for_lack_of_memory_is_lost_with_what_was_counted(tmp_path: Path) -> None:
    counters, config = tmp_path / "vmstat", None
    counters.write_text("nr_free_pages 7\noom_kill 3\n")
    launcher = LocalLauncher(config, config)  # pyright: ignore[reportArgumentType]
    workers, lost = fleet_of(tmp_path, launcher)
    workers._memory_kills = MemoryKills(counters)  # pyright: ignore[reportPrivateUsage]
    workers.memory_of = lambda worker: f"; {worker} was counted"
    for number, kills in enumerate((3, 4)):
        rollout = job(f"rollout-{number}", code="import time; time.sleep(600)", folder=tmp_path)
        [handle] = await launcher.launch([rollout])
        workers._handles[rollout.worker] = handle  # pyright: ignore[reportPrivateUsage]
        join(workers, tmp_path, rollout.worker)
        counters.write_text(f"nr_free_pages 7\noom_kill {kills}\nunevictable_pgs 0\n")
        os.kill(handle.pid, signal.SIGKILL)
        await workers._live(rollout)  # pyright: ignore[reportPrivateUsage]
    ends = ["killed by signal 9", "killed by signal 9: this machine's memory was full; rollout-1 was counted"]
    assert [how for _, how, _ in lost] == ends
