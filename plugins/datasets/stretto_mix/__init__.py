"""Dataset `mix`: several datasets as one, drawn by weights, and a curriculum by the rewards of their rows."""

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from statistics import fmean
from typing import Literal

import msgspec

from stretto import Component, Context, DatasetConfig, Problem, hookimpl
from stretto.component import ComponentParts, NonNegativeFloat, NonNegativeInt
from stretto.config import RunConfig
from stretto.dataset import CurriculumDataset, Dataset, Row, SourcedDataset
from stretto.errors import ConfigError, offer
from stretto_mix.curriculum import UNSEEN, MixCurriculum, Pool, weight_at

__all__ = ["GateConfig", "Mix", "MixConfig", "PoolConfig"]


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rows of similar difficulty."""

    max: float | None = None
    """Highest mean reward of the pool's rows, inclusive. Exactly one pool has no `max`: it gets all rows
    above the others."""
    weight: NonNegativeFloat = 1.0
    """Chance of a row of this pool, relative to rows of other pools. With 0, a row never leaves the pool,
    because it is not drawn again."""


class GateConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rule by which finished groups are left out of training."""

    of: Literal["mean", "range"] = "range"
    """Figure of a group's rewards: their mean, or the highest reward minus the lowest."""
    reject_min: float = 0.0
    """Lowest figure of the groups that are left out, inclusive."""
    reject_max: float = 0.0
    """Highest figure of the groups that are left out, inclusive."""

    def __post_init__(self) -> None:
        if self.reject_max < self.reject_min:
            raise ValueError(f"reject_max is {self.reject_max:g}, below reject_min, {self.reject_min:g}")

    def rejects(self, rewards: Sequence[float]) -> bool:
        """Return True if the gate rejects a group with these rewards."""
        figure = fmean(rewards) if self.of == "mean" else max(rewards) - min(rewards)
        return self.reject_min <= figure <= self.reject_max


