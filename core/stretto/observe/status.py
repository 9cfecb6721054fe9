"""The state of a run, for the live view and for `status.json` (see `stretto.records.status`)."""

import math
import os
from collections import deque
from collections.abc import Sequence

import anyio
import msgspec
import structlog

from stretto.bus.client import Bus
from stretto.bus.messages.events import CAUSES, Evaluation
from stretto.bus.messages.membership import RunStatus
from stretto.bus.messages.subjects import Subjects
from stretto.kernel.fleet.fleet import late_workers
from stretto.kernel.schedule.health import held_out
from stretto.kernel.setup import RunSetup
from stretto.machine import clock
from stretto.observe.report import Report
from stretto.records.status import (
    STATUS,
    AdviceStatus,
    EvaluationProgress,
    EvaluationStatus,
    Stall,
    Status,
    WorkerStatus,
)

log = structlog.get_logger()

_WRITE_S = 2.0  # `stretto.records.status.LATE_S` expects it
_LONG_S = 60.0
"""Log a wait after this many seconds, and each time its length has doubled."""
_SPEED_S = 5.0
"""Seconds over which the speed of generation is measured."""
_NEWEST = (
    *("step", "time_s", "reward", "length", "staleness", "staleness_max", "staleness_limit"),
    *("loss", "entropy", "grad_norm", "step_s", "train_s", "train_tokens_per_s"),
    *(f"wait/{kind}_s" for kind in CAUSES),
)
_EVALUATIONS = 5  # newest evaluations in the status
_REASONS = 3  # most frequent reasons in the status
_MOST_LATE = 8  # missing workers that `now` names


