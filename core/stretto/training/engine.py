"""(torch) A Hugging Face model in training: the common base of all engines that train one.

Trained parameters and the optimizer are float32, on the device or on the host (`state`). Each token's loss is
weighted by its share in the whole batch, over all ranks, so the gradient of micro-batches equals that of the
unsplit batch. The layout (`stretto.training.layout`) decides which rank has which parameters, and reduces
over ranks.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import structlog
import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import cached_file

from stretto.algorithm import WHOLE, Loss
from stretto.component import Context, Head
from stretto.errors import EngineError
from stretto.models.files import folder_of_model, tensors_of_model
from stretto.models.lora_files import matrix_of
from stretto.models.tokenizer import TOKENIZER_FILES
from stretto.models.vision import PROCESSOR_FILES, Vision
from stretto.rl.batch import Batch
from stretto.rl.functional import loss_count, loss_weights
from stretto.training.checkpoint import (
    Copies,
    catch_error,
    optimizer_tensors,
    random_tensors,
    read_random,
    restore_optimizer,
    restore_parameters,
    tensor_files,
    write_tensors,
)
from stretto.training.config import LoraConfig, ModelTrainingConfig, lr_factor
from stretto.training.host_state import HostState
from stretto.training.layout import Layout
from stretto.training.lora import (
    adapter_config,
    adapter_factors,
    add_adapters,
    cast_frozen,
    file_name,
    merge_adapters,
    published_tensors,
)
from stretto.training.model import (
    checkpoint_activations,
    compile_layers,
    load_model,
    names_in_files,
    reads_images,
    vision_tower,
)
from stretto.training.packing import PaddedRows, PrefixRows, compare_with_itself, trial_inputs
from stretto.training.token_head import ModelInputs, Support, Wanted, return_figures
from stretto.training.trial import attempt

__all__ = ["HFTraining"]

log = structlog.get_logger()

# The prefix that peft gives to the names of tensors in a model that it has wrapped.
_PEFT_PREFIX = "base_model.model."
# Bytes: the alignment of tensors that torch allocates on the CPU.
_ALIGNMENT = 64


class HFTraining:
    """A training engine: a model, its optimizer and its learning rate schedule, in a layout."""

    def __init__(self, config: ModelTrainingConfig, context: Context, layout: Layout | None = None) -> None:
        self._config = config
        self._layout = layout or Layout(config, context)
        self._initial = context.model
        self._seed = context.seed
        self._head: Head = context.head
        self._trainable = context.trainable
        self._blank: Batch | None = None
        self._host: HostState | None = None
        transformers_logging.disable_progress_bar()  # logs are files

    # ------------------------------------------------------------------------ loading and saving

    def load(self, folder: Path | None) -> None:
        """Load the initial model, or a checkpoint's model, optimizer, schedule and random states."""
        self._layout.connect()
        self._forget()
        torch.manual_seed(self._seed)
        self._model = self._build_model(folder)
        parameters = {self._layout.name(file_name(name)): each for name, each in self._parameters()}
        if folder is None and self._continued is not None:
            adapter = {name: each for name, each in parameters.items() if ".lora_" in name}
            self._expect_all(self._continued, adapter)
            restore_parameters(self._continued, "adapter_model", adapter, self._layout, _PEFT_PREFIX)
        self._trained = {name: each for name, each in parameters.items() if each.requires_grad}
        if self._adapter_only is not None:
            self._check_adapter_files()
        self._steps = 0
        self._lr_scale = 1.0
        """Factor of the learning rate of the newest optimizer step, from `Loss.lr_scale`."""
        if self._trainable:
            self._optimizer = self._make_optimizer()
        if folder is not None:
            self._restore(folder)
        if self._host is not None:
            self._host.update_copies()

    def save(self, folder: Path, copy_bytes: int = 0) -> Callable[[], object] | None:
        """Write a checkpoint, or copy it and return what writes it; see `stretto.training.checkpoint`."""
        self._check_trainable("saved")
        layout, copies = self._layout, Copies(copy_bytes)
        ranks = layout.parts * layout.width

        def in_turn(number: int) -> bool:
            return number % ranks == layout.rank

        def after_model(number: int) -> bool:
            return in_turn(number + 1)

        weights = itertools.chain(self._full_weights(frozen=False), self._full_weights(frozen=True))
        problem = write_tensors(folder / "model", "model", weights, writes=in_turn, copies=copies)
        if self._config.lora is not None:
            adapter = (
                (f"{_PEFT_PREFIX}{name}", tensor) for name, tensor in layout.stream(self._trained.items())
            )
            problem += write_tensors(
                folder / "adapter", "adapter_model", adapter, writes=after_model, copies=copies
            )
        state = layout.stream(optimizer_tensors(self._optimizer, self._trained))
        problem += write_tensors(folder, "optimizer", state, writes=after_model, copies=copies)
        if layout.rank == 0:
            random = random_tensors(layout.device)
            problem += write_tensors(folder, "random", random, writes=lambda _: True, copies=copies)
            state = {"optimizer_steps": self._steps, "lr_scale": self._lr_scale}
            problem += catch_error(copies.add, partial(self._describe, folder, state)) if not problem else ""
        if problems := "; ".join(filter(None, layout.gather_ranks(problem))):
            raise OSError(f"checkpoint {folder} cannot be written: {problems}")
        return copies.writer()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters (tied ones once) and the buffers of the model's files, on the CPU. Adapters are
        merged, or sent alone in the form of `stretto.models.lora_files`."""
        yield from self.trained_weights()
        yield from self.frozen_weights()

    def trained_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The part of `weights` that a step changes: trained parameters, matrices with adapters, buffers."""
        if (lora := self._adapter_only) is not None:
            parameters = ((name, tensor.detach()) for name, tensor in self._trained.items())
            factors = adapter_factors(self._layout.stream(parameters), self._model, lora)
            tensors = ((self._factor_in_files(name), tensor) for name, tensor in factors)
        else:
            tensors = self._full_weights(frozen=False)
        return self._as_published(tensors)

    def frozen_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The rest of `weights`; nothing if adapters are sent alone."""
        return self._as_published(() if self._adapter_only is not None else self._full_weights(frozen=True))

    def _as_published(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        dtype = getattr(torch, self._config.publish_dtype or self._config.compute_dtype)
        for name, tensor in tensors:
            yield name, (tensor.to(dtype) if tensor.is_floating_point() else tensor).cpu()

    def stop(self) -> None:
        """Disconnect from the other ranks. The memory of the model is freed when the process ends."""
        self._layout.close()

    def _build_model(self, folder: Path | None) -> PreTrainedModel:
        """Load the model and keep this rank's share. With adapters, load the initial model and add them."""
        config, lora = self._config, self._config.lora
        has_adapters = lora is not None and (self._trainable or self._continued is not None)
        source = str(folder / "model") if folder is not None and not has_adapters else self._initial
        if source is None:
            raise EngineError(f"the {config.use} engine needs a model: give `model` in the run file")
        staging, trains_on = self._layout.staging, self._layout.device
        model, self._packing = load_model(source, config, self._head, staging, trains_on)
        _align(model)
        embeddings: Any = model.get_input_embeddings()
        self._source, self._vocabulary = source, embeddings.weight.shape[0]
        self._reads_images = reads_images(model.config)
        self._names_in_files = names_in_files(model, self._initial)
        if self._reads_images and self._layout.parts > 1:
            self._blank = _blank_image(self._initial or source)
        freezes = self._reads_images and config.freeze_vision_tower
        self._tower = vision_tower(model) if freezes else ""
        if has_adapters and lora is not None:
            add_adapters(model, lora, self._head, self._tower)
        if self._tower:
            model.get_submodule(self._tower).requires_grad_(False)
        if not self._trainable:
            model.requires_grad_(False)
        elif config.gradient_checkpointing:
            checkpoint_activations(model)
        _, reason = attempt(partial(compare_with_itself, self._packing, model))
        if reason:
            log.warning("whether the model repeats its own numbers is not known", reason=reason)
        trial = trial_inputs(self._packing, model) if config.chunked_logits else None
        return_figures(model, self._head, trial)
        if config.dtype == "bfloat16" and self._layout.autocast:
            cast_frozen(model, torch.bfloat16)  # after the trials, which compute without autocast
        if config.state == "host" and self._trainable and not self._layout.offloads:
            self._host = HostState(model, getattr(torch, config.compute_dtype))
        self._layout.distribute(model)
        if config.compile:
            compile_layers(model)
        return model

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the model's parameters, with masters in place of their copies."""
        masters = {} if self._host is None else self._host.masters
        for name, parameter in self._model.named_parameters():
            yield name, masters.get(parameter, parameter)

    def _forget(self) -> None:
        self._host = None
        if "_model" in self.__dict__:
            for name in ("_model", "_trained", "_optimizer"):
                self.__dict__.pop(name, None)
            gc.collect()

    def _make_optimizer(self) -> torch.optim.Optimizer:
        config = self._config
        # The fused step accepts only parameters of the same mesh, so each mesh gets a group.
        groups: dict[Any, list[nn.Parameter]] = {}
        for parameter in self._trained.values():
            groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
        parameter_groups = [{"params": group} for group in groups.values()]
        if config.optimizer == "sgd":
            return torch.optim.SGD(parameter_groups, lr=config.lr, weight_decay=config.weight_decay)
        return torch.optim.AdamW(
            parameter_groups,
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )

    def _restore(self, folder: Path) -> None:
        if not self._trainable:
            return
        if self._config.lora is not None:
            restore_parameters(folder / "adapter", "adapter_model", self._trained, self._layout, _PEFT_PREFIX)
        restore_optimizer(folder, self._optimizer, self._trained, self._layout)
        state = json.loads((folder / "engine.json").read_text())
        self._steps, self._lr_scale = state["optimizer_steps"], state["lr_scale"]
        read_random(folder, self._layout.device)

    def _full_weights(self, *, frozen: bool) -> Iterator[tuple[str, Tensor]]:
        """Return the full tensors that no step changes, or all other ones, under their names in files."""
        fixed = {
            name
            for name, parameter in self._model.named_parameters()
            if not parameter.requires_grad and not name.endswith(".base_layer.weight")
        }
        shares = (
            (self._layout.name(name), self._trained.get(self._layout.name(file_name(name)), tensor).detach())
            for name, tensor in published_tensors(self._model)
            if (name in fixed) == frozen
        )
        merged = merge_adapters(self._layout.stream(shares), self._model, self._config.lora)
        # `cast_frozen` may have made some weights smaller; files have one dtype.
        return (
            (self._names_in_files.get(name, name), tensor.float() if tensor.is_floating_point() else tensor)
            for name, tensor in merged
        )

    def _factor_in_files(self, name: str) -> str:
        owner = matrix_of(name).removesuffix(".weight")
        in_files = self._names_in_files.get(f"{owner}.weight", f"{owner}.weight").removesuffix(".weight")
        return f"{in_files}{name.removeprefix(owner)}"

    @property
    def _continued(self) -> Path | None:
        lora = self._config.lora
        adapter = lora.adapter if lora is not None and self._head == "policy" else None
        return None if adapter is None else Path(adapter)

    def _expect_all(self, adapter: Path, own: Mapping[str, nn.Parameter]) -> None:
        expected = {name for rank_names in self._layout.gather_ranks([*own]) for name in rank_names}
        saved = {name.removeprefix(_PEFT_PREFIX) for name in tensor_files(adapter, "adapter_model")}
        if unused := sorted(saved - expected):
            raise EngineError(
                f"training.lora.adapter: {adapter} has {unused[0]!r} and {len(unused) - 1} more tensors for "
                "which the run has no adapter; was it trained with an image encoder that this run freezes?"
            )

    @property
    def _adapter_only(self) -> LoraConfig | None:
        lora, policy = self._config.lora, self._trainable and self._head == "policy"
        return lora if lora is not None and lora.send == "adapter" and policy else None

    def _check_adapter_files(self) -> None:
        in_files = tensors_of_model(self._initial)
        for name in self._trained:
            if (matrix := matrix_of(self._factor_in_files(name))) not in in_files:
                raise EngineError(
                    f"training.lora.send is 'adapter', but the files of {self._initial!r} have no tensor "
                    f"{matrix!r} that workers could put it into; set it to 'merged'"
                )

    def _describe(self, folder: Path, state: Mapping[str, float]) -> None:
        model, config = self._model, self._config
        model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
        model.config.dtype = "float32"
        model.config.save_pretrained(folder / "model")
        if model.can_generate():
            # Not by the config's `save_pretrained`: it refuses the configs of some models of the hub.
            text = model.generation_config.to_json_string()
            (folder / "model" / "generation_config.json").write_text(text)
        if self._initial is not None:
            _copy_tokenizer(self._initial, folder / "model")
            if self._reads_images:
                _copy_files(self._initial, PROCESSOR_FILES, folder / "model")
            if config.lora is not None:
                adapters = adapter_config(model, config.lora, self._head, self._initial, self._tower)
                adapters.save_pretrained(folder / "adapter")
        (folder / "engine.json").write_text(json.dumps(state))

    def _check_trainable(self, action: str) -> None:
        if not self._trainable:
            raise EngineError(f"a frozen model cannot be {action}; it was made with trainable=False")

    # ------------------------------------------------------------------------------- computing

    @property
    def form(self) -> str:
        """The form of the rows of a micro-batch, as text for users."""
        if isinstance(self._packing, PaddedRows):
            return "padded"
        return "packed, with shared prefixes" if isinstance(self._packing, PrefixRows) else "packed"

    @torch.no_grad()
    def forward(self, batch: Batch, *, temperature: float) -> Tensor:
        """Return the head's figure for every token, (T,) float32; 0 for tokens without a figure."""
        micro_batches = self._packing.split(batch, self._config.tokens_per_pass, whole_groups=False)
        work = [self._work(micro, self._figure_mask(micro), temperature) for micro in micro_batches]
        result = [torch.zeros(micro.num_tokens) for micro in micro_batches]

        def take(index: int, output: Tensor) -> None:
            if index < len(work):
                result[index] = _spread(output[:, 0], work[index]).cpu()

        max_count = max(self._layout.gather(len(work)))
        self._layout.forward(self._model, self._rows(work, max_count), take)
        return self._layout.share(torch.cat(result))

    def train(self, batch: Batch, loss: Loss, *, temperature: float) -> Mapping[str, float]:
        """Take one optimizer step. If the gradient is not finite, skip the step and set `skipped` to 1."""
        self._check_trainable("trained")
        passes = self._loss_passes(batch, loss, temperature)
        self._layout.backward(self._model, passes.rows, passes.loss_of)
        trained = self._model if self._host is None else nn.ParameterList(self._host.masters.values())
        norm = self._layout.clip(trained, self._config.clip_norm)
        figures = dict(loss.summarise(passes.statistics.together(self._layout)))
        if loss.lr_scale is not None:
            self._lr_scale = float(loss.lr_scale(figures, self._lr_scale))
            figures["lr_scale"] = self._lr_scale
        lr = self._config.lr * lr_factor(self._config, self._steps) * self._lr_scale
        self._step(lr, skipped=not math.isfinite(norm))
        return {
            **figures,
            "grad_norm": norm,
            "lr": lr,
            "micro_batches": float(len(passes.rows)),
            "skipped": float(not math.isfinite(norm)),
        }

    @torch.no_grad()
    def measure(self, batch: Batch, loss: Loss, *, temperature: float) -> Mapping[str, float]:
        """Return the loss and its statistics, without a step."""
        passes = self._loss_passes(batch, loss, temperature)
        self._layout.forward(self._model, passes.rows, passes.loss_of)
        return loss.summarise(passes.statistics.together(self._layout))

    def _loss_passes(self, batch: Batch, loss: Loss, temperature: float) -> _LossPasses:
        """Prepare the passes over the micro-batches of a batch; all ranks have equally many."""
        mask = batch["loss_mask"] & self._figure_mask(batch)
        micro_batches = self._packing.split(
            batch.with_columns({"loss_mask": mask}),
            self._config.tokens_per_pass,
            whole_groups=loss.unit == "group",
        )
        work = [
            self._work(micro, micro["loss_mask"], temperature, loss)
            for micro in micro_batches
            if micro["loss_mask"].any()
        ]
        rank_counts = (
            int(mask.sum()),
            loss_count(mask, batch.sequence_index(), len(batch), loss.reduction),
            len(work),
        )
        token_counts, loss_counts, micro_counts = zip(*self._layout.gather(rank_counts), strict=True)
        statistics = _Statistics(sum(token_counts))

        def loss_of(index: int, output: Tensor) -> Tensor:
            if index >= len(work):
                return output.sum() * 0.0  # another rank has more micro-batches
            return self._loss(work[index], output, loss, sum(loss_counts), statistics)

        return _LossPasses(self._rows(work, max(micro_counts)), loss_of, statistics)

    def _step(self, lr: float, *, skipped: bool) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        if not skipped:
            self._optimizer.step()
            if self._host is not None:
                self._host.update_copies()
        self._optimizer.zero_grad(set_to_none=True)
        self._steps += 1

    def _loss(self, work: _Work, output: Tensor, loss: Loss, count: int, statistics: _Statistics) -> Tensor:
        """One micro-batch's part of the loss, a scalar with gradient, from the figures of its selected
        tokens. `count`: denominator of the loss of the whole batch."""
        head_figures = _spread(output[:, 0], work)
        batch = work.batch
        if work.rows.wanted.whole:
            batch = batch.with_columns({WHOLE: _spread(output[:, -1], work)})
        mask = batch["loss_mask"]
        losses, figures = loss.function(head_figures, batch)
        if losses.shape != head_figures.shape:
            raise EngineError(
                f"the loss has shape {tuple(losses.shape)}; expected one number for each token, "
                f"{tuple(head_figures.shape)}; the engine takes the mean"
            )
        policy_figures = {"entropy": _spread(output[:, 1], work)} if self._head == "policy" else {}
        if loss.entropy_coef:
            losses = losses - loss.entropy_coef * policy_figures["entropy"]
        index = batch.sequence_index().to(mask.device)
        weights = loss_weights(mask, index, len(batch), loss.reduction, count=count)
        # Mask with `where`, not by the weight 0 alone: 0 x inf of a masked token would be NaN.
        total = (torch.where(mask, losses, 0.0) * weights).sum()
        statistics.add(work.places, total.detach(), {**policy_figures, **figures})
        return total

    def _figure_mask(self, batch: Batch) -> Tensor:
        """Return (T,) bool: the tokens for which the head has a figure."""
        if self._head == "reward":
            return torch.ones(batch.num_tokens, dtype=torch.bool)
        return batch.positions() > 0

    def _work(self, micro: Batch, mask: Tensor, temperature: float = 1.0, loss: Loss | None = None) -> _Work:
        """Prepare a micro-batch; `mask`, (T,) bool, selects the tokens whose figures are wanted."""
        places = mask.nonzero().squeeze(1)
        # A token's logprob, and the value of the state before it, come from the output at the previous token.
        at = places if self._head == "reward" else places - 1
        wanted = Wanted(
            at,
            micro["tokens"][places],
            temperature,
            entropy_gradient=loss is not None and loss.entropy_coef > 0,
            whole=loss is not None and loss.whole_vocabulary and micro.drawn is not None,
            support=None if micro.drawn is None else Support.of(micro.drawn, places),
        )
        device = self._layout.device
        given = self._with_blank_image(micro)
        self._check_ids(given)
        rows = self._packing.inputs(given, wanted, device)
        return _Work(micro.to(device), places.to(device), rows)

    def _check_ids(self, micro: Batch) -> None:
        """Raise EngineError for a token that this model does not have; another model of the run made it."""
        drawn = micro.drawn
        kept = [] if drawn is None else [int(each.ids.max(initial=0)) for each in drawn.kept or ()]
        largest = max(int(micro["tokens"].max()), *kept, *(drawn.logit_bias if drawn else ()), 0)
        if largest >= self._vocabulary:
            raise EngineError(
                f"a sample has the token id {largest}, and {self._source!r} has a vocabulary of "
                f"{self._vocabulary}: the ids begin at 0; give a model that knows all ids of the run's model"
            )

    def _with_blank_image(self, micro: Batch) -> Batch:
        """Return the micro-batch for the model. If the model reads images and there are several parts, add a
        blank image, with an unused output, to a micro-batch without images. Without it, ranks with images
        would wait for this rank forever. Raise EngineError if there are images that the model cannot read."""
        if any(micro.media):
            if not self._reads_images:
                raise EngineError(f"the batch carries images, and model {self._initial!r} reads none")
            return micro
        if self._blank is None:
            return micro
        plain = Batch(micro.lengths, {"tokens": micro["tokens"]}, {})
        return Batch.concat([plain, self._blank])

    def _rows(self, work: list[_Work], max_count: int) -> list[ModelInputs]:
        """Return the rows of each micro-batch, then blank rows up to `max_count`, the maximum over parts."""
        rows = [item.rows for item in work]
        if max_count > len(work):
            blank = Batch([2], {"tokens": torch.zeros(2, dtype=torch.long)}, {})
            rows += [self._work(blank, torch.tensor([False, True])).rows] * (max_count - len(work))
        return rows


