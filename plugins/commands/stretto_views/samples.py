"""`stretto samples RUN`: show the kept samples of a run, also while it runs."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stretto.errors import ConfigError, offer, printable
from stretto.records.run_folder import Bounds, Purpose, RunHistory, SampleFilter, SampleOutcome, SampleStore
from stretto.records.samples.traces import TraceFormat, sample_of, write_trace

Row = dict[str, Any]

_WORDS = {"outcome": get_args(SampleOutcome), "purpose": get_args(Purpose)}
"""Option -> the words that it accepts."""
_PARQUET_ROWS = 1000  # of a row group
_MOST_COLUMNS = 4  # samples side by side
_IMAGE = re.compile("[0-9a-f]{64}")


def sample_filter(bounds: Mapping[str, str | None], **conditions: Any) -> SampleFilter:
    """Return the filter of the options that a user wrote."""
    ranges: dict[str, Any] = {name: _bounds_of(text, f"--{name}") for name, text in bounds.items()}
    for name, accepted in _WORDS.items():
        if (word := conditions[name]) not in (None, *accepted):
            raise ConfigError(f"--{name} {word!r}{offer(word, accepted, 'accepted')}")
    return SampleFilter(**ranges, **conditions)


def _bounds_of(text: str | None, option: str) -> Bounds:
    """Return the bounds that a user wrote: `3:5`, `3:`, `:5`, or `3` for exactly 3."""
    if text is None:
        return None, None
    low, colon, high = text.partition(":")
    try:
        lowest = float(low) if low else None
        return (lowest, lowest) if not colon else (lowest, float(high) if high else None)
    except ValueError:
        raise ConfigError(f"{option} {text!r}: expected A:B, A:, :B or A, with numbers") from None


def why_none(store: SampleStore, wanted: SampleFilter) -> str:
    """Return a message that no sample fits; if the filter has steps, with the steps that have samples."""
    purpose: Purpose = wanted.purpose or "train"
    kind, what = ("evaluations", "version") if purpose == "eval" else ("training", "step")
    steps = [
        row["step"]
        for order in ("step", "-step")
        for row in store.find(SampleFilter(purpose=purpose), order=order, limit=1, texts=False)
        if row["step"] is not None
    ]
    if wanted.step == (None, None) or not steps:
        return "no sample fits"
    return f"no sample fits; samples of {kind} are kept from {what} {steps[0]} to {steps[-1]}"


def write_parquet(rows: Sequence[Row], file: Path) -> None:
    """Write rows to a Parquet file. Columns with nested values are written as JSON."""
    import pyarrow as pa
    from pyarrow import parquet

    nested = {"metrics", "messages", "dataset_row", "images"}

    def flat(name: str, value: Any) -> Any:
        return json.dumps(value) if name in nested and value is not None else value

    table = pa.Table.from_pylist([{name: flat(name, each) for name, each in row.items()} for row in rows])
    try:
        parquet.write_table(table, file, compression="zstd", row_group_size=_PARQUET_ROWS)
    except OSError as error:
        raise ConfigError(f"--output {file}: cannot write there: {error}") from error


def trace_rows(store: SampleStore, rows: Sequence[Row], format: TraceFormat, run: str) -> list[Row]:
    """Return kept samples as trajectories in the format of another tool. Say how many cannot be written."""
    parts = Counter(map(sample_of, store.find(limit=None, texts=False)))
    traces = [write_trace(row, parts[sample_of(row)], format, run) for row in rows]
    if left_out := traces.count(None):
        typer.echo(f"left out {left_out} samples without tokens, or with images", err=True)
    return [trace for trace in traces if trace is not None]


def print_samples(rows: Iterable[Row], console: Console) -> None:
    for row in rows:
        head = "  ".join(filter(None, (row["id"], _fate_of(row), *_figures_of(row), _makers(row))))
        console.print(Text(printable(head), style="bold"))
        _print_sections((*_common_sections(row), *_sections_of_one(row)), console)
        console.print()


def print_groups(store: SampleStore, rows: Iterable[Row], console: Console) -> None:
    """Print the groups of some rows, the samples of each side by side."""
    attempts = dict.fromkeys((row["purpose"], row["ticket"], row["attempt"]) for row in rows)
    for purpose, ticket, attempt in attempts:
        samples = store.find(SampleFilter(ticket=ticket, purpose=purpose), limit=None)
        group = [row for row in samples if row["attempt"] == attempt]
        first = group[0]
        name = first["id"] if first["index"] is None else first["id"].rpartition("/")[0]
        console.print(Text(f"ticket {name}, row {first['row']}, {_fate_of(first)}", style="bold"))
        _print_sections(_common_sections(first), console)
        for start in range(0, len(group), _MOST_COLUMNS):
            console.print(_side_by_side(group[start : start + _MOST_COLUMNS]))
        console.print()


def ticket_story(history: RunHistory, ticket: int, purpose: Purpose) -> Iterator[str]:
    """Yield a line about each attempt of a ticket."""
    for each in history.attempts:
        if (each.purpose, each.ticket) != (purpose, ticket) or each.issued is None:
            continue
        parts = [f"attempt {each.attempt} of row {each.issued.row}"]
        if each.taken is not None and each.issued_at is not None:
            parts.append(f"taken by {each.worker} after {each.taken - each.issued_at:.2f} s")
        if each.done is not None:
            done = each.done
            spent = f"generation {done.generate_s:.2f} s, scoring {done.score_s:.2f} s"
            parts.append(f"done in {done.seconds:.2f} s ({spent}) with tokens from version {done.oldest} on")
        step = f" in step {each.step.version}" if each.step else ""
        yield f"{', '.join(parts)}; {each.outcome}{step}{f': {each.reason}' if each.reason else ''}"


def _print_sections(sections: Iterable[tuple[str, list[str]]], console: Console) -> None:
    for title, body in sections:
        console.print(Text(f"  {title}", style="dim"))
        console.print(Text("\n".join(f"    {line}" for line in body)))


def _fate_of(row: Row) -> str:
    match row["outcome"]:
        case "trained":
            return f"trained in step {row['step']} at staleness {row['staleness']}"
        case "evaluated":
            return f"evaluation of version {row['step']}"
        case outcome:
            return f"{outcome}: {printable(row['reason'])}" if row["reason"] else str(outcome)


def _figures_of(row: Row) -> Iterator[str]:
    if row["reward"] is not None:
        yield f"reward {row['reward']:g}"
    for name, value in row["metrics"].items():
        if value is not None:
            yield f"{name} {value:g}"
    if row["length"]:
        yield f"{row['sampled']} of {row['length']} tokens sampled"
        yield f"ended by {row['finish']}"
        versions = {row["oldest"], row["newest"]}
        yield f"version {'-'.join(map(str, sorted(versions)))}"


def _makers(row: Row) -> str:
    engine = f", {row['engine']}" if row["engine"] else ""
    parts = f"generation {row['generate_s']:.2f} s, reward {row['score_s']:.2f} s"
    return f"{row['worker']}{engine}, {row['seconds']:.2f} s ({parts})"


def _sections_of_one(row: Row) -> Iterator[tuple[str, list[str]]]:
    if row["messages"]:
        yield "conversation", list(_conversation(row["messages"]))
    if row["text"] is not None and not row["messages"]:
        yield "answer", _lines(row["text"] or "(empty)")


def _common_sections(row: Row) -> Iterator[tuple[str, list[str]]]:
    yield "prompt", _lines(row["prompt_text"] or "")
    columns = row["dataset_row"]
    if isinstance(columns, dict):
        rest = {name: value for name, value in columns.items() if name != "prompt"}
        if rest:
            yield "row", [printable(f"{name}: {_short(value)}") for name, value in rest.items()]


def _conversation(messages: Any) -> Iterator[str]:
    if not isinstance(messages, list):  # the conversation was too long, and was cut
        yield from _lines(str(messages))
        return
    for message in messages:
        if not isinstance(message, Mapping):
            continue
        name = f" {message['name']}" if message.get("name") else ""
        yield printable(f"[{message.get('role', '?')}{name}]")
        yield from (f"  {line}" for line in _lines(_content(message.get("content"))))
        for call in message.get("tool_calls") or ():
            yield printable(
                f"  calls {_short(call.get('function', call) if isinstance(call, Mapping) else call)}"
            )


def _content(content: Any) -> str:
    """Return the content of a message as a text, with a name in place of each image."""
    return "".join(map(_part, content)) if isinstance(content, list) else _short(content)


def _part(part: Any) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": "image", "sha256": str(name)} if _IMAGE.fullmatch(name):
            return f"[image {name[:8]}…]"
        case _:
            return _short(part)


def _side_by_side(group: Sequence[Row]) -> Table:
    table = Table(pad_edge=False, expand=True)
    for row in group:
        table.add_column(Text(printable(str(row["id"]))), ratio=1, overflow="fold")
    table.add_row(*(Text("\n".join(_figures_of(row))) for row in group))
    table.add_section()
    bodies = (
        "\n".join(_conversation(row["messages"]) if row["messages"] else _lines(row["text"] or ""))
        for row in group
    )
    table.add_row(*map(Text, bodies))
    return table


def _lines(text: str) -> list[str]:
    return [printable(line) for line in text.split("\n")]


def _short(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
