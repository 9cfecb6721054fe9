"""The contract of algorithms as tests. They need torch, and no model: each model of the algorithm is a table.

T tokens and S sequences of a batch; V = 256 tokens, the bytes.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import numpy as np
import pytest

from stretto.algorithm import Algorithm, Call, Group, Loss, Model, Stateful
from stretto.assembly.dataflow import Graph, graph_of
from stretto.component import Kind
from stretto.models.tokenizer import ByteTokenizer
from stretto.testing.component import ComponentConformance, ComponentUnderTest

if TYPE_CHECKING:
    from torch import Tensor

    from stretto.rl.batch import Batch

__all__ = ["AlgorithmConformance"]

_VOCABULARY = 256
_USED = 8
"""Number of tokens that a policy samples in the beginning, all with the same probability."""
_TARGET = 7  # the token whose share is the reward
_LONGEST = 6  # answers have fewer tokens than this
_FALL = 0.02  # least relative fall of the loss on rows
_GROUPS = 8  # groups in a batch


class _LookupModel:
    """A model whose output at a token depends only on this token and the one before it."""

    def __init__(self, model: Model, *, samples: bool) -> None:
        import torch

        generator = torch.Generator().manual_seed(1)
        self.head = model.head
        table = 0.1 * torch.randn(_VOCABULARY, _VOCABULARY, generator=generator)
        if samples:
            table[:, _USED:] = -10.0
        if samples and not model.trainable:  # a reference or a teacher; it knows the task
            table[:, _TARGET] += 3.0
        self.table = table.requires_grad_(model.trainable)
        self._optimizer = torch.optim.Adam([self.table], lr=0.1) if model.trainable else None

    def output(self, batch: Batch) -> Tensor:
        """Return the output of the head at each token, (T,) float32, with gradient."""
        import torch

        tokens = batch["tokens"]  # (T,)
        first = torch.zeros(len(tokens), dtype=torch.bool)
        first[torch.tensor(batch.starts())] = True
        before = tokens.roll(1)
        if self.head == "reward":
            return self.table[tokens, 0]
        outputs = (
            self.table[before, 0]
            if self.head == "value"
            else torch.log_softmax(self.table, -1)[before, tokens]
        )
        return torch.where(first, 0.0, outputs)

    def gradient(self, call: Call, parts: Sequence[Batch]) -> Tensor:
        """Return (V, V) the gradient of the mean loss over all parts, added part by part as by an engine."""
        import torch

        from stretto.rl.functional import loss_count, loss_weights

        loss = call.loss
        assert loss is not None
        self.table.grad = None
        count = sum(
            loss_count(part["loss_mask"], part.sequence_index(), len(part), loss.reduction) for part in parts
        )
        for part in parts:
            mask, index = part["loss_mask"], part.sequence_index()
            losses, statistics = loss.function(self.output(part), part)
            for name, column in {"the loss": losses, **statistics}.items():
                assert column.shape == mask.shape, (
                    f"{call.name}: {name} has the shape {tuple(column.shape)}; expected one number for each "
                    f"of {len(mask)} tokens"
                )
                assert column[mask].isfinite().all(), f"{call.name}: {name} is not finite at a trained token"
            weights = loss_weights(mask, index, len(part), loss.reduction, count=count)
            (torch.where(mask, losses, 0.0) * weights).sum().backward()
        assert self.table.grad is not None, f"{call.name}: the loss does not depend on the model"
        return self.table.grad.clone()

    def step(self, call: Call, batch: Batch) -> None:
        assert self._optimizer is not None
        self.gradient(call, [batch])
        self._optimizer.step()


class _Training:
    """An algorithm with its models: the calls of its dataflow, in order."""

    def __init__(self, algorithm: Algorithm, rows: Sequence[Mapping[str, Any]]) -> None:
        self.algorithm = algorithm
        self.graph: Graph = graph_of(algorithm.calls(), algorithm.models)
        self._rows = rows
        self._random = np.random.default_rng(1)
        self.models = {
            name: _LookupModel(model, samples=self.graph.samples) for name, model in algorithm.models.items()
        }

    @property
    def trained(self) -> list[tuple[Call, _LookupModel, Loss]]:
        return [
            (call, self.models[call.model], call.loss)
            for call in self.graph.calls
            if call.op == "train" and call.model and call.loss
        ]

    def batch(self, *, off_policy: float = 0.0) -> Batch:
        """Return a batch of samples or rows, with all columns that calls write. See `sampled`."""
        return self.completed(self.sampled(off_policy) if self.graph.samples else self._read())

    def completed(self, batch: Batch) -> Batch:
        """Return a batch of the source with the columns that the calls before training write."""
        import torch

        for call in self.graph.step_calls:
            if call.op == "forward":
                assert call.model is not None
                with torch.no_grad():
                    batch = batch.with_columns({call.writes[0]: self.models[call.model].output(batch)})
            elif call.op == "function":
                batch = batch.with_columns(_written(call, batch))
        return batch

    def train(self, batch: Batch) -> None:
        for call, model, _ in self.trained:
            for _ in range(call.epochs):
                for minibatch in _cut(batch, call.minibatches):
                    model.step(call, _only(call, minibatch))

    def kept(self, batch: Batch) -> Batch | None:
        kept = [group for group in _groups(batch) if self.algorithm.keep(_group(group))]
        return batch.concat(kept) if kept else None

    def goal(self) -> float:
        """Return what rises with learning: the mean reward of new samples; for rows, minus the mean loss."""
        if self.graph.samples:
            return float(np.mean([self.sampled()["rewards"].mean().item() for _ in range(4)]))
        import torch

        batch, total = self.batch(), 0.0
        for call, model, loss in self.trained:
            with torch.no_grad():
                losses, _ = loss.function(model.output(batch), _only(call, batch))
            total -= losses[batch["loss_mask"]].mean().item()
        return total

    def sampled(self, off_policy: float = 0.0) -> Batch:
        """Sample groups of answers from the actor; a reward is the share of the target token. `off_policy`:
        standard deviation, in nats, of the noise on the behaviour logprobs."""
        import torch

        from stretto.rl.batch import Batch

        source = self.graph.source
        assert source.model is not None
        probabilities = torch.softmax(self.models[source.model].table.detach(), -1).double().numpy()
        size = _GROUPS * source.samples
        lengths = self._random.integers(2, _LONGEST, size)  # of the answers
        texts: list[list[int]] = []
        for length in lengths:
            text = [1, int(self._random.integers(_USED))]  # the prompt
            for _ in range(length):
                chances = probabilities[text[-1]]
                text.append(int(self._random.choice(_VOCABULARY, p=chances / chances.sum())))
            texts.append(text)
        mask = [[False] * 2 + [True] * (len(text) - 2) for text in texts]
        columns: dict[str, Any] = {
            "tokens": torch.tensor([*itertools.chain(*texts)]),
            "loss_mask": torch.tensor([*itertools.chain(*mask)]),
            "truncated": torch.zeros(size, dtype=torch.bool),
            "group": torch.arange(size) // source.samples,
            "sample": torch.arange(size),
            "rewards": torch.tensor([text[2:].count(_TARGET) / (len(text) - 2) for text in texts]),
        }
        columns["versions"] = torch.where(columns["loss_mask"], 0, -1)
        batch = Batch([len(text) for text in texts], {}, {}).with_columns(columns)
        with torch.no_grad():
            behaviour = self.models[source.model].output(batch)
        noise = torch.tensor(self._random.normal(0, off_policy, len(behaviour)), dtype=torch.float32)
        behaviour = torch.where(batch["loss_mask"], behaviour + noise, 0.0)
        return batch.with_columns({"behaviour_logprobs": behaviour})

    def _read(self) -> Batch:
        import torch

        from stretto.rl.batch import Batch

        source = self.graph.source
        assert source.encode is not None
        tokenizer = ByteTokenizer()
        encoded = [
            source.encode(dict(row), index, tokenizer)
            for row in self._rows
            for index in range(source.samples)
        ]
        for tokens, mask in encoded:
            assert len(tokens) == len(mask) > 0, f"encode made {len(tokens)} tokens, a mask of {len(mask)}"
            assert any(mask), "encode made a sequence with no token to train on"
            assert not mask[0], "encode marks the first token, which has no logprob"
        columns = {
            "tokens": torch.tensor([int(token) for tokens, _ in encoded for token in tokens]),
            "loss_mask": torch.tensor([bool(one) for _, mask in encoded for one in mask]),
            "group": torch.arange(len(encoded)) // source.samples,
        }
        return Batch([len(tokens) for tokens, _ in encoded], {}, {}).with_columns(columns)


def _in_two_parts(batch: Batch) -> Batch:
    """Return a batch whose first sample is two sequences: its first tokens; all, with these as context."""
    import torch

    from stretto.rl.batch import Batch

    first = 3  # two tokens of the prompt, one of the answer
    tokens = {name: torch.cat([column[:first], column]) for name, column in batch.tokens.items()}
    context = slice(first, 2 * first)
    tokens["loss_mask"][context], tokens["versions"][context] = False, -1
    tokens["behaviour_logprobs"][context] = 0.0
    sequences = {name: torch.cat([column[:1], column]) for name, column in batch.sequences.items()}
    return Batch([first, *batch.lengths], tokens, sequences)


def _written(call: Call, batch: Batch) -> Mapping[str, Tensor]:
    """Call a function of the dataflow with the columns that it reads, and check what it writes."""
    assert call.function is not None
    written = call.function(_only(call, batch))
    assert set(written) == set(call.writes), f"{call.name} wrote {sorted(written)}; it names {call.writes}"
    for name, column in written.items():
        assert len(column) in (batch.num_tokens, len(batch)), (
            f"{call.name}: the column {name!r} has {len(column)} entries for {batch.num_tokens} tokens and "
            f"{len(batch)} sequences"
        )
    return written


def _only(call: Call, batch: Batch) -> Batch:
    """Return the batch with only the columns that a call names, as a trainer passes it."""
    from stretto.rl.batch import Batch

    tokens = {name: column for name, column in batch.tokens.items() if name in call.reads}
    sequences = {name: column for name, column in batch.sequences.items() if name in call.reads}
    return Batch(batch.lengths, tokens, sequences)


def _groups(batch: Batch) -> list[Batch]:
    return batch.split([count for count, _ in batch.groups()])


def _cut(batch: Batch, number: int) -> Iterator[Batch]:
    """Yield the minibatches, each of whole groups."""
    groups = _groups(batch)
    for places in np.array_split(np.arange(len(groups)), number):
        if len(places):
            yield batch.concat([groups[place] for place in places])


def _group(batch: Batch) -> Group:
    rewards = batch["rewards"].tolist() if "rewards" in batch else [0.0] * len(batch)
    lengths = [int(part["loss_mask"].sum()) for part in batch.split([1] * len(batch))]
    return Group(tuple(rewards), tuple(lengths))


class AlgorithmConformance(ComponentConformance):
    """The contract of `stretto.algorithm.Algorithm`: a dataflow that can run, a gradient that does not depend
    on how a batch is split, and a tiny task that it learns.

    An algorithm that samples is rewarded with the share of one token; one that reads `rows` must lower its
    loss."""

    kind: ClassVar[Kind] = "algorithm"
    rows: ClassVar[Sequence[Mapping[str, Any]]] = tuple(
        {"prompt": f"{n}+1=", "completion": str(n + 1), "chosen": str(n + 1), "rejected": str(n)}
        for n in range(8)
    )
    """Rows of the dataset, for an algorithm that reads them."""
    steps: ClassVar[int] = 25
    """Number of train steps in which it must learn the tiny task."""
    gain: ClassVar[float] = 0.2
    """Least rise of the mean reward, which is about 1/8 in the beginning."""

    def test_its_dataflow_can_run(self, under_test: ComponentUnderTest) -> None:
        """The kernel makes the same checks, and refuses a run that fails them."""
        algorithm: Algorithm = under_test.make()
        graph = graph_of(algorithm.calls(), algorithm.models)
        trained = {call.model for call in graph.calls if call.op == "train"}
        idle = [name for name, model in algorithm.models.items() if model.trainable and name not in trained]
        assert not idle, f"no call trains the model {idle[0]!r}; make it Model(trainable=False)"

    def test_the_kernel_reads_it_without_torch(self, under_test: ComponentUnderTest) -> None:
        """The kernel never computes, so the module and the factory import no torch."""
        facts = (under_test.composed.document, under_test.context())
        process = subprocess.run(
            [sys.executable, "-c", _KERNEL],
            input=msgspec.msgpack.encode(facts),
            stdout=subprocess.PIPE,
            check=True,
        )
        assert process.stdout.strip() == b"False", "its module, its factory or `calls` imports torch"

    def test_keep_decides_about_any_group(self, under_test: ComponentUnderTest) -> None:
        """Tested with equal and different rewards, and with groups of one sample and of several."""
        algorithm: Algorithm = under_test.make()
        for rewards in ((0.0,), (1.0, 1.0), (0.0, 1.0, 0.5)):
            kept: Any = algorithm.keep(Group(rewards, tuple(range(1, len(rewards) + 1))))
            assert isinstance(kept, bool), f"`keep` returned {kept!r} for the rewards {rewards}"

    def test_the_gradient_does_not_depend_on_the_split(self, under_test: ComponentUnderTest) -> None:
        """Engines split a batch into sequences, or groups if the loss's `unit` asks for them. The samples
        come from a slightly different policy."""
        import torch

        training = _Training(under_test.make(), self.rows)
        batch = training.batch(off_policy=0.2)
        random = np.random.default_rng(3)
        for call, model, loss in training.trained:
            seen = _only(call, batch)
            whole = model.gradient(call, [seen])
            unit = np.array(batch["group"].tolist()) if loss.unit == "group" else np.arange(len(batch))
            for number in (2, 3, len(np.unique(unit))):
                part_of_unit = random.permutation(len(np.unique(unit))) % number
                rows = [np.flatnonzero(part_of_unit[unit] == part).tolist() for part in range(number)]
                split = model.gradient(call, [seen.select(chosen) for chosen in rows if chosen])
                error = (split - whole).abs().max().item()
                assert torch.allclose(split, whole, rtol=1e-4, atol=1e-6), (
                    f"{call.name}: the gradient differs by {error:.2g} in {number} parts; a loss is a number "
                    "for each token, and must not average over the batch"
                )

    def test_a_sample_in_parts_counts_once(self, under_test: ComponentUnderTest) -> None:
        """A conversation may be several sequences with one number in the column `sample`. Its tokens and
        those of the other samples then have the same losses. If its own change, as with a critic, the others'
        may change by one scale and shift: algorithms may whiten over the batch."""
        import torch

        training = _Training(under_test.make(), self.rows)
        if not training.graph.samples:
            pytest.skip("it samples nothing")
        actor = training.models[training.graph.source.model or ""]
        for name, model in training.algorithm.models.items():
            if not model.trainable and model.head == "policy":  # no KL, which would differ between parts
                training.models[name].table = actor.table
        source = training.sampled()
        whole, parts = training.completed(source), training.completed(_in_two_parts(source))
        sequence = source.sequence_index()[source["loss_mask"]]  # of each trained token
        own, of_group = sequence == 0, source["group"][sequence] == source["group"][0]
        for call, model, loss in training.trained:
            before, after = (
                loss.function(model.output(batch), _only(call, batch))[0].detach()[batch["loss_mask"]]
                for batch in (whole, parts)
            )
            fit = torch.stack([before, torch.ones_like(before)], 1).double()
            line = torch.linalg.lstsq(fit[~of_group], after[~of_group, None].double()).solution
            errors = ((fit @ line)[:, 0] - after).abs()
            tolerance = 1e-3 + 10 * errors[~of_group].max()
            if errors[own].max() <= tolerance:  # nothing but the count of sequences has changed
                errors, tolerance = (before - after).abs(), 1e-5
            assert errors[~own].max() <= tolerance, (
                f"{call.name}: a sample in two parts changes the losses of other samples by up to "
                f"{errors[~own].max():.2g}; count a sample once (`group_normalise` takes the column `sample`)"
            )

    def test_its_state_goes_on_from_a_checkpoint(self, under_test: ComponentUnderTest) -> None:
        """Skipped if it has no state. An empty state stands for the beginning."""
        algorithm: Algorithm = under_test.make()
        if not isinstance(algorithm, Stateful):
            pytest.skip("it has no state")
        training = _Training(algorithm, self.rows)
        beginning = dict(algorithm.state())
        training.batch(off_policy=0.2)
        state = dict(algorithm.state())
        assert msgspec.json.decode(msgspec.json.encode(state)) == state, (
            f"its state is no plain data: {state}"
        )
        again = under_test.make()
        again.restore(state)
        assert dict(again.state()) == state, f"restored from {state}, its state is {again.state()}"
        again.restore({})
        assert dict(again.state()) == beginning, f"restored from nothing, its state is {again.state()}"

    def test_it_learns_a_tiny_task(self, under_test: ComponentUnderTest) -> None:
        """The algorithm trains a few steps on the policy's own samples, or on the rows."""
        training = _Training(under_test.make(), self.rows)
        before = training.goal()
        for _ in range(self.steps):
            if (batch := training.kept(training.batch())) is not None:
                training.train(batch)
        after = training.goal()
        if training.graph.samples:
            assert after - before >= self.gain, (
                f"the mean reward went from {before:.3f} to {after:.3f} in {self.steps} steps; expected a "
                f"rise of {self.gain}"
            )
        else:
            assert after - before >= _FALL * abs(before), (
                f"the loss went from {-before:.3f} to {-after:.3f} in {self.steps} steps; expected a fall"
            )


_KERNEL = """
import sys
import msgspec
from stretto.assembly.compose import compose_mapping
from stretto.component import Context

document, context = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=tuple[dict, Context])
algorithm = compose_mapping(document).make("algorithm", context)
algorithm.calls(), algorithm.models
print("torch" in sys.modules)
"""
"""Program that reads the dataflow as the kernel does, and prints whether torch was imported."""
