"""A run's records as commands and pages read them, while a kernel appends to them and cuts them."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import made_run
from statuses import make_status
from stretto.bus.guard import is_locked
from stretto.bus.messages.events import RunOwned
from stretto.bus.server import lock_run
from stretto.errors import ConfigError
from stretto.records.events.history import RunHistory
from stretto.records.metrics_file import MetricsFile
from stretto.records.run_folder import RunFolder, find_runs


def make_run(folder: Path, **document: Any) -> Path:
    (folder / "bus").mkdir(parents=True)
    (folder / "config.yaml").write_text(json.dumps({"name": "test", "steps": 8, **document}))
    return folder


def _aliases(many: str) -> bytes:
    """YAML in which each of ten lines repeats the one before it several times."""
    lines = ["a0: &a0 {x: 1}", *(f"a{n}: &a{n} {many.format(f'*a{n - 1}')}" for n in range(1, 10))]
    return "\n".join(lines).encode()


def step(number: int, **figures: Any) -> dict[str, Any]:
    return {"step": number, "reward": number / 10, **figures}


def evaluation(version: int, accuracy: float | None) -> dict[str, Any]:
    return {"step": version, "evaluation/accuracy": accuracy, "evaluation/samples": 4}


def test_refresh_reads_what_was_appended(tmp_path: Path) -> None:
    file = MetricsFile(make_run(tmp_path / "run"))
    run = RunFolder(tmp_path / "run")
    assert run.steps == run.evaluations == []
    file.append(step(1, skipped=True, calls=[]))
    file.append(evaluation(0, None))
    assert run.steps == []
    run.refresh()
    [first] = run.steps
    file.append(step(2))
    file.append(evaluation(2, 0.5))
    with (tmp_path / "run" / "metrics.jsonl").open("a") as torn:
        torn.write('{"step": 3, "rew')
    run.refresh()
    assert run.steps[0] is first, "a line that was read is not read again"
    assert run.series("reward") == [(1, 0.1), (2, 0.2)]
    assert run.series("evaluation/accuracy") == [(2, 0.5)]
    assert run.figures() == ["reward", "evaluation/samples", "evaluation/accuracy"]


def test_a_cut_is_noticed_even_if_the_file_has_grown_since(tmp_path: Path) -> None:
    file = MetricsFile(make_run(tmp_path / "run"))
    run = RunFolder(tmp_path / "run")
    for number in range(1, 6):
        file.append(step(number))
    assert len(run.steps) == 5
    file.cut_after(2)
    for number in range(3, 9):
        file.append(step(number, resumed=1))
    run.refresh()
    assert [line["step"] for line in run.steps] == list(range(1, 9))
    assert run.series("resumed") == [(number, 1) for number in range(3, 9)]
    # A file that is written in place, as a copying tool does it.
    text = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    (tmp_path / "run" / "metrics.jsonl").write_bytes(text.replace(b'"resumed": 1', b'"resumed": 2'))
    run.refresh()
    assert run.series("resumed")[-1] == (8, 2)
    (tmp_path / "run" / "metrics.jsonl").unlink()
    run.refresh()
    assert run.steps == []


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    (folder / "metrics.jsonl").write_text('{"step": 1}\n[]\n{"step": 2}\n')
    run = RunFolder(folder)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"metrics\.jsonl:2: not a JSON object"):
            _ = run.steps
    for name, fault in (("status", "not the status"), ("summary", "not the summary")):
        (folder / f"{name}.json").write_bytes(b'{"\xff')
        with pytest.raises(ConfigError, match=fault):
            getattr(run, name)
    (folder / "config.yaml").write_text("- a")
    with pytest.raises(ConfigError, match="holds no keys"):
        _ = run.config
    with pytest.raises(ConfigError, match="holds no run"):
        RunFolder(tmp_path)


def test_no_reader_waits_at_a_pipe(tmp_path: Path) -> None:
    run = RunFolder(made_run.make_run(tmp_path / "run", steps=2))
    for name in ("metrics.jsonl", "summary.json", "status.json"):
        (run.folder / name).unlink(missing_ok=True)
        os.mkfifo(run.folder / name)
    for file in (*(run.folder / "samples").glob("*.parquet"), *(run.folder / "events").glob("*.events")):
        file.unlink()
        os.mkfifo(file)
    os.mkfifo(run.folder / "bus" / "kernel.lock")
    readers: list[Callable[[], object]] = [
        lambda: run.steps,
        lambda: run.summary,
        lambda: run.status,
        lambda: list(run.events()),
        lambda: run.answers(1),
        run.samples.count,
    ]
    for read in readers:
        with pytest.raises(ConfigError, match="not a regular file"):
            read()
    assert not is_locked(run.folder / "bus" / "kernel.lock")


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("metrics.jsonl", b'{"step": 1, "not_trained": 5}\n', r"metrics.jsonl:1: .*object.*not_trained"),
        (
            "metrics.jsonl",
            b'{"step": 1' + b"0" * 400 + b"}\n",
            r"metrics.jsonl:1: .* <= 9007199254740992 .*step",
        ),
        ("metrics.jsonl", b'{"step": 1, "x": ' + b"[" * 3000 + b"\n", "metrics.jsonl:1: not JSON"),
        ("summary.json", b'{"staleness": [1]}', r"summary.json is not the summary .*staleness"),
        ("summary.json", b"{}", "summary.json is not the summary of a run: .*status"),
        ("config.yaml", b"a: " + b"[" * 3000 + b"]" * 3000, "nested more than"),
        ("config.yaml", b"a: &a [*a]", "inside of what it repeats"),
        ("config.yaml", b"steps: 1" + b"0" * 5000, "config.yaml is not a run file"),
        ("config.yaml", _aliases("[{0}, {0}, {0}, {0}, {0}, {0}]"), "more than 100000 values"),
        ("config.yaml", _aliases("{{<<: [{0}, {0}, {0}, {0}, {0}, {0}]}}"), "more than 100000 values"),
    ],
)
def test_a_hostile_file_is_an_error_that_names_it(tmp_path: Path, name: str, text: bytes, fault: str) -> None:
    run = RunFolder(make_run(tmp_path / "run"))
    (run.folder / name).write_bytes(text)
    with pytest.raises(ConfigError, match=fault):
        _ = run.steps, run.summary, run.config


def test_a_number_that_no_float_holds_is_no_figure(tmp_path: Path) -> None:
    run = RunFolder(make_run(tmp_path / "run"))
    (run.folder / "metrics.jsonl").write_text(f'{{"step": 1, "loss": 2, "reward": 1{"0" * 400}}}\n')
    assert run.figures() == ["loss"]
    assert run.series("reward") == []


def test_state_follows_the_lock_and_then_the_summary(tmp_path: Path) -> None:
    run = RunFolder(make_run(tmp_path / "run"))
    assert run.state == "stopped"
    with lock_run(run.folder / "bus"):
        run.refresh()
        assert run.state == "running"
    (run.folder / "summary.json").write_text('{"status": "interrupted", "wall_s": 1}')
    assert run.state == "running", "until the next refresh"
    run.refresh()
    assert run.state == "interrupted"


def test_the_duration_is_that_of_the_newest_line_until_the_run_has_ended(tmp_path: Path) -> None:
    run = RunFolder(make_run(tmp_path / "run"))
    assert run.wall_s is None
    file = MetricsFile(run.folder)
    file.append(step(1, time_s=2.5))
    file.append({**evaluation(1, 0.5), "time_s": 4.0})
    run.refresh()
    assert run.wall_s == 4.0
    (run.folder / "status.json").write_text("{")
    run.refresh()
    assert run.wall_s == 4.0
    (run.folder / "status.json").write_bytes(msgspec.json.encode(make_status(wall_s=4.25)))
    run.refresh()
    assert run.wall_s == 4.25
    (run.folder / "summary.json").write_text('{"status": "completed", "wall_s": 4.5}')
    run.refresh()
    assert run.wall_s == 4.5


def test_runs_are_found_below_a_folder_and_not_inside_a_run(tmp_path: Path) -> None:
    for name in ("b/2", "b/1", "a", "a/inside", ".hidden/run"):
        make_run(tmp_path / name)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "config.yaml").write_text("name: a folder with values alone\n")
    (tmp_path / "link").symlink_to(tmp_path / "b")
    assert [run.folder.relative_to(tmp_path) for run in find_runs(tmp_path)] == [
        Path("a"),
        Path("b/1"),
        Path("b/2"),
    ]
    assert [run.folder for run in find_runs(tmp_path / "a")] == [tmp_path / "a"]
    with pytest.raises(ConfigError, match="no folder"):
        find_runs(tmp_path / "nowhere")


def test_a_folder_has_events_values_and_checkpoints(tmp_path: Path) -> None:
    run = RunFolder(make_run(tmp_path / "run", training={"lr": 0.1}))
    assert (run.time_range(), list(run.events()), run.checkpoints()) == (None, [], {})
    assert run.values() == {"name": '"test"', "steps": "8", "training.lr": "0.1"}
    for version in (10, 5):
        (run.folder / "checkpoints" / f"step-{version:06d}").mkdir(parents=True)
        (run.folder / "checkpoints" / f"step-{version:06d}" / "manifest.json").touch()
    (run.folder / "checkpoints" / "step-000015").mkdir()  # the kernel writes it now
    assert list(run.checkpoints()) == [5, 10]
    made = RunFolder(made_run.make_run(tmp_path / "made", steps=2))
    assert made.time_range() == (next(made.events())[0], list(made.events())[-1][0])
    assert [step.version for step in made.history.steps] == [1, 2]


@pytest.mark.parametrize(
    ("since", "rates", "expected"),
    [
        ({0: 1}, (3,), "3"),
        ({0: 1, 16: 2}, (3, 1), "3, from step 17 on 1"),
        ({0: 1, 16: 2, 20: 3}, (3, 1, 3), "3, from step 17 on 1, from step 21 on 3"),
        ({0: 1, 16: 3}, (3, 2, 1), "3, from step 17 on 1"),
        ({0: 2}, (3, 1), "1"),
        ({0: 1, 16: 2}, (3, None), "3, from step 17 on null"),
        ({0: 1}, (3, 1), "3, later 1"),
    ],
)
def test_a_value_that_changed_has_the_step_of_its_change(
    tmp_path: Path, since: dict[int, int], rates: tuple[float | None, ...], expected: str
) -> None:
    """`since`: version -> number of the values with which a kernel continued."""
    run = RunFolder(make_run(tmp_path / "run"))
    for number, rate in enumerate(rates, 1):
        file = "config.yaml" if number == len(rates) else f"config-{number}.yaml"
        section = {} if rate is None else {"training": {"lr": rate}}
        (run.folder / file).write_text(json.dumps({"steps": 8, **section}))
    owned = [(float(version), RunOwned(0, version, number, "", 0)) for version, number in since.items()]
    run.history = RunHistory.of(owned)
    assert run.values() == {"steps": "8", "training.lr": expected}