@dataclass(frozen=True)
class _Work:
    batch: Batch
    places: Tensor  # (N,) int64, indices of the tokens for which the head's figures are computed
    rows: ModelInputs


def _spread(values: Tensor, work: _Work) -> Tensor:
    """Spread the (N,) figures of the selected tokens over all tokens, (T,), with 0 elsewhere."""
    return torch.zeros(work.batch.num_tokens, device=values.device).index_put((work.places,), values)


class _LossPasses(NamedTuple):
    rows: list[ModelInputs]
    """Inputs of each pass of this rank."""
    loss_of: Callable[[int, Tensor], Tensor]
    """Number and output of a pass -> its part of the loss; it adds the pass's figures to `statistics`."""
    statistics: _Statistics


class _Statistics:
    """Means and maxima over the trained `tokens` of a whole batch, collected micro-batch by micro-batch."""

    def __init__(self, tokens: int) -> None:
        self._tokens = max(1, tokens)
        self._names: list[list[str]] = []
        """Of the figures of each micro-batch."""
        self._values: list[Tensor] = []
        """Of each micro-batch: the loss, the sum of each figure, the maximum of each."""

    def add(self, places: Tensor, loss: Tensor, figures: Mapping[str, Tensor]) -> None:
        """Add a micro-batch's loss, and (T,) figures at these tokens. Nothing is read from the device: the
        host would wait for all work there."""
        self._names.append([*figures])
        values = [values.detach().float() for values in figures.values()]
        picked = torch.stack(values)[:, places] if values else loss.new_empty(0, 1)  # (K, N)
        self._values.append(torch.cat([loss.float()[None], picked.sum(1), picked.amax(1)]))

    def _read(self) -> tuple[dict[str, float], dict[str, float]]:
        sums, maxima = dict[str, float](), dict[str, float]()
        numbers = iter(torch.cat(self._values).tolist() if self._values else ())
        for names in self._names:
            loss, *figures = itertools.islice(numbers, 1 + 2 * len(names))
            sums["loss"] = sums.get("loss", 0.0) + loss
            for name, total, highest in zip(names, figures[: len(names)], figures[len(names) :], strict=True):
                if name.endswith("_max"):
                    maxima[name] = max(highest, maxima.get(name, -math.inf))
                else:
                    sums[name] = sums.get(name, 0.0) + total / self._tokens
        return sums, maxima

    def together(self, layout: Layout) -> dict[str, float]:
        """Return the statistics over all parts, the same in all ranks."""
        result: dict[str, float] = {}
        for sums, maxima in layout.gather(self._read()):
            for name, value in sums.items():
                result[name] = result.get(name, 0.0) + value
            for name, value in maxima.items():
                result[name] = max(value, result.get(name, -math.inf))
        return result


