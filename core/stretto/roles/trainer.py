"""The trainer: runs the calls of the dataflow that need a model or a whole batch, and publishes weights.

It reads the batch's rows from the log itself and keeps what calls compute until the step is complete;
the kernel gets names, statistics and digests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import structlog

from stretto.algorithm import Call, Loss
from stretto.bus import messages
from stretto.bus.messages import (
    CallDone,
    Heartbeat,
    LoadCheckpoint,
    Loaded,
    Prefetch,
    RowRef,
    Save,
    Saved,
    TrajectoryBundle,
    WireTrajectory,
)
from stretto.engine import TrainingEngine
from stretto.errors import EngineError, Refused
from stretto.roles.setting import ComputeThread, Setting
from stretto.weights import Publisher, WeightsNote

if TYPE_CHECKING:
    from torch import Tensor

    from stretto.batch import Batch

__all__ = ["TrainerWork"]

log = structlog.get_logger()

_READS_AT_ONCE = 32


class TrainerWork:
    """Rank 0 of a worker group."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._bus = setting.bus
        self._thread = ComputeThread()
        self._bundles: dict[int, TrajectoryBundle] = {}
        self._engine: TrainingEngine | None = None
        self._publisher: Publisher | None = None
        self._calls: dict[str, Call] = {}
        self._version = -1
        self._batch: Batch | None = None
        self._trained_s = 0.0

    async def run(self, ready: Callable[[], None]) -> None:
        """Make the engine, then serve the kernel."""
        setting = self._setting
        self._engine = await self._thread.run(setting.make, "training")
        algorithm = setting.make("algorithm")
        self._calls = {call.name: call for call in algorithm.calls()}
        self._publisher = setting.make("weights").publisher()
        try:
            await self._bus.serve(setting.subject("load"), LoadCheckpoint, self._load)
            await self._bus.serve(setting.subject("call"), messages.Call, self._call)
            await self._bus.serve(setting.subject("save"), Save, self._save)
            await self._bus.subscribe(setting.subject("prefetch"), Prefetch, self._prefetch)
            ready()
            await anyio.sleep_forever()
        finally:
            assert self._publisher is not None
            self._publisher.close()

    def beat(self, beat: Heartbeat) -> Heartbeat:
        """Busy: seconds spent in calls."""
        return Heartbeat(beat.worker, beat.nonce, beat.ready, self._trained_s, refused=beat.refused)

    # ----------------------------------------------------------------------------- kernel's requests

    async def _load(self, message: LoadCheckpoint) -> Loaded:
        self._setting.obey(message.fence)
        assert self._engine is not None
        folder = Path(message.folder) if message.folder else None
        await self._thread.run(self._engine.load, folder)
        self._version, self._batch = message.version, None
        return Loaded(await self._publish())

    async def _save(self, message: Save) -> Saved:
        self._setting.obey(message.fence)
        self._expect(message.version)
        assert self._engine is not None
        began = time.perf_counter()
        await self._thread.run(self._engine.save, Path(message.folder))
        return Saved(time.perf_counter() - began)

    async def _call(self, message: messages.Call) -> CallDone:
        self._setting.obey(message.fence)
        self._expect(message.version)
        call = self._calls[message.name]
        if self._batch is None:
            self._batch = await self._assemble(message.rows)
        log.info("call", call=call.name, version=message.version)
        began = time.perf_counter()
        statistics, self._batch = await self._thread.run(self._run_call, call, self._batch)
        seconds = time.perf_counter() - began
        self._trained_s += seconds
        note = await self._complete_step(message.rows) if message.last else None
        return CallDone(dict(statistics), seconds, note)

    async def _prefetch(self, message: Prefetch) -> None:
        wanted = {row.sequence for row in message.rows}
        for sequence in self._bundles.keys() - wanted:  # announced once, and never trained
            del self._bundles[sequence]
        await self._fetch(message.rows)

    def _expect(self, version: int) -> None:
        if version != self._version:
            worker = self._setting.worker
            raise Refused(worker, f"holds version {self._version}, and was asked for version {version}")

    async def _complete_step(self, rows: Sequence[RowRef]) -> WeightsNote:
        self._batch = None
        for row in rows:
            self._bundles.pop(row.sequence, None)
        self._version += 1
        return await self._publish()

    async def _publish(self) -> WeightsNote:
        assert self._engine is not None
        assert self._publisher is not None
        return await self._thread.run(self._publisher.publish, self._version, self._engine.weights())

    # ----------------------------------------------------------------------------------- the calls

    def _run_call(self, call: Call, batch: Batch) -> tuple[Mapping[str, float], Batch]:
        """Run one call in the compute thread; returns statistics and the batch with what it wrote."""
        engine, temperature = self._engine, self._setting.composed.config.sampling.temperature
        assert engine is not None
        match call.op:
            case "forward":
                [key] = call.writes
                return {}, batch.with_columns({key: engine.forward(batch, temperature=temperature)})
            case "function":
                assert call.function is not None
                return {}, batch.with_columns(_written(call, call.function(batch)))
            case "train":
                return self._train(call, batch), batch
            case _:
                raise Refused(self._setting.worker, f"call {call.name!r} runs inside the ticket")

    def _train(self, call: Call, batch: Batch) -> Mapping[str, float]:
        """Epochs of minibatches, one optimizer step each; statistics are means over the steps."""
        engine, config = self._engine, self._setting.composed.config
        assert engine is not None
        assert call.loss is not None
        audit = _Audit(call.loss, self._version)
        sums: dict[str, float] = {}
        steps = 0
        for epoch in range(call.epochs):
            for part in _minibatches(batch, call.minibatches, [abs(config.seed), self._version, epoch]):
                loss = audit.loss if steps == 0 else call.loss
                statistics = engine.train(part, loss, temperature=config.sampling.temperature)
                for name, value in statistics.items():
                    sums[name] = sums.get(name, 0.0) + value
                steps += 1
        return {**{name: value / steps for name, value in sums.items()}, **audit.statistics()}

    # ------------------------------------------------------------------------------------ the rows

    async def _assemble(self, rows: Sequence[RowRef]) -> Batch:
        await self._fetch(rows)
        trajectories = [self._bundles[row.sequence].trajectories[row.index] for row in rows]
        for row, trajectory in zip(rows, trajectories, strict=True):
            assert row.id == trajectory.id, "the log does not hold what the ledger says"
        return await self._thread.run(_batch_of, trajectories, [row.group for row in rows])

    async def _fetch(self, rows: Sequence[RowRef]) -> None:
        """Read what is not there yet from the log."""
        missing = {row.sequence for row in rows} - self._bundles.keys()
        limit = anyio.CapacityLimiter(_READS_AT_ONCE)

        async def read(sequence: int) -> None:
            async with limit:
                stream = self._setting.names.log_stream
                self._bundles[sequence] = await self._bus.read(stream, sequence, TrajectoryBundle)

        async with anyio.create_task_group() as tasks:
            for sequence in missing:
                tasks.start_soon(read, sequence)


