"""Kept tapes: universes that failed once. Each passes now, and that of a planted mistake fails with it. The
names of tapes of real bugs begin with `bug-`; those of faults that a trial of real runs found begin with the
number of the fault, such as `r3-`. Those of bugs that are not mended yet begin with `open-`: they fail."""

import multiprocessing
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mutations import MUTATIONS, Mutation, plant
from stretto.simulation import Tape, describe, run_tape, search, shrink
from universes import large

TAPES = Path(__file__).with_name("tapes")
MOST_FAULTS = 4
SEEDS = 12
_REAL = ("bug-", "open-", "r3-", "r4-")
each_mutation = pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)


def tape_of(mutation: Mutation) -> Path:
    return TAPES / f"{re.sub(r'[^a-z0-9]+', '-', mutation.name.lower()).strip('-')}.json"


def read(file: Path) -> Tape:
    return msgspec.json.decode(file.read_bytes(), type=Tape)


def with_mutation(mutation: Mutation, call: Callable[..., Any], *args: Any) -> Any:
    """Call a function in a process with a mutation, which this process does not get."""
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, fork, initializer=plant, initargs=(mutation,)) as pool:
        return pool.submit(call, *args).result()


def some_seed_fails(tape: Tape) -> bool:
    """Return whether the faults of a tape fail with its seed, or with one of the next ones. Whether a fault
    meets the moment that matters depends on the order of events, which changes with the code."""
    for seed in range(tape.seed, tape.seed + SEEDS):
        outcome = run_tape(msgspec.structs.replace(tape, seed=seed))
        assert outcome.status != "crashed", outcome.reason  # it has not run
        if outcome.failed:
            return True
    return False


def find() -> Tape | None:
    """Return the first of 1000 large universes that fails, with as few faults as possible."""
    with_faults = (tape for tape, outcome in search(map(large, range(1000)), jobs=2) if outcome.failed)
    return shrink(tape)[0] if (tape := next(with_faults, None)) else None


def kept(file: Path) -> Any:
    marks = [pytest.mark.xfail(strict=True)] if file.stem.startswith("open-") else []
    if not file.stem.startswith(_REAL):
        marks.append(pytest.mark.slow)
    return pytest.param(file, id=file.stem, marks=marks)


@pytest.mark.parametrize("file", [*map(kept, sorted(TAPES.glob("*.json")))])
def test_a_kept_tape_passes(file: Path) -> None:
    outcome = run_tape(tape := read(file))

    assert not outcome.failed, "\n".join(describe(tape, outcome, last=60))


@each_mutation
def test_each_mistake_has_its_place_in_the_code(mutation: Mutation) -> None:
    for each in (mutation, *mutation.also):
        spec = find_spec(each.module)
        assert spec is not None
        assert spec.origin is not None
        assert Path(spec.origin).read_text().count(each.old) == 1, each.name


@pytest.mark.slow
@each_mutation
def test_a_planted_mistake_fails_its_tape(mutation: Mutation) -> None:
    tape = read(tape_of(mutation))

    assert with_mutation(mutation, some_seed_fails, tape)
    assert 1 <= len(tape.faults) <= MOST_FAULTS


@pytest.mark.chaos
@each_mutation
def test_a_search_finds_a_planted_mistake(mutation: Mutation) -> None:
    tape = with_mutation(mutation, find)

    assert tape is not None
    assert 1 <= len(tape.faults) <= MOST_FAULTS
    assert not run_tape(tape).failed
