"""Service times from the records of a past run with any engines, without a measurement."""

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from stretto.errors import RunError
from stretto.records.run_folder import RunFolder
from stretto.simulation import ServiceTimes, forecast
from stretto_plan.fitting import GUESSED, ROUNDS, computes, on_gpus, overhead, shortened
from stretto_plan.measuring import FEWEST_STEPS, kept_answers, lengths_of, processor_s

_SURE = 3.0
"""Number of standard errors from which a difference between steps or groups counts."""
_FEWEST_GROUPS = 50
"""Minimum number of groups that did not wait for slots, to compare the times of their decode steps."""
_NO_WAIT = 0.9
"""Share of its samples for which a group has slots, from which it counts as one that did not wait."""
_NARROW = 0.3
"""Width of the range of plausible shares from which the share of the samples in a decode step is known."""
_Lines = Sequence[Mapping[str, Any]]
_Array = NDArray[np.float64]


def steady_steps(record: RunFolder) -> _Lines:
    """Return the steps of a run with its newest values, without the first third, in which the queue fills,
    the last ones, for which no ticket is issued, and steps beside an evaluation.

    Raises RunError if fewer than `FEWEST_STEPS` remain.
    """
    since = record.history.values[-1][0]
    spans = [(evaluation.began, evaluation.ended) for evaluation in record.history.evaluations]
    steps = [line for line in record.steps if line["step"] > since]
    first, num_last = len(steps) // 3, record.config["queue"]["max_staleness"]
    lines = [
        line
        for line in steps[first : max(first + FEWEST_STEPS, len(steps) - num_last)]
        if not any(line["time"] - line["step_s"] < end and line["time"] > start for start, end in spans)
    ]
    if len(lines) < FEWEST_STEPS:
        raise RunError(
            f"the run in {record.folder} has {len(steps)} steps with its newest values, and {len(lines)} of "
            f"them after the first third and without an evaluation; expected at least {FEWEST_STEPS} of these"
        )
    return lines


def times_of(record: RunFolder, run: Mapping[str, Any], cores: int) -> ServiceTimes:
    """Return the service times of a run, from its steady steps.

    If the run does not show what the samples of a decode step cost, a step with all slots is guessed to take
    twice as long as an empty one.
    """
    lines = steady_steps(record)
    training = run["training"]
    times = ServiceTimes(**GUESSED)
    if run["inference"]["use"] != "mock":
        times = _engines(record, run, lines)
    if on_gpus(run) or run["launcher"]["use"] != "local":
        # Servers and collectives spin on cores, and `cores_used` is of the kernel's machine alone.
        return times
    used_s = processor_s(lines, cores)
    if not used_s:
        raise RunError(
            f"the steps of the run in {record.folder} lack `cores/kernel` and the like, the cores that its "
            "processes use; expected a run of this version of stretto"
        )
    clock_times, decode, train = times, 1.0, 1.0
    for _ in range(ROUNDS):
        simulated = forecast(shortened(run), times, cores=cores, computes=computes(run))
        overhead_s = used_s
        if computes(run):
            # A callback of an engine's process is taken to cost what one of a rollout worker costs: the rest
            # is computation. Clock times would include waits for a core, which the simulation adds again.
            callback_s = used_s["rollout"] / simulated.callbacks["rollout"]
            of_engines = {
                role: min(used_s[role] / 2, callback_s * simulated.callbacks[role])
                for role in ("inference", "trainer")
            }
            overhead_s = used_s | of_engines
            decode *= (used_s["inference"] - of_engines["inference"]) / simulated.engine_s
            computed_s = mean(lines, "train_s") * training["processes"] * training["threads"]
            computed_s *= simulated.interference["trainer"]
            train = (used_s["trainer"] - of_engines["trainer"]) / computed_s
        times = overhead(_scaled(clock_times, decode, train), overhead_s, simulated)
    return times


def mean(lines: _Lines, key: str) -> float:
    """Return the mean of a figure over the lines that have it; 0 if none has."""
    values = [line[key] for line in lines if key in line]
    return statistics.mean(values) if values else 0.0


def _scaled(times: ServiceTimes, decode: float, train: float) -> ServiceTimes:
    """Scale the times of engines. A verifier is taken to wait for a core as much as the trainer."""
    factors = {"step_s": decode, "sample_s": decode, "train_s": train, "token_s": train}
    factors["score_s"] = min(1.0, train)
    changed = {name: factor * getattr(times, name) for name, factor in factors.items()}
    return msgspec.structs.replace(times, **changed)


