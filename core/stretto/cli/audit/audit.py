"""`stretto audit RUN`: compare a run's accounts with its journal, kept samples and checkpoints. It computes
all figures again from the stored files, without the kernel's accounting code. Each check reports the versions
that it could check, because a run may keep only some samples."""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain, pairwise
from math import isclose
from pathlib import Path
from typing import Any, Literal

import msgspec

from stretto.bus.messages.events import Evaluation
from stretto.bus.messages.training import RowRef
from stretto.cli.audit import audit_records
from stretto.errors import ConfigError, RunError
from stretto.kernel.durable.changes import values_file
from stretto.records.document import read_document
from stretto.records.events.history import RecordedBatch
from stretto.records.logs import open_log, whole_lines
from stretto.records.metrics import ACCURACY, HELD_OUT_REWARD
from stretto.records.run_folder import RunFolder

_RETIRED = ("filtered", "expired", "failed")
_ATTEMPTS_PER_KERNEL = 1000
"""Each kernel numbers its attempts from a multiple of this number."""
_EVENT = re.compile(r'"event": "([^"]*)"')


class Check(msgspec.Struct, kw_only=True):
    """The result of one check."""

    name: str
    checked: str
    """What the audit compared."""
    unchecked: str = ""
    """What the audit could not compare, and why."""
    violations: list[str]
    empty: bool
    """Whether there was nothing to compare, so that a check without violations proves nothing."""


class AuditReport(msgspec.Struct, kw_only=True):
    """The result of an audit."""

    folder: str
    status: Literal["clean", "violations"]
    lost: int
    """Number of issued tickets that the run does not account for."""
    doubled: int
    """Number of tickets that were trained twice."""
    checks: list[Check]


def audit_run(folder: Path) -> AuditReport:
    """Audit a run that has ended, or whose kernel is dead."""
    run = RunFolder(folder)
    checker = _Checker(run)
    checks = list(checker.checks())
    return AuditReport(
        folder=str(run.folder),
        status="violations" if any(check.violations for check in checks) else "clean",
        lost=checker.lost,
        doubled=checker.doubled,
        checks=checks,
    )


@dataclass(frozen=True)
class _Terms:
    batch_size: int
    max_staleness: int


@dataclass(frozen=True)
class _Account:
    place: str
    version: int
    ledger: Mapping[str, int]
    open: Set[int] | None = None
    reasons: Mapping[str, int] | None = None


