"""`stretto.run`: runs that a Python program starts, follows, awaits and stops."""

import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from tests.conftest import write_run_file

import stretto
from commands import output_of
from patience import patience
from processes import spawning
from waiting import until

ROOT = Path(__file__).parents[2]


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    document = yaml.safe_load(write_run_file(tmp_path).read_text())
    return {**document, "training": {"use": "mock", "seconds_per_step": 0.05}, "out": tmp_path / "out"}


def processes_of(folder: Path) -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(str(folder) in argument for argument in process.info["cmdline"] or ())
    ]


def test_a_plain_script_trains_and_reads_what_the_run_did(config: Mapping[str, Any], tmp_path: Path) -> None:
    run = stretto.run(
        config, steps=3, samples={"keep": "all"}, queue={"max_staleness": 1}, **{"training.lr": 1e-05}
    )
    assert run.folder == tmp_path / "out"
    assert run.wait()["status"] == "completed"
    assert [line["step"] for line in run.metrics] == [1, 2, 3]
    assert run.state == "completed"
    assert len(run.samples.find(limit=None)) >= 3 * 4 * 4
    composed = yaml.safe_load((run.folder / "config.yaml").read_text())
    assert (composed["queue"]["max_staleness"], composed["queue"]["batch_size"]) == (1, 4)
    assert composed["training"]["lr"] == 1e-05
    assert run.wait() == run.summary
    assert processes_of(run.folder) == []


@pytest.mark.slow
async def test_steps_come_while_it_runs_and_leaving_the_block_stops_it(config: Mapping[str, Any]) -> None:
    steps: list[int] = []
    async with stretto.run(config, steps=4000) as run:
        async for step in run:
            steps.append(step["step"])
            if len(steps) == 2:
                assert run.state == "running"
                break
    assert steps == [1, 2]
    summary = run.summary
    assert summary is not None
    assert summary["status"] == "interrupted"
    assert 2 <= summary["steps"] < 100
    assert list((run.folder / "checkpoints").glob("step-*"))  # it drained
    assert (await run)["status"] == "interrupted"
    assert processes_of(run.folder) == []


@pytest.mark.slow
def test_a_run_that_is_stopped_at_once_writes_no_checkpoint(config: Mapping[str, Any]) -> None:
    with stretto.run(config, training={"seconds_per_step": 30}) as run:
        log = run.folder / "logs" / "trainer-0.jsonl"
        until(lambda: log.exists() and '"event": "call"' in log.read_text())  # in its first step
        with pytest.raises(TimeoutError, match="is still running"):
            run.wait(timeout_s=patience(0.1))
        run.stop()
        run.stop(now=True)
        summary = run.wait(timeout_s=patience(20))
    assert summary["status"] == "interrupted"
    assert "twice" in summary["reason"]


@pytest.mark.parametrize(
    ("overrides", "word"),
    [
        ({"queue": {"batch_size": 0}}, "queue.batch_size=0"),
        ({"algorithm.group_size": 1}, "algorithm.group_size=1"),
    ],
)
def test_a_refusal_has_the_text_of_the_command_line(
    config: dict[str, Any], tmp_path: Path, overrides: dict[str, Any], word: str
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({**config, "dataset": {"use": "jsonl", "path": "rows.jsonl"}, "out": "x"}))
    with pytest.raises(stretto.ConfigError) as refused:
        stretto.run(file, **overrides, out=tmp_path / "out")
    printed = output_of("run", file, word, f"out={tmp_path}/out", status=2)
    assert [f"error: {line}" for line in str(refused.value).splitlines()] == printed.splitlines()
    assert not (tmp_path / "out" / "config.yaml").exists()


def test_a_refusal_carries_its_key_and_a_plugin_error_is_one(config: Mapping[str, Any]) -> None:
    with pytest.raises(stretto.ConfigError) as refused:
        stretto.run(config, training={"lr": "much"})
    assert (refused.value.path, refused.value.value) == ("training.lr", "much")
    with pytest.raises(stretto.PluginError, match=r"no reward 'exat'.*did you mean 'exact'"):
        stretto.run(config, reward="exat")
    with pytest.raises(stretto.ConfigError, match=r"training\.lr: <object .*> is no value of a run file"):
        stretto.run(config, training={"lr": object()})
    with pytest.raises(stretto.ConfigError, match=r"no run file 'missing\.yaml'"):
        stretto.run("missing.yaml")


