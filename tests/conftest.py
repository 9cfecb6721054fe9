"""Fixtures shared by all tests: a real nats-server, and a bus on it for any role."""

import json
import os
import signal
import subprocess
import tempfile
import textwrap
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
import structlog
from hypothesis import HealthCheck, settings

from commands import STRETTO, output_of
from fixture_types import OpenBus
from patience import SOON_S, factor, measure_again, patience, simulated_time
from processes import arguments_of
from run_files import T, TestedRun
from stretto.assembly.assembly import Assembly
from stretto.assembly.compose import compose
from stretto.bus.client import Bus, connect
from stretto.bus.messages.subjects import Subjects
from stretto.bus.server import Bootstrap, NatsServer, lock_run
from stretto.cli.start.checks import faults_and_warnings
from stretto.config import BusConfig
from tiny_sizes import IDS, tiny_sizes
from worlds import REAL

RUN = "test-run"

pytest.register_assert_rewrite("stretto.testing")  # its failures then show the values compared

# How long an example takes says how busy the machine is.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# Two compute threads for each of two processes on two cores would wait for each other; torch reads this when
# it is imported, which is later.
os.environ["OMP_NUM_THREADS"] = "1"
# A job in the background ignores SIGINT, and so would every process that the tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="stretto-state-")  # living runs are listed there


# ----------------------------------------------------------------------------- order and deadlines

_DURATIONS = Path(__file__).parents[1] / ".ci" / "durations.json"
"""Seconds that the files with slow tests take, on a good machine; `make test-slow ARGS=--write-durations`."""
_LIMITS_S = {"chaos": 3600, "slow": 900, "nightly": 900, "cluster": 900, "integration": 900}
"""Mark -> seconds that such a test may take on a good machine."""
_LIMIT_S, _RUN_S = 300, 180


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files whose tests take longest, so that no process of pytest is left alone with one."""
    durations = json.loads(_DURATIONS.read_text())
    runs = {"start", "module_start"}

    def place(item: pytest.Item) -> tuple[float, bool]:
        file = str(item.path.relative_to(_DURATIONS.parents[1]))
        return -durations.get(file, 0.0), runs.isdisjoint(getattr(item, "fixturenames", ()))

    items.sort(key=place)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Measure the machine again, and give the test its deadline before pytest-timeout reads it."""
    measure_again()
    if not item.get_closest_marker("timeout"):
        seconds = max((s for mark, s in _LIMITS_S.items() if item.get_closest_marker(mark)), default=_LIMIT_S)
        item.add_marker(pytest.mark.timeout(patience(seconds)))
    return (yield)


# ------------------------------------------------------------------------------- where the time goes


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--processor-time",
        action="store_true",
        help="list the files and tests that took most processor time, with that of their child processes",
    )
    parser.addoption(
        "--write-durations",
        action="store_true",
        help="note in .ci/durations.json how long the tests of each file take on a good machine",
    )


def _processor_s() -> float:
    """Processor time of this process and of the children that it has waited for."""
    return sum(os.times()[:4])


_BEGUN = pytest.StashKey[float]()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    item.stash[_BEGUN] = _processor_s()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "teardown":
        report.user_properties.append(("processor_s", _processor_s() - item.stash[_BEGUN]))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("--write-durations"):
        _write_durations(terminalreporter)
    if not config.getoption("--processor-time"):
        return
    files, tests = Counter[str](), Counter[str]()
    for report in terminalreporter.getreports(""):
        for name, value in report.user_properties:
            if name == "processor_s":
                files[report.nodeid.partition("::")[0]] += value
                tests[report.nodeid] += value
    terminalreporter.section(f"{sum(files.values()):.0f} s of processor time")
    for seconds in (files, tests):
        for name, value in seconds.most_common(40):
            terminalreporter.write_line(f"{value:8.1f} s  {name}")


