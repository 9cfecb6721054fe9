"""Oracles: properties that every universe must have, whatever faults occur."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from stretto.bus.messages import events
from stretto.bus.messages.tickets import GroupDone, GroupFailed
from stretto.bus.payloads import decoder, is_split
from stretto.simulation.faults import Tape

PLANTED = "planted by the simulation"
"""Reason of a failure that a fault has planted."""


class Oracle:
    """Checks stored messages, and the end of a run. `violations` lists broken properties. `bound` is η."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self.violations: list[str] = []
        self._ages: dict[str, int] = {}
        """Id of a trajectory -> version of its oldest token."""
        self._trained: dict[int, int] = {}
        """Ticket -> version of its batch."""
        self._digests: dict[int, str] = {}
        self._published: dict[tuple[int, int], tuple[int, int]] = {}
        """(incarnation, version) -> (lease, number of the event). The same event may be stored twice."""
        self._evaluated = set[int]()
        """Versions with an evaluation in the journal."""
        self._lease = 0
        self._values = 1
        self.steps = 0
        self.batches_left: int | None = None
        """Batches that a kernel may still begin, if limited: one after a signal, which may race with it."""

    def __call__(self, sender: str, subject: str, data: bytes, head: bytes) -> None:
        """Check a message that was published or stored."""
        if is_split(data):
            return
        if subject.endswith(".events"):
            batch = msgspec.msgpack.decode(data, type=events.EventBatch)
            for number, event in enumerate(batch.decoded(), batch.first):
                self._judge(event, (batch.lease_epoch, number))
            if batch.lease_epoch < self._lease:
                self._violated(
                    f"the kernel of lease {batch.lease_epoch} writes into the journal after {self._lease}"
                )
            self._lease = max(self._lease, batch.lease_epoch)
        elif subject.endswith(".log.groups"):
            with suppress(msgspec.DecodeError, RecursionError):  # else the kernel refuses it
                outcome = decoder(GroupDone | GroupFailed)(data)
                if isinstance(outcome, GroupDone) and outcome.purpose == "train":
                    self._ages |= {member.id: member.oldest for member in outcome.members}

    def _judge(self, event: events.Event, place: tuple[int, int]) -> None:
        match event:
            case events.RunOwned(version=version, values=values) if values != self._values:
                self._values = values
                self._forget_after(version)
            case events.BatchStarted():
                self._judge_batch(event)
            case events.VersionPublished(incarnation, version, digest):
                self.steps = max(self.steps, version)
                if self._digests.setdefault(version, digest) != digest:
                    self._violated(f"version {version} has two digests")
                if self._published.setdefault((incarnation, version), place) != place:
                    self._violated(f"version {version} is published twice")
            case events.EvaluationEnded(result):
                version = result.version
                if version in self._evaluated:
                    self._violated(f"version {version} is evaluated twice")
                self._evaluated.add(version)
            case _:
                pass  # the oracle checks no other events

    def _forget_after(self, version: int) -> None:
        self._trained = {ticket: at for ticket, at in self._trained.items() if at < version}
        self._digests = {past: digest for past, digest in self._digests.items() if past <= version}
        self._evaluated = {past for past in self._evaluated if past <= version}
        self.steps = version

    def _judge_batch(self, batch: events.BatchStarted) -> None:
        if self.batches_left is not None:
            self.batches_left -= 1
            if self.batches_left < 0:
                self._violated(f"batch {batch.version} begins after the kernel got a signal")
        for ticket in batch.tickets:
            if self._trained.setdefault(ticket, batch.version) != batch.version:
                self._violated(
                    f"ticket {ticket} is trained at {self._trained[ticket]} and at {batch.version}"
                )
        for row in batch.rows:
            age = self._ages.get(row.id)
            if age is None:
                self._violated(f"{row.id} is trained, and no outcome names it")
            elif batch.version - age > self._bound:
                self._violated(f"{row.id} of version {age} is trained at {batch.version}")

    @property
    def model(self) -> str:
        """Digest of the last version."""
        return self._digests.get(self.steps, "")

    def end(self, summary: dict[str, Any], ledgers: Iterable[Mapping[str, int]], tape: Tape) -> None:
        """Check the end of the run. `ledgers` has the ledger of each step in `metrics.jsonl`."""
        for ledger in [*ledgers, summary.get("ledger", {"issued": 0})]:
            if sum(count for name, count in ledger.items() if name != "issued") != ledger["issued"]:
                self._violated(f"the ledger does not add up: {ledger}")
        members = dict(summary.get("members", {"sampled": 0}))
        num_waiting = members.pop("sampled") - sum(members.values())
        if num_waiting < 0 or (num_waiting and summary["status"] == "completed"):
            self._violated(f"the samples do not add up: {summary['members']}")
        failed = (each for each in summary.get("reasons", ()) if each.startswith(("failed", "not evaluated")))
        causes = [PLANTED, *("insufficient resources" for each in tape.faults if each.kind == "full store")]
        unexplained = [each for each in failed if not any(cause in each for cause in causes)]
        if not tape.may_fail and unexplained:
            self._violated(f"tickets have failed without a cause: {unexplained}")
        if summary["status"] == "completed":
            self._judge_completed(tape)

    def _judge_completed(self, tape: Tape) -> None:
        steps = tape.run["steps"]
        if self.steps != steps:
            self._violated(f"completed at version {self.steps}, not {steps}")
        elif tape.model not in ("", self.model) and not any(fault.changes_model for fault in tape.faults):
            self._violated(f"the last version is {self.model}, and without faults {tape.model}")
        if missing := {*range(1, steps + 1)} - self._digests.keys():
            self._violated(f"no digest of the versions {sorted(missing)} is in the journal")
        if (evaluation := tape.run.get("evaluation")) is not None:
            every = evaluation.get("every") or steps
            if missing := {*range(0, steps, every), steps} - self._evaluated:
                self._violated(f"no evaluation of the versions {sorted(missing)} is in the journal")

    def _violated(self, text: str) -> None:
        self.violations.append(text)
