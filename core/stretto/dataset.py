"""The contract of datasets: rows by index. The kernel keeps order, epochs and the cursor. A dataset may
bring a curriculum that chooses the rows instead.

A row is a dict. `prompt` is text, or chat messages (`[{"role": ..., "content": ...}]`); stretto applies the
tokenizer's chat template to messages once. `id` is optional. The reward receives every other column by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

from stretto.component import PositiveInt
from stretto.errors import ConfigError

__all__ = [
    "Curriculum",
    "CurriculumDataset",
    "Dataset",
    "DatasetConfig",
    "Message",
    "OwnTurn",
    "Row",
    "SourcedDataset",
    "TicketEnd",
    "first_of",
    "object_of",
]

Row = dict[str, Any]


Message = Mapping[str, Any]
"""One chat message: `role`, `content`, and other keys that a template may use, such as `tool_calls`."""


class OwnTurn(dict[str, Any]):
    """A message whose special tokens are tokens: the policy sampled it, or `dataset.special_tokens` says so.
    In every other message they are text, because the author of the message could otherwise begin turns."""


class DatasetConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every dataset's section."""

    use: str
    """Name of the dataset."""
    max_prompt_tokens: PositiveInt | None = None
    """Maximum length of a prompt, in tokens. The run leaves out rows with longer prompts when their turn
    comes, and counts them as `filtered`. It stops if it leaves out all rows."""
    max_tokens: PositiveInt | None = None
    """Length at which rows that are trained as they are (`sft`, `dpo`, `reward_model`) are cut, in tokens.
    Default: rows that are longer than the model's positions are refused."""
    template: dict[str, Any] = {}
    """Arguments of the model's chat template, such as `{enable_thinking: false}`, wherever the run applies
    it, also in evaluations. `strftime_now` is the date that a template writes; default: the day on which the
    run starts."""
    special_tokens: Literal["text", "tokens"] | None = None
    """How to encode the text of a special token, such as `<|im_end|>`, in the messages of a row: `text`, as
    any other text, or `tokens`, as the special token. Default: as text, but rows that train an answer with
    such a text are refused. Prompts of plain text keep their special tokens. Also applies to evaluations."""
    shuffle: bool = True
    """Visit the rows of every epoch in a random order, drawn with the run's seed."""


class Dataset(Protocol):
    """A dataset. It must return the same rows in every process. The kernel and the rollout workers make
    it."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row:
        """Return the row at `index`, 0 <= index < len.

        Raises:
            IndexError: if there is no row at `index`: `for row in dataset` ends there.
            ConfigError: if the row cannot be read; the message names the place in the file.
        """
        ...

    @property
    def fingerprint(self) -> str:
        """A text that changes whenever a row changes. Workers compare their text with the kernel's."""
        ...


@runtime_checkable
class SourcedDataset(Dataset, Protocol):
    """A dataset that knows the places of its rows. `check` warns of rows that are trained and held out."""

    @property
    def sources(self) -> Sequence[tuple[str, range]]:
        """The rows in order: (name of a source, such as a file; indices of rows in it)."""
        ...


def first_of(sources: Iterable[tuple[str, range]], rows: int | None) -> Iterator[tuple[str, range]]:
    """Yield the `sources` of the first rows; of all, if `rows` is None."""
    for source, indices in sources:
        yield source, indices[:rows]
        rows = None if rows is None else rows - len(indices[:rows])


def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON, as `object_pairs_hook` of json. Raise ConfigError if a key stands twice."""
    if len(found := dict(pairs)) < len(pairs):
        key = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ConfigError(f"an object has the key {key!r} twice; leave one of them out")
    return found


class TicketEnd(msgspec.Struct, frozen=True):
    """The outcome of a training ticket."""

    ticket: int
    row: int
    outcome: Literal["trained", "filtered", "expired", "failed"]
    """The account of the ledger in which the ticket ended."""
    rewards: tuple[float, ...]
    """Rewards of the group's samples; empty if no group was finished, or if the run trains on the rows
    themselves. A filtered ticket without rewards has a row that is not fit to train on, such as one whose
    prompt is too long."""


class Curriculum(Protocol):
    """Chooses the row of every training ticket by the outcomes of earlier tickets. It does no I/O.

    The kernel writes each choice to the journal before it issues the ticket. A resumed run restores the state
    of a checkpoint and reports the recorded draws with `drawn`, without asking `choose`. So random numbers
    must follow from the seed and the ticket, not from the number of calls. In a resumed run, ends of tickets
    that were not trained may be reported later than before: the state should not depend on the order of ends.
    """

    def choose(self, ticket: int, version: int) -> int:
        """Return the row of a new ticket. Does not change the state: the next call of `drawn` does.

        Args:
            version: number of train steps that are complete.
        """
        ...

    def drawn(self, ticket: int, row: int, version: int) -> None:
        """Record that a ticket gets this row: the chosen row, the row in the journal, or the row of an
        expired ticket that is drawn again. Called once for each ticket, in the order of tickets."""
        ...

    def ended(self, end: TicketEnd) -> None:
        """Record that a ticket has ended. Called once for each ticket, before the next choice at a version
        later than that of the ticket's draw."""
        ...

    def refusal(self, row: int, rewards: tuple[float, ...]) -> str:
        """Return why a finished group is not trained, in a few words; empty if it is trained. The result
        depends on the arguments alone. The ledger counts the ticket as filtered."""
        ...

    def figures(self) -> dict[str, float]:
        """Return figures for each line of `metrics.jsonl`, by name."""
        ...

    def state(self) -> dict[str, Any]:
        """Return the state as values of JSON. Checkpoints contain it."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state that `state` returned. The dataset may have fewer rows than it had then."""
        ...


@runtime_checkable
class CurriculumDataset(Dataset, Protocol):
    """A dataset that brings its own curriculum. In a held-out evaluation only `source_of` is used: every row
    has one turn, in order."""

    def source_of(self, index: int) -> str:
        """Return the name of the dataset that a row comes from, under which the metrics show its figures;
        empty for none."""
        ...

    def curriculum(self, seed: int) -> Curriculum:
        """Return a new curriculum over the rows. Only the kernel calls it.

        Args:
            seed: the run's seed.
        """
        ...
