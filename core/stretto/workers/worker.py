"""What every worker process does: connect to the bus, join the run, send heartbeats, and leave.

A worker leaves when the run is over, when it gets SIGTERM, and when the kernel is gone and no other kernel
comes. It joins a later kernel of the run with its present work. At a request of the kernel, or at SIGINT, it
first drains: it takes no new work and finishes its present work.
"""

import gc
import json
import os
import secrets
import signal
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import anyio
import msgspec
import structlog

from stretto.bus.client import Bus, connect
from stretto.bus.guard import is_locked
from stretto.bus.joining import own_version
from stretto.bus.messages import membership
from stretto.bus.messages.subjects import Subjects
from stretto.bus.server import Bootstrap
from stretto.errors import ConfigError, ContractError, NoAnswer, StrettoError, leaves
from stretto.launcher import Role
from stretto.machine import clock
from stretto.records.values import dotted_values
from stretto.workers.context import RoleWorker, WorkerContext
from stretto.workers.heartbeats import BEAT_S, Heartbeats
from stretto.workers.inference import InferenceWorker
from stretto.workers.process import HostProcess
from stretto.workers.sampling.rollout import RolloutWorker
from stretto.workers.scoring.verifier import VerifierWorker
from stretto.workers.training.trainer import TrainerWorker

log = structlog.get_logger()

_WORKERS: dict[Role, Callable[[WorkerContext], RoleWorker]] = {
    "trainer": TrainerWorker,
    "inference": InferenceWorker,
    "rollout": RolloutWorker,
    "verifier": VerifierWorker,
}
_FINAL = (ConfigError, ContractError)
"""Errors that a restarted worker would raise again."""
_JOIN_S = 60.0  # a living kernel answers long before; a worker that gets no answer ends
_AGAIN_S = 5.0
"""Deadline for a later kernel's answer. Without an answer, the worker asks again after `_AGAIN_PAUSE_S`."""
_AGAIN_PAUSE_S = 0.2
_LEAVE_S = 4.0
"""Seconds until the process ends even if a thread does not end, such as a train step of minutes."""
_MOST_PATHS = 10  # in the reason of a worker that leaves
_COLLECT_WHILE_LOADING = 1_000_000
"""New objects between two garbage collections while the role loads. Imports make hundreds of thousands of
objects that stay; with Python's default the collector takes a fifth of the time that they need."""


async def work(bootstrap: Bootstrap, process: HostProcess) -> None:
    """Join the run and work until the worker leaves."""
    async with anyio.create_task_group() as tasks:
        joining = anyio.CancelScope()
        if bootstrap.lock is not None and bootstrap.lock.visible:
            tasks.start_soon(_expect_kernel, Path(bootstrap.lock.path), bootstrap.grace_s, joining)
        await _join_and_work(bootstrap, process, joining)


async def _expect_kernel(lock: Path, grace_s: float, joining: anyio.CancelScope) -> None:
    """Until the worker has joined and so hears beacons, raise NoAnswer if no kernel holds the run's lock."""
    with joining:
        held_at = clock.now()
        while True:
            if is_locked(lock):
                held_at = clock.now()
            elif (waited_s := clock.now() - held_at) > grace_s:
                raise NoAnswer("kernel", "join", waited_s)
            await anyio.sleep(min(0.5, grace_s / 4))


