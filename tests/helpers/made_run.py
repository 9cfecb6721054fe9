"""Run folders with made figures, of any length: `from made_run import make_run`.

The files have the form that a run writes; the figures are drawn. `python tests/helpers/made_run.py FOLDER`
makes a run of 10,000 steps and 1,000,000 samples.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import yaml
from pyarrow import parquet as pq

from kernel_events import done, issued, served, step_measured, write_events
from stretto.bus.messages.events import CallEnded, Cause, KernelBegan, RunEnded
from stretto.records.events.reader import TimedEvent
from stretto.records.samples.files import SegmentName, schema

_BEGUN = 1_790_000_000.0
_SEGMENT_ROWS = 65_536
_GROUP_ROWS = 4_096
_STEP_S = 2.0


def make_run(
    folder: Path,
    *,
    name: str = "made",
    steps: int = 50,
    groups: int = 4,
    samples: int = 4,
    seed: int = 1,
    lr: float | None = None,
    finished: bool = True,
    answer: str = "8 17",
    row: str = '{"prompt": "3+5+9=", "answer": "8 17"}',
    messages: str = "",
) -> Path:
    """Make a run folder and return it.

    Args:
        groups: tickets per step.
        samples: trajectories a ticket.
        lr: by default another one for each seed.
        finished: write a summary.
        answer: text of every answer. A token is a byte of it.
        row: JSON of the row of every ticket.
        messages: JSON of every conversation; empty for none.
    """
    folder.mkdir(parents=True)
    (folder / "bus").mkdir()
    document = {
        "name": name,
        "steps": steps,
        "seed": seed,
        "algorithm": {"use": "grpo", "group_size": samples},
        "training": {"use": "torch", "lr": lr or 3e-4 * seed},
        "model": None,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    lines = _lines(steps, groups, samples, np.random.default_rng(seed))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    _write_events(folder, steps, groups)
    texts = {"text": answer, "dataset_row": row, "messages": messages}
    _write_samples(folder, steps, groups, samples, texts, np.random.default_rng(seed))
    if finished:
        (folder / "summary.json").write_text(json.dumps(_summary(name, lines, steps, groups, samples)))
    return folder


def _lines(steps: int, groups: int, samples: int, draw: np.random.Generator) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    figures = draw.normal(size=(steps, 28)).cumsum(axis=0) * 0.02
    for step in range(1, steps + 1):
        drift = figures[step - 1]
        line: dict[str, Any] = {
            "step": step,
            "time": _BEGUN + step * _STEP_S,
            "time_s": round(step * _STEP_S, 3),
            "step_s": _STEP_S,
            "train_s": 1.2,
            "wait/groups_s": 0.5,
            "wait/evaluation_s": 3.0 if step % 10 == 0 else 0.0,
            "wait/overhead_s": 0.3,
            "reward": round(1 - np.exp(-step / (0.4 * steps)) + 0.05 * draw.normal(), 6),
            "reward_std": round(0.4 + 0.01 * draw.normal(), 6),
            "zero_variance_groups": 0.25,
            "length": round(12 + drift[0], 6),
            "truncated": 0.0,
            "staleness": 1.5,
            "staleness_max": 2,
            "tokens": 12 * groups * samples,
            "train_tokens_per_s": 11_000,
            "step_tokens_per_s": 9_000,
            "loss": round(float(drift[1]), 6),
            "entropy": round(float(abs(drift[2])), 6),
            "grad_norm": round(float(abs(drift[3])), 6),
            **{f"reward/part_{part}": round(float(drift[4 + part]), 6) for part in range(24)},
            "calls": [{"call": "train(actor)", "group": "training", "start_s": 0.01, "end_s": 1.2}],
            "ledger": {"issued": (step + 2) * groups, "trained": step * groups}
            | {"filtered": groups, "expired": 0, "failed": 0, "in_flight": groups},
            "not_trained": {"all rewards are equal": groups} if step == 1 else {},
            "advice": [],
        }
        lines.append(line)
        if step % max(1, steps // 10) == 0:
            accuracy = round(step / steps * 0.9, 6)
            evaluation = {"evaluation/accuracy": accuracy, "evaluation/samples": 64, "evaluation/failed": 0}
            lines.append({"step": step, "time_s": line["time_s"] + 0.1} | evaluation)
    return lines


def _summary(name: str, lines: list[dict[str, Any]], steps: int, groups: int, samples: int) -> dict[str, Any]:
    trained = steps * groups * samples
    message = "12 % of the answers are truncated; raise `sampling.max_tokens` from 32 to 64"
    advice = {"rule": "truncation", "since": 3, "said": 8, "until": None, "message": message}
    return {
        "run": name,
        "status": "completed",
        "reason": "",
        "verdict": {"state": "learning", "text": "finished, learned: reward +0.300; bound by training"},
        "steps": steps,
        "version": steps,
        "wall_s": steps * _STEP_S,
        "ledger": next(line["ledger"] for line in reversed(lines) if "ledger" in line),
        "staleness": {"0": trained // 4, "1": trained // 4, "2": trained - 2 * (trained // 4)},
        "overlap": 0.9,
        "swaps": {"count": steps, "pause_mean_s": 0.001, "pause_max_s": 0.01},
        "restarts": 0,
        "recoveries": [],
        "problems": [],
        "advice": [advice],
    }


def _write_events(folder: Path, steps: int, groups: int) -> None:
    events: list[TimedEvent] = [(_BEGUN, KernelBegan(1, 0, 0.0))]
    ticket = 0
    for step in range(1, steps + 1):
        begun, ended = _BEGUN + (step - 1) * _STEP_S, _BEGUN + step * _STEP_S
        numbers = tuple(range(ticket, ticket + groups))
        events += [(begun, issued(number, version=step - 1)) for number in numbers]
        for place, number in enumerate(numbers):
            group = done(number, seconds=0.6 + number % 83 / 1000)
            events.append((begun + 0.5 * (place + 1) / groups, group))
        call = CallEnded(begun + 0.6, "training", "train(actor)", step - 1, 1.2 + step % 83 / 1000)
        events.append((ended - 0.1, call))
        events.append((ended, step_measured(step, begun + 0.6, numbers, ((Cause("groups"), 0.6),))))
        events.append((ended, served(ended - 0.05, "inference-0", step, step % 83 / 1000)))
        ticket += groups
    events.append((_BEGUN + steps * _STEP_S, RunEnded("completed", "")))
    write_events(folder, events)


def _write_samples(
    folder: Path, steps: int, groups: int, samples: int, texts: dict[str, str], draw: np.random.Generator
) -> None:
    (folder / "samples").mkdir()
    total = steps * groups * samples
    for flush, first in enumerate(range(0, total, _SEGMENT_ROWS), start=1):
        numbers = np.arange(first, min(total, first + _SEGMENT_ROWS))
        table = _table(numbers, groups, samples, texts, draw)
        file = folder / "samples" / SegmentName("train", flush, flush).file
        pq.write_table(table, file, compression="zstd", row_group_size=_GROUP_ROWS)


def _table(
    numbers: np.ndarray[Any, Any], groups: int, samples: int, texts: dict[str, str], draw: np.random.Generator
) -> Any:
    """Return rows; columns that are not made are null."""
    count = len(numbers)
    ticket, place = numbers // samples, numbers % samples
    step = ticket // groups + 1
    oldest = np.maximum(0, step - 1 - numbers % 3)
    prompt, ids = b"3+5+9=", list(texts["text"].encode())
    tokens = [*prompt, *ids]
    mask = [False] * len(prompt) + [True] * len(ids)
    names = [f"{one}/1/{other}" for one, other in zip(ticket.tolist(), place.tolist(), strict=True)]
    logprobs = -np.abs(draw.normal(size=(count, len(tokens)))).astype(np.float32)
    rewards = draw.integers(0, 2, count).astype(float)
    same = {"purpose": "train", "attempt": 1, "outcome": "trained", "metrics": "{}", "finish": "stop"}
    same |= {"length": len(tokens), "sampled": len(ids), "worker": "rollout-0", "engine": "inference-0"}
    same |= {"generate_s": 0.15, "score_s": 0.01, "digest": "0" * 16, "prompt_text": prompt.decode()}
    values: dict[str, Any] = {
        **{name: [value] * count for name, value in {**same, **texts}.items()},
        "id": names,
        "ticket": ticket,
        "index": place,
        "sample": place,
        "row": ticket % 1000,
        "sequence": ticket + 1,
        "step": step,
        "reward": rewards,
        "oldest": oldest,
        "newest": np.maximum(oldest, step - 1),
        "staleness": step - 1 - oldest,
        "seconds": draw.random(count) + 0.2,
        "tokens": _lists(np.tile(tokens, count), len(tokens), pa.int32()),
        "loss_mask": _lists(np.tile(mask, count), len(tokens), pa.bool_()),
        "logprobs": _lists(logprobs.ravel(), len(tokens), pa.float32()),
        "versions": _lists(np.repeat(oldest, len(tokens)), len(tokens), pa.int32()),
        "advantages": _lists(rewards - 0.5, 1, pa.float32()),
        "importance_weights": _lists(np.exp(draw.normal(0, 0.1, count * len(ids))), len(ids), pa.float32()),
    }
    columns = [
        values[field.name]
        if isinstance(values.get(field.name), pa.Array)
        else pa.array(values.get(field.name, [None] * count)).cast(field.type)
        for field in schema()
    ]
    return pa.Table.from_arrays(columns, schema=schema())


def _lists(flat: np.ndarray[Any, Any], length: int, kind: Any) -> Any:
    offsets = np.arange(0, len(flat) + 1, length, dtype=np.int32)
    narrow = flat.astype(kind.to_pandas_dtype())
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(narrow, kind))


if __name__ == "__main__":
    print(make_run(Path(sys.argv[1]), name="long", steps=10_000, groups=25, samples=4))
