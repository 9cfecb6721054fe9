"""Kill processes of real runs at random moments, and audit what is left.

    python benchmarks/chaos.py --kills 300 --seed 1          # all configurations
    python benchmarks/chaos.py --kills 8 --seed 1 --only mock
    python benchmarks/chaos.py --kills 200 --supervise       # no kill but one of everything ends a run
    python benchmarks/chaos.py --identical 5                 # the same bits with kills as without

Each round is one run through the command line, with a plan of kills that is drawn from the seed: one process,
two of different kinds, or all at once, by SIGKILL. A kill of several processes counts once. When the run ends
early, `stretto resume` continues it, at once or after the grace time. A round passes if

- the run completes by itself or by `stretto resume`;
- afterwards none of its processes is there, and nothing of it in /dev/shm;
- `stretto audit` finds no violation.

The table has the seconds from a kill to the next new step, by kind. The last line is one JSON object. The
exit status is 1 if a round failed; the folder of its run then stays.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import multiprocessing
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from whole_runs import arguments_of

ROOT = Path(__file__).parent.parent
PLUGIN = Path(__file__).with_name("chaos_parts.py")
GRACE_S = 3.0
END_S = 12.0
"""Seconds after the grace time in which the processes of a dead run must be gone."""
HANG_S = 150.0
"""After this many seconds without a new step, a run hangs."""
MOST_RESUMES = 5
"""A run that ends so often without a new step does not continue."""
IDENTICAL_STEPS = 10

RUN_FILE = """\
name: chaos
algorithm: {{use: grpo, group_size: 4}}
training: {{use: mock, seconds_per_step: 0.05}}
inference: {{use: mock, replicas: 2, tokens_per_s: 20000, slots: 64, mean_tokens: 24, sigma: 0.6}}
rollout: {{processes: 2}}
verifier: {{processes: 2}}
reward: exact
dataset: {{use: jsonl, path: '{rows}'}}
evaluation: {{dataset: {{use: jsonl, path: '{rows}'}}, rows: 8, every: 10}}
queue: {{batch_size: 4, max_staleness: 2, max_attempts: 20, max_failures: 1000}}
checkpoint: {{every: 5, keep: 2}}
launcher: {{max_restarts: 10000}}
bus: {{grace_s: {grace_s}}}
steps: {steps}
"""

WORKERS = ("rollout", "inference", "verifier", "trainer")
ALWAYS = (*WORKERS, "scoring", "kernel", "nats-server", "guard")
QUICKSTART = f"model={ROOT}/examples/quickstart/model"


@dataclass(frozen=True)
class Setup:
    """A configuration under attack."""

    overrides: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ALWAYS
    share: float = 0.1
    """Share of all kills."""
    kills_per_round: int = 25
    gap: tuple[int, int] = (2, 8)
    """Least and most number of new steps between two kills."""


TORCH_ENGINES = (
    QUICKSTART,
    "training={use: torch, lr: 1.0e-4}",
    "inference={use: torch, replicas: 2, slots: 32, context_length: 64}",
    "sampling.max_tokens=24",
)
SETUPS = {
    "mock": Setup(share=0.40),
    "tools": Setup(
        (f"plugins=[{PLUGIN}]", f"workflow={{use: chaos_tools, tools: ['{PLUGIN}:double']}}", QUICKSTART),
        (*ALWAYS, "tool"),
        share=0.12,
    ),
    "server": Setup(
        (
            f"plugins=[{PLUGIN}]",
            "inference={use: chaos_server, replicas: 2, slots: 64, restarts: 1000}",
            f"inference.python={sys.executable}",
            "sampling.max_tokens=24",
        ),
        (*ALWAYS, "server"),
        share=0.12,
    ),
    "bus weights": Setup(("weights=bus",), share=0.09),
    "collective weights": Setup(("weights=collective",), share=0.09),
    "torch": Setup(TORCH_ENGINES, share=0.06, kills_per_round=9, gap=(1, 3)),
    "fsdp2 x 2": Setup(
        (*TORCH_ENGINES, "training={use: fsdp2, lr: 1.0e-4, processes: 2}"),
        share=0.06,
        kills_per_round=9,
        gap=(1, 3),
    ),
    "ppo, two groups": Setup(
        (
            *TORCH_ENGINES,
            "algorithm={use: ppo, group_size: 4, kl: {coef: 0.01}}",
            "groups={critics: {use: torch, lr: 1.0e-3}}",
            "models={critic: {group: critics}}",
        ),
        share=0.06,
        kills_per_round=9,
        gap=(1, 3),
    ),
}
IDENTICAL = Setup(
    (
        *TORCH_ENGINES,
        "inference.deterministic=true",
        "training.lr=1.0e-3",
        "queue.max_staleness=0",
        "evaluation.every=0",
    ),
    gap=(1, 4),
)


# --------------------------------------------------------------------------------------- the plan


@dataclass(frozen=True)
class Kill:
    """One moment of the plan."""

    kinds: tuple[str, ...]
    """Kinds of the processes to kill, one of each; empty for all processes of the run."""
    steps: int
    """New steps to wait for before it; 0 to kill after `delay_s`, whatever the run does then."""
    delay_s: float
    late_resume: bool
    """Whether a run that ends waits until nothing of it is left before it is resumed."""

    @property
    def label(self) -> str:
        """Kind in the table."""
        return {0: "all at once", 1: "".join(self.kinds)}.get(len(self.kinds), "two at once")


def plan(setup: Setup, count: int, seed: str) -> list[Kill]:
    """Draw the kills of a round."""
    draw = random.Random(seed)
    kills: list[Kill] = []
    for _ in range(count):
        number = draw.choices([1, 2, 0], [0.7, 0.22, 0.08])[0]
        early = draw.random() < 0.15 and bool(kills)
        kills.append(
            Kill(
                kinds=tuple(draw.sample(setup.kinds, number)),
                steps=0 if early else draw.randint(*setup.gap),
                delay_s=draw.uniform(0, 3.0 if early else 0.15),
                late_resume=draw.random() < 0.2,
            )
        )
    return kills


# ------------------------------------------------------------------------------ a run under attack


class Hopeless(Exception):
    """The run does not continue."""


class AttackedRun:
    """One run: its kernel process, from start or resume to its end, and all that it has started."""

    def __init__(
        self,
        folder: Path,
        file: Path,
        overrides: Sequence[str],
        *,
        output: Path | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
        supervised: bool = False,
    ) -> None:
        """Start the run in `folder`.

        Args:
            output: file for what the run prints; default next to its folder.
            environment: more variables for its processes.
            supervised: whether a supervisor starts the next kernel when one was killed.
        """
        self._options = ["--supervise"] if supervised else []
        self.folder = folder
        self.output = output or folder.with_suffix(".txt")
        self.resumes = 0
        self._environment = environment
        self._mark = f"{folder.name}-{time.time_ns()}"
        self._seen: dict[int, psutil.Process] = {}
        self._process = self._spawn("run", str(file), f"out={folder}", *overrides, *self._options)

    def resume(self, *options: str) -> None:
        """Continue the run."""
        self.resumes += 1
        self._process = self._spawn("resume", str(self.folder), *options, *self._options)

    def _spawn(self, *arguments: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, **self._environment, "STRETTO_CHAOS": self._mark, "OMP_NUM_THREADS": "1"}
        with self.output.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "stretto", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
            )

    @property
    def ended(self) -> bool:
        """Whether the kernel process has ended."""
        return self._process.poll() is not None

    @property
    def completed(self) -> bool:
        """Whether the run is complete."""
        file = self.folder / "summary.json"
        return self.ended and file.exists() and json.loads(file.read_bytes())["status"] == "completed"

    @property
    def step(self) -> int:
        """The newest step in metrics.jsonl."""
        file = self.folder / "metrics.jsonl"
        if not file.exists():
            return 0
        with file.open("rb") as stream:
            stream.seek(max(0, file.stat().st_size - 20_000))
            lines = stream.readlines()
        steps = [line for line in lines if line.startswith(b'{"step"') and line.endswith(b"\n")]
        return max((json.loads(line)["step"] for line in steps), default=0)

    def end(self, within_s: float) -> int:
        """Wait until the kernel process ends by itself, and return its exit status."""
        return self._process.wait(within_s)

    def kill(self, kinds: Sequence[str], draw: random.Random) -> int:
        """Kill one process of each kind, or all processes if there is no kind. Return their number."""
        by_kind = self.by_kind()
        if kinds:
            victims = [draw.choice(by_kind[kind]) for kind in kinds if by_kind[kind]]
        else:
            victims = [process for processes in by_kind.values() for process in processes]
        for process in victims:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        return len(victims)

    def by_kind(self) -> defaultdict[str, list[psutil.Process]]:
        """Its processes that are still there, by their kind."""
        found: defaultdict[str, list[psutil.Process]] = defaultdict(list)
        for process in self.living():
            found[self._kind_of(process)].append(process)
        return found

    def living(self) -> list[psutil.Process]:
        """All processes of the run that are still there, the kernel's included."""
        with suppress(psutil.NoSuchProcess):
            kernel = psutil.Process(self._process.pid)
            for process in [kernel, *kernel.children(recursive=True)]:
                self._seen[process.pid] = process
        for process in psutil.process_iter():
            if process.pid not in self._seen and self._is_marked(process):
                self._seen[process.pid] = process
        for pid in [pid for pid, process in self._seen.items() if not _is_alive(process)]:
            del self._seen[pid]
        return list(self._seen.values())

    def _is_marked(self, process: psutil.Process) -> bool:
        """Whether a process has inherited the run's mark. Processes in the sandbox have not; they are found
        as children."""
        with suppress(psutil.Error, OSError):
            return process.environ().get("STRETTO_CHAOS") == self._mark
        return False

    def _kind_of(self, process: psutil.Process) -> str:
        if process.pid == self._process.pid:
            return "supervisor" if self._options else "kernel"
        with suppress(psutil.Error):
            arguments = arguments_of(process) or [""]  # empty while a process ends
            return next((kind for kind, is_kind in KIND_TESTS.items() if is_kind(arguments)), "other")
        return "other"

    def processes(self) -> list[str]:
        """The processes that are still there, in words."""
        return [f"{process.pid} {self._kind_of(process)}" for process in self.living()]

    def shared_memory(self) -> list[str]:
        """The run's folders in shared memory."""
        run = json.loads((self.folder / "bus" / "kernel.json").read_bytes())["run"]
        return [str(path) for path in Path("/dev/shm").glob(f"stretto-{run}-*")]

    def text(self) -> str:
        """The end of what the run printed."""
        lines = self.output.read_text(errors="replace").splitlines()
        return "\n".join(lines[-15:])


