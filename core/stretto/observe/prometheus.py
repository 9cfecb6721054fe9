"""Serves the figures of a run to Prometheus: `/metrics` over HTTP, in the kernel's event loop.

Figures are read without an await, so they belong to one moment, after the newest step is stored and reported.
Only a run with the section `metrics` imports this module.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Mapping

import anyio
import structlog
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from anyio.abc import TaskStatus
from prometheus_client import CollectorRegistry, core
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from stretto.bus.client import Bus
from stretto.config import MetricsConfig
from stretto.errors import RunError
from stretto.kernel.setup import RunSetup
from stretto.launcher import ROLES
from stretto.machine.interfaces import is_addressed
from stretto.observe.advice import RULES
from stretto.observe.report import Report
from stretto.records.figures import FIGURES

log = structlog.get_logger()

_REPORT_S = 1.0
"""Seconds for which an answer waits for the report of the newest step."""
_ENGINE = {
    "version": ("version", "Version that the engine serves"),
    "running": ("running_samples", "Samples that the engine decodes"),
    "waiting": ("waiting_samples", "Samples that wait for a slot"),
    "slots": ("slots", "Samples that the engine can decode at once"),
    "kv_used": ("kv_used_ratio", "Share of the memory for the KV cache in use"),
}
"""Field of `Load` -> (name after `stretto_engine_`, meaning)."""


async def serve_metrics(
    config: MetricsConfig, setup: RunSetup, report: Report, bus: Bus, *, task_status: TaskStatus[str]
) -> None:
    """Serve until cancelled. Report the URL of the figures when the server listens."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RunCollector(setup, report, bus))

    async def answer(request: web.Request) -> web.Response:
        with anyio.move_on_after(_REPORT_S):  # so that the figures are of one moment
            while report.version < setup.scheduler.version:
                await anyio.sleep(0.01)
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(registry), headers={"Content-Type": content_type})

    app = web.Application(middlewares=[_host_check(config.hosts)])
    app.router.add_get("/metrics", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    try:
        await runner.setup()
        try:
            await web.TCPSite(runner, config.address, config.port).start()
        except OSError as error:
            raise RunError(
                f"metrics: cannot listen at {config.address}, port {config.port}: {error.strerror or error}; "
                "set `metrics.port` to a free port, or to 0 for any"
            ) from error
        address, port = runner.addresses[0][:2]
        url = f"http://{f'[{address}]' if ':' in address else address}:{port}/metrics"
        log.info("metrics for Prometheus", url=url)
        task_status.started(url)
        await anyio.sleep_forever()
    finally:
        with anyio.CancelScope(shield=True):
            await runner.cleanup()


def _host_check(hosts: tuple[str, ...]) -> Middleware:
    """Refuse requests whose `Host` is not this machine. A web page can let its own host name resolve to this
    machine, but its browser then sends that name, not an address or this machine's name."""
    host_names = {"localhost", socket.gethostname().lower(), *(host.lower() for host in hosts)}

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not is_addressed(request.headers.get("Host", ""), host_names):
            raise web.HTTPForbidden(text="this machine has no such name; `metrics.hosts` may add it\n")
        return await handler(request)

    return check


def gauge_of(key: str) -> str:
    """Return the name, after `stretto_`, of a figure of the newest step, with its unit in full."""
    name = key.replace("/", "_")
    return "last_step_" + re.sub("_s$", "_seconds", re.sub("_per_s$", "_per_second", name))


class RunCollector(Collector):
    """Reads figures from the kernel's objects. Each has the label `run`, the run's id."""

    def __init__(self, setup: RunSetup, report: Report, bus: Bus) -> None:
        self._setup = setup
        self._report = report
        self._bus = bus
        self._totals: dict[tuple[str, str], float] = {}
        """(counter, value of its label) -> largest total so far."""

    def collect(self) -> Iterable[core.Metric]:
        """Yield every family of figures at this moment. A family without a value now has no sample."""
        yield from self._progress()
        yield from self._queue()
        yield from self._staleness()
        yield from self._speed()
        yield from self._workers()
        yield from self._bus_state()
        yield from self._advice()
        yield from self._evaluation()
        yield from self._last_step()

    def _progress(self) -> Iterable[core.Metric]:
        setup, report = self._setup, self._report
        info = core.InfoMetricFamily("stretto_run", "The run", labels=["run"])
        info.add_metric([setup.run], {"name": setup.config.name, "algorithm": setup.config.algorithm.use})
        yield info
        yield self._counter(
            "steps", "Complete train steps, which is the training version", setup.scheduler.version
        )
        yield self._gauge("planned_steps", "Number of steps of the run", setup.config.steps)
        yield self._counter(
            "run_seconds", "Seconds of the run, those before a resume included", setup.facts.wall_s
        )
        yield self._gauge("remaining_seconds", "Estimate of the seconds up to the last step", report.left_s())

    def _queue(self) -> Iterable[core.Metric]:
        scheduler = self._setup.scheduler
        ledger = scheduler.ledger
        accounts = {name: getattr(ledger, name) for name in ("trained", "filtered", "expired", "failed")}
        yield self._counter("tickets_issued", "Training tickets that were issued", ledger.issued)
        yield self._counters(
            "tickets_retired", "Training tickets that ended, by account", "account", accounts
        )
        yield self._gauge("tickets_in_flight", "Training tickets that have not ended", ledger.in_flight)
        yield self._gauge(
            "tickets_in_flight_limit", "Training tickets that may be in flight now", scheduler.room
        )
        groups = len(scheduler.tickets.finished)
        yield self._gauge("queue_finished_groups", "Finished groups that wait for training", groups)
        yield self._gauge("queue_batch_groups", "Groups of a batch", scheduler.settings.batch_size)

    def _staleness(self) -> Iterable[core.Metric]:
        scheduler = self._setup.scheduler
        limit, seen = scheduler.settings.max_staleness, scheduler.staleness
        family = core.HistogramMetricFamily(
            "stretto_staleness_steps", "Staleness of the trained trajectories, in steps", labels=["run"]
        )
        bounds = range(max([limit, *seen]) + 1)
        buckets = [(str(float(bound)), sum(seen[age] for age in seen if age <= bound)) for bound in bounds]
        total = sum(age * count for age, count in seen.items())
        family.add_metric([self._setup.run], [*buckets, ("+Inf", seen.total())], total)
        yield family
        yield self._gauge("staleness_limit_steps", "Largest staleness that the run allows", limit)
        yield self._gauge(
            "staleness_effective_limit_steps",
            "Steps that generation may run ahead now; lower than the limit where batches are too off-policy",
            scheduler.staleness_limit,
        )

    def _speed(self) -> Iterable[core.Metric]:
        report, fleet, facts = self._report, self._setup.fleet, self._setup.facts
        yield self._counter("generated_tokens", "Tokens that were sampled", facts.generated_tokens)
        yield self._counter("trained_tokens", "Tokens that were trained", facts.trained_tokens)
        busy = {
            "generate": fleet.busy_s("inference"),
            "score": fleet.busy_s("verifier"),
            "train": report.train_busy_s,
        }
        yield self._counters("busy_seconds", "Seconds of work of all workers of a kind", "work", busy)
        yield self._counter("swaps", "Swaps of an engine's weights", report.swaps)
        yield self._counter(
            "swap_pause_seconds", "Seconds in which engines paused for swaps", report.swap_pause_s
        )
        yield self._gauge("swap_pause_max_seconds", "Longest pause of a swap", report.swap_pause_max_s)

    def _workers(self) -> Iterable[core.Metric]:
        fleet = self._setup.fleet
        family = core.GaugeMetricFamily(
            "stretto_workers", "Workers by role and state", labels=["run", "role", "state"]
        )
        for role in ROLES:
            starting = sum(worker.startswith(f"{role}-") for worker in fleet.starting)
            family.add_metric([self._setup.run, role, "ready"], len(fleet.of(role)))
            family.add_metric([self._setup.run, role, "starting"], starting)
        yield family
        yield self._counter("worker_restarts", "Restarts of workers", fleet.restarts)
        loads = {member.worker: load for member in fleet.of("inference") if (load := member.beat.load)}
        for figure, (name, text) in _ENGINE.items():
            values = {worker: getattr(load, figure) for worker, load in loads.items()}
            yield self._gauges(f"engine_{name}", text, "worker", values)

    def _bus_state(self) -> Iterable[core.Metric]:
        bus, fleet = self._bus, self._setup.fleet
        waits = [bus.unanswered.longest(), *(member.beat.wait for member in fleet.members.values())]
        longest = max((wait.seconds for wait in waits if wait is not None), default=0.0)
        refused = bus.refusals.count + fleet.refused()
        yield self._gauge(
            "bus_connected", "Whether the kernel has a connection to nats-server", bus.connected
        )
        yield self._counter("bus_refused_messages", "Malformed messages that were refused", refused)
        yield self._gauge("bus_longest_wait_seconds", "Age of the oldest request without an answer", longest)

    def _advice(self) -> Iterable[core.Metric]:
        open_rules = {advice.rule for advice in self._report.adviser.open}
        rules = {rule.name: rule.name in open_rules for rule in RULES}
        yield self._gauges("advice_open", "Whether the advice of a rule is open", "rule", rules)

    def _evaluation(self) -> Iterable[core.Metric]:
        scheduler = self._setup.scheduler
        newest, best = (scheduler.evaluation.results or [None])[-1], scheduler.evaluation.best
        yield self._counter("evaluations", "Complete evaluations", len(scheduler.evaluation.results))
        for name, text, each in (
            ("", "the newest evaluation", newest),
            ("best_", "the best evaluation", best),
        ):
            version, *scores = (each.version, each.accuracy, each.reward) if each else (None, None, None)
            yield self._gauge(f"evaluation_{name}version", f"Version of {text}", version)
            for measure, score in zip(("accuracy", "reward"), scores, strict=True):
                yield self._gauge(f"evaluation_{name}{measure}", f"Held-out {measure} of {text}", score)
        under_way = scheduler.evaluation.under_way is not None
        yield self._gauge("evaluation_running", "Whether an evaluation is under way", under_way)

    def _last_step(self) -> Iterable[core.Metric]:
        line = self._report.last
        for key, figure in FIGURES.items():
            if not key.startswith("evaluation/"):
                yield self._gauge(gauge_of(key), figure.meaning, line.get(key))
        metrics = {key.removeprefix("reward/"): line[key] for key in line if key.startswith("reward/")}
        text = "Mean of each of the reward's metrics over the newest batch"
        yield self._gauges("last_step_reward_metric", text, "metric", metrics)

    def _gauge(self, name: str, text: str, value: float | None) -> core.Metric:
        return self._gauges(name, text, "", {"": value})

    def _gauges(self, name: str, text: str, label: str, values: Mapping[str, float | None]) -> core.Metric:
        labels = ["run", label] if label else ["run"]
        family = core.GaugeMetricFamily(f"stretto_{name}", text, labels=labels)
        for key, value in values.items():
            if value is not None:
                family.add_metric([self._setup.run, key][: len(labels)], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> core.Metric:
        return self._counters(name, text, "", {"": value})

    def _counters(self, name: str, text: str, label: str, values: Mapping[str, float]) -> core.Metric:
        labels = ["run", label] if label else ["run"]
        family = core.CounterMetricFamily(f"stretto_{name}", text, labels=labels)
        for key, value in values.items():
            family.add_metric([self._setup.run, key][: len(labels)], self._total(name, key, value))
        return family

    def _total(self, name: str, key: str, value: float) -> float:
        """Return a total that never decreases: Prometheus would count a decrease as a restart. A heartbeat
        may be older than figures that the kernel had requested from the worker."""
        self._totals[name, key] = max(value, self._totals.get((name, key), value))
        return self._totals[name, key]