async def _join_and_work(bootstrap: Bootstrap, process: HostProcess, joining: anyio.CancelScope) -> None:
    names, worker, nonce = Subjects(bootstrap.run), bootstrap.worker, secrets.token_hex(4)
    role: Role = bootstrap.role  # pyright: ignore[reportAssignmentType] - the kernel's bootstrap is not a worker's
    first = membership.Heartbeat(worker, nonce, ready=False)
    async with connect(bootstrap) as bus:
        log.info("bus connected", url=bus.server)
        with process.heartbeats(bootstrap, role, first) as beats:
            join = membership.Join(worker, role, process.place, nonce, bootstrap.token, own_version())
            welcome = await bus.request(
                names.kernel(role, "join"), join, membership.Welcome, deadline_s=_JOIN_S
            )
            joining.cancel()
            try:
                context = WorkerContext(bus, names, worker, role, nonce, welcome, process)
            except StrettoError as error:
                leaving = _leaving_after(error, join, str(error), welcome.config)
                await _announce_leaving(bus, names.kernel(role, "leaving"), leaving)
                raise
            bus.explain = context.explain
            await _work_and_leave(context, beats, join, welcome.config)


def _leaving_after(
    error: BaseException, join: membership.Join, text: str, config: bytes
) -> membership.Leaving:
    """Return why a worker leaves: the error, and paths of the run file that do not exist on this machine."""
    remark = _absent_paths(config)
    error.add_note(remark)
    reason = "; ".join(filter(None, (text, remark)))
    return membership.Leaving(join.worker, join.nonce, reason, final=isinstance(error, _FINAL))


def _absent_paths(config: bytes) -> str:
    values = dict(dotted_values(msgspec.msgpack.decode(config)))
    paths = {key: json.loads(value) for key, value in values.items() if key != "out"}
    absent = [
        f"{key}={path}"
        for key, path in paths.items()
        if isinstance(path, str) and path.startswith("/") and not os.path.lexists(path.partition(":")[0])
    ]
    if not absent:
        return ""
    return f"paths of the run file that do not exist on this machine: {', '.join(absent[:_MOST_PATHS])}"


async def _work_and_leave(
    context: WorkerContext, beats: Heartbeats, join: membership.Join, config: bytes
) -> None:
    subject = context.names.kernel(context.role, "leaving")
    try:
        await _work_in(context, beats, join, config)
    except Exception as error:
        cause = leaves(error)[0]
        leaving = _leaving_after(cause, join, context.explain(cause), config)
        await _announce_leaving(context.bus, subject, leaving)
        raise
    leaving = membership.Leaving(context.worker, context.nonce, context.reason, drained=context.drained)
    await _announce_leaving(context.bus, subject, leaving)


async def _work_in(context: WorkerContext, beats: Heartbeats, join: membership.Join, config: bytes) -> None:
    context.process.limit_threads(context.assembly.resources_of(context.worker))
    await context.bus.subscribe(context.names.beacon, membership.Beacon, context.receive_beacon)
    await context.bus.subscribe(context.subject("dismiss"), membership.Dismissal, context.receive_dismissal)
    work = _WORKERS[context.role](context)
    if context.role != "trainer":
        await context.obey("drain", membership.Drain, partial(_obey_drain, context))
    ready = anyio.Event()
    thresholds = gc.get_threshold()
    gc.set_threshold(_COLLECT_WHILE_LOADING)

    def loaded() -> None:
        gc.set_threshold(*thresholds)
        ready.set()

    async def beat() -> None:
        await _send_heartbeat(context, work, beats, ready=ready.is_set())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_obey_signals, context)
        tasks.start_soon(_drain_when_asked, context, work, beats)
        tasks.start_soon(_watch_kernel, context)
        tasks.start_soon(_join_successors, context, join, config, beat)
        tasks.start_soon(_update_heartbeats, context, work, ready, beats)
        tasks.start_soon(work.run, loaded)
        await context.leave.wait()
        log.info("leaving", reason=context.reason)
        context.process.end_after(_LEAVE_S)
        with anyio.move_on_after(1):  # work since the last heartbeat counts in the run's figures
            await beat()
        tasks.cancel_scope.cancel()


async def _obey_drain(context: WorkerContext, _: membership.Drain) -> membership.Draining:
    context.request_drain("the run needs fewer workers")
    return membership.Draining()


