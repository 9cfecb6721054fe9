"""The trackers, each in its real process and with its real library, which reads back what was sent.

The test writes and cuts `metrics.jsonl` as a kernel does. A named pipe in the place of the cursor's next file
stops the process between sending and noting, which is the worst moment to kill it.
"""

import html
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from kept_samples import Kept
from kernel_setup import write_run
from patience import SOON_S, patience
from plugin_files import write_plugin
from stretto.assembly.compose import compose
from stretto.errors import printable
from stretto.kernel.durable.changes import write_values
from stretto.observe.tracker_process import TrackerReport, command
from stretto.records.metrics_file import MetricsFile
from waiting import until

Point = tuple[int, float]
Text = tuple[str, int, list[str], str]
"""Purpose, step, ids and last answer of the samples of one time."""
Sent = tuple[list[Point], list[Point], list[Text]]
"""What a reader has: (step, reward) of steps, (version, accuracy) of evaluations, and samples."""

HOSTILE = "=1+1 <script>alert(1)</script> [x](javascript:alert(1)) ![y](//host/z)\n</code>\n\x1b[2J"
SHOWN = printable(HOSTILE)

NOTES = """
from stretto.tracker import tracker_folder

class make:
    def __init__(self, config, context): self.file = tracker_folder(config, context) / "notes"
    def note(self, text):
        with self.file.open("a") as file:
            print(text, file=file)
    def start(self, config, resumed_at): self.note("start")
    def step(self, metrics): self.note(f"step {metrics['step']}")
    def evaluation(self, metrics): self.note(f"evaluation {metrics['step']}")
    def advice(self, advice): self.note("advice")
    def samples(self, rows): self.note("samples")
    def finish(self, summary): self.note("end")
"""
"""A tracker that writes a line for each call."""


class Kernel:
    """Writes the files of a run, and starts the process of its tracker."""

    def __init__(
        self,
        folder: Path,
        tracker: str,
        plugins: tuple[str, ...] = (),
        keep: str = "all",
        beside: tuple[dict[str, Any], ...] = (),
        **section: Any,
    ) -> None:
        self.folder = folder
        self.own = folder / "trackers" / tracker
        self.metrics = MetricsFile(folder)
        self.child: subprocess.Popen[bytes] | None = None
        self.reports = folder / "reports"
        (folder / "bus").mkdir(parents=True)
        values = {"plugins": list(plugins), "samples": {"keep": keep}, "steps": 8}
        sections = [{"use": tracker, **section}, *beside]
        write_values(folder, compose(write_run(folder, **values, trackers=sections)))
        self.kept = Kept(folder)

    def step(self, step: int, reward: float, **more: Any) -> None:
        figures = {"reward": reward, "loss": None, "ledger": {"trained": 4 * step}, "advice": [], **more}
        self.metrics.append({"step": step, "time": 1_700_000_000.0 + step, "time_s": 1.5 * step, **figures})

    def evaluation(self, version: int, accuracy: float) -> None:
        figures = {"evaluation/accuracy": accuracy, "evaluation/samples": 10, "evaluation/failed": 0}
        self.metrics.append({"step": version, "time": 1_700_000_000.5 + version, "time_s": 1.0, **figures})

    def samples(self, *steps: int, evaluations: tuple[int, ...] = ()) -> None:
        """The sample writer writes two samples of each of these steps and versions."""
        for step in steps:
            self.kept.trained_group(step, HOSTILE)
        for version in evaluations:
            self.kept.group(version, purpose="eval", text=HOSTILE, version=version)
        self.kept.flush()

    def end(self) -> None:
        aside = self.folder / ".summary.json"
        aside.write_text(json.dumps({"status": "completed", "reason": "", "version": 8, "wall_s": 9.0}))
        aside.rename(self.folder / "summary.json")

    def start(self) -> subprocess.Popen[bytes]:
        self.own.mkdir(parents=True, exist_ok=True)
        with self.reports.open("ab") as reports, (self.folder / "trackers/output.log").open("ab") as output:
            self.child = subprocess.Popen(
                command(self.folder),
                stdin=subprocess.PIPE,
                stdout=reports,
                stderr=output,
                start_new_session=True,
            )
        return self.child

    def until_noted(self, **expected: int) -> None:
        file = self.own / "cursor.json"
        deadline = time.monotonic() + patience(90)
        while not (file.exists() and expected.items() <= json.loads(file.read_bytes()).items()):
            assert self.child is not None
            assert self.child.poll() is None, self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(SOON_S)

    def kill_before_note(self, write: Callable[[], None]) -> None:
        """Let the process send what `write` writes, and kill it before it has noted that."""
        pipe = self.own / ".cursor.json"
        os.mkfifo(pipe)
        write()
        descriptor = os.open(pipe, os.O_RDONLY)  # returns when the process opens the pipe to write its note
        self.kill()
        os.close(descriptor)
        pipe.unlink()

    def kill(self) -> None:
        assert self.child is not None
        os.killpg(self.child.pid, signal.SIGKILL)
        self.wait()

    def wait(self) -> int:
        """The exit status of the process, once it has ended by itself."""
        assert self.child is not None
        assert self.child.stdin is not None
        status = self.child.wait(patience(90))
        self.child.stdin.close()
        return status

    def output(self) -> str:
        return (self.folder / "trackers/output.log").read_text()


