"""What the launcher and its Ray client say to each other: one JSON object a line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


class Greeting(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of each kernel: the cluster that the client is to be connected to."""

    address: str | None
    """Address of the cluster; None to start one on this machine."""
    runtime_env: Mapping[str, Any]
    """Ray's runtime environment of every actor."""


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """One worker to start."""

    run: int
    """Number of this start, which the events about it carry."""
    worker: str
    command: tuple[str, ...]
    """Program and arguments. The actor's own Python takes the place of an empty program."""
    env: Mapping[str, str]
    text: bytes
    """Standard input. It holds the worker's credentials."""
    group: str
    """Key of `stretto_ray.placement.group_of`: workers of one group share a placement group."""
    unit: str
    """Workers of a group with the same unit share a bundle; empty for a bundle of its own."""
    resources: Mapping[str, float]
    """The Ray resources of the worker."""
    log: str
    """Path of the file for its output, on the client's machine."""


class Launch(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Start workers. Answered when all of them run."""

    id: int
    starts: tuple[Start, ...]
    folder: str
    """Working directory of the workers, on nodes that have it; empty for the one that Ray sets up."""
    within_s: float


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Stop a launch, which is answered with `Failed` then."""

    id: int


class Adopt(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Say `WorkerStarted` again about a worker that a former kernel has started. Fails if it has ended."""

    id: int
    run: int


class Describe(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answer with the nodes of the cluster."""

    id: int


class Signal(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Send a signal to a worker; SIGKILL to all processes of its session."""

    run: int
    number: int


class KillActor(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End the actor of a worker, which does not answer."""

    run: int


class Close(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End the client, its actors and with them the workers. A kernel that leaves without it was killed."""


class ClusterNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node of the cluster."""

    name: str
    address: str
    own: bool
    """Whether this process runs there."""
    resources: Mapping[str, float]
    """Everything that the node has, used or not."""


class ClientAnswer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A request has succeeded."""

    id: int
    nodes: tuple[ClusterNode, ...] = ()


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A request has failed."""

    id: int
    error: str
    worker: str = ""


class Unconnected(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The client cannot connect to the cluster, and ends."""

    error: str


class WorkerStarted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A worker runs."""

    run: int
    node: str
    pid: int


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A worker has ended, and its output is in its log."""

    run: int
    status: int
    remark: str = ""
    """How the worker was lost. Empty if the worker ended by itself with this status."""


Request = Launch | Cancel | Adopt | Describe | Signal | KillActor | Close
Event = ClientAnswer | Failed | Unconnected | WorkerStarted | Ended
