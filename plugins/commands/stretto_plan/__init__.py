"""`stretto plan`: forecast the speed of a run before it starts, and find values that make it faster."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.errors import ConfigError

if TYPE_CHECKING:
    from stretto.records.run_folder import RunFolder
    from stretto.simulation import Forecast, ServiceTimes

_ENGINES = {"inference": ("torch", "mock"), "training": ("torch", "mock")}
_STALENESS = (0, 1, 2, 4, 8)  # values of queue.max_staleness to try
_HOURS_FROM_S = 600  # the duration of a shorter run is shown in seconds
_SURE = 0.2
"""Relative error of the forecast of a step above which the command prints the error."""
_WORTH = 1.1
"""Speed-up from which a value is recommended. Forecasts are not accurate enough for smaller ones."""


def plan(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE_OR_RUN",
            help="The run file; or the folder of a run, whose records have the service times.",
        ),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Values that replace the file's.")
    ] = None,
    times: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Service times: read from this file if it exists, else written to it."
        ),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also show what RUN did, and the errors of its forecast.")
    ] = False,
    gpus: Annotated[
        int | None,
        typer.Option(min=2, help="Try other splits of so many GPUs between training and inference."),
    ] = None,
    cores: Annotated[
        int | None, typer.Option(min=1, help="Cores of the run's machine; default: this one's.")
    ] = None,
    only: Annotated[
        bool, typer.Option("--only", help="Forecast the file alone, try no other values.")
    ] = False,
    trust_plugins: Annotated[
        bool,
        typer.Option("--trust-plugins", help="Import the plugin files of a run that another user owns."),
    ] = False,
) -> None:
    """Forecast how fast a run is, on virtual time, and recommend values that make it faster.

    The kernel and the workers are the real ones. What engines and processes cost is read from the records of
    a run, or measured first, in a minute, or some twenty steps if these are long. docs/plan.md says what the
    forecast does not contain.
    """
    from stretto.records.run_folder import RunFolder
    from stretto.simulation import composed

    past_run = RunFolder(file) if file.is_dir() else None
    if past_run:
        past_run.require_trust(trusted=trust_plugins)
        file = file / "config.yaml"
    elif compare:
        raise ConfigError(f"--compare: {file} is a file; expected the folder of a run")
    run = composed(file, overrides or ())
    num_cores = cores or len(os.sched_getaffinity(0))
    splits = _splits(run, gpus) if gpus else []
    service, measured_s = _service_times(file, overrides or (), run, times, past_run, num_cores)
    planner = _Planner(run, service, num_cores, splits)
    plain_forecast = base = planner.forecast({})
    typer.echo(
        f"{'s/step':>8} {'tokens/s':>9} {'speed':>6} {'age':>5} {'engine':>7} {'trainer':>8} {'cores':>6}"
    )
    if overrides and (plain_run := _without_overrides(file, run)):
        plain_forecast = _Planner(plain_run, service, num_cores).forecast({})
        planner.reference = plain_forecast.tokens_per_s
        planner.show("the run file", plain_forecast)
    planner.show(f"the run file with {' '.join(overrides)}" if overrides else "the run file", base)
    if measured_s is not None and abs(error := base.step_s / measured_s - 1) > _SURE:
        typer.echo(
            f"the forecast of a step is {error:+.0%} from what was measured: something else used this host, "
            "or the run waits for what a forecast does not contain (docs/plan.md); trust the ratios alone"
        )
    if past_run and compare:
        planner.compare(past_run, plain_forecast)
    if not only:
        best = planner.search()
        for eta in _STALENESS:
            if eta != run["queue"]["max_staleness"]:
                value = f"queue.max_staleness={eta}"
                changed = composed(file, [*(overrides or ()), value])  # slots may follow from it
                planner.show(value, _Planner(changed, service, num_cores).forecast({}))
        typer.echo(planner.advice(best))
    for guess in _guesses(run, service):
        typer.echo(guess)
    seconds = base.step_s * run["steps"]
    duration = f"{seconds / 3600:.2f} h" if seconds >= _HOURS_FROM_S else f"{seconds:.0f} s"
    typer.echo(
        f"{run['steps']} steps take {duration} without evaluations and checkpoints; the oldest token is "
        f"{base.max_staleness:.0f} steps old. On {num_cores} cores: "
        + ", ".join(f"{role} {used:.2f}" for role, used in base.cores.items())
    )


def _immeasurable(run: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each key of a run that cannot be measured here, with a text of what can be measured."""
    if (launcher := run["launcher"]["use"]) != "local":
        yield "launcher.use", f"the run on this machine; expected 'local', not {launcher!r}"
    for section, measurable in _ENGINES.items():
        if (use := run[section]["use"]) not in measurable:
            yield f"{section}.use", f"what {' and '.join(measurable)} cost on processor cores, not {use!r}"
        if run[section]["gpus"]:
            yield f"{section}.gpus", "processor cores alone"


