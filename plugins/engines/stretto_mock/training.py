"""The training engine `mock`, which sleeps instead of training."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from zlib import crc32

import torch
from torch import Tensor

from stretto import Context
from stretto.algorithm import Loss
from stretto.rl.batch import Batch
from stretto_mock import MockTrainingConfig


class MockTraining:
    """Has as weights the number of optimizer steps and a checksum of all trained tokens, in order: versions
    differ, and runs can be compared. With several processes, which get other rows, the checksum is 0."""

    def __init__(self, config: MockTrainingConfig, context: Context) -> None:
        del context
        self._config = config
        self._steps = self._checksum = 0

    def load(self, folder: Path | None) -> None:
        """Start at step 0, or at the step of a checkpoint."""
        state = {} if folder is None else json.loads((folder / "mock.json").read_text())
        self._steps, self._checksum = state.get("steps", 0), state.get("checksum", 0)

    def forward(self, batch: Batch, *, temperature: float) -> Tensor:
        """Return the behaviour policy's logprobs, as if nothing had been learned since; 0 without them."""
        del temperature
        time.sleep(self._config.seconds_per_forward)
        has_logprobs = "behaviour_logprobs" in batch
        return batch["behaviour_logprobs"] if has_logprobs else torch.zeros(batch.num_tokens)

    def train(self, batch: Batch, loss: Loss, *, temperature: float) -> Mapping[str, float]:
        """Sleep for the configured time of a step."""
        del temperature
        if self._config.calls_loss:
            loss.function(torch.zeros(batch.num_tokens), batch)
        seconds = self._config.seconds_per_step
        if self._config.tokens_per_s is not None:
            seconds += batch.num_tokens / self._config.tokens_per_s
        time.sleep(seconds)
        self._steps += 1
        if self._config.processes == 1:
            for _, column in sorted(batch.tokens.items()):
                self._checksum = crc32(column.numpy().tobytes(), self._checksum)
        return {"loss": 0.0, "grad_norm": 0.0, "lr": self._config.lr, "micro_batches": 1.0}

    def measure(self, batch: Batch, loss: Loss, *, temperature: float) -> Mapping[str, float]:
        """Measure nothing: a loss of 0."""
        del batch, loss, temperature
        return {"loss": 0.0}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the number of steps and the checksum."""
        yield "steps", torch.tensor([self._steps, self._checksum])

    def save(self, folder: Path, copy_bytes: int = 0) -> Callable[[], object] | None:
        """Write the number of steps and the checksum, as JSON."""
        state = json.dumps({"steps": self._steps, "checksum": self._checksum})
        write = partial((folder / "mock.json").write_text, state)
        if copy_bytes >= len(state):
            return write
        write()
        return None

    def stop(self) -> None:
        """Do nothing: the engine holds no resources."""
