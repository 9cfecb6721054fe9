"""Write the list of events in docs/events.md from their docstrings: `python docs/fill_events.py`.

The list stands between `<!-- events -->` and `<!-- end -->`. A test fails if filling would change the page.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from stretto.bus.messages import events

PAGE = Path(__file__).with_name("events.md")
PART = re.compile(r"(<!-- events -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(page: str) -> str:
    """The page with the list as it should be."""
    return PART.sub(lambda match: match[1] + "\n".join(_lines()) + "\n" + match[2], page)


def _lines() -> Iterator[str]:
    yield from ("| event | what it has | meaning |", "|---|---|---|")
    for event in get_args(events.Event):
        fields = ", ".join(f"`{name}`" for name in event.__struct_fields__)
        meaning = " ".join((inspect.getdoc(event) or "").partition("\n\n")[0].split())
        yield f"| `{event.__name__}` | {fields} | {meaning} |"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
