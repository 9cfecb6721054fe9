"""The report of a run for people: `metrics.jsonl`, `summary.json` and log lines."""

import json
import math
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec
import structlog

from stretto.assembly.worker_numbers import EVALUATOR
from stretto.bus.messages import events
from stretto.kernel.durable.checkpoint import checkpoint_name
from stretto.kernel.setup import RunSetup
from stretto.kernel.step_meter import counts
from stretto.machine import clock
from stretto.machine.private_file import write_private
from stretto.observe.advice import Adviser
from stretto.observe.canary import CanaryRecord
from stretto.observe.verdict import RunState, verdict
from stretto.records.figures import describe_waits
from stretto.records.metrics import ACCURACY, HELD_OUT_REWARD, is_evaluation
from stretto.records.metrics_file import MetricsFile
from stretto.records.status import State, Verdict

log = structlog.get_logger()

# The metrics that a step's log line shows. `metrics.jsonl` has all metrics.
_SHOWN = (
    *("step", "reward", "length", "staleness", "loss", "grad_norm", "entropy"),
    *("divergence", "staleness_limit"),
    *("step_s", "train_s", "step_tokens_per_s"),
)

_MOST_ROWS = 1000  # rows given up that the summary lists
_RECENT = 20
"""The remaining time is estimated from this many newest steps."""


