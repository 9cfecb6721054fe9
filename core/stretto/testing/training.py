"""The contract of training engines as tests: the numbers of the engine `torch`. They need stretto[torch]."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import pytest

from stretto.algorithm import Loss
from stretto.component import Kind
from stretto.engine import MeasuringEngine, TrainingEngine
from stretto.errors import EngineError
from stretto.testing.component import ComponentConformance, ComponentUnderTest, needs_model
from stretto.testing.tiny_model import VOCABULARY, make_tiny_model

if TYPE_CHECKING:
    from torch import Tensor

    from stretto.rl.batch import Batch

__all__ = ["TrainingConformance"]

_NUMBERS = {"lr": 0.1, "eps": 1.0, "clip_norm": None, "warmup_steps": 0}
"""Keys of both engines, if their configs have them. A large epsilon makes AdamW's step nearly linear."""
_LENGTHS = (6, 13, 4, 9)  # tokens of each sequence of a batch
_needs_training = pytest.mark.usefixtures("training")


class TrainingConformance(ComponentConformance):
    """The contract of `stretto.engine.TrainingEngine` in a group of one process. The engine `torch` is the
    reference for outputs, loss, the weights after a step, and checkpoints."""

    kind: ClassVar[Kind] = "training"
    trains: ClassVar[bool] = True
    """Whether the engine trains a model. False for one that only computes `forward`."""
    tolerance: ClassVar[float] = 1e-4
    """Maximum difference between a number and that of `torch`, absolute and relative."""

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """A tiny model."""
        return make_tiny_model(tmp_path_factory.mktemp("model"))

    @pytest.fixture
    def training(self) -> None:
        """Skip a test of training for an engine that only computes `forward`."""
        if not self.trains:
            pytest.skip("it trains no model")

    @pytest.fixture
    def engine(self, under_test: ComponentUnderTest, model: Path) -> Iterator[TrainingEngine]:
        """The engine, with the model loaded."""
        engine = self._made(under_test, model)
        engine.load(None)
        yield engine
        engine.stop()

    @pytest.fixture
    def torch_engine(self, model: Path, tmp_path: Path) -> Iterator[TrainingEngine]:
        """The engine `torch`, with the same model."""
        other = ComponentUnderTest("training", {"use": "torch", **_NUMBERS}, {}, (), tmp_path / "run")
        engine: TrainingEngine = other.make(model=str(model))
        engine.load(None)
        yield engine
        engine.stop()

    @needs_model
    def test_its_outputs_are_those_of_torch(
        self, engine: TrainingEngine, torch_engine: TrainingEngine
    ) -> None:
        """The test compares the logprob of every token, at two temperatures."""
        for temperature in (1.0, 0.7):
            outputs = engine.forward(_batch(), temperature=temperature)
            expected = torch_engine.forward(_batch(), temperature=temperature)
            assert outputs.dtype == expected.dtype, (
                f"`forward` returns {outputs.dtype}; expected {expected.dtype}"
            )
            assert not outputs.requires_grad, "`forward` returns a tensor with gradient"
            self._assert_close(f"the logprobs at temperature {temperature}", outputs, expected)

    @_needs_training
    @needs_model
    @pytest.mark.parametrize("reduction", ["token", "sequence", "sequence_sum"])
    def test_a_step_is_that_of_torch(
        self, engine: TrainingEngine, torch_engine: TrainingEngine, reduction: Any
    ) -> None:
        """The test compares loss, norm of the gradient, statistics, and all weights afterwards."""
        loss = Loss(_loss, reduction)
        is_able = isinstance(engine, MeasuringEngine)
        measured = engine.measure(_batch(), loss, temperature=1.0) if is_able else {}
        figures = engine.train(_batch(), loss, temperature=1.0)
        for name, value in measured.items():
            close = pytest.approx(value, rel=self.tolerance, abs=self.tolerance)
            assert figures[name] == close, f"{name} is {figures[name]}, and `measure` said {value} before"
        expected = torch_engine.train(_batch(), loss, temperature=1.0)
        for name in ("loss", "grad_norm", "lr", "advantage", "advantage_max"):
            assert figures[name] == pytest.approx(expected[name], rel=self.tolerance, abs=self.tolerance), (
                f"{name} is {figures[name]}, and {expected[name]} with torch"
            )
        weights, right = _weights(engine), _weights(torch_engine)
        assert weights.keys() == right.keys(), (
            f"`weights` names {sorted(weights.keys() ^ right.keys())[:3]}, or lacks them, other than torch"
        )
        for name, tensor in right.items():
            self._assert_close(f"tensor {name!r} after the step", weights[name], tensor)

    @_needs_training
    def test_a_step_reports_its_figures_and_changes_the_weights(self, engine: TrainingEngine) -> None:
        """Its figures are `loss`, `grad_norm`, `lr` and `micro_batches`, also without a model."""
        import torch

        before = _weights(engine)
        figures = engine.train(_batch(), Loss(_loss, "token"), temperature=1.0)
        missing = {"loss", "grad_norm", "lr", "micro_batches"} - figures.keys()
        assert not missing, f"`train` does not return {', '.join(sorted(missing))}"
        after = _weights(engine)
        assert any(not torch.equal(before[name], after[name]) for name in before), "a step changes no weight"

    @_needs_training
    def test_from_a_checkpoint_it_goes_on_as_before(
        self, under_test: ComponentUnderTest, engine: TrainingEngine, model: Path, tmp_path: Path
    ) -> None:
        """Tested in a new engine and in the same one, also with a copy written after the next step."""
        loss, folder = Loss(_loss, "token"), tmp_path / "checkpoint"
        copy_folder = folder / "copy"
        copy_folder.mkdir(parents=True)
        engine.train(_batch(1), loss, temperature=1.0)
        assert engine.save(folder) is None, "`save` did not write everything, though it may make no copy"
        write_copy = engine.save(copy_folder, 2**40)
        engine.train(_batch(2), loss, temperature=1.0)
        if write_copy is not None:
            write_copy()
        expected = _weights(engine)
        new_engine = self._made(under_test, model)
        for resumed, checkpoint in ((new_engine, folder), (new_engine, copy_folder), (engine, folder)):
            resumed.load(checkpoint)
            resumed.train(_batch(2), loss, temperature=1.0)
            weights = _weights(resumed)
            for name, tensor in expected.items():
                self._assert_close(f"tensor {name!r}, one step after `load`,", weights[name], tensor)
        new_engine.stop()

    @_needs_training
    @needs_model
    def test_a_checkpoint_has_a_model_for_other_programs(
        self, engine: TrainingEngine, tmp_path: Path
    ) -> None:
        """The model is in `model/`, in the format of Hugging Face. No file is a pickle."""
        from transformers import AutoModelForCausalLM

        engine.save(tmp_path)
        pickles = [
            file.name for file in tmp_path.rglob("*") if file.suffix in (".bin", ".pt", ".pkl", ".pth")
        ]
        assert not pickles, f"the checkpoint has {pickles[0]!r}; expected safetensors and JSON"
        loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        tensors = dict(loaded.named_parameters())
        for name, tensor in _weights(engine).items():
            self._assert_close(f"tensor {name!r} of `model/`", tensors[name].detach(), tensor)

    @needs_model
    def test_what_cannot_be_loaded_is_an_error(self, under_test: ComponentUnderTest, tmp_path: Path) -> None:
        """`load` raises EngineError for a model that is not there."""
        engine = self._made(under_test, tmp_path / "nowhere")
        with pytest.raises(EngineError):
            engine.load(None)

    def _made(self, under_test: ComponentUnderTest, model: Path) -> TrainingEngine:
        known = {field.name for field in msgspec.structs.fields(type(under_test.config))}
        numbers = {name: value for name, value in _NUMBERS.items() if name in known}
        section = msgspec.structs.replace(under_test.config, **numbers)
        context = under_test.context(model=str(model), trainable=self.trains)
        return under_test.composed.make("training", context, section)

    def _assert_close(self, what: str, found: Tensor, expected: Tensor) -> None:
        import torch

        assert found.shape == expected.shape, f"{what}: shape {tuple(found.shape)}"
        off = (found.double() - expected.double()).abs().max().item()
        close = torch.allclose(found.double(), expected.double(), rtol=self.tolerance, atol=self.tolerance)
        assert close, f"{what}: differs by {off:.2g}"


def _batch(seed: int = 0) -> Batch:
    """Return a batch of random sequences; the second half of each is trained on."""
    import torch

    from stretto.rl.batch import Batch

    generator = torch.Generator().manual_seed(seed)
    total = sum(_LENGTHS)
    loss_mask = [position >= length // 2 for length in _LENGTHS for position in range(length)]
    return Batch(
        _LENGTHS,
        {
            "tokens": torch.randint(4, VOCABULARY, (total,), generator=generator),
            "loss_mask": torch.tensor(loss_mask),
            "advantages": torch.randn(total, generator=generator),
        },
        {"group": torch.arange(len(_LENGTHS)) // 2},
    )


def _loss(logprobs: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Return -A log pi of each token, which is linear in log pi, and two statistics."""
    advantages = batch["advantages"]
    return -advantages * logprobs, {"advantage": advantages, "advantage_max": advantages}


def _weights(engine: TrainingEngine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.weights()}
