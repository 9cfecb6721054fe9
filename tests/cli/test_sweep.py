"""The grid of a sweep; and sweeps through the command line, with runs of the mock engines."""

import json
import re
import signal
import subprocess
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from commands import STRETTO, called, output_of
from kernel_setup import write_run
from patience import patience
from stretto.assembly.assembly import Assembly
from stretto.assembly.compose import compose
from stretto.cli.sweep import end_of, grid, values_in
from stretto.errors import ConfigError
from waiting import until


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    (tmp_path / "score.py").write_text("def score(prompt, completion): return 0.5\n")
    file = write_run(
        tmp_path,
        training={"use": "mock", "seconds_per_step": 0.02, "threads": 2},
        inference={"use": "mock", "tokens_per_s": 20000, "mean_tokens": 24},
        reward={"use": "function", "function": "score.py:score"},
        evaluation={"dataset": {"use": "jsonl", "path": "rows.jsonl"}, "rows": 4},
        queue={"batch_size": 2},
        samples={"keep": "none"},
        steps=3,
    )
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


# ------------------------------------------------------------------------------------------ the grid


@pytest.mark.parametrize(
    ("item", "values"),
    [
        ("training.lr=1e-4,3e-4", ["1e-4", "3e-4"]),
        ("training.lr=1e-4, 3e-4", ["1e-4", "3e-4"]),
        ("reward=", [""]),
        ("sampling={temperature: 1, top_p: 1},{top_k: 5}", ["{temperature: 1, top_p: 1}", "{top_k: 5}"]),
        ("sampling.stop=[a, b],[],[c]", ["[a, b]", "[]", "[c]"]),
        ("dataset.path='a,b.jsonl',c.jsonl", ["'a,b.jsonl'", "c.jsonl"]),
        ("sampling.stop=['],',\"[\"],[x]", ["['],',\"[\"]", "[x]"]),
        ("dataset.path=it's.jsonl,b", ["it's.jsonl", "b"]),
        ("steps='${oc.env:N,3}',4", ["'${oc.env:N,3}'", "4"]),
    ],
)
def test_commas_separate_values_outside_brackets_and_quotes(item: str, values: list[str]) -> None:
    assert values_in(item) == (item.partition("=")[0], values)


FLOWS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text("ab,[]{}'\" :", max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(st.lists(FLOWS, min_size=1, max_size=4))
def test_any_yaml_values_come_back(values: list[object]) -> None:
    texts = list(
        dict.fromkeys(yaml.safe_dump([value], default_flow_style=True, width=10**6)[1:-2] for value in values)
    )
    _, found = values_in("key=" + ",".join(texts))
    assert [yaml.safe_load(text) for text in found] == [yaml.safe_load(text) for text in texts]


@pytest.mark.parametrize(
    ("items", "seeds", "complaint"),
    [
        (["--lr=1,2"], None, "not of the form dotted.key=value,value"),
        (["lr"], None, "not of the form"),
        (["lr=1,,2"], None, "is no list of YAML values"),
        (["lr=[1,2"], None, "is no list of YAML values"),
        (["lr='1,2"], None, "is no list of YAML values"),
        (["steps=${oc.env:N,3},4"], None, "is no list of YAML values .*; quote them"),
        (["lr=1,2,1"], None, "the value 1 is there twice"),
        (["lr=1,2", "lr=3"], None, "'lr' is there twice"),
        (["seed=1,2"], "3,4", "'seed' is there twice"),
        (["lr=1"], None, "there is only one run"),
        (["lr=1"], "7", "there is only one run"),
        (["out=a,b"], None, "write --out a"),
    ],
)
def test_what_makes_no_grid_is_refused(items: list[str], seeds: str | None, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        grid(items, seeds)


def test_every_combination_and_seed_is_a_run_with_a_short_name() -> None:
    runs = grid(["training.lr=1e-4,3e-4", "steps=10", "queue.max_staleness=0,2"], "1,2")
    first, second, third, *others = runs
    assert (first, second) == ("lr-1e-4_max_staleness-0_seed-1", "lr-1e-4_max_staleness-0_seed-2")
    assert third == "lr-1e-4_max_staleness-2_seed-1"
    assert len(others) == 5
    assert runs[first] == ["training.lr=1e-4", "steps=10", "queue.max_staleness=0", "seed=1"]
    assert [*grid([], "1,2")] == [*grid(["seed=1,2"], None)] == ["seed-1", "seed-2"]
    whole, *_ = grid(["training.lr=1,2", "models.critic.lr=3,4", "steps=7,8"], None)
    assert whole == "training.lr-1_models.critic.lr-3_steps-7"


def test_values_that_are_no_file_names_get_a_hash() -> None:
    odd = ["path=a/b,a b,../a,x" + 99 * "x"]
    names = [*grid(odd, None)]
    assert len(names) == 4
    assert all("/" not in name and " " not in name and len(name) < 60 for name in names)
    assert names == [*grid(odd, None)]


# ---------------------------------------------------------------------------------- before it starts


def command(file: Path, *arguments: str) -> list[str]:
    return ["sweep", str(file), *arguments, "--out", f"{file.parent}/sweep"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["queue.batch_size=2,none"], r"batch_size-none: override queue.batch_size: expected int"),
        (["sampling.temperature=1,0", "--seeds=1,2"], r"temperature-0_seed-1: .*0 is greedy"),
        (["training.seconds_per_step=0.1,1e-1"], r"seconds_per_step-0.1 and .* are the same run"),
    ],
)
def test_an_error_of_any_run_comes_before_the_first(run_file: Path, values: list[str], message: str) -> None:
    done = called(*command(run_file, *values), cwd=run_file.parent)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.search(message, done.stderr)
    assert not (run_file.parent / "sweep").exists()