def _splits(run: Mapping[str, Any], gpus: int) -> list[dict[str, int]]:
    """Return splits of `gpus` into processes, 1 or 3 times a power of two, and replicas."""
    gpus_of_trainer, gpus_of_engine = run["training"]["gpus"], run["inference"]["gpus"]
    if not gpus_of_trainer or not gpus_of_engine:
        raise ConfigError(
            f"--gpus: the run file gives a process of training {gpus_of_trainer} GPUs and one of inference "
            f"{gpus_of_engine}; expected `gpus` in both sections"
        )
    counts = sorted(base * 2**power for base in (1, 3) for power in range(gpus.bit_length()))
    pairs = [(count, (gpus - count * gpus_of_trainer) // gpus_of_engine) for count in counts]
    return [
        {"training.processes": processes, "inference.replicas": replicas}
        for processes, replicas in pairs
        if replicas >= 1
    ]


def _service_times(
    file: Path,
    overrides: Sequence[str],
    run: dict[str, Any],
    kept: Path | None,
    record: RunFolder | None,
    cores: int,
) -> tuple[ServiceTimes, float | None]:
    """Return service times, and the seconds of a step if the service times are measured now."""
    import msgspec

    from stretto.simulation import ServiceTimes

    if kept is not None and kept.exists():
        return msgspec.json.decode(kept.read_bytes(), type=ServiceTimes), None
    step_s = None
    if record:
        times = _read_times(run, record, cores)
    else:
        times, step_s = _measure_times(file, overrides, run, cores)
    if kept is not None:
        kept.write_bytes(msgspec.json.format(msgspec.json.encode(times)) + b"\n")
    return times, step_s


def _read_times(run: Mapping[str, Any], record: RunFolder, cores: int) -> ServiceTimes:
    from stretto.simulation import composed
    from stretto_plan.recorded import times_of

    recorded_run = composed(record.folder / "config.yaml")
    asked, recorded = _what_takes_time(run), _what_takes_time(recorded_run)
    for key, value in recorded.items():
        if value != asked[key]:
            raise ConfigError(
                f"{key} is {value!r} in the run, and {asked[key]!r} here; its records tell only of its own "
                "engines and model",
                path=key,
            )
    return times_of(record, recorded_run, cores)


def _guesses(run: Mapping[str, Any], times: ServiceTimes) -> Iterator[str]:
    """Yield what the records of a run do not show, with the forecasts that depend on it."""
    from stretto_plan.fitting import on_gpus

    if not times.knows_slots:
        yield (
            "guessed: a decode step with all slots takes twice as long as an empty one, for the run does not "
            "show it; forecasts with other slots, batches or staleness depend on it"
        )
    if not times.knows_tokens:
        yield (
            "guessed: a train step takes time in proportion to its tokens, for the steps of the run do not "
            "show more; forecasts with other batches or groups depend on it"
        )
    if on_gpus(run) or run["launcher"]["use"] != "local":
        yield "guessed: a callback takes 50 µs of a core, a message 100 µs: no record shows what they take"
    if on_gpus(run):
        yield "not checked: that twice as many GPUs of the trainer take half of the time for a token"


def _what_takes_time(run: Mapping[str, Any]) -> dict[str, Any]:
    engines = {f"{part}.{key}": run[part][key] for part in _ENGINES for key in ("use", "gpus")}
    return {**engines, "model": run["model"]}


def _without_overrides(file: Path, run: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the run file without overrides; None if it is not valid, or has other service times."""
    from stretto.simulation import composed

    try:
        plain = composed(file)
    except ConfigError:
        return None
    return plain if _what_takes_time(plain) == _what_takes_time(run) else None


def _measure_times(
    file: Path, overrides: Sequence[str], run: Mapping[str, Any], cores: int
) -> tuple[ServiceTimes, float]:
    from stretto_plan.fitting import fit
    from stretto_plan.measuring import measure

    for key, measurable in _immeasurable(run):
        raise ConfigError(
            f"{key}: a forecast of a run file measures {measurable}; `stretto plan RUN` measures nothing",
            path=key,
        )
    typer.echo(
        "measuring: the run itself, for some steps; then again with fewer slots: a minute, or 20 long steps"
    )
    full = measure(file, overrides)
    reduced = None
    if run["inference"]["use"] != "mock":
        slots, batch = max(8, run["inference"]["slots"] // 4), max(1, run["queue"]["batch_size"] // 2)
        typer.echo(f"measuring: with {slots} slots and batches of {batch}")
        reductions = (
            *(f"inference.slots={slots}", f"queue.batch_size={batch}"),
            *("queue.max_staleness=0", "samples.keep=all"),
        )
        reduced = measure(file, [*overrides, *reductions])
    typer.echo(f"measured: {full.step_s:.3f} s/step, mean age {full.staleness:.2f}")
    return fit(full, reduced, cores), full.step_s


class _Planner:
    def __init__(
        self, run: dict[str, Any], times: ServiceTimes, cores: int, splits: Sequence[Mapping[str, int]] = ()
    ) -> None:
        self._run, self._times, self._cores, self._splits = run, times, cores, splits
        self._known: dict[tuple[tuple[str, Any], ...], Forecast] = {}
        self.reference: float | None = None
        """Tokens per second that are shown as speed 1; None: those of the forecast without changes."""

    def forecast(self, numbers: Mapping[str, Any]) -> Forecast:
        from stretto.simulation import forecast
        from stretto_plan.fitting import computes, shortened

        key = tuple(sorted(numbers.items()))
        if key not in self._known:
            run = shortened(self._run, numbers)
            self._known[key] = forecast(run, self._times, cores=self._cores, computes=computes(run))
        return self._known[key]

    def show(self, what: str, seen: Forecast) -> None:
        speed = seen.tokens_per_s / (self.reference or self.forecast({}).tokens_per_s)
        engine, trainer = min(1.0, seen.engine_busy), min(1.0, seen.train_share)
        typer.echo(
            f"{seen.step_s:>8.3f} {seen.tokens_per_s:>9,.0f} {speed:>6.2f} {seen.mean_staleness:>5.2f} "
            f"{engine:>7.0%} {trainer:>8.0%} {sum(seen.cores.values()):>6.2f}  {what}"
        )

    def compare(self, folder: RunFolder, seen: Forecast) -> None:
        """Show what a run did, without its waits for checkpoints, and the errors of its forecast."""
        from stretto_plan.measuring import processor_s
        from stretto_plan.recorded import mean, steady_steps

        lines = steady_steps(folder)
        step_s = mean(lines, "step_s") - mean(lines, "wait/checkpoint_s")
        engine, trainer = (mean(lines, key) / step_s for key in ("generate_busy_s", "train_s"))
        used_s = sum(processor_s(lines, self._cores).values())
        typer.echo(
            f"{step_s:>8.3f} {mean(lines, 'tokens') / step_s:>9,.0f} {'':6} {mean(lines, 'staleness'):>5.2f} "
            f"{engine:>7.0%} {trainer:>8.0%} {used_s / step_s:>6.2f}  the run itself\n"
            f"the forecast of a step is {seen.step_s / step_s - 1:+.0%} from what the run took, and "
            f"{sum(seen.cores.values()) * seen.step_s / used_s - 1:+.0%} of its processor seconds"
        )

    def search(self) -> dict[str, Any]:
        best: dict[str, Any] = {}
        for choices in self._choices():
            changed = [{**best, **choice} for choice in choices]
            for numbers in changed:
                self.show(_text(numbers), self.forecast(numbers))
            fastest = max(changed, key=lambda numbers: self.forecast(numbers).tokens_per_s)
            if self.forecast(fastest).tokens_per_s > _WORTH * self.forecast(best).tokens_per_s:
                best = fastest
        return best

    def advice(self, best: Mapping[str, Any]) -> str:
        base, fastest = self.forecast({}), self.forecast(best)
        if best:
            speed = fastest.tokens_per_s / base.tokens_per_s
            return f"recommended: {_text(best)}: {speed:.2f} times as fast, by the forecast"
        if base.train_share > 0.9:
            why = f"the trainer computes {min(1.0, base.train_share):.0%} of the time"
        elif sum(base.cores.values()) > 0.9 * self._cores:
            why = f"{sum(base.cores.values()):.1f} of {self._cores} cores are in use"
        else:
            why = f"the engines work {min(1.0, base.engine_busy):.0%} of the time"
        return f"no other number makes the run faster by 10 %: {why}"

    def _choices(self) -> Iterator[Sequence[Mapping[str, int]]]:
        inference, concurrency = self._run["inference"], self._run["rollout"]["concurrency"]
        slots, replicas = inference["slots"], inference["replicas"]
        if self._splits:
            yield self._splits
        if self._times.knows_slots:
            yield [{"inference.slots": number} for number in (2 * slots, max(1, slots // 2))]
        if self._has_cores_for(replicas + 1):
            yield [{"inference.replicas": replicas + 1}]
        if isinstance(concurrency, int):
            yield [{"rollout.concurrency": 2 * concurrency}]

    def _has_cores_for(self, replicas: int) -> bool:
        """Whether the cores suffice for these engines. Those that sleep need none; GPUs are split."""
        from stretto_plan.fitting import computes, on_gpus

        if not computes(self._run):
            return not on_gpus(self._run)
        training, threads = self._run["training"], self._run["inference"]["threads"]
        return threads * replicas + training["threads"] * training["processes"] <= self._cores


def _text(numbers: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in numbers.items())
