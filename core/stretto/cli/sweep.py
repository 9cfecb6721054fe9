"""`stretto sweep`: a run for every combination of values and seeds, each in a folder of its own. A value list
is written `key=a,b`, as in YAML: a comma inside brackets, braces or quotes belongs to a value."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from stretto.cli.arguments import RunFile, WithOverrides
from stretto.errors import ConfigError, StrettoError, printable
from stretto.machine.child_process import start_apart

_LOOK_S = 0.25  # seconds between two looks at the processes: a run takes at least some seconds
_MOST_CHARACTERS = 40  # of one value in the name of a run's folder

app = typer.Typer()


@app.command(cls=WithOverrides)
def sweep(
    file: RunFile,
    values: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE,VALUE...]...",
            help="Values of keys of the run file, for example training.lr=1e-4,3e-4. A key with one value "
            "has it in every run.",
        ),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Seeds: every combination of values runs with each.", metavar="1,2,3")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at once. Each gets its share of the GPUs.")] = 1,
    out: Annotated[
        Path | None,
        typer.Option(help="The sweep's folder; default runs/sweep-NAME.", metavar="FOLDER"),
    ] = None,
    proceed: Annotated[
        bool, typer.Option("--continue", help="Skip the runs that are complete, and resume those that ended.")
    ] = False,
) -> None:
    """Train with every combination of values and seeds; `stretto compare` shows the results."""
    from stretto.assembly.compose import compose
    from stretto.kernel.durable.changes import is_complete

    runs = grid(values or (), seeds)
    folder = out or Path("runs", f"sweep-{compose(file, next(iter(runs.values()))).config.name}")
    folder = folder.expanduser().absolute()
    begun = [name for name in runs if (folder / name / "config.yaml").exists()]
    if begun and not proceed:
        raise ConfigError(f"{folder / begun[0]} is there already; add --continue, or write another --out")
    runs = {name: [*chosen, f"out={json.dumps(str(folder / name))}"] for name, chosen in runs.items()}
    steps = _check(file, runs, folder)
    commands = {
        name: ["resume", str(folder / name)] if name in begun else ["run", str(file), *overrides]
        for name, overrides in runs.items()
        if not is_complete(folder / name, steps[name])
    }
    folder.mkdir(parents=True, exist_ok=True)
    interrupted = _run(commands, folder, jobs)
    typer.echo(f"compare the runs: stretto compare {folder}/*/")
    if interrupted:
        typer.echo("interrupted; repeat the command with --continue")
        raise typer.Exit(130)
    raise typer.Exit(int(not all(is_complete(folder / name, steps[name]) for name in runs)))


def grid(items: Sequence[str], seeds: str | None) -> dict[str, list[str]]:
    """Return name of a run -> its `key=value` items. The name lists the swept values: `lr-1e-4_seed-1`."""
    lists: dict[str, list[str]] = {}
    for key, values in map(values_in, [*items, *([] if seeds is None else [f"seed={seeds}"])]):
        if key in lists:
            raise ConfigError(f"{key!r} is there twice; list all its values once: {key}=a,b")
        if key == "out":
            raise ConfigError(f"the sweep names the folder of each run; write --out {values[0]}")
        lists[key] = values
    swept = [key for key, values in lists.items() if len(values) > 1]
    if not swept:
        raise ConfigError(
            "no key has several values, so there is only one run; list values with commas, such as "
            "training.lr=1e-4,3e-4, or seeds: --seeds 1,2,3"
        )
    ends = [key.rpartition(".")[2] for key in swept]
    labels = {key: key if ends.count(end) > 1 else end for key, end in zip(swept, ends, strict=True)}
    runs: dict[str, list[str]] = {}
    for combination in product(*lists.values()):
        choice = dict(zip(lists, combination, strict=True))
        name = "_".join(f"{labels[key]}-{_in_name(choice[key])}" for key in swept)
        runs[name] = [f"{key}={value}" for key, value in choice.items()]
    return runs


def values_in(item: str) -> tuple[str, list[str]]:
    """Return the key of `key=a,b` and the texts of its values."""
    key, equals, text = item.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_][\w.-]*", key):
        raise ConfigError(f"{item!r} is not of the form dotted.key=value,value", value=item)
    try:
        nodes: Any = yaml.compose(f"[{text}]").value
    except (yaml.YAMLError, AttributeError) as error:
        reason = getattr(error, "problem", None) or error
        raise ConfigError(f"{item!r} is no list of YAML values ({reason}); quote them", value=item) from error
    values = [text[node.start_mark.index - 1 : node.end_mark.index - 1].strip() for node in nodes]
    if repeated := next((value for value in values if values.count(value) > 1), None):
        raise ConfigError(f"{item!r}: the value {repeated} is there twice", value=item)
    return key, values or [""]


def _in_name(value: str) -> str:
    """Return a value as a part of a folder's name; with a hash if it is long or has special characters."""
    plain = re.sub(r"[^A-Za-z0-9.+-]+", "-", value).strip("-.")
    if plain == value and len(value) <= _MOST_CHARACTERS:
        return value
    digest = hashlib.sha256(value.encode()).hexdigest()[:6]
    return f"{plain[:_MOST_CHARACTERS]}-{digest}".lstrip("-")


