"""The training engine `torch`: one process, one model, any Hugging Face causal language model.

Parameters and optimizer are float32; with `dtype: bfloat16` the forward and backward passes run under
autocast. A batch is split into micro-batches of a token budget; the loss of each token is weighted by
what it counts in the whole batch, so the gradient is that of the unsplit batch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import structlog
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from stretto.batch import Batch
from stretto.errors import EngineError
from stretto.functional import entropy_of, logprobs_of, loss_weights
from stretto_torch.packing import ATTENTION, packed_rows, packs_exactly, padded_rows

if TYPE_CHECKING:
    from stretto import Context
    from stretto.algorithm import Loss
    from stretto_torch import TorchTrainingConfig

__all__ = ["TorchTraining"]

log = structlog.get_logger()

_WEIGHTS = "_loss_weights"


class TorchTraining:
    """Holds the model, its optimizer and its schedule."""

    def __init__(self, config: TorchTrainingConfig, context: Context) -> None:
        self._config = config
        self._initial = context.model
        self._seed = context.seed
        torch.set_num_threads(config.threads)
        transformers_logging.disable_progress_bar()  # logs are files
        use_gpu = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
        self._device = torch.device("cuda" if use_gpu else "cpu")
        if use_gpu and config.share < 1:
            torch.cuda.set_per_process_memory_fraction(config.share)

    # ------------------------------------------------------------------------ loading and saving

    def load(self, folder: Path | None) -> None:
        """Load the initial model, or a checkpoint's model, optimizer, schedule and random states."""
        torch.manual_seed(self._seed)
        source = str(folder / "model") if folder is not None else self._initial
        if source is None:
            raise EngineError("the torch engine needs a model: give `model` in the run file")
        self._model = self._loaded_model(source)
        config = self._config
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self._steps = 0
        if folder is not None:
            self._restore(folder)

    def save(self, folder: Path) -> None:
        """`model/`, `optimizer.safetensors`, `random.safetensors`, `engine.json`."""
        self._model.save_pretrained(folder / "model")
        if self._initial is not None:
            AutoTokenizer.from_pretrained(self._initial).save_pretrained(folder / "model")
        names = [name for name, _ in self._model.named_parameters()]
        states = self._optimizer.state_dict()["state"]
        tensors = {
            f"{names[index]}.{key}": value.contiguous()
            for index, state in states.items()
            for key, value in state.items()
        }
        save_file(tensors, folder / "optimizer.safetensors")
        random = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state()
        save_file(random, folder / "random.safetensors")
        (folder / "engine.json").write_text(json.dumps({"optimizer_steps": self._steps}))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters, tied ones once, and buffers that the model's files hold, on CPU."""
        dtype = getattr(torch, self._config.dtype)
        kept = self._model.state_dict().keys()
        for name, tensor in (*self._model.named_parameters(), *self._model.named_buffers()):
            if name in kept:
                tensor = tensor.detach()
                yield name, (tensor.to(dtype) if tensor.is_floating_point() else tensor).cpu()

    def stop(self) -> None:
        """Everything goes with the process."""

    def _loaded_model(self, source: str) -> PreTrainedModel:
        """The model in float32, ready for packed rows if that is exact."""
        wanted = self._config.packing
        try:
            config = _without_dropout(AutoConfig.from_pretrained(source))
            if wanted != "padded":
                model = self._with_attention(source, config, ATTENTION)
                reason = packs_exactly(model, config.get_text_config().vocab_size, self._device)
                if not reason:
                    self._rows = packed_rows
                    return model
                if wanted == "packed":
                    raise EngineError(
                        f"training.packing is 'packed', and {source!r} does not allow it: {reason}"
                    )
                log.info("rows are padded", reason=reason)
            self._rows = padded_rows
            return self._with_attention(source, config, None)
        except (OSError, ValueError) as error:
            raise EngineError(f"model {source!r} cannot be loaded: {error}") from error

    def _with_attention(self, source: str, config: Any, attention: str | None) -> PreTrainedModel:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            source, config=config, dtype=torch.float32, attn_implementation=attention
        )
        if self._config.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        cast("nn.Module", model).to(self._device)
        return model

    def _restore(self, folder: Path) -> None:
        saved = load_file(folder / "optimizer.safetensors")
        states: dict[int, dict[str, Tensor]] = {}
        for index, (name, _) in enumerate(self._model.named_parameters()):
            state = {
                key.removeprefix(f"{name}."): value
                for key, value in saved.items()
                if key.rpartition(".")[0] == name
            }
            if state:
                states[index] = state
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": states})
        self._steps = json.loads((folder / "engine.json").read_text())["optimizer_steps"]
        random = load_file(folder / "random.safetensors")
        torch.set_rng_state(random["cpu"])
        if self._device.type == "cuda" and "cuda" in random:
            torch.cuda.set_rng_state(random["cuda"])

    # ------------------------------------------------------------------------------- computing

    @torch.no_grad()
    def forward(self, batch: Batch, *, temperature: float) -> Tensor:
        """(T,) float32 logprobs of every token; 0 at the first of each sequence."""
        parts: list[Tensor] = []
        for micro in batch.micro_batches(self._config.micro_batch_tokens):
            micro = micro.to(self._device)
            logprobs, _ = self._logprobs(micro, micro.positions().to(self._device) > 0, temperature)
            parts.append(logprobs.cpu())
        return torch.cat(parts)

    def train(self, batch: Batch, loss: Loss, *, temperature: float) -> Mapping[str, float]:
        """One optimizer step; with a gradient that is not finite, none, and `skipped` is 1."""
        mask = batch["loss_mask"] & (batch.positions() > 0)
        weights = loss_weights(mask, batch.sequence_index(), len(batch), loss.reduction)
        micro_batches = batch.with_columns({"loss_mask": mask, _WEIGHTS: weights}).micro_batches(
            self._config.micro_batch_tokens
        )
        statistics = _Statistics(int(mask.sum()))
        for micro in micro_batches:
            self._backward(micro.to(self._device), loss, temperature, statistics)
        norm = self._clip()
        lr = self._config.lr * self._lr_factor(self._steps)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        skipped = not math.isfinite(norm)
        if not skipped:
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._steps += 1
        own = {"grad_norm": norm, "lr": lr, "micro_batches": float(len(micro_batches))}
        return {**statistics.means(), **own, "skipped": float(skipped)}

    def _backward(self, micro: Batch, loss: Loss, temperature: float, statistics: _Statistics) -> None:
        """Add one micro-batch's part of the gradient."""
        mask = micro["loss_mask"]
        if not bool(mask.any()):
            return
        logprobs, entropy = self._logprobs(micro, mask, temperature)
        losses, figures = loss.function(logprobs, micro)
        if losses.shape != logprobs.shape:
            raise EngineError(
                f"the loss has shape {tuple(losses.shape)}; expected a number a token, "
                f"{tuple(logprobs.shape)}, of which the engine takes the mean"
            )
        # Not a product alone: 0 x inf of a token that does not count would be NaN.
        total = (torch.where(mask, losses, 0.0) * micro[_WEIGHTS]).sum()
        total.backward()
        statistics.add(mask, float(total.detach()), {"entropy": entropy, **figures})

    def _logprobs(self, batch: Batch, wanted: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Logprobs and entropies of the wanted tokens (T,) bool, 0 elsewhere: two of (T,) float32."""
        places = wanted.nonzero().squeeze(1)  # (N,)
        rows = self._rows(batch, places)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._config.dtype == "bfloat16"):
            logits = rows.pick(self._model(**rows.arguments).logits)  # (N, V)
        logprobs = logprobs_of(logits, batch["tokens"][places], temperature)
        with torch.no_grad():
            entropy = entropy_of(logits.detach(), temperature)
        blank = torch.zeros(batch.num_tokens, device=self._device)
        return blank.index_put((places,), logprobs), blank.index_put((places,), entropy)

    def _clip(self) -> float:
        limit = self._config.clip_norm
        parameters = self._model.parameters()
        norm = nn.utils.clip_grad_norm_(parameters, math.inf if limit is None else limit)
        return float(norm)

    def _lr_factor(self, step: int) -> float:
        """Warm-up to 1, then constant, or down to `final_lr_ratio` at `decay_steps`."""
        config = self._config
        if step < config.warmup_steps:
            return (step + 1) / (config.warmup_steps + 1)
        if config.schedule == "constant" or config.decay_steps is None:
            return 1.0
        length = max(1, config.decay_steps - config.warmup_steps)
        done = min(1.0, (step - config.warmup_steps) / length)
        shape = 1 - done if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
        return config.final_lr_ratio + (1 - config.final_lr_ratio) * shape


class _Statistics:
    """Means over the trained tokens of a whole batch, gathered micro-batch by micro-batch."""

    def __init__(self, tokens: int) -> None:
        self._tokens = max(1, tokens)
        self._sums: dict[str, float] = {}

    def add(self, mask: Tensor, loss: float, figures: Mapping[str, Tensor]) -> None:
        """Take in (T,) figures; `loss` is already a part of the whole's."""
        self._sums["loss"] = self._sums.get("loss", 0.0) + loss
        for name, values in figures.items():
            part = float(values.detach()[mask].sum()) / self._tokens
            self._sums[name] = self._sums.get(name, 0.0) + part

    def means(self) -> dict[str, float]:
        return dict(self._sums)


def _without_dropout(config: Any) -> Any:
    """A policy's logprobs must not depend on chance."""
    for owner in (config, config.get_text_config()):
        for name, value in vars(owner).items():
            if ("drop" in name) and isinstance(value, float):
                setattr(owner, name, 0.0)
    return config
