"""What the start and the end of a run cost: seconds on the clock by phase, processor seconds by process.

    python benchmarks/start.py [--mock] [--runs N] [KEY=VALUE ...]

Runs the quickstart through the command line for two steps, or with `--mock` the mock engines for one. Times
are seconds after the command began, medians over the runs; the processor seconds are those of the run with
the smallest sum. A process is looked at every 20 ms, so what it does in its last moments is not counted. The
last line is one JSON object. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil

from stretto.bus.messages.events import (
    FleetChanged,
    GroupFigures,
    KernelBegan,
    OutcomeRead,
    RunEnded,
    StepMeasured,
    TicketsIssued,
    WeightsServed,
)
from stretto.records.run_folder import RunFolder
from whole_runs import QUICKSTART, arguments_of, mock_run_file

_POLL_S = 0.02
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Seen:
    """A process of a run: when it was there, and its processor time."""

    name: str
    first: float
    last: float
    cpu_s: float = 0.0


@dataclass
class Measured:
    """One run."""

    phases: dict[str, float] = field(default_factory=dict[str, float])
    processes: dict[str, float] = field(default_factory=dict[str, float])


def mock_file(folder: Path) -> Path:
    """A run file with mock engines, of which only the trainer imports torch."""
    return mock_run_file(
        folder,
        64,
        """\
name: start
algorithm: {use: grpo, group_size: 4}
training: {use: mock, seconds_per_step: 0.01}
inference: {use: mock, tokens_per_s: 10000, slots: 16, mean_tokens: 8}
queue: {batch_size: 4}
steps: 1
""",
    )


def name_of(command: list[str]) -> str:
    """What a process is, from its command line."""
    text = " ".join(command)
    if "stretto.workers" in text:
        last = Path(command[-1].rstrip("\0"))
        return last.stem if last.suffix == ".json" else "fork server"
    for words in (
        "stretto.records.samples",
        "guard.py",
        "nats-server",
        "stretto.user_code",
        "stretto.kernel.durable.clean",
    ):
        if words in text:
            return words
    return "kernel" if " run " in text else text[:40]


def look(root: int, seen: dict[int, Seen], now: float) -> None:
    """Note the processor time of a process and of all that descend from it."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                content = (entry / "stat").read_bytes()
            except OSError:
                continue
            fields = content[content.rindex(b")") + 2 :].split()
            parents[int(entry.name)] = int(fields[1])
            ticks[int(entry.name)] = int(fields[11]) + int(fields[12])
    for pid, process_ticks in ticks.items():
        ancestor = pid
        while ancestor not in (root, 0) and ancestor not in seen:
            ancestor = parents.get(ancestor, 0)
        if not ancestor:
            continue
        try:
            command = arguments_of(psutil.Process(pid))
        except psutil.Error:
            continue
        process = seen.setdefault(pid, Seen("", now, now))
        process.last, process.cpu_s = now, process_ticks / _TICKS
        if command:
            process.name = name_of(command)


def measure(file: Path, out: Path, overrides: list[str]) -> Measured:
    """Run once."""
    command = [sys.executable, "-m", "stretto", "run", str(file), f"out={out}", *overrides]
    began = time.time()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    seen: dict[int, Seen] = {}
    while process.poll() is None:
        look(process.pid, seen, time.time() - began)
        time.sleep(_POLL_S)
    ended = time.time() - began
    assert process.stderr is not None
    if process.returncode:
        raise SystemExit(process.stderr.read())
    result = Measured(phases_of(out, began))
    workers = [each for each in seen.values() if "-" in each.name and each.name[-1].isdecimal()]
    for each in workers:
        result.phases[f"{each.name} begins"] = each.first
        result.phases[f"{each.name} ends"] = each.last
    result.phases["command ends"] = ended
    for each in seen.values():
        result.processes[each.name] = result.processes.get(each.name, 0.0) + each.cpu_s
    return result


def phases_of(out: Path, began: float) -> dict[str, float]:
    """The moments of a run, from its events."""
    phases: dict[str, float] = {}

    def note(name: str, at: float) -> None:
        phases.setdefault(name, at - began)

    for at, event in RunFolder(out).events():
        match event:
            case KernelBegan():
                note("kernel on the bus", at)
            case FleetChanged():
                note(f"{event.worker} {event.state}", at)
            case WeightsServed():
                note("an engine serves version 0", at)
            case TicketsIssued():
                note("first ticket", at)
            case OutcomeRead(_, GroupFigures() as group):
                note("first group done" if group.purpose == "train" else "first answer", at)
            case StepMeasured():
                note("first step", at)
                phases["last step"] = at - began
            case RunEnded():
                note("workers dismissed", at)
            case _:
                pass
    return phases


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--mock", action="store_true", help="the mock engines instead of the quickstart")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    runs: list[Measured] = []
    with tempfile.TemporaryDirectory() as folder:
        file = mock_file(Path(folder)) if options.mock else QUICKSTART
        steps = [] if options.mock else ["steps=2"]
        for number in range(options.runs):
            runs.append(measure(file, Path(folder, f"run-{number}"), [*steps, *options.overrides]))
    phases = {
        name: round(median(run.phases[name] for run in runs if name in run.phases), 2)
        for run in runs
        for name in run.phases
    }
    cheapest = min(runs, key=lambda run: sum(run.processes.values()))
    processes = {name: round(cpu_s, 2) for name, cpu_s in cheapest.processes.items() if cpu_s}
    print(f"{'after s':>8}")
    for name, at in sorted(phases.items(), key=lambda each: each[1]):
        print(f"{at:8.2f}  {name}")
    print(f"\n{'CPU s':>8}")
    for name, cpu_s in sorted(processes.items(), key=lambda each: -each[1]):
        print(f"{cpu_s:8.2f}  {name}")
    print(f"{sum(processes.values()):8.2f}  all")
    print(
        json.dumps(
            {"first_step_s": phases["first step"], "command_s": phases["command ends"]}
            | {"cpu_s": round(sum(processes.values()), 2), "phases": phases, "processes": processes}
        )
    )


if __name__ == "__main__":
    main()
