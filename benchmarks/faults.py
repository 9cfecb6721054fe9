"""Cause faults of the machine in real runs, and observe what happens.

    python benchmarks/faults.py                         # all faults
    python benchmarks/faults.py --only "full disk"      # one fault
    python benchmarks/faults.py --jobs 4                # runs at once; most of the time they wait

Each fault is caused in a run of its own, through the command line, after some steps. The program observes
whether the run continues, pauses or ends. When the fault has ended, it waits for the next new step, and
resumes the run if the run has ended. In the end the run must be complete, nothing of it may be left, and
`stretto audit` must find nothing. The last line is one JSON object. The exit status is 1 if a run broke a
promise; the folder of that run then stays.

Some faults need the rights of root, or a C compiler. Without them they are skipped, with the reason.
"""

from __future__ import annotations

import argparse
import errno
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

from chaos import (
    HANG_S,
    TORCH_ENGINES,
    AttackedRun,
    Hopeless,
    Round,
    audit,
    check_nothing_is_left,
    until_step,
    write_run_file,
)

GRACE_S = 10.0
"""The default of `bus.grace_s`."""
STEPS = 160
"""Enough for a run that continues during a fault of 30 s."""
BEFORE = 12
"""Steps before the fault, so that there are checkpoints."""
PACE = "training.seconds_per_step=0.25"
PLUGIN = Path(__file__).with_name("faults_parts.py")
DISK_MB = 12
REFUSAL_S = 120.0
"""A `resume` that is refused ends within this many seconds."""

SHIM = """\
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
static const volatile long long *offset_s; /* in a file that the benchmark writes */
__attribute__((constructor)) static void begin(void) {
    int file = open(getenv("FAULTS_CLOCK"), O_RDONLY);
    void *page = file < 0 ? MAP_FAILED : mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
    if (page != MAP_FAILED) offset_s = page;
}
int clock_gettime(clockid_t clock, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, at);
    if (!failed && offset_s && clock == CLOCK_REALTIME) at->tv_sec += *offset_s;
    return failed;
}
time_t time(time_t *into) {
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    if (into) *into = at.tv_sec;
    return at.tv_sec;
}
int gettimeofday(struct timeval *restrict into, void *restrict zone) {
    struct timespec at;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &at);
    into->tv_sec = at.tv_sec;
    into->tv_usec = at.tv_nsec / 1000;
    return 0;
}
"""
"""Adds an offset to the wall clock of a program that takes the time from libc."""


class Unable(Exception):
    """This machine cannot cause the fault."""


# ------------------------------------------------------------------------------------- the faults


@dataclass
class Scene:
    """What a fault needs: a folder for the run and its files, and the run once it is there."""

    folder: Path
    undo: ExitStack
    """Called after the run has been examined."""
    environment: dict[str, str] = field(default_factory=dict[str, str])
    running: AttackedRun | None = None

    @property
    def run_folder(self) -> Path:
        """The run's folder. The folder above it can be a file system of its own."""
        return self.folder / "disk" / "run"

    @property
    def run(self) -> AttackedRun:
        """The run, which has been started."""
        assert self.running is not None
        return self.running


@dataclass(frozen=True)
class Fault:
    """One fault."""

    cause: Callable[[Scene], AbstractContextManager[None]]
    """Causes the fault on entry, and ends it on exit."""
    lasts_s: float
    until_end: bool = False
    """Whether the fault ends early when the run has ended."""
    stays: bool = False
    """Whether the fault is one of the folder or the dataset, and so of a resumed run, too: then a `resume`
    is tried while it lasts."""
    prepare: Callable[[Scene], None] = lambda scene: None
    """Called before the run starts."""
    overrides: tuple[str, ...] = (PACE,)
    resume_options: tuple[str, ...] = ()


def one(run: AttackedRun, kind: str) -> psutil.Process:
    """Return a process of the run.

    Raises:
        Hopeless: if it has none of this kind.
    """
    found = run.by_kind()[kind]
    if not found:
        raise Hopeless(f"has no {kind} process")
    return found[0]


