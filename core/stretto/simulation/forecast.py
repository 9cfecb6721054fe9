"""Forecast the speed of a run with a universe without faults, with measured service times.

Engines are `mock`, as slow as measured; processes share the cores of a host.
"""

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from stretto.assembly.assembly import Assembly
from stretto.assembly.compose import compose
from stretto.engine import slots_for
from stretto.errors import ConfigError, RunError
from stretto.machine.scratch import scratch_folder
from stretto.simulation import patches, processes
from stretto.simulation.faults import Tape
from stretto.simulation.host import Host
from stretto.simulation.run_file import simulated
from stretto.simulation.search import LIMIT_S, allow, how_ended, in_fork
from stretto.simulation.server import SimulatedServer
from stretto.simulation.universe import Universe

_SKIPPED = 3
"""Divisor: the first third of the steps does not count, because the queue still fills."""
_ON_ITS_WAY_S = 0.0001
"""Seconds of a message within a machine, and of a thread until it runs."""


class ServiceTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of a run's work, in processor seconds of one core, or with GPUs in seconds of the clock."""

    callback_s: dict[str, float]
    """Role -> time of a callback in the event loop of its processes."""
    message_s: float
    """Time of a message in nats-server."""
    step_s: float = 0.0
    """Time of a decode step without samples."""
    sample_s: float = 0.0
    """Time that each sample adds to a decode step."""
    train_s: float = 0.0
    """Time of a train step without tokens."""
    token_s: float = 0.0
    """Time that each token adds to a train step, for all processes together."""
    swap_s: float = 0.0
    """Pause of an engine for a version."""
    fetch_s: float = 0.0
    """Time from a train step until the engines have its version, in which they sample."""
    score_s: float = 0.0
    """Time in which a process of a verifier scores a group."""
    lengths: tuple[int, ...] = ()
    knows_slots: bool = True
    """Whether the times of a decode step also hold for another number of samples in it."""
    knows_tokens: bool = True
    """Whether the times of a train step also hold for another number of tokens."""


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of the steady part of a simulated run."""

    step_s: float
    tokens_per_s: float
    """Sampled tokens that are trained, per second."""
    mean_staleness: float
    max_staleness: float
    cores: dict[str, float]
    """Role or `nats-server` -> processor seconds of a step, divided by `step_s`."""
    callbacks: dict[str, float]
    """Role -> callbacks in a step; for `nats-server`, messages."""
    engine_s: float
    """Processor seconds of the engines in a step."""
    interference: dict[str, float]
    """`inference` and `trainer` -> processor seconds of its computations, divided by those that they would
    take alone on the host."""
    sampled_tokens: float
    """Sampled tokens that are trained, in a step."""
    engine_busy: float
    """Share of the time in which the engines work."""
    train_share: float
    """Share of the time in which the trainer computes."""


def composed(file: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return a run file with all keys, absolute paths and the engine's slots, for `forecast`.

    Raises ConfigError if the run cannot be composed, or does not sample what it trains on.
    """
    run = compose(file, overrides)
    assembly = Assembly(run, folder="")
    if not assembly.graph.samples:
        use = run.components["algorithm"].name
        raise ConfigError(
            f"algorithm.use: a forecast is of a run whose policy samples; {use!r} trains on a dataset's rows",
            path="algorithm.use",
        )
    document, inference = dict(run.document), run.document["inference"]
    if inference.get("slots", 0) is None:
        slots = slots_for(assembly.samples_in_flight, deterministic=inference["deterministic"])
        document["inference"] = {**inference, "slots": slots}
    return document


def forecast(run: Mapping[str, Any], times: ServiceTimes, *, cores: int, computes: bool) -> Forecast:
    """Run a run file, with absolute paths and a few steps, on virtual time, and return its speed.

    `computes`: whether the engines compute on the host's `cores`. Engines of `mock` and on GPUs sleep; on
    GPUs, a trainer with n processes is n times as fast. Raises ConfigError if the run cannot be
    simulated, and RunError if it does not complete.
    """
    document = _with_measured_engines(run, times, computes=computes) if times.lengths else dict(run)
    simulated(document, Path())  # raises here, and not in a fork
    with scratch_folder("forecast-") as (folder, _):

        def work() -> bytes:
            universe = _FaultlessUniverse(document, folder, times, cores, computes=computes)
            universe.on_progress = partial(allow, LIMIT_S)
            return msgspec.msgpack.encode(universe.forecast())

        data, status = in_fork(work)
    result: Forecast | str = msgspec.msgpack.decode(data, type=Forecast | str) if data else ""
    if isinstance(result, str):
        raise RunError(f"the simulated run has not completed: {result or how_ended(status, LIMIT_S)}")
    return result


