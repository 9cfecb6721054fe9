"""What a run tells people: `metrics.jsonl`, `summary.json`, trackers and the log lines."""

from __future__ import annotations

import json
import math
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import pstdev
from typing import Any, Literal, cast

import msgspec
import structlog

from stretto.bus.messages import Evaluation, SwapDone
from stretto.engine import CanaryConfig
from stretto.kernel.advice import Adviser, bottleneck, causes
from stretto.kernel.canary import CanaryRecord
from stretto.kernel.checkpoint import KernelState, checkpoint_name
from stretto.kernel.fleet import Fleet
from stretto.kernel.scheduler import Scheduler, StartBatch
from stretto.kernel.trainers import StepResult
from stretto.tracker import Tracker

__all__ = ["Report", "Status"]

log = structlog.get_logger()

# Of a step's metrics, what its log line shows; `metrics.jsonl` has all.
_SHOWN = (
    *("step", "reward", "length", "staleness", "loss", "grad_norm", "entropy"),
    *("divergence", "staleness_limit"),
    *("step_s", "train_s", "step_tokens_per_s"),
)

_RECENT = 20
"""Steps that the view's remaining time and bottleneck are taken from."""
_MOST_CAUSES = 8
"""Causes that a line names, of tickets that were not trained."""

Status = Literal["running", "completed", "interrupted", "failed", "repeated"]


