"""Fit service times to measured runs, so that simulated runs use as much processor time as the real ones."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from stretto.simulation import Forecast, ServiceTimes, forecast
from stretto_plan.measuring import Measured

ROLES = ("kernel", "rollout", "verifier", "inference", "trainer")
STEPS = 24  # of a simulated run
ROUNDS = 3
"""Number of fits: each forecast with new service times has another number of callbacks."""
GUESS_S = 5e-5  # for a callback
GUESSED: dict[str, Any] = {"callback_s": dict.fromkeys(ROLES, GUESS_S), "message_s": 2 * GUESS_S}
"""First guess of the service times of callbacks and messages."""


def on_gpus(run: Mapping[str, Any]) -> bool:
    """Return True if an engine of a run file has GPUs."""
    return bool(run["inference"].get("gpus") or run["training"].get("gpus"))


def computes(run: Mapping[str, Any]) -> bool:
    """Return True if the engines of a run file compute on processor cores; `mock` engines sleep instead."""
    return run["inference"]["use"] != "mock" and not on_gpus(run)


def shortened(run: Mapping[str, Any], numbers: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the run file of a short simulated run, with other `numbers`, such as `inference.slots`."""
    checkpoint = {**run["checkpoint"], "every": 0}
    changed: dict[str, Any] = {**run, "steps": STEPS, "checkpoint": checkpoint}
    changed.pop("evaluation", None)
    for key, value in (numbers or {}).items():
        section, _, name = key.partition(".")
        changed[section] = {**changed[section], name: value}
    return changed


def fit(one: Measured, other: Measured | None, cores: int) -> ServiceTimes:
    """Return the service times of a run.

    Engines that compute need an `other` run with fewer slots, smaller batches and no staleness. In that run
    engine and trainer work one after the other, so their seconds are processor seconds. All other processor
    time of their processes is for messages, swaps and the like.
    """
    times = ServiceTimes(**GUESSED)
    if other is None:
        for _ in range(ROUNDS):
            times = overhead(times, one.processor_s, _forecast(one, times, cores, computes=False))
        return times
    engine_s = other.processor_s["inference"] - other.generate_s, other.generate_s
    trainer_s = other.processor_s["trainer"] - other.train_s, other.train_s
    overhead_s = {**one.processor_s, "inference": max(0.0, engine_s[0]), "trainer": max(0.0, trainer_s[0])}
    decode_s = one.processor_s["inference"] - overhead_s["inference"], other.generate_s
    train_s = one.processor_s["trainer"] - overhead_s["trainer"], other.train_s
    with_samples = one if one.lengths else other
    tokens = [measured.sampled_tokens * with_samples.tokens_per_sampled for measured in (one, other)]
    # A guess: a decode step with all slots costs twice as much as one without samples.
    per_token = decode_s[0] / one.sampled_tokens
    times = msgspec.structs.replace(
        times,
        token_s=train_s[0] / tokens[0],
        step_s=per_token * one.run["inference"]["slots"] / 2,
        sample_s=per_token / 2,
        lengths=with_samples.lengths,
    )
    for _ in range(ROUNDS):
        forecasts = [_forecast(measured, times, cores, computes=True) for measured in (one, other)]
        alone_s = [used / seen.interference["trainer"] for used, seen in zip(train_s, forecasts, strict=True)]
        base_s, token_s = _line(*zip(tokens, alone_s, strict=True))
        times = msgspec.structs.replace(times, train_s=base_s, token_s=token_s)
        times = overhead(_engine(times, decode_s, (one, other), forecasts), overhead_s, forecasts[0])
    return times


def _forecast(measured: Measured, times: ServiceTimes, cores: int, *, computes: bool) -> Forecast:
    return forecast(shortened(measured.run), times, cores=cores, computes=computes)


def overhead(times: ServiceTimes, used_s: Mapping[str, float], seen: Forecast) -> ServiceTimes:
    """Fit the times of callbacks and messages, so that a simulated step uses the measured processor time:
    `used_s`, by role, without computations."""
    callback_s = {role: used_s[role] / seen.callbacks[role] for role in ROLES if seen.callbacks.get(role)}
    # Other processes, such as the sample writer, also work for each message.
    nats_and_others_s = used_s.get("nats-server", 0.0) + used_s.get("other", 0.0)
    message_s = nats_and_others_s / seen.callbacks["nats-server"]
    return msgspec.structs.replace(times, callback_s=callback_s, message_s=message_s)


def _engine(
    times: ServiceTimes, decode_s: Sequence[float], runs: Sequence[Measured], seen: Sequence[Forecast]
) -> ServiceTimes:
    """Fit the times of decode steps, so that both runs use the measured processor time, `decode_s`, if their
    engines decode as many samples at once as in the simulation."""
    points: list[tuple[float, float]] = []
    for used_s, measured, run in zip(decode_s, runs, seen, strict=True):
        seconds, engine_s = (each / run.interference["inference"] for each in (used_s, run.engine_s))
        # A step's processor time is step_s + sample_s × the samples in it.
        steps = (engine_s - times.sample_s * run.sampled_tokens) / times.step_s if times.step_s else 0.0
        decoding = run.sampled_tokens / steps if steps > 0 else 1.0
        points.append((decoding, seconds * decoding / measured.sampled_tokens))
    step_s, sample_s = _line(*points)
    return msgspec.structs.replace(times, step_s=max(step_s, 1e-7), sample_s=sample_s)


def _line(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    """Return the intercept and the slope of the line through two points, neither below 0."""
    (x, y), (u, v) = one, other
    slope = (y - v) / (x - u) if x != u else 0.0
    slope = min(max(slope, 0.0), y / x)
    return max(y - slope * x, 0.0), slope