def _check(file: Path, runs: dict[str, list[str]], folder: Path) -> dict[str, int]:
    """Check all runs, but only one of those that differ in seeds alone. Return name of a run -> its steps."""
    from stretto.assembly.assembly import Assembly
    from stretto.assembly.compose import compose
    from stretto.cli.start.checks import faults_and_warnings
    from stretto.kernel.durable.changes import differences, is_complete

    first_names: dict[str, str] = {}
    checked: set[str] = set()
    steps: dict[str, int] = {}
    warned: dict[str, None] = {}
    for name, overrides in runs.items():
        try:
            assembly = Assembly(compose(file, overrides))
        except StrettoError as error:
            raise ConfigError(f"{name}: {error}") from error
        document = {**assembly.composed.document, "out": None}
        if (first_name := first_names.setdefault(repr(document), name)) != name:
            raise ConfigError(f"{first_name} and {name} are the same run: their values are equal")
        steps[name] = assembly.config.steps
        config = folder / name / "config.yaml"
        if config.exists():
            changes = differences({**yaml.safe_load(config.read_text()), "out": None}, document)
            if changes:
                listed = ", ".join(f"{key} is {before}, now {new}" for key, (before, new) in changes.items())
                raise ConfigError(
                    f"{config.parent} holds a run with other values ({listed}); write another --out"
                )
        combination = repr({**document, "seed": None})
        if combination in checked or is_complete(folder / name, steps[name]):
            continue
        checked.add(combination)
        faults, warnings = faults_and_warnings(assembly, starting=True, resumed=config.exists())
        if faults:
            raise ConfigError("\n".join(f"{name}: {fault}" for fault in faults))
        warned |= dict.fromkeys(warnings)
    for warning in warned:
        typer.echo(f"warning: {printable(warning)}", err=True)
    return steps


def _run(commands: dict[str, list[str]], folder: Path, jobs: int) -> bool:
    """Run at most `jobs` commands at once, and print a line when one ends. Return whether a signal came: the
    first interrupt lets the runs finish their step, the second ends them at once."""
    from stretto.machine.gpus import gpu_variables, visible_gpus

    interrupts: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # under nohup, SIGHUP stays ignored
            signal.signal(number, lambda number, frame: interrupts.append(number))
    gpus, passed_on, waiting = visible_gpus(os.environ), 0, iter(commands)
    shares = [gpus[len(gpus) * n // jobs : len(gpus) * (n + 1) // jobs] for n in range(jobs)]
    running: dict[int, tuple[str, subprocess.Popen[bytes]]] = {}
    while True:
        for slot, share in enumerate(shares):
            if slot in running or interrupts or not (name := next(waiting, "")):
                continue
            environment = {**os.environ, **(gpu_variables(share, os.environ) if gpus else {})}
            command = [sys.executable, "-m", "stretto", *commands[name]]
            # A signal reaches the runs through this process, once.
            running[slot] = name, start_apart(command, folder / f"{name}.txt", environment)
        if not running:
            return bool(interrupts)
        time.sleep(_LOOK_S)
        while passed_on < len(interrupts):
            passed_on += 1
            for _, process in running.values():
                process.send_signal(signal.SIGINT)
        for slot, (name, process) in list(running.items()):
            if process.poll() is not None:
                typer.echo(end_of(folder / name, process.returncode))
                del running[slot]


def end_of(run: Path, status: int) -> str:
    """Return the line that the sweep prints for a run that has ended."""
    from stretto.records.run_folder import RunFolder

    if status in (0, 130) and (run / "config.yaml").exists():  # it may be interrupted while it starts
        record = RunFolder(run)
        return f"{run.name}: {printable(record.verdict) or record.state}"
    output = run.with_name(f"{run.name}.txt")
    lines = [line for line in output.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("error: ", "failed "))]
    return f"{run.name}: exit status {status}; {printable((errors or lines or [''])[-1])} (all in {output})"
