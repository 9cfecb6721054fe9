"""Algorithm `sft`: supervised fine-tuning on the answers of the dataset.

The loss is the negative log-likelihood of the answer's tokens, -log pi(y_t | x, y_<t); the prompt is not
trained on. The answer is the column `completion_column` of the row, text or chat messages, and ends with the
token that ends the turn, so that the model learns to stop. Of messages, the assistant's turns are trained on;
turns of tools and users between them are context. A row with the columns `tokens` and `loss_mask` sets itself
which tokens are trained on.

Other libraries disagree on the mean: TRL and most trainers average over the tokens of the batch, as
`loss_mean: token` does here, across all ranks and micro-batches.

Metrics: `nll`, the loss per token in nats, averaged over trained tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from stretto import AlgorithmConfig, Component, hookimpl
from stretto.algorithm import Call, Encoded, Loss, Model, Reduction, read, train
from stretto.rl.supervised import Supervised, check_temperature, prompt_and_answer, tokens_of_row

if TYPE_CHECKING:
    from torch import Tensor

    from stretto.dataset import Row
    from stretto.rl.batch import Batch
    from stretto.tokenizer import Tokenizer

__all__ = ["SFT", "SFTConfig"]


class SFTConfig(AlgorithmConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the algorithm `sft`."""

    completion_column: str = "completion"
    """Column with the answer to the prompt: text, or chat messages. The first message is the assistant's."""
    loss_mean: Reduction = "token"
    """How token losses are averaged. `token`: every token of the batch counts equally; `sequence`: every
    answer counts equally; `sequence_sum`: like `sequence`, but with the sum of an answer's tokens instead of
    their mean."""


class SFT(Supervised[SFTConfig]):
    """Trains one policy, `actor`, on the rows."""

    models: Mapping[str, Model] = {"actor": Model()}

    def calls(self) -> Sequence[Call]:
        """Return the dataflow read -> train."""
        return [read(self.encode), train("actor", Loss(self.loss, self.config.loss_mean), reads=())]

    def encode(self, row: Row, index: int, tokenizer: Tokenizer) -> Encoded:
        """Encode the prompt and the answer; only the answer is trained on."""
        del index
        column = self.config.completion_column
        return tokens_of_row(row, column, tokenizer) or prompt_and_answer(row, column, tokenizer)

    def loss(self, logprobs: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return -log pi, (T,), and statistics."""
        del batch
        return -logprobs, {"nll": -logprobs.detach()}


@hookimpl
def stretto_algorithm() -> Iterator[Component[SFTConfig]]:
    yield Component(
        "sft",
        SFT,
        SFTConfig,
        "supervised fine-tuning on the answers of the dataset",
        check_temperature,
        requires={"torch": "stretto[torch]"},
    )
