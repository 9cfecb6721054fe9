"""The figures of a step, which the kernel writes into the journal."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import pstdev
from typing import get_args

import msgspec

from stretto.algorithm import are_equal
from stretto.bus.messages.events import Cause, StepMeasured
from stretto.bus.messages.inference import SwapDone
from stretto.bus.messages.tickets import GroupDone, Member
from stretto.kernel.calls.trainers import StepResult
from stretto.kernel.schedule.commands import StartBatch
from stretto.kernel.schedule.outcomes import without_details
from stretto.kernel.schedule.variants import Account, VariantAccount, figures_of, metric_figures
from stretto.kernel.setup import RunSetup
from stretto.machine.cores import CoreMeter
from stretto.reward import plain_number
from stretto.user_code.faults import FaultKind
from stretto.weights import WeightsNote

_MOST_METRICS = 1000
"""Maximum number of reward metrics among a step's figures: the first ones in alphabetical order."""
_SOME_RUNS = frozenset({"ticket_tool_s", "ticket_environment_s", "ticket_own_s"})
"""Parts of a ticket's time that only some runs have. Each is left out of the figures while it is always 0."""
_MOST_CAUSES = 8
"""Maximum number of causes that a step names for tickets that were not trained."""


class StepMeter:
    """Measures the steps of one kernel."""

    def __init__(self, setup: RunSetup) -> None:
        self._scheduler = setup.scheduler
        self._fleet = setup.fleet
        self._facts = setup.facts
        self._waits = setup.waits
        self._sampled = setup.graph.samples
        self._source_of = setup.sources["dataset"]
        self._reasons = Counter(setup.resumed[1].snapshot.reasons if setup.resumed else {})
        """Number of tickets that were not trained, by reason, up to the newest step."""
        self._parts: set[str] = set()
        """Parts of a ticket's time that have a figure."""
        self._cores = CoreMeter()
        self._of_versions: dict[str, float] = {}
        """Bytes, publish time and fetch time of the newest version, since the previous step."""

    def published(self, note: WeightsNote) -> None:
        """Record the size and publish time of a version, before an engine fetches the version."""
        self._of_versions |= {"version_bytes": note.fetched_bytes, "publish_s": note.publish_s}

    def received(self, done: SwapDone) -> None:
        """Record an engine's time to fetch the newest version. The slowest engine counts."""
        slowest = max(self._of_versions.get("receive_s", 0.0), done.receive_s)
        self._of_versions["receive_s"] = slowest

    def measure(
        self,
        start: StartBatch,
        result: StepResult,
        waits: tuple[tuple[Cause, float], ...],
        generate_busy_s: float,
        divergence: float | None,
        *,
        repeated: bool = False,
    ) -> StepMeasured:
        """Return the figures of a step after its `StepTrained` event. A repeated step has no `waits`."""
        self._waits.begin()
        statistics = dict(result.statistics)
        of_batch = self._of_samples(start) if self._sampled else {}
        tokens = int(of_batch.pop("tokens", statistics.pop("tokens", 0)))
        self._facts.trained_tokens += tokens
        statistics |= self._of_variants(start) if self._sampled else {}
        statistics |= self._of_sources(start) | self._scheduler.draws.figures() | self._of_gate(divergence)
        cores = self._cores.read()
        return StepMeasured(
            version=result.version,
            repeated=repeated,
            began=result.began,
            train_s=result.seconds,
            tickets=tuple(group.ticket for group in start.groups),
            waits=tuple((cause, round(seconds, 4)) for cause, seconds in waits),
            tokens=tokens,
            of_batch=of_batch,
            statistics={name: _figure(plain_number(value, name)) for name, value in statistics.items()},
            of_engines=self._of_engines(start) if self._sampled else {},
            engines=len(self._fleet.of("inference")),
            generate_busy_s=generate_busy_s,
            verify_busy_s=self._fleet.busy_s("verifier"),
            cores_used=round(cores.used, 4),
            cores_idle=round(cores.idle, 4),
            memory_used=round(cores.memory, 3),
            cores_of_roles={role: round(share, 4) for role, share in cores.of_roles.items()},
            calls=tuple(result.times),
            skipped=tuple(result.skipped),
            ledger=msgspec.to_builtins(self._scheduler.ledger),
            variants={name: counts(account) for name, account in self._scheduler.variants.accounts.items()},
            not_trained=self._not_trained(),
        )

    def recall(self, measured: StepMeasured) -> StepMeasured:
        """Return a step's figures as a former kernel recorded them, without the workers' busy times, which
        count from the start of that kernel."""
        self._facts.trained_tokens += measured.tokens
        self._not_trained()  # the former kernel has reported these causes
        return msgspec.structs.replace(measured, known=True, generate_busy_s=0.0, verify_busy_s=0.0)

    def _of_samples(self, start: StartBatch) -> dict[str, float]:
        members = [member for group in start.groups for member in group.members]
        samples = [member for member in members if not member.part]
        staleness = [start.version - member.oldest for member in members]
        names = sorted({name for member in members for name in member.metrics})[:_MOST_METRICS]
        rewards = [member.reward for member in samples]
        reward_lists = [[each.reward for each in group.members if not each.part] for group in start.groups]
        are_all_equal = [float(are_equal(group)) for group in reward_lists if len(group) > 1]
        return {
            "reward": _mean(rewards),
            "reward_std": _figure(pstdev(rewards)),
            "reward_max": max(rewards),
            **({"zero_variance_groups": _mean(are_all_equal)} if are_all_equal else {}),
            **{name: _figure(value) for name, value in metric_figures(samples, "reward", names).items()},
            "length": _mean([member.sampled for member in members]),
            "length_max": max(member.sampled for member in members),
            **_of_kept(members),
            **_of_failures(start.groups),
            **{name: _figure(value) for name, value in self._scheduler.failures.figures().items()},
            "truncated": _mean([float(member.finish == "length") for member in members]),
            "staleness": _mean(staleness),
            "staleness_max": max(staleness),
            "tokens": sum(member.sampled for member in members),
        }

    def _of_variants(self, start: StartBatch) -> dict[str, float]:
        """Return figures such as `variant/short/reward`; only `groups` and `tokens` if it has no groups."""
        variants, figures = self._scheduler.variants, dict[str, float]()
        for name in variants.weights:
            groups = [group for group in start.groups if variants.of(group.ticket) == name]
            members = [member for group in groups for member in group.members]
            of_variant = {
                "groups": len(groups),
                **(figures_of(tuple(members)) if members else {}),
                **({"seconds": _mean([group.seconds for group in groups])} if groups else {}),
                "tokens": sum(member.sampled for member in members),
            }
            figures |= {f"variant/{name}/{key}": value for key, value in of_variant.items()}
        return figures

    def _of_sources(self, start: StartBatch) -> dict[str, float]:
        """Return figures such as `dataset/easy/accuracy`. Rows without a source have none."""
        groups_of = defaultdict[str, list[GroupDone]](list)
        for row, group in zip(start.rows, start.groups, strict=True):
            groups_of[self._source_of(row)].append(group)
        figures: dict[str, float] = {}
        for name, groups in sorted(groups_of.items()):
            if name:
                figures[f"dataset/{name}/groups"] = len(groups)
                if self._sampled:
                    samples = [each for group in groups for each in group.members if not each.part]
                    figures[f"dataset/{name}/reward"] = _mean([each.reward for each in samples])
                    figures |= metric_figures(samples, f"dataset/{name}", ["accuracy"])
        return figures

    def _of_gate(self, divergence: float | None) -> dict[str, float]:
        if self._scheduler.settings.max_divergence is None:
            return {}
        measured = {} if divergence is None else {"divergence": divergence}
        return {**measured, "staleness_limit": self._scheduler.staleness_limit}

    def _of_engines(self, start: StartBatch) -> dict[str, float]:
        """Return the parts of the batch's ticket times, and the engines' load since the previous step."""
        parts = {
            f"ticket_{name}": _mean([getattr(group, name) for group in start.groups])
            for name in ("generate_s", "score_s", "tool_s", "environment_s", "own_s")
        }
        self._parts |= {name for name, value in parts.items() if value or name not in _SOME_RUNS}
        figures = {
            "ticket_s": _mean([group.seconds for group in start.groups]),
            **{name: value for name, value in parts.items() if name in self._parts},
            **self._fleet.load_figures(),
            **self._of_versions,
        }
        self._of_versions = {}
        return {name: round(value, 4) for name, value in figures.items()}

    def _not_trained(self) -> dict[str, int]:
        """Return the number of tickets not trained since the previous step, for the most frequent causes."""
        reasons = self._scheduler.reasons
        new_reasons, self._reasons = reasons - self._reasons, Counter(reasons)
        return dict(causes(new_reasons).most_common(_MOST_CAUSES))


