"""Tokenizers and chat templates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from stretto.errors import ConfigError
from stretto.models.tokenizer import ByteTokenizer, load_tokenizer


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