def _align(model: nn.Module) -> None:
    """Copy tensors that a mapped file misaligns into torch's memory: alignment may change results' bits."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.data_ptr() % _ALIGNMENT:
            tensor.data = tensor.data.clone()


def _blank_image(model: str) -> Batch:
    prompt = Vision(model).blank()
    tokens = torch.from_numpy(prompt.ids.astype("int64"))
    media = {name: torch.from_numpy(array) for name, array in prompt.media.items()}
    return Batch([len(tokens)], {"tokens": tokens}, {}, [media])


def _copy_tokenizer(source: str, folder: Path) -> None:
    """Copy a model's tokenizer to a folder, unchanged. `AutoTokenizer` would save a different
    one if its class for the model's type does not match `tokenizer.json`: a Qwen2 model gets Qwen2's
    pre-tokenizer and normalizer."""
    _copy_files(source, TOKENIZER_FILES, folder)
    if not (folder / "tokenizer.json").exists():
        AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    source_folder = folder_of_model(source)
    if source_folder is not None and (templates := Path(source_folder, "additional_chat_templates")).is_dir():
        shutil.copytree(templates, folder / templates.name, dirs_exist_ok=True)


def _copy_files(source: str, names: Sequence[str], folder: Path) -> None:
    for name in names:
        file = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
        if file is not None:
            shutil.copyfile(file, folder / name)