KIND_TESTS: dict[str, Callable[[list[str]], bool]] = {
    "kernel": lambda arguments: arguments[1:3] == ["-m", "stretto"],  # under a supervisor
    **{
        role: lambda arguments, role=role: (
            "stretto.workers" in arguments and Path(arguments[-1]).name.startswith(f"{role}-")
        )
        for role in WORKERS
    },
    "scoring": lambda arguments: "stretto.user_code.reward" in arguments,
    "tool": lambda arguments: "stretto.user_code.tools" in arguments,
    "nats-server": lambda arguments: arguments[0].endswith("nats-server"),
    "guard": lambda arguments: any(each.endswith("bus/guard.py") for each in arguments),
    "server": lambda arguments: len(arguments) > 1 and arguments[1].endswith("stand_in_server.py"),
}


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# ---------------------------------------------------------------------------------------- a round


@dataclass
class Round:
    """The result of one round."""

    name: str
    kills: int = 0
    resumes: int = 0
    lost: int = 0
    doubled: int = 0
    recovery_s: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    failures: list[str] = field(default_factory=list[str])
    """Promises that the run broke."""
    wall_s: float = 0.0
    digest: str = ""
    """Of the final weights and the optimizer, for `--identical`."""


def write_run_file(folder: Path, steps: int, grace_s: float) -> Path:
    """Make a folder with a dataset and the file of a run of the mock engines. Return the run file."""
    folder.mkdir()
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = folder / "run.yaml"
    file.write_text(RUN_FILE.format(rows=folder / "rows.jsonl", grace_s=grace_s, steps=steps))
    return file