class Report:
    """Gathers the figures of a run and writes them. Lives as long as the kernel."""

    def __init__(
        self,
        folder: Path,
        run: str,
        scheduler: Scheduler,
        fleet: Fleet,
        trackers: Sequence[Tracker],
        resumed: KernelState | None,
        *,
        sampled: bool,
        canary: CanaryConfig | None,
        adviser: Adviser,
    ) -> None:
        self.folder = folder
        """The run's folder."""
        self._run = run
        self._scheduler = scheduler
        self._fleet = fleet
        self._trackers = trackers
        self.sampled = sampled
        """Whether what is trained on was sampled, rather than read."""
        self._began = time.monotonic()
        self._metrics = folder / "metrics.jsonl"
        self.adviser = adviser
        if resumed is not None:
            for evaluation in resumed.snapshot.evaluations:
                adviser.evaluated(evaluation.version, evaluation.accuracy, evaluation.samples)
            for line in self._keep_lines_until(resumed.version):
                if not _is_evaluation(line):
                    adviser.step(line)
        self._reasons = Counter(resumed.snapshot.reasons if resumed else {})
        """Why tickets were not trained, up to the newest line."""
        self._former_wall_s = resumed.wall_s if resumed else 0.0
        self._former_generated = resumed.generated_tokens if resumed else 0
        self._first_ticket: float | None = None
        self._steady: list[tuple[float, float, float]] = []
        """(time, generation busy, training busy) at the end of each step."""
        self.trained_tokens = resumed.trained_tokens if resumed else 0
        self.train_busy_s = 0.0
        self.checkpoints: list[str] = []
        self.swaps = 0
        self.swap_pause_s = 0.0
        self.swap_pause_max_s = 0.0
        self._paused_s = self._verified_s = 0.0
        """Pauses of swaps, and work of verifiers, up to the newest line."""
        self.last: dict[str, Any] = {}
        """The newest line of `metrics.jsonl`."""
        self._recent: deque[dict[str, Any]] = deque(maxlen=_RECENT)
        """The newest lines of this life's own steps."""
        self.refused = 0
        """Malformed messages that the kernel has refused."""
        self.skipped_in_a_row = 0
        """Steps at the end that changed nothing, because their gradient was not finite."""
        self.problems: list[str] = []
        """What went wrong without ending the run, for the summary."""
        self._drifts = CanaryRecord(canary, self.problems)

    @property
    def wall_s(self) -> float:
        """Seconds so far, those of a former life up to its checkpoint included."""
        return self._former_wall_s + time.monotonic() - self._began

    @property
    def generated_tokens(self) -> int:
        """Tokens sampled so far, those of a former life up to its checkpoint included."""
        return self._former_generated + self._fleet.generated_tokens()

    def first_ticket(self) -> None:
        """The first ticket of this life is being issued; the steady part begins after it."""
        self._first_ticket = time.monotonic()
        self._steady.clear()
        self._recent.clear()

    def swapped(self, worker: str, done: SwapDone) -> None:
        """An engine has swapped weights."""
        self.swaps += 1
        self.swap_pause_s += done.report.pause_s
        self.swap_pause_max_s = max(self.swap_pause_max_s, done.report.pause_s)
        self._drifts.add(worker, done)

    def step(
        self, start: StartBatch, result: StepResult, *, generate_busy_s: float, divergence: float | None
    ) -> dict[str, Any]:
        """A step is complete, perhaps repeated: write its line, tell the trackers, log it."""
        now = time.monotonic()
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
        self.last = {
            "step": result.note.version,
            "time_s": round(self.wall_s, 3),
            "step_s": round(step_s, 4),
            "train_s": round(train_s, 4),
            **sampled,
            "tokens": tokens,
            "train_tokens_per_s": round(tokens / train_s) if train_s else 0,
            "step_tokens_per_s": round(tokens / step_s) if step_s else 0,
            **{name: round(value, 6) for name, value in statistics.items()},
            **self._of_gate(divergence),
            **self._drifts.news(),
            **(self._of_speed(start, max(0.0, generate_busy_s - generated_s)) if self.sampled else {}),
            "calls": [
                {"call": each.call, "group": each.group}
                | {"start_s": round(each.start_s, 4), "end_s": round(each.end_s, 4)}
                for each in result.times
            ],
            "ledger": msgspec.to_builtins(self._scheduler.ledger),
            "not_trained": self._not_trained(),
        }
        if result.note.version > 1:  # the first step waits for the first evaluation
            self._recent.append(self.last)
        self._advise()
        self._note_skipped([name for name, value in statistics.items() if value == 1 and _is_skipped(name)])
        self._write(self.last)
        for tracker in self._trackers:
            self._tell(tracker, "step", self.last)
        log.info("step", **{key: self.last[key] for key in _SHOWN if key in self.last})
        return self.last

    def _of_gate(self, divergence: float | None) -> dict[str, Any]:
        """What the divergence gate was told, and the limit that it leaves; nothing without a gate."""
        if self._scheduler.settings.max_divergence is None:
            return {}
        figure = {} if divergence is None else {"divergence": round(divergence, 6)}
        return {**figure, "staleness_limit": self._scheduler.staleness_limit}

    def evaluation(self, evaluation: Evaluation) -> None:
        """An evaluation is complete: write its line, after those of the steps beside it."""
        self._write(
            {
                "step": evaluation.version,
                "time_s": round(self.wall_s, 3),
                "evaluation/accuracy": evaluation.accuracy,
                "evaluation/samples": evaluation.samples,
                "evaluation/failed": evaluation.failed,
            }
        )
        log.info("evaluation", **msgspec.to_builtins(evaluation))
        self.adviser.evaluated(evaluation.version, evaluation.accuracy, evaluation.samples)

    def recall(self) -> None:
        """After the journal was repeated: write the lines of evaluations that are missing."""
        written = {line["step"] for line in self._lines() if _is_evaluation(line)}
        for evaluation in self._scheduler.evaluations:
            if evaluation.version not in written:
                self.evaluation(evaluation)

    def _write(self, line: Mapping[str, Any]) -> None:
        with self._metrics.open("a") as file:
            file.write(json.dumps(_finite(line), allow_nan=False) + "\n")

    def _lines(self) -> list[dict[str, Any]]:
        if not self._metrics.exists():
            return []
        return [json.loads(line) for line in self._metrics.read_text().splitlines()]

    def _of_samples(self, start: StartBatch) -> dict[str, Any]:
        """Figures of a batch of trajectories."""
        members = [member for group in start.groups for member in group.members]
        samples = [member for member in members if not member.part]
        staleness = [start.version - member.oldest for member in members]
        names = {name for member in members for name in member.metrics}
        rewards = [member.reward for member in samples]
        groups = [[each.reward for each in group.members if not each.part] for group in start.groups]
        equal = [float(len(set(group)) == 1) for group in groups if len(group) > 1]
        return {
            "reward": _mean(rewards),
            "reward_std": round(pstdev(rewards), 6),
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

    def _of_speed(self, start: StartBatch, generate_busy_s: float) -> dict[str, float]:
        """Where the time since the step before went, beside training."""
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
        """Why tickets were filtered, expired or failed since the step before: the commonest causes."""
        reasons = self._scheduler.reasons
        news, self._reasons = reasons - self._reasons, Counter(reasons)
        return dict(causes(news).most_common(_MOST_CAUSES))

    def _advise(self) -> None:
        """Judge the newest line, and tell what has changed."""
        for advice in self.adviser.step(self.last):
            if advice.until is None:
                log.warning("advice", rule=advice.rule, since=advice.since, message=advice.message)
            else:
                log.info("advice withdrawn", rule=advice.rule, since=advice.since)
        self.last["advice"] = [advice.rule for advice in self.adviser.open]

    def _note_skipped(self, skipped: Sequence[str]) -> None:
        """Take note of a step in which every gradient of some model was not finite."""
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        if self.skipped_in_a_row == 1:
            step, whose = self.last["step"], ", ".join(name.removesuffix("skipped") for name in skipped)
            log.warning("gradient is not finite: the step changes nothing", step=step, model=whose)
            self.problems.append(f"step {step}: the gradient {whose}was not finite, and changed nothing")

    def left_s(self) -> float | None:
        """Seconds until the last step, at the pace of the recent ones; None before there are any."""
        if not self._recent:
            return None
        step_s = math.fsum(line["step_s"] for line in self._recent) / len(self._recent)
        steps = self._scheduler.settings.steps - self._scheduler.version
        return max(0.0, steps * step_s - (time.monotonic() - self._steady[-1][0]))

    def bottleneck(self) -> str:
        """What the run waits for most, in words; empty where that is not known yet."""
        if not self._recent or not self.sampled:
            return ""
        part, share = bottleneck(self._recent)
        return f"{part} (training works {100 * share:.0f} % of the time)"

    def finish(self, status: Status, reason: str) -> dict[str, Any]:
        """Write the summary and tell the trackers."""
        summary = self._summary(status, reason)
        aside = self.folder / ".summary.json"
        aside.write_text(json.dumps(_finite(summary), indent=1, allow_nan=False) + "\n")
        aside.rename(self.folder / "summary.json")
        for tracker in self._trackers:
            self._tell(tracker, "finish", summary)
        return summary

    def _summary(self, status: Status, reason: str) -> dict[str, Any]:
        scheduler, fleet = self._scheduler, self._fleet
        return {
            "run": self._run,
            "status": status,
            "reason": reason,
            "seed": scheduler.settings.seed,
            "steps": scheduler.version,
            "version": scheduler.version,
            "wall_s": round(self.wall_s, 3),
            "train_wall_s": round(self._train_wall_s(), 3),
            "evaluation": [msgspec.to_builtins(evaluation) for evaluation in scheduler.evaluations],
            "best": self._best(),
            "ledger": msgspec.to_builtins(scheduler.ledger),
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
            "refused_messages": self.refused + fleet.refused(),
            "problems": [*self.problems, *self._held_back()],
            "advice": msgspec.to_builtins(self.adviser.given),
        }

    def _best(self) -> dict[str, Any] | None:
        """The best evaluation, and the checkpoint of its version if there is one."""
        best = self._scheduler.best
        if best is None:
            return None
        name = checkpoint_name(best.version)
        there = (self.folder / "checkpoints" / name).is_dir()
        return {"version": best.version, "accuracy": best.accuracy, "checkpoint": name if there else None}

    def _held_back(self) -> list[str]:
        """A line of how often evaluations held training back, if they did."""
        scheduler = self._scheduler
        if not scheduler.held_back:
            return []
        every = scheduler.settings.evaluation_every
        return [
            f"evaluations held training back {scheduler.held_back} times: one waited already when "
            f"evaluation.every={every} would have had the next; raise it, evaluate fewer rows, or give "
            "inference more replicas"
        ]

    def _keep_lines_until(self, version: int) -> list[dict[str, Any]]:
        """Remove the lines after a checkpoint, whose steps are repeated or lost; the others."""
        if not self._metrics.exists():
            return []
        lines = self._metrics.read_text().splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= version]
        aside = self.folder / ".metrics.jsonl"
        aside.write_text("".join(kept))
        aside.replace(self._metrics)
        return [json.loads(line) for line in kept]

    def _train_wall_s(self) -> float:
        """From the first ticket to the last step."""
        if self._first_ticket is None or not self._steady:
            return 0.0
        return self._steady[-1][0] - self._first_ticket

    def _overlap(self) -> float:
        """The busier voice's share of the time, over the steady part: from the first step's end on."""
        if len(self._steady) < 2:
            return 0.0
        (start, generate, train), (end, generate_end, train_end) = self._steady[0], self._steady[-1]
        return max(generate_end - generate, train_end - train) / (end - start)

    def _tell(self, tracker: Tracker, method: str, facts: Mapping[str, Any]) -> None:
        try:
            getattr(tracker, method)(facts)
        except Exception as error:
            log.exception("tracker failed", tracker=type(tracker).__name__)
            self.problems.append(f"tracker {type(tracker).__name__}: {type(error).__name__}: {error}")


def _finite(value: Any) -> Any:
    """Figures as JSON has them: null for what is not a finite number."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in cast("dict[str, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in cast("list[Any]", value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_evaluation(line: Mapping[str, Any]) -> bool:
    """Whether a line of `metrics.jsonl` is that of an evaluation, and not of a step."""
    return "evaluation/samples" in line


def _is_skipped(name: str) -> bool:
    return name == "skipped" or name.endswith("/skipped")


def _mean(values: Sequence[float]) -> float:
    return round(math.fsum(values) / len(values), 6) if values else 0.0
