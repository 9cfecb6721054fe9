"""Smaller parts by themselves: rewards, scoring, datasets, tokenizers, placement, checkpoints."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from stretto import Context
from stretto.children.reward import score_group
from stretto.errors import ConfigError, LaunchError, nearest
from stretto.kernel.checkpoint import KernelState, checkpoint_name, newest_intact, prune, writing
from stretto.kernel.scheduler import Ledger, Snapshot
from stretto.launcher import Job, Resources
from stretto.models.tokenizer import ByteTokenizer, load_tokenizer
from stretto_exact import ExactConfig
from stretto_exact import make as make_exact
from stretto_jsonl import JsonLines, JsonLinesConfig
from stretto_local import place, visible_gpus
from stretto_math import MathConfig
from stretto_math import make as make_math

CONTEXT = Context(run="r", name="n", seed=1)


# ---------------------------------------------------------------------------------------- rewards


def test_exact_compares_texts() -> None:
    exact = make_exact(ExactConfig(use="exact"), CONTEXT)
    assert exact("", " 8 17\n", answer="8 17") == 1
    assert exact("", "8 18", answer="8 17") == 0
    assert make_exact(ExactConfig(use="exact", column="n"), CONTEXT)("", "7", n=7) == 1
    with pytest.raises(KeyError, match="no column 'answer'; its columns: gold"):
        exact("", "x", gold="x")


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("So the answer is \\boxed{72}.", "72", 1.0),
        ("It is $\\frac{1}{2}$.", "0.5", 1.0),
        ("$x = 2\\sqrt{2}$", "$\\sqrt{8}$", 1.0),
        ("\\boxed{71}", "72", 0.0),
        ("no idea", "72", 0.0),
        ("", "72", 0.0),
    ],
)
def test_math_compares_values(completion: str, answer: str, reward: float) -> None:
    assert make_math(MathConfig(use="math"), CONTEXT)("", completion, answer=answer) == reward


def test_math_refuses_an_expected_answer_that_is_none() -> None:
    with pytest.raises(ValueError, match="cannot read the expected answer"):
        make_math(MathConfig(use="math"), CONTEXT)("", "1", answer="?")


def plain(prompt: str, completion: str, answer: str, **columns: Any) -> float:
    assert prompt == "p"
    assert columns == {"extra": 3}
    return float(completion == answer)


def narrow(completion: str, answer: str) -> dict[str, float]:
    return {"reward": len(completion), "accuracy": float(completion == answer)}


def positional(_: str, text: str) -> int:
    return len(text)


async def awaited(prompt: str, completion: str) -> float:
    return 2.0


def trl(completions: list[str], prompts: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    assert prompts == ["p"] * 2
    assert kwargs == {"extra": [3, 3]}
    return [float(text == gold) for text, gold in zip(completions, answer, strict=True)]


ROW = {"prompt": "p", "answer": "ab", "extra": 3}


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        (plain, [(1.0, {}), (0.0, {})]),
        (narrow, [(2.0, {"accuracy": 1.0}), (1.0, {"accuracy": 0.0})]),
        (positional, [(2.0, {}), (1.0, {})]),
        (awaited, [(2.0, {}), (2.0, {})]),
        (trl, [(1.0, {}), (0.0, {})]),
    ],
)
def test_rewards_are_called_in_their_own_form(reward: Callable[..., Any], expected: Any) -> None:
    assert score_group(reward, ROW, ("ab", "c"), {}) == expected


def test_a_rows_columns_do_not_stand_for_what_was_sampled() -> None:
    """A dataset made for supervised training has the right answer in the column `completion`."""
    assert score_group(plain, {**ROW, "completion": "ab"}, ("ab", "c"), {}) == [(1.0, {}), (0.0, {})]
    assert score_group(trl, {**ROW, "completions": "ab"}, ("ab", "c"), {}) == [(1.0, {}), (0.0, {})]


def test_trl_rewards_of_chat_rows_get_messages() -> None:
    def chat(completions: list[Any], **kwargs: Any) -> list[float]:
        assert completions == [[{"role": "assistant", "content": "hi"}]]
        return [1.0]

    score_group(chat, {"prompt": [{"role": "user", "content": "?"}]}, ("hi",), {})


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "is None, not a finite number"),
        (math.nan, "is nan, not a finite number"),
        ({"score": 1.0}, "without 'reward'"),
        ({"reward": None}, "is None, not a finite number"),
        (1e39, "is 1e\\+39, not a finite number"),
        ({"reward": 1.0, "length": math.inf}, "'length' of completion 0 is inf"),
    ],
)
def test_what_is_no_number_is_a_failure(value: Any, words: str) -> None:
    def reward(prompt: str, completion: str) -> Any:
        return value

    with pytest.raises(ValueError, match=words):
        score_group(reward, ROW, ("ab",), {})


def test_a_reward_of_groups_gives_a_value_for_each() -> None:
    def reward(completions: list[str]) -> list[float]:
        return [1.0]

    with pytest.raises(ValueError, match="returned 1 values for 2 completions"):
        score_group(reward, ROW, ("a", "b"), {})


# --------------------------------------------------------------------------------------- datasets


def test_rows_are_read_by_index_and_the_fingerprint_tells_changes(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "a", "n": 1}\n\n  \n{"question": "b", "n": 2}')
    rows = JsonLines(JsonLinesConfig(use="jsonl", path=str(file), prompt_column="question"), CONTEXT)
    assert [rows[index] for index in range(len(rows))] == [
        {"prompt": "a", "n": 1},
        {"prompt": "b", "n": 2},
    ]
    before = rows.fingerprint
    file.write_text('{"question": "a", "n": 1}\n')
    assert JsonLines(JsonLinesConfig(use="jsonl", path=str(file)), CONTEXT).fingerprint != before
    with pytest.raises(ConfigError, match=r"rows\.jsonl:1: no column 'prompt'; its columns: question, n"):
        JsonLines(JsonLinesConfig(use="jsonl", path=str(file)), CONTEXT)[0]


def prompts(tmp_path: Path, row: Mapping[str, object], **options: object) -> object:
    """What the dataset `jsonl` makes of one row."""
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    section = {"use": "jsonl", "path": str(tmp_path / "rows.jsonl"), **options}
    return JsonLines(msgspec.convert(section, JsonLinesConfig), CONTEXT)[0]


def test_a_prompt_is_made_of_plain_columns(tmp_path: Path) -> None:
    row: dict[str, object] = {"question": "1+1?", "n": 3, "a b": "{x}"}
    template = "{{{n}}} {a b}\nQuestion: {question}\nAnswer:"
    asked = "{3} {x}\nQuestion: 1+1?\nAnswer:"
    assert prompts(tmp_path, row, prompt_template=template) == {**row, "prompt": asked}
    user, system = {"role": "user", "content": asked}, {"role": "system", "content": "Be brief."}
    chat = {"prompt_template": template, "system_prompt": "Be brief."}
    assert prompts(tmp_path, row, **chat) == {**row, "prompt": [system, user]}
    assert prompts(tmp_path, {"q": asked}, prompt_column="q", chat=True) == {"prompt": [user]}
    turns = {"prompt": [user]}
    assert prompts(tmp_path, turns, system_prompt="Be brief.") == {"prompt": [system, user]}


def test_a_prompt_that_cannot_be_made_of_the_columns_is_refused(tmp_path: Path) -> None:
    row: dict[str, object] = {"question": "?", "n": [1]}
    with pytest.raises(
        ConfigError, match=r"rows\.jsonl:1: prompt_template: no column 'qestion'; its columns: q"
    ):
        prompts(tmp_path, row, prompt_template="{qestion}")
    with pytest.raises(ConfigError, match="column 'n': expected text or a number, found list"):
        prompts(tmp_path, row, prompt_template="{n}")
    with pytest.raises(ConfigError, match="has a system message of its own"):
        prompts(tmp_path, {"prompt": [{"role": "system", "content": ""}]}, system_prompt="Be brief.")
    for wrong in ("{question", "question}", "{}", "{question:>9}", "{question!r}"):
        with pytest.raises(
            msgspec.ValidationError, match=r"prompt_template: .* a brace itself is written \{\{"
        ):
            prompts(tmp_path, row, prompt_template=wrong)
    with pytest.raises(msgspec.ValidationError, match="prompt_template and prompt_column are both given"):
        prompts(tmp_path, row, prompt_template="{n}", prompt_column="n")


# ------------------------------------------------------------------------------------- tokenizers


def test_chat_templates_are_applied_once(tiny_models: Callable[[str], Path], tmp_path: Path) -> None:
    source = tiny_models("qwen2")
    assert load_tokenizer(str(source)).encode_prompt("ab").tolist() == [67, 68]
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(ConfigError, match="no chat template"):
        load_tokenizer(str(source)).encode_prompt(messages)
    fast = PreTrainedTokenizerFast.from_pretrained(source)
    fast.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    fast.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.decode(tokenizer.encode_prompt(messages)) == "<user>hi<assistant>"
    assert isinstance(Tokenizer.from_file(str(tmp_path / "tokenizer.json")), Tokenizer)
    with pytest.raises(ConfigError, match="has no tokenizer"):
        load_tokenizer(str(tmp_path / "nowhere"))


@given(st.text())
def test_bytes_survive_the_byte_tokenizer(text: str) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode_prompt(text)) == text


def test_the_nearest_word() -> None:
    assert nearest("gpro", ["gspo", "grpo", "ppo"]) == "; did you mean 'grpo'?"
    assert nearest("zzz", ["grpo"]) == ""
    assert nearest("x", []) == ""


# -------------------------------------------------------------------------------------- placement


def job(worker: str, gpus: int, share: float = 1.0) -> Job:
    resources = Resources(gpus=gpus, share=share)
    return Job(worker=worker, role="trainer", command=(), env={}, resources=resources, log="")


def test_gpus_are_shared_only_where_the_shares_allow_it() -> None:
    two = [job("trainer", 1, 0.6), job("inference", 1, 0.4)]
    assert place(two, ["0"]) == {"trainer": ["0"], "inference": ["0"]}
    assert place(two, ["0", "1"]) == {"trainer": ["0"], "inference": ["1"]}  # apart where there is room
    whole = [job("a", 1, 0.5), job("b", 1, 0.5), job("c", 1)]
    placed = place(whole, ["0", "1"])
    assert placed["a"] == placed["b"] != placed["c"]
    assert place([job("cpu", 0)], []) == {"cpu": []}
    with pytest.raises(LaunchError, match=r"inference needs 1 GPU \(`gpus`\) with 50 % of the memory"):
        place([job("trainer", 1, 0.6), job("inference", 1, 0.5)], ["0"])


def test_visible_gpus_are_those_of_the_environment() -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "2, 5"}) == ["2", "5"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []


# ------------------------------------------------------------------------------------ checkpoints


def state(version: int, lowest: int = 1) -> KernelState:
    snapshot = Snapshot(version, Ledger(), 0, 0, [], [], [], {}, {})
    return KernelState(version, 0, "digest", snapshot, 9, lowest, "layout", 1, 0, 0, 0.0)


async def write(root: Path, version: int, lowest: int = 1) -> None:
    async with writing(root, checkpoint_name(version), state(version, lowest)) as folder:
        (folder / "model").mkdir()
        (folder / "model" / "weights").write_text(str(version))


async def test_checkpoints_are_whole_or_not_there(tmp_path: Path) -> None:
    await write(tmp_path, 10)

    async def interrupted() -> None:
        async with writing(tmp_path, checkpoint_name(20), state(20)) as folder:
            (folder / "half").write_text("")
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        await interrupted()
    assert [path.name for path in tmp_path.iterdir()] == ["step-000010"]
    found = newest_intact(tmp_path)
    assert found is not None
    assert found[1].version == 10


async def test_the_newest_intact_checkpoint_is_found(tmp_path: Path) -> None:
    for version in (10, 20, 30):
        await write(tmp_path, version)
    (tmp_path / "step-000030" / "model" / "weights").write_text("31")
    (tmp_path / "step-000020" / "manifest.json").unlink()
    found = newest_intact(tmp_path)
    assert found is not None
    assert found[0].name == "step-000010"
    assert json.loads((found[0] / "kernel.json").read_text())["version"] == 10
    assert newest_intact(tmp_path / "nowhere") is None


async def test_pruning_keeps_the_newest_and_says_what_they_need(tmp_path: Path) -> None:
    for version, lowest in ((10, 5), (20, 17), (30, 25)):
        await write(tmp_path, version, lowest)
    assert prune(tmp_path, 2, checkpoint_name(30), {10}) == 17  # nobody goes on from one that is spared
    assert (tmp_path / "step-000010").exists()
    assert prune(tmp_path, 2, checkpoint_name(30)) == 17
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000020", "step-000030"]
