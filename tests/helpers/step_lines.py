"""Lines of `metrics.jsonl` as a healthy run writes them, with what a test changes, and the advice on them."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto.observe.advice import Advice, Adviser

Line = dict[str, Any]

NO_BOUND = {"bound": None}
RUN: dict[str, Any] = {
    "algorithm": {"group_size": 8, "correction": {"use": "decoupled"}, "entropy_coef": 0.0},
    "training": {"lr": 3e-4, "clip_norm": 1.0, "threads": 1, "processes": 1, "dtype": "float32"},
    "inference": {"slots": 16, "replicas": 1, "cache_gb": 1.0, "dtype": "bfloat16", "canary": NO_BOUND},
    "queue": {"batch_size": 32, "max_staleness": 2},
    "rollout": {"concurrency": 64},
    "sampling": {"max_tokens": 32},
    "reward": {"timeout_s": 30.0},
    "verifier": {"processes": 1, "children": 1},
}


class Steps:
    """Lines of a healthy run, 32 groups of 8 answers with rewards 0 and 1, but for what a test changes."""

    def __init__(self, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        self._step = 0

    def __call__(self, count: int, reward: float | tuple[float, float] = 0.5, **changed: Any) -> list[Line]:
        """Lines of more steps, with a constant mean reward or one that goes from one value to another."""
        means = np.linspace(*reward, count) if isinstance(reward, tuple) else np.full(count, reward)
        return [self._line(float(mean)) | changed for mean in means]

    def _line(self, mean: float) -> Line:
        self._step += 1
        random = self._random
        rates = random.beta(2 * mean + 1e-9, 2 * (1 - mean) + 1e-9, 32)  # rows are of mixed difficulty
        answers = random.binomial(8, rates)
        rewards = np.repeat([0.0, 1.0], [256 - answers.sum(), answers.sum()])
        return {
            "step": self._step,
            "step_s": 1.0,
            "train_s": float(random.uniform(0.55, 0.9)),
            "reward": float(rewards.mean()),
            "reward_std": float(rewards.std()),
            "reward_max": float(rewards.max()),
            "zero_variance_groups": float(np.mean((answers == 0) | (answers == 8))),
            "truncated": float(random.uniform(0, 0.1)),
            "entropy": float(random.uniform(0.25, 0.35)),
            "grad_norm": float(random.lognormal(0, 0.7)),
            "lr": 3e-4,
            "lr_scale": 1.0,
            "behaviour_kl": 0.002,
            "masked_fraction": float(random.uniform(0, 0.05)),
            "canary_mean": 1e-5,
            "generate_busy_s": float(random.uniform(0.5, 0.9)),
            "ticket_generate_s": 0.6,
            "ticket_score_s": 0.05,
            "swap_pause_s": 0.01,
            "slots_used": float(random.uniform(0.3, 1.0)),
            "samples_waiting": float(random.uniform(0, 10)),
            "kv_used": float(random.uniform(0.1, 0.6)),
            "lost_per_token": 0.2,
            "not_trained": {},
        }


def correlated(
    random: np.random.Generator, deviation: float, correlation: float, count: int
) -> NDArray[np.float64]:
    """Normal noise whose steps are correlated."""
    noise = random.normal(0, deviation, count)
    for step in range(1, count):
        noise[step] = correlation * noise[step - 1] + np.sqrt(1 - correlation**2) * noise[step]
    return noise


def advised(lines: Iterable[Line], run: dict[str, Any] = RUN) -> list[Advice]:
    adviser = Adviser(run)
    for line in lines:
        adviser.step(line)
    return adviser.given
