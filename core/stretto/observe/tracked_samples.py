"""The samples that a tracker receives: a few of each due step and of each evaluation, from the run's folder.

The run's sample writer is some seconds behind `metrics.jsonl`, and trainers report a step during the next
step. So a step is settled when enough of its samples are on disk, or when samples of a later step are.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from stretto.bus.messages.tickets import Purpose
from stretto.errors import printable
from stretto.records.samples.store import SampleFilter, SampleStore
from stretto.tracker import SAMPLE_FIELDS

_LONGEST_TEXT = 20_000
"""Characters of a prompt or an answer that a tracker gets: its beginning and its end."""


def settled_samples(
    folder: Path, purpose: Purpose, due: Sequence[int], number: int, *, complete: bool
) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Yield settled steps of `due` with their rows, up to the first step that is not settled. A step without
    kept samples has no rows. With `complete`, all steps count as settled."""
    store = SampleStore(folder)
    later = SampleFilter(purpose=purpose, step=(due[0], None))
    newest = next(iter(store.find(later, order="-step", limit=1, texts=False)), None)
    if newest is None and not complete:
        return
    for step in due:
        rows = _spread(store, SampleFilter(purpose=purpose, step=(step, step)), number)
        if len(rows) < number and not complete and (newest is None or newest["step"] <= step):
            return
        yield step, rows


def _spread(store: SampleStore, filter: SampleFilter, number: int) -> list[dict[str, Any]]:
    """Return at most `number` samples with rewards from the lowest to the highest, evenly spaced in order."""
    count = store.count(filter)
    shown = min(number, count)
    places = [place * (count - 1) // max(1, shown - 1) for place in range(shown)]
    searches = (store.find(filter, order="reward", offset=place, limit=1) for place in places)
    # The writer may add rows between two searches, so a row may be found twice.
    rows = {row["id"]: row for rows in searches for row in rows}
    return [{name: _shown(row[name]) for name in SAMPLE_FIELDS} for row in rows.values()]


def _shown(value: Any) -> Any:
    if isinstance(value, dict):
        return {_shown(name): _shown(item) for name, item in cast("dict[str, Any]", value).items()}
    if not isinstance(value, str):
        return value
    half = _LONGEST_TEXT // 2
    if (left_out := len(value) - 2 * half) > 0:
        value = f"{value[:half]}\n… {left_out} characters …\n{value[-half:]}"
    return printable(value)