class MixConfig(DatasetConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the dataset `mix`."""

    parts: ComponentParts = ComponentParts()
    """The datasets, each written `name: {use: …}` like `dataset`. Their rows are one after the other. Set
    `shuffle` and `max_prompt_tokens` at the mix, not at a part."""
    weights: Mapping[str, NonNegativeFloat | Mapping[NonNegativeInt, NonNegativeFloat]] = {}
    """Weight of each part in the draw of tickets, relative to the other parts; 1 for a part without an entry.
    A schedule such as `{0: 0, 100: 1}` sets weights at steps; they change linearly in between. Without any
    entry, all rows have the same chance."""
    pools: Mapping[str, PoolConfig] = {}
    """Difficulty pools, such as `{hard: {max: 0.1, weight: 0.1}, fitting: {max: 0.9}, easy: {weight: 0.1}}`.
    A row is in the first pool, by rising `max`, that its newest group's mean reward does not exceed."""
    unseen: NonNegativeFloat = 1.0
    """With `pools`: weight of the rows that have no finished group yet."""
    gates: Mapping[str, GateConfig] = {}
    """Gates, by name. The run filters a group that any gate rejects; the group's rewards still count for the
    pools."""

    def __post_init__(self) -> None:
        names = self.parts.__struct_fields__
        if not names:
            raise ValueError("parts: expected at least one, such as parts: {sums: {use: jsonl, path: …}}")
        for name in names:
            part: DatasetConfig = getattr(self.parts, name)
            if part.max_prompt_tokens is not None or not part.shuffle:
                raise ValueError(f"parts.{name}: write max_prompt_tokens and shuffle at the mix")
        for name in self.weights:
            if name not in names:
                raise ValueError(f"weights: no part {name!r}{offer(name, names, 'the parts')}")
        self._check_schedules()
        self._check_pools()

    def _check_schedules(self) -> None:
        steps = {step for weight in self.weights.values() if isinstance(weight, Mapping) for step in weight}
        for name, weight in self.weights.items():
            if isinstance(weight, Mapping) and not weight:
                raise ValueError(f"weights.{name}: expected a weight at one step at least, such as {{0: 1}}")
        for step in sorted(steps | {0}):
            if not any(weight_at(self.weight(name), step) for name in self.parts.__struct_fields__):
                raise ValueError(f"weights: all parts have the weight 0 at step {step}")

    def _check_pools(self) -> None:
        if not self.pools:
            return
        if UNSEEN in self.pools:
            raise ValueError(f"pools: no pool can be called {UNSEEN!r}: rows without a result are in it")
        bounds = [pool.max for pool in self.pools.values()]
        if bounds.count(None) != 1:
            raise ValueError(
                f"pools: {bounds.count(None)} of them have no max; expected exactly one, which gets the "
                "rows above the others"
            )
        if len(set(bounds)) < len(bounds):
            raise ValueError("pools: two of them have the same max")

    def weight(self, name: str) -> float | Mapping[int, float]:
        return self.weights.get(name, 1.0)


class Mix:
    """The rows of the parts, one part after the other."""

    def __init__(self, config: MixConfig, context: Context, parts: Mapping[str, Dataset]) -> None:
        del context
        for name, part in parts.items():
            if isinstance(part, CurriculumDataset):
                raise ConfigError(f"parts.{name} has a curriculum of its own; put its parts into this mix")
            if len(part) == 0:
                raise ConfigError(f"parts.{name} is empty; expected at least one row")
        self._config = config
        self._parts = parts
        self._names = list(parts)
        self._starts = [0, *accumulate(len(part) for part in parts.values())]
        digests = [(name, part.fingerprint) for name, part in parts.items()]
        self.fingerprint = hashlib.sha256(msgspec.json.encode(digests)).hexdigest()
        self.sources: list[tuple[str, range]] = []
        """See `stretto.dataset.SourcedDataset`."""
        for part in parts.values():
            own = part.sources if isinstance(part, SourcedDataset) else [(part.fingerprint, range(len(part)))]
            self.sources += own

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Row:
        part_name, part_index = self._place(index)
        try:
            return self._parts[part_name][part_index]
        except ConfigError as error:
            key = f"parts.{part_name}.{error.path}"
            raise ConfigError(f"part {part_name!r}: {error}", path=key) from error

    def source_of(self, index: int) -> str:
        """Return the name of the part that a row comes from."""
        return self._place(index)[0]

    def curriculum(self, seed: int) -> MixCurriculum:
        config = self._config
        ranges = {
            name: range(*bounds) for name, bounds in zip(self._names, pairwise(self._starts), strict=True)
        }
        pools = [
            Pool(name, float("inf") if pool.max is None else pool.max, pool.weight)
            for name, pool in config.pools.items()
        ]
        return MixCurriculum(
            {name: (rows, config.weight(name)) for name, rows in ranges.items()}
            if config.weights
            else {"": (range(len(self)), 1.0)},
            sorted(pools, key=lambda pool: pool.max),
            unseen=config.unseen,
            gates=config.gates,
            shuffle=config.shuffle,
            seed=seed,
        )

    def _place(self, index: int) -> tuple[str, int]:
        part = bisect_right(self._starts, index) - 1
        return self._names[part], index - self._starts[part]


def check(config: MixConfig, run: RunConfig) -> Iterator[Problem]:
    """Warn of parts that are never drawn."""
    if config is not run.dataset:
        return
    for name in config.weights:
        weight = config.weight(name)
        knots = list(weight) if isinstance(weight, Mapping) else [0]
        if not any(weight_at(weight, step) for step in {0, run.steps, *(k for k in knots if k <= run.steps)}):
            yield Problem(
                f"dataset.weights.{name}", f"is 0 up to step {run.steps}: the part is never drawn", "warning"
            )


@hookimpl
def stretto_dataset() -> Iterator[Component[MixConfig]]:
    yield Component(
        "mix", Mix, MixConfig, "several datasets: weights, schedules, difficulty pools and gates", check=check
    )
