"""Recognising the texts that end an answer."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from stretto_torch.requests import RequestError


class StopStrings:
    """The stop strings of one request.

    Only the end of the answer is turned into text at each token: as many tokens as the longest string
    has bytes, since none but a special token has less than a byte.
    """

    def __init__(self, strings: tuple[str, ...], tokenizer: Any) -> None:
        self._strings = strings
        self._tokenizer = tokenizer
        # A few more: decoders drop a space before the first token they see.
        self._window = max(len(string.encode()) for string in strings) + 8

    def end(self, answer: NDArray[np.int32]) -> bool:
        """Whether the last token of the answer completed one of them."""
        tail = answer[-self._window :].tolist()
        text: str = self._tokenizer.decode(tail, clean_up_tokenization_spaces=False)
        return any(string in text for string in self._strings)


def load_tokenizer(folder: str) -> Any:
    """The model's tokenizer.

    Raises:
        RequestError: if the folder has none.
    """
    try:
        return PreTrainedTokenizerFast.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise RequestError(
            f"stop strings need a tokenizer; {folder!r} has none that loads: {error}"
        ) from error
