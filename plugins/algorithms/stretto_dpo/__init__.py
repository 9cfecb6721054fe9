"""Algorithm `dpo`: direct preference optimisation on pairs of a chosen and a rejected answer.

Rafailov et al. 2023 (arXiv 2305.18290), eq. 7. Let h be log(pi / pi_ref) of the chosen answer minus that of
the rejected one, each summed over the answer's tokens. The loss of a pair is -log sigmoid(beta h). The
options: `label_smoothing` e is conservative DPO, for data in which a share e of the labels is wrong;
`variant: ipo` is (h - 1 / (2 beta))^2, Azar et al. 2023 (2310.12036), eq. 17; `variant: hinge` is max(0, 1 -
beta h), Liu et al. 2023 (RSO, 2309.06657).

Each sequence of a pair carries the pair's loss at its last trained token, so the mean over sequences is the
mean over pairs. Other libraries disagree on `ipo`: TRL computes h from means over tokens; here it is the sum,
as in the paper.

Metrics, averaged over pairs: `accuracy`, the share of pairs with h > 0 (0 at the first step, where the policy
is the reference), and `margin`, beta h.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from stretto import Component, Problem, hookimpl
from stretto.algorithm import Call, Encoded, Loss, Model, forward, function, read, train
from stretto.component import PositiveFloat
from stretto.rl.supervised import PairConfig, Supervised, check_pair, check_temperature, prompt_and_answer

if TYPE_CHECKING:
    from torch import Tensor

    from stretto.config import RunConfig
    from stretto.dataset import Row
    from stretto.rl.batch import Batch
    from stretto.tokenizer import Tokenizer

__all__ = ["DPO", "DPOConfig"]


class DPOConfig(PairConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the algorithm `dpo`."""

    variant: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """Loss of a pair: `sigmoid` is DPO's, `ipo` the squared loss of IPO, `hinge` the hinge loss of RSO."""
    beta: PositiveFloat = 0.1
    """Strength of the tie to the reference model; a larger value keeps the policy nearer to it."""
    label_smoothing: Annotated[float, msgspec.Meta(ge=0, lt=0.5)] = 0.0
    """Assumed share of pairs in which chosen and rejected are exchanged; only with `variant: sigmoid`."""

    def __post_init__(self) -> None:
        if self.label_smoothing and self.variant != "sigmoid":
            raise ValueError(f"label_smoothing is for variant 'sigmoid', found {self.variant!r}")


class DPO(Supervised[DPOConfig]):
    """Trains the policy, `actor`, on the rows, relative to a frozen `reference`."""

    models: Mapping[str, Model] = {"actor": Model(), "reference": Model(trainable=False)}

    def calls(self) -> Sequence[Call]:
        """Return the dataflow read -> forward(reference) -> share -> train. Pairs are never split."""
        return [
            read(self.encode, samples=2),
            forward("reference", writes="reference_logprobs"),
            function(self.share, reads=("loss_mask",), writes=("share",)),
            train(
                "actor",
                Loss(self.loss, "sequence_sum", unit="group"),
                reads=("group", "reference_logprobs", "share"),
            ),
        ]

    def encode(self, row: Row, index: int, tokenizer: Tokenizer) -> Encoded:
        """Encode the prompt and one answer: the chosen one (index 0) or the rejected one (index 1)."""
        return prompt_and_answer(row, self.config.columns[index], tokenizer)

    def share(self, batch: Batch) -> Mapping[str, Tensor]:
        """Return (T,) float32: the mean number of trained tokens of a sequence / the number of this sequence.

        Statistics are means over tokens. This factor turns them into means over sequences.
        """
        from stretto.rl.functional import sequence_sum

        index = batch.sequence_index()
        tokens = sequence_sum(batch["loss_mask"].float(), index, len(batch))  # (S,)
        return {"share": (tokens.mean() / tokens)[index]}

    def loss(self, logprobs: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the pair's loss at the last trained token of each sequence, (T,), and statistics."""
        import torch

        from stretto.rl.functional import at_last_token, pairs_of, preference_loss, sequence_sum

        config, mask = self.config, batch["loss_mask"]
        index = batch.sequence_index().to(logprobs.device)
        log_ratio = torch.where(mask, logprobs - batch["reference_logprobs"], 0.0)  # (T,)
        answer_log_ratio = sequence_sum(log_ratio, index, len(batch))  # (S,)
        chosen, rejected, pair = pairs_of(batch["group"])
        h = answer_log_ratio[chosen] - answer_log_ratio[rejected]  # (P,)
        losses = preference_loss(
            h, variant=config.variant, beta=config.beta, label_smoothing=config.label_smoothing
        )
        pair_of_token = pair[index]  # (T,)
        h = h.detach()
        return at_last_token(losses[pair], mask, index), {
            "accuracy": (h > 0).float()[pair_of_token] * batch["share"],
            "margin": config.beta * h[pair_of_token] * batch["share"],
        }


def check(config: DPOConfig, run: RunConfig) -> Iterator[Problem]:
    """Check the two columns of answers, and that the temperature is 1."""
    yield from check_temperature(config, run)
    yield from check_pair(config, run)


@hookimpl
def stretto_algorithm() -> Iterator[Component[DPOConfig]]:
    yield Component(
        "dpo",
        DPO,
        DPOConfig,
        "direct preference optimisation on pairs of answers",
        check,
        requires={"torch": "stretto[torch]"},
    )
