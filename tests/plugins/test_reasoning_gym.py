"""Dataset and reward `reasoning_gym`: rows and scores are the library's own."""

import subprocess
import sys
from collections import Counter
from typing import Any

import msgspec
import psutil
import pytest
from reasoning_gym.factory import create_dataset

from processes import arguments_of
from stretto import Context
from stretto.errors import ConfigError
from stretto_reasoning_gym import (
    ReasoningGym,
    ReasoningGymConfig,
    ReasoningGymReward,
    WeightedTask,
    make_reward,
)
from stretto_reasoning_gym.generator import plain, restore
from waiting import until

pytestmark = pytest.mark.slow  # its library takes seconds to import, in each process that has rows

CONTEXT = Context(run="r", name="n", seed=1)


def dataset(**keys: Any) -> ReasoningGym:
    return ReasoningGym(ReasoningGymConfig(use="reasoning_gym", **keys), CONTEXT)


def sent(row: dict[str, Any]) -> dict[str, Any]:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(row), type=dict[str, Any])


def scored(row: dict[str, Any], completion: str, **keys: Any) -> dict[str, float]:
    reward = make_reward(ReasoningGymReward(use="reasoning_gym", **keys), CONTEXT)
    return reward(completion=completion, **sent(row))


# ------------------------------------------------------------------------------------------- rows


@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("leg_counting", {"max_animals": 3}),
        ("graph_color", {}),  # integers as keys
        ("rearc", {}),  # tuples of tuples, which its scores compare
        ("knights_knaves", {}),  # numpy's strings
    ],
)
def test_rows_and_scores_are_those_of_the_task(task: str, options: dict[str, Any]) -> None:
    ours = dataset(task=task, options=options, size=3, seed=11)
    own = create_dataset(task, size=3, seed=11, **options)
    assert len(ours) == 3
    for index in range(3):
        row, entry = sent(ours[index]), own[index]
        assert row["prompt"][-1] == {"role": "user", "content": entry["question"]}
        assert (row["id"], row["task"], row["options"]) == (f"{task}-{index}", task, options)
        assert restore(row["metadata"]) == entry["metadata"]
        for answer in (str(entry["answer"]), "1", ""):
            expected = own.score_answer(answer, entry)
            assert scored(row, f"<answer>no</answer> hm <answer> {answer} </answer>")["reward"] == expected


DECIMALS = {"min_num_decimal_places": 1, "max_num_decimal_places": 1}
MIXED = (
    WeightedTask(task="chain_sum", weight=3.0),
    WeightedTask(task="gcd", options={"max_numbers": 2}),
    WeightedTask(task="decimal_arithmetic", options=DECIMALS),
    *(WeightedTask(task=name) for name in ("leg_counting", "prime_factorization")),
)


@pytest.fixture(scope="module")
def mixed() -> list[dict[str, Any]]:
    return [sent(row) for row in map(dataset(tasks=MIXED, size=140, seed=2).__getitem__, range(140))]


def row_of(mixed: list[dict[str, Any]], task: str) -> dict[str, Any]:
    return next(row for row in mixed if row["task"] == task)


def test_several_tasks_are_drawn_by_weight(mixed: list[dict[str, Any]]) -> None:
    counts = Counter(row["task"] for row in mixed)
    assert counts.keys() == {each.task for each in MIXED}
    assert 42 <= counts["chain_sum"] <= 78  # 60 expected, s = 5.9
    gcd = row_of(mixed, "gcd")
    assert gcd["options"] == {"max_numbers": 2}
    assert scored(gcd, f"<answer>{gcd['answer']}</answer>")["accuracy"] == 1.0


def test_an_answer_is_what_stands_in_the_tags(mixed: list[dict[str, Any]]) -> None:
    row = row_of(mixed, "leg_counting")
    right = {"reward": 1.0, "accuracy": 1.0, "answered": 1.0, "unreadable": 0.0}
    assert scored(row, f"4 legs each: <answer>{row['answer']}</answer>") == right
    assert scored(row, row["answer"]) == dict.fromkeys(right, 0.0)
    assert scored(row, f"<final>{row['answer']}</final>", tag="final") == right


def test_an_answer_that_the_task_cannot_read_counts_nothing(mixed: list[dict[str, Any]]) -> None:
    found = scored(row_of(mixed, "prime_factorization"), "<answer>seven × eleven</answer>")
    assert found == {"reward": 0.0, "accuracy": 0.0, "answered": 1.0, "unreadable": 1.0}