class StatusWriter:
    """Composes, writes and sends the status of a run. It lives as long as the kernel."""

    def __init__(self, setup: RunSetup, report: Report) -> None:
        self._setup = setup
        self._report = report
        self._facts = setup.facts
        self._scheduler = setup.scheduler
        self._fleet = setup.fleet
        self._tokens: deque[tuple[float, int]] = deque()
        """(time, tokens generated so far) of the last seconds."""
        self.metrics_url = ""
        """Where Prometheus reads the run's figures; empty without such an address."""
        self._complaint = ""

    def status(self) -> Status:
        """Return the status of the run at this moment."""
        facts, report, scheduler, fleet = self._facts, self._report, self._scheduler, self._fleet
        now, ending, history = clock.now(), facts.ending, report.adviser.history
        evaluations, best = evaluation_statuses(scheduler.evaluation.results), scheduler.evaluation.best
        return Status(
            written=clock.wall(),
            pid=os.getpid(),
            name=self._setup.config.name,
            folder=str(self._setup.folder),
            state=ending.status,
            started=facts.started,
            reason=ending.reason,
            version=scheduler.version,
            steps=self._setup.config.steps,
            wall_s=round(facts.wall_s, 1),
            left_s=None if ending.status != "running" else report.left_s(),
            now=self._now(),
            verdict=report.verdict(ending.status),
            sampled=self._setup.graph.samples,
            newest={
                key: value if math.isfinite(value) else None
                for key in _NEWEST
                if (value := report.last.get(key)) is not None
            },
            recent={
                name: _short(mean) for name in history.curves if (mean := history.recent(name)) is not None
            },
            curves={
                name: [_short(point) for point in curve.points()] for name, curve in history.curves.items()
            },
            evaluations=evaluations[-_EVALUATIONS:],
            best=next((each for each in evaluations if best and each.version == best.version), None),
            evaluating=self._evaluating(),
            ledger=msgspec.to_builtins(scheduler.ledger),
            finished=len(scheduler.tickets.finished),
            reasons=dict(scheduler.reasons.most_common(_REASONS)),
            generate_tokens_per_s=self._generation_speed(now),
            advice=[AdviceStatus(each.rule, each.since, each.message) for each in report.adviser.open],
            connected=facts.bus is not None and facts.bus.connected,
            restarts=fleet.restarts,
            workers=[
                WorkerStatus(
                    member.worker,
                    member.ready,
                    round(now - member.heard, 2),
                    round(member.beat.blocked_s, 2),
                    member.leaving,
                )
                for member in fleet.members.values()
            ],
            starting=dict(fleet.starting),
            waits=self._stalls(),
            metrics_url=self.metrics_url,
        )

    async def publish(self, bus: Bus, names: Subjects) -> None:
        """Write and send the status every few seconds and when the end is decided. Log long waits."""
        next_log_s: dict[tuple[str, str, str], float] = {}
        over = self._facts.ending.over
        while True:
            status = self.status()
            self._write(status)
            if bus.connected:
                await bus.publish(names.status, RunStatus(msgspec.json.encode(status)))
            _log_long_waits(status, next_log_s)
            with anyio.move_on_after(_WRITE_S):
                await (anyio.sleep_forever() if over.is_set() else over.wait())

    def write_end(self) -> None:
        """Write the final status, after the workers have ended."""
        status = self.status()
        self._write(
            msgspec.structs.replace(
                status, now=status.state, workers=[], starting={}, waits=[], metrics_url=""
            )
        )

    def _write(self, status: Status) -> None:
        new_file = self._setup.folder / f".{STATUS}"
        try:
            new_file.write_bytes(msgspec.json.encode(status))
            new_file.rename(self._setup.folder / STATUS)
            self._complaint = ""
        except OSError as error:  # the run does not need the file
            if str(error) != self._complaint:
                self._complaint = str(error)
                log.warning("status not written", error=self._complaint)

    def _now(self) -> str:
        scheduler = self._scheduler
        if not self._fleet.hears():
            return "waiting for nats-server"
        if text := self._facts.loss or self._facts.note:
            return text
        if not self._facts.started:
            return f"waiting for {', '.join(late_workers(self._fleet)[:_MOST_LATE]) or 'workers'}"
        cause = self._setup.waits.cause
        if cause is not None and cause.kind != "groups":
            return f"waiting for {cause}"
        return "training" if scheduler.training else "generating"

    def _evaluating(self) -> EvaluationProgress | None:
        scheduler = self._scheduler
        if scheduler.evaluation.under_way is None:
            return None
        version, *waiting = scheduler.evaluation.needed_versions
        return EvaluationProgress(
            version,
            scheduler.evaluation.finished_rows,
            scheduler.settings.evaluation_rows,
            waiting[0] if waiting else None,
        )

    def _stalls(self) -> list[Stall]:
        waits = [(member.worker, member.beat.wait) for member in self._fleet.members.values()]
        if self._facts.bus is not None:
            waits.append(("kernel", self._facts.bus.unanswered.longest()))
        stalls = (Stall(asker, wait.who, wait.verb, round(wait.seconds, 2)) for asker, wait in waits if wait)
        return sorted(stalls, key=lambda stall: -stall.seconds)

    def _generation_speed(self, now: float) -> int:
        self._tokens.append((now, self._fleet.generated_tokens()))
        while len(self._tokens) > 2 and self._tokens[1][0] < now - _SPEED_S:
            self._tokens.popleft()
        (start, before), (end, after) = self._tokens[0], self._tokens[-1]
        return round((after - before) / (end - start)) if end > start else 0


def _log_long_waits(status: Status, next_log_s: dict[tuple[str, str, str], float]) -> None:
    """Log long waits. `next_log_s`: (asker, process, verb) -> length at which the wait is logged again."""
    lengths = {(wait.asker, wait.who, wait.verb): wait.seconds for wait in status.waits}
    for key in next_log_s.keys() - lengths.keys():
        del next_log_s[key]
    for key, seconds in lengths.items():
        if seconds >= next_log_s.get(key, _LONG_S):
            next_log_s[key] = 2 * seconds
            log.warning("long wait", asker=key[0], who=key[1], verb=key[2], seconds=seconds)


def evaluation_statuses(results: Sequence[Evaluation]) -> list[EvaluationStatus]:
    """Return the complete evaluations of a run, all with the same measure."""
    scores = {result.version: result for result in held_out(results)}
    measure = next(iter(scores.values())).measure if scores else "accuracy"
    return [
        EvaluationStatus(
            result.version,
            scores[result.version].score if result.version in scores else None,
            measure,
            result.samples,
            result.failed,
        )
        for result in results
    ]


def _short(value: float) -> float:
    return float(f"{value:.6g}")