@pytest.mark.slow
def test_a_failed_run_raises_its_reason(config: Mapping[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text(
        "def score(prompt, completion):\n"
        "    if prompt == '0+1=': return 1.0  # the row that the check scores\n"
        "    raise ValueError('no score for this')\n"
    )
    reward = {"use": "function", "function": f"{file}:score"}
    with stretto.run(config, reward=reward, queue={"max_failures": 2}) as run:
        with pytest.raises(stretto.RunError, match="no score for this"):
            run.wait()
        assert run.state == "failed"


@pytest.mark.slow
def test_a_killed_kernel_is_reported(config: Mapping[str, Any]) -> None:
    with stretto.run(config, steps=4000, bus={"grace_s": patience(1)}) as run:
        until(lambda: run.metrics)
        status = run.status
        assert status is not None
        os.kill(status.pid, signal.SIGKILL)
        with pytest.raises(stretto.RunError, match="signal SIGKILL"):
            run.wait()
        assert run.state == "stopped"
    until(lambda: not processes_of(run.folder))


@pytest.mark.slow
def test_a_dropped_handle_ends_its_run(config: Mapping[str, Any]) -> None:
    runs = [stretto.run(config, steps=4000)]
    folder = runs[0].folder
    until(lambda: runs[0].metrics)
    runs.clear()
    gc.collect()
    until((folder / "summary.json").exists)
    assert json.loads((folder / "summary.json").read_text())["status"] == "interrupted"
    until(lambda: not processes_of(folder))


def program(config: Mapping[str, Any], rest: str) -> list[str]:
    """The command of a program that starts a run, and then does what it likes."""
    begin = "import json, os, sys, time, stretto\nrun = stretto.run(json.loads(sys.argv[1]), steps=4000)\n"
    return [sys.executable, "-c", begin + rest, json.dumps(config, default=str)]


@pytest.mark.slow
@pytest.mark.parametrize("end", ["", "os.kill(os.getpid(), 9)"])
def test_a_program_that_ends_leaves_nothing(config: Mapping[str, Any], tmp_path: Path, end: str) -> None:
    folder = tmp_path / "out"
    command = program(config, f"while not run.metrics: time.sleep(0.05)\n{end}")
    done = subprocess.run(command, timeout=patience())
    assert done.returncode == (-9 if end else 0)
    if not end:  # it has waited for its run
        assert processes_of(folder) == []
    until(lambda: (folder / "summary.json").exists() and not processes_of(folder))
    assert json.loads((folder / "summary.json").read_text())["status"] == "interrupted"


@pytest.mark.slow
def test_ctrl_c_during_wait_drains_the_run(config: Mapping[str, Any], tmp_path: Path) -> None:
    command = program(config, "try: run.wait()\nexcept KeyboardInterrupt: print(run.summary['status'])")
    metrics = tmp_path / "out" / "metrics.jsonl"
    with spawning() as spawn:
        process = spawn(command)
        until(lambda: metrics.exists() and metrics.read_text())
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=patience(180))
    assert said == "interrupted\n"


def test_ctrl_c_while_the_handle_looks_at_its_run_is_obeyed(tmp_path: Path) -> None:
    """The first one drains the run, the second one ends it."""
    looks, stops = [None, None, 0], list[bool]()

    class Kernel:
        notices: tuple[str, ...] = ()

        def poll(self) -> int:
            if looks.pop(0) is None:
                raise KeyboardInterrupt
            return 0

        def stop(self, *, now: bool = False) -> None:
            stops.append(now)

    kernel: Any = Kernel()
    run = stretto.RunHandle(kernel, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run.wait()
    assert (looks, stops) == ([], [False, True])


def test_importing_stretto_is_cheap() -> None:
    heavy = "torch", "transformers", "IPython", "pyarrow", "omegaconf", "typer"
    code = f"import sys, stretto; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.slow
def test_the_example_notebook_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook: Any = nbformat.read(ROOT / "examples" / "notebook.ipynb", 4)  # pyright: ignore
    path = {"metadata": {"path": str(ROOT / "examples")}}
    NotebookClient(notebook, timeout=int(patience(90)), kernel_name="python3", resources=path).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "".join(output["text"] for output in outputs if output.output_type == "stream")
    assert "unknown key 'learning_rate'" in text
    assert "step 4: reward" in text
    assert "completed, step 4>" in outputs[-1]["data"]["text/plain"]