class Report:
    """Computes and writes the figures of a run from its kernel's events."""

    def __init__(self, setup: RunSetup, adviser: Adviser) -> None:
        self._folder = setup.folder
        self._run = setup.run
        self._facts = setup.facts
        self._scheduler = setup.scheduler
        self._fleet = setup.fleet
        self._sampled = setup.graph.samples
        self._metrics = MetricsFile(setup.folder)
        self.adviser = adviser
        self.recoveries: list[dict[str, Any]] = []
        self.version = 0
        """Version of the newest step that is reported."""
        self._kernel_began = 0.0
        """Unix time."""
        self._began = 0.0
        """Unix time at which a run without a break would have begun."""
        self._written: set[tuple[int, bool]] = set()
        """(step or version, whether it is an evaluation) of each line."""
        self._newest = 0
        """The largest version of a line."""
        self._first_ticket = 0.0
        """Unix time; 0 before the first ticket."""
        self._steady: list[tuple[float, float, float]] = []
        """(Unix time, busy seconds of generation, of training) at the end of each step."""
        self._last_step = clock.now()
        self.train_busy_s = 0.0
        self.swaps = 0
        self.swap_pause_s = 0.0
        self.swap_pause_max_s = 0.0
        self._paused_s = self._verified_s = 0.0
        """Seconds of swap pauses and seconds of verifier work, up to the newest line."""
        self._step_s = 0.0
        """Seconds from the run's start to the newest step."""
        self.last: dict[str, Any] = {}
        """The newest line of `metrics.jsonl`."""
        self._recent: deque[float] = deque(maxlen=_RECENT)
        """Seconds of the newest steps that this kernel trained."""
        self._skipped = False
        """True if a non-finite gradient left some model unchanged in the newest step."""
        self._replaced: list[events.Replaced] = []
        self._lost: list[dict[str, str]] = []
        """Workers other than trainers that were lost since the newest step, and how they were lost."""
        self._drifts = CanaryRecord(setup.config.inference.canary_bound, setup.facts.problems)
        if setup.resumed is not None:
            for evaluation in setup.resumed[1].snapshot.evaluation.results:
                self.adviser.evaluated(evaluation)
            self._continue_to(setup.resumed[1].version)

    def add(self, time: float, event: events.Event) -> None:
        """Update the figures by an event of the kernel."""
        match event:
            case events.KernelBegan(_, _, wall_s):
                self._kernel_began, self._began = time, time - wall_s
                self._begin()
            case events.RunOwned(_, version):
                self._cut_after(version)
                self._continue_to(version)
                self._recall(time)
            case events.RunEnded():
                self._recall(time)
            case events.ScheduleStarted():  # the times of repeated steps no longer count
                self._first_ticket = time
                self._steady.clear()
                self._recent.clear()
            case events.WeightsServed(are_new=True):
                if event.worker != EVALUATOR:  # nobody waits for its pauses
                    self.swaps += 1
                    self.swap_pause_s += event.pause_s
                    self.swap_pause_max_s = max(self.swap_pause_max_s, event.pause_s)
                self._drifts.add(event)
            case events.Replaced():
                self._replaced.append(event)
            case events.FleetChanged(worker, "lost", how) if not worker.startswith("trainer-"):
                self._lost.append({"worker": worker, "how": how})
            case events.StepMeasured(version, known=True) if (version, False) in self._written:
                pass
            case events.StepMeasured(version):
                self._cut_after(version - 1)
                self._continue_to(version - 1)
                self._step(time, event)
            case events.EvaluationEnded(result):
                self._evaluation(time, result)
            case _:
                pass

    def _continue_to(self, version: int) -> None:
        if version <= self.version:
            return
        for line in self._metrics.read():
            if self.version < line["step"] <= version and not is_evaluation(line):
                self.adviser.step(line)
                self.recoveries += line.get("recoveries", [])
                self._step_s = line["time_s"]
        self.version = version

    def _begin(self) -> None:
        """Move a broken last line to `metrics.cut.jsonl`, and remove the former kernel's summary."""
        self._metrics.cut_after(sys.maxsize)
        self._written = {(line["step"], is_evaluation(line)) for line in self._metrics.read()}
        self._newest = max((version for version, _ in self._written), default=0)
        (self._folder / "summary.json").unlink(missing_ok=True)

    def _cut_after(self, version: int) -> None:
        """Move the lines after a version to `metrics.cut.jsonl`: their steps are repeated or lost."""
        if self._newest > version:
            self._newest = version
            self._metrics.cut_after(version)
            self._written = {line for line in self._written if line[0] <= version}

    def _step(self, time: float, step: events.StepMeasured) -> None:
        self.version = step.version
        self.train_busy_s += step.train_s
        start, generated_s, _ = (
            self._steady[-1] if self._steady else (self._first_ticket or self._kernel_began, 0.0, 0.0)
        )
        self._steady.append((time, step.generate_busy_s, self.train_busy_s))
        self._last_step = clock.now()
        step_s, self._step_s = time - start, time - self._began
        self.last = {
            "step": step.version,
            "time": round(time, 3),
            "time_s": round(self._step_s, 3),
            "step_s": round(step_s, 4),
            "train_s": round(step.train_s, 4),
            **_of_waits(step.waits, step_s - step.train_s),
            "cores_used": step.cores_used,
            "cores_idle": step.cores_idle,
            **{f"cores/{role}": share for role, share in step.cores_of_roles.items()},
            **({} if step.memory_used is None else {"memory_used": step.memory_used}),
            **step.of_batch,
            "tokens": step.tokens,
            "train_tokens_per_s": round(step.tokens / step.train_s) if step.train_s else 0,
            "step_tokens_per_s": round(step.tokens / step_s) if step_s else 0,
            **step.statistics,
            **self._drifts.news(),
            **(self._of_speed(step, step.generate_busy_s - generated_s) if self._sampled else {}),
            "calls": [
                {"call": call.call, "group": call.group}
                | {"start_s": round(call.start_s, 4), "end_s": round(call.end_s, 4)}
                for call in step.calls
            ],
            "ledger": step.ledger,
            **({"variants": step.variants} if step.variants else {}),
            "not_trained": step.not_trained,
            **({} if step.repeated else self._recoveries(time)),
            **({"lost": self._lost} if self._lost else {}),
        }
        self._lost = []
        if step.version > 1:  # the first step waits for the first groups
            self._recent.append(self.last["step_s"])
        self._advise()
        self._note_skipped(step.skipped)
        self._metrics.append(_finite(self.last))
        self._written.add((step.version, False))
        self._newest = step.version
        shown = {key: self.last[key] for key in _SHOWN if key in self.last}
        log.info("step", **shown, waits=describe_waits(self.last))

    def _recoveries(self, time: float) -> dict[str, Any]:
        replaced, self._replaced = self._replaced, []
        if not replaced:
            return {}
        recoveries = [
            {
                "lost": recovery.lost,
                "how": recovery.how,
                "time": round(recovery.began, 1),
                "version": recovery.version,
                "repeated": recovery.repeated,
                "seconds": round(time - recovery.began, 1),
            }
            for recovery in replaced
        ]
        self.recoveries += recoveries
        return {"recovery_s": max(recovery["seconds"] for recovery in recoveries), "recoveries": recoveries}

    def _evaluation(self, time: float, evaluation: events.Evaluation) -> None:
        """Write the line of an evaluation once, after the lines of steps that were trained meanwhile."""
        if (evaluation.version, True) in self._written:
            return
        self._written.add((evaluation.version, True))
        line = {
            "step": evaluation.version,
            "time": round(time, 3),
            "time_s": round(time - self._began, 3),
            ACCURACY: evaluation.accuracy,
            HELD_OUT_REWARD: evaluation.reward,
            "evaluation/reward_std": evaluation.reward_std,
            "evaluation/samples": evaluation.samples,
            "evaluation/failed": evaluation.failed,
        }
        if evaluation.some_accuracy is not None:
            line["evaluation/some_accuracy"] = evaluation.some_accuracy
            line["evaluation/some_accuracy_answers"] = evaluation.some_accuracy_answers
        measure = HELD_OUT_REWARD if evaluation.accuracy is None else ACCURACY
        line |= {f"{measure}/{name}": value for name, value in evaluation.sources.items()}
        self._metrics.append(_finite(line))
        log.info("evaluation", **msgspec.to_builtins(evaluation))
        self.adviser.evaluated(evaluation)

    def _recall(self, time: float) -> None:
        """Write missing lines of evaluations, after the kernel has repeated the journal or ended the run."""
        for evaluation in self._scheduler.evaluation.results:
            self._evaluation(time, evaluation)

    def _of_speed(self, step: events.StepMeasured, generate_busy_s: float) -> dict[str, float]:
        figures = {
            "generate_busy_s": max(0.0, generate_busy_s),
            "verify_busy_s": step.verify_busy_s - self._verified_s,
            "swap_pause_s": (self.swap_pause_s - self._paused_s) / max(1, step.engines),
            **step.of_engines,
        }
        self._paused_s, self._verified_s = self.swap_pause_s, step.verify_busy_s
        return {name: round(value, 4) for name, value in figures.items()}

    def _advise(self) -> None:
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
        """Record the first of successive steps in which all gradients of some model were not finite."""
        is_first, self._skipped = bool(skipped) and not self._skipped, bool(skipped)
        if is_first:
            step = self.last["step"]
            models = " and ".join(prefix.removesuffix("/") or "the lead model" for prefix in skipped)
            log.warning("gradient is not finite: the step changes nothing", step=step, model=models)
            self._facts.problems.append(
                f"step {step}: the gradient of {models} was not finite, and changed nothing"
            )

    def left_s(self) -> float | None:
        """Estimate the seconds until the last step, from the recent steps; None without recent steps."""
        if not self._recent:
            return None
        step_s = math.fsum(self._recent) / len(self._recent)
        steps = self._scheduler.settings.steps - self._scheduler.version
        return max(0.0, steps * step_s - (clock.now() - self._last_step))

    def verdict(self, status: State) -> Verdict:
        """Return whether the run learns, and what it waits for."""
        scheduler = self._scheduler
        state = RunState(
            status,
            scheduler.version,
            trains=scheduler.settings.steps > 0,
            restarts=self._fleet.restarts,
            rows_change=scheduler.draws.by_curriculum,
            wall_s=self._facts.wall_s,
            after_s=self._facts.wall_s - self._step_s,
        )
        return verdict(self.adviser, state)

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
        text = json.dumps(_finite(summary), indent=1, allow_nan=False) + "\n"
        try:
            write_private(self._folder / "summary.json", text.encode())
        except OSError as error:
            log.error("summary not written", error=str(error))

    def _summary(self, status: State, reason: str) -> dict[str, Any]:
        scheduler, fleet = self._scheduler, self._fleet
        has_trained = self._first_ticket and self._steady
        train_wall_s = self._steady[-1][0] - self._first_ticket if has_trained else 0.0
        return {
            "run": self._run,
            "status": status,
            "reason": reason,
            "verdict": msgspec.to_builtins(self.verdict(status)),
            "seed": scheduler.settings.seed,
            "steps": scheduler.version,
            "version": scheduler.version,
            "wall_s": round(self._facts.wall_s, 3),
            "train_wall_s": round(train_wall_s, 3),
            "evaluation": [msgspec.to_builtins(evaluation) for evaluation in scheduler.evaluation.results],
            "best": self._best(),
            "ledger": msgspec.to_builtins(scheduler.ledger),
            "members": msgspec.to_builtins(scheduler.members),
            "failures": scheduler.failures.document(),
            "given_up": sorted(scheduler.given_up)[:_MOST_ROWS],
            **self._variant_summary(),
            "reasons": dict(scheduler.reasons),
            "staleness": {str(key): scheduler.staleness[key] for key in sorted(scheduler.staleness)},
            "staleness_limit": {str(key): scheduler.limits[key] for key in sorted(scheduler.limits)},
            "tokens": {"generated": self._facts.generated_tokens, "trained": self._facts.trained_tokens},
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
            "recoveries": self.recoveries,
            "checkpoints": self._facts.checkpoints,
            "journal": msgspec.to_builtins(self._facts.journal),
            "lost": msgspec.structs.asdict(self._facts.lost),
            "refused_messages": self._facts.refused + fleet.refused(),
            "problems": self._all_problems(),
            "advice": msgspec.to_builtins(self.adviser.given),
        }

    def _variant_summary(self) -> dict[str, Any]:
        """Return the summary's section about an A/B test; empty without a test."""
        variants = self._scheduler.variants
        if not variants.accounts:
            return {}
        estimates, differences = variants.estimates(), variants.differences()
        return {
            "variants": {
                name: {
                    "weight": variants.weights[name],
                    "ledger": counts(account),
                    "groups": account.figures["reward"].count if account.figures else 0,
                    "figures": msgspec.to_builtins(estimates[name]),
                    "difference": msgspec.to_builtins(differences.get(name, {})),
                }
                for name, account in variants.accounts.items()
            }
        }

    def _best(self) -> dict[str, Any] | None:
        best = self._scheduler.evaluation.best
        if best is None:
            return None
        name = checkpoint_name(best.version)
        exists = (self._folder / "checkpoints" / name).is_dir()
        scores = {"accuracy": best.accuracy, "reward": best.reward}
        return {"version": best.version, **scores, "checkpoint": name if exists else None}

    def _all_problems(self) -> list[str]:
        problems, evaluation = [*self._facts.problems], self._scheduler.evaluation
        every = self._scheduler.settings.evaluation_every
        if evaluation.held_back:
            problems.append(
                f"evaluations held training back {evaluation.held_back} times: one waited already when "
                f"evaluation.every={every} would have had the next; raise it, evaluate fewer rows, or give "
                "inference more replicas"
            )
        if versions := ", ".join(map(str, evaluation.needed_versions)):
            problems.append(f"the run ended without a result for the evaluation of version {versions}")
        return list(dict.fromkeys(problems))

    def _overlap(self) -> float:
        """Return the share of the time after the first step in which the busier of generation and training
        worked."""
        if len(self._steady) < 2:
            return 0.0
        (start, generate, train), (end, generate_end, train_end) = self._steady[0], self._steady[-1]
        return max(generate_end - generate, train_end - train) / (end - start)


def _of_waits(waits: Sequence[tuple[events.Cause, float]], waited_s: float) -> dict[str, float]:
    """Return the seconds for which a step's training waited, by cause. `waited_s`: all seconds since
    the previous step in which no call ran. Those of them without another cause count as `overhead`."""
    seconds = dict.fromkeys(events.CAUSES, 0.0)
    for cause, waited in waits:
        seconds[cause.kind] += waited
    seconds["overhead"] = max(0.0, waited_s - math.fsum(seconds.values()) + seconds["overhead"])
    return {f"wait/{kind}_s": round(cause_s, 4) for kind, cause_s in seconds.items()}


def _finite(value: Any) -> Any:
    """Return a value with None (null in JSON) in place of every float that is not finite."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in cast("list[Any]", value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value