class _Checker:
    def __init__(self, run: RunFolder) -> None:
        self._run = run
        folder = run.folder
        self._journal = audit_records.read_journal(folder)
        self._history = history = self._journal.history
        self._samples = audit_records.read_samples(folder)
        self._checkpoints = [*map(audit_records.read_checkpoint, sorted(folder.glob("checkpoints/step-*")))]
        for checkpoint in self._checkpoints:
            if not checkpoint.damage and checkpoint.incarnation > history.incarnation:
                history.enter(checkpoint.incarnation, checkpoint.version)  # this incarnation has no batch yet
        self._batches = dict(sorted(history.batches.items()))
        """Version -> its batch, for all batches in force."""
        self._first = min(self._batches, default=0)
        self._trained_at = {
            ticket: version for version, batch in self._batches.items() for ticket in batch.tickets
        }
        self._step_lines, self._evaluation_lines = run.steps, run.evaluations
        self._summary = audit_records.read_json(folder / "summary.json")
        self._terms: dict[int, _Terms] = {}
        self.lost = 0
        self.doubled = 0

    @property
    def _completed_at(self) -> int | None:
        summary = self._summary
        return summary["version"] if summary is not None and summary["status"] == "completed" else None

    @property
    def _present_version(self) -> int:
        """The newest version whose step is complete."""
        return max(self._history.reached, default=0)

    def checks(self) -> Iterator[Check]:
        yield self._check_journal()
        yield self._check_doubled()
        yield self._check_lost()
        yield self._check_batches()
        yield self._check_staleness()
        yield self._check_samples()
        if self._history.draws:
            yield self._check_draws()
        yield self._check_digests()
        yield self._check_metrics()
        yield self._check_evaluations()
        yield self._check_chain()

    # ------------------------------------------------------------------------------------- journal

    def _check_chain(self) -> Check:
        """Check that messages follow each other, and that those named by files exist unless lost."""
        messages, (named, lost) = self._journal.messages, self._named_messages()
        newest = max((named_message.sequence for named_message in named), default=0)
        later = [message.sequence for message in messages if message.sequence > newest]
        unchecked = [f"messages {_ranges(later)}: no file names a later one"] if later else []
        unchecked += [f"what {_listed(lost)} names: a part of the journal was lost"] if lost else []
        return Check(
            name="journal unaltered",
            checked=f"{len(messages)} messages; {len(named)} are named elsewhere",
            unchecked="; ".join(unchecked),
            violations=[*audit_records.chain_faults(messages, named)],
            empty=not messages,
        )

    def _named_messages(self) -> tuple[list[audit_records.NamedMessage], list[str]]:
        """Return the messages that files name, and the files older than the journal's newest loss."""
        records = [(f"checkpoint {each.name}", each.state) for each in self._checkpoints if not each.damage]
        records += [("summary.json", self._summary)] if self._summary is not None else []
        losses = {place: record["lost"]["journals"] for place, record in records}
        newest = max(losses.values(), default=0)
        named = [
            audit_records.NamedMessage(place, **record["journal"])
            for place, record in records
            if losses[place] == newest
        ]
        return named, [place for place in losses if losses[place] < newest]

    def _check_journal(self) -> Check:
        """Check that each version has one batch, and that the batch came before the step."""
        gaps = [missing for one, two in pairwise(self._batches) for missing in range(one + 1, two)]
        number = self._history.incarnations
        incarnations = f", {number} incarnations" if number > 1 else ""
        return Check(
            name="one batch a version",
            checked=f"versions {_ranges(self._batches)}{incarnations}",
            unchecked=self._before_journal,
            violations=[
                *(
                    f"message {sequence} of the journal is unreadable"
                    for sequence in self._journal.unreadable
                ),
                *(f"version {version} has no batch" for version in gaps),
                *self._journal.batch_faults,
            ],
            empty=not self._batches,
        )

    def _check_doubled(self) -> Check:
        """Check that no ticket and no trajectory is in two batches, or twice in one batch."""
        tickets: defaultdict[int, list[int]] = defaultdict(list)
        rows: defaultdict[str, list[int]] = defaultdict(list)
        faults: list[str] = []
        for version, batch in self._batches.items():
            for ticket in batch.tickets:
                tickets[ticket].append(version)
            for row in batch.rows:
                rows[row.id].append(version)
            faults += _row_faults(version, batch)
        doubled_tickets = {each for each, versions in tickets.items() if len(versions) > 1}
        doubled_rows = {each for each, versions in rows.items() if len(versions) > 1}
        self.doubled = len(doubled_tickets | {int(id.split("/")[0]) for id in doubled_rows})
        return Check(
            name="no ticket twice",
            checked=f"{len(tickets)} tickets, {len(rows)} trajectories, versions {_ranges(self._batches)}",
            unchecked=self._before_journal,
            violations=[*_in_several("ticket", tickets), *_in_several("trajectory", rows), *faults],
            empty=not self._batches,
        )

    def _check_batches(self) -> Check:
        """Check that each batch has `batch_size` tickets, and that a completed run has all its steps."""
        violations = [
            f"the batch of version {version} has {len(batch.tickets)} tickets, expected {size}"
            for version, batch in self._batches.items()
            if len(batch.tickets) != (size := self._terms_at(version).batch_size)
        ]
        present = self._present_version
        if (last := self._completed_at) not in (None, present):
            violations.append(f"summary.json says completed at version {last}; the journal ends at {present}")
        sizes = {self._terms_at(version).batch_size for version in self._batches}
        return Check(
            name="steps x batch_size",
            checked=f"{present} steps, batch_size {_listed(sorted(sizes))}",
            unchecked=self._before_journal,
            violations=violations,
            empty=not self._batches,
        )

    @property
    def _before_journal(self) -> str:
        return _versions(range(self._first), "the journal begins later")

    def _terms_at(self, version: int) -> _Terms:
        number = self._history.values_at(version)
        if number not in self._terms:
            file = values_file(self._run.folder, number)
            try:
                queue = read_document(file)["queue"]
                self._terms[number] = _Terms(queue["batch_size"], queue["max_staleness"])
            except (ConfigError, KeyError, TypeError) as error:
                raise RunError(f"{file}: cannot read `queue` of values {number}: {error}") from error
        return self._terms[number]

    # -------------------------------------------------------------------------------------- ledgers

    def _check_lost(self) -> Check:
        """Check that each ledger accounts for every issued ticket: trained, retired or in flight."""
        accounts = [] if self._first else list(self._accounts())
        trained, highest = [0], [-1]  # of the tickets trained before each version: number, highest
        for version in range(max((account.version for account in accounts), default=0)):
            tickets = self._batches[version].tickets if version in self._batches else ()
            trained.append(trained[-1] + len(tickets))
            highest.append(max(highest[-1], *tickets, -1))
        faults = (
            self._account_faults(each, trained[each.version], highest[each.version]) for each in accounts
        )
        return Check(
            name="no ticket lost",
            checked=f"{len(accounts)} ledgers at versions {_ranges(account.version for account in accounts)}",
            unchecked=self._before_journal,
            violations=[*chain.from_iterable(faults)],
            empty=not accounts,
        )

    def _accounts(self) -> Iterator[_Account]:
        for line in self._step_lines:
            yield _Account(f"metrics.jsonl, step {line['step']}", line["step"], line["ledger"])
        for each in self._checkpoints:
            if not each.damage and self._is_in_force(each.incarnation, each.version):
                snapshot = each.state["snapshot"]
                facts = snapshot["ledger"], {each["id"] for each in snapshot["open"]}, snapshot["reasons"]
                yield _Account(f"checkpoint {each.name}", each.version, *facts)
        if self._summary is not None:
            summary = self._summary
            yield _Account("summary.json", summary["version"], summary["ledger"], None, summary["reasons"])

    def _account_faults(self, account: _Account, trained: int, highest: int) -> Iterator[str]:
        """Yield an account's faults. Trained before it: `trained` tickets, up to `highest` (-1: none)."""
        ledger, place = account.ledger, account.place
        accounted = sum(ledger[name] for name in ("trained", *_RETIRED, "in_flight"))
        self.lost = max(self.lost, ledger["issued"] - accounted, ledger["trained"] - trained)
        if accounted != ledger["issued"]:
            yield f"{place}: issued {ledger['issued']} tickets, and accounts for {accounted}"
        if ledger["trained"] != trained:
            yield f"{place}: says {ledger['trained']} tickets trained; the journal has {trained}"
        if highest >= ledger["issued"]:
            yield f"{place}: issued {ledger['issued']} tickets, but the journal trained ticket {highest}"
        if account.open is not None:
            if len(account.open) != ledger["in_flight"]:
                yield f"{place}: {ledger['in_flight']} tickets in flight, {len(account.open)} open"
            for ticket in sorted(account.open):
                if self._trained_at.get(ticket, account.version) < account.version:
                    yield f"{place}: ticket {ticket} is open, but the journal trained it"
        if account.reasons is not None:
            for name in _RETIRED:
                counts = [count for text, count in account.reasons.items() if text.startswith(f"{name}: ")]
                if sum(counts) != ledger[name]:
                    yield f"{place}: {ledger[name]} tickets {name}, with reasons for {sum(counts)}"

    def _is_in_force(self, incarnation: int, version: int) -> bool:
        trained_batch = self._batches.get(version - 1)
        return (
            incarnation == self._history.incarnation
            or (trained_batch is not None and trained_batch.incarnation == incarnation)
            or version == 0
        )

    # -------------------------------------------------------------------------------------- samples

    def _check_staleness(self) -> Check:
        """Check that trained tokens are at most `max_staleness` old; without samples, by metrics.jsonl."""
        violations: list[str] = []
        checked: Counter[int] = Counter()
        left_out: set[int] = set()
        largest = 0
        for version, row in self._rows():
            if (facts := self._samples.trained.get(row.id)) is None:
                left_out.add(version)
                continue
            bound = self._terms_at(version).max_staleness
            checked[version] += 1
            largest = max(largest, version - facts.oldest)
            if not version - bound <= facts.oldest <= facts.newest <= version:
                violations.append(
                    f"trajectory {row.id} of version {version}: tokens of versions {facts.oldest} to "
                    f"{facts.newest}, allowed {version - bound} to {version}"
                )
        for line in self._step_lines:
            version = line["step"] - 1
            if "staleness_max" in line and version in self._batches:
                bound = self._terms_at(version).max_staleness
                if line["staleness_max"] > bound:
                    violations.append(
                        f"step {version + 1} has staleness_max {line['staleness_max']}, allowed {bound}"
                    )
        return Check(
            name="staleness of each token",
            checked=f"{checked.total()} trajectories of versions {_ranges(checked)}, largest {largest}"
            if checked
            else "no trajectory",
            unchecked=_versions(left_out, "not all samples are kept, only staleness_max in metrics.jsonl"),
            violations=violations,
            empty=not checked,
        )

    def _check_samples(self) -> Check:
        """Check that kept samples match their columns, and that the trained rows of a group are its kept
        samples, in order and with the lengths in the journal."""
        violations = list(self._samples.faults)
        checked: set[int] = set()
        for version, batch in self._batches.items():
            by_attempt: defaultdict[tuple[int, int], list[RowRef]] = defaultdict(list)
            for row in batch.rows:
                if row.length:
                    by_attempt[row.group, row.attempt].append(row)
            kept_attempts = {attempt for attempt in by_attempt if attempt in self._samples.members}
            if by_attempt and len(kept_attempts) == len(by_attempt):
                checked.add(version)
            for attempt in kept_attempts:
                violations += self._group_faults(version, by_attempt[attempt])
        unchecked = {version for version, _ in self._rows()} - checked
        return Check(
            name="trained samples",
            checked=f"versions {_ranges(checked)}, {len(self._samples.trained)} kept samples",
            unchecked=_versions(unchecked, "not all samples are kept"),
            violations=violations,
            empty=not checked,
        )

    def _group_faults(self, version: int, rows: Sequence[RowRef]) -> Iterator[str]:
        attempt = rows[0].group, rows[0].attempt
        if (kept := self._samples.members[attempt]) != (trained := [row.id for row in rows]):
            where = f"group {attempt[0]}/{attempt[1]} of version {version}"
            yield f"{where}: {_listed(trained)} were trained; its samples are {_listed(kept)}"
        for row in rows:
            facts = self._samples.trained.get(row.id)
            if facts is not None and facts.length != row.length:
                yield (
                    f"trajectory {row.id} of version {version}: its sample has {facts.length} tokens, "
                    f"expected {row.length}"
                )

    def _check_draws(self) -> Check:
        """Check that each ticket has one draw in the journal, and that its samples are of the drawn row."""
        draws = self._history.draws
        sampled = {(facts.ticket, facts.row) for facts in self._samples.trained.values()}
        return Check(
            name="draws in the journal",
            checked=f"{len(draws)} draws; samples of {len({ticket for ticket, _ in sampled})} tickets",
            violations=[
                *self._journal.draw_faults,
                *(
                    f"ticket {ticket} sampled row {row}; its draw in the journal: {draws.get(ticket, 'none')}"
                    for ticket, row in sorted(sampled)
                    if draws.get(ticket) != row
                ),
            ],
            empty=False,
        )

    def _rows(self) -> Iterator[tuple[int, RowRef]]:
        """Yield (version, row) for the sampled rows of all batches in force. Dataset rows have length 0."""
        for version, batch in self._batches.items():
            yield from ((version, row) for row in batch.rows if row.length)

    # -------------------------------------------------------------------------------------- digests

    def _check_digests(self) -> Check:
        """Check that checkpoints match their manifests, and that all records of a version have one digest."""
        records: defaultdict[tuple[int, int], list[tuple[str, str]]] = defaultdict(list)
        for (incarnation, version), digests in self._history.digests.items():
            records[incarnation, version] += [("the journal", digest) for digest in digests]
        violations: list[str] = []
        for saved in self._checkpoints:
            if saved.damage:
                violations.append(f"checkpoint {saved.name}: {saved.damage}")
                continue
            key = saved.incarnation, saved.version
            begins_incarnation = saved.incarnation > 0 and saved.version not in {
                version for incarnation, version in self._history.digests if incarnation == saved.incarnation
            }  # a repeated step gave other weights than the journal recorded
            if saved.version > self._first and key not in records and not begins_incarnation:
                violations.append(
                    f"checkpoint {saved.name}: the journal has no step to version {saved.version}"
                )
            records[key].append((f"checkpoint {saved.name}", saved.state["digest"]))
        for (incarnation, version), digests in sorted(records.items()):
            if len({digest for _, digest in digests}) > 1:
                listed = ", ".join(f"{place} has {digest[:12]}" for place, digest in digests)
                violations.append(f"version {version} of incarnation {incarnation}: {listed}")
        several = sum(len(digests) > 1 for digests in records.values())
        repeated, differed = self._repetitions()
        return Check(
            name="digests",
            checked=f"{len(self._checkpoints)} checkpoints against their manifests; {len(records)} versions, "
            f"{several} recorded more than once; the kernels repeated {repeated} steps to the same digest"
            + (f" and {differed} to another one" if differed else ""),
            violations=violations,
            empty=not records,
        )

    def _repetitions(self) -> tuple[int, int]:
        if "kernel" not in self._run.logs():
            return 0, 0
        with open_log(self._run.folder, "kernel") as log:
            events = Counter(name for line in whole_lines(log) for name in _EVENT.findall(line))
        return events["step repeated"], events["repetition differs"]

    # --------------------------------------------------------------------------- metrics, evaluations

    def _check_metrics(self) -> Check:
        steps, present = [line["step"] for line in self._step_lines], self._present_version
        violations: list[str] = []
        if steps != list(range(1, len(steps) + 1)):
            wrong = next(index for index, step in enumerate(steps, 1) if step != index)
            violations.append(f"line {wrong} of the steps is that of step {steps[wrong - 1]}")
        # The line of a step is written before the step's weights are published, during the next step.
        if len(steps) > present + (present in self._batches):
            violations.append(f"{len(steps)} steps; the journal has {present}")
        missing = range(len(steps) + 1, present + 1)
        if missing and self._completed_at is not None:
            violations.append(f"steps {_ranges(missing)} have no line")
        return Check(
            name="metrics.jsonl",
            checked=f"steps {_ranges(steps)}",
            unchecked=f"steps {_ranges(missing)}: the run ended before it wrote them; a resume writes them"
            if missing and self._completed_at is None
            else "",
            violations=violations,
            empty=not steps,
        )

    def _check_evaluations(self) -> Check:
        """Check that each evaluated version has one result, from tokens of exactly this version."""
        results: dict[tuple[int, int], Evaluation] = {}
        violations: list[str] = []
        for evaluation in self._history.evaluations:
            key = evaluation.incarnation, evaluation.result.version
            if key in results:
                violations.append(f"version {key[1]} has two results in incarnation {key[0]}")
            results[key] = evaluation.result
        answers: defaultdict[int, list[audit_records.TrajectoryFacts]] = defaultdict(list)
        for facts in self._samples.evaluated:
            answers[facts.oldest].append(facts)
            if facts.oldest != facts.newest:
                versions = _ranges((facts.oldest, facts.newest))
                violations.append(f"evaluation sample {facts.id} has tokens of versions {versions}")
        recomputed: set[int] = set()
        for result in results.values():
            samples, score = _result_of(answers[result.version])
            if score is None or samples < result.samples:
                continue  # several kernels evaluated the version, or not all answers are kept
            recomputed.add(result.version)
            known = result.reward if result.accuracy is None else result.accuracy
            if samples != result.samples or not isclose(score, known or 0.0, abs_tol=1e-9):
                reported = f"{result.samples} samples, score {known}"
                kept = f"the kept ones are {samples}, score {score}"
                violations.append(f"the evaluation of version {result.version}: {reported}; {kept}")
        violations += self._evaluation_line_faults(results.values())
        versions = {version for _, version in results}
        left_out = _versions(versions - recomputed, "not all their samples are kept")
        return Check(
            name="evaluations of one version",
            checked=f"versions {_ranges(versions)}; recomputed from samples: {_ranges(recomputed)}",
            unchecked="; ".join(filter(None, [self._before_journal, left_out])),
            violations=violations,
            empty=not results,
        )

    def _evaluation_line_faults(self, results: Collection[Evaluation]) -> Iterator[str]:
        written = Counter(line["step"] for line in self._evaluation_lines)
        for version, count in written.items():
            if count > 1:
                yield f"metrics.jsonl has {count} evaluations of version {version}"
        recorded = {(each.version, each.samples, each.accuracy, each.reward) for each in results}
        for line in self._evaluation_lines:
            figures = line["step"], line["evaluation/samples"], line.get(ACCURACY), line.get(HELD_OUT_REWARD)
            is_older = self._before_journal and line["step"] <= self._first
            if figures not in recorded and not is_older:
                yield f"metrics.jsonl: the evaluation of version {line['step']} is not in the journal"
        if self._completed_at is not None:
            for version in sorted({each.version for each in results} - written.keys()):
                yield f"metrics.jsonl lacks the evaluation of version {version}"