def stop(*kinds: str) -> Callable[[Scene], AbstractContextManager[None]]:
    """SIGSTOP for one process of each kind, or for all processes of the run; SIGCONT at the end."""

    @contextmanager
    def cause(scene: Scene) -> Generator[None]:
        chosen = [one(scene.run, kind) for kind in kinds] or scene.run.living()
        for process in chosen:
            process.suspend()
        yield
        for process in chosen:
            with suppress(psutil.NoSuchProcess):
                process.resume()

    return cause


def _as_root(*command: str) -> None:
    """Run a command that needs the rights of root.

    Raises:
        Unable: if it fails.
    """
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise Unable(f"`{command[0]}` fails: {getattr(error, 'stderr', '') or error}".strip()) from error


def small_disk(scene: Scene) -> None:
    """The run's folder is on a file system of its own with `DISK_MB`."""
    disk = scene.run_folder.parent
    _as_root("mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "stretto-faults", str(disk))
    scene.undo.callback(_as_root, "umount", "--lazy", str(disk))


@contextmanager
def scoring_stopped(scene: Scene) -> Generator[None]:
    """SIGSTOP for every scoring process: some of them are spares, which have no work."""
    chosen = scene.run.by_kind()["scoring"]
    for process in chosen:
        process.suspend()
    yield
    for process in chosen:
        with suppress(psutil.NoSuchProcess):
            process.resume()


@contextmanager
def full_disk(scene: Scene) -> Generator[None]:
    """Another program fills the file system."""
    ballast = scene.run_folder.parent / "ballast"
    with ballast.open("wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(4096))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                break
    yield
    ballast.unlink()


@contextmanager
def store_without_room(scene: Scene) -> Generator[None]:
    """Every write of nats-server to its store fails, also after a restart; others can write."""
    for kind in ("guard", "nats-server"):  # the guard's next server inherits its limits
        one(scene.run, kind).rlimit(psutil.RLIMIT_FSIZE, (4096, psutil.RLIM_INFINITY))
    yield
    for kind in ("guard", "nats-server"):
        one(scene.run, kind).rlimit(psutil.RLIMIT_FSIZE, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY))


@contextmanager
def read_only(scene: Scene) -> Generator[None]:
    """Every file and folder of the run becomes immutable; open files, too."""
    _as_root("chattr", "-R", "-f", "+i", str(scene.run_folder))
    try:
        yield
    finally:
        _as_root("chattr", "-R", "-f", "-i", str(scene.run_folder))


def adjustable_clock(scene: Scene) -> None:
    """The run's processes take the wall clock from a library that adds an offset. Processes in the sandbox
    and nats-server do not."""
    source, library, offset = (scene.folder / name for name in ("clock.c", "clock.so", "offset"))
    source.write_text(SHIM)
    offset.write_bytes(bytes(8))
    _as_root("cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl")
    scene.environment |= {"LD_PRELOAD": str(library), "FAULTS_CLOCK": str(offset)}


def clock_jump(hours: int) -> Callable[[Scene], AbstractContextManager[None]]:
    """The wall clock jumps, and later it jumps back."""

    def jump(scene: Scene, to: int) -> None:
        with (scene.folder / "offset").open("r+b", buffering=0) as file:
            file.write((to * 3600).to_bytes(8, sys.byteorder, signed=True))

    @contextmanager
    def cause(scene: Scene) -> Generator[None]:
        jump(scene, hours)
        yield
        jump(scene, 0)

    return cause


def no_more_memory(kind: str) -> Callable[[Scene], AbstractContextManager[None]]:
    """A process cannot map more memory: its limit of address space is below what it has."""

    @contextmanager
    def cause(scene: Scene) -> Generator[None]:
        process = one(scene.run, kind)
        former, hard = process.rlimit(psutil.RLIMIT_AS)
        process.rlimit(psutil.RLIMIT_AS, (process.memory_info().vms // 2, hard))
        yield
        with suppress(psutil.NoSuchProcess):
            process.rlimit(psutil.RLIMIT_AS, (former, hard))

    return cause


@contextmanager
def changed_dataset(scene: Scene) -> Generator[None]:
    """The run is interrupted, and a row of its dataset changes."""
    one(scene.run, "kernel").send_signal(signal.SIGINT)
    scene.run.end(HANG_S)
    rows = scene.folder / "rows.jsonl"
    rows.write_text(rows.read_text().replace('"39+1="', '"39 + 1="'))
    yield


TORCH = (*TORCH_ENGINES, "inference.replicas=1", "steps=60")
GROWING = (f"plugins=[{PLUGIN}]", "training.use=faults_activations", PACE)
FAULTS = {
    **{
        f"{kind} stopped": Fault(stop(kind), 30)
        for kind in ("rollout", "inference", "verifier", "trainer", "guard")
    },
    "scoring stopped": Fault(scoring_stopped, 30),
    "nats-server stopped": Fault(stop("nats-server"), 60),
    "kernel stopped": Fault(stop("kernel"), 300),
    "all stopped": Fault(stop(), 60),
    "full disk": Fault(full_disk, 90, until_end=True, stays=True, prepare=small_disk),
    "store without room": Fault(store_without_room, 45),
    "read-only folder": Fault(read_only, 90, until_end=True, stays=True),
    "clock an hour ahead": Fault(clock_jump(1), 20, prepare=adjustable_clock),
    "clock an hour back": Fault(clock_jump(-1), 20, prepare=adjustable_clock),
    "no memory for inference": Fault(no_more_memory("inference"), 30, until_end=True, overrides=TORCH),
    "no memory for trainer": Fault(no_more_memory("trainer"), 30, until_end=True, overrides=GROWING),
    "dataset changed": Fault(changed_dataset, 0, stays=True, resume_options=("--accept-dataset",)),
}


# -------------------------------------------------------------------------------- a run with a fault


@dataclass
class Observed:
    """What happened."""

    name: str
    lasted_s: float = 0.0
    steps_during: int = 0
    """New steps while the fault lasted."""
    pause_s: float = 0.0
    """Longest time without a new step while the fault lasted."""
    ended: str = ""
    """The reason with which the run ended; empty if it did not end."""
    refused: str = ""
    """What `stretto resume` said while the fault lasted, if the run had ended."""
    next_step_s: float | None = None
    """Seconds from the end of the fault to the next new step, with `stretto resume` if it was necessary; None
    if the run was complete before."""
    resumes: int = 0
    restarts: int = 0
    """Workers that were started again."""
    failed: int = 0
    """Tickets that failed."""
    completed: bool = False
    problems: list[str] = field(default_factory=list[str])
    """Promises that the run broke."""
    skipped: str = ""

    @property
    def what(self) -> str:
        """The behaviour in one word."""
        if self.ended:
            return "ends"
        return "goes on" if self.steps_during > 2 else "pauses"  # a step or two may be under way


def observe(name: str, root: Path) -> Observed:
    """Cause a fault in a run in a folder below `root`. The folder stays if the run breaks a promise."""
    fault, seen = FAULTS[name], Observed(name)
    folder = root / re.sub(r"\W+", "-", name)
    file = write_run_file(folder, STEPS, GRACE_S)
    with ExitStack() as undo:
        scene = Scene(folder, undo)
        scene.run_folder.parent.mkdir()
        try:
            fault.prepare(scene)
            output = folder / "output.txt"
            run = AttackedRun(
                scene.run_folder, file, fault.overrides, output=output, environment=scene.environment
            )
            scene.running = run
            undo.callback(lambda: [process.kill() for process in run.living()])
            _go_through(scene, fault, seen)
        except Unable as reason:
            seen.skipped = str(reason)
        except Hopeless as failure:
            seen.problems.append(f"{failure}\n{scene.run.text()}")
    if not seen.problems:
        shutil.rmtree(folder)
    return seen


def _go_through(scene: Scene, fault: Fault, seen: Observed) -> None:
    run = scene.run
    resume = partial(_resume, scene, fault)
    until_step(run, BEFORE, run.resume)
    with fault.cause(scene):
        _watch(run, fault, seen)
        if run.ended and not run.completed:
            seen.ended = _reason(run)
            seen.refused = _refusal(run) if fault.stays else ""
    healed, newest = time.monotonic(), run.step
    if not run.completed:
        until_step(run, newest + 1, resume)
        seen.next_step_s = round(time.monotonic() - healed, 1)
    if run.resumes and not seen.ended:
        seen.ended = "after the end of the fault"
    until_step(run, math.inf, resume)
    seen.completed, seen.resumes = run.completed, run.resumes
    summary = json.loads((run.folder / "summary.json").read_bytes())
    seen.restarts, seen.failed = summary["restarts"], summary["ledger"]["failed"]
    checks = Round(seen.name)
    check_nothing_is_left(run, checks, grace_s=GRACE_S)
    audit(run, checks)
    seen.problems += checks.failures


def _watch(run: AttackedRun, fault: Fault, seen: Observed) -> None:
    """Count the steps of the run, and measure its longest pause, while the fault lasts."""
    began = since = time.monotonic()
    before = newest = run.step
    while time.monotonic() < began + fault.lasts_s and not (fault.until_end and run.ended):
        time.sleep(0.1)
        if run.step > newest:
            newest, since = run.step, time.monotonic()
        elif not run.completed:
            seen.pause_s = max(seen.pause_s, time.monotonic() - since)
    seen.lasted_s = time.monotonic() - began
    seen.steps_during = newest - before


def _resume(scene: Scene, fault: Fault) -> None:
    print(f"    {scene.run.folder.parent.parent.name}: ended: {_reason(scene.run)}; resumed", flush=True)
    scene.run.resume(*fault.resume_options)


def _reason(run: AttackedRun) -> str:
    """Why the run has ended: what it printed then. It may have been unable to write its summary."""
    return _verdict(run.output.read_text(errors="replace"))


def _verdict(printed: str) -> str:
    """Return the newest line that says how a command ended."""
    lines = printed.strip().splitlines()
    ends = [line for line in lines if line.startswith(("failed", "interrupted", "error:"))]
    return ends[-1] if ends else lines[-1]


def _refusal(run: AttackedRun) -> str:
    """Try to resume the run although the fault lasts. Return the exit status and what it printed."""
    command = [sys.executable, "-m", "stretto", "resume", str(run.folder)]
    try:
        tried = subprocess.run(command, capture_output=True, text=True, timeout=REFUSAL_S, env=os.environ)
    except subprocess.TimeoutExpired:
        raise Hopeless(f"`resume` during the fault has not ended after {REFUSAL_S:.0f} s") from None
    return f"status {tried.returncode}: {_verdict(tried.stdout + tried.stderr)}"


# ------------------------------------------------------------------------------------- all faults


def show(seen: Observed) -> None:
    if seen.skipped:
        print(f"{seen.name:<24} skipped: {seen.skipped}", flush=True)
        return
    next_step = f"{'-':>9}" if seen.next_step_s is None else f"{seen.next_step_s:>9.1f}"
    state = "FAILED" if seen.problems else "complete" if seen.completed else "incomplete"
    print(
        f"{seen.name:<24} {seen.lasted_s:>6.0f} {seen.what:<8} {seen.steps_during:>5} "
        f"{seen.pause_s:>7.1f} {next_step} {seen.restarts:>8} {seen.failed:>6} {seen.resumes:>7}  {state}",
        flush=True,
    )
    notes = {"ended": seen.ended, "resume during the fault": seen.refused}
    for what, text in notes.items():
        if text:
            print(textwrap.indent(f"{what}: {text}", "    "), flush=True)
    for problem in seen.problems:
        print(textwrap.indent(problem, "    "), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=FAULTS, default=list(FAULTS), help="only these faults")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--folder", type=Path, help="where runs are; default a temporary folder")
    options = parser.parse_args()
    root = options.folder or Path(tempfile.mkdtemp(prefix="faults-"))
    root.mkdir(parents=True, exist_ok=True)
    print(
        f"{'fault':<24} {'s':>6} {'run':<8} {'steps':>5} {'pause s':>7} {'next step':>9} {'restarts':>8} "
        f"{'failed':>6} {'resumes':>7}  end"
    )
    results: list[Observed] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for done in as_completed([pool.submit(observe, name, root.absolute()) for name in options.only]):
            results.append(done.result())
            show(results[-1])
    failed = [seen.name for seen in results if seen.problems]
    if failed:
        print(f"the folders of runs that broke a promise are in {root}")
    else:
        shutil.rmtree(root)
    figures = {
        seen.name: {
            "run": seen.what,
            "pause_s": round(seen.pause_s, 1),
            "next_step_s": seen.next_step_s,
            "resumes": seen.resumes,
        }
        for seen in results
        if not seen.skipped and not seen.problems
    }
    skipped = {seen.name: seen.skipped for seen in results if seen.skipped}
    print(json.dumps({"faults": figures, "skipped": skipped, "failed": failed}))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
