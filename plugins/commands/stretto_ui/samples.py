"""Kept samples of a run, in the form that the page needs."""

import io
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import msgspec

from stretto.errors import ConfigError
from stretto.models.images import ImageError, ImageFile, decode, file_of, images_of, names_in
from stretto.records.run_folder import RunFolder, SampleFilter, SampleStore
from stretto_ui.token_text import pieces

_MOST_ROWS = 200  # of a page
_MOST_GROUPS = 50  # of a page
_THUMBNAIL = 384
"""Maximum width and height of an image, in pixels."""
_PREVIEW = 240
"""Maximum characters of a text in the list of samples."""


class Samples:
    """The samples of one run, with a separate lock, because a search for a text may take seconds."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._store = SampleStore(folder)
        self._lock = threading.Lock()

    def page(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Return a page of rows and the number of all; None for a text search, which stops early."""
        wanted, limit = filter_of(query), _count(query, "limit", 50, _MOST_ROWS)
        offset = _count(query, "offset", 0, 2**53)
        with self._lock:
            rows = self._store.find(
                wanted, limit=limit + 1, offset=offset, order=query.get("order", "-sequence"), texts=True
            )
            total = None if wanted.text is not None else self._store.count(wanted)
        return {"rows": [_preview(row) for row in rows[:limit]], "more": len(rows) > limit, "total": total}

    def groups(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Return a page of tickets with a fitting sample, newest first. Each has all samples, by reward."""
        wanted, limit = filter_of(query), _count(query, "limit", 20, _MOST_GROUPS)
        offset = _count(query, "offset", 0, 2**53)
        with self._lock:
            tickets = self._store.tickets(wanted, limit=limit + 1, offset=offset)
            groups = [
                self._store.find(SampleFilter(ticket=number, purpose=purpose), limit=None, order="-reward")
                for purpose, number in tickets[:limit]
            ]
        return {"groups": [_group_preview(rows) for rows in groups], "more": len(tickets) > limit}

    def points(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Return [id, reward, sampled tokens] of the fitting rows with a reward, and the number of these
        rows. If they are many, only rows at equal distances are returned."""
        with self._lock:
            points, total = self._store.points(filter_of(query))
        return {"points": points, "total": total}

    def group(self, query: Mapping[str, str]) -> list[dict[str, Any]]:
        """Return the rows of all attempts of a ticket, with their texts and without their tokens."""
        with self._lock:
            return self._store.find(_ticket_of(query), limit=None, texts=True)

    def image(self, query: Mapping[str, str]) -> bytes:
        """Return an image as a small PNG: `sha256` in a ticket's conversation, or `number` in its row."""
        names = [name for row in self.group(query)[:1] for name in names_in(row["dataset_row"])]
        if (digest := query.get("sha256")) is not None:
            file = self._file_of(digest, names)
            if file is None:
                raise ConfigError(f"ticket {query['ticket']} has no image {digest} in a file")
            pixels = decode(file)
        else:
            number = _count(query, "number", 0, 2**53)
            if number >= len(names) or not isinstance(names[number], str):
                raise ConfigError(f"the row of ticket {query['ticket']} has no image {number} in a file")
            [image] = images_of({"image": names[number]})
            pixels = image.pixels
        pixels.thumbnail((_THUMBNAIL, _THUMBNAIL))
        png = io.BytesIO()
        pixels.save(png, "PNG")
        return png.getvalue()

    def _file_of(self, digest: str, names: Sequence[Any]) -> bytes | None:
        """Return the file of an image that a workflow added, or of an image in the row; None if missing."""
        if (file := RunFolder(self._folder).image(digest)) is not None:
            return file
        for name in names:
            # The file of another image may be missing.
            with suppress(ImageError):
                if isinstance(name, str) and ImageFile(file := file_of(name)).digest == digest:
                    return file
        return None

    def tokens(self, query: Mapping[str, str], model: str | None) -> list[dict[str, Any]]:
        """Return the rows of all attempts of a ticket, with their tokens and the text of each."""
        with self._lock:
            rows = self._store.find(_ticket_of(query), limit=None, texts=False, tokens=True)
        return [row | {"pieces": pieces(model, row["tokens"] or [])} for row in rows]

    def staleness(self) -> list[tuple[int, int]]:
        """Return (staleness, number of trained trajectories), by staleness."""
        with self._lock:
            return list(self._store.staleness().items())


def filter_of(query: Mapping[str, str]) -> SampleFilter:
    """Return the filter of a request. A range is two keys, such as `reward_from` and `reward_to`."""
    texts = ("purpose", "finish", "outcome", "worker", "source", "variant", "text")
    conditions: dict[str, Any] = {name: query[name] for name in texts if query.get(name)}
    if query.get("ticket"):
        conditions["ticket"] = query["ticket"]
    for name in ("step", "reward", "length", "staleness"):
        bounds = query.get(f"{name}_from") or None, query.get(f"{name}_to") or None
        if bounds != (None, None):
            conditions[name] = bounds
    try:
        return msgspec.convert(conditions, SampleFilter, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"a filter cannot be read: {error}") from error


def _ticket_of(query: Mapping[str, str]) -> SampleFilter:
    if not query.get("ticket"):
        raise ConfigError("the request names no ticket")
    return filter_of({"ticket": query["ticket"], "purpose": query.get("purpose", "train")})


def _count(query: Mapping[str, str], name: str, otherwise: int, most: int) -> int:
    text = query.get(name, "") or str(otherwise)
    if not text.isdecimal() or int(text) > most:
        raise ConfigError(f"{name} is a number from 0 to {most}, not {text[:40]!r}")
    return int(text)


def _group_preview(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    previews = [_preview(row) for row in rows]
    first = rows[0]
    expected = {name: value for name, value in (first["dataset_row"] or {}).items() if name != "prompt"}
    return {
        **{
            name: previews[0][name] for name in ("ticket", "purpose", "row", "step", "outcome", "prompt_text")
        },
        "expected": expected.get("answer", expected or None),
        "samples": previews,
    }


def _preview(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with only the beginnings of its texts: a page of long answers would have megabytes."""
    texts = cast("dict[str, str | None]", {name: row[name] for name in ("prompt_text", "text")})
    short = {name: text if text is None else text[:_PREVIEW] for name, text in texts.items()}
    return {
        name: value for name, value in row.items() if name not in ("messages", "dataset_row", "digest")
    } | short