def attack(task: Task, setup: Setup, root: Path) -> Round:
    """Run a round in a folder below `root`. The folder stays if the round fails."""
    result, began = Round(task.name), time.monotonic()
    folder = root / re.sub(r"\W+", "-", task.name)
    file = write_run_file(folder, task.steps, GRACE_S)
    run = AttackedRun(folder / "run", file, setup.overrides, supervised=task.supervised)
    try:
        _carry_out(run, task.kills, random.Random(task.seed), result)
        until_step(run, math.inf, run.resume)
        check_nothing_is_left(run, result)
        audit(run, result)
        result.digest = _digest_of(run.folder)
    except Hopeless as failure:
        result.failures.append(f"{failure}\n{run.text()}")
    finally:
        for process in run.living():
            with suppress(psutil.NoSuchProcess):
                process.kill()
    result.resumes = run.resumes
    result.wall_s = time.monotonic() - began
    if not result.failures and setup is not IDENTICAL:  # those of runs that differ are needed
        shutil.rmtree(folder)
    return result


def _carry_out(run: AttackedRun, kills: Sequence[Kill], draw: random.Random, result: Round) -> None:
    """Carry out the plan, as far as the run lasts, and measure the recoveries."""
    newest = 0
    until_step(run, 1, run.resume)
    if missing := {*WORKERS, "kernel", "nats-server", "guard"} - run.by_kind().keys():
        raise Hopeless(f"does not recognise its processes: {', '.join(sorted(missing))}")
    for kill, following in pairwise([*kills, None]):
        assert kill is not None
        if kill.steps:
            until_step(run, run.step + kill.steps, run.resume)
        time.sleep(kill.delay_s)
        if run.completed:
            return
        if not run.kill(kill.kinds, draw):
            continue  # none of this kind is there now
        killed_at = time.monotonic()
        newest = max(newest, run.step)  # a resumed run goes back to its checkpoint first
        result.kills += 1
        if following is not None and not following.steps:
            _resume_if_ended(run)
            continue  # the next kill does not wait for the recovery
        until_step(run, newest + 1, partial(_resume, run, kill, result))
        result.recovery_s.setdefault(kill.label, []).append(time.monotonic() - killed_at)


