"""The server of the page. It reads the folders of runs. No request changes anything."""

import asyncio
import logging
import math
import signal
import ssl
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from stretto.errors import ConfigError
from stretto.machine.interfaces import is_loopback
from stretto.records.charts import COLOURS, FIGURES, STEP_PARTS, part_texts, step_times
from stretto.records.comparison import compare_runs
from stretto.records.run_folder import RunFolder
from stretto_ui.access import Access
from stretto_ui.curves import ShownCurve, curve
from stretto_ui.lanes import lanes
from stretto_ui.overview import overview
from stretto_ui.runs import ListedRun, Runs, differing
from stretto_ui.samples import Samples

_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".LICENSE": "text/plain",
}
STATIC = Path(str(files("stretto_ui") / "static"))
_log = logging.getLogger(__name__)
_SHUTDOWN_S = 2.0  # maximum wait for open requests at the server's end
_COMPRESSED = 1024  # answers of at least this many bytes are compressed
_MOST_POINTS = 4000  # of a curve
_MOST_KEYS = 400  # of a request for curves
_MOST_LINES = 1000  # of a log

Query = Mapping[str, str]


class Page:
    """The answers about some runs, for one server or one report."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self.of_run: dict[str, Callable[[ListedRun, Query], Any]] = {
            "": self.overview,
            "/series": self.series,
            "/time": self.time,
            "/staleness": self.staleness,
            "/timeline": self.timeline,
            "/samples": _of_samples(Samples.page),
            "/groups": _of_samples(Samples.groups),
            "/points": _of_samples(Samples.points),
            "/group": _of_samples(Samples.group),
            "/tokens": self.tokens,
            "/image": _of_samples(Samples.image),
            "/config": self.config,
            "/logs": self.logs,
        }
        """What follows a run's address -> its handler."""

    def index(self, query: Query) -> Any:
        shown: list[ListedRun] = []
        rows: list[dict[str, Any]] = []
        problems: list[str] = []
        for run in self._runs.all():
            try:
                rows.append(run.row())
                shown.append(run)
            except Exception as error:  # noqa: BLE001 - `fault_of` says why
                problems.append(fault_of(error, run.path))
        return {
            "folder": None if self._runs.folder is None else str(self._runs.folder),
            "single": self._runs.single,
            "runs": rows,
            **differing(shown, rows),
            "problems": problems,
        }

    def figures(self, query: Query) -> Any:
        return {
            key: {
                **msgspec.structs.asdict(figure),
                "name": figure.name,
                "title": figure.title,
                "part": STEP_PARTS.index(key) % len(COLOURS) if key in STEP_PARTS else None,
            }
            for key, figure in FIGURES.items()
        }

    def comparison(self, query: Query) -> Any:
        """Return the comparison of several runs, as in `stretto compare`."""
        with self._records(query.get("runs", "").split(",")) as records:
            return compare_runs(records)

    def overview(self, run: ListedRun, query: Query) -> Any:
        with run.read() as record:
            return {"id": run.id, "path": run.path, **overview(record)}

    def series(self, run: ListedRun, query: Query) -> Any:
        """Return curves in a window, of the run or its mean with `others`; x of evaluations is a version."""
        keys = [unquote(key) for key in query.get("keys", "").split(",")[:_MOST_KEYS]]
        x = query.get("x", "step")
        if x not in ("step", "time_s"):
            raise ConfigError(f"no x-axis {x!r}: step, time_s")
        start, end = _number(query, "start"), _number(query, "end")
        points = int(_number(query, "points") or 1000)
        smoothing = _number(query, "smoothing") or 0.0
        if not 0 <= smoothing < 1 or not 1 <= points <= _MOST_POINTS:
            raise ConfigError(f"smoothing is 0 to below 1, points is 1 to {_MOST_POINTS}")
        curves: dict[str, ShownCurve] = {}
        others = [run_id for run_id in query.get("others", "").split(",") if run_id]
        with self._records([run.id, *others]) as records:
            for key in keys:
                is_evaluation = key.startswith("evaluation/")
                lines = [record.evaluations if is_evaluation else record.steps for record in records]
                weight = 0.0 if is_evaluation else smoothing
                curves[key] = curve(lines, key, x=x, start=start, end=end, points=points, smoothing=weight)
        return {"x": x, "curves": curves}

    def time(self, run: ListedRun, query: Query) -> Any:
        """Return how steps spent their time: all in columns, and the newest; None before the second step."""
        with run.read() as record:
            times = step_times(record)
        if times is None:
            return None
        return {"head": times.head, "columns": times.columns, "parts": part_texts(times.parts)}

    def staleness(self, run: ListedRun, query: Query) -> Any:
        """Return the number of trained trajectories at each staleness."""
        with run.read() as record:
            summary = record.summary
        if summary is not None:
            counts = [(int(staleness), count) for staleness, count in summary.get("staleness", {}).items()]
            return {"counts": sorted(counts), "source": ""}
        return {"counts": run.samples.staleness(), "source": "from the kept samples"}

    def timeline(self, run: ListedRun, query: Query) -> Any:
        """Return the timeline in a window; None if the run has no timeline."""
        width = int(_number(query, "width") or 1000)
        if not 1 <= width <= _MOST_POINTS:
            raise ConfigError(f"width is 1 to {_MOST_POINTS} pixels")
        with run.read() as record:
            return lanes(record, _number(query, "start"), _number(query, "end"), width)

    def tokens(self, run: ListedRun, query: Query) -> Any:
        with run.read() as record:
            model = record.config.get("model")
        return run.samples.tokens(query, model)

    def config(self, run: ListedRun, query: Query) -> Any:
        """Return the config values of a run by dotted key, and the run's origin."""
        with run.read() as record:
            return {"name": record.name, "values": list(record.values().items()), "origin": record.origin()}

    def logs(self, run: ListedRun, query: Query) -> Any:
        """Return the newest lines of one log, and the names of all logs."""
        with run.read() as record:
            names = record.logs()
            name = query.get("name") or next(iter(sorted(names, key=lambda each: each != "kernel")), "")
            problems = query.get("problems") == "1"
            text = query.get("text", "")
            attempts = record.attempts()
            number = int(_number(query, "attempt") or 0)
            since, until = [("", ""), *pairwise([*attempts, ""])][
                number if 0 < number <= len(attempts) else 0
            ]
            lines = (
                record.log(name, _MOST_LINES, containing=text, problems=problems, since=since, until=until)
                if names
                else []
            )
            return {"names": names, "name": name, "lines": lines, "most": _MOST_LINES, "attempts": attempts}

    @contextmanager
    def _records(self, ids: Sequence[str]) -> Generator[list[RunFolder]]:
        try:
            runs = [self._runs.get(run_id) for run_id in ids]
        except KeyError as error:
            text = f"there is no run {str(error.args[0])[:40]!r} below this folder, or no longer"
            raise ConfigError(text) from error
        with ExitStack() as lent:
            # Lock in the order of ids, so that two requests never wait for each other.
            ordered = sorted(set(runs), key=lambda run: run.id)
            records = {run.id: lent.enter_context(run.read()) for run in ordered}
            yield [records[run.id] for run in runs]
        for run_id in ids:  # `get` closes the oldest runs if too many are open
            self._runs.get(run_id)


