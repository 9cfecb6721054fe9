"""What workers keep of samples for people: texts by turns, and the trainer's figures of each token."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stretto.algorithm import Loss
from stretto.bus.messages.subjects import Subjects
from stretto.bus.messages.tickets import GroupDone, Ticket, TicketRecord
from stretto.config import QueueConfig, SamplesConfig
from stretto.engine import Sampling
from stretto.models.tokenizer import ByteTokenizer, load_tokenizer
from stretto.rl.batch import Batch
from stretto.workers.sampling.session import VariantServices
from stretto.workers.sampling.ticket_record import record_of
from stretto.workers.sampling.ticket_runner import TicketRunner
from stretto.workers.training.step_recorder import ROW, StepFigures
from stretto.workflow import Answer, Prompt, Score, Session, Trajectory, WorkflowConfig

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"


def test_the_turns_of_a_text_stand_on_lines_of_their_own() -> None:
    tokenizer = load_tokenizer(str(MODEL))
    turns = [tokenizer.encode_text(text) for text in ("1+7+5=", "8 13", "8+1=", "9")]
    mask = np.concatenate([np.full(len(turn), bool(place % 2)) for place, turn in enumerate(turns)])
    trajectory = Trajectory(
        tokens=np.concatenate(turns),
        loss_mask=mask,
        logprobs=np.zeros(len(mask), np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        score=Score(1.0),
        finish="stop",
        engine="inference-0",
    )
    row = {"prompt": "1+7+5="}
    record = record_of(Ticket(0, 1, "train", 0, 0, 1), "rollout-0", row, [trajectory], tokenizer)
    assert record.prompt == "1+7+5="
    assert record.texts[0].text == "8 13\n8+1=\n9"


def test_importance_weights_keep_the_precision_of_logprobs() -> None:
    def nothing(logprobs: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        return logprobs, {}

    figures = StepFigures()
    behaviour = torch.tensor([0.0, -1.0, -2.0, 0.0])
    batch = Batch(
        [4],
        {"tokens": torch.tensor([1, 2, 3, 4]), "loss_mask": torch.tensor([False, True, True, True])},
        {ROW: torch.tensor([0])},
    ).with_columns({"behaviour_logprobs": behaviour})
    logprobs = behaviour + torch.tensor([0.0, 1e-4, -1e-4, 12.0])  # float16 has neither of the three weights
    figures.watch(Loss(nothing, "token"), [0]).function(logprobs, batch)
    [row] = figures.rows(["0/1/0"])
    np.testing.assert_allclose(
        row.importance_weights.numpy(), np.exp(np.array([1e-4, -1e-4, 12.0])), rtol=3e-7 * 12
    )


class LongAnswers:
    """A workflow whose answers have 5000 tokens: a thread makes their texts."""

    async def run(self, prompt: Prompt, session: Session) -> list[Trajectory]:
        tokens, zeros = np.full(5000, 65, np.int32), np.zeros(5000, np.float32)
        answer = Answer(tokens, zeros, zeros.astype(np.int32), "length", "", "inference-0")
        return [Trajectory.of(prompt.ids, answer, Score(1.0))]


async def test_a_long_sample_is_kept() -> None:
    appended: list[Any] = []

    async def append(subject: str, message: Any, *, id: str) -> int:
        appended.append(message)
        return len(appended)

    config: Any = SimpleNamespace(
        workflow=WorkflowConfig(),
        evaluation=None,
        queue=QueueConfig(),
        dataset=SimpleNamespace(max_prompt_tokens=None),
        samples=SamplesConfig(keep="all"),
        sampling=Sampling(),
    )
    context: Any = SimpleNamespace(
        names=Subjects("r"),
        worker="rollout-0",
        bus=SimpleNamespace(store=SimpleNamespace(append=append)),
        on_routes=list[Any]().append,
    )
    nothing: Any = None
    services = VariantServices(
        config, LongAnswers(), nothing, nothing, ByteTokenizer(), None, (300, ""), nothing
    )
    rows: Any = [{"prompt": "1+1="}]
    outcome = await TicketRunner(context, {"": services}, {"train": rows}).outcome(
        Ticket(0, 1, "train", 0, 0, 1)
    )
    assert isinstance(outcome, GroupDone), outcome
    record = appended[outcome.record - 1]
    assert isinstance(record, TicketRecord)
    assert record.texts[0].text == "A" * 5000