def _in_several(what: str, batches: Mapping[Any, Sequence[int]]) -> Iterator[str]:
    for each, versions in batches.items():
        if len(versions) > 1:
            yield f"{what} {each} is in the batches of versions {_listed(versions)}"


def _row_faults(version: int, batch: RecordedBatch) -> Iterator[str]:
    attempts: defaultdict[int, set[str]] = defaultdict(set)
    for row in batch.rows:
        ticket, attempt, _ = row.id.split("/")
        attempts[row.group].add(attempt)
        if ticket != str(row.group) or row.group not in batch.tickets:
            yield f"trajectory {row.id} of version {version} belongs to no ticket of its batch"
    for ticket in batch.tickets:
        if len(attempts[ticket]) != 1:
            yield f"ticket {ticket} of version {version} has rows of {len(attempts[ticket])} attempts"


def _result_of(answers: Sequence[audit_records.TrajectoryFacts]) -> tuple[int, float | None]:
    """Return an evaluation's number of samples, and their mean accuracy, or mean reward if one lacks it.
    The mean is None without samples, or if several kernels evaluated: the first kernel's do not count."""
    first_attempts: dict[int, int] = {}
    for answer in answers:
        first_attempts.setdefault(answer.ticket, answer.attempt)  # the first complete attempt counts
    samples: dict[tuple[int, int], audit_records.TrajectoryFacts] = {}
    for answer in answers:
        if first_attempts[answer.ticket] == answer.attempt:
            samples.setdefault((answer.ticket, answer.sample), answer)  # the first part of the sample
    all_scored = all(answer.accuracy is not None for answer in samples.values())
    scores = [(answer.accuracy if all_scored else answer.reward) or 0.0 for answer in samples.values()]
    one_kernel = len({answer.attempt // _ATTEMPTS_PER_KERNEL for answer in answers}) == 1
    return len(samples), sum(scores) / len(scores) if one_kernel else None


def _ranges(numbers: Iterable[int]) -> str:
    """Return numbers as text, such as `0-3, 7`."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    texts = [str(start) if start == end else f"{start}-{end}" for start, end in parts]
    return ", ".join(texts) or "none"


def _versions(numbers: Collection[int], reason: str) -> str:
    return f"versions {_ranges(numbers)}: {reason}" if numbers else ""


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values))
