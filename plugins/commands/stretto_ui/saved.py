"""`stretto report`: the page in one file, with the answers about some runs, so that it needs no server.

Browsers load no modules from a file, so each module becomes a function of one script. The policy allows the
script and style sheets by hash, and no address: texts of a run cannot run as code or send anything.
"""

import base64
import hashlib
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import msgspec

from stretto.errors import ConfigError
from stretto.models.images import names_in
from stretto.records.run_folder import HELD_OUT, find_runs
from stretto_ui.runs import ListedRun, Runs
from stretto_ui.server import STATIC, Page, Query, colours, fault_of

_MOST_BYTES = 16 << 20
"""Maximum bytes of all answers, in equal parts for the runs. Mail servers refuse 20 MB."""
_POINTS, _FEWEST_POINTS = 1000, 200
"""Maximum points of a curve, divided by the number of runs, and the minimum after the division."""
_PARTS = frozenset({"points", "keys", "width"})
"""Parameters that select a part of an answer. static/api.js omits them, because the file has the whole."""
_FIRST_PAGE = {"order": "-sequence", "limit": "50", "offset": "0"}
"""Parameters of the first request of static/samples.js."""
_LINKED = re.compile(
    r'<(?:link rel="stylesheet" href|(script)( type="module")? src)="/static/([^"]+)"( defer)?>(</script>)?'
)
_SHA256 = re.compile(r'"sha256":"([0-9a-f]{64})"')
_IMPORT = re.compile(r'^import \{(.*)\} from "\./(\w+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?(?:function|const|class) (\w+))", re.MULTILINE)


def save_report(folders: Sequence[Path], file: Path) -> str:
    """Write the report of the runs in and below some folders. Return a text about the omitted answers."""
    for folder in folders:
        if not find_runs(folder):
            raise ConfigError(f"{folder} holds no run")
    runs = Runs(folders)
    page = Page(runs)
    index = page.index({})
    ids = [row["id"] for row in index["runs"]]
    if not ids:
        raise ConfigError("; ".join(index["problems"]))
    saved = {each: _SavedRun(page, runs.get(each), len(ids)) for each in ids}
    answers = {"runs": _json(index), "figures": _json(page.figures({}))}
    if len(ids) > 1:
        query = {"runs": ",".join(ids)}
        comparison, answer = _asked(partial(page.comparison, query), "these runs")
        answers[_address("compare", query)] = _json(answer)
        for group in comparison.groups if comparison else ():
            first, *others = (
                each for each, run in zip(ids, comparison.runs, strict=True) if run.label in group.runs
            )
            saved[first].add_curves(others, [key for each in others for key in saved[each].keys])
    left_out = Counter[str]()
    for each in saved.values():
        each.add_samples()
        answers |= each.answers
        left_out += each.left_out
    without = ", ".join(f"{count} × {what}" for what, count in left_out.items())
    try:
        file.write_text(_document(answers, without))
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error}") from error
    return without


