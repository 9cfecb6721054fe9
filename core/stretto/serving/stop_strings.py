"""Recognise the texts that end an answer, for engines that do this themselves."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto.errors import RequestError

__all__ = ["StopStrings", "stop_tokenizer"]


class StopStrings:
    """The stop strings of one request, with the tokenizer that `stop_tokenizer` returns. At each token, it
    decodes as many tokens as the longest string has bytes: all but special tokens have at least a byte."""

    def __init__(self, strings: Sequence[str], tokenizer: Any) -> None:
        self._strings = strings
        self._tokenizer = tokenizer
        # A few more: decoders drop a space before the first token they see.
        self._window = max(len(string.encode()) for string in strings) + 8

    def end(self, answer: Sequence[int] | NDArray[np.int32]) -> bool:
        """Return whether the end of the answer contains one of the strings; call it after each token."""
        tail = [int(token) for token in answer[-self._window :]]
        text: str = self._tokenizer.decode(tail, clean_up_tokenization_spaces=False)
        return any(string in text for string in self._strings)


def stop_tokenizer(model: str) -> Any:
    """Load the model's tokenizer, which decodes special tokens as text. Raise RequestError if that fails."""
    from transformers import PreTrainedTokenizerFast

    try:
        return PreTrainedTokenizerFast.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise RequestError(
            f"stop strings need a tokenizer; {model!r} has none that can be loaded: {error}; or "
            "use sampling.stop_token_ids"
        ) from error
