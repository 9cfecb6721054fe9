"""The data of a run's first view: figures, state, ledger, workers, advice."""

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from stretto.errors import ConfigError
from stretto.records.charts import RECENT_STEPS, change, recent
from stretto.records.run_folder import RunFolder, is_figure

_MOST_CAUSES = 12
_MEANS = (
    *("reward", "zero_variance_groups", "loss", "entropy", "behaviour_kl", "staleness"),
    *("length", "truncated", "step_s", "train_s", "step_tokens_per_s", "train_tokens_per_s"),
    *("ticket_s", "ticket_generate_s", "ticket_score_s", "ticket_tool_s", "ticket_environment_s"),
    *("ticket_own_s", "reward/turns"),
)


def overview(record: RunFolder) -> dict[str, Any]:
    """Return the view as JSON values. An unreadable status, such as one of another stretto, is a `fault`."""
    steps, summary, fault = record.steps, record.summary, ""
    try:
        status = record.status
    except ConfigError as error:
        status, fault = None, str(error)
    last = steps[-1] if steps else {}
    ended_badly = record.state in ("stopped", "failed", "interrupted")
    return {
        "name": record.name,
        "state": record.state,
        "folder": str(record.folder),
        "revision": [len(steps), len(record.evaluations), last.get("time_s")],
        "step": last.get("step", 0),
        "total": record.config.get("steps", 0),
        "started": record.started,
        "wall_s": record.wall_s,
        "keys": [key for key in record.figures() if key != "time_s" and not key.startswith("evaluation/")],
        "last": last,
        "recent": {key: _mean(steps[-RECENT_STEPS:], key) for key in _MEANS},
        "change": change([value for _, value in record.series("reward")]),
        "evaluations": record.evaluations,
        "held_out": record.held_out,
        "not_trained": _not_trained(steps),
        "status": None if status is None else msgspec.to_builtins(status),
        "standstill": "" if fault else record.standstill,
        "verdict": "" if fault else record.verdict,
        "resume": shlex.join(["stretto", "resume", str(record.folder)]) if ended_badly else "",
        "summary": summary,
        "fault": fault,
    }


def _mean(lines: Sequence[Mapping[str, Any]], key: str) -> float | None:
    return recent([line[key] for line in lines if is_figure(line.get(key))])


def _not_trained(steps: Sequence[dict[str, Any]]) -> list[tuple[str, int]]:
    causes: Counter[str] = Counter()
    for line in steps:
        causes.update(line.get("not_trained", {}))
    return causes.most_common(_MOST_CAUSES)
