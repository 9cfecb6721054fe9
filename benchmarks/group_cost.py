"""What a group costs beside arithmetic, from its ticket to its trained row, by process and by message.

    python benchmarks/group_cost.py [--runs 3] [--no-messages] [KEY=VALUE ...]

Runs `time_to_accuracy.yaml` through the command line: groups of 8 answers of at most 32 tokens, 32 groups a
step. From one step to another the benchmark reads the processor seconds and the context switches of every
process of the run, and divides them by the groups that were trained in between. `engine` and `trainer` are
the processes that compute; `outside` is the sum of all others. A second run, whose seconds do not count,
lists the messages that the bus carries, with their bytes, by subject. `--of FOLDER` measures the code of
another checkout, which takes its turn before each run of this one. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import nats
import psutil
from nats.aio.msg import Msg

from stretto.bus.connection import inbox_of, login_of
from stretto.bus.server import Bootstrap
from whole_runs import arguments_of

HERE = Path(__file__).parent
RUN_FILE = HERE / "time_to_accuracy.yaml"
FIRST, STEPS, GROUPS = 10, 60, 32
COMPUTING = ("inference", "trainer")
POLL_S = 0.02


@dataclass
class Reading:
    """The processes of a run at the end of a step."""

    step: int
    at: float
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    switches: dict[str, int] = field(default_factory=dict[str, int])


def name_of(process: psutil.Process, kernel: int) -> str:
    """Return what a process is: a worker's role, `kernel`, `nats-server`, or what its command says."""
    if process.pid == kernel:
        return "kernel"
    arguments = arguments_of(process)
    if process.name() == "nats-server":
        return "nats-server"
    worker = re.fullmatch(r"([a-z]+)-.*\.json", Path(arguments[-1]).name if arguments else "")
    if worker:
        return worker[1]
    module = next((word for word in arguments if word.startswith("stretto.")), "")
    return module.removeprefix("stretto.") or "children"


def read(process: psutil.Process, step: int) -> Reading:
    """Read the run's processes; those that end meanwhile are left out."""
    reading = Reading(step, time.monotonic())
    for each in [process, *process.children(recursive=True)]:
        try:
            with each.oneshot():
                name, times, switches = name_of(each, process.pid), each.cpu_times(), each.num_ctx_switches()
        except psutil.Error:
            continue
        seconds = times.user + times.system
        reading.seconds[name] = reading.seconds.get(name, 0.0) + seconds
        reading.switches[name] = reading.switches.get(name, 0) + switches.voluntary
    return reading


def steps_done(out: Path) -> int:
    """Return the number of steps that the run has trained."""
    file = out / "metrics.jsonl"
    return sum(b'"step"' in line for line in file.open("rb")) if file.exists() else 0


def command_of(out: Path, overrides: Sequence[str]) -> list[str]:
    settings = [f"out={out}", f"steps={STEPS + 5}", "checkpoint.every=0"]
    return [sys.executable, "-m", "stretto", "run", str(RUN_FILE), *settings, *overrides]


def environment_of(checkout: Path | None) -> dict[str, str]:
    """Return the environment in which the code of a checkout runs; None: the installed one."""
    if checkout is None:
        return dict(os.environ)
    folders = [checkout / "core", *sorted((checkout / "plugins").iterdir())]
    return {**os.environ, "PYTHONPATH": ":".join(map(str, folders))}


