"""The contract of tokenizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from stretto.chat.chat_form import ChatForm
    from stretto.dataset import DatasetConfig, Message

__all__ = ["Tokenizer"]


class Tokenizer(Protocol):
    """The tokenizer methods that rollout workers and engines use."""

    def encode_prompt(
        self, prompt: str | Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> NDArray[np.int32]:
        """Return (P,) ids of a prompt. For chat messages, the chat template is applied once and opens the
        assistant's turn. A text gets the tokens that the tokenizer puts before a text, unless it already
        begins with them, and no token at its end, where the answer follows.

        Args:
            tools: as in `render`; a prompt of plain text shows no tools.

        Raises:
            ConfigError: if the prompt is chat messages and the tokenizer has no chat template.
        """
        ...

    def encode_answer(self, answer: str, *, prompt: str = "") -> NDArray[np.int32]:
        """Return (A,) ids of the answer to a text, with an end token unless the answer already ends with one.
        The end token is the chat template's if the prompt has rendered turns, else the end-of-sequence
        token, if there is one. For answers to chat messages, see `stretto.chat.chats`."""
        ...

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
    ) -> str:
        """Return chat messages as text in the form of the chat template.

        Args:
            tools: JSON schemas of functions, for chat templates that show them to the model.
            add_generation_prompt: write the opening of the assistant's turn after the messages.

        Raises:
            ConfigError: if there is no chat template, or the template refuses the messages.
        """
        ...

    def encode_text(self, text: str, *, whole: bool = False, after: str = "") -> NDArray[np.int32]:
        """Return (L,) ids of a text that follows another text, or with `whole` of a text at the beginning. No
        token is added before or after it. The text of a special token becomes that token, except where
        `render` says that it is text.

        Args:
            after: the text that it follows; empty if that ends with a special token. Some tokenizers put a
                space before a text after a special token, but no space before a text that continues another.
        """
        ...

    def decode(
        self, ids: NDArray[np.int32], *, special: bool = False, after: NDArray[np.int32] | None = None
    ) -> str:
        """Return the text of tokens. Special tokens are left out unless `special` is True.

        Args:
            after: (P,) ids of the tokens before `ids`. Without them, `ids` begin a text: a tokenizer that
                puts a space at the start of a text removes the space again.
        """
        ...

    def ends_turn(self, token: int) -> bool:
        """Return whether a token that ended an answer is not part of its text: an end token of the model, or
        another special token."""
        ...

    def special_in(self, text: str) -> str:
        """Return the first special token in a text; empty if it has none."""
        ...

    @property
    def form(self) -> ChatForm:
        """The model's chat form."""
        ...

    @property
    def rows(self) -> DatasetConfig | None:
        """The run's section `dataset`, which says how its rows are written; None outside of a run."""
        ...

    def most_characters(self, tokens: int | None) -> int:
        """Return how many characters a text of this many tokens has at most. A longer text is refused before
        it is tokenised, which would take long. Only a tokenizer that drops characters, or makes one unknown
        token of many, could put a longer text into as many tokens.

        Args:
            tokens: None for the model's own limit, which is only known to be at least 1 MiB of text.
        """
        ...