def _of_kept(members: Sequence[Member]) -> dict[str, float]:
    """Return the number of ids that a token was drawn from, and its bytes; empty for the whole vocabulary."""
    kept, sampled = sum(member.kept for member in members), sum(member.sampled for member in members)
    tokens = sum(member.length for member in members)
    if not kept:
        return {}
    return {"kept_tokens": _figure(kept / sampled), "kept_bytes": _figure((4 * kept + 2 * tokens) / sampled)}


def _of_failures(groups: Iterable[GroupDone]) -> dict[str, float]:
    """Return how many samples failed, and how many succeeded after a failure, by kind of fault."""
    failed, retried = Counter[FaultKind](), Counter[FaultKind]()
    for group in groups:
        failed.update(sample.kind for sample in (*group.missing, *group.penalized))
        retried.update(group.retried)
    figures: dict[str, float] = {}
    for name, counts in (("failed_members", failed), ("retried_members", retried)):
        figures |= {name: counts.total(), **{f"{name}/{kind}": counts[kind] for kind in sorted(counts)}}
    return figures


def causes(reasons: Mapping[str, int]) -> Counter[str]:
    """Add up the counts of reasons that differ only in numbers and quoted text, under the first of these."""
    first: dict[str, str] = {}
    counted: Counter[str] = Counter()
    for reason, count in reasons.items():
        counted[first.setdefault(without_details(reason), reason)] += count
    return counted


def counts(account: VariantAccount) -> dict[str, int]:
    """Return how many of a variant's tickets are in each account."""
    return {name: getattr(account, name) for name in get_args(Account)}


def _figure(value: float) -> float:
    """Round to six significant digits: small figures, such as learning rates, keep their digits."""
    return value if isinstance(value, int) else float(f"{value:.6g}")


def _mean(values: Sequence[float]) -> float:
    return _figure(math.fsum(values) / len(values)) if values else 0.0