@pytest.fixture
def kernel_of(tmp_path: Path) -> Iterator[Callable[..., Kernel]]:
    kernels: list[Kernel] = []

    def make(tracker: str, **section: Any) -> Kernel:
        kernels.append(Kernel(tmp_path / "run", tracker, **section))
        return kernels[-1]

    yield make
    for kernel in kernels:
        if kernel.child is not None and kernel.child.returncode is None:
            kernel.kill()


def of_tensorboard(kernel: Kernel) -> Sent:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator as Scalars
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator as Tensors
    from tensorboard.plugins.text.text_plugin import text_array_to_html
    from tensorboard.util.tensor_util import make_ndarray

    def curve(part: str, tag: str) -> list[Point]:
        events = Scalars(str(kernel.own / part), size_guidance={"scalars": 0})
        events.Reload()
        return [(event.step, event.value) for event in events.Scalars(tag)]

    def texts(part: str, purpose: str) -> Iterator[Text]:
        events = Tensors(str(kernel.own / "samples" / part))
        events.Reload()
        for event in events.Tensors("samples/text_summary"):
            page = str(text_array_to_html(make_ndarray(event.tensor_proto), enable_markdown=True))
            assert not re.search("<(script|a|img)", page)
            text = html.unescape(page.partition("<code>")[2].partition("</code>")[0])
            ids = re.findall(r"^id: (\S+)", text, re.M)
            yield purpose, event.step, ids, text.split("--- answer\n")[-1][:-1]

    samples = [*texts("train", "train"), *texts("evaluation", "eval")]
    return curve("train", "reward"), curve("evaluation", "evaluation/accuracy"), samples


def of_wandb(kernel: Kernel) -> Sent:
    """From the files of all processes, merged in the order in which `wandb sync` sends them."""
    from stretto_wandb.offline import history_rows

    run_id = (kernel.own / "id").read_text()
    folders = sorted(kernel.own.glob(f"wandb/offline-run-*-{run_id}"))
    assert len(folders) == 3  # one for each process
    steps: list[Point] = []
    evaluations: list[Point] = []
    samples: list[Text] = []
    for folder in folders:
        for row in history_rows(folder / f"run-{run_id}.wandb"):
            if "reward" in row:
                steps.append((row["step"], row["reward"]))
            if "evaluation/step" in row:
                evaluations.append((row["evaluation/step"], row["evaluation/accuracy"]))
            for name in ("samples/train", "samples/evaluation"):
                if f"{name}.path" in row:
                    table = json.loads((folder / "files" / row[f"{name}.path"]).read_bytes())
                    samples.append(of_table(table, row[f"{name}_step"]))
    return steps, evaluations, samples


def of_table(table: dict[str, Any], step: int) -> Text:
    rows = [dict(zip(table["columns"], cells, strict=True)) for cells in table["data"]]
    assert {row["step"] for row in rows} == {step}
    return of_rows(rows, step)


def of_rows(rows: list[dict[str, Any]], step: int) -> Text:
    return rows[0]["purpose"], step, [row["id"] for row in rows], rows[-1]["text"]


def of_mlflow(kernel: Kernel) -> Sent:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(str(kernel.folder / "store"))
    run_id = (kernel.own / "id").read_text()
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["queue.batch_size"] == "32"

    def curve(name: str) -> list[Point]:
        return [(metric.step, metric.value) for metric in client.get_metric_history(run_id, name)]

    def text(path: str) -> Text:
        table = json.loads(Path(client.download_artifacts(run_id, path)).read_bytes())
        return of_table(table, int(path[-11:-5]))

    samples = [text(file.path) for file in client.list_artifacts(run_id, "samples")]
    return curve("train/reward"), curve("evaluation/accuracy"), samples


