"""(torch) The training engine `frozen`, which publishes a model unchanged."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers.utils import logging as transformers_logging

from stretto import Context
from stretto.algorithm import Loss
from stretto.errors import EngineError
from stretto.rl.batch import Batch
from stretto.rl.functional import logprobs_of
from stretto.training.lora import published_tensors
from stretto.training.model import image_arguments, load_policy, names_in_files, reads_images
from stretto_frozen import FrozenConfig


class FrozenTraining:
    """Implements the part of `stretto.engine.TrainingEngine` that a run without steps needs."""

    def __init__(self, config: FrozenConfig, context: Context) -> None:
        self._dtype = None if config.dtype == "auto" else getattr(torch, config.dtype)
        self._source = context.model
        torch.set_num_threads(config.threads)
        transformers_logging.disable_progress_bar()  # logs are files

    def load(self, folder: Path | None) -> None:
        """Load the run's model, on the CPU."""
        if folder is not None:
            raise EngineError(f"the frozen engine cannot load a checkpoint: {folder}")
        if self._source is None:
            raise EngineError("the frozen engine needs a model: give `model` in the run file")
        self._model = load_policy(self._source).eval()
        self._image_arguments = image_arguments(self._model) if reads_images(self._model.config) else None
        self._names_in_files = names_in_files(self._model, self._source)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the model's parameters, tied parameters once, and the buffers that its files contain."""
        for name, tensor in published_tensors(self._model):
            in_files = self._names_in_files.get(name, name)
            yield in_files, (tensor.to(self._dtype) if tensor.is_floating_point() else tensor)

    @torch.no_grad()
    def forward(self, batch: Batch, *, temperature: float) -> Tensor:
        """Return (T,) float32 logprobs, computed one sequence at a time: the reference for other engines."""
        logprobs: list[Tensor] = []
        for sequence in batch.split([1] * len(batch)):
            ids = sequence["tokens"][None]
            arguments = self._image_arguments(sequence, ids) if self._image_arguments else {}
            logits = self._model(input_ids=ids, **arguments).logits[0, :-1].float()
            logprobs += [torch.zeros(1), logprobs_of(logits, ids[0, 1:], temperature)]
        return torch.cat(logprobs)

    def train(self, batch: Batch, loss: Loss, *, temperature: float) -> Mapping[str, float]:
        """Raise EngineError: this engine cannot train."""
        raise EngineError("the frozen engine trains nothing; use another for `training`")

    def save(self, folder: Path, copy_bytes: int = 0) -> None:
        """Raise EngineError: this engine has no training state."""
        raise EngineError("the frozen engine has nothing to save")

    def stop(self) -> None:
        """Do nothing: the model's memory is freed with the process."""