def _with_measured_engines(run: Mapping[str, Any], times: ServiceTimes, *, computes: bool) -> dict[str, Any]:
    kept_keys = ("slots", "replicas", "threads", "sleep")
    speedup = 1 if computes else run["training"].get("processes", 1)  # the host divides the cores
    engine = {key: value for key, value in run["inference"].items() if key in kept_keys and value is not None}
    return {
        **run,
        "inference": {
            **engine,
            "use": "mock",
            "step_s": times.step_s,
            "sample_s": times.sample_s,
            "swap_s": times.swap_s,
            "fetch_s": times.fetch_s,
            "lengths": list(times.lengths),
        },
        "training": {
            "use": "mock",
            "threads": run["training"].get("threads", 1),
            "processes": run["training"].get("processes", 1),
            "seconds_per_step": times.train_s,
            "tokens_per_s": speedup / times.token_s if times.token_s else None,
        },
    }


class _FaultlessUniverse(Universe):
    """A universe with a host, without faults and oracles."""

    def __init__(
        self, run: Mapping[str, Any], folder: Path, times: ServiceTimes, cores: int, *, computes: bool
    ) -> None:
        super().__init__(Tape(seed=1, run=dict(run), faults=()), folder)
        self._score_s = times.score_s
        training = run["training"]
        self._host = self.world.host = Host(
            self.loop,
            cores,
            times.callback_s,
            times.message_s,
            sleep_is_work=computes,
            training_threads=(training.get("threads") or 1) * training.get("processes", 1),
        )
        self.loop.on_ran = self._host.ran

    def forecast(self) -> Forecast | str:
        with self.opened():
            self.server.observers[:] = [self._host.carried, self._watch]
            engine = import_module("stretto_mock.inference")
            threads = self._composed.config.inference.threads
            places: list[tuple[Any, str, Any]] = [
                (engine, "_TICK_S", 0.01),
                (patches, "_THREAD_S", _ON_ITS_WAY_S),
                (processes, "_SCORE_S", max(self._score_s, _ON_ITS_WAY_S)),
                (SimulatedServer, "delay_s", staticmethod(lambda: _ON_ITS_WAY_S)),
            ]
            if self._host.sleep_is_work:
                places.append(
                    (engine, "pass_time", partial(self._host.computed, role="inference", threads=threads))
                )
            with patches.replaced(places):
                summary = self._live(self._kernels_in_turn())
        if summary["status"] != "completed":
            return f"{summary['status']}: {summary.get('reason')}"
        return self._read()

    def _read(self) -> Forecast:
        file = self.folder / "run" / "metrics.jsonl"
        lines = [line for text in file.open() if "step_s" in (line := msgspec.json.decode(text))]
        first, steady = lines[len(lines) // _SKIPPED - 1], lines[len(lines) // _SKIPPED :]
        steady_s = steady[-1]["time"] - first["time"]
        step_s = steady_s / len(steady)
        tokens = sum(line["tokens"] for line in steady)
        return Forecast(
            step_s=step_s,
            tokens_per_s=tokens / steady_s,
            mean_staleness=statistics.mean(line["staleness"] for line in steady),
            max_staleness=max(line.get("staleness_max", line["staleness"]) for line in steady),
            cores={role: used / len(lines) / step_s for role, used in sorted(self._host.used.items())},
            engine_s=self._host.computed_s["inference"] / len(lines),
            sampled_tokens=tokens / len(steady),
            interference={
                role: self._host.computed_s[role] / alone_s
                for role, alone_s in self._host.undisturbed_s.items()
            },
            callbacks={role: number / len(lines) for role, number in self._host.callbacks.items()},
            engine_busy=sum(line["generate_busy_s"] for line in steady) / steady_s,
            train_share=sum(line["train_s"] for line in steady) / steady_s,
        )
