"""What all messages have: the base class, refusals, and the forms of names and ids."""

from typing import Annotated, Literal

import msgspec

from stretto.launcher import ROLES

Party = Literal["kernel", "trainer", "inference", "rollout", "verifier", "samples", "viewer", "operator"]
"""Sort of process on the bus. A viewer only listens. The operator is the run's user, who sends commands."""

WORKER_ID = rf"\A(?:{'|'.join(ROLES)})-[A-Za-z0-9_-]{{1,64}}\Z"
WorkerId = Annotated[str, msgspec.Meta(pattern=WORKER_ID)]
"""Id of a worker, such as `rollout-0`. It is part of subjects, so it has no other characters."""
NONCE = r"\A[A-Za-z0-9]{1,64}\Z"
Nonce = Annotated[str, msgspec.Meta(pattern=NONCE)]
"""Random text that a worker draws at its start. It distinguishes a restarted worker from the previous
process. The subjects of requests to the worker contain the nonce, so that no other process receives the
requests."""
VariantName = Annotated[str, msgspec.Meta(pattern=r"\A[a-z0-9_]{0,32}\Z")]
"""Name of a variant in the run file; empty for the run's own sections."""
InboxToken = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9]{1,64}\Z")]


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=lambda name: f"{name}/1"):
    """Base of every message that is published on its own. Parts of messages are plain structs."""


class KernelMessage(Message, frozen=True):
    """Base of messages with the lease epoch of a kernel. `WorkerContext.obey` checks that of requests."""

    lease_epoch: int
    """Fencing number of the kernel's lease. Workers obey the highest that they have seen."""


class Refusal(Message, frozen=True):
    """Sent in place of the answer to a request: the reason why there is no answer."""

    reason: str
