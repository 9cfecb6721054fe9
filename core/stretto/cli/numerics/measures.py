"""The rows of the table: what is measured of trainer and engine, and what is healthy."""

from __future__ import annotations

import resource
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from stretto.cli.numerics.sides import Engine, Logprobs, Sampled, Tokens, Trainer, serving
from stretto.engine import InferenceConfig, InferenceEngine, Sampling
from stretto.errors import EngineError
from stretto.rl.drift import Drift, drift_by_depth, kl_of_tokens, quarters

if TYPE_CHECKING:
    from torch import Tensor

    from stretto.training.config import ModelTrainingConfig
    from stretto.weights import WeightsNote

Kind = Literal["own", "plain", "bfloat16", "adapter"]
"""A trainer: `own` as the run's; `plain` in float32, each sequence alone, without a shared prefix; `bfloat16`
as the run's, but in bfloat16; `adapter` as the run's with LoRA."""

_TEMPERATURE, _TOP_P = 0.7, 0.8
_COLD = 0.01
"""A temperature at which only the most likely token has a logprob near 0, unless two are nearly equal."""
_NEARLY = np.log(0.4)
_SHORT = 32  # tokens of a prompt or of an answer, where depth does not matter
_IN_FLIGHT_S, _LONGEST = 3.0, 256
"""Seconds that samples are under way while a version is swapped in, and the most tokens of one."""


class Range(NamedTuple):
    """What is healthy for the logprobs of two sides, in nats a token."""

    mean: float
    max: float
    greedy: float
    """Minimum share of the engine's greedy tokens that are the trainer's most likely ones."""
    gradient: float
    """Relative difference of the norms of gradients."""

    def holds(self, drift: Drift | None) -> bool:
        return drift is None or (drift.mean <= self.mean and drift.max <= self.max)

    def __str__(self) -> str:
        return f"{self.mean:g}/{self.max:g}"


FLOAT32 = Range(2e-4, 0.01, 0.99, 1e-3)
BFLOAT16 = Range(0.15, 2.0, 0.9, 0.05)
_PACKED = {FLOAT32: FLOAT32, BFLOAT16: BFLOAT16._replace(mean=0.05)}
"""Of sequences that one trainer packs with others or alone."""
_GROWTH, _NOISE = 5.0, 1e-4
"""Limit of the mean of a quarter of the depth: this multiple of the first quarter's, plus these nats."""


class NumericsRow(NamedTuple):
    """A row of the table."""

    name: str
    measured: str
    healthy: object = ""
    ok: bool | None = None
    """None: there is no range, or nothing was measured."""
    signs: Sequence[str] = ()
    """Names of the unhealthy parts."""


