"""The report of a run for people: `metrics.jsonl`, `summary.json` and log lines."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import pstdev
from typing import Any, cast, get_args

import msgspec
import structlog

from stretto.base import clock
from stretto.base.cores import CoreMeter
from stretto.bus.messages.events import Evaluation, JournalHead
from stretto.bus.messages.inference import SwapDone
from stretto.bus.messages.tickets import GroupDone
from stretto.engine import CanaryConfig
from stretto.kernel.calls.canary import CanaryRecord
from stretto.kernel.calls.trainers import StepResult
from stretto.kernel.durable.checkpoint import KernelState, LostData, checkpoint_name
from stretto.kernel.fleet.fleet import Fleet
from stretto.kernel.observe.advice import Adviser, causes
from stretto.kernel.observe.bottleneck import bottleneck
from stretto.kernel.observe.curve import Curve
from stretto.kernel.observe.metrics_file import MetricsFile
from stretto.kernel.observe.waits import Waits
from stretto.kernel.schedule.commands import StartBatch
from stretto.kernel.schedule.evaluation import accuracies
from stretto.kernel.schedule.scheduler import Scheduler
from stretto.kernel.schedule.variants import Account, VariantAccount, figures_of
from stretto.records.figures import describe_waits
from stretto.records.metrics import MAIN_FIGURES, is_evaluation
from stretto.records.status import State
from stretto.records.timeline import CAUSES, Cause

log = structlog.get_logger()

# The metrics that a step's log line shows. `metrics.jsonl` has all metrics.
_SHOWN = (
    *("step", "reward", "length", "staleness", "loss", "grad_norm", "entropy"),
    *("divergence", "staleness_limit"),
    *("step_s", "train_s", "step_tokens_per_s"),
)

_RECENT = 20
"""Number of newest steps from which the view computes the remaining time and the bottleneck."""
_MOST_CAUSES = 8
"""Maximum number of causes that a line names for tickets that were not trained."""


class Report:
    """Collects the figures of a run and writes them. It has the lifetime of the kernel."""

    def __init__(
        self,
        folder: Path,
        run: str,
        scheduler: Scheduler,
        fleet: Fleet,
        resumed: KernelState | None,
        *,
        sampled: bool,
        source_of: Callable[[int], str],
        canary: CanaryConfig | None,
        adviser: Adviser,
    ) -> None:
        self.folder = folder
        """The run's folder."""
        self._run = run
        self._scheduler = scheduler
        self._fleet = fleet
        self.sampled = sampled
        """Whether the run trains on sampled trajectories, and not on sequences read from a dataset."""
        self.waits = Waits(sampled=sampled)
        self._source_of = source_of
        self._began = clock.now()
        self._metrics = MetricsFile(folder)
        self.adviser = adviser
        self.curves = {name: Curve() for name in (*MAIN_FIGURES, "zero_variance_groups")}
        """The figures of all steps so far, by name."""
        self.begun = resumed is None
        """Whether the kernel has begun to change the run's files. Up to then a resume can be refused without
        a trace."""
        self._resumed_version = 0
        self.reached = 0
        """The newest version in the metrics of previous kernels; 0 in a new run."""
        self.lost = LostData()
        """Everything that the run has lost for good."""
        if resumed is not None:
            self._resumed_version = resumed.version
            self.lost = resumed.lost
            for evaluation in resumed.snapshot.evaluation.results:
                adviser.evaluated(evaluation.version, evaluation.accuracy, evaluation.samples)
            lines = self._metrics.read()
            for line in lines:
                if line["step"] <= resumed.version and not is_evaluation(line):
                    adviser.step(line)
                    self._draw(line)
            self.reached = max((line["step"] for line in lines), default=0)
        self._reasons = Counter(resumed.snapshot.reasons if resumed else {})
        """Number of tickets that were not trained, by reason, up to the newest line."""
        self._former_wall_s = resumed.wall_s if resumed else 0.0
        self._former_generated = resumed.generated_tokens if resumed else 0
        self._first_ticket: float | None = None
        self._steady: list[tuple[float, float, float]] = []
        """(time, busy seconds of generation, busy seconds of training) at the end of each step."""
        self.trained_tokens = resumed.trained_tokens if resumed else 0
        self.train_busy_s = 0.0
        self.checkpoints: list[str] = []
        self.swaps = 0
        self.swap_pause_s = 0.0
        self.swap_pause_max_s = 0.0
        self._paused_s = self._verified_s = 0.0
        """Seconds of swap pauses and seconds of verifier work, up to the newest line."""
        self.last: dict[str, Any] = {}
        """The newest line of `metrics.jsonl`."""
        self._recent: deque[dict[str, Any]] = deque(maxlen=_RECENT)
        """The newest lines of steps that this kernel trained."""
        self.journal = JournalHead(0, "")
        """The newest message of the journal, at the end of the run."""
        self.refused = 0
        """Number of malformed messages that the kernel has refused."""
        self._skipped = False
        """Whether the newest step did not change some model, because its gradient was not finite."""
        self.problems: list[str] = []
        """Problems that did not end the run, for the summary."""
        self._drifts = CanaryRecord(canary, self.problems)
        self._cores = CoreMeter()

    def begin(self) -> None:
        """Begin to change the run's files. The lines after the checkpoint go aside, because their steps are
        repeated or lost. The previous kernel's summary goes.

        Raises:
            ConfigError: if the metrics cannot be read.
            RunError: if the files cannot be written.
        """
        if not self.begun:
            self._metrics.cut_after(self._resumed_version)
            (self.folder / "summary.json").unlink(missing_ok=True)
            self.begun = True

    def add_loss(self, loss: LostData, version: int | None) -> None:
        """Report that a part of the store is lost.

        Args:
            version: the version from which steps are lost, if steps are lost.
        """
        self.lost += loss
        parts = [f"{loss.groups} finished groups", f"{loss.messages} messages of the log"]
        parts += ["a part of the journal"] if loss.journals else []
        if version is not None:
            parts.insert(0, f"{loss.steps} steps, from version {version} on")
        self.problems.append(f"the store was damaged; lost: {', '.join(parts)}; what is lost is done again")
        log.error("the store was damaged", version=version, **msgspec.structs.asdict(loss))

    @property
    def wall_s(self) -> float:
        """Seconds so far, including those of previous kernels up to the checkpoint."""
        return self._former_wall_s + clock.now() - self._began

    @property
    def generated_tokens(self) -> int:
        """Number of tokens sampled so far, including those of previous kernels up to the checkpoint."""
        return self._former_generated + self._fleet.generated_tokens()

    def first_ticket(self) -> None:
        """The kernel issues its first ticket now. The times of repeated steps no longer count."""
        self._first_ticket = clock.now()
        self._steady.clear()
        self._recent.clear()
        self.waits.begin()

    def swapped(self, worker: str, done: SwapDone) -> None:
        """Take in the answer of an engine that has swapped weights."""
        self.swaps += 1
        self.swap_pause_s += done.report.pause_s
        self.swap_pause_max_s = max(self.swap_pause_max_s, done.report.pause_s)
        self._drifts.add(worker, done)

    def step(
        self,
        start: StartBatch,
        result: StepResult,
        waits: Sequence[tuple[Cause, float]],
        *,
        generate_busy_s: float,
        divergence: float | None,
    ) -> None:
        """Report a complete step, which may be a repeated one: write its line and log it.

        Args:
            waits: what training waited for before the step, with the seconds; empty for a repeated step.
        """
        now = clock.now()
        self.waits.begin()
        train_s = result.seconds
        statistics = dict(result.statistics)
        sampled = self._of_samples(start) if self.sampled else {}
        tokens = int(sampled.get("tokens", statistics.pop("tokens", 0)))
        self.trained_tokens += tokens
        self.train_busy_s += train_s
        before, generated_s, _ = (
            self._steady[-1] if self._steady else (self._first_ticket or self._began, 0.0, 0.0)
        )
        self._steady.append((now, generate_busy_s, self.train_busy_s))
        step_s = now - before
        cores = self._cores.read()
        self.last = {
            "step": result.version,
            "time": round(clock.wall(), 3),
            "time_s": round(self.wall_s, 3),
            "step_s": round(step_s, 4),
            "train_s": round(train_s, 4),
            **_of_waits(waits, step_s - train_s),
            "cores_used": round(cores.used, 4),
            "cores_idle": round(cores.idle, 4),
            **sampled,
            "tokens": tokens,
            "train_tokens_per_s": round(tokens / train_s) if train_s else 0,
            "step_tokens_per_s": round(tokens / step_s) if step_s else 0,
            **{name: _figure(value) for name, value in statistics.items()},
            **(self._of_variants(start) if self.sampled else {}),
            **self._of_sources(start),
            **{name: _figure(value) for name, value in self._scheduler.draws.figures().items()},
            **self._of_gate(divergence),
            **self._drifts.news(),
            **(self._of_speed(start, max(0.0, generate_busy_s - generated_s)) if self.sampled else {}),
            "calls": [
                {"call": each.call, "group": each.group}
                | {"start_s": round(each.start_s, 4), "end_s": round(each.end_s, 4)}
                for each in result.times
            ],
            "ledger": msgspec.to_builtins(self._scheduler.ledger),
            **self._variant_ledgers(),
            "not_trained": self._not_trained(),
        }
        if result.version > 1:  # the first step waits for the first groups
            self._recent.append(self.last)
        self._draw(self.last)
        self._advise()
        self._note_skipped(result.skipped)
        self._metrics.append(_finite(self.last))
        shown = {key: self.last[key] for key in _SHOWN if key in self.last}
        log.info("step", **shown, waits=describe_waits(self.last))

    def _draw(self, line: Mapping[str, Any]) -> None:
        """Add a step's figures to the curves."""
        for name, curve in self.curves.items():
            value = line.get(name)
            if isinstance(value, (int, float)) and math.isfinite(value):
                curve.add(value)

    def _of_gate(self, divergence: float | None) -> dict[str, Any]:
        """Return the step's divergence and the staleness limit of the gate; empty without a gate."""
        if self._scheduler.settings.max_divergence is None:
            return {}
        known = {} if divergence is None else {"divergence": _figure(divergence)}
        return {**known, "staleness_limit": self._scheduler.staleness_limit}

    def evaluation(self, evaluation: Evaluation) -> None:
        """Report a complete evaluation: write its line. The line follows those of the steps that were trained
        meanwhile."""
        line = {
            "step": evaluation.version,
            "time": round(clock.wall(), 3),
            "time_s": round(self.wall_s, 3),
            "evaluation/accuracy": evaluation.accuracy,
            "evaluation/samples": evaluation.samples,
            "evaluation/failed": evaluation.failed,
            **{f"evaluation/accuracy/{name}": value for name, value in evaluation.sources.items()},
        }
        self._metrics.append(_finite(line))
        log.info("evaluation", **msgspec.to_builtins(evaluation))
        self.adviser.evaluated(evaluation.version, evaluation.accuracy, evaluation.samples)

    def recall(self) -> None:
        """Write the missing lines of evaluations, after the journal was repeated."""
        written = {line["step"] for line in self._metrics.read() if is_evaluation(line)}
        for evaluation in self._scheduler.evaluation.results:
            if evaluation.version not in written:
                self.evaluation(evaluation)

    def _of_samples(self, start: StartBatch) -> dict[str, Any]:
        """Return the figures of a batch of trajectories."""
        members = [member for group in start.groups for member in group.members]
        samples = [member for member in members if not member.part]
        staleness = [start.version - member.oldest for member in members]
        names = {name for member in members for name in member.metrics}
        rewards = [member.reward for member in samples]
        groups = [[each.reward for each in group.members if not each.part] for group in start.groups]
        equal = [float(len(set(group)) == 1) for group in groups if len(group) > 1]
        return {
            "reward": _mean(rewards),
            "reward_std": _figure(pstdev(rewards)),
            "reward_max": max(rewards),
            **({"zero_variance_groups": _mean(equal)} if equal else {}),
            **{
                f"reward/{name}": _mean(
                    [member.metrics[name] for member in samples if name in member.metrics]
                )
                for name in sorted(names)
            },
            "length": _mean([member.sampled for member in members]),
            "length_max": max(member.sampled for member in members),
            "truncated": _mean([float(member.finish == "length") for member in members]),
            "staleness": _mean(staleness),
            "staleness_max": max(staleness),
            "tokens": sum(member.sampled for member in members),
        }

    def _of_variants(self, start: StartBatch) -> dict[str, float]:
        """Return the figures of each variant's part of a batch, such as `variant/short/reward`; empty without
        variants. A variant without a group in the batch has no figures but the number of its groups."""
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
            figures |= {f"variant/{name}/{key}": _figure(value) for key, value in of_variant.items()}
        return figures

    def _of_sources(self, start: StartBatch) -> dict[str, float]:
        """Return the figures of each source's part of a batch, such as `dataset/easy/accuracy`. Rows
        without a source have none."""
        groups_of = defaultdict[str, list[GroupDone]](list)
        for row, group in zip(start.rows, start.groups, strict=True):
            groups_of[self._source_of(row)].append(group)
        figures: dict[str, float] = {}
        for name, groups in sorted(groups_of.items()):
            if name:
                figures[f"dataset/{name}/groups"] = len(groups)
                if self.sampled:
                    rewards = [each.reward for group in groups for each in group.members if not each.part]
                    figures[f"dataset/{name}/reward"] = _mean(rewards)
                    figures[f"dataset/{name}/accuracy"] = _mean(accuracies(groups))
        return figures

    def _variant_ledgers(self) -> dict[str, dict[str, dict[str, int]]]:
        """Return the accounts of each variant's tickets so far; empty without variants."""
        accounts = self._scheduler.variants.accounts
        return {"variants": {name: _counts(each) for name, each in accounts.items()}} if accounts else {}

    def _variant_summary(self) -> dict[str, Any]:
        """Return accounts and figures of each variant, and how they differ from those of the first; empty
        without variants."""
        variants = self._scheduler.variants
        if not variants.accounts:
            return {}
        estimates, differences = variants.estimates(), variants.differences()
        return {
            "variants": {
                name: {
                    "weight": variants.weights[name],
                    "ledger": _counts(account),
                    "groups": account.figures["reward"].count if account.figures else 0,
                    "figures": msgspec.to_builtins(estimates[name]),
                    "difference": msgspec.to_builtins(differences.get(name, {})),
                }
                for name, account in variants.accounts.items()
            }
        }

    def _of_speed(self, start: StartBatch, generate_busy_s: float) -> dict[str, float]:
        """Return how long generation, verification and swaps took since the step before, and how full the
        engines were."""
        engines = max(1, len(self._fleet.of("inference")))
        verified_s = self._fleet.busy_s("verifier")
        figures = {
            "generate_busy_s": generate_busy_s,
            "verify_busy_s": verified_s - self._verified_s,
            "ticket_generate_s": _mean([group.generate_s for group in start.groups]),
            "ticket_score_s": _mean([group.score_s for group in start.groups]),
            "swap_pause_s": (self.swap_pause_s - self._paused_s) / engines,
            **self._fleet.load_figures(),
        }
        self._paused_s, self._verified_s = self.swap_pause_s, verified_s
        return {name: round(value, 4) for name, value in figures.items()}

    def _not_trained(self) -> dict[str, int]:
        """Return the most frequent causes for which tickets were filtered, expired or failed since the step
        before, with their counts."""
        reasons = self._scheduler.reasons
        news, self._reasons = reasons - self._reasons, Counter(reasons)
        return dict(causes(news).most_common(_MOST_CAUSES))

    def _advise(self) -> None:
        """Apply the advice rules to the newest line, and log new and withdrawn advice."""
        changed = self.adviser.step(self.last)
        for advice in changed:
            if advice.until is None:
                log.warning("advice", rule=advice.rule, since=advice.since, message=advice.message)
            else:
                log.info("advice withdrawn", rule=advice.rule, since=advice.since)
        self.last["advice"] = [advice.rule for advice in self.adviser.open]
        if changed:
            self.last["advice_changes"] = msgspec.to_builtins(changed)

    def _note_skipped(self, skipped: Sequence[str]) -> None:
        """Record the first of several steps in which every gradient of some model was not finite."""
        is_first, self._skipped = bool(skipped) and not self._skipped, bool(skipped)
        if is_first:
            step, whose = self.last["step"], ", ".join(skipped)
            log.warning("gradient is not finite: the step changes nothing", step=step, model=whose)
            self.problems.append(f"step {step}: the gradient {whose}was not finite, and changed nothing")

    def left_s(self) -> float | None:
        """Estimate the seconds until the last step, from the recent steps; None before the first of them."""
        if not self._recent:
            return None
        step_s = math.fsum(line["step_s"] for line in self._recent) / len(self._recent)
        steps = self._scheduler.settings.steps - self._scheduler.version
        return max(0.0, steps * step_s - (clock.now() - self._steady[-1][0]))

    def bottleneck(self) -> str:
        """Describe in words what the run waits for most; empty if it is not known yet, or if the run samples
        nothing."""
        if not self._recent or not self.sampled:
            return ""
        part, share = bottleneck(self._recent)
        if part == "training":
            return f"training: it works {share:.0%} of the time"
        return f"{part}: training waits for it {share:.0%} of the time"

    def finish(self, status: State, reason: str) -> dict[str, Any]:
        """Write the summary and return it. If it cannot be written, log the error."""
        summary = self._summary(status, reason)
        self._write_summary(summary)
        return summary

    def add_late_problems(self, summary: dict[str, Any]) -> None:
        """Write the summary again if there are problems that it does not have yet."""
        if (problems := self._all_problems()) != summary["problems"]:
            summary["problems"] = problems
            self._write_summary(summary)

    def _write_summary(self, summary: Mapping[str, Any]) -> None:
        aside = self.folder / ".summary.json"
        try:
            aside.write_text(json.dumps(_finite(summary), indent=1, allow_nan=False) + "\n")
            aside.rename(self.folder / "summary.json")
        except OSError as error:
            log.error("summary not written", error=str(error))

    def _summary(self, status: State, reason: str) -> dict[str, Any]:
        scheduler, fleet = self._scheduler, self._fleet
        return {
            "run": self._run,
            "status": status,
            "reason": reason or self._collapse(),
            "seed": scheduler.settings.seed,
            "steps": scheduler.version,
            "version": scheduler.version,
            "wall_s": round(self.wall_s, 3),
            "train_wall_s": round(self._train_wall_s(), 3),
            "evaluation": [msgspec.to_builtins(evaluation) for evaluation in scheduler.evaluation.results],
            "best": self._best(),
            "ledger": msgspec.to_builtins(scheduler.ledger),
            **self._variant_summary(),
            "reasons": dict(scheduler.reasons),
            "staleness": {str(key): scheduler.staleness[key] for key in sorted(scheduler.staleness)},
            "staleness_limit": {str(key): scheduler.limits[key] for key in sorted(scheduler.limits)},
            "tokens": {"generated": self.generated_tokens, "trained": self.trained_tokens},
            "busy_s": {
                "generate": round(fleet.busy_s("inference"), 3),
                "train": round(self.train_busy_s, 3),
            },
            "overlap": round(self._overlap(), 4),
            "swaps": {
                "count": self.swaps,
                "pause_mean_s": round(self.swap_pause_s / max(1, self.swaps), 5),
                "pause_max_s": round(self.swap_pause_max_s, 5),
            },
            "canary": self._drifts.summary(),
            "restarts": fleet.restarts,
            "checkpoints": self.checkpoints,
            "journal": msgspec.to_builtins(self.journal),
            "lost": msgspec.structs.asdict(self.lost),
            "refused_messages": self.refused + fleet.refused(),
            "problems": self._all_problems(),
            "advice": msgspec.to_builtins(self.adviser.given),
        }

    def _collapse(self) -> str:
        """Return what the open advice says of a policy that became worse; empty if there is none."""
        given = [advice.message for advice in self.adviser.open if advice.rule == "reward_collapse"]
        return given[0].partition(";")[0] if given else ""

    def _best(self) -> dict[str, Any] | None:
        """Return the best evaluation, with the checkpoint of its version if there is one."""
        best = self._scheduler.evaluation.best
        if best is None:
            return None
        name = checkpoint_name(best.version)
        there = (self.folder / "checkpoints" / name).is_dir()
        return {"version": best.version, "accuracy": best.accuracy, "checkpoint": name if there else None}

    def _all_problems(self) -> list[str]:
        return [*self.problems, *self._held_back()]

    def _held_back(self) -> list[str]:
        """Return a line that says how often evaluations held training back; empty if they did not."""
        scheduler = self._scheduler
        if not scheduler.evaluation.held_back:
            return []
        every = scheduler.settings.evaluation_every
        return [
            f"evaluations held training back {scheduler.evaluation.held_back} times: one waited already when "
            f"evaluation.every={every} would have had the next; raise it, evaluate fewer rows, or give "
            "inference more replicas"
        ]

    def _train_wall_s(self) -> float:
        """Return the seconds from the first ticket to the last step."""
        if self._first_ticket is None or not self._steady:
            return 0.0
        return self._steady[-1][0] - self._first_ticket

    def _overlap(self) -> float:
        """Return the share of the time in which generation or training was busy, whichever was busier. It
        counts from the end of the first step."""
        if len(self._steady) < 2:
            return 0.0
        (start, generate, train), (end, generate_end, train_end) = self._steady[0], self._steady[-1]
        return max(generate_end - generate, train_end - train) / (end - start)


def _of_waits(waits: Sequence[tuple[Cause, float]], waited_s: float) -> dict[str, float]:
    """Return the seconds for which a step's training waited, by cause.

    Args:
        waits: of the time before the step.
        waited_s: all seconds since the step before in which no call ran. Those within the step count as
            `overhead`, like those before it without another cause.
    """
    seconds = dict.fromkeys(CAUSES, 0.0)
    for cause, waited in waits:
        seconds[cause.kind] += waited
    seconds["overhead"] = max(0.0, waited_s - math.fsum(seconds.values()) + seconds["overhead"])
    return {f"wait/{kind}_s": round(each, 4) for kind, each in seconds.items()}


def _counts(account: VariantAccount) -> dict[str, int]:
    return {name: getattr(account, name) for name in get_args(Account)}


def _figure(value: float) -> float:
    """Round a figure to six significant digits: small figures, such as learning rates, keep their digits."""
    return value if isinstance(value, int) else float(f"{value:.6g}")


def _finite(value: Any) -> Any:
    """Return the figures with None, which is null in JSON, in place of every float that is not finite."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in cast("dict[str, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in cast("list[Any]", value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _mean(values: Sequence[float]) -> float:
    return _figure(math.fsum(values) / len(values)) if values else 0.0
