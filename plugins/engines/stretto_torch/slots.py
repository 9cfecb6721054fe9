"""The running samples: one row each, decoded together, token by token.

Running samples stand in rows 0..n-1, longer ones first, so that a step computes live rows only and each
span of rows attends no further than it must. When rows move, their keys and values move with them; what
is kept of a sample besides stands in its lane, which never moves.

n: running samples, V: vocabulary, L: tokens of a slot.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.engine import Finish
from stretto_torch.decoder import Decoder
from stretto_torch.requests import Job, Sample, SharedPrompt
from stretto_torch.sampling import Settings, draw, uniforms
from stretto_torch.shapes import Shapes, padded_prompt

# Tokens in one prefill; bounds its memory.
_PREFILL_TOKENS = 8192
_FREED = -1  # the class of a row whose sample has left


@dataclass(frozen=True, slots=True)
class Answer:
    """Some tokens of an answer, with what is known of each."""

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]


NO_TOKENS = Answer(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32))


@dataclass(frozen=True, slots=True)
class Ending:
    """A sample that has drawn its last token and left its slot."""

    sample: Sample
    finish: Finish
    error: str
    unsent: Answer
    """What of the answer was not sent yet."""


class Slots:
    """Rows and lanes of the running samples.

    Args:
        decoder: the model.
        shapes: shapes to compute with.
        eos: tokens that end an answer.
        one_by_one: whether every prompt is computed by itself, so that its bits depend on it alone.
    """

    def __init__(self, decoder: Decoder, shapes: Shapes, eos: Iterable[int], *, one_by_one: bool) -> None:
        self._decoder = decoder
        self._shapes = shapes
        self._one_by_one = one_by_one
        self._is_eos = np.zeros(decoder.vocabulary, np.bool_)
        self._is_eos[list(eos)] = True
        self._device = decoder.cache.device

        self.running: list[Sample] = []  # by row
        # By row: last drawn token, which is not in the cache yet, and its position. Dead rows: 0, 0.
        self._token = np.zeros(shapes.most_rows, np.int64)
        self._position = np.zeros(shapes.most_rows, np.int64)
        self._lane = np.zeros(shapes.most_rows, np.int64)
        self._steps_in_order = 0  # so many steps may pass before a row is in another class
        # By lane, then by position in prompt + answer.
        lanes = shapes.slots
        self._free_lanes = list(range(lanes))
        self._ids = np.zeros((lanes, shapes.length), np.int32)
        self._uniforms = np.zeros((lanes, shapes.length), np.float32)
        self._logprobs = np.zeros((lanes, shapes.length), np.float32)
        self._versions = np.zeros((lanes, shapes.length), np.int32)
        # By lane.
        self._limit = np.zeros(lanes, np.int64)  # position after the last one it may fill
        self._plain = np.ones(lanes, np.bool_)  # temperature 1, all tokens kept
        self._temperature = np.ones(lanes, np.float32)
        self._top_k = np.zeros(lanes, np.int64)
        self._top_p = np.ones(lanes, np.float32)

    @property
    def free(self) -> int:
        """Slots without a sample."""
        return len(self._free_lanes)

    def admit(self, samples: Sequence[Sample], version: int) -> list[Ending]:
        """Give each sample a slot, compute its prompt and draw its first token."""
        first = len(self.running)
        for sample in samples:
            self._seat(sample)
        endings = self._append(first, self._prefill_new(samples), version)
        self.remove([ending.sample for ending in endings])  # which also brings the others into order
        return endings

    def step(self, version: int) -> list[Ending]:
        """Draw one more token of every running sample."""
        if self._steps_in_order == 0:
            self._arrange()
        self._steps_in_order -= 1
        live = len(self.running)
        rows = self._shapes.rows(live)
        logits = self._decoder.decode(
            torch.from_numpy(self._token[:rows]).to(self._device),
            torch.from_numpy(self._position[:rows]).to(self._device),
            self._shapes.spans(self._position[:live], self._decoder.classes),
        )
        endings = self._append(0, logits[:live], version)
        if endings:
            self.remove([ending.sample for ending in endings])
        return endings

    def length(self, sample: Sample) -> int:
        """Tokens of a running sample's answer so far."""
        return int(self._position[sample.row]) + 1 - len(sample.job.prompt)

    def answer(self, sample: Sample, start: int) -> Answer:
        """A running sample's answer from its token `start` on."""
        lane, first = self._lane[sample.row], len(sample.job.prompt)
        part = slice(first + start, self._position[sample.row] + 1)
        return Answer(
            self._ids[lane, part].copy(), self._logprobs[lane, part].copy(), self._versions[lane, part].copy()
        )

    def remove(self, samples: Iterable[Sample]) -> None:
        """Free the slots of some running samples."""
        for sample in samples:
            self._free_lanes.append(int(self._lane[sample.row]))
            self._token[sample.row] = self._position[sample.row] = 0
            sample.row = -1
        self._arrange()

    def recompute(self) -> None:
        """Compute all keys and values anew, with the weights of now."""
        live = len(self.running)
        self._prefill(range(live), self._position[:live].tolist())

    # -------------------------------------------------------------------------------- new samples

    def _seat(self, sample: Sample) -> None:
        """Give a sample the next row and a lane, with everything but keys and values."""
        sample.row = len(self.running)
        self.running.append(sample)
        lane = self._free_lanes.pop()
        job, sampling = sample.job, sample.job.request.sampling
        prompt = len(job.prompt)
        known = prompt + len(sample.begun)
        self._lane[sample.row] = lane
        self._position[sample.row] = known - 1
        self._ids[lane] = 0
        self._ids[lane, :prompt] = job.prompt
        self._ids[lane, prompt:known] = sample.begun
        self._limit[lane] = prompt + sampling.max_tokens
        self._uniforms[lane, prompt : self._limit[lane]] = uniforms(sample.seed, sampling.max_tokens)
        self._temperature[lane] = sampling.temperature
        self._top_k[lane] = sampling.top_k
        self._top_p[lane] = sampling.top_p
        self._plain[lane] = sampling.temperature == 1 and not sampling.top_k and sampling.top_p == 1

    def _prefill_new(self, samples: Sequence[Sample]) -> Tensor:
        """Fill the slots of newly seated samples: (samples, V) logits after what they came with.

        The prompt of a job is computed for one of its samples and copied to the others, as long as that
        one is running and the weights do not change.
        """
        first: dict[Job, Sample] = {}
        for sample in samples:
            if not len(sample.begun) and not sample.job.prompt_is_lent:
                first.setdefault(sample.job, sample)
        computed = [s for s in samples if len(s.begun) or first.get(s.job) is s]
        rows = [s.row for s in computed]
        logits = dict(zip(computed, self._prefill(rows, (self._position[rows] + 1).tolist()), strict=True))
        for job, sample in first.items():
            job.shared = SharedPrompt(sample, logits[sample])

        copies: dict[Job, list[Sample]] = {}
        for sample in samples:
            if sample not in logits:
                copies.setdefault(sample.job, []).append(sample)
        for job, borrowers in copies.items():
            assert job.shared is not None
            rows = [sample.row for sample in borrowers]
            self._decoder.cache.spread(job.shared.lender.row, rows, len(job.prompt))
            logits.update(dict.fromkeys(borrowers, job.shared.logits))
        return torch.stack([logits[sample] for sample in samples])

    def _prefill(self, rows: Sequence[int], lengths: Sequence[int]) -> list[Tensor]:
        """Compute the first `lengths[i]` tokens of each row: (V,) logits after them, in the order given."""
        found: dict[int, Tensor] = {}
        for batch in self._batches(lengths):
            its_rows = np.array([rows[i] for i in batch])
            its_lengths = torch.tensor([lengths[i] for i in batch])
            tokens = self._ids[self._lane[its_rows], : padded_prompt(int(its_lengths.max()))]
            logits = self._decoder.prefill(
                torch.from_numpy(tokens.astype(np.int64)).to(self._device),
                its_lengths.to(self._device),
                torch.from_numpy(its_rows).to(self._device),
            )
            found.update(zip(batch, logits, strict=True))
        return [found[i] for i in range(len(rows))]

    def _batches(self, lengths: Sequence[int]) -> list[list[int]]:
        """Cut prompts into prefills, together those of about the same length."""
        if self._one_by_one:
            return [[i] for i in range(len(lengths))]
        batches: list[list[int]] = []
        longest = padding = 0
        for i in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
            padding += longest - lengths[i]
            full = bool(batches) and (len(batches[-1]) + 1) * longest > _PREFILL_TOKENS
            if not batches or full or padding > self._decoder.cheap_padding:
                batches.append([])
                longest, padding = lengths[i], 0
            batches[-1].append(i)
        return batches

    # ------------------------------------------------------------------------------------ tokens

    def _append(self, first: int, logits: Tensor, version: int) -> list[Ending]:
        """Draw a token for each row from `first` on, given their logits (rows, V)."""
        rows = slice(first, len(self.running))
        self._position[rows] += 1
        lane, position = self._lane[rows], self._position[rows]
        tokens, logprobs = draw(logits, self._uniforms[lane, position], self._settings(lane))
        self._token[rows] = tokens
        self._ids[lane, position] = tokens
        self._logprobs[lane, position] = logprobs
        self._versions[lane, position] = version
        stopped = self._is_eos[tokens] | ~np.isfinite(logprobs) | self._stop_strings(rows)
        ended = stopped | (position + 1 >= self._limit[lane])
        return [self._ending(first + int(i), bool(stopped[i]), version) for i in ended.nonzero()[0]]

    def _settings(self, lane: NDArray[np.int64]) -> Settings | None:
        if self._plain[lane].all():
            return None
        return Settings(self._temperature[lane], self._top_k[lane], self._top_p[lane])

    def _stop_strings(self, rows: slice) -> NDArray[np.bool_] | bool:
        """Rows (of a slice of all) whose last token completed a stop string."""
        samples = self.running[rows]
        if not any(sample.job.stops for sample in samples):
            return False
        completed = [
            sample.job.stops is not None and sample.job.stops.end(self.answer(sample, 0).tokens)
            for sample in samples
        ]
        return np.array(completed)

    def _ending(self, row: int, stopped: bool, version: int) -> Ending:
        sample, finish, error = self.running[row], "stop" if stopped else "length", ""
        if not np.isfinite(self._logprobs[self._lane[row], self._position[row]]):
            finish, error = "error", f"the logits of version {version} are not finite"
            self._position[row] -= 1  # what was drawn is no token
            self._decoder.cache.clear(row)
        return Ending(sample, finish, error, self.answer(sample, sample.sent))

    # -------------------------------------------------------------------------------------- rows

    def _arrange(self) -> None:
        """Bring the rows into order: longer classes first, freed rows last and out."""
        # In plain Python: for some dozens of rows that is several times faster than in numpy.
        positions = self._position[: len(self.running)].tolist()
        cuts = self._decoder.classes if self._shapes.splits(len(positions)) else ()
        classes = [bisect_right(cuts, position) if position else _FREED for position in positions]
        wanted = sorted(classes, reverse=True)
        for row, its_class in enumerate(wanted):
            if classes[row] != its_class:
                other = len(classes) - 1
                while classes[other] != its_class or wanted[other] == its_class:
                    other -= 1
                self._exchange(row, other)
                classes[row], classes[other] = classes[other], classes[row]
        live = len(classes) - classes.count(_FREED)
        del self.running[live:]
        positions = self._position[:live].tolist()
        to_go = [cuts[c] - position for c, position in zip(classes, positions, strict=False) if c < len(cuts)]
        self._steps_in_order = min(to_go, default=self._shapes.length)

    def _exchange(self, row: int, other: int) -> None:
        """Let two rows change places; `other` is live, `row` may be freed."""
        cache = self._decoder.cache
        lengths = self._position[[row, other]].tolist()
        if lengths[0]:
            cache.exchange(row, other, max(lengths))
        else:
            cache.move(other, row, lengths[1])
        for column in (self._token, self._position, self._lane):
            column[[row, other]] = column[[other, row]]
        one, two = self.running[row], self.running[other]
        self.running[row], self.running[other] = two, one
        two.row = row
        if one.row >= 0:
            one.row = other