def test_scores_are_those_of_the_options_that_the_row_was_made_with(mixed: list[dict[str, Any]]) -> None:
    # The task allows an error of one unit in the last decimal place that its options speak of.
    row = row_of(mixed, "decimal_arithmetic")
    near = f"<answer>{float(row['answer']) + 0.05:.3f}</answer>"
    assert scored(row, near)["reward"] == 1.0
    assert scored({**row, "options": {}}, near)["reward"] == 0.0


def test_the_instruction_is_the_librarys_or_ones_own() -> None:
    [system, user] = dataset(task="gcd", size=1, system="direct")[0]["prompt"]
    assert (system["role"], user["role"]) == ("system", "user")
    assert system["content"].startswith("Answer the question directly.")
    text = dataset(task="gcd", size=1, system="Be brief.", chat=False)[0]
    assert text["prompt"] == f"Be brief.\n\n{text['question']}\n"
    assert [turn["role"] for turn in dataset(task="gcd", size=1, system=None)[0]["prompt"]] == ["user"]


def test_the_library_is_imported_in_a_process_of_its_own() -> None:
    program = (
        "import sys\n"
        "from stretto import Context\n"
        "from stretto_reasoning_gym import ReasoningGym, ReasoningGymConfig\n"
        "config = ReasoningGymConfig(use='reasoning_gym', task='gcd', size=5)\n"
        "ReasoningGym(config, Context(run='r', name='n', seed=1))[0]\n"
        "assert not {'reasoning_gym', 'matplotlib', 'torch'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_fingerprint_is_of_what_determines_the_rows() -> None:
    same: dict[str, Any] = {"task": "gcd", "size": 4, "seed": 3}
    others = [{}, {"seed": 4}, {"task": "lcm"}, {"chat": False}, {"options": {"max_numbers": 2}}]
    assert dataset(**same).fingerprint == dataset(**same).fingerprint
    assert len({dataset(**same | other).fingerprint for other in others}) == 5


@pytest.mark.parametrize(
    "value", [(1, ("a", [2.5, None])), {3: {"x": (True,)}}, 2**70, -(2**64), [[]], "text"]
)
def test_plain_data_comes_back_as_it_was(value: Any) -> None:
    there = msgspec.msgpack.decode(msgspec.msgpack.encode(plain(value)))
    assert restore(there) == value
    assert type(restore(there)) is type(value)


def test_what_is_no_plain_data_is_refused() -> None:
    with pytest.raises(TypeError, match=r"set is not plain data: \{1\}"):
        plain([{1}])


# ----------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"task": "leg_countin"}, "reasoning_gym has no task 'leg_countin'; did you mean 'leg_counting'"),
        (
            {"task": "gcd", "options": {"max_number": 2}},
            "task 'gcd' has no option 'max_number'; did you mean",
        ),
        ({"task": "gcd", "options": {"seed": 2}}, "task 'gcd' has no option 'seed'"),
        ({"task": "gcd", "options": {"max_numbers": 1}}, "gcd: AssertionError: "),
        ({"tasks": (WeightedTask(task="gcd"),) * 2}, "gcd, gcd: ValueError: Duplicate dataset names"),
    ],
)
def test_a_wrong_task_says_what_is_wrong(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataset(size=2, **keys)[0]


def test_a_config_names_one_task_or_several() -> None:
    for keys in ({}, {"task": "gcd", "tasks": MIXED}):
        with pytest.raises(ValueError, match="give either task or tasks"):
            dataset(**keys)
    with pytest.raises(ValueError, match="each of tasks has its own"):
        dataset(tasks=MIXED, options={"a": 1})


def test_rows_of_another_dataset_are_refused() -> None:
    with pytest.raises(
        ValueError, match="no column 'task'; this reward is for rows of dataset reasoning_gym"
    ):
        scored({"prompt": "1+1=", "answer": "2"}, "2")


def test_the_process_that_makes_rows_ends_with_its_dataset_and_says_how_it_ended() -> None:
    rows = dataset(task="gcd", size=2)
    rows[0]
    [child] = _generators()
    child.kill()
    with pytest.raises(ConfigError, match="the process that generates rows ended with status -9"):
        rows[1]
    assert rows[1]["task"] == "gcd"  # by a new one
    [child] = _generators()
    del rows
    until(lambda: not child.is_running())


def _generators() -> list[psutil.Process]:
    children = psutil.Process().children()
    return [child for child in children if "stretto_reasoning_gym.generator" in " ".join(arguments_of(child))]
