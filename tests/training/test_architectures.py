"""Tiny models of many types: with the defaults, the trainer's loss is that of plain transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from transformers import AutoModelForCausalLM

from stretto.algorithm import Loss
from tiny_types import TYPES, tiny_config
from training_engines import batch_of, loaded_engine, push_up

UNPACKED = ("falcon", "gpt_neo", "gptj", "mpt")
"""Types whose code takes no attention function of others, so that loading them packed raises."""


@pytest.mark.slow
@pytest.mark.parametrize("name", TYPES)
def test_the_loss_is_that_of_plain_transformers(name: str, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(tiny_config(name)).float().save_pretrained(tmp_path)
    plain: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    batch = batch_of([20, 7, 2, 33], loss_mask=torch.ones(62, dtype=torch.bool))
    texts = [each["tokens"] for each in batch.split([1] * 4)]
    with torch.no_grad():
        logits = [plain(input_ids=text[None]).logits[0, :-1] for text in texts]
    expected = torch.nn.functional.cross_entropy(torch.cat(logits), torch.cat([text[1:] for text in texts]))
    for checkpointing in (False, True):
        with capture_logs() as logs:
            engine = loaded_engine(tmp_path, gradient_checkpointing=checkpointing)
        found = engine.train(batch, Loss(push_up, "token"), temperature=1.0)["loss"]
        assert found == pytest.approx(float(expected), abs=1e-5)
        reasons = [line["reason"] for line in logs if "padded" in line["event"]]
        assert (engine.form == "padded") == (len(reasons) == 1)
        assert name not in UNPACKED or reasons