def _of_samples(answer: Callable[[Samples, Query], Any]) -> Callable[[ListedRun, Query], Any]:
    """Return the handler of a method of a run's kept samples."""
    return lambda run, query: answer(run.samples, query)


def application(folder: Path | None, access: Access) -> web.Application:
    """Return the web application of the server, for the runs below `folder`."""
    runs = Runs([folder] if folder else [])
    runs.all()
    page = Page(runs)
    app = web.Application(middlewares=[access.check, _errors])
    app.router.add_get("/", _file("index.html"))
    # Browsers request /favicon.ico for a document without an icon, such as the one that sets the cookie.
    app.router.add_get("/favicon.ico", _file("icon.svg"))
    for file in STATIC.rglob("*"):
        if file.is_file():
            name = str(file.relative_to(STATIC))
            app.router.add_get(f"/static/{name}", _file(name))
    app.router.add_get("/static/colours.css", _content(colours().encode(), "text/css"))
    app.router.add_get("/api/runs", _answer(page.index))
    app.router.add_get("/api/figures", _answer(page.figures))
    app.router.add_get("/api/compare", _answer(page.comparison))
    for name, handler in page.of_run.items():
        app.router.add_get(f"/api/runs/{{run}}{name}", _of_run(runs, handler))
    return app


async def serve(
    folder: Path | None,
    host: str,
    port: int,
    announce: Callable[[str], None],
    *,
    certificate: Path | None = None,
    insecure: bool = False,
) -> None:
    """Serve the page until SIGINT or SIGTERM. `announce` is called with the address, token included."""
    if certificate is None and not insecure and not is_loopback(host):
        raise ConfigError(
            f"--host {host}: whoever can read the network would read the page and its token; give "
            "--certificate for TLS, use a tunnel to loopback, or say --insecure"
        )
    tls = _server_context(certificate) if certificate is not None else None
    access = Access(host)
    runner = web.AppRunner(
        application(folder, access), access_log=None, handle_signals=False, shutdown_timeout=_SHUTDOWN_S
    )
    await runner.setup()
    ended = asyncio.Event()
    for stop_signal in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(stop_signal, ended.set)
    try:
        try:
            await web.TCPSite(runner, host, port, ssl_context=tls).start()
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error}") from error
        shown = f"[{host}]" if ":" in host else host
        announce(f"http{'s' if tls else ''}://{shown}:{runner.addresses[0][1]}/?token={access.token}")
        await ended.wait()
    finally:
        await runner.cleanup()


