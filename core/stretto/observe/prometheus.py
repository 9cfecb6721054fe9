"""Serves the figures of a run to Prometheus: `/metrics` over HTTP, in the kernel's event loop.

Figures are read without an await, so they belong to one moment, after the newest step is stored and reported.
Only a run with the section `metrics` imports this module.
"""

import re
import socket
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

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
    """Reads figures from the kernel's objects: `Status` has a few of them, rounded for views. Each has the
    label `run`, the run's id."""

    def __init__(self, setup: RunSetup, report: Report, bus: Bus) -> None:
        self._setup = setup
        self._report = report
        self._bus = bus
        self._totals: dict[tuple[str, Any], float] = {}
        """(counter, value of its label, () without a label) -> largest total so far."""

    def collect(self) -> Iterable[core.Metric]:
        """Yield every family of figures at this moment. A family without a value now has no sample."""
        setup, report, bus = self._setup, self._report, self._bus
        scheduler, fleet, facts = setup.scheduler, setup.fleet, setup.facts
        ledger, settings, evaluation = scheduler.ledger, scheduler.settings, scheduler.evaluation
        gauge = partial(self._family, core.GaugeMetricFamily)
        counter = partial(self._family, core.CounterMetricFamily)

        info = core.InfoMetricFamily("stretto_run", "The run", labels=["run"])
        info.add_metric([setup.run], {"name": setup.config.name, "algorithm": setup.config.algorithm.use})
        yield info
        yield counter("steps", "Complete train steps, which is the training version", scheduler.version)
        yield gauge("planned_steps", "Number of steps of the run", setup.config.steps)
        yield counter("run_seconds", "Seconds of the run, those before a resume included", facts.wall_s)
        yield gauge("remaining_seconds", "Estimate of the seconds up to the last step", report.left_s())

        yield counter("tickets_issued", "Training tickets that were issued", ledger.issued)
        accounts = {name: getattr(ledger, name) for name in ("trained", "filtered", "expired", "failed")}
        yield counter("tickets_retired", "Training tickets that ended, by account", accounts, "account")
        yield gauge("tickets_in_flight", "Training tickets that have not ended", ledger.in_flight)
        yield gauge("tickets_in_flight_limit", "Training tickets that may be in flight now", scheduler.room)
        groups = len(scheduler.tickets.finished)
        yield gauge("queue_finished_groups", "Finished groups that wait for training", groups)
        yield gauge("queue_batch_groups", "Groups of a batch", settings.batch_size)

        yield self._staleness()
        yield gauge("staleness_limit_steps", "Largest staleness that the run allows", settings.max_staleness)
        yield gauge(
            "staleness_effective_limit_steps",
            "Steps that generation may run ahead now; lower than the limit where batches are too off-policy",
            scheduler.staleness_limit,
        )

        yield counter("generated_tokens", "Tokens that were sampled", facts.generated_tokens)
        yield counter("trained_tokens", "Tokens that were trained", facts.trained_tokens)
        busy = {
            "generate": fleet.busy_s("inference"),
            "score": fleet.busy_s("verifier"),
            "train": report.train_busy_s,
        }
        yield counter("busy_seconds", "Seconds of work of all workers of a kind", busy, "work")
        yield counter("swaps", "Swaps of an engine's weights", report.swaps)
        yield counter("swap_pause_seconds", "Seconds in which engines paused for swaps", report.swap_pause_s)
        yield gauge("swap_pause_max_seconds", "Longest pause of a swap", report.swap_pause_max_s)

        workers = dict[tuple[str, str], int]()
        for role in ROLES:
            workers[role, "ready"] = len(fleet.of(role))
            workers[role, "starting"] = sum(worker.startswith(f"{role}-") for worker in fleet.starting)
        yield gauge("workers", "Workers by role and state", workers, "role", "state")
        yield counter("worker_restarts", "Restarts of workers", fleet.restarts)
        loads = {member.worker: load for member in fleet.of("inference") if (load := member.beat.load)}
        for name, text, field in (
            ("version", "Version that the engine serves", "version"),
            ("running_samples", "Samples that the engine decodes", "running"),
            ("waiting_samples", "Samples that wait for a slot", "waiting"),
            ("slots", "Samples that the engine can decode at once", "slots"),
            ("kv_used_ratio", "Share of the memory for the KV cache in use", "kv_used"),
        ):
            values = {worker: getattr(load, field) for worker, load in loads.items()}
            yield gauge(f"engine_{name}", text, values, "worker")

        yield gauge("bus_connected", "Whether the kernel has a connection to nats-server", bus.connected)
        refused = bus.refusals.count + fleet.refused()
        yield counter("bus_refused_messages", "Malformed messages that were refused", refused)
        waits = [bus.unanswered.longest(), *(member.beat.wait for member in fleet.members.values())]
        longest = max((wait.seconds for wait in waits if wait is not None), default=0.0)
        yield gauge("bus_longest_wait_seconds", "Age of the oldest request without an answer", longest)

        open_rules = {advice.rule for advice in report.adviser.open}
        rules = {rule.name: rule.name in open_rules for rule in RULES}
        yield gauge("advice_open", "Whether the advice of a rule is open", rules, "rule")

        yield counter("evaluations", "Complete evaluations", len(evaluation.results))
        newest, best = (evaluation.results or [None])[-1], evaluation.best
        for name, which, each in (("", "newest", newest), ("best_", "best", best)):
            of = f"of the {which} evaluation"
            yield gauge(f"evaluation_{name}version", f"Version {of}", each and each.version)
            yield gauge(f"evaluation_{name}accuracy", f"Held-out accuracy {of}", each and each.accuracy)
            yield gauge(f"evaluation_{name}reward", f"Held-out reward {of}", each and each.reward)
        under_way = evaluation.under_way is not None
        yield gauge("evaluation_running", "Whether an evaluation is under way", under_way)

        for key, figure in FIGURES.items():
            if not key.startswith("evaluation/"):
                yield gauge(gauge_of(key), figure.meaning, report.last.get(key))
        text, line = "Mean of each of the reward's metrics over the newest batch", report.last
        metrics = {key.removeprefix("reward/"): line[key] for key in line if key.startswith("reward/")}
        yield gauge("last_step_reward_metric", text, metrics, "metric")

    def _staleness(self) -> core.Metric:
        limit, seen = self._setup.scheduler.settings.max_staleness, self._setup.scheduler.staleness
        family = core.HistogramMetricFamily(
            "stretto_staleness_steps", "Staleness of the trained trajectories, in steps", labels=["run"]
        )
        bounds = range(max([limit, *seen]) + 1)
        buckets = [(str(float(bound)), sum(seen[age] for age in seen if age <= bound)) for bound in bounds]
        total = sum(age * count for age, count in seen.items())
        family.add_metric([self._setup.run], [*buckets, ("+Inf", seen.total())], total)
        return family

    def _family(
        self,
        kind: type[core.CounterMetricFamily | core.GaugeMetricFamily],
        name: str,
        text: str,
        value: float | Mapping[Any, float | None] | None,
        *labels: str,
    ) -> core.Metric:
        """Return a family of one value, or of one for each value of its label (for labels: each tuple)."""
        family = kind(f"stretto_{name}", text, labels=["run", *labels])
        for key, each in (value if isinstance(value, Mapping) else {(): value}).items():
            if each is not None:
                number = self._total(name, key, each) if kind is core.CounterMetricFamily else each
                family.add_metric([self._setup.run, *((key,) if isinstance(key, str) else key)], number)
        return family

    def _total(self, name: str, key: Any, value: float) -> float:
        """Return a total that never decreases: Prometheus would count a decrease as a restart. A heartbeat
        may be older than figures that the kernel had requested from the worker."""
        self._totals[name, key] = max(value, self._totals.get((name, key), value))
        return self._totals[name, key]
