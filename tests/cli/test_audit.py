"""`stretto audit`: a clean run is clean, and each hand-made violation in its files is found."""

import copy
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest

from commands import stretto
from kept_samples import Kept
from sample_messages import done, record, trained, trajectories
from stretto.array import Array
from stretto.bus.messages.events import (
    BatchStarted,
    Evaluation,
    EvaluationEnded,
    Event,
    EventBatch,
    RunOwned,
    VersionPublished,
)
from stretto.bus.messages.tickets import GroupDone, TicketRecord, TrajectoryBundle
from stretto.bus.messages.training import RowRef
from stretto.bus.payloads import encode
from stretto.bus.server import lock_run
from stretto.cli.audit.audit import AuditReport, audit_run
from stretto.cli.audit.audit_records import JournalMessage, NamedMessage, chain_faults
from stretto.errors import RunError
from stretto.records.events.files import FOLDER, file_name, record_of

STEPS, BATCH, GROUP, BOUND = 4, 2, 2, 1
TOKENS = 4


class Books:
    """What a small run has written. A test may doctor it before it goes into files."""

    def __init__(self) -> None:
        self.batch_sizes = {1: BATCH}
        self.groups: dict[int, tuple[TrajectoryBundle, TicketRecord, GroupDone]] = {}
        self.journal: list[Event] = []
        self.alter: Callable[[list[EventBatch]], list[EventBatch]] = lambda batches: batches
        for ticket in range((STEPS + 1) * BATCH):  # a batch more than is trained
            bundle, kept = trajectories(ticket, version=max(0, ticket // BATCH - BOUND)), record(ticket)
            self.groups[ticket] = bundle, kept, done(bundle, kept)
        for version in range(STEPS):
            self.journal.append(self.batch(version, *range(BATCH * version, BATCH * (version + 1))))
            self.journal.append(VersionPublished(0, version + 1, f"digest-{version + 1}"))
        self.answers = trajectories(0, purpose="eval", version=STEPS, reward=0.5)
        self.journal.append(EvaluationEnded(Evaluation(STEPS, 0.5, GROUP, 0)))
        self.metrics: list[dict[str, Any]] = [
            {"step": step, "ledger": ledger(step), "staleness_max": BOUND} for step in range(1, STEPS + 1)
        ]
        self.metrics.append(
            {"step": STEPS, "evaluation/accuracy": 0.5, "evaluation/samples": GROUP, "evaluation/failed": 0}
        )
        accounts = {"ledger": ledger(STEPS), "reasons": {}}
        names = {"version": STEPS, "journal": {"sequence": 0, "digest": ""}, "lost": {"journals": 0}}
        opened = [{"id": ticket} for ticket in range(STEPS * BATCH, (STEPS + 1) * BATCH)]
        self.checkpoint: dict[str, Any] = {**names, "incarnation": 0, "digest": f"digest-{STEPS}"}
        self.checkpoint["snapshot"] = {**accounts, "open": opened}
        self.summary: dict[str, Any] = {**names, "status": "interrupted", **copy.deepcopy(accounts)}

    def batch(self, version: int, *tickets: int) -> BatchStarted:
        rows = tuple(
            RowRef(each.id, 1, index, ticket, TOKENS)
            for ticket in tickets
            for index, each in enumerate(self.groups[ticket][0].trajectories)
        )
        return BatchStarted(version, tickets, rows)

    def write(self, folder: Path) -> Path:
        folder.mkdir()
        numbers = sorted(self.batch_sizes)
        for number in numbers:
            name = "config.yaml" if number == numbers[-1] else f"config-{number}.yaml"
            size = self.batch_sizes[number]
            (folder / name).write_text(f"queue: {{batch_size: {size}, max_staleness: {BOUND}}}\n")
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in self.metrics))
        (folder / "summary.json").write_text(json.dumps(self.summary))
        self.write_checkpoint(folder / "checkpoints" / f"step-{STEPS:06d}")
        self._write_events(folder / FOLDER)
        self._keep_samples(Kept(folder))
        return folder

    def write_checkpoint(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "kernel.json").write_text(json.dumps(self.checkpoint))
        hashes = {"kernel.json": hashlib.sha256((folder / "kernel.json").read_bytes()).hexdigest()}
        (folder / "manifest.json").write_text(json.dumps(hashes))

    def _write_events(self, folder: Path) -> None:
        folder.mkdir()
        batches = self.alter([*chained((owned(0, 0), *self.journal))])
        records = (record_of(number, encode(batch)) for number, batch in enumerate(batches, start=1))
        (folder / file_name(1, 1)).write_bytes(b"".join(records))

    def _keep_samples(self, kept: Kept) -> None:
        for messages in self.groups.values():
            kept.add(*messages)
        for ticket, (bundle, *_) in self.groups.items():
            kept.add(trained([each.id for each in bundle.trajectories], version=ticket // BATCH))
        answers = record(0, purpose="eval")
        kept.add(self.answers, answers, done(self.answers, answers))
        kept.flush()


def chained(events: Iterable[Event]) -> Iterator[EventBatch]:
    former = ""
    for number, event in enumerate(events):
        batch = EventBatch(1, number, (msgspec.Raw(msgspec.msgpack.encode(event)),), (0.0,), former)
        former = batch.digest
        yield batch


def owned(incarnation: int, version: int, values: int = 1) -> RunOwned:
    return RunOwned(incarnation, version, values, "layout", 0)


def ledger(step: int) -> dict[str, int]:
    trained = BATCH * step
    accounts = {"trained": trained, "filtered": 0, "expired": 0, "failed": 0, "in_flight": BATCH}
    return {"issued": trained + BATCH, **accounts}


def violations(report: AuditReport) -> list[str]:
    return [f"{check.name}: {violation}" for check in report.checks for violation in check.violations]


# ------------------------------------------------------------------------------------ clean books


def test_clean_books_are_clean_and_what_is_not_kept_is_named(tmp_path: Path) -> None:
    books = Books()
    write_versions(books, -7, -7, 1, 1)  # those outside of the loss mask do not count
    for ticket in range(4):  # the groups of versions 0 and 1
        del books.groups[ticket]
    folder = books.write(tmp_path / "run")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    report = audit_run(folder)
    assert violations(report) == []
    assert (report.status, report.lost, report.doubled) == ("clean", 0, 0)
    checks = {check.name: check for check in report.checks}
    assert checks["no ticket twice"].checked == "8 tickets, 16 trajectories, versions 0-3"
    assert checks["no ticket lost"].checked == "6 ledgers at versions 1-4"
    assert checks["staleness of each token"].checked == "8 trajectories of versions 2-3, largest 1"
    assert checks["staleness of each token"].unchecked.startswith("versions 0-1: not all samples are kept")
    assert checks["trained samples"].checked.startswith("versions 2-3, ")
    assert checks["evaluations of one version"].checked == "versions 4; recomputed from samples: 4"
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_the_command_prints_a_table_or_one_object(tmp_path: Path) -> None:
    books = Books()
    books.summary["ledger"]["issued"] += 1
    books.groups.clear()
    folder = books.write(tmp_path / "run")
    table = stretto("audit", folder)
    assert table.returncode == 1, table.stderr
    assert "no ticket lost: summary.json: issued 11 tickets, and accounts for 10" in table.stdout
    assert re.search(r"trained samples +nothing to check", table.stdout)
    assert re.search(r"metrics.jsonl +ok", table.stdout)
    assert f"violations: 1 tickets lost, 0 trained twice, in {folder}" in table.stdout
    found = stretto("audit", folder, "--json")
    assert found.returncode == 1
    assert msgspec.json.decode(found.stdout, type=AuditReport) == audit_run(folder)
    (folder / "config.yaml").unlink()
    refused = stretto("audit", folder)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == f"error: {folder} holds no run: it has no config.yaml\n"


def test_a_run_that_a_kernel_owns_is_refused(tmp_path: Path) -> None:
    folder = Books().write(tmp_path / "run")
    with (
        lock_run(folder / "bus"),
        pytest.raises(RunError, match=r"is owned by pid \d+.*; try again when it has"),
    ):
        audit_run(folder)


def test_what_was_named_before_a_part_of_the_journal_was_lost_need_not_be_there(tmp_path: Path) -> None:
    books = Books()
    books.checkpoint["journal"] = {"sequence": 300, "digest": "of a journal that is lost"}
    books.summary |= {"lost": {"journals": 1}, "journal": {"sequence": 0, "digest": ""}}
    report = audit_run(books.write(tmp_path / "run"))
    assert violations(report) == []
    assert "what checkpoint step-000004 names" in report.checks[-1].unchecked


def test_a_new_incarnation_replaces_the_batches_from_its_first_version_on(tmp_path: Path) -> None:
    """The step to version 3 was repeated to other weights; tickets 6 and 7 expired, 8 and 9 came instead."""
    books = Books()
    books.journal += [owned(1, 3), books.batch(3, 8, 9), VersionPublished(1, 4, "another digest")]
    accounts = {"trained": 8, "filtered": 0, "expired": 2, "failed": 0, "in_flight": 0}
    books.metrics[3]["ledger"] = books.summary["ledger"] = {"issued": 10, **accounts}
    books.summary["reasons"] = {"expired: sampled by weights of incarnation 0": 2}
    books.checkpoint |= {
        "incarnation": 1,
        "digest": "another digest",
        "snapshot": {"ledger": books.summary["ledger"], "open": [], "reasons": books.summary["reasons"]},
    }
    report = audit_run(books.write(tmp_path / "run"))
    assert violations(report) == []
    assert report.checks[0].checked == "versions 0-3, 2 incarnations"


def test_batches_have_the_size_of_the_values_in_force(tmp_path: Path) -> None:
    books = Books()
    books.batch_sizes = {1: BATCH, 2: 1}
    books.journal.insert(6, owned(0, 3, values=2))
    assert violations(audit_run(books.write(tmp_path / "run"))) == [
        "steps x batch_size: the batch of version 3 has 2 tickets, expected 1"
    ]


# ------------------------------------------------------------------------------- an altered journal


def altered(batch: EventBatch) -> EventBatch:
    return msgspec.structs.replace(batch, events=(*batch.events, batch.events[0]))


def alteration(batches: list[EventBatch], random: Random) -> tuple[list[EventBatch], set[int]]:
    """A journal of which one message was altered, removed, moved or inserted, and the numbers of the messages
    that may be named. Numbers begin with 1."""
    place, other = sorted(random.sample(range(len(batches)), 2))
    changed = list(batches)
    kind = random.choice(["alter", "remove", "swap", "insert"])
    if kind == "alter":
        changed[place] = altered(changed[place])
    elif kind == "remove":
        del changed[place]
    elif kind == "swap":
        changed[place], changed[other] = changed[other], changed[place]
        return changed, {place + 1, place + 2, other + 1, other + 2}
    else:
        changed.insert(place, altered(changed[place]))
    return changed, {place + 1, place + 2, len(batches)}


def messages_of(batches: list[EventBatch]) -> list[JournalMessage]:
    return [JournalMessage(n, batch.digest, batch.former) for n, batch in enumerate(batches, 1)]


def test_each_alteration_of_the_journal_is_found_and_named() -> None:
    batches = [*chained(VersionPublished(0, version, "digest") for version in range(40))]
    head = NamedMessage("summary.json", len(batches), batches[-1].digest)
    assert [*chain_faults(messages_of(batches), [head])] == []
    for seed in range(1000):
        changed, places = alteration(batches, Random(seed))
        named = [int(fault.split()[1].strip(",")) for fault in chain_faults(messages_of(changed), [head])]
        assert named, seed
        assert named[0] in places, seed


def test_a_journal_that_ends_early_is_not_called_altered() -> None:
    batches = [*chained(VersionPublished(0, version, "digest") for version in range(101))]
    head = NamedMessage("checkpoint step-000001", 1, batches[0].digest)
    for end in range(1, 101):
        assert [*chain_faults(messages_of(batches[:end]), [head])] == []
    assert [*chain_faults([], [head])] == ["message 1, which checkpoint step-000001 names, is not there"]


@pytest.mark.parametrize(
    ("place", "stays", "said"),
    [
        (3, True, "message 5 does not follow message 4"),
        (3, False, "message 4 does not follow message 3"),
        (9, True, "message 10, which summary.json names, was altered"),
        (9, False, "message 10, which summary.json names, is not there"),
    ],
)
def test_an_altered_journal_in_a_store_is_found(tmp_path: Path, place: int, stays: bool, said: str) -> None:
    books = Books()
    batches = [*chained((owned(0, 0), *books.journal))]
    books.summary["journal"] = {"sequence": len(batches), "digest": batches[-1].digest}
    changed = [altered(batches[place])] if stays else []
    books.alter = lambda each: [*each[:place], *changed, *each[place + 1 :]]
    found = violations(audit_run(books.write(tmp_path / "run")))
    assert any(f"journal unaltered: {said}" in each for each in found), found


# ----------------------------------------------------------------------------- hand-made violations


def change_rows(books: Books, change: Callable[[list[RowRef]], list[RowRef]]) -> None:
    batch: Any = books.journal[4]
    books.journal[4] = msgspec.structs.replace(batch, rows=tuple(change([*batch.rows])))


def write_versions(books: Books, *versions: int, honest: bool = True) -> None:
    """Give the tokens of a trajectory of ticket 5 these versions. It is of the batch of version 2, where 1 is
    allowed."""
    bundle, kept, told = books.groups[5]
    one, other = bundle.trajectories
    other = msgspec.structs.replace(other, versions=Array.of(versions, np.int32))
    bundle = msgspec.structs.replace(bundle, trajectories=(one, other))
    books.groups[5] = bundle, kept, done(bundle, kept) if honest else told


def mix_an_evaluation(books: Books) -> None:
    one, other = books.answers.trajectories
    mixed = msgspec.structs.replace(one, versions=Array.of([-1, -1, STEPS - 1, STEPS], np.int32))
    books.answers = msgspec.structs.replace(books.answers, trajectories=(mixed, other))


Violation = tuple[Callable[[Books], Any], *tuple[str, ...]]
VIOLATIONS: list[Violation] = [
    (lambda books: books.journal.__setitem__(4, books.batch(2, 0, 5)),
     "no ticket twice: ticket 0 is in the batches of versions 0, 2", "trajectory 0/1/0 is in"),
    (lambda books: change_rows(books, lambda rows: [*rows, rows[-1]]),
     "trajectory 5/1/1 is in the batches of versions 2, 2"),
    (lambda books: books.journal.append(books.batch(3, 8, 9)),
     "one batch a version: version 3 has two batches in incarnation 0"),
    (lambda books: books.journal.__delitem__(2), "version 1 has no batch",
     "to version 2 has no earlier batch"),
    (lambda books: books.metrics[2]["ledger"].update(in_flight=1),
     "no ticket lost: metrics.jsonl, step 3: issued 8 tickets, and accounts for 7"),
    (lambda books: books.checkpoint["snapshot"]["open"][0].update(id=3),
     "no ticket lost: checkpoint step-000004: ticket 3 is open, but the journal trained it"),
    (lambda books: books.summary["ledger"].update(trained=9, in_flight=1),
     "summary.json: says 9 tickets trained; the journal has 8"),
    (lambda books: books.summary["ledger"].update(failed=1, in_flight=1),
     "summary.json: 1 tickets failed, with reasons for 0"),
    (lambda books: write_versions(books, -1, -1, 0, 1),
     "staleness of each token: trajectory 5/1/1 of version 2: tokens of versions 0 to 1, allowed 1"),
    (lambda books: write_versions(books, -1, -1, 1, 2, honest=False),
     "trained samples: group 5/1: its samples differ from their digest"),
    (lambda books: books.metrics[1].update(staleness_max=2),
     "staleness of each token: step 2 has staleness_max 2, allowed 1"),
    (lambda books: change_rows(books, lambda rows: [*rows[:2], rows[3], rows[2]]),
     "trained samples: group 5/1 of version 2: 5/1/1, 5/1/0 were trained; its samples are 5/1/0, 5/1/1"),
    (lambda books: change_rows(books, lambda rows: [*rows[:3], msgspec.structs.replace(rows[3], length=7)]),
     "trajectory 5/1/1 of version 2: its sample has 4 tokens, expected 7"),
    (lambda books: books.checkpoint.update(digest="other"),
     "digests: version 4 of incarnation 0: the journal has digest-4, checkpoint step-000004 has other"),
    (lambda books: books.journal.append(VersionPublished(0, 2, "other")),
     "digests: version 2 of incarnation 0: the journal has digest-2, the journal has other"),
    (lambda books: books.metrics.pop(1), "metrics.jsonl: line 2 of the steps is that of step 3"),
    (lambda books: books.metrics.insert(2, books.metrics[1]),
     "metrics.jsonl: line 3 of the steps is that of step 2", "metrics.jsonl: 5 steps; the journal has 4"),
    (lambda books: books.summary.update(status="completed", version=STEPS - 1, ledger=ledger(STEPS - 1)),
     "steps x batch_size: summary.json says completed at version 3; the journal ends at 4"),
    (mix_an_evaluation,
     "evaluations of one version: evaluation sample eval-0/1/0 has tokens of versions 3-4"),
    (lambda books: books.journal.__setitem__(-1, EvaluationEnded(Evaluation(STEPS, 0.9, GROUP, 0))),
     "the evaluation of version 4: 2 samples, score 0.9; the kept ones are 2, score 0.5"),
    (lambda books: books.journal.append(books.journal[-1]),
     "evaluations of one version: version 4 has two results in incarnation 0"),
]  # fmt: skip


@pytest.mark.parametrize("violation", VIOLATIONS, ids=lambda violation: violation[1])
def test_a_violation_is_found(tmp_path: Path, violation: Violation) -> None:
    doctor, *expected = violation
    books = Books()
    doctor(books)
    report = audit_run(books.write(tmp_path / "run"))
    assert report.status == "violations"
    found = "\n".join(violations(report))
    assert all(words in found for words in expected), found


def test_a_checkpoint_that_is_not_what_its_manifest_says_is_found(tmp_path: Path) -> None:
    folder = Books().write(tmp_path / "run")
    checkpoint = folder / "checkpoints" / f"step-{STEPS:06d}"
    (checkpoint / "kernel.json").write_text((checkpoint / "kernel.json").read_text() + "\n")
    (checkpoint / "stray.bin").write_bytes(b"")
    found = violations(audit_run(folder))
    assert found == [
        "digests: checkpoint step-000004: kernel.json differs from its hash; stray.bin: unexpected or missing"
    ]


@pytest.mark.parametrize(
    ("version", "fault"), [(2, []), (3, ["metrics.jsonl: the evaluation of version 3 is not in the journal"])]
)
def test_an_evaluation_from_before_the_journal_begins_is_not_missed(
    tmp_path: Path, version: int, fault: list[str]
) -> None:
    """The store of a run was lost at version 2, and its journal began again."""
    books = Books()
    books.journal = books.journal[4:]
    figures = {"evaluation/accuracy": 0.25, "evaluation/samples": GROUP, "evaluation/failed": 0}
    books.metrics.append({"step": version, **figures})
    checks = {check.name: check for check in audit_run(books.write(tmp_path / "run")).checks}
    check = checks["evaluations of one version"]
    assert check.violations == fault
    assert check.unchecked == "versions 0-1: the journal begins later"