async def _drain_when_asked(context: WorkerContext, work: RoleWorker, beats: Heartbeats) -> None:
    """Once asked, finish the work within `launcher.drain_s`, and leave. Others get the unfinished work."""
    await context.drain.wait()
    limit_s = context.composed.config.launcher.drain_s
    log.info("draining", reason=context.drain_reason, limit_s=limit_s)
    await _send_heartbeat(context, work, beats, ready=True)  # so that this worker gets no new work
    with anyio.move_on_after(limit_s) as limit:
        await work.drain()
    unfinished = f"; its work was not finished after {limit_s:g} s" if limit.cancelled_caught else ""
    context.drained = True
    context.request_shutdown(f"{context.drain_reason}{unfinished}")


async def _announce_leaving(bus: Bus, subject: str, leaving: membership.Leaving) -> None:
    with anyio.move_on_after(1):
        await bus.publish(subject, leaving)


async def _obey_signals(context: WorkerContext) -> None:
    """Leave at a signal; a trainer leaves at the second. A cluster that wants its machines back signals all
    processes at once, and the kernel then needs its trainers to finish the step and to save."""
    is_needed = context.role == "trainer"
    with context.process.signals() as signals:
        async for number in signals:
            reason = f"asked by {number.name}"
            if is_needed:
                is_needed = False
                log.info("stays until the kernel ends, or until the next signal", signal=number.name)
            elif number == signal.SIGINT and context.role != "trainer" and not context.drain.is_set():
                context.request_drain(reason)
            else:
                context.request_shutdown(reason)


async def _watch_kernel(context: WorkerContext) -> None:
    context.request_shutdown(await context.kernel.until_gone())


async def _join_successors(
    context: WorkerContext, join: membership.Join, config: bytes, beat: Callable[[], Awaitable[None]]
) -> None:
    """Join later kernels with the work in hand. Leave if a kernel refuses this or has other values."""
    subject = context.names.kernel(context.role, "join")
    while True:
        await context.has_successor.wait()
        rejoin = msgspec.structs.replace(join, again=True, held=context.held())
        try:
            welcome = await context.bus.request(subject, rejoin, membership.Welcome, deadline_s=_AGAIN_S)
        except NoAnswer:
            await anyio.sleep(_AGAIN_PAUSE_S)  # that kernel has no time, or is gone as well
            continue
        except StrettoError as error:
            context.request_shutdown(f"another kernel owns the run now: {error}")
            return
        if welcome.config != config:
            context.request_shutdown("another kernel owns the run now, with other values")
            return
        context.welcome(welcome)
        await beat()
        log.info("joined the next kernel", lease_epoch=welcome.lease_epoch)


async def _update_heartbeats(
    context: WorkerContext, work: RoleWorker, ready: anyio.Event, beats: Heartbeats
) -> None:
    is_ready = False
    while True:
        was_ready, is_ready = is_ready, ready.is_set()
        if is_ready and not was_ready:
            await _send_heartbeat(context, work, beats, ready=True)
        else:
            beats.update(_heartbeat(context, work, ready=is_ready))
        with anyio.move_on_after(BEAT_S):
            await (anyio.sleep(BEAT_S) if is_ready else ready.wait())


def _heartbeat(context: WorkerContext, work: RoleWorker, *, ready: bool) -> membership.Heartbeat:
    plain = membership.Heartbeat(
        context.worker,
        context.nonce,
        ready=ready,
        refused=context.bus.refusals.count,
        wait=context.bus.unanswered.longest(),
        leaving=context.drain.is_set(),
    )
    return work.heartbeat(plain)


async def _send_heartbeat(
    context: WorkerContext, work: RoleWorker, beats: Heartbeats, *, ready: bool
) -> None:
    """Send the current heartbeat at once, without waiting for the thread that sends it every second."""
    heartbeat = _heartbeat(context, work, ready=ready)
    beats.update(heartbeat)
    await context.bus.publish(context.names.kernel(context.role, "heartbeat"), heartbeat)