def _write_durations(terminalreporter: pytest.TerminalReporter) -> None:
    files = defaultdict[str, float](float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            files[getattr(report, "nodeid", "").partition("::")[0]] += getattr(report, "duration", 0.0)
    slower = factor()
    known = json.loads(_DURATIONS.read_text())
    known |= {file: round(seconds / slower) for file, seconds in files.items() if seconds / slower >= 1}
    _DURATIONS.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")


# --------------------------------------------------------------------------------------- logs


@pytest.fixture(autouse=True)
def _own_log() -> Iterator[None]:
    """A command that a test runs in this process may drop the log, for all later tests."""
    yield
    structlog.reset_defaults()


# --------------------------------------------------------------------------------------- the bus


@pytest.fixture
def bus_config() -> BusConfig:
    """Overridden by tests that want another."""
    return BusConfig(grace_s=patience(2), max_payload_mb=1)


@pytest.fixture
async def server(tmp_path: Path, bus_config: BusConfig) -> AsyncIterator[NatsServer]:
    """A real server on a free port, under its guard, owned by this process."""
    folder = tmp_path / "bus"
    lock = lock_run(folder)
    running = await NatsServer.start(folder, RUN, bus_config, tmp_path / "logs")
    yield running
    await running.stop()
    lock.close()


@pytest.fixture
def open_bus(server: NatsServer, tmp_path: Path) -> OpenBus:
    """`async with open_bus("rollout") as bus`: a bus with the credentials of a role."""
    del server

    def open_as(role: str) -> AbstractAsyncContextManager[Bus]:
        return connect(Bootstrap.read(tmp_path / "bus" / f"{role}.json"))

    return open_as


@pytest.fixture
def names() -> Subjects:
    return Subjects(RUN)


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`tiny_models("qwen2")`: folder of a random model of that architecture, with a tokenizer."""

    @cache
    def folder(architecture: str) -> Path:
        _make_tiny_model(architecture, made := tmp_path_factory.mktemp(architecture))
        return made

    return folder


def _make_tiny_model(architecture: str, folder: Path) -> None:
    """About 0.1 M parameters over printable ASCII; sharp enough that errors show."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from vision_models import ascii_tokenizer

    tokenizer = ascii_tokenizer()
    tokenizer.save_pretrained(folder)
    common = {**IDS, "vocab_size": len(tokenizer), "initializer_range": 0.08}
    sizes = tiny_sizes(64, layers=3, max_position_embeddings=512)
    options = {
        "qwen2": {**sizes, "tie_word_embeddings": True},
        "llama": {**sizes, "tie_word_embeddings": False},
        "gemma2": {**sizes, "head_dim": 32, "sliding_window": 8, "attn_implementation": "eager"},
        "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 256},
    }
    torch.manual_seed(7)
    config = AutoConfig.for_model(architecture, **common, **options[architecture])
    model = AutoModelForCausalLM.from_config(config).float()
    model.save_pretrained(folder)


# ------------------------------------------------------------------------------------ whole runs


class Run(TestedRun):
    """One `stretto` process and what it has started."""

    def __init__(self, folder: Path, arguments: list[str], *, piped: bool = False) -> None:
        super().__init__(folder)
        self.output = folder.with_suffix(".txt")
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                [*STRETTO, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else output,
                stderr=subprocess.STDOUT,
            )
        self.seen: dict[int, psutil.Process] = {}
        self._looked = 0.0

    def _sleep(self) -> None:
        """Wait for a moment. Look at the processes now and then: that reads all of the machine's."""
        if time.monotonic() - self._looked > 0.25:
            self.look()
        time.sleep(SOON_S)

    def look(self) -> list[psutil.Process]:
        """All processes started so far, by it or by what it started, that are still there."""
        self._looked = time.monotonic()
        try:
            for process in psutil.Process(self.process.pid).children(recursive=True):
                self.seen[process.pid] = process
        except psutil.NoSuchProcess:
            pass
        return [process for process in self.seen.values() if process.is_running() and not _zombie(process)]

    def worker(self, name: str) -> psutil.Process | None:
        return self.process_with(str(self.folder / "bus" / f"{name}.json"))

    def process_with(self, argument: str) -> psutil.Process | None:
        return next((process for process in self.look() if argument in arguments_of(process)), None)

    def until(self, condition: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + patience(_RUN_S)
        while not (result := condition()):
            assert self.process.poll() is None, f"ended early:\n{self.text()}"
            assert time.monotonic() < deadline, f"waited too long:\n{self.text()}"
            self._sleep()
        return result

    def end(self) -> int:
        deadline = time.monotonic() + patience(_RUN_S)
        while (status := self.process.poll()) is None:
            assert time.monotonic() < deadline, f"does not end:\n{self.text()}"
            self._sleep()
        return status

    def text(self) -> str:
        return self.output.read_text()

    def clock(self) -> float:
        return time.monotonic()

    def stop_server(self) -> None:
        psutil.Process(int((self.folder / "bus" / "nats.pid").read_text())).suspend()

    def operate(self, verb: str, *arguments: str, status: int = 0) -> str:
        return output_of(verb, self.folder, *arguments, status=status)

    def assert_nothing_is_left(self) -> None:
        deadline = time.monotonic() + patience()
        while alive := self.look():
            assert time.monotonic() < deadline, [(process.pid, arguments_of(process)) for process in alive]
            time.sleep(SOON_S)
        run = json.loads((self.folder / "bus" / "kernel.json").read_text())["run"]
        assert not list(Path("/dev/shm").glob(f"stretto-{run}-*"))

    def call(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        return anyio.run(function, *args)


def _zombie(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


Start = Callable[..., Run]


@pytest.fixture
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Start]:
    """`start("steps=3")`: a run of the mock engines; `start(resume=run)` continues with one, and
    `start("steps=5", resume=run)` with changes. It keeps no samples without `samples.keep=all`, because their
    writer is one more process to start. Tests `in_both_worlds` get a simulated run."""
    with _runs(request, tmp_path) as start_run:
        yield start_run


@pytest.fixture(scope="module")
def module_start(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Like `start`, for runs that the tests of a file share."""
    with _runs(request, tmp_path_factory.mktemp("runs")) as start_run:
        yield start_run


def _runs(request: pytest.FixtureRequest, folder: Path) -> AbstractContextManager[Callable[..., Any]]:
    """What starts runs in the world that the test wants."""
    if getattr(request, "param", REAL) == REAL:
        return runs_in(folder)
    return _simulated_runs(folder)


@contextmanager
def _simulated_runs(folder: Path) -> Generator[Callable[..., Any]]:
    from simulated_runs import simulated_runs_in  # imports stretto.testing, which is rewritten above

    with simulated_time(), simulated_runs_in(folder, write_run_file(folder)) as start:
        yield start


@pytest.fixture
def refusals(tmp_path: Path) -> Callable[..., list[str]]:
    """`refusals("algorithm=sft")`: the faults for which `stretto run` starts no such run as `start` does."""
    file = write_run_file(tmp_path)

    def faults(*overrides: str) -> list[str]:
        composed = compose(file, [*overrides, f"out={tmp_path}/out"])
        return faults_and_warnings(Assembly(composed), starting=True)[0]

    return faults


def write_run_file(folder: Path) -> Path:
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1), "n": n} for n in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = folder / "run.yaml"
    file.write_text(
        textwrap.dedent(
            f"""\
            name: test
            algorithm: {{use: grpo, group_size: 4}}
            training: {{use: mock, seconds_per_step: 0.1}}
            inference: {{use: mock, tokens_per_s: 20000, slots: 64, mean_tokens: 24, sigma: 0.6}}
            reward: exact
            dataset: {{use: jsonl, path: {folder}/rows.jsonl}}
            queue: {{batch_size: 4, max_staleness: 2}}
            bus: {{grace_s: {patience(3)}}}
            samples: {{keep: none}}
            steps: 8
            """
        )
    )
    return file


@contextmanager
def runs_in(tmp_path: Path) -> Generator[Start]:
    """What `start` gives, with the runs in one folder. They are killed at the end."""
    runs: list[Run] = []
    file = write_run_file(tmp_path)

    def start_run(*overrides: str, resume: Run | None = None, out: str = "out", piped: bool = False) -> Run:
        folder = resume.folder if resume else tmp_path / out
        named = ["run", str(file), f"out={folder}", *overrides]
        again = ["resume", str(folder), *overrides]
        runs.append(Run(folder, again if resume else named, piped=piped))
        return runs[-1]

    yield start_run
    for run in runs:
        alive = [*run.look(), *([psutil.Process(run.process.pid)] if run.process.poll() is None else [])]
        for process in alive:
            with suppress(psutil.NoSuchProcess):  # it ended just now
                process.kill()
        run.process.wait()
