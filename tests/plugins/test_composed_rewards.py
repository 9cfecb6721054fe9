"""The rewards `format`, `regex` and `length`, and `sum`, which adds others up."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import write_run_file

from fixture_types import Start
from stretto.assembly.assembly import Assembly
from stretto.assembly.compose import Composed, compose
from stretto.errors import StrettoError
from stretto.user_code.scoring import score_group
from worlds import in_simulation

ROW = {"prompt": "?", "answer": "42"}


def composed_with(folder: Path, reward: dict[str, Any]) -> Composed:
    return compose(write_run_file(folder), [f"reward={json.dumps(reward)}"])


def scores(
    folder: Path, reward: dict[str, Any], *answers: str, row: dict[str, Any] = ROW, **columns: list[Any]
) -> list[tuple[float, dict[str, float]]]:
    composed = composed_with(folder, reward)
    return score_group(Assembly(composed, folder="").make("reward"), row, answers, columns)


def rewards(*arguments: Any, **columns: Any) -> list[float]:
    return [reward for reward, _ in scores(*arguments, **columns)]


def test_format_expects_each_tag_once_in_order(tmp_path: Path) -> None:
    right = "<think>a\nb</think>\n<answer>42</answer>"
    wrong = (
        "<answer>42</answer><think>a</think>",
        f"So: {right}",
        f"{right}<answer>43</answer>",
        "<think>a</think> so <answer>42</answer>",
        "<think>a<answer>42</answer></think>",
        "",
    )
    form = {"use": "format", "tags": ["think", "answer"]}
    assert rewards(tmp_path, form, right, f" {right}\n", *wrong) == [1.0, 1.0] + [0.0] * len(wrong)


def test_format_matches_the_whole_answer(tmp_path: Path) -> None:
    assert rewards(tmp_path, {"use": "format", "pattern": r"[0-9]+"}, "42", " 42\n", "42!") == [1.0, 1.0, 0.0]


def test_regex_compares_the_last_match_with_the_row(tmp_path: Path) -> None:
    regex = {"use": "regex", "pattern": "<a>(.*?)</a>"}
    answers = ("<a>41</a> no, <a> 42\n</a>", "<a>42</a><a>41</a>", "42")
    assert rewards(tmp_path, regex, *answers) == [1.0, 0.0, 0.0]
    words = {**regex, "ignore_case": True}
    assert rewards(tmp_path, words, "<A>yEs</A>", row={"prompt": "?", "answer": "Yes"}) == [1.0]


def test_length_is_the_soft_penalty_of_dapo(tmp_path: Path) -> None:
    """Hand-worked from equation 13: L_max = 20, L_cache = 10, so (L_max - L_cache - length) / L_cache."""
    length = {"use": "length", "limit": 20, "buffer": 10, "penalty": 0.5}
    found = rewards(tmp_path, length, *"abcde", completion_tokens=[1, 10, 13, 20, 99])
    assert found == pytest.approx([0.0, 0.0, -0.15, -0.5, -0.5])


SUM: dict[str, Any] = {
    "use": "sum",
    "parts": {
        "right": {"use": "regex", "pattern": "([0-9]+)"},
        "form": {"use": "format", "pattern": "[0-9]+"},
        "short": {"use": "length", "limit": 4, "buffer": 4},
    },
    "weights": {"form": 0.25},
}


def test_a_sum_adds_up_and_shows_each_part(tmp_path: Path) -> None:
    found = scores(tmp_path, SUM, "42", "it is 42", completion_tokens=[1, 2])
    assert [reward for reward, _ in found] == pytest.approx([1 + 0.25 - 0.25, 1 + 0 - 0.5])
    assert found[1][1] == {"accuracy": 1.0, "right": 1.0, "form": 0.0, "short": -0.5, "right/accuracy": 1.0}


def test_a_part_may_score_groups_or_wait(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import asyncio\n"
        "at_once = [0, 0]\n"
        "async def slow(prompt, completion):\n"
        "    at_once[0] += 1\n"
        "    at_once[1] = max(at_once)\n"
        "    await asyncio.sleep(0)\n"
        "    at_once[0] -= 1\n"
        "    return {'reward': float(at_once[1]), 'accuracy': 0.5}\n"
        "def different(completions, answer, **columns):\n"
        "    assert len(answer) == len(completions)\n"
        "    return [float(len(set(completions)))] * len(completions)\n"
    )
    parts = {
        name: {"use": "function", "function": f"{tmp_path}/mine.py:{name}"} for name in ("slow", "different")
    }
    found = scores(tmp_path, {"use": "sum", "parts": parts}, "a", "b", "b")
    assert [metrics["different"] for _, metrics in found] == [2.0] * 3
    assert found[-1] == (5.0, {"accuracy": 0.5, "slow": 3.0, "different": 2.0, "slow/accuracy": 0.5})


def test_a_sum_has_the_limits_of_its_parts(tmp_path: Path) -> None:
    composed = composed_with(
        tmp_path, {"use": "sum", "parts": {"a": "math", "b": "exact", "c": SUM["parts"]["form"]}}
    )
    assert composed.section("reward").limits == (2.0, 64)
    own = composed_with(tmp_path, {"use": "sum", "answer_cpu_s": 5, "parts": {"a": "exact"}})
    assert own.section("reward").limits == (5.0, None)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"use": "sum", "parts": {"a": {"use": "mth"}}}, r"reward\.parts\.a\.use: .*did you mean 'math'"),
        (
            {"use": "sum", "parts": {"a": {"use": "math", "colum": 1}}},
            r"reward\.parts\.a\.colum: unknown key",
        ),
        ({"use": "sum", "parts": {"A b": "math"}}, r"'A b' cannot be the name of a part"),
        ({"use": "sum", "parts": ["math"]}, r"reward\.parts: expected a mapping of names"),
        ({"use": "sum", "parts": {"a": "math"}, "weights": {"b": 1}}, r"weights: no part 'b'; the parts: a"),
        ({"use": "sum"}, r"reward\.parts: this key is required"),
        ({"use": "sum", "parts": {"accuracy": "math"}}, r"no part can be called 'accuracy'"),
        ({"use": "sum", "parts": {}}, r"parts: expected at least one"),
        ({"use": "format"}, r"needs tags or pattern"),
        ({"use": "format", "pattern": "("}, r"pattern: '\(' is no regular expression"),
        ({"use": "regex", "pattern": "x"}, r"has 0 groups; expected one"),
        ({"use": "length", "limit": 2, "buffer": 3}, r"buffer \(3\) must be at most limit \(2\)"),
    ],
)
def test_what_cannot_be_is_said_with_its_key(tmp_path: Path, reward: dict[str, Any], message: str) -> None:
    with pytest.raises(StrettoError, match=message):
        composed_with(tmp_path, reward)


def test_overrides_reach_parts(tmp_path: Path) -> None:
    file = write_run_file(tmp_path)
    file.write_text(file.read_text().replace("reward: exact", f"reward: {json.dumps(SUM)}"))
    composed = compose(file, ["reward.parts.right=exact", "reward.parts.short.limit=8"])
    assert composed.components["reward.parts.right"].name == "exact"
    assert composed.section("reward.parts.short").limit == 8
    assert composed.document["reward"]["parts"]["right"]["use"] == "exact"


@in_simulation
def test_a_run_shows_the_parts_of_its_reward(start: Start, refusals: Callable[..., list[str]]) -> None:
    reward = f"reward={json.dumps(SUM)}"
    run = start(reward, "steps=2", "samples.keep=all")
    run.assert_completed(2)
    line = run.metrics()[-1]
    assert {"reward/right", "reward/form", "reward/short", "reward/accuracy"} <= line.keys()
    parts = (line[f"reward/{name}"] for name in ("right", "form", "short"))
    assert line["reward"] == pytest.approx(
        sum(w * part for w, part in zip((1, 0.25, 1), parts, strict=True)), abs=1e-5
    )
    column = refusals(reward, "reward.parts.right.column=n_of_rows")
    assert any("no column 'n_of_rows'" in fault for fault in column), column
