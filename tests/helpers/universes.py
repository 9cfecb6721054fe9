"""Tapes of random universes, in two sizes."""

from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any

import msgspec

from stretto.simulation import Fault, Tape, run_tape
from stretto.simulation.faults import draw

_PATIENCE_S = 45.0


def small(seed: int, faults: int | None = None) -> Tape:
    """One rollout worker, two engines, one verifier, one trainer; 40 groups."""
    rng = Random(f"small {seed}")
    run = _run(rng, steps=10, engines=2, rollouts=1, verifiers=1) | _workflow(f"small {seed}")
    _give_own_engine(run, f"small {seed}")
    _let_sleep(run, f"small {seed}")
    return _tape(small, seed, run, draw(rng, _number(rng, faults), 7.5))


def large(seed: int, faults: int | None = None) -> Tape:
    """Two rollout workers, three engines, two verifiers, one trainer; 200 groups."""
    rng = Random(f"large {seed}")
    run = _run(rng, steps=25, engines=3, rollouts=2, verifiers=2) | _workflow(f"large {seed}")
    run["queue"]["batch_size"] = 8
    _give_own_engine(run, f"large {seed}")
    _let_sleep(run, f"large {seed}")
    return _tape(large, seed, run, draw(rng, _number(rng, faults), 18.0))


def _tape(size: Callable[..., Tape], seed: int, run: dict[str, Any], faults: tuple[Fault, ...]) -> Tape:
    tape = Tape(seed=seed, run=run, faults=faults, patience_s=_PATIENCE_S)
    if run["queue"]["max_staleness"] or not faults:
        return tape
    return msgspec.structs.replace(tape, model=_model(size, run["inference"]["sigma"], "workflow" in run))


@cache
def _model(size: Callable[..., Tape], sigma: float, has_turns: bool) -> str:
    """Return the model with which all runs of a size end that have no staleness and such answers."""
    calm = (size(seed, 0) for seed in range(100))
    alike = (sigma, has_turns)
    same = (tape for tape in calm if (tape.run["inference"]["sigma"], "workflow" in tape.run) == alike)
    return run_tape(next(tape for tape in same if not tape.run["queue"]["max_staleness"])).model


def _workflow(name: str) -> dict[str, Any]:
    """Return the workflow of a universe: for a third of them several turns, whose samples fail one by one."""
    if Random(f"workflow {name}").random() < 2 / 3:
        return {}
    environment = "stretto.simulation.plugin:guessing"
    return {"workflow": {"use": "multi_turn", "environment": environment, "max_turns": 3}}


def _give_own_engine(run: dict[str, Any], name: str) -> None:
    """Give the evaluations of half of the universes one of the engines for themselves."""
    if "evaluation" in run and Random(f"engine {name}").random() < 0.5:
        run["evaluation"]["own_engine"] = True
        run["inference"]["replicas"] -= 1


def _let_sleep(run: dict[str, Any], name: str) -> None:
    """Let generation and training take turns in a quarter of the universes."""
    if Random(f"sleep {name}").random() < 1 / 4:
        run["inference"]["sleep"] = True


def _number(rng: Random, faults: int | None) -> int:
    return rng.randint(5, 7) if faults is None else faults


def _run(rng: Random, *, steps: int, engines: int, rollouts: int, verifiers: int) -> dict[str, Any]:
    run: dict[str, Any] = {
        "name": "universe",
        "steps": steps,
        "algorithm": {"use": "grpo", "group_size": 4},
        "training": {"seconds_per_step": 0.5},
        "inference": {
            "replicas": engines,
            "slots": rng.choice([2, 16]),
            "tokens_per_s": rng.choice([800.0, 4000.0]),
            "swap_s": rng.choice([0.02, 0.2, 0.5]),
            "mean_tokens": 24.0,
            "sigma": rng.choice([0.5, 1.0]),
        },
        "sampling": {"max_tokens": 64},
        "rollout": {"processes": rollouts, "concurrency": rng.choice([2, 256])},
        "verifier": {"processes": verifiers},
        "reward": "exact",
        "queue": {
            "batch_size": 4,
            "max_staleness": rng.choice([0, 1, 2]),
            "max_failures": 1000,
            "max_attempts": 100,
        },
        "checkpoint": {"every": rng.choice([0, 1, 3])},
        "launcher": {"max_restarts": 100},
        "weights": {"keep": rng.choice([2, 3])},
    }
    if rng.random() < 0.6:
        every, rows = rng.choice([2, 3]), rng.choice([4, 16])
        run["evaluation"] = {"every": every, "rows": rows, "sampling": {"temperature": 0}}
    return run
