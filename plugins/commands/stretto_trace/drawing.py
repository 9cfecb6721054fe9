"""The timeline of a run, drawn for Perfetto's viewer.

A worker has a track, with tracks of its tickets or served versions below. Other tracks have steps and their
waits, calls of worker groups, evaluations, waiting groups, and counters. Arrows lead from tickets to steps.
"""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from stretto.errors import ConfigError, printable
from stretto.records.charts import FIGURES
from stretto.records.run_folder import Attempt, CallSpan, RunFolder, RunHistory, SwapSpan, WorkerLife
from stretto_trace.perfetto import PerfettoFile, SpanTracks

_OF_STEP = ("reward", "loss", "staleness", "staleness_max", "tokens")  # facts of a step's span
_FIGURES = ("reward", "staleness", "staleness_max", "step_tokens_per_s")  # drawn as counters


def write_trace(folder: Path, file: Path) -> None:
    """Write the trace of the run in a folder, which may still continue."""
    record = RunFolder(folder)
    history = record.history
    if history.began is None:
        raise ConfigError(f"{folder} has no events: the run has not begun, or an older stretto ran it")
    temporary = file.with_name(f".{file.name}")
    try:
        with temporary.open("wb") as stream:
            _Drawing(PerfettoFile(stream, history.began), history, record).draw()
        temporary.replace(file)
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error}") from error