@dataclass
class Measurement:
    """What is measured, with which texts."""

    texts: Sequence[Tokens]
    """At least 3 texts of `depth` tokens."""
    depth: int
    training: ModelTrainingConfig
    inference: InferenceConfig
    model: Path
    folder: Path
    say: Callable[[str], None]
    make_trainer: Callable[[Kind], Trainer]
    make_engine: Callable[[], InferenceEngine]
    quick: bool
    rates: dict[str, float] = field(default_factory=dict[str, float])
    """Tokens per second."""

    @property
    def own_range(self) -> Range:
        """What is healthy for the trainer alone."""
        return FLOAT32 if self.training.dtype == "float32" else BFLOAT16

    @property
    def range(self) -> Range:
        """What is healthy for engine and trainer."""
        dtypes = {self.training.publish_dtype, getattr(self.inference, "dtype", None)} - {None}
        return self.own_range if dtypes <= {"float32"} else BFLOAT16

    @property
    def edges(self) -> list[int]:
        return quarters(self.depth)

    @property
    def answer(self) -> int:
        """Tokens of a short prompt, and of a short answer."""
        return min(_SHORT // 2 if self.quick else _SHORT, self.depth // 2)

    @property
    def short(self) -> list[Tokens]:
        """Beginnings of the texts."""
        return [text[: self.answer] for text in self.texts[: 3 if self.quick else 6]]

    @property
    def mixed(self) -> list[Tokens]:
        """Sequences for one row: of several lengths, two of them with the same beginning."""
        quarter = self.depth // 4
        first, second, third, *_ = self.texts
        branch = np.concatenate([first[:quarter], third[:quarter]])
        return [first[: 2 * quarter], second[:2], branch, third[: quarter + 1]]

    def sampling(self, temperature: float = 1.0, top_p: float = 1.0, max_tokens: int = 0) -> Sampling:
        tokens = max_tokens or self.answer
        return Sampling(max_tokens=tokens, ignore_eos=True, temperature=temperature, top_p=top_p)


async def measure(plan: Measurement, show: Callable[[NumericsRow], None]) -> None:
    """Measure all rows, and show each one as it is known."""
    plan.say("the trainer, each sequence alone")
    trainer = plan.make_trainer("plain")
    alone, norm = trainer.logprobs(plan.mixed), trainer.gradient_norm(plan.mixed, 0)
    trainer.free()
    plan.say("the trainer as in the run")
    trainer = plan.make_trainer("own")
    show(packing(plan, trainer, norm))
    if plan.own_range is BFLOAT16 or not plan.quick:
        plan.say("bfloat16")
        show(bfloat16(plan, trainer, alone))
    plan.say("the engine starts")
    async with serving(plan.make_engine(), plan.folder) as engine:
        show(weights(await engine.swap(engine.publish(0, trainer.engine.weights()), plan.model)))
        plan.say(f"engine and trainer, to a depth of {plan.depth}")
        for row in await depths(plan, trainer, engine):
            show(row)
        for step in (temperature, greedy, kept_tokens, determinism, swap):
            plan.say(step.__name__.replace("_", " "))
            show(await step(plan, trainer, engine))
        trainer.free()
        if not plan.quick:
            plan.say("adapter")
            show(await adapter(plan, engine))
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    rates = ", ".join(f"{name} {rate:,.0f}" for name, rate in plan.rates.items())
    show(NumericsRow("speed", f"tokens/s: {rates}; this process took {gib:.2f} GiB"))


# ------------------------------------------------------------------------------- the trainer alone


def packing(plan: Measurement, trainer: Trainer, norm_alone: float) -> NumericsRow:
    """Sequences in one row, with shared prefixes, against each alone: outputs, and gradients."""
    drift = _drift(trainer.logprobs(plan.mixed), trainer.together(plan.mixed))
    began = time.monotonic()
    off = abs(trainer.gradient_norm(plan.mixed, 0) / norm_alone - 1)
    plan.rates["training"] = sum(map(len, plan.mixed)) / (time.monotonic() - began)
    limit = _PACKED[plan.own_range]
    signs = [] if limit.holds(drift) else ["contents" if _sees_contents(plan, trainer) else "place"]
    signs += [] if off <= limit.gradient else ["gradients"]
    form = getattr(trainer.engine, "form", "")
    measured, healthy = f"{_pair(drift)}, gradients {off:.0e}; {form}", f"{limit}, {limit.gradient:g}"
    return NumericsRow("packing", measured, healthy, not signs, signs)


def _sees_contents(plan: Measurement, trainer: Trainer) -> bool:
    """Return whether a sequence depends on which tokens are in the one before, not only on how many."""
    first, *_, last = plan.mixed
    _, one = trainer.together([first, last])
    _, other = trainer.together([first[::-1].copy(), last])
    return not _PACKED[plan.own_range].holds(_drift([one], [other]))


def bfloat16(plan: Measurement, trainer: Trainer, alone: list[Logprobs]) -> NumericsRow:
    """Logprobs in bfloat16 against float32, each sequence alone."""
    if plan.own_range is BFLOAT16:
        return _judged("bfloat16", _drift(alone, trainer.logprobs(plan.mixed)), BFLOAT16)
    low = plan.make_trainer("bfloat16")
    drift = _drift(alone, low.logprobs(plan.mixed))
    low.free()
    return NumericsRow("bfloat16", f"{_pair(drift)}, if the run used it")


# ---------------------------------------------------------------------------- trainer and engine


def weights(fault: str) -> NumericsRow:
    """Hashes of the engine's tensors against those that the trainer published."""
    return NumericsRow("weights", fault or "all tensors equal", "equal", not fault)


async def depths(plan: Measurement, trainer: Trainer, engine: Engine) -> list[NumericsRow]:
    """Logprobs by depth of context: of tokens that the engine samples, and of texts that it reads."""
    edges = plan.edges
    texts = [text[:-1] for text in plan.texts[: 1 if plan.quick else 2]]  # vLLM needs room for one more token
    answer = min(16 if plan.quick else 48, max(2, plan.depth // 8))
    prompts = [text[: max(1, edge + 1)] for edge in edges[:-1] for text in texts]
    began = time.monotonic()
    sampled = await engine.sample(prompts, plan.sampling(max_tokens=answer))
    plan.rates["sampling"] = len(prompts) * answer / (time.monotonic() - began)
    own, theirs = _both(trainer, sampled)
    drifts = drift_by_depth(own, theirs, edges, [each.first for each in sampled])
    reading = drift_by_depth(trainer.logprobs(texts), await engine.engine.logprobs(texts), edges)
    of_bins = [slice(number, number + len(texts)) for number in range(0, len(prompts), len(texts))]
    kls = [kl_of_tokens(np.concatenate(theirs[part]), np.concatenate(own[part])).mean() for part in of_bins]
    rows: list[NumericsRow] = []
    for edge, kl, *both in zip(edges[1:], kls, drifts, reading, strict=True):
        pairs = zip(("sampled", "read"), both, (drifts[0], reading[0]), strict=True)
        signs = [sign for sign, drift, first in pairs if not _holds_at_depth(plan.range, drift, first)]
        measured = f"sampled {_pair(both[0])} (KL {kl:.0e}), read {_pair(both[1])}"
        rows.append(NumericsRow(f"depth {edge}", measured, plan.range, not signs, signs))
    return rows


def _holds_at_depth(limit: Range, drift: Drift | None, first: Drift | None) -> bool:
    grows = drift is not None and first is not None and drift.mean > _GROWTH * first.mean + _NOISE
    return limit.holds(drift) and not grows


async def temperature(plan: Measurement, trainer: Trainer, engine: Engine) -> NumericsRow:
    """Logprobs of tokens sampled at another temperature than 1."""
    sampled = await engine.sample(plan.short, plan.sampling(_TEMPERATURE))
    drift = _drift(*_both(trainer, sampled, _TEMPERATURE))
    return _judged("temperature", drift, plan.range, f" at {_TEMPERATURE}")


async def greedy(plan: Measurement, trainer: Trainer, engine: Engine) -> NumericsRow:
    """Whether the engine's most likely tokens are the trainer's."""
    own, _ = _both(trainer, await engine.sample(plan.short, plan.sampling(0.0)), _COLD)
    share, least = float((np.concatenate(own) > _NEARLY).mean()), plan.range.greedy
    return NumericsRow("greedy", f"{share:.1%} of the tokens agree", f"{least:.0%} at least", share >= least)


async def kept_tokens(plan: Measurement, trainer: Trainer, engine: Engine) -> NumericsRow:
    """Logprobs of tokens that were drawn from a part of the vocabulary."""
    if not plan.inference.sends_kept_tokens:
        return NumericsRow("kept tokens", f"the engine {plan.inference.use!r} does not send them")
    sampling = plan.sampling(top_p=_TOP_P).in_training()
    sampled = await engine.sample(plan.short, sampling, wants_kept=True)
    faults = [each.kept.fault(each.tokens, np.arange(len(each.tokens)) >= each.first) for each in sampled]
    if fault := next(filter(None, faults), ""):
        return NumericsRow("kept tokens", fault, "fit", ok=False)
    own = [trainer.together([each.tokens], kept=[each.kept])[0][each.first - 1 :] for each in sampled]
    drift = _drift(own, [each.logprobs for each in sampled])
    ratio = f", ratios within {np.expm1(drift.max):.0e} of 1, top_p {_TOP_P}"
    return _judged("kept tokens", drift, plan.range, ratio)


async def determinism(plan: Measurement, trainer: Trainer, engine: Engine) -> NumericsRow:
    """The same requests and batch twice; if the run asks for it, also a request alone and among others."""
    first, second = [await engine.sample(plan.short, plan.sampling()) for _ in range(2)]
    if plan.inference.deterministic:
        second[:1] = await engine.sample(plan.short[:1], plan.sampling())
    same = [
        np.array_equal(one.tokens, other.tokens) and np.array_equal(one.logprobs, other.logprobs)
        for one, other in zip(first, second, strict=True)
    ]
    is_same = len({trainer.gradient_norm(plan.short, 0) for _ in range(2)}) == 1
    text = f"{sum(same)} of {len(same)} answers equal, gradients {'equal' if is_same else 'differ'}"
    if not plan.inference.deterministic:
        return NumericsRow("determinism", text)
    return NumericsRow("determinism", text, "all equal", all(same) and is_same)


async def swap(plan: Measurement, trainer: Trainer, engine: Engine) -> NumericsRow:
    """New weights while the engine samples: before and after, each token is that of its version."""
    try:
        moved = trainer.move(plan.short[0], 10 * plan.range.mean + 0.05)
    except EngineError as error:
        return NumericsRow("swap", f"not measured: {error}")
    note = engine.publish(1, trainer.engine.weights())
    faults: list[str] = []

    async def change() -> None:
        faults.append(await engine.swap(note, plan.model))

    pace = plan.rates["sampling"] / len(plan.short)
    most = min(_LONGEST, plan.depth - plan.answer, max(plan.answer, int(pace * _IN_FLIGHT_S)))
    sampled = await engine.sample(plan.short, plan.sampling(max_tokens=most), meanwhile=change)
    drifts = {"in flight": _of_version(trainer, sampled, 1)}
    drifts["after"] = _drift(trainer.logprobs(plan.short), await engine.engine.logprobs(plan.short))
    trainer.engine.load(None)
    drifts["before"] = _of_version(trainer, sampled, 0)
    judged = [name for name in drifts if name != "in flight" or plan.inference.on_swap == "recompute"]
    signs = [*filter(None, faults), *(name for name in judged if not plan.range.holds(drifts[name]))]
    text = ", ".join(f"{name} {_pair(drift)}" for name, drift in drifts.items())
    return NumericsRow("swap", f"moved {moved:.1g}; {text}", plan.range, not signs, signs)


async def adapter(plan: Measurement, engine: Engine) -> NumericsRow:
    """A trained adapter: published as the run does, and merged as in a checkpoint."""
    folder = plan.folder / "checkpoint"
    folder.mkdir()
    try:
        trainer = plan.make_trainer("adapter")
        moved = trainer.move(plan.short[0], 10 * plan.range.mean + 0.05)
    except EngineError as error:
        return NumericsRow("adapter", f"not measured: {error}")
    own = trainer.logprobs(plan.short)
    trainer.engine.save(folder)
    drifts = {"sent": await _served(plan, engine, own, engine.publish(2, trainer.engine.weights()))}
    trainer.free()
    drifts["merged"] = await _served(plan, engine, own, engine.publish(3, _tensors_in(folder / "model")))
    shutil.rmtree(folder)
    signs = [name for name, drift in drifts.items() if not plan.range.holds(drift)]
    text = ", ".join(f"{name} {_pair(drift)}" for name, drift in drifts.items())
    return NumericsRow("adapter", f"moved {moved:.1g}; {text}", plan.range, not signs, signs)


async def _served(plan: Measurement, engine: Engine, own: list[Logprobs], note: WeightsNote) -> Drift:
    if await engine.swap(note, plan.model):
        return Drift(np.inf, np.inf)
    return _drift(own, await engine.engine.logprobs(plan.short))


def _tensors_in(folder: Path) -> Iterable[tuple[str, Tensor]]:
    from safetensors.torch import load_file

    for file in sorted(folder.glob("*.safetensors")):
        yield from load_file(file).items()


def _both(
    trainer: Trainer, sampled: Sequence[Sampled], temperature: float = 1.0
) -> tuple[list[Logprobs], list[Logprobs]]:
    """Return the logprobs of the sampled tokens, of trainer and engine."""
    own = trainer.logprobs([each.tokens for each in sampled], temperature)
    cut = [part[each.first - 1 :] for part, each in zip(own, sampled, strict=True)]
    return cut, [each.logprobs for each in sampled]


def _of_version(trainer: Trainer, sampled: Sequence[Sampled], version: int) -> Drift | None:
    """Return the drift of the tokens of a version; None without such tokens."""
    own, theirs = _both(trainer, sampled)
    chosen = np.concatenate([each.versions for each in sampled]) == version
    return _drift([np.concatenate(own)[chosen]], [np.concatenate(theirs)[chosen]]) if chosen.any() else None


def _drift(expected: Sequence[Logprobs], found: Sequence[Logprobs]) -> Drift:
    [drift] = drift_by_depth(expected, found, [0, max(map(len, expected))])
    assert drift is not None
    return drift


def _judged(name: str, drift: Drift, limit: Range, text: str = "") -> NumericsRow:
    return NumericsRow(name, f"{_pair(drift)}{text}", limit, limit.holds(drift))


def _pair(drift: Drift | None) -> str:
    return "no token" if drift is None else f"{drift.mean:.0e}/{drift.max:.0e}"
