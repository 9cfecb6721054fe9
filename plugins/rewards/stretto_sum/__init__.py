"""Reward `sum`: the weighted sum of several rewards, each of which is also a metric."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from stretto import Component, Context, Problem, RewardConfig, hookimpl
from stretto.component import ComponentParts
from stretto.config import RunConfig
from stretto.errors import RewardError
from stretto.reward import text_of
from stretto.user_code.scoring import optional_scores, scores_groups

__all__ = ["SumConfig"]


class SumConfig(RewardConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the reward `sum`.

    The metrics have the reward of each part under the part's name, without the weight, and the part's metrics
    as `part/metric`. If the first part has an `accuracy`, it is the accuracy of the sum, so that evaluations
    measure the content and not the form. A part that returns None for an answer does not count for this
    answer; an answer for which all parts return None has no score.
    """

    parts: ComponentParts = ComponentParts()
    """The rewards, each written `name: {use: …}` like `reward`. Without limits of its own, the sum has the
    `answer_cpu_s` and `answer_memory_mb` of its parts, added up. `timeout_s` of a part is not used."""
    weights: Mapping[str, float] = {}
    """Weight of each part, by name; 1 for a part without an entry."""

    def __post_init__(self) -> None:
        names = self.parts.__struct_fields__
        if not names:
            raise ValueError("parts: expected at least one, such as `parts: {right: exact}`")
        if "accuracy" in names:
            raise ValueError("parts: no part can be called 'accuracy', because the sum reports one")
        if unknown := [name for name in self.weights if name not in names]:
            raise ValueError(f"weights: no part {unknown[0]!r}; the parts: {', '.join(names)}")

    @property
    def limits(self) -> tuple[float | None, int | None]:
        """The limits of one answer: those of the section, else the sums of the parts' limits."""
        parts = [getattr(self.parts, name).limits for name in self.parts.__struct_fields__]
        seconds = [cpu_s for cpu_s, _ in parts if cpu_s is not None]
        megabytes = [memory_mb for _, memory_mb in parts if memory_mb is not None]
        return (
            self.answer_cpu_s or (sum(seconds) if seconds else None),
            self.answer_memory_mb or (sum(megabytes) if megabytes else None),
        )


def make(config: SumConfig, context: Context, parts: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Return the scoring function. It scores whole groups, so that a part waits for a server only once. With
    limits it scores one answer per call, unless a part scores groups."""
    del context
    weights = {name: config.weights.get(name, 1.0) for name in parts}

    def total(
        row: Mapping[str, Any], texts: Sequence[str], each: Mapping[str, Sequence[Any]]
    ) -> list[dict[str, float | None]]:
        scores = {name: _scores_of(name, part, row, texts, each) for name, part in parts.items()}
        return [
            _summed(
                {name: score for name in parts if (score := scores[name][index])}, weights, next(iter(parts))
            )
            for index in range(len(texts))
        ]

    def of_one(prompt: Any, completion: str, **columns: Any) -> dict[str, float | None]:
        return total({**columns, "prompt": prompt}, [completion], {})[0]

    def of_group(
        completions: Sequence[Any], prompts: Sequence[Any], **columns: Any
    ) -> list[dict[str, float | None]]:
        texts = [*map(text_of, completions)]
        return total({"prompt": prompts[0]}, texts, columns)

    limited = any(config.limits) and not any(map(scores_groups, parts.values()))
    return of_one if limited else of_group


def _scores_of(
    name: str,
    part: Callable[..., Any],
    row: Mapping[str, Any],
    texts: Sequence[str],
    each: Mapping[str, Sequence[Any]],
) -> list[tuple[float, dict[str, float]] | None]:
    try:
        return optional_scores(part, row, tuple(texts), each)
    except RewardError as error:
        raise RewardError(f"part {name!r}: {error}", kind=error.kind, site=error.site) from error


def _summed(
    scores: Mapping[str, tuple[float, Mapping[str, float]]], weights: Mapping[str, float], main: str
) -> dict[str, float | None]:
    """Return the reward and the metrics of one answer. `main` is the name of the first part."""
    if not scores:
        return {"reward": None}
    _, main_metrics = scores.get(main, (0.0, {}))
    return {
        "reward": sum(weights[name] * value for name, (value, _) in scores.items()),
        **({"accuracy": main_metrics["accuracy"]} if "accuracy" in main_metrics else {}),
        **{name: value for name, (value, _) in scores.items()},
        **{f"{name}/{key}": value for name, (_, metrics) in scores.items() for key, value in metrics.items()},
    }


def check(config: SumConfig, run: RunConfig) -> Iterator[Problem]:
    """Warn of weights that leave no reward."""
    del run
    if not any(config.weights.get(name, 1.0) for name in config.parts.__struct_fields__):
        yield Problem("reward.weights", "are all 0, so every reward is 0", "warning")


@hookimpl
def stretto_reward() -> Iterator[Component[SumConfig]]:
    yield Component("sum", make, SumConfig, "the weighted sum of several rewards, each of them logged", check)