class _Drawing:
    def __init__(self, trace: PerfettoFile, history: RunHistory, record: RunFolder) -> None:
        self._trace = trace
        self._history = history
        self._began = history.began or 0.0
        self._record = record
        self._flows = {id(attempt): number for number, attempt in enumerate(history.attempts, start=1)}

    def draw(self) -> None:
        run = self._trace.track(f"run {self._record.name}")
        self._draw_kernels(run)
        self._draw_steps(run)
        self._draw_evaluations(run)
        self._draw_counters(run)
        self._draw_waiting(run)
        self._draw_calls()
        self._draw_workers()

    def _draw_kernels(self, run: int) -> None:
        track = self._trace.track("kernel", run)
        for kernel in self._history.kernels:
            facts = {
                "lease_epoch": kernel.lease_epoch,
                "from_version": kernel.version,
                "status": kernel.status or None,
            }
            self._trace.span(track, kernel.began, self._end(kernel.ended), "kernel", "kernel", facts)

    def _draw_steps(self, run: int) -> None:
        track = self._trace.track("steps", run)
        lines = {line["step"]: line for line in self._record.steps}
        trained: dict[int, list[int]] = {}
        for attempt in self._history.attempts:
            if attempt.step is not None:
                trained.setdefault(id(attempt.step), []).append(self._flows[id(attempt)])
        last_end, drawn_versions = self._began, set[int]()
        for step in self._history.steps:
            start = max(step.began, last_end)
            for cause, wait_start, wait_end in step.waits():
                wait_start, wait_end = max(last_end, wait_start), max(last_end, wait_end)
                name = f"waiting for {cause}"
                self._trace.span(track, wait_start, wait_end, name, "wait", {"step": step.version})
            line = lines.get(step.version, {})
            facts = {
                "step": step.version,
                "tickets": ", ".join(str(ticket) for ticket in step.figures.tickets),
                "repeated": step.version in drawn_versions,
                **{name: line.get(name) for name in _OF_STEP},
            }
            ends = trained.get(id(step), ())
            self._trace.span(track, start, step.trained, f"step {step.version}", "step", facts, ends=ends)
            if step.trained < step.ended:
                self._trace.span(track, step.trained, step.ended, "publication of the weights", "wait", {})
            last_end = step.ended
            drawn_versions.add(step.version)

    def _draw_evaluations(self, run: int) -> None:
        track = self._trace.track("evaluations", run)
        last_end = self._began
        for span in self._history.evaluations:
            result = span.result
            facts = {
                "version": result.version,
                "accuracy": result.accuracy,
                "reward": result.reward,
                "samples": result.samples,
                "failed": result.failed,
            }
            name = f"evaluation of version {result.version}"
            self._trace.span(track, max(span.began, last_end), span.ended, name, "evaluation", facts)
            last_end = span.ended

    def _draw_counters(self, run: int) -> None:
        for name, series in (
            ("tickets in flight", self._history.in_flight),
            ("finished groups", self._history.waiting),
        ):
            track = self._trace.counter(name, "", run)
            for time, value in series:
                self._trace.count(track, time, value)
        track = self._trace.counter("generated tokens", "tokens/s", run)
        for time, value in self._generation_speeds():
            self._trace.count(track, time, value)
        for key in _FIGURES:
            track = self._trace.counter(FIGURES[key].label, FIGURES[key].unit, run)
            values = dict(self._record.series(key))
            for step in self._history.steps:
                if step.version in values:
                    self._trace.count(track, step.ended, values[step.version])

    def _generation_speeds(self) -> Iterator[tuple[float, float]]:
        """Yield (start, tokens per second) of the groups finished in each interval between two steps."""
        finished = sorted(
            (self._end(attempt.ended), attempt.done.tokens)
            for attempt in self._history.attempts
            if attempt.done
        )
        index, last_end = 0, self._began
        for step in self._history.steps:
            tokens = 0
            while index < len(finished) and finished[index][0] <= step.ended:
                tokens += finished[index][1]
                index += 1
            if step.ended > last_end:
                yield last_end, tokens / (step.ended - last_end)
            last_end = step.ended

    def _draw_waiting(self, run: int) -> None:
        """Draw groups from their last trajectory to their step, and attempts that no worker took."""
        history, trace = self._history, self._trace
        lanes = SpanTracks(trace, "groups waiting for their step", run)
        waiting = [attempt for attempt in history.attempts if attempt.step is not None]
        for attempt in sorted(waiting, key=lambda each: self._end(each.ended)):
            assert attempt.step is not None
            start = self._end(attempt.ended)
            end = max(start, attempt.step.began)
            track, facts = lanes.free_track(start, end), {"step": attempt.step.version}
            flows = [self._flows[id(attempt)]]
            trace.span(track, start, end, attempt.name, "waiting", facts, flows=flows)
        lanes = SpanTracks(trace, "tickets that nobody took", run)
        for attempt in sorted(history.attempts, key=lambda each: each.start):
            if not attempt.worker:
                end = self._end(attempt.ended)
                track = lanes.free_track(attempt.start, end)
                trace.span(track, attempt.start, end, attempt.name, "ticket", self._facts(attempt))

    def _draw_calls(self) -> None:
        groups: dict[str, list[CallSpan]] = {}
        for call in self._history.calls:
            groups.setdefault(call.figures.group, []).append(call)
        for group, calls in sorted(groups.items()):
            track, last_end = self._trace.track(f"worker group {group}"), 0.0
            for call in calls:
                figures = call.figures
                facts = {"call": figures.call, "version": figures.version, "seconds_of_work": figures.seconds}
                self._trace.span(track, max(figures.began, last_end), call.ended, figures.call, "call", facts)
                last_end = call.ended

    def _draw_workers(self) -> None:
        attempts: defaultdict[str, list[Attempt]] = defaultdict(list)
        for attempt in self._history.attempts:
            attempts[attempt.worker].append(attempt)
        for name in sorted(({life.worker for life in self._history.lives} | attempts.keys()) - {""}):
            track = self._trace.track(printable(name))
            for life in self._history.lives:
                if life.worker == name:
                    self._draw_life(track, life)
            swaps = [swap for swap in self._history.swaps if swap.figures.worker == name]
            if swaps:
                self._draw_weights(track, name, swaps)
            self._draw_tickets(track, attempts[name])

    def _draw_life(self, track: int, life: WorkerLife) -> None:
        end = self._end(life.ended)
        ready = end if life.ready is None else life.ready
        facts = {"ended": printable(life.how) or None}
        self._trace.span(track, life.joined, ready, "loading", "worker", {} if life.ready else facts)
        if life.ready is not None:
            self._trace.span(track, ready, end, "ready", "worker", facts)

    def _draw_weights(self, parent: int, worker: str, swaps: list[SwapSpan]) -> None:
        track = self._trace.track("weights", parent)
        ends = [self._end(life.ended) for life in self._history.lives if life.worker == worker]
        for index, swap in enumerate(swaps):
            info = swap.figures
            facts = {"version": info.version, "pause_s": info.pause_s, "for_evaluation_alone": info.exact}
            self._trace.span(track, info.began, swap.ended, f"swap to version {info.version}", "swap", facts)
            worker_end = min((end for end in ends if end >= swap.ended), default=self._history.ended)
            until = min(worker_end, swaps[index + 1].figures.began) if index + 1 < len(swaps) else worker_end
            use = f"version {info.version}{' (evaluation)' if info.exact else ''}"
            self._trace.span(track, swap.ended, max(until, swap.ended), use, "weights", facts)

    def _draw_tickets(self, parent: int, attempts: list[Attempt]) -> None:
        for purpose, name in (("train", "tickets"), ("eval", "evaluation tickets")):
            lanes = SpanTracks(self._trace, name, parent)
            of_purpose = [attempt for attempt in attempts if attempt.purpose == purpose]
            for attempt in sorted(of_purpose, key=lambda each: each.start):
                end = self._end(attempt.ended)
                track = lanes.free_track(attempt.start, end)
                flows = [self._flows[id(attempt)]] if attempt.step is not None else []
                facts = self._facts(attempt)
                category = "ticket" if purpose == "train" else "evaluation ticket"
                self._trace.span(track, attempt.start, end, attempt.name, category, facts, flows=flows)

    def _facts(self, attempt: Attempt) -> dict[str, str | int | float | None]:
        issued, done = attempt.issued, attempt.done
        facts: dict[str, str | int | float | None] = {
            "ticket": attempt.ticket,
            "attempt": attempt.attempt,
            "row": issued.row if issued else None,
            "min_version": issued.min_version if issued else None,
            "worker": printable(attempt.worker) or None,
            "outcome": attempt.outcome,
            "reason": printable(attempt.reason) or None,
            "trained_at_step": attempt.step.version if attempt.step else None,
            "queued_s": round(attempt.start - (attempt.issued_at or attempt.start), 4),
        }
        if done is not None:
            facts |= {
                "samples": done.samples,
                "reward": done.reward,
                "tokens": done.tokens,
                "oldest_version": done.oldest,
                "generate_s": done.generate_s,
                "score_s": done.score_s,
            }
        return facts

    def _end(self, time: float | None) -> float:
        return self._history.ended if time is None else time