class _SavedRun:
    def __init__(self, page: Page, run: ListedRun, runs: int) -> None:
        self.answers: dict[str, str] = {}
        self.left_out = Counter[str]()
        self._page, self._run = page, run
        self._room = _MOST_BYTES // runs
        self._points = str(max(_FEWEST_POINTS, _POINTS // runs))
        facts = self._add("overview") or {}
        self.keys: list[str] = [*facts.get("keys", ()), *HELD_OUT]
        self._add("configuration", "/config")
        self._add("time of steps", "/time")
        self._add("staleness", "/staleness")
        self.add_curves()
        self._add("timeline", "/timeline", width="1200")
        self._add("log", "/logs")
        self._add("log", "/logs", problems="1")

    def add_curves(self, others: Sequence[str] = (), keys: Sequence[str] = ()) -> None:
        """Add the curves of the run; with `others`, ids of runs, the mean curves. `keys`: additional keys."""
        extra = {"others": ",".join(others)} if others else {}
        every = ",".join(quote(key, "") for key in dict.fromkeys((*self.keys, *keys)))
        self._add("curves", "/series", x="step", points=self._points, keys=every, **extra)

    def add_samples(self) -> None:
        """Add the newest groups of training and evaluation: texts of all, then images, then tokens."""
        groups = list[tuple[dict[str, str], list[dict[str, Any]]]]()
        for query in self._newest():
            listed = self._add("list of groups", "/groups", **query, **_FIRST_PAGE) or {}
            self._add("reward against length", "/points", **query)
            for listed_group in listed.get("groups", ()):
                ticket = {"ticket": str(listed_group["ticket"]), "purpose": str(listed_group["purpose"])}
                groups.append((ticket, self._add("group", "/group", **ticket) or []))
        for ticket, rows in groups:
            for image in _images(rows):
                self._add("image", "/image", **ticket, **image)
        for ticket, _ in groups:
            self._add("tokens of a group", "/tokens", **ticket)

    def _newest(self) -> list[dict[str, str]]:
        """Return the filters of the groups to add; without samples one empty filter, for the view."""
        pages: list[dict[str, str]] = []
        for purpose in ("train", "eval"):
            query = {"purpose": purpose, "order": "-step", "limit": "1"}
            newest = self._add("newest sample", "/samples", **query) or {"rows": []}
            for row in newest["rows"]:
                step = row["step"]
                bounds = {} if step is None else dict.fromkeys(("step_from", "step_to"), str(step))
                pages.append({"purpose": purpose, **bounds})
        return pages or [{}]

    def _add(self, what: str, name: str = "", **query: str) -> Any:
        """Add an answer and return it; None after an error, or if an answer of this kind was too large."""
        if self.left_out[what]:
            self.left_out[what] += 1
            return None
        answer, saved = _asked(partial(self._page.of_run[name], self._run, query), self._run.path)
        encoded = _json(saved)
        if (size := len(encoded.encode())) > self._room:
            self.left_out[what] += 1
            return None
        self._room -= size
        self.answers[_address(f"runs/{self._run.id}{name}", query)] = encoded
        return answer


def _asked(handler: Callable[[], Any], run: str) -> tuple[Any, Any]:
    """Return the answer and the value to save; after an error, None and the server's error."""
    try:
        answer = handler()
    except Exception as error:  # noqa: BLE001 - `fault_of` says why
        return None, {"error": fault_of(error, run)}
    if isinstance(answer, bytes):
        return answer, {"address": _data_address("image/png", answer)}
    return answer, answer


def _images(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, str]]:
    names = [name for row in rows[:1] for name in names_in(row["dataset_row"])]
    yield from ({"number": str(number)} for number, name in enumerate(names) if isinstance(name, str))
    digests = _SHA256.findall(_json([row["messages"] for row in rows]))
    yield from ({"sha256": digest} for digest in dict.fromkeys(digests))


def _document(answers: Mapping[str, str], without: str) -> str:
    hashes: dict[str, list[str]] = {"script": [], "style": []}

    def inline(link: re.Match[str]) -> str:
        tag, kind, source = link[1] or "style", link[2] or "", _source(link[3])
        digest = hashlib.sha256(source.encode()).digest()
        hashes[tag].append(f"'sha256-{base64.b64encode(digest).decode()}'")
        return f"<{tag}{kind}>{source}</{tag}>"

    html = _LINKED.sub(inline, (STATIC / "index.html").read_text())
    scripts, styles = map(" ".join, hashes.values())
    policy = (
        f"default-src 'none'; script-src {scripts}; style-src {styles}; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    written = f"report of {time.strftime('%Y-%m-%d %H:%M')}"
    note = (
        f"A {written}: curves of at most {_POINTS} points, the newest steps of the timeline, the kernel's "
        "newest log lines, the groups of the newest step and of the newest evaluation. "
        "<code>stretto ui</code> shows everything."
        + (f" There was no room for {without}." if without else "")
    )
    answers = {"written": _json(written), **answers}
    data = ",".join(f"{_json(path)}:{answer}" for path, answer in answers.items())
    licence = (STATIC / "vendor" / "uPlot.LICENSE").read_text()
    for mark, addition in (
        ('<meta charset="utf-8">', f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        ("<title>stretto</title>", f"<!-- uPlot: {licence} -->"),
        ("</main>", f'<footer>{note}</footer><script type="application/json" id="saved">{{{data}}}</script>'),
    ):
        html = html.replace(mark, mark + addition, 1)
    icon = _data_address("image/svg+xml", (STATIC / "icon.svg").read_bytes())
    return html.replace("/static/icon.svg", icon, 1)


def _source(name: str) -> str:
    if name == "colours.css":
        return colours()
    if name == "app.js":
        modules: dict[str, str] = {}
        _add_module("app", modules)
        return "".join(modules.values())
    return (STATIC / name).read_text()


def _add_module(name: str, modules: dict[str, str]) -> None:
    """Add a module as a constant `NAME_js` with its exports, after the modules that it imports."""
    source = (STATIC / f"{name}.js").read_text()
    for _, imported in _IMPORT.findall(source):
        if imported not in modules:
            _add_module(imported, modules)
    exports = ", ".join(exported for _, exported in _EXPORT.findall(source))
    body = _EXPORT.sub(r"\1", _IMPORT.sub(r"const {\1} = \2_js;", source))
    modules[name] = f"const {name}_js = await (async () => {{\n{body}\nreturn {{ {exports} }};\n}})();\n"


def _json(value: Any) -> str:
    """Return JSON without `<`, so that no text in it ends the script element."""
    return msgspec.json.encode(value).decode().replace("<", "\\u003c")


def _address(path: str, query: Query) -> str:
    """Return the key under which static/api.js finds an answer."""
    parameters = sorted((name, value) for name, value in query.items() if name not in _PARTS)
    return f"{path}?{urlencode(parameters)}" if parameters else path


def _data_address(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
