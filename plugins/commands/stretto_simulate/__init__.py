"""`stretto simulate`: test a run file in many simulated universes with faults."""

from __future__ import annotations

import signal
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stretto.errors import ConfigError

if TYPE_CHECKING:
    from stretto.simulation import Outcome, Tape

_LAST_LINES = 60
_UNIVERSE_S = 20  # processor seconds of a run without faults, if the command line does not set its steps
_SAY_S = 7.0  # between two lines of progress


def simulate(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="The run file.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Values that replace the file's.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of universes.")] = 100,
    first: Annotated[int, typer.Option(min=0, help="Seed of the first one.")] = 0,
    faults: Annotated[str, typer.Option(metavar="KIND,...", help="Kinds of faults; default all.")] = "",
    number: Annotated[int, typer.Option(min=0, help="Faults in each universe.")] = 6,
    jobs: Annotated[int, typer.Option(min=1, help="Universes at the same time.")] = 2,
    record: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Note the seeds that pass, and leave out those noted before."),
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(metavar="TAPE", help="Run the universe of this file instead.")
    ] = None,
    limit: Annotated[
        float, typer.Option(min=1, help="Processor seconds without progress that end a universe, at least.")
    ] = 60.0,
) -> None:
    """Run a run file in simulated worlds: its kernel and workers on virtual time, and with faults.

    Each seed is a universe that repeats itself. Without `steps=N` or `--record` it has as many steps as take
    some 20 s of a processor. The first one that fails is written to `tape-SEED.json` with as few faults as
    possible.
    """
    if replay is not None:
        from stretto.simulation import run_tape

        tape = _read(replay, limit)
        outcome = run_tape(tape)
        _show(tape, outcome)
        raise typer.Exit(outcome.failed)
    if file is None:
        raise ConfigError("name a run file, or a tape: stretto simulate --replay TAPE")
    kinds = [kind.strip() for kind in faults.split(",") if kind.strip()]
    values = list(overrides or ())
    outcomes: list[Outcome] = []
    with _progress(outcomes, seeds):
        from stretto.simulation import KINDS, CalmRunFails, shrink, steps_within, tapes_of

        if unknown := [kind for kind in kinds if kind not in KINDS]:
            raise ConfigError(f"--faults: there is no kind {unknown[0]!r}; the kinds are {', '.join(KINDS)}")
        if record is None and not any(value.startswith("steps=") for value in values):
            steps, all_steps = steps_within(_UNIVERSE_S, file, values)
            if steps < all_steps:
                values.append(f"steps={steps}")
                typer.echo(f"simulating {steps} of {all_steps} steps; `steps={all_steps}` simulates all")
        chosen = range(first, first + seeds)
        try:
            tapes = tapes_of(file, chosen, overrides=values, num_faults=number, kinds=kinds, limit_s=limit)
        except CalmRunFails as failure:
            _keep(failure.tape)
            raise
        if (failing := _search(tapes, jobs, record, outcomes)) is None:
            return
        fewest, outcome = shrink(failing)
    _show(fewest, outcome)
    _keep(fewest)
    raise typer.Exit(1)


@contextmanager
def _progress(outcomes: Sequence[Outcome], total: int) -> Generator[None]:
    """Print a line every some seconds, in a signal handler: a process that forks should have no threads."""
    began = time.monotonic()

    def say(*_: object) -> None:
        took_s, done = time.monotonic() - began, len(outcomes)
        failed = sum(outcome.failed for outcome in outcomes)
        left = f", about {took_s / done * (total - done):.0f} s left" if done and not failed else ""
        typer.echo(f"  {done} of {total} universes done, {failed} failed, {took_s:.0f} s{left}", err=True)

    handler = signal.signal(signal.SIGALRM, say)
    timer = signal.setitimer(signal.ITIMER_REAL, _SAY_S, _SAY_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


def _search(tapes: Sequence[Tape], jobs: int, record: Path | None, outcomes: list[Outcome]) -> Tape | None:
    from stretto.simulation import search

    num_done, num_faults, callbacks, virtual_s, cpu_s = 0, 0, 0, 0.0, 0.0
    failing: Tape | None = None
    for tape, outcome in search(tapes, jobs, record):
        outcomes.append(outcome)
        num_done += 1
        num_faults += len(tape.faults)
        callbacks += outcome.callbacks
        virtual_s, cpu_s = virtual_s + outcome.virtual_s, cpu_s + outcome.cpu_s
        if outcome.failed:
            failing = tape
            break
    typer.echo(
        f"{num_done} universes, {num_faults} faults, {callbacks:,} events, {virtual_s:,.0f} virtual seconds, "
        f"{cpu_s:,.0f} processor seconds: {'no failure' if failing is None else f'seed {failing.seed} fails'}"
    )
    return failing


def _show(tape: Tape, outcome: Outcome) -> None:
    from stretto.simulation import describe

    typer.echo("\n".join(describe(tape, outcome, _LAST_LINES)))


def _read(file: Path, limit_s: float) -> Tape:
    import msgspec

    from stretto.simulation import Tape

    try:
        tape = msgspec.json.decode(file.read_bytes(), type=Tape)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{file} is no tape of `stretto simulate`: {error}") from error
    return msgspec.structs.replace(tape, limit_s=max(limit_s, tape.limit_s))


def _keep(tape: Tape) -> None:
    import msgspec

    file = Path(f"tape-{tape.seed}.json")
    file.write_bytes(msgspec.json.format(msgspec.json.encode(tape), indent=2))
    typer.echo(f"to repeat it: stretto simulate --replay {file}")
