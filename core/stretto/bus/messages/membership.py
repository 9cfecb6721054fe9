"""Joining and leaving a run: beacons, routes, heartbeats, and requests to drain."""

from typing import Annotated, Literal

import msgspec

from stretto.bus.lock import KernelLock
from stretto.bus.messages.base import KernelMessage, Message, Nonce, WorkerId
from stretto.bus.messages.tickets import TicketStarted
from stretto.engine import Load
from stretto.launcher import Role


class Beacon(KernelMessage, frozen=True, tag="Beacon/3"):
    """Kernel to all workers, every second and at the end: the kernel is alive."""

    state: Literal["running", "over"]
    """At `over` every worker leaves."""


class EngineFigures(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The part of an engine's `Load` that routing needs, from the latest heartbeat of its worker."""

    version: int
    samples: int
    """Number of samples that the engine decodes, or that wait for it."""
    slots: int
    """Number of samples that the engine can decode at once."""
    generated_tokens: int
    lost_tokens: int = 0
    """Total of tokens computed again because the prefix cache was full; 0 if unknown."""


class WorkerProcess(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One process of a worker, to send requests to."""

    worker: WorkerId
    nonce: Nonce


class Peer(WorkerProcess, frozen=True):
    """An inference or verifier worker that a rollout worker may call."""

    figures: EngineFigures | None = None
    """None for a verifier, and for an engine before its first figures."""
    exact_version: int | None = None
    """The only version served while the worker is lent to an evaluation; else None."""
    closed: bool = False
    """Whether no new call may go to this peer: the peer leaves, or the rollout worker has enough others."""

    @property
    def role(self) -> str:
        """The worker's role, which its id begins with."""
        return self.worker.partition("-")[0]


class Routes(KernelMessage, frozen=True, tag="Routes/2"):
    """Kernel to one rollout worker, every second and at every change: call these workers and no others."""

    peers: tuple[Peer, ...]
    """Some verifiers, some engines for training, and for each evaluation some of the engines lent to it."""


class Join(Message, frozen=True, tag="Join/3"):
    """Worker to kernel, answered by `Welcome`: a process has started, or has lost a former kernel."""

    worker: WorkerId
    role: Role
    place: str
    """Host and process id of the worker, as text for people."""
    nonce: Nonce
    token: str
    """Proof that the process may join under this id (see `stretto.bus.joining`)."""
    stretto: Annotated[str, msgspec.Meta(max_length=100)] = ""
    """Version of stretto. The kernel accepts only its own."""
    again: bool = False
    """Whether the process worked for a former kernel."""
    held: tuple[TicketStarted, ...] = ()  # attempts that the worker still works on


class Welcome(Message, frozen=True, tag="Welcome/3"):
    """What a worker needs to know about the run."""

    config: bytes
    """The composed run as a plain mapping, in msgpack."""
    run: str
    folder: str
    lease_epoch: int
    grace_s: float
    """A worker that can see the kernel's lock leaves after this many seconds without beacon and lock."""
    fingerprints: dict[str, str]
    """Fingerprint of each dataset, by the key of its section."""
    outage_s: float
    """A worker that cannot see the lock leaves after this many seconds without a beacon."""
    lock: KernelLock
    many_machines: bool = False
    """Whether the launcher may start workers on other machines than the kernel's."""


class AskRanks(Message, frozen=True):
    """Trainer to kernel, answered by `Ranks` when all trainers have joined."""


class Ranks(Message, frozen=True):
    """The processes of all trainers of this kernel. While the kernel lives, none of them is replaced."""

    nonces: dict[WorkerId, Nonce]


SERVER = "nats-server"
"""Name of the server in `Wait.who`."""


class Wait(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request that a process has sent and that is not answered yet."""

    who: str
    """The process that has to answer: a worker, `kernel` or `SERVER`."""
    verb: str
    seconds: float


class Heartbeat(Message, frozen=True):
    """Worker to kernel, every second, from a thread of the worker: the process is alive."""

    worker: WorkerId
    nonce: Nonce
    ready: bool
    busy_s: float = 0.0
    """Seconds of work since the worker's start."""
    load: Load | None = None
    """Load figures of the engine. Only inference workers send them."""
    tickets: int = 0
    """Number of tickets that a rollout worker runs."""
    refused: int = 0
    """Number of refused malformed messages."""
    blocked_s: float = 0.0
    """Seconds for which the event loop has stood still; 0 while it runs."""
    wait: Wait | None = None
    """The worker's oldest request without an answer."""
    leaving: bool = False
    """Whether the worker drains."""
    paused: Annotated[str, msgspec.Meta(max_length=500)] = ""
    """Reason why a verifier's calls of a reward or environment pause; empty if they do not pause."""
    used: float = 0.0
    """Share of a verifier's processes that work; the largest share if rewards, tools, ... have their own."""


class RunStatus(Message, frozen=True):
    """Kernel to viewers, every two seconds: the content of `status.json`."""

    content: bytes
    """A `stretto.records.status.Status` in JSON."""


class Drain(KernelMessage, frozen=True):
    """Kernel to worker, answered by `Draining`: finish your work, take no new work, and leave."""


class Draining(Message, frozen=True):
    """The worker drains. It sends `Leaving` when the work is finished."""


class Dismissal(KernelMessage, frozen=True):
    """Kernel to a process that was lost or whose id another process has: leave at once."""


class Leaving(Message, frozen=True):
    """Worker to kernel: the worker leaves. It has finished its work or handed it back."""

    worker: WorkerId
    nonce: str
    reason: str
    final: bool = False
    """Whether the failure would occur again after a restart or resume."""
    drained: bool = False
    """Whether the worker leaves because it was asked to, after a drain."""
