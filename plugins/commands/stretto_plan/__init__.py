"""`stretto plan`: how fast a run will be, before it is paid for, and which numbers make it faster."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.errors import ConfigError

if TYPE_CHECKING:
    from stretto.run_folder import RunFolder
    from stretto.testing.simulation import Forecast, ServiceTimes

_ENGINES = {"inference": ("torch", "mock"), "training": ("torch", "mock")}
_STALENESS = (0, 1, 2, 4, 8)
_WORTH = 1.1
"""A value is recommended if it makes a run at least 1.1 times as fast: forecasts are not better than that."""


def plan(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="The run file, or the folder of a run to compare."),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Values that replace the file's.")
    ] = None,
    times: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Service times: read from this file if it exists, else measured and written to it.",
        ),
    ] = None,
    cores: Annotated[
        int | None, typer.Option(min=1, help="Cores of the machine; default: this one's.")
    ] = None,
    only: Annotated[
        bool, typer.Option("--only", help="Forecast the file alone, try no other values.")
    ] = False,
) -> None:
    """Forecast how fast a run is, on virtual time, and recommend values that make it faster.

    The kernel and the workers are the real ones. What engines and processes cost is measured first, in about
    a minute with the run itself. docs/plan.md says what the forecast does not contain.
    """
    from stretto.run_folder import RunFolder
    from stretto.testing.simulation import composed

    ran = RunFolder(file) if file.is_dir() else None
    file = file / "config.yaml" if ran else file
    run = composed(file, overrides or ())
    _expect_known_parts(run)
    number = cores or len(os.sched_getaffinity(0))
    service = _service_times(file, overrides or (), run, times, number)
    planner = _Planner(run, service, number)
    base = planner.forecast({})
    titles = (
        f"{'s/step':>8} {'tokens/s':>9} {'speed':>6} {'age':>5} {'engine':>7} {'trainer':>8} {'cores':>6}"
    )
    typer.echo(f"{'':34} {titles}")
    planner.show("the run file", base)
    if ran:
        planner.compare(ran)
    if not only:
        best = planner.search()
        for eta in _STALENESS:
            if eta != run["queue"]["max_staleness"]:
                value = f"queue.max_staleness={eta}"
                changed = composed(file, [*(overrides or ()), value])  # slots may follow from it
                planner.show(value, _Planner(changed, service, number).forecast({}))
        typer.echo(planner.advice(best))
    hours = base.step_s * run["steps"] / 3600
    typer.echo(
        f"{run['steps']} steps take {hours:.2f} h without evaluations and checkpoints; the oldest token is "
        f"{base.max_staleness:.0f} steps old. On {number} cores: "
        + ", ".join(f"{role} {used:.2f}" for role, used in base.cores.items())
    )


def _expect_known_parts(run: Mapping[str, Any]) -> None:
    if (launcher := run["launcher"]["use"]) != "local":
        raise ConfigError(
            f"launcher.use: a forecast measures the run on this machine; expected 'local', not {launcher!r}",
            path="launcher.use",
        )
    for section, known in _ENGINES.items():
        use = run[section]["use"]
        if use not in known:
            raise ConfigError(
                f"{section}.use: a forecast knows what {' and '.join(known)} cost on processor cores, not "
                f"{use!r}",
                path=f"{section}.use",
            )
        if run[section].get("gpus"):
            raise ConfigError(
                f"{section}.gpus: a forecast is of processor cores alone", path=f"{section}.gpus"
            )


def _service_times(
    file: Path, overrides: Sequence[str], run: dict[str, Any], kept: Path | None, cores: int
) -> ServiceTimes:
    import msgspec

    from stretto.testing.simulation import ServiceTimes
    from stretto_plan.fitting import fit
    from stretto_plan.measuring import measure

    if kept is not None and kept.exists():
        return msgspec.json.decode(kept.read_bytes(), type=ServiceTimes)
    typer.echo("measuring: the run itself, for some steps")
    one = measure(file, overrides)
    other = None
    if run["inference"]["use"] != "mock":
        slots, batch = max(8, run["inference"]["slots"] // 4), max(1, run["queue"]["batch_size"] // 2)
        typer.echo(f"measuring: with {slots} slots and batches of {batch}")
        fewer = (
            *(f"inference.slots={slots}", f"queue.batch_size={batch}"),
            *("queue.max_staleness=0", "samples.keep=all"),
        )
        other = measure(file, [*overrides, *fewer])
    found = fit(one, other, cores)
    if kept is not None:
        kept.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    typer.echo(f"measured: {one.step_s:.3f} s/step, mean age {one.staleness:.2f}")
    return found


class _Planner:
    """Forecasts of one run file with changed numbers."""

    def __init__(self, run: dict[str, Any], times: ServiceTimes, cores: int) -> None:
        self._run, self._times, self._cores = run, times, cores
        self._known: dict[tuple[tuple[str, Any], ...], Forecast] = {}
        self._computes = run["inference"]["use"] != "mock"

    def forecast(self, numbers: Mapping[str, Any]) -> Forecast:
        """Return the forecast with other values, by their keys."""
        from stretto.testing.simulation import forecast
        from stretto_plan.fitting import shortened

        key = tuple(sorted(numbers.items()))
        if key not in self._known:
            document = shortened(self._run, numbers)
            self._known[key] = forecast(document, self._times, cores=self._cores, computes=self._computes)
        return self._known[key]

    def show(self, what: str, seen: Forecast) -> None:
        """Print a forecast."""
        speed = seen.tokens_per_s / self.forecast({}).tokens_per_s
        engine, trainer = min(1.0, seen.engine_busy), min(1.0, seen.train_share)
        typer.echo(
            f"{what:34} {seen.step_s:>8.3f} {seen.tokens_per_s:>9,.0f} {speed:>6.2f} "
            f"{seen.mean_staleness:>5.2f} {engine:>7.0%} {trainer:>8.0%} {sum(seen.cores.values()):>6.2f}"
        )

    def compare(self, folder: RunFolder) -> None:
        """Print what the run itself did, and how far its forecast is from it."""
        from stretto_plan.measuring import steady_part

        step_s, tokens, staleness = steady_part(folder.steps)
        typer.echo(
            f"{'the run itself':34} {step_s:>8.3f} {tokens / step_s:>9,.0f} {'':6} {staleness:>5.2f}\n"
            f"the forecast of a step is {self.forecast({}).step_s / step_s - 1:+.0%} from what the run took"
        )

    def search(self) -> dict[str, Any]:
        """Try values of one key after the other, and return those that make the run faster."""
        best: dict[str, Any] = {}
        for key, values in self._options():
            for value in values:
                changed = {**best, key: value}
                seen = self.forecast(changed)
                self.show(_text(changed), seen)
                if seen.tokens_per_s > _WORTH * self.forecast(best).tokens_per_s:
                    best = changed
        return best

    def advice(self, best: Mapping[str, Any]) -> str:
        """Return what to set, and why."""
        base, seen = self.forecast({}), self.forecast(best)
        if best:
            speed = seen.tokens_per_s / base.tokens_per_s
            return f"recommended: {_text(best)}: {speed:.2f} times as fast, by the forecast"
        if base.train_share > 0.9:
            why = f"the trainer computes {min(1.0, base.train_share):.0%} of the time"
        elif sum(base.cores.values()) > 0.9 * self._cores:
            why = f"{sum(base.cores.values()):.1f} of {self._cores} cores are in use"
        else:
            why = f"the engines work {min(1.0, base.engine_busy):.0%} of the time"
        return f"no other number makes the run faster by 10 %: {why}"

    def _options(self) -> Iterator[tuple[str, list[int]]]:
        slots = self._run["inference"]["slots"]
        concurrency = self._run["rollout"]["concurrency"]
        yield "inference.slots", [2 * slots, max(1, slots // 2)]
        yield "rollout.concurrency", [2 * concurrency]


def _text(numbers: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in numbers.items())