def of_trackio(kernel: Kernel) -> Sent:
    """Read by another process: trackio takes `TRACKIO_DIR` when it is imported."""
    code = (
        "import json, sys; from trackio.sqlite_storage import SQLiteStorage;"
        "print(json.dumps(SQLiteStorage.get_logs('stretto', sys.argv[1])))"
    )
    name = (kernel.own / "id").read_text()
    done = subprocess.run([sys.executable, "-c", code, name], stdout=subprocess.PIPE, check=True)
    rows = json.loads(done.stdout)
    return (
        [(row["step"], row["reward"]) for row in rows if "reward" in row],
        [(row["step"], row["evaluation/accuracy"]) for row in rows if "evaluation/samples" in row],
        [
            of_rows(row[name]["_value"], row["step"])
            for row in rows
            for name in ("samples/train", "samples/evaluation")
            if name in row
        ],
    )


READERS: dict[str, Callable[[Kernel], Sent]] = {
    "tensorboard": of_tensorboard,
    "wandb": of_wandb,
    "mlflow": of_mlflow,
    "trackio": of_trackio,
}
LATE = {"wandb", "trackio"}
"""Libraries that write some time after the call. A kill loses a bit; it is sent again."""


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(tmp_path / "run" / "store"))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.delenv("WANDB_MODE", raising=False)


@pytest.mark.filterwarnings("ignore:html5lib's sanitizer:DeprecationWarning")  # TensorBoard imports it
@pytest.mark.parametrize(
    "tracker",
    ["tensorboard", *(pytest.param(name, marks=pytest.mark.slow) for name in ("wandb", "mlflow", "trackio"))],
)
def test_everything_arrives_once(tracker: str, kernel_of: Callable[..., Kernel]) -> None:
    """Also after kills between sending and noting, and after the run was resumed from an older step. Samples
    come later than their line."""
    more = {"mode": "offline"} if tracker == "wandb" else {}
    kernel = kernel_of(tracker, samples=2, samples_every=4, **more)
    kernel.evaluation(0, 0.25)
    kernel.start()
    for step in range(1, 6):
        kernel.step(step, step / 8)
    kernel.evaluation(3, 0.5)  # evaluations come after later steps
    kernel.samples(evaluations=(0,))
    kernel.until_noted(step=5, evaluation=3, evaluation_samples=0)

    kernel.kill_before_note(lambda: kernel.step(6, 0.75))

    kernel.metrics.cut_after(4)
    kernel.start()
    kernel.step(5, 99.0)  # repeated with other figures: a tracker keeps the first ones
    kernel.step(6, 0.75)
    kernel.evaluation(5, 0.625)
    advice = {"rule": "collapse", "since": 3, "said": 7, "until": None, "message": "the reward fell"}
    kernel.step(7, 0.875, entropy=0.5, advice_changes=[advice])  # and a figure that steps before did not have
    kernel.step(8, 1.0)
    kernel.evaluation(8, 1.0)
    kernel.until_noted(step=8, evaluation=8)

    kernel.kill_before_note(lambda: kernel.samples(4))
    kernel.start()
    kernel.samples(6, 8, evaluations=(3, 8))  # none of version 5 are kept, and step 6 is not due
    kernel.until_noted(samples=8, evaluation_samples=8)
    kernel.end()
    assert kernel.wait() == 0, kernel.output()

    steps, evaluations, samples = READERS[tracker](kernel)
    if tracker in LATE and steps[4] == (5, 99.0):  # the library had not written the first one yet
        steps[4] = (5, 0.625)
    assert steps == [(step, step / 8) for step in range(1, 9)]
    assert evaluations == [(0, 0.25), (3, 0.5), (5, 0.625), (8, 1.0)]
    assert sorted(samples) == [
        *(("eval", step, [f"eval-{step}/1/0", f"eval-{step}/1/1"], SHOWN) for step in (0, 3, 8)),
        *(("train", step, [f"{step}/1/0", f"{step}/1/1"], SHOWN) for step in (4, 8)),
    ]


def test_a_process_sends_the_rest_when_its_kernel_ends_and_only_then_the_next_one_begins(
    kernel_of: Callable[..., Kernel], tmp_path: Path
) -> None:
    notes = write_plugin(tmp_path, "tracker", NOTES, "stretto.TrackerConfig")
    kernel = kernel_of("mine", plugins=(notes,), keep="none", samples_every=1)
    kernel.step(1, 0.125)
    kernel.samples(1)  # of a time in which the run kept some
    first = kernel.start()
    kernel.until_noted(step=1)
    assert first.stdin is not None
    second = psutil.Process(kernel.start().pid)
    lock = str(kernel.folder / "trackers/process.lock")
    until(lambda: lock in {file.path for file in second.open_files()})
    kernel.step(2, 0.25)
    first.stdin.close()
    assert first.wait(patience()) == 0
    kernel.step(3, 0.375)
    kernel.end()
    assert kernel.wait() == 0, kernel.output()
    noted = (kernel.own / "notes").read_text().splitlines()
    assert noted == ["start", "step 1", "step 2", "start", "step 3", "end"]


