"""Service times from the records of a past run with any engines, without a measurement."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from stretto.errors import RunError
from stretto.records.run_folder import RunFolder
from stretto.simulation import Forecast, ServiceTimes, forecast
from stretto_plan.fitting import GUESSED, ROLES, ROUNDS, computes, on_gpus, shortened
from stretto_plan.measuring import FEWEST_STEPS, answers_of

_SURE = 3.0
"""Number of standard errors from which the cost of a token is read from differences between steps."""
_Lines = Sequence[Mapping[str, Any]]


def times_of(record: RunFolder, run: Mapping[str, Any], cores: int) -> ServiceTimes:
    """Return the service times of a run, from its steps without an evaluation.

    A guess, which one run cannot show: a decode step with all slots takes twice as long as an empty one.
    """
    lines = _without_evaluations(record)
    inference, training = run["inference"], run["training"]
    times = ServiceTimes(**GUESSED)
    if inference["use"] != "mock":
        times = _engines(record, run, lines)
    if on_gpus(run):
        return times  # servers and collectives spin on cores, so `cores_used` shows no other work
    computed_s, step_s = 0.0, _mean(lines, "step_s")
    if computes(run):
        computed_s = _mean(lines, "generate_busy_s") * inference["replicas"] * inference["threads"]
        computed_s += _mean(lines, "train_s") * training["processes"] * training["threads"]
    used_s, clock_times, share = _mean(lines, "cores_used") * cores * step_s, times, 1.0
    for _ in range(ROUNDS):
        simulated = forecast(shortened(run), times, cores=cores, computes=computes(run))
        # Clock times include waits for a core, and the simulated host adds such waits again.
        share = min(1.0, share * step_s / simulated.step_s)
        times = _overhead(_scaled(clock_times, share), max(0.0, used_s - share * computed_s), simulated)
    return times


def _scaled(times: ServiceTimes, factor: float) -> ServiceTimes:
    names = ("step_s", "sample_s", "train_s", "token_s")
    return msgspec.structs.replace(times, **{name: factor * getattr(times, name) for name in names})


def _without_evaluations(record: RunFolder) -> _Lines:
    spans = [(evaluation.began, evaluation.ended) for evaluation in record.history.evaluations]
    lines = [
        line
        for line in record.steps[len(record.steps) // 3 :]
        if not any(line["time"] - line["step_s"] < end and line["time"] > start for start, end in spans)
    ]
    if len(lines) < FEWEST_STEPS:
        raise RunError(
            f"the run in {record.folder} has {len(lines)} steps after its first third and without an "
            f"evaluation; expected at least {FEWEST_STEPS}"
        )
    return lines


def _engines(record: RunFolder, run: Mapping[str, Any], lines: _Lines) -> ServiceTimes:
    inference, training = run["inference"], run["training"]
    # Processor seconds of the engine, and of the trainer, in a second of the clock.
    engine_factor, trainer_factor = 1, 1
    if computes(run):
        engine_factor, trainer_factor = inference["threads"], training["threads"] * training["processes"]
    slots, tokens = inference["slots"], math.fsum(line["tokens"] for line in lines)
    busy_s, all_s = (math.fsum(line[key] for line in lines) for key in ("generate_busy_s", "step_s"))
    decoding = min(slots, max(1.0, _mean(lines, "slots_used") * slots * all_s / busy_s))
    sample_s = busy_s * inference["replicas"] / tokens / (slots / decoding + 1)
    lengths, tokens_per_sampled = answers_of(record)
    if not lengths:
        raise RunError(
            f"the run in {record.folder} kept no trained samples, so how long prompts and answers are is not "
            "known; expected a run with `samples.keep: all`"
        )
    train_s, token_s = _line([(line["tokens"] * tokens_per_sampled, line["train_s"]) for line in lines])
    return ServiceTimes(
        **GUESSED,
        step_s=sample_s * slots * engine_factor,
        sample_s=sample_s * engine_factor,
        train_s=train_s * trainer_factor,
        token_s=token_s * (trainer_factor if computes(run) else training["processes"]),
        swap_s=_mean(lines, "swap_pause_s"),
        lengths=lengths,
        knows_slots=False,
    )


def _mean(lines: _Lines, key: str) -> float:
    return statistics.mean(line[key] for line in lines if key in line)


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


def _overhead(times: ServiceTimes, rest_s: float, seen: Forecast) -> ServiceTimes:
    """Fit the times of callbacks and messages, so that those of a step use `rest_s` processor seconds. A
    message is assumed to cost twice as much as a callback."""
    num_callbacks = sum(seen.callbacks.get(role, 0.0) for role in ROLES) + 2 * seen.callbacks["nats-server"]
    callback_s = rest_s / num_callbacks
    return msgspec.structs.replace(
        times, callback_s=dict.fromkeys(ROLES, callback_s), message_s=2 * callback_s
    )