def _resume(run: AttackedRun, kill: Kill, result: Round) -> None:
    """Resume a run that a kill has ended, at once or when nothing of it is left."""
    if kill.late_resume:
        # After a kill of all processes nobody is there to clean shared memory: `resume` does it.
        check_nothing_is_left(run, result, memory=bool(kill.kinds))
    run.resume()


def _resume_if_ended(run: AttackedRun) -> None:
    """Give a run whose kernel was killed a moment to end, and resume it."""
    with suppress(subprocess.TimeoutExpired):
        run.end(0.2)
        if not run.completed:
            run.resume()


def until_step(run: AttackedRun, step: float, resume: Callable[[], None]) -> None:
    """Wait until the run has completed a step, or all steps.

    Args:
        resume: resumes the run where it ends before.

    Raises:
        Hopeless: if it hangs, or ends again and again.
    """
    newest, since, resumes = run.step, time.monotonic(), 0
    while run.step < step and not run.completed:
        if run.step > newest:
            newest, since, resumes = run.step, time.monotonic(), 0
        if run.ended:
            if resumes == MOST_RESUMES:
                raise Hopeless(f"ended {resumes} times after step {newest}")
            resume()
            since, resumes = time.monotonic(), resumes + 1
        if time.monotonic() > since + HANG_S:
            raise Hopeless(f"hangs after step {newest}")
        time.sleep(0.02)


def _steps_of(run: AttackedRun) -> int:
    text = (run.folder / "config.yaml").read_text()
    return int(re.findall(r"^steps: (\d+)$", text, re.MULTILINE)[0])


def check_nothing_is_left(
    run: AttackedRun, result: Round, *, memory: bool = True, grace_s: float = GRACE_S
) -> None:
    """Wait, for the grace time at most, until no process of the run is left, and nothing in shared memory."""
    deadline = time.monotonic() + grace_s + END_S
    while left := [*run.processes(), *(run.shared_memory() if memory else [])]:
        if time.monotonic() > deadline:
            result.failures.append(f"left behind: {', '.join(left)}")
            return
        time.sleep(0.1)


