"""The samples in a report: groups of the newest step, the best and the worst samples, held-out answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import pstdev
from typing import Any

from stretto.charts import safe
from stretto.run_folder import RunFolder, SampleFilter, SampleOutcome, SampleStore
from stretto_views.samples import common_sections, fate_of, figures_of, sections_of_one

Row = dict[str, Any]

_STEPS = 10
"""Best and worst samples are those of this many newest steps."""
_GROUPS = 2
_OF_GROUP = 4
"""Samples that the report shows of one group."""
_MOST = 3
"""Best samples, and as many worst ones."""
_LOOK_AT = 64
"""Samples among which the best and the worst ones of different tickets are chosen."""


def samples_html(run: RunFolder) -> str:
    """Return some kept samples of a run. The text is empty if there are none."""
    store = run.samples
    parts = [*_trained(store), *_evaluated(store)]
    return "".join(f"<h3>{title}</h3>{content}" for title, content in parts if content)


def _trained(store: SampleStore) -> Iterator[tuple[str, str]]:
    last = _newest_step(store, "trained")
    if last is None:
        return
    yield f"Groups trained in step {last}", "".join(_group(rows) for rows in _groups(store, last))
    first = max(1, last - _STEPS + 1)
    steps = f"step {last}" if first == last else f"steps {first} to {last}"
    yield from _best_and_worst(
        store, SampleFilter(outcome="trained", step=(first, last)), f"samples of {steps}"
    )


def _evaluated(store: SampleStore) -> Iterator[tuple[str, str]]:
    """Yield titles and HTML of held-out answers."""
    version = _newest_step(store, "evaluated")
    if version is not None:
        answers = SampleFilter(outcome="evaluated", step=(version, version))
        yield from _best_and_worst(store, answers, f"held-out answers of version {version}")


def _newest_step(store: SampleStore, outcome: SampleOutcome) -> int | None:
    newest = store.find(SampleFilter(outcome=outcome), order="-step", limit=1, texts=False)
    return newest[0]["step"] if newest else None


def _best_and_worst(store: SampleStore, filter: SampleFilter, what: str) -> Iterator[tuple[str, str]]:
    for word, order in (("Best", "-reward"), ("Worst", "reward")):
        yield f"{word} {what}", _cards(_extreme(store, filter, order))


def _groups(store: SampleStore, step: int) -> list[list[Row]]:
    """Return groups that a step trained: those whose rewards differ most, because they teach most."""
    groups: dict[int, list[Row]] = {}
    for row in store.find(SampleFilter(outcome="trained", step=(step, step)), limit=None, texts=False):
        groups.setdefault(row["ticket"], []).append(row)
    spread = sorted(groups, key=lambda ticket: -_spread(groups[ticket]))
    return [
        store.find(SampleFilter(ticket=ticket, outcome="trained"), limit=None) for ticket in spread[:_GROUPS]
    ]


def _spread(group: Iterable[Row]) -> float:
    rewards = [row["reward"] for row in group if row["reward"] is not None]
    return pstdev(rewards) if rewards else 0.0


def _extreme(store: SampleStore, filter: SampleFilter, order: str) -> list[Row]:
    """Return the first samples in an order, of different tickets."""
    first: dict[int, Row] = {}
    for row in store.find(filter, order=order, limit=_LOOK_AT):
        first.setdefault(row["ticket"], row)
    return list(first.values())[:_MOST]


def _group(rows: Sequence[Row]) -> str:
    """Draw a group: what its samples share, then samples of all rewards side by side."""
    chosen = sorted(rows, key=lambda row: -(row["reward"] or 0.0))
    if len(chosen) > _OF_GROUP:
        half = _OF_GROUP // 2
        chosen = [*chosen[:half], *chosen[-half:]]
    first = rows[0]
    shown = "" if len(chosen) == len(rows) else f", {len(chosen)} of {len(rows)} samples"
    head = f"ticket {first['ticket']}, row {first['row']} of the dataset{shown}"
    samples = "".join(f'<div class="card">{_sample(row)}</div>' for row in chosen)
    return (
        f'<div class="card group"><h4>{safe(head)}</h4>{_texts(common_sections(first))}'
        f'<div class="grid-of-charts">{samples}</div></div>'
    )


def _cards(rows: Iterable[Row]) -> str:
    cards = (f'<div class="card">{_sample(row, _texts(common_sections(row)))}</div>' for row in rows)
    return f'<div class="grid-of-charts">{"".join(cards)}</div>'


def _sample(row: Row, shared: str = "") -> str:
    """Draw one sample.

    Args:
        shared: prompt and row, if no group has them.
    """
    facts = " · ".join((*figures_of(row), fate_of(row)))
    return (
        f'<div data-sample="{safe(row["id"])}"><h4>{safe(row["id"])}</h4><p class="dim">{safe(facts)}</p>'
        f"{shared}{_texts(sections_of_one(row))}</div>"
    )


def _texts(sections: Iterable[tuple[str, list[str]]]) -> str:
    return "".join(
        f'<div class="dim">{title}</div><pre data-part="{title}">{_lines(lines)}</pre>'
        for title, lines in sections
    )


def _lines(lines: Iterable[str]) -> str:
    return "\n".join(map(safe, lines))
