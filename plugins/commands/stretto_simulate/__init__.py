"""`stretto simulate`: test a run file in many simulated universes with faults."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stretto.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.simulation import Outcome, Tape

_LAST_LINES = 60


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
) -> None:
    """Run a run file in simulated worlds: its kernel and workers on virtual time, and with faults.

    Each seed is a universe that repeats itself. The first one that fails is written to `tape-SEED.json` with
    as few faults as possible.
    """
    from stretto.simulation import KINDS, CalmRunFails, run_tape, shrink, tapes_of

    if replay is not None:
        tape = _read(replay)
        outcome = run_tape(tape)
        _show(tape, outcome)
        raise typer.Exit(outcome.failed)
    if file is None:
        raise ConfigError("name a run file, or a tape: stretto simulate --replay TAPE")
    kinds = [kind.strip() for kind in faults.split(",") if kind.strip()]
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise ConfigError(f"--faults: there is no kind {unknown[0]!r}; the kinds are {', '.join(KINDS)}")
    try:
        tapes = tapes_of(
            file, range(first, first + seeds), overrides=overrides or (), num_faults=number, kinds=kinds
        )
    except CalmRunFails as failure:
        _keep(failure.tape)
        raise
    if (failing := _search(tapes, jobs, record)) is None:
        return
    fewest, outcome = shrink(failing)
    _show(fewest, outcome)
    _keep(fewest)
    raise typer.Exit(1)


def _search(tapes: Sequence[Tape], jobs: int, record: Path | None) -> Tape | None:
    from stretto.simulation import search

    num_done, num_faults, callbacks, virtual_s, cpu_s = 0, 0, 0, 0.0, 0.0
    failing: Tape | None = None
    for tape, outcome in search(tapes, jobs, record):
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


def _read(file: Path) -> Tape:
    import msgspec

    from stretto.simulation import Tape

    try:
        return msgspec.json.decode(file.read_bytes(), type=Tape)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{file} is no tape of `stretto simulate`: {error}") from error


def _keep(tape: Tape) -> None:
    import msgspec

    file = Path(f"tape-{tape.seed}.json")
    file.write_bytes(msgspec.json.format(msgspec.json.encode(tape), indent=2))
    typer.echo(f"to repeat it: stretto simulate --replay {file}")
