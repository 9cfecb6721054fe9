"""Tokenizers and chat templates."""

import threading
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from patience import patience
from stretto.errors import ConfigError
from stretto.models.tokenizer import ByteTokenizer, characters_of, load_tokenizer, work_on_text


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
    with pytest.raises(ConfigError, match="has no tokenizer"):
        load_tokenizer(str(tmp_path / "nowhere"))


def test_ids_do_not_change_from_call_to_call(tmp_path: Path) -> None:
    own = Tokenizer(BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")], dropout=0.5))
    PreTrainedTokenizerFast(tokenizer_object=own).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    assert {tuple(tokenizer.encode_text("abab")) for _ in range(50)} == {(2, 2)}


@given(st.text())
def test_bytes_survive_the_byte_tokenizer(text: str) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode_prompt(text)) == text


def test_no_text_has_more_characters_than_its_tokens_may_have() -> None:
    quickstart = load_tokenizer(str(Path(__file__).parents[2] / "examples" / "quickstart" / "model"))

    @given(st.text(), st.text("0123456789+= "))
    def check(text: str, known: str) -> None:
        for tokenizer, example in ((ByteTokenizer(), text), (quickstart, known)):
            assert len(example) <= tokenizer.most_characters(len(tokenizer.encode_text(example)))

    check()
    for tokenizer in (quickstart, ByteTokenizer()):
        assert 2**20 <= tokenizer.most_characters(None) <= 2**22


def test_characters_are_counted_without_tokenising() -> None:
    parts = [{"type": "text", "text": "abc"}, {"type": "image"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": None}]
    assert characters_of("abcd") == 4
    assert characters_of([*messages, {"role": "user", "content": "de"}]) == 5


async def test_the_event_loop_goes_on_while_a_long_text_is_tokenised() -> None:
    continues = threading.Event()
    async with anyio.create_task_group() as tasks:

        async def go_on() -> None:
            continues.set()

        tasks.start_soon(go_on)
        assert await work_on_text(lambda: continues.wait(patience()), 10**6)
        assert await work_on_text(threading.current_thread, 10) is threading.current_thread()
