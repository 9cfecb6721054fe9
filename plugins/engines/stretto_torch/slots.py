"""The running samples: one row each, decoded together, token by token.

Rows 0..n-1 are in the order in which `size_classes.py` places their keys and values, so a step computes only
running samples and attention reads few unused positions. A sample's other state is in its lane, which never
moves. n: running samples, V: vocabulary, L: tokens of a slot.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.array import KeptTokens
from stretto.engine import Finish
from stretto_torch import PREFILL_TOKENS
from stretto_torch.decoder import Decoder
from stretto_torch.kv import Block, Move
from stretto_torch.prefixes import Prefixes
from stretto_torch.sampling import Bias, SamplingSettings, draw, uniforms
from stretto_torch.shapes import Shapes, padded_prompt
from stretto_torch.size_classes import SizeClasses
from stretto_torch.slot_sample import SlotSample

# A sample gets a slot only if all samples then have room for this many more tokens, or one might leave soon.
_HEADROOM = 64


@dataclass(frozen=True, slots=True)
class SlotOutput:
    """Some tokens of an answer, with the logprob and the version of each."""

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    kept: KeptTokens | None = None


NO_TOKENS = SlotOutput(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32))


@dataclass(frozen=True, slots=True)
class _SharedPrompt:
    """A prompt that was computed for one sample of a request, so that the other samples can copy it."""

    lender: SlotSample  # the running sample whose slot holds the prompt's keys and values
    logits: Tensor  # (V,) float32, the logits after the last token of the prompt


@dataclass(frozen=True, slots=True)
class SampleEnding:
    """A sample that has drawn its last token and left its slot."""

    sample: SlotSample
    finish: Finish
    error: str
    unsent: SlotOutput  # the part of the answer that has not been sent yet


class Slots:
    """Rows and lanes of the running samples.

    `image_token`: id of image tokens, -1 for a model of text; a sample that draws it ends with an error.
    `deterministic`: a sample's bits do not depend on other samples. Every prompt is computed whole, with
    prompts of the same padded length, and no sample must leave its slot.
    """

    def __init__(
        self, decoder: Decoder, shapes: Shapes, image_token: int = -1, *, deterministic: bool
    ) -> None:
        self._decoder = decoder
        self._cache = decoder.cache
        self._shapes = shapes
        self._image_token = image_token
        self._deterministic = deterministic
        self._size_classes = SizeClasses(
            shapes,
            decoder.cache.tokens,
            one_size_class=decoder.one_size_class,
            prefers_one=decoder.prefers_one_size_class,
        )
        self._device = decoder.cache.device
        saves = self._device.type == "cpu"  # a GPU's memory is taken as a whole
        self._prefixes = None if deterministic else Prefixes(decoder.cache.tokens, saves=saves)

        self.prefix_hits = 0  # samples for which a prefix of their text was in the cache
        self.prefix_tokens = 0  # total length of these prefixes
        self.kv_used = 0.0  # share of the cache that the blocks of running samples take
        self.running: list[SlotSample] = []  # by row
        # By row: last drawn token, which is not in the cache yet, and its position. Dead rows: 0, 0.
        self._token = np.zeros(shapes.most_rows, np.int64)
        self._position = np.zeros(shapes.most_rows, np.int64)
        self._lane = np.zeros(shapes.most_rows, np.int64)
        self._blocks: list[Block | None] = []  # of each running sample; None for a new sample
        self._class_rows: list[tuple[int, int]] = []  # rows start..stop-1 of each size class
        self._steps_in_order = 0  # steps that may pass before a row's block is full
        self._shared_prompts: dict[str, _SharedPrompt] = {}  # by request, computed with the current weights
        # By lane, then by position in prompt + answer.
        self.count = lanes = shapes.slots
        self._free_lanes = list(range(lanes))
        self._ids = np.zeros((lanes, shapes.length), np.int32)
        self._uniforms = np.zeros((lanes, shapes.length), np.float32)
        self._logprobs = np.zeros((lanes, shapes.length), np.float32)
        self._versions = np.zeros((lanes, shapes.length), np.int32)
        # By lane.
        self._shift = np.zeros(lanes, np.int64)  # `PromptImages.shift`
        self._limit = np.zeros(lanes, np.int64)  # position after the last one that the sample may fill
        self._is_end = np.zeros((lanes, decoder.vocabulary), np.bool_)  # the token ends the sample
        self._has_stops = np.zeros(lanes, np.bool_)  # the request has stop strings
        self._plain = np.ones(lanes, np.bool_)  # temperature 1, and no logit is changed or masked
        self._temperature = np.ones(lanes, np.float32)
        self._top_k = np.zeros(lanes, np.int64)
        self._top_p = np.ones(lanes, np.float32)
        self._min_p = np.zeros(lanes, np.float32)
        self._bias: dict[int, dict[int, float]] = {}
        self._wants_kept = np.zeros(lanes, np.bool_)
        self._kept: dict[int, list[NDArray[np.int32]]] = {}  # by lane, the kept ids of each drawn token

    @property
    def free(self) -> int:
        """Number of slots without a sample."""
        return len(self._free_lanes)

    def fits(self, samples: Sequence[SlotSample]) -> bool:
        """Return whether the cache has room for these samples in addition to the running ones."""
        lanes = self._lane[: len(self.running)]
        needs = self._limit[lanes]
        new_needs = [_limit(sample) for sample in samples]
        if not self._deterministic:
            needs = np.minimum(self._position[: len(lanes)] + 1 + _HEADROOM, needs)
            lengths = (len(sample.prompt) + len(sample.begun) for sample in samples)
            new_needs = [min(n + 1 + _HEADROOM, limit) for n, limit in zip(lengths, new_needs, strict=True)]
        return self._size_classes.fits([*needs.tolist(), *new_needs])

    @property
    def lost_tokens(self) -> int | None:
        """Tokens computed again because the cache was too small; None without a prefix cache."""
        return self._prefixes and self._prefixes.lost_tokens

    def surplus(self) -> list[SlotSample]:
        """Return the samples, last arrived first, that must leave to make room for the next step."""
        if self._steps_in_order:
            return []
        needs = dict(zip(self.running, (self._position[: len(self.running)] + 1).tolist(), strict=True))
        preempted: list[SlotSample] = []
        while not self._size_classes.fits([*needs.values()]):
            preempted.append(max(needs, key=lambda sample: sample.place))
            del needs[preempted[-1]]
        return preempted

    def admit(self, samples: Sequence[SlotSample], version: int) -> list[SampleEnding]:
        """Give each sample a slot, compute its prompt and draw its first token."""
        for sample in samples:
            self._seat(sample)
        computed = self._samples_to_compute(samples)
        prefixes = self._find_and_hold_prefixes(computed)
        self._arrange(range(len(self.running)), prefixes=prefixes)
        logits = self._prefill(
            [s.row for s in computed], [prefixes[s][1] if s in prefixes else 0 for s in computed]
        )
        prompt_logits = self._share_prompts(samples, dict(zip(computed, logits, strict=True)))
        return self._append(np.array([sample.row for sample in samples]), prompt_logits, version)

    def step(self, version: int) -> list[SampleEnding]:
        """Draw one more token of every running sample. `surplus` must be empty."""
        live = len(self.running)
        if self._steps_in_order == 0:
            self._arrange(range(live))
        self._steps_in_order -= 1
        rows = self._shapes.rows(live)
        logits = self._decoder.decode(
            torch.from_numpy(self._token[:rows]).to(self._device),
            torch.from_numpy(self._position[:rows]).to(self._device),
            self._shapes.spans(self._position[:live], self._class_rows),
            self._shifts(slice(rows)),
        )
        self._position[:live] += 1
        return self._append(np.arange(live), logits[:live], version)

    def length(self, sample: SlotSample) -> int:
        """Return the number of tokens in a running sample's answer so far."""
        return int(self._position[sample.row]) + 1 - len(sample.prompt)

    def answer(self, sample: SlotSample, start: int) -> SlotOutput:
        """Return a running sample's answer from its token `start` on."""
        lane, prompt_length = self._lane[sample.row], len(sample.prompt)
        part = slice(prompt_length + start, self._position[sample.row] + 1)
        kept_tokens = None
        if self._wants_kept[lane] and start >= len(sample.begun):
            begun = len(sample.begun)
            kept_tokens = KeptTokens.of(self._kept[int(lane)][start - begun : self.length(sample) - begun])
        return SlotOutput(
            self._ids[lane, part].copy(),
            self._logprobs[lane, part].copy(),
            self._versions[lane, part].copy(),
            kept_tokens,
        )

    def remove(self, samples: Iterable[SlotSample]) -> None:
        """Free the slots of some running samples."""
        former_texts: list[tuple[Block, NDArray[np.int32]]] = []
        for sample in samples:
            lane = int(self._lane[sample.row])
            self._free_lanes.append(lane)
            if (
                shared_prompt := self._shared_prompts.get(sample.request.id)
            ) and shared_prompt.lender is sample:
                del self._shared_prompts[sample.request.id]
            if self._prefixes is not None:
                self._prefixes.release(sample)
                if sample.pure:
                    former_texts.append((self._cache.blocks[sample.row], self._text(sample)))
            sample.row = -1
        self._arrange([row for row, sample in enumerate(self.running) if sample.row >= 0], former_texts)

    def weights_changed(self, version: int, *, recompute: bool) -> list[SampleEnding]:
        """Continue with new weights: recompute keys and values with them, or keep those in the cache."""
        self._shared_prompts.clear()
        if self._prefixes is not None:
            self._prefixes.clear()
        for sample in self.running:
            sample.pure = recompute
        if not recompute or not self.running:
            return []
        logits = self._prefill(range(len(self.running)))
        # Remove these samples before a block is moved or cached: `SlotCache` must never contain NaN.
        finite = torch.stack([row_logits.logsumexp(-1) for row_logits in logits]).isfinite().tolist()
        endings = [self._not_finite(row, version) for row, is_finite in enumerate(finite) if not is_finite]
        self.remove([ending.sample for ending in endings])
        return endings

    # -------------------------------------------------------------------------------- new samples

    def _seat(self, sample: SlotSample) -> None:
        sample.row = len(self.running)
        sample.pure = True
        self.running.append(sample)
        self._blocks.append(None)
        lane = self._free_lanes.pop()
        sampling, prompt = sample.request.sampling, len(sample.prompt)
        length = prompt + len(sample.begun)
        self._lane[sample.row] = lane
        self._position[sample.row] = length
        self._ids[lane] = 0
        self._ids[lane, :prompt] = sample.prompt
        self._ids[lane, prompt:length] = sample.begun
        self._limit[lane] = _limit(sample)
        self._shift[lane] = sample.images.shift if sample.images else 0
        self._is_end[lane] = False
        self._is_end[lane, [*sample.source.ends]] = True
        self._has_stops[lane] = sample.stops is not None
        self._uniforms[lane, prompt : self._limit[lane]] = uniforms(sample.seed, sampling.max_tokens)
        self._temperature[lane] = sampling.temperature
        self._top_k[lane] = sampling.top_k
        self._top_p[lane] = sampling.top_p
        self._min_p[lane] = sampling.min_p
        self._bias.pop(lane, None)
        if sampling.logit_bias:
            self._bias[lane] = sampling.logit_bias
        self._plain[lane] = sampling.temperature == 1 and not sampling.reshapes
        self._wants_kept[lane] = sample.request.wants_kept and sampling.truncates
        self._kept[lane] = []

    def _samples_to_compute(self, samples: Sequence[SlotSample]) -> list[SlotSample]:
        """Return the samples whose prompt must be computed. The others copy a prompt of the same request."""
        first_of_request: dict[str, SlotSample] = {}
        for sample in samples:
            if not len(sample.begun) and sample.request.id not in self._shared_prompts:
                first_of_request.setdefault(sample.request.id, sample)
        return [s for s in samples if len(s.begun) or first_of_request.get(s.request.id) is s]

    def _find_and_hold_prefixes(self, samples: Sequence[SlotSample]) -> dict[SlotSample, tuple[Block, int]]:
        if self._prefixes is None:
            return {}
        prefixes: dict[SlotSample, tuple[Block, int]] = {}
        texts = [self._text(sample) for sample in samples]
        for sample, text in zip(samples, texts, strict=True):
            if prefix := self._prefixes.find(text):
                source, length = prefix
                if sample.images is not None and length < sample.images.end:
                    continue  # the prefix lacks some images
                prefixes[sample] = (
                    self._cache.blocks[source.row] if isinstance(source, SlotSample) else source,
                    length,
                )
        for sample, text in zip(samples, texts, strict=True):  # after every find: they are not computed yet
            self._prefixes.hold(sample, text)
        self.prefix_hits += len(prefixes)
        self.prefix_tokens += sum(length for _, length in prefixes.values())
        return prefixes

    def _text(self, sample: SlotSample) -> NDArray[np.int32]:
        """Return the text in a running sample's slot, with its images' salt in place of image tokens."""
        text = self._ids[self._lane[sample.row], : self._position[sample.row]].copy()
        if sample.images is not None:
            text[sample.images.places] = sample.images.salt
        return text

    def _shifts(self, rows: NDArray[np.int64] | slice) -> Tensor | None:
        if self._image_token < 0:
            return None
        return torch.from_numpy(self._shift[self._lane[rows]]).to(self._device)

    def _share_prompts(self, samples: Sequence[SlotSample], logits: dict[SlotSample, Tensor]) -> Tensor:
        """Copy prompts to the other samples of their request; return the prompts' (samples, V) logits."""
        for sample in logits:
            if not len(sample.begun):
                self._shared_prompts[sample.request.id] = _SharedPrompt(sample, logits[sample])
        moves: list[Move] = []
        for sample in samples:
            if sample not in logits:
                shared_prompt = self._shared_prompts[sample.request.id]
                blocks = self._cache.blocks[shared_prompt.lender.row], self._cache.blocks[sample.row]
                moves.append(Move(*blocks, len(sample.prompt)))
                logits[sample] = shared_prompt.logits
        if moves:
            self._cache.copy(moves)
        return torch.stack([logits[sample] for sample in samples])

    def _prefill(self, rows: Sequence[int], begins: Sequence[int] | None = None) -> list[Tensor]:
        """Compute each row's known tokens after the first `begins[i]`; return the (V,) logits after them."""
        begins = begins or [0] * len(rows)
        lengths = self._position[list(rows)].tolist()
        logits_by_index: dict[int, Tensor] = {}
        with_images = [i for i in range(len(rows)) if self.running[rows[i]].images and not begins[i]]
        text_only = [i for i in range(len(rows)) if not begins[i] and i not in with_images]
        continued = [i for i in range(len(rows)) if begins[i]]
        batches = [*self._batches(text_only, lengths), *self._batches(continued, lengths)]
        for batch in [*batches, *([i] for i in with_images)]:
            logits = self._prefill_batch(
                np.array([rows[i] for i in batch]),
                np.array([begins[i] for i in batch]),
                np.array([lengths[i] for i in batch]),
            )
            logits_by_index.update(zip(batch, logits, strict=True))
        return [logits_by_index[i] for i in range(len(rows))]

    def _prefill_batch(
        self, rows: NDArray[np.int64], begins: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> Tensor:
        columns = np.arange(padded_prompt(int((lengths - begins).max())))
        positions = np.minimum(begins[:, None] + columns, self._shapes.length - 1)
        tokens = self._ids[self._lane[rows][:, None], positions].astype(np.int64)
        return self._decoder.prefill(
            torch.from_numpy(tokens).to(self._device),
            torch.from_numpy(lengths - begins).to(self._device),
            torch.from_numpy(rows).to(self._device),
            torch.from_numpy(begins).to(self._device) if begins.any() else None,
            shifts=self._shifts(rows) if begins.any() else None,
            images=None if begins.any() else self.running[rows[0]].images,
        )

    def _batches(self, indices: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
        """Divide texts into prefills; texts of about the same length share one."""
        if self._deterministic:
            batches = self._shapes.prompt_batches([lengths[i] for i in indices])
            return [[indices[i] for i in batch] for batch in batches]
        batches: list[list[int]] = []
        longest = padding = 0
        for i in sorted(indices, key=lengths.__getitem__, reverse=True):
            padding += longest - lengths[i]
            full = bool(batches) and (len(batches[-1]) + 1) * longest > PREFILL_TOKENS
            if not batches or full or padding > self._decoder.cheap_padding:
                batches.append([])
                longest, padding = lengths[i], 0
            batches[-1].append(i)
        return batches

    # ------------------------------------------------------------------------------------ tokens

    def _append(self, rows: NDArray[np.int64], logits: Tensor, version: int) -> list[SampleEnding]:
        """Draw a token for each of these rows from their logits (rows, V). Remove and return the samples that
        end."""
        lane, position = self._lane[rows], self._position[rows]
        tokens, logprobs, kept_ids = draw(logits, self._uniforms[lane, position], self._settings(lane))
        for index, ids in kept_ids.items():
            self._kept[int(lane[index])].append(ids)
        self._token[rows] = tokens
        self._ids[lane, position] = tokens
        self._logprobs[lane, position] = logprobs
        self._versions[lane, position] = version
        stopped = self._is_end[lane, tokens] | ~np.isfinite(logprobs) | (tokens == self._image_token)
        for i in self._has_stops[lane].nonzero()[0].tolist():
            sample = self.running[rows[i]]
            assert sample.stops is not None, "its lane has stop strings"
            stopped[i] |= sample.stops.end(self.answer(sample, 0).tokens)
        ended = stopped | (position + 1 >= self._limit[lane])
        endings = [self._ending(int(rows[i]), bool(stopped[i]), version) for i in ended.nonzero()[0]]
        if endings:
            self.remove([ending.sample for ending in endings])
        return endings

    def _settings(self, lane: NDArray[np.int64]) -> SamplingSettings | None:
        if self._plain[lane].all():
            return None
        return SamplingSettings(
            self._temperature[lane],
            self._top_k[lane],
            self._top_p[lane],
            self._min_p[lane],
            self._biases(lane),
            self._wants_kept[lane] if self._wants_kept[lane].any() else None,
        )

    def _biases(self, lane: NDArray[np.int64]) -> Bias | None:
        biases = [
            (i, self._bias[lane_index])
            for i, lane_index in enumerate(lane.tolist())
            if lane_index in self._bias
        ]
        if not biases:
            return None
        return Bias(
            np.repeat([i for i, _ in biases], [len(bias) for _, bias in biases]),
            np.concatenate([list(bias) for _, bias in biases]),
            np.concatenate([np.array([*bias.values()], np.float32) for _, bias in biases]),
        )

    def _ending(self, row: int, stopped: bool, version: int) -> SampleEnding:
        if not np.isfinite(self._logprobs[self._lane[row], self._position[row]]):
            self._position[row] -= 1  # the drawn token is not valid
            return self._not_finite(row, version)
        sample = self.running[row]
        if self._ids[self._lane[row], self._position[row]] == self._image_token:
            error = f"the model sampled the token of images, {self._image_token}"
            return SampleEnding(sample, "error", error, NO_TOKENS)
        return SampleEnding(sample, "stop" if stopped else "length", "", self.answer(sample, sample.sent))

    def _not_finite(self, row: int, version: int) -> SampleEnding:
        """End a sample whose logits are not finite: zero its keys and values, and do not cache its text."""
        self._cache.clear(row)
        sample = self.running[row]
        sample.pure = False
        error = f"the logits of version {version} are not finite"
        return SampleEnding(sample, "error", error, self.answer(sample, sample.sent))

    # -------------------------------------------------------------------------------------- rows

    def _arrange(
        self,
        rows: Sequence[int],
        former_texts: Sequence[tuple[Block, NDArray[np.int32]]] = (),
        prefixes: Mapping[SlotSample, tuple[Block, int]] = MappingProxyType({}),
    ) -> None:
        """Keep only these rows, in a new order and in large enough blocks. `former_texts`: block and text of
        samples that have just left. `prefixes`: block and length of a new sample's prefix. All is copied at
        once, so a source may overlap a new block."""
        positions = self._position[: len(self.running)].tolist()
        blocks = [self._blocks[row] for row in rows]
        needs = [positions[row] + 1 for row in rows]
        if not self._size_classes.fits(needs):  # some samples will leave before the next step, see `surplus`
            needs = [positions[row] for row in rows]
        plan = self._size_classes.plan(needs, blocks)
        self.kv_used = 1 - (plan.free[1] - plan.free[0]) / self._cache.tokens
        moves: list[Move] = []
        self._steps_in_order = self._shapes.length
        for i, target in zip(plan.order, plan.blocks, strict=False):
            source, length = blocks[i], positions[rows[i]]
            self._steps_in_order = min(self._steps_in_order, target.capacity - length)
            if source is None:
                source, length = prefixes.get(self.running[rows[i]], (None, 0))
            if source is not None and source != target:
                moves.append(Move(source, target, length))
        if self._prefixes is not None:
            moves += self._prefixes.arrange(plan.free, former_texts)
        if moves:
            self._cache.copy(moves)
        self._cache.place(plan.blocks)

        live = len(plan.order)
        order = np.array([rows[i] for i in plan.order], np.int64)
        for column in (self._token, self._position, self._lane):
            column[:live] = column[order]
            column[live:] = 0
        self.running = [self.running[rows[i]] for i in plan.order]
        for row, sample in enumerate(self.running):
            sample.row = row
        self._blocks = [*plan.blocks[:live]]
        self._class_rows = plan.size_classes


def _limit(sample: SlotSample) -> int:
    return len(sample.prompt) + sample.request.sampling.max_tokens
