"""Subjects of the bus: who may send what to whom."""

import re
from functools import lru_cache
from typing import Any

from stretto.bus.messages.base import NONCE, WORKER_ID, Party
from stretto.bus.messages.tickets import Purpose
from stretto.errors import BusError
from stretto.launcher import Role

WORKER_VERBS: dict[Role, dict[str, tuple[Party, ...]]] = {
    "trainer": {
        **dict.fromkeys(("load", "call", "end", "save", "saved"), ("kernel", "trainer")),
        **dict.fromkeys(("prefetch", "published", "state"), ("kernel",)),
        **dict.fromkeys(("column", "held_out_column", "meeting_place"), ("trainer",)),
        "weights": ("inference",),
        "shared_rows": ("inference",),
        "dismiss": ("kernel",),
    },
    "inference": {
        **dict.fromkeys(("swap", "load", "drain", "dismiss"), ("kernel",)),
        **dict.fromkeys(("generate", "confirm", "abort"), ("rollout",)),
    },
    "rollout": {**dict.fromkeys(("routes", "drain", "dismiss"), ("kernel",)), "image": ("inference",)},
    "verifier": {
        **dict.fromkeys(("drain", "dismiss"), ("kernel",)),
        **dict.fromkeys(("score", "tools", "tool", "environment"), ("rollout",)),
    },
}
"""Role -> verb -> the parties that may send this request to a worker of the role. The server's permissions
and the check of reply subjects use this table. Rank 0 of a group passes requests of the kernel on."""


class Subjects:
    """Names on the bus of one run: subjects, streams, consumers."""

    def __init__(self, run: str) -> None:
        self.root = f"st.{run}"
        self.beacon = f"{self.root}.beacon"
        self.status = f"{self.root}.status"
        self.tickets_started = self.kernel("rollout", "started")
        self.progress = self.kernel("rollout", "progress")
        self.abort_ticket = f"{self.root}.abort"
        self.log = f"{self.root}.log"
        self.trajectories = f"{self.log}.trajectories"
        self.groups = f"{self.log}.groups"
        self.kept_trajectories = f"{self.log}.kept"
        self.records = f"{self.log}.records"
        self.trained = f"{self.log}.trained"
        self.retired = f"{self.log}.retired"
        self.tickets = f"{self.root}.tickets"
        self.journal = f"{self.root}.journal"
        self.leases = f"{self.journal}.leases"
        self.events = f"{self.journal}.events"
        self.tickets_stream = f"TICKETS_{run}"
        self.log_stream = f"LOG_{run}"
        self.journal_stream = f"JOURNAL_{run}"

    def image(self, digest: str) -> str:
        """Subject of an image in the log; `*` for all images."""
        return f"{self.log}.images.{digest}"

    @property
    def of_journal(self) -> list[str]:
        """All subjects of the journal's stream."""
        return [self.leases, self.events]

    @property
    def of_log(self) -> list[str]:
        """All subjects of the log."""
        return [*self.of_samples, self.image("*")]

    @property
    def of_samples(self) -> list[str]:
        """Subjects of the log that the sample writer reads."""
        return [
            *(self.trajectories, self.kept_trajectories, self.records),
            *(self.groups, self.trained, self.retired),
        ]

    def ticket(self, purpose: Purpose) -> str:
        """Subject of the tickets of a purpose. The name of the consumer of the tickets is derived from it."""
        return f"{self.tickets}.{purpose}"

    def kernel(self, party: Party, verb: str) -> str:
        """Subject of the messages and requests that a party sends to the kernel."""
        return f"{self.root}.kernel.{party}.{verb}"

    def worker(self, role: Role, worker: str, nonce: str, verb: str) -> str:
        """Subject of requests to one process. Raise BusError for a malformed id or nonce."""
        return f"{self.root}.worker.{role}.{_checked(worker, nonce)}.{verb}"

    def inbox(self, party: Party) -> str:
        """Prefix of the inboxes of a party."""
        return f"{self.root}.inbox.{party}"

    def answers(self, asker: Party, answerer: Party) -> str:
        """Prefix of the subjects of all answers from `answerer` in the inboxes of `asker`."""
        return f"{self.inbox(asker)}.from.{answerer}"

    def chunks(self, inbox: str) -> str:
        """Subject of the chunks for the rollout worker with this inbox."""
        return f"{self.answers('rollout', 'inference')}.{inbox}.chunks.in"

    def parties(self, subject: str) -> tuple[tuple[Party, ...], Party]:
        """Return who may send requests to a subject, and who answers them."""
        to, *rest = subject.removeprefix(f"{self.root}.").split(".")
        party: Any = rest[0]  # `kernel` and `worker` made the subject
        return ((party,), "kernel") if to == "kernel" else (WORKER_VERBS[party][rest[-1]], party)

    def process_of(self, subject: str) -> str:
        """Return the process that answers requests to a subject: a worker's id, or `kernel`."""
        to, _, *rest = subject.removeprefix(f"{self.root}.").split(".")
        return "kernel" if to == "kernel" else rest[0]


def is_worker_id(text: str) -> bool:
    """Return whether a text is the id of a worker."""
    return re.search(WORKER_ID, text) is not None


@lru_cache(maxsize=1024)
def _checked(worker: str, nonce: str) -> str:
    if not is_worker_id(worker):
        raise BusError(f"{worker!r} is not the id of a worker; expected an id such as 'rollout-0'")
    if re.search(NONCE, nonce) is None:
        raise BusError(f"{nonce!r} is not the nonce of a process of {worker}; expected letters and digits")
    return f"{worker}.{nonce}"