def audit(run: AttackedRun, result: Round) -> None:
    """Audit the run. Compare the mock trainer's own count of its steps, too."""
    command = [sys.executable, "-m", "stretto", "audit", str(run.folder), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        result.failures.append(f"cannot be audited: {done.stderr}")
        return
    report = json.loads(done.stdout)
    result.lost, result.doubled = report["lost"], report["doubled"]
    for check in report["checks"]:
        result.failures += [f"audit: {check['name']}: {each}" for each in check["violations"]]
    counter = run.folder / "checkpoints" / f"step-{_steps_of(run):06d}" / "mock.json"
    if counter.exists() and json.loads(counter.read_bytes())["steps"] != _steps_of(run):
        result.failures.append(f"the mock trainer has counted {counter.read_text()}")


def _digest_of(folder: Path) -> str:
    """Return the hash of the newest checkpoint's weights and optimizer."""
    checkpoint = max((folder / "checkpoints").glob("step-*"))
    files = sorted(checkpoint.rglob("*.safetensors"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


# ----------------------------------------------------------------------------------- all rounds


@dataclass(frozen=True)
class Task:
    """The arguments of one round."""

    name: str
    setup: str
    kills: tuple[Kill, ...]
    seed: str
    steps: int
    supervised: bool = False


def tasks(total: int, seed: int, only: Sequence[str]) -> list[Task]:
    """Divide the kills among the setups and their rounds."""
    chosen = {name: setup for name, setup in SETUPS.items() if not only or name in only}
    shares = sum(setup.share for setup in chosen.values())
    listed: list[Task] = []
    left = total
    for name, setup in chosen.items():
        last = name == [*chosen][-1]
        count = left if last else min(left, max(1, round(total * setup.share / shares)))
        left -= count
        for number, start in enumerate(range(0, count, setup.kills_per_round)):
            size = min(setup.kills_per_round, count - start)
            round_seed = f"{seed}/{name}/{number}"
            kills = tuple(plan(setup, size, round_seed))
            # Steps also pass while a kill takes effect and in the delays.
            steps = sum(kill.steps or 30 for kill in kills) + 3 * size + 15
            listed.append(Task(f"{name} {number}", name, kills, round_seed, steps))
    return listed


def carry_out(task: Task, root: Path) -> Round:
    """Run one round in a process of its own."""
    setup = IDENTICAL if task.setup == "identical" else SETUPS[task.setup]
    return attack(task, setup, root)


def identical_tasks(seeds: int) -> list[Task]:
    """An undisturbed deterministic run, and one with kills for each seed."""
    listed = [Task("undisturbed", "identical", (), "0", IDENTICAL_STEPS)]
    for seed in range(1, seeds + 1):
        name = f"seed {seed}"
        listed.append(Task(name, "identical", tuple(plan(IDENTICAL, 3, name)), name, IDENTICAL_STEPS))
    return listed


def run_all(listed: Sequence[Task], jobs: int, root: Path) -> Iterator[Round]:
    """Yield the results of the rounds as they end."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawn) as pool:
        for done in as_completed([pool.submit(carry_out, task, root) for task in listed]):
            yield done.result()


def show(result: Round) -> None:
    times = [each for seconds in result.recovery_s.values() for each in seconds]
    slowest = f"{max(times):6.1f}" if times else "     -"
    end = "FAILED" if result.failures else "ok"
    print(
        f"{result.name:<24} {result.kills:>5} {result.resumes:>7} {slowest} {result.wall_s:>7.0f}  {end}",
        flush=True,
    )
    for failure in result.failures:
        print(textwrap.indent(failure, "    "), flush=True)


def summary_of(results: Sequence[Round]) -> dict[str, Any]:
    """Return the figures of all rounds."""
    times: defaultdict[str, list[float]] = defaultdict(list)
    for result in results:
        for kind, seconds in result.recovery_s.items():
            times[kind] += seconds
    return {
        "kills": sum(result.kills for result in results),
        "lost": sum(result.lost for result in results),
        "doubled": sum(result.doubled for result in results),
        "recovery_s": {
            kind: {
                "n": len(seconds),
                "median": round(statistics.median(seconds), 2),
                "max": round(max(seconds), 2),
            }
            for kind, seconds in sorted(times.items())
        },
        "failed_rounds": [result.name for result in results if result.failures],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=300, help="kills in all rounds together")
    parser.add_argument("--seed", type=int, default=1, help="seed of the plans")
    parser.add_argument("--only", action="append", choices=SETUPS, default=[], help="only this configuration")
    parser.add_argument("--jobs", type=int, default=1, help="rounds at once")
    parser.add_argument("--identical", type=int, metavar="SEEDS", help="compare the bits of this many runs")
    parser.add_argument("--supervise", action="store_true", help="start the runs with a supervisor")
    parser.add_argument("--folder", type=Path, help="where runs are; default a temporary folder")
    options = parser.parse_args()
    listed = (
        identical_tasks(options.identical)
        if options.identical
        else tasks(options.kills, options.seed, options.only)
    )
    listed = [replace(task, supervised=options.supervise) for task in listed]
    root = options.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    root.mkdir(parents=True, exist_ok=True)
    print(f"{'round':<24} {'kills':>5} {'resumes':>7} {'slowest':>6} {'wall s':>7}  end")
    results: list[Round] = []
    for result in run_all(listed, options.jobs, root.absolute()):
        results.append(result)
        show(result)
    figures = summary_of(results)
    print(f"\n{'kind':<16} {'n':>4} {'median s':>9} {'max s':>7}")
    for kind, seconds in figures["recovery_s"].items():
        print(f"{kind:<16} {seconds['n']:>4} {seconds['median']:>9.2f} {seconds['max']:>7.2f}")
    if options.identical:
        figures["digests"] = {result.name: result.digest[:16] for result in results}
    same = not options.identical or len({result.digest for result in results}) == 1
    if figures["failed_rounds"] or not same:
        print(f"the folders of failed rounds are in {root}")
    else:
        shutil.rmtree(root)
    print(json.dumps(figures))
    sys.exit(bool(figures["failed_rounds"]) or not same)


if __name__ == "__main__":
    main()