def test_a_folder_with_runs_is_not_begun_again_nor_with_other_values(run_file: Path) -> None:
    folder = run_file.parent / "sweep" / "max_staleness-1"
    folder.mkdir(parents=True)
    composed = Assembly(compose(run_file, ["queue.max_staleness=1", "steps=2", f"out={folder}"])).composed
    (folder / "config.yaml").write_text(yaml.safe_dump(dict(composed.document)))
    sweep = command(run_file, "queue.max_staleness=0,1")
    assert "max_staleness-1 is there already; add --continue" in called(*sweep).stderr
    found = called(*sweep, "--continue")
    assert "max_staleness-1 holds a run with other values (steps is 2, now 3)" in found.stderr


# ------------------------------------------------------------------------------------------ running


@pytest.mark.slow
@pytest.mark.timeout(patience(900))
def test_a_sweep_is_interrupted_goes_on_and_is_extended(run_file: Path) -> None:
    folder, values = run_file.parent / "sweep", "queue.max_staleness=0,1"
    begin = [*STRETTO, *command(run_file, values, "steps=100")]
    with (run_file.parent / "first.txt").open("w") as output:
        first = subprocess.Popen(begin, stdout=output, stderr=output)
    metrics = folder / "max_staleness-0" / "metrics.jsonl"
    said = (run_file.parent / "first.txt").read_text
    until(lambda: metrics.exists() and metrics.read_text().count('"ledger"') >= 2, otherwise=said)
    first.send_signal(signal.SIGINT)
    assert first.wait(patience()) == 130
    assert json.loads((folder / "max_staleness-0" / "summary.json").read_text())["status"] == "interrupted"
    assert not (folder / "max_staleness-1").exists()
    assert "repeat the command with --continue" in said()

    text = output_of(*command(run_file, values, "steps=100", "--jobs", "2", "--continue"))
    assert "max_staleness-0: finished" in text
    kept = {path: path.stat().st_mtime_ns for path in folder.glob("*/summary.json")}
    assert len(kept) == 2

    text = output_of(*command(run_file, "queue.max_staleness=1,2", "steps=100", "--continue"))
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert "max_staleness-2: " in text
    assert "max_staleness-1: " not in text


def test_a_run_that_is_interrupted_while_it_starts_has_a_line(tmp_path: Path) -> None:
    (tmp_path / "lr-1.txt").write_text("starting\n")
    assert end_of(tmp_path / "lr-1", 130).startswith("lr-1: exit status 130; starting (all in ")


@pytest.mark.slow
def test_a_run_that_fails_does_not_stop_the_others(run_file: Path) -> None:
    short = patience(0.0001)
    values = f"workflow.timeout_s={short},60", "queue.max_failures=2"
    printed = output_of(*command(run_file, *values), status=1)
    assert f"timeout_s-{short}: exit status 1; failed at step 0" in printed
    assert "timeout_s-60: finished" in printed