def measure(overrides: Sequence[str], checkout: Path | None) -> dict[str, dict[str, float]]:
    """Run once; return processor ms and context switches of each process for a group, and the step's ms."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "run")
        command, environment = command_of(out, overrides), environment_of(checkout)
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment) as run:
            process, first, last = psutil.Process(run.pid), None, None
            while last is None and run.poll() is None:
                step = steps_done(out)
                if first is None and step >= FIRST:
                    first = read(process, step)
                elif first is not None and step >= STEPS:
                    last = read(process, step)
                time.sleep(POLL_S)
            run.wait()
    assert first is not None, "the run failed"
    assert last is not None, "the run failed"
    groups = GROUPS * (last.step - first.step)
    names = sorted(set(first.seconds) & set(last.seconds))
    ms = {name: 1000 * (last.seconds[name] - first.seconds[name]) / groups for name in names}
    ms["outside"] = sum(value for name, value in ms.items() if name not in COMPUTING)
    turns = {name: (last.switches[name] - first.switches[name]) / groups for name in names}
    turns["outside"] = sum(value for name, value in turns.items() if name not in COMPUTING)
    step_ms = 1000 * (last.at - first.at) / (last.step - first.step)
    return {"processor ms": ms, "switches": turns, "step": {"step ms": step_ms}}


async def count(overrides: Sequence[str]) -> tuple[Counter[str], Counter[str], int]:
    """Run once more; return the number and the bytes of messages by kind of subject, and the groups."""
    numbers, sizes = Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "run")
        async with await anyio.open_process(command_of(out, overrides), stdout=subprocess.DEVNULL) as run:
            file = out / "bus" / "kernel.json"
            while steps_done(out) < FIRST:
                await anyio.sleep(POLL_S)
            login = Bootstrap.read(file)
            client = await nats.connect(login.url, inbox_prefix=inbox_of(login).encode(), **login_of(login))

            async def take(message: Msg) -> None:
                kind = kind_of(message.subject, login.run)
                numbers[kind] += 1
                sizes[kind] += len(message.data)

            begun = steps_done(out)
            await client.subscribe(f"st.{login.run}.>", cb=take)
            await client.subscribe("$JS.>", cb=take)
            while steps_done(out) < STEPS:
                await anyio.sleep(POLL_S)
            groups = GROUPS * (steps_done(out) - begun)
            await client.close()
            assert await run.wait() == 0, "the run failed"
    return numbers, sizes, groups


def kind_of(subject: str, run: str) -> str:
    """Return a subject without the parts that differ from message to message."""
    subject = subject.replace(f"st.{run}.", "").replace(f"_{run}", "")
    words = [word for word in subject.split(".") if not re.search(r"\d", word) and len(word) < 16]
    return ".".join(words)


def table(rows: dict[str, dict[str, float]], columns: Sequence[str]) -> None:
    print(f"{'':24}" + "".join(f"{column:>16}" for column in columns))
    for name, values in rows.items():
        cells = "".join(f"{values.get(column, float('nan')):>16.3f}" for column in columns)
        print(f"{name:24}{cells}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="runs; the medians count")
    parser.add_argument("--of", type=Path, help="another checkout to measure side by side")
    parser.add_argument("--no-messages", action="store_true", help="do not list the messages")
    parser.add_argument("overrides", nargs="*", help="key=value of the run file")
    options = parser.parse_intermixed_args()
    sides = {"this": None} if options.of is None else {"other": options.of.resolve(), "this": None}
    readings: dict[str, list[dict[str, dict[str, float]]]] = {side: [] for side in sides}
    for _ in range(options.runs):
        for side, checkout in sides.items():
            readings[side].append(measure(options.overrides, checkout))
    figures: dict[str, dict[str, float]] = {}
    for kind in ("processor ms", "switches", "step"):
        rows: dict[str, dict[str, float]] = {}
        for side, each in readings.items():
            for name in dict.fromkeys(name for reading in each for name in reading[kind]):
                value = statistics.median(reading[kind].get(name, 0.0) for reading in each)
                rows.setdefault(name, {})[side] = value
        print(f"{kind} a group" if kind != "step" else "")
        table(rows, list(sides))
        figures[kind] = {name: round(values["this"], 3) for name, values in rows.items()}
        if options.of is not None:
            figures[f"{kind}, other"] = {name: round(values["other"], 3) for name, values in rows.items()}
    if not options.no_messages:
        numbers, sizes, groups = anyio.run(count, options.overrides)
        rows = {
            name: {"messages": number / groups, "bytes": sizes[name] / groups}
            for name, number in numbers.most_common()
        }
        rows["all"] = {"messages": numbers.total() / groups, "bytes": sizes.total() / groups}
        table(rows, ["messages", "bytes"])
        figures["messages"] = {name: round(values["messages"], 3) for name, values in rows.items()}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