def test_errors_show_no_secrets(
    kernel_of: Callable[..., Kernel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raises = "raise OSError('http://me:pass@host refuses ' + __import__('os').environ['ACME_API_KEY'])"
    body = NOTES.replace('self.note("start")', raises)
    leaky = write_plugin(tmp_path, "tracker", body, "stretto.TrackerConfig")
    monkeypatch.setenv("ACME_API_KEY", "very-secret-7")
    kernel = kernel_of("mine", plugins=(leaky,))
    kernel.start()
    until(lambda: kernel.reports.read_bytes().endswith(b"\n"))
    report = msgspec.json.decode(kernel.reports.read_bytes(), type=TrackerReport)
    assert report == TrackerReport("mine", "OSError: http://…@host refuses $ACME_API_KEY", again=True)
    kernel.kill()
    assert kernel.output().splitlines()[-1] == report.fault
    assert "very-secret-7" not in kernel.output()


def test_trackers_get_addresses_without_logins(kernel_of: Callable[..., Kernel], tmp_path: Path) -> None:
    body = NOTES.replace('self.note("start")', 'self.note(config["dataset"]["template"])')
    kernel = kernel_of("mine", plugins=(write_plugin(tmp_path, "tracker", body, "stretto.TrackerConfig"),))
    file, urls = (
        kernel.folder / "config.yaml",
        "{a: 'http://me:pass@h/v1', b: ['x://y', {c: 'nats://me:pass@h'}]}",
    )
    file.write_text(file.read_text().replace("template: {}", f"template: {urls}"))
    kernel.start()
    kernel.end()
    assert kernel.wait() == 0, kernel.output()
    noted = (kernel.own / "notes").read_text().partition("\n")[0]
    assert noted == "{'a': 'http://…@h/v1', 'b': ['x://y', {'c': 'nats://…@h'}]}"


FAILS_ONCE = """
from stretto_wandb import WandbConfig

def make(config, context):
    from stretto_wandb.wandb_run import WandbTracker

    class FailsOnce(WandbTracker):
        def step(self, metrics):
            file = self._folder / "failed"
            if metrics["step"] == 2 and not file.exists():
                file.touch()
                raise OSError("no network")
            super().step(metrics)

    return FailsOnce(config, context)
"""


@pytest.mark.slow
def test_runs_of_wandb_in_one_process_are_apart_and_continue_after_a_failure(
    kernel_of: Callable[..., Kernel], tmp_path: Path
) -> None:
    from stretto_wandb.offline import history_rows

    plugin = write_plugin(tmp_path, "tracker", FAILS_ONCE, "stretto_wandb.WandbConfig")
    other = {"use": "mine", "folder": "other", "mode": "offline"}
    kernel = kernel_of("mine", plugins=(plugin,), beside=(other,), mode="offline")
    (kernel.folder / "trackers/other").mkdir(parents=True)
    for step in (1, 2, 3):
        kernel.step(step, step / 8)
    kernel.start()
    kernel.until_noted(step=3)
    kernel.end()
    assert kernel.wait() == 0, kernel.output()
    for name in ("mine", "other"):
        files = sorted((kernel.folder / "trackers" / name).glob("wandb/offline-run-*/*.wandb"))
        assert [row["step"] for file in files for row in history_rows(file) if "reward" in row] == [1, 2, 3]


def test_a_long_offline_run_of_wandb_is_read_over_its_blocks(kernel_of: Callable[..., Kernel]) -> None:
    """Blocks have 32 KiB; some rows have parts in several of them."""
    from stretto_wandb.offline import history_rows

    kernel = kernel_of("wandb", mode="offline")
    for step in range(1, 151):
        kernel.step(step, step / 8, **{f"long/{'x' * 200}/{n}": float(n) for n in range(step % 5 * 50)})
    kernel.end()
    kernel.start()
    assert kernel.wait() == 0, kernel.output()
    [file] = kernel.own.glob("wandb/offline-run-*/*.wandb")
    assert file.stat().st_size > 10 * 2**15
    assert [row["step"] for row in history_rows(file) if "reward" in row] == list(range(1, 151))
