"""The grid of a sweep: its values, its runs and their names."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from stretto.cli.sweep.sweep_grid import grid, split_values
from stretto.errors import ConfigError


@pytest.mark.parametrize(
    ("item", "values"),
    [
        ("training.lr=1e-4,3e-4", ["1e-4", "3e-4"]),
        ("training.lr=1e-4, 3e-4", ["1e-4", "3e-4"]),
        ("reward=exact", ["exact"]),
        ("reward=", [""]),
        (
            "sampling={temperature: 1, top_p: 1},{temperature: 0.8}",
            ["{temperature: 1, top_p: 1}", "{temperature: 0.8}"],
        ),
        ("sampling.stop=[a, b],[],[c]", ["[a, b]", "[]", "[c]"]),
        ("dataset.path='a,b.jsonl',c.jsonl", ["'a,b.jsonl'", "c.jsonl"]),
        ("sampling.stop=['],',\"[\"],[x]", ["['],',\"[\"]", "[x]"]),
        ("dataset.path=it's.jsonl,b", ["it's.jsonl", "b"]),
        ("steps=${oc.env:N,3},4", ["${oc.env:N,3}", "4"]),
    ],
)
def test_commas_separate_values_outside_brackets_and_quotes(item: str, values: list[str]) -> None:
    assert split_values(item) == (item.partition("=")[0], values)


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
    _, found = split_values("key=" + ",".join(texts))
    assert [yaml.safe_load(text) for text in found] == [yaml.safe_load(text) for text in texts]


@pytest.mark.parametrize(
    ("items", "seeds", "complaint"),
    [
        (["--lr=1,2"], None, "not of the form dotted.key=value,value"),
        (["lr"], None, "not of the form"),
        (["lr=1,,2"], None, "there is an empty value"),
        (["lr=[1,2"], None, r"expected \] before its end"),
        (["lr='1,2"], None, "expected ' before its end"),
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
    assert [run.name for run in runs][:3] == [
        "lr-1e-4_max_staleness-0_seed-1",
        "lr-1e-4_max_staleness-0_seed-2",
        "lr-1e-4_max_staleness-2_seed-1",
    ]
    assert len({run.name for run in runs}) == len(runs) == 8
    assert runs[0].overrides == ("training.lr=1e-4", "steps=10", "queue.max_staleness=0", "seed=1")
    assert (runs[0].combination, runs[0].seed) == ("lr-1e-4_max_staleness-0", "1")
    assert runs[0].values == {"training.lr": "1e-4", "queue.max_staleness": "0"}


def test_seeds_alone_make_a_sweep() -> None:
    for runs in (grid([], "1,2"), grid(["seed=1,2"], None)):
        assert [(run.name, run.combination) for run in runs] == [("seed-1", ""), ("seed-2", "")]


def test_keys_with_equal_endings_keep_what_distinguishes_them() -> None:
    [run, *_] = grid(["training.lr=1,2", "models.critic.lr=3,4", "lr=5,6", "steps=7,8"], None)
    assert run.name == "training.lr-1_critic.lr-3_lr-5_steps-7"


def test_values_that_are_no_file_names_get_a_hash() -> None:
    runs = grid(["path=a/b,a b,../a,x" + 99 * "x"], None)
    names = [run.name for run in runs]
    assert len(set(names)) == 4
    assert all("/" not in name and " " not in name and len(name) < 60 for name in names)
    assert names == [run.name for run in grid(["path=a/b,a b,../a,x" + 99 * "x"], None)]
