"""The text of each token, for the page. Only the tokenizer's file is read: nothing is downloaded or run."""

from __future__ import annotations

import codecs
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def pieces(model: str | None, tokens: list[int]) -> list[str] | None:
    """Return the text that each token adds; the last token of a character adds the character. Return None
    if this machine has no tokenizer of the model. Without a model, every token is a byte."""
    if model is None:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        return [decoder.decode(bytes([token % 256])) for token in tokens]
    tokenizer = _tokenizer(model)
    if tokenizer is None:
        return None
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=False)
    return [stream.step(tokenizer, token) or "" for token in tokens]


@lru_cache(maxsize=4)
def _tokenizer(model: str) -> Tokenizer | None:
    from stretto.models.files import folder_of_model

    folder = folder_of_model(model)
    file = Path(folder, "tokenizer.json") if folder else None
    if file is None or not file.is_file():
        return None
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(file))