def _engines(record: RunFolder, run: Mapping[str, Any], lines: _Lines) -> ServiceTimes:
    inference, training, rows = run["inference"], run["training"], kept_answers(record)
    if not rows:
        raise RunError(
            f"the run in {record.folder} kept no trained samples, so how long prompts and answers are is not "
            "known; expected a run with `samples.keep: all`"
        )
    # Processor seconds of the engine, and of the trainer, in a second of the clock.
    engine_factor, trainer_factor = 1, 1
    if computes(run):
        engine_factor, trainer_factor = inference["threads"], training["threads"] * training["processes"]
    busy_s, tokens = (math.fsum(line[key] for line in lines) for key in ("generate_busy_s", "tokens"))
    per_token_s = engine_factor * busy_s * inference["replicas"] / tokens
    decoding, known_share = _decoding(record, rows, run)
    share = decoding / (inference["slots"] + decoding) if known_share is None else known_share
    lengths, tokens_per_sampled = lengths_of(rows)
    train_s, token_s = _line([(line["tokens"] * tokens_per_sampled, line["train_s"]) for line in lines])
    return ServiceTimes(
        **GUESSED,
        step_s=(1 - share) * per_token_s * decoding,
        sample_s=share * per_token_s,
        train_s=train_s * trainer_factor,
        token_s=token_s * (trainer_factor if computes(run) else training["processes"]),
        swap_s=mean(lines, "swap_pause_s"),
        fetch_s=mean(lines, "publish_s") + mean(lines, "receive_s"),
        score_s=_score_s(lines, run["queue"]["batch_size"]),
        lengths=lengths,
        knows_slots=known_share is not None,
        knows_tokens=train_s > 0,
    )


def _score_s(lines: _Lines, batch_size: int) -> float:
    """Return the seconds in which a verifier scores a group; 0 if it also runs tools or an environment."""
    if any(key in line for line in lines for key in ("ticket_tool_s", "ticket_environment_s")):
        return 0.0
    return mean(lines, "verify_busy_s") / batch_size


def _decoding(record: RunFolder, rows: _Lines, run: Mapping[str, Any]) -> tuple[float, float | None]:
    """Return how many samples an engine decodes at once, and the share of a decode step's time that is for
    these samples; None if the run does not show it.

    A sample leaves its group's request after its part of the longest answer's tokens. If the share is right,
    the decode steps during a request, counted by their times, are as many as the longest answer has tokens.
    """
    slots, keep = run["inference"]["slots"], run["samples"]["keep"]
    kept_of = int(keep.removeprefix("every ")) if keep.startswith("every ") else 1
    lengths = defaultdict[tuple[int, int], list[int]](list)
    for row in rows:
        lengths[row["ticket"], row["attempt"]].append(row["sampled"])
    groups = [
        (attempt.ended - done.score_s - done.generate_s, done.generate_s, answers)
        for attempt in record.history.attempts
        if (done := attempt.done) is not None and attempt.ended is not None and done.generate_s > 0
        if attempt.purpose == "train" and (answers := lengths.get((attempt.ticket, attempt.attempt)))
    ]
    if not groups:
        return float(slots), None
    changes = sorted(
        change
        for start, seconds, answers in groups
        for tokens in answers
        for change in ((start, 1), (start + seconds * tokens / max(answers), -1))
    )
    times = np.array([time for time, _ in changes])
    num_running = np.maximum(1, np.cumsum([change for _, change in changes])[:-1])
    running = num_running * kept_of / run["inference"]["replicas"]
    steady = groups[len(groups) // 3 :]
    starts, seconds, longest = np.array([(start, s, max(answers)) for start, s, answers in steady]).T

    def over_requests(values: _Array) -> _Array:
        """Integrate `values`, which have one for each time between two changes, over each request."""
        integral = np.concatenate([[0.0], np.cumsum(values * np.diff(times))])
        return np.interp(starts + seconds, times, integral) - np.interp(starts, times, integral)

    decoded = np.minimum(running, slots)
    decoding = float(np.mean(over_requests(decoded) / seconds))
    free = over_requests(decoded) > _NO_WAIT * over_requests(running)
    if free.sum() < _FEWEST_GROUPS or np.ptp(longest[free]) == 0:
        return decoding, None
    shares = np.linspace(0.0, 1.0, 41)
    steps = [over_requests(1 / ((1 - share) * decoding + share * decoded))[free] for share in shares]
    misfits = np.array([1 - np.corrcoef(each, longest[free])[0, 1] ** 2 for each in steps])
    plausible = shares[misfits <= misfits.min() * (1 + _SURE**2 / free.sum())]
    share = float(shares[misfits.argmin()])
    return decoding, share if np.ptp(plausible) <= _NARROW else None


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit a line and return intercept and slope. If the points do not show a slope, it goes through 0."""
    x, y = (statistics.mean(values) for values in zip(*points, strict=True))
    spread = math.fsum((u - x) ** 2 for u, _ in points)
    slope = math.fsum((u - x) * (v - y) for u, v in points) / spread if spread else 0.0
    residual = math.fsum((v - y - slope * (u - x)) ** 2 for u, v in points)
    error = math.sqrt(residual / (len(points) - 2) / spread) if spread else 0.0
    if slope <= _SURE * error or slope > y / x:
        return 0.0, y / x
    return y - slope * x, slope
