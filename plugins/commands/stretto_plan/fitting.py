"""Service times from measured runs: with them, simulated runs take the processor time of the real ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from stretto.simulation import Forecast, ServiceTimes, forecast
from stretto_plan.measuring import Measured

ROLES = ("kernel", "rollout", "verifier", "inference", "trainer")
STEPS = 24
ROUNDS = 3
"""Each forecast with new service times counts other callbacks."""
_GUESS_S = 5e-5
GUESSED: dict[str, Any] = {"callback_s": dict.fromkeys(ROLES, _GUESS_S), "message_s": 2 * _GUESS_S}
"""A callback, and a message, before anything is known of the machine."""


def on_gpus(run: Mapping[str, Any]) -> bool:
    """Return whether an engine of a run file has GPUs."""
    return bool(run["inference"].get("gpus") or run["training"].get("gpus"))


def computes(run: Mapping[str, Any]) -> bool:
    """Return whether the engines of a run file compute on processor cores. Those of `mock` sleep."""
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

    Engines that compute need an `other` run with fewer slots, smaller batches and no staleness. There the
    engine and the trainer work one after the other, so their seconds are processor seconds, and what their
    processes use beyond these is for messages, swaps and the like.
    """
    times = ServiceTimes(**GUESSED)
    if other is None:
        for _ in range(ROUNDS):
            times = _overhead(times, one.processor_s, _forecast(one, times, cores, computes=False))
        return times
    engine_s = other.processor_s["inference"] - other.generate_s, other.generate_s
    trainer_s = other.processor_s["trainer"] - other.train_s, other.train_s
    used = {**one.processor_s, "inference": max(0.0, engine_s[0]), "trainer": max(0.0, trainer_s[0])}
    decode_s = one.processor_s["inference"] - used["inference"], other.generate_s
    train_s = one.processor_s["trainer"] - used["trainer"], other.train_s
    with_samples = one if one.lengths else other
    tokens = (each.sampled_tokens * with_samples.tokens_per_sampled for each in (one, other))
    base_s, token_s = _line(*zip(tokens, train_s, strict=True))
    # A guess: a step with all slots costs twice one without samples.
    per_token = decode_s[0] / one.sampled_tokens
    times = msgspec.structs.replace(
        times,
        train_s=base_s,
        token_s=token_s,
        step_s=per_token * one.run["inference"]["slots"] / 2,
        sample_s=per_token / 2,
        lengths=with_samples.lengths,
    )
    for _ in range(ROUNDS):
        seen = [_forecast(each, times, cores, computes=True) for each in (one, other)]
        times = _overhead(_engine(times, decode_s, (one, other), seen), used, seen[0])
    return times


def _forecast(measured: Measured, times: ServiceTimes, cores: int, *, computes: bool) -> Forecast:
    return forecast(shortened(measured.run), times, cores=cores, computes=computes)


def _overhead(times: ServiceTimes, used_s: Mapping[str, float], seen: Forecast) -> ServiceTimes:
    """Return the times with which the callbacks of each role cost in a step what they did: `used_s` processor
    seconds, without those of computations."""
    callback_s = {role: used_s[role] / seen.callbacks[role] for role in ROLES if seen.callbacks.get(role)}
    # What else runs beside, such as the sample writer, works for each message too.
    beside_s = used_s["nats-server"] + used_s.get("other", 0.0)
    message_s = beside_s / seen.callbacks["nats-server"]
    return msgspec.structs.replace(times, callback_s=callback_s, message_s=message_s)


def _engine(
    times: ServiceTimes,
    decode_s: Sequence[float],
    runs: Sequence[Measured],
    seen: Sequence[Forecast],
) -> ServiceTimes:
    """Return the times of decode steps with which both runs take what they did, if an engine decodes as many
    samples at once as in the simulation."""
    points: list[tuple[float, float]] = []
    for seconds, measured, run in zip(decode_s, runs, seen, strict=True):
        # A step's processor time is step_s + sample_s × the samples in it.
        steps = (run.engine_s - times.sample_s * run.sampled_tokens) / times.step_s if times.step_s else 0.0
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
