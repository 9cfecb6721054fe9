"""What the first view of a run shows: figures, state, ledger, workers, advice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from stretto.charts import change, recent
from stretto.errors import ConfigError
from stretto.run_folder import RunFolder

_MOST_CAUSES = 12


def overview(record: RunFolder) -> dict[str, Any]:
    """Return the content of the view as JSON values. A status that cannot be read, such as that of another
    version of stretto, is a fault to show, and no reason to hide the run."""
    steps, summary, fault = record.steps, record.summary, ""
    try:
        status = record.status
    except ConfigError as error:
        status, fault = None, str(error)
    last = steps[-1] if steps else {}
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
        "headline": {key: _headline(record, key) for key in ("reward", "zero_variance_groups")},
        "evaluations": record.evaluations,
        "not_trained": _not_trained(steps),
        "status": None if status is None else msgspec.to_builtins(status),
        "standstill": "" if fault else record.standstill,
        "summary": summary,
        "fault": fault,
    }


def _headline(record: RunFolder, key: str) -> dict[str, float | None]:
    values = [value for _, value in record.series(key)]
    return {"recent": recent(values), "change": change(values)}


def _not_trained(steps: Sequence[dict[str, Any]]) -> list[tuple[str, int]]:
    """Return the most frequent causes for which tickets were not trained, with their counts."""
    causes: Counter[str] = Counter()
    for line in steps:
        causes.update(line.get("not_trained", {}))
    return causes.most_common(_MOST_CAUSES)