def _written(call: Call, columns: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """What a function gave, which must be what its call says it writes."""
    if sorted(columns) != sorted(call.writes):
        given, said = ", ".join(columns) or "nothing", ", ".join(call.writes) or "nothing"
        raise EngineError(f"call {call.name!r} gave the columns {given}; it says that it writes {said}")
    return columns


def _batch_of(trajectories: Sequence[WireTrajectory], groups: Sequence[int]) -> Batch:
    """The keys of `stretto.algorithm.GENERATED` and `SCORED` as columns."""
    import torch

    from stretto.batch import Batch

    def column(name: str, dtype: Any) -> Tensor:
        arrays = [getattr(trajectory, name).numpy() for trajectory in trajectories]
        return torch.from_numpy(np.concatenate(arrays).astype(dtype))

    return Batch(
        [len(trajectory.tokens) for trajectory in trajectories],
        {
            "tokens": column("tokens", np.int64),
            "loss_mask": column("loss_mask", np.bool_),
            "behaviour_logprobs": column("logprobs", np.float32),
            "versions": column("versions", np.int64),
        },
        {
            "rewards": torch.tensor([trajectory.reward for trajectory in trajectories]),
            "truncated": torch.tensor([trajectory.finish == "length" for trajectory in trajectories]),
            "group": torch.tensor(groups),
        },
    )


def _minibatches(batch: Batch, count: int, seed: list[int]) -> list[Batch]:
    """The batch in `count` parts of equally many groups, groups drawn at random; whole if 1."""
    if count == 1:
        return [batch]
    groups = batch["group"].numpy()
    names = np.random.default_rng(seed).permutation(np.unique(groups))
    return [
        batch.select(np.flatnonzero(np.isin(groups, part)).tolist()) for part in np.array_split(names, count)
    ]


class _Audit:
    """Engine against trainer: logprobs of tokens sampled by the very version that is about to be trained.

    `mismatch_*` is over samples that are wholly of that version: what engine and trainer compute
    differently. `drift_*` is over tokens of that version in samples begun by an older one: what going on
    over an old KV cache adds. Both: mean and max |Δ|, KL estimate (k3), and the number of tokens.
    """

    def __init__(self, loss: Loss, version: int) -> None:
        self.loss = Loss(self._audited, loss.reduction)
        self._plain = loss.function
        self._version = version
        self._found: dict[str, list[tuple[Tensor, Tensor]]] = {"mismatch": [], "drift": []}

    def _audited(self, logprobs: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        import torch

        from stretto.functional import kl_to_behaviour

        mask, versions = batch["loss_mask"], batch["versions"]
        index = batch.sequence_index().to(mask.device)
        older = torch.zeros(len(batch), dtype=torch.bool, device=mask.device)
        older[index[mask & (versions < self._version)]] = True
        fresh = mask & (versions == self._version)
        current, behaviour = logprobs.detach(), batch["behaviour_logprobs"]
        for name, chosen in (("mismatch", fresh & ~older[index]), ("drift", fresh & older[index])):
            delta = (current - behaviour)[chosen].abs()
            self._found[name].append((delta, kl_to_behaviour(current[chosen], behaviour[chosen])))
        return self._plain(logprobs, batch)

    def statistics(self) -> dict[str, float]:
        """The figures over the whole batch; without tokens of a sort, only their number, 0."""
        import torch

        result: dict[str, float] = {}
        for name, parts in self._found.items():
            delta = torch.cat([part for part, _ in parts] or [torch.empty(0)])
            result[f"{name}_tokens"] = float(len(delta))
            if len(delta):
                result[f"{name}_mean"] = float(delta.mean())
                result[f"{name}_max"] = float(delta.max())
                result[f"{name}_kl"] = float(torch.cat([part for _, part in parts]).mean())
        return result