def _server_context(certificate: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, certificate.with_suffix(".key"), password="")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--certificate {certificate}: expected a certificate, and its key in "
            f"{certificate.with_suffix('.key').name} beside it: {error}"
        ) from error
    return context


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        response = await handler(request)
    except web.HTTPException:
        raise
    except Exception as error:  # noqa: BLE001
        status = 400 if isinstance(error, ConfigError) else 500
        response = _json({"error": fault_of(error, "this run")}, status)
    if isinstance(response, web.Response) and (response.content_length or 0) >= _COMPRESSED:
        response.enable_compression()
    return response


def fault_of(error: Exception, run: str) -> str:
    """Return why a run cannot be shown. Its files may have any content, so every error is the run's."""
    if isinstance(error, ConfigError):
        return str(error)
    _log.error("cannot show a run", exc_info=error)
    return f"the files of {run} cannot be shown: {type(error).__name__}: {error}"


def _of_run(runs: Runs, handler: Callable[[ListedRun, Query], Any]) -> Handler:
    def answer(run_id: str, query: Query) -> Any:
        try:
            run = runs.get(run_id)
        except KeyError:
            return _json({"error": "there is no such run below this folder, or no longer"}, status=404)
        return handler(run, query)

    async def respond(request: web.Request) -> web.Response:
        return await _in_thread(partial(answer, request.match_info["run"], request.query))

    return respond


def _answer(handler: Callable[[Query], Any]) -> Handler:
    async def respond(request: web.Request) -> web.Response:
        return await _in_thread(partial(handler, request.query))

    return respond


async def _in_thread(work: Callable[[], Any]) -> web.Response:
    """Call `work` and encode its answer in a thread; bytes are a PNG. The thread is a daemon, so the server's
    end does not wait for a disk that does not respond."""
    answered: Future[web.Response] = Future()
    answered.set_running_or_notify_cancel()

    def response() -> web.Response:
        answer = work()
        if isinstance(answer, web.Response):
            return answer
        if isinstance(answer, bytes):
            return web.Response(body=answer, content_type="image/png")
        return web.Response(body=msgspec.json.encode(answer), content_type="application/json")

    def run() -> None:
        try:
            answered.set_result(response())
        except Exception as error:  # noqa: BLE001 - raised again where the request waits
            answered.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(answered)


def _json(value: Any, status: int) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def _file(name: str) -> Handler:
    """Return the handler of one file of the page. The file is read now, so no request reads a path."""
    return _content((STATIC / name).read_bytes(), _TYPES[Path(name).suffix])


def colours() -> str:
    """Return the style sheet with the colours of runs in both themes, and the number of colours."""
    numbered = list(enumerate(COLOURS))
    light = "".join(f"--c{number}:{colour.light};" for number, colour in numbered)
    dark = "".join(f"--c{number}:{colour.dark};" for number, colour in numbered)
    classes = "".join(f".k{number}{{background:var(--c{number})}}" for number, _ in numbered)
    return f':root{{--hues:{len(COLOURS)};{light}}}:root[data-theme="dark"]{{{dark}}}{classes}'


def _content(body: bytes, content_type: str) -> Handler:
    async def respond(request: web.Request) -> web.Response:
        return web.Response(body=body, content_type=content_type, charset="utf-8")

    return respond


def _number(query: Query, name: str) -> float | None:
    text = query.get(name, "")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"{name} is not a number: {text[:40]!r}")
    return value
