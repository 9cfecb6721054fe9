"""Text to tokens and back, in processes that never import torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from stretto.errors import ConfigError

__all__ = ["ByteTokenizer", "Tokenizer", "fault_of", "load_tokenizer"]


class Tokenizer(Protocol):
    """What rollout workers and engines need of a tokenizer."""

    def encode_prompt(self, prompt: str | Sequence[dict[str, Any]]) -> NDArray[np.int32]:
        """(P,) ids of a prompt: text, or chat messages to which the template is applied once, with the
        opening of the assistant's turn.

        Raises:
            ConfigError: for messages where there is no chat template.
        """
        ...

    def encode_answer(self, answer: str | Sequence[dict[str, Any]]) -> NDArray[np.int32]:
        """(A,) ids of what follows a prompt: text as it stands, or chat messages, the contents one after the
        other, and the end of the text, if there is a token for it."""
        ...

    def decode(self, ids: NDArray[np.int32]) -> str:
        """The text of tokens, without special tokens."""
        ...


def load_tokenizer(model: str | None) -> Tokenizer:
    """The tokenizer of a model folder or hub id; without a model, one token a byte.

    Raises:
        ConfigError: if the model has none that can be loaded.
    """
    if model is None:
        return ByteTokenizer()
    # AutoTokenizer would import torch.
    from transformers import PreTrainedTokenizerFast

    try:
        return _Fast(PreTrainedTokenizerFast.from_pretrained(model), model)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {model!r} has no tokenizer that can be loaded: {error}") from error


def fault_of(prompt: Any) -> str:
    """Why something is no prompt, or an empty string."""
    if isinstance(prompt, str):
        return ""
    turns = cast("list[Any]", prompt) if isinstance(prompt, list) else []
    if turns and all(isinstance(turn, dict) and {"role", "content"} <= turn.keys() for turn in turns):
        return ""
    return f"expected text or chat messages ([{{'role': …, 'content': …}}, …]), found {str(prompt)[:60]!r}"


class ByteTokenizer:
    """Token = byte, for runs of mock engines without a model."""

    def encode_prompt(self, prompt: str | Sequence[dict[str, Any]]) -> NDArray[np.int32]:
        """UTF-8 of the text, or of the messages' contents one after the other."""
        text = prompt if isinstance(prompt, str) else "\n".join(str(turn["content"]) for turn in prompt)
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def encode_answer(self, answer: str | Sequence[dict[str, Any]]) -> NDArray[np.int32]:
        """The same as of a prompt."""
        return self.encode_prompt(answer)

    def decode(self, ids: NDArray[np.int32]) -> str:
        """The bytes as text; what is not UTF-8 is replaced."""
        return (ids % 256).astype(np.uint8).tobytes().decode(errors="replace")


class _Fast:
    """A tokenizer of the `tokenizers` library with its chat template."""

    def __init__(self, tokenizer: Any, model: str) -> None:
        self._tokenizer = tokenizer
        self._model = model

    def encode_prompt(self, prompt: str | Sequence[dict[str, Any]]) -> NDArray[np.int32]:
        if isinstance(prompt, str):
            ids = self._tokenizer.encode(prompt)
        elif self._tokenizer.chat_template is None:
            raise ConfigError(f"the prompt is chat messages, and model {self._model!r} has no chat template")
        else:
            text = self._tokenizer.apply_chat_template(
                list(prompt), tokenize=False, add_generation_prompt=True
            )
            ids = self._tokenizer.encode(text, add_special_tokens=False)
        return np.asarray(ids, np.int32)

    def encode_answer(self, answer: str | Sequence[dict[str, Any]]) -> NDArray[np.int32]:
        text = answer if isinstance(answer, str) else "".join(str(turn["content"]) for turn in answer)
        ids = list(self._tokenizer.encode(text, add_special_tokens=False))
        if (end := self._tokenizer.eos_token_id) is not None:
            ids.append(end)
        return np.asarray(ids, np.int32)

    def decode(self, ids: NDArray[np.int32]) -> str:
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=True)
