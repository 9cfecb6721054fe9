"""The kernel's endpoint for Prometheus: who may read it, and figures that a healthy run never has."""

import re
import socket
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import anyio
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kernel_setup import make_setup
from stretto.bus.client import Bus
from stretto.bus.messages.events import Evaluation
from stretto.bus.messages.membership import Heartbeat, Wait
from stretto.config import MetricsConfig
from stretto.engine import Load
from stretto.errors import RunError, leaves
from stretto.kernel.fleet.fleet import FleetMember
from stretto.kernel.setup import RunSetup
from stretto.observe.advice import Advice
from stretto.observe.observers import Observers
from stretto.observe.prometheus import gauge_of, serve_metrics
from stretto.observe.report import Report
from stretto.records.figures import FIGURES


class QuietBus:
    """A bus without a connection, on which the kernel waits for an answer."""

    connected = False
    refusals = SimpleNamespace(count=3)
    unanswered = SimpleNamespace(longest=lambda: Wait("trainer-0", "call", 12.5))


@pytest.fixture
def setup(tmp_path: Path) -> RunSetup:
    queue = {"batch_size": 2, "max_staleness": 3, "max_divergence": 0.1}
    return make_setup(tmp_path, queue=queue, steps=9)


@asynccontextmanager
async def served(setup: RunSetup, report: Report | None = None, **section: Any) -> AsyncGenerator[str]:
    """The URL of the figures, in the block. Without a report they are those of a new one."""
    async with anyio.create_task_group() as tasks:
        bus, report = cast("Bus", QuietBus()), report or Observers(setup).report
        yield await tasks.start(serve_metrics, MetricsConfig(**section), setup, report, bus)
        tasks.cancel_scope.cancel()


async def get(url: str, **headers: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as answer:
        return answer.status, await answer.text()


async def figures(url: str) -> dict[str, float]:
    """Each figure, by its name and the values of its labels, without the run's: `workers/trainer/ready`."""
    status, text = await get(url)
    assert status == 200
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [value for label, value in sample.labels.items() if label != "run"]
            found["/".join([sample.name.removeprefix("stretto_"), *labels])] = sample.value
    return found


async def test_trouble_is_in_the_figures(setup: RunSetup) -> None:
    fleet, scheduler, report = setup.fleet, setup.scheduler, Observers(setup).report
    fleet.starting["rollout-0"] = "loading"
    fleet.restarts = 2
    beat = Heartbeat("verifier-0", "n", ready=True, refused=4)
    lost = FleetMember("verifier-0", "verifier", "n", "here", time.monotonic(), beat, ready=True)
    fleet.members["verifier-0"] = lost
    scheduler.start()
    scheduler.evaluation.results = [Evaluation(0, 0.5, 4, 0), Evaluation(2, None, 0, 4)]
    report.adviser.given = [
        Advice(rule="truncation", since=1, said=2, message="raise it"),
        Advice(rule="plateau", since=1, said=2, until=3, message="over"),
    ]
    report.last = {"step": 3, "loss": float("nan"), "reward/format": 0.25}
    async with served(setup, report) as url:
        found = await figures(url)
    assert found["workers/rollout/starting"] == 1
    assert found["workers/verifier/ready"] == 1
    assert found["worker_restarts_total"] == 2
    assert found["bus_connected"] == 0
    assert found["bus_refused_messages_total"] == 7
    assert found["bus_longest_wait_seconds"] == 12.5
    assert (found["advice_open/truncation"], found["advice_open/plateau"]) == (1, 0)
    assert (found["tickets_in_flight"], found["tickets_in_flight_limit"]) == (8, 8)
    assert (found["staleness_limit_steps"], found["staleness_effective_limit_steps"]) == (3, 3)
    assert found["evaluation_version"] == 2
    assert "evaluation_accuracy" not in found
    assert (found["evaluation_best_version"], found["evaluation_best_accuracy"]) == (0, 0.5)
    assert found["last_step_loss"] != found["last_step_loss"]
    assert found["last_step_reward_metric/format"] == 0.25
    assert "last_step_entropy" not in found


async def test_a_bound_on_divergence_shows_the_limit_that_holds_now(setup: RunSetup) -> None:
    setup.scheduler._gate.limit = 1  # pyright: ignore[reportPrivateUsage]
    async with served(setup) as url:
        found = await figures(url)
    assert (found["staleness_limit_steps"], found["staleness_effective_limit_steps"]) == (3, 1)
    assert found["tickets_in_flight_limit"] == 4


async def test_a_total_does_not_go_back_with_a_late_heartbeat(setup: RunSetup) -> None:
    def load(tokens: int) -> Load:
        return Load(0, 1, 0, 8, generated_tokens=tokens, busy_s=1.0, swaps=0, pause_s=0.0, pause_max_s=0.0)

    beat = Heartbeat("inference-0", "n", ready=True, load=load(90))
    engine = FleetMember("inference-0", "inference", "n", "here", time.monotonic(), beat, ready=True)
    setup.fleet.members["inference-0"] = engine
    async with served(setup) as url:
        totals: list[float] = []
        for tokens in (90, 70, 100):
            engine.beat = msgspec.structs.replace(beat, load=load(tokens))
            found = await figures(url)
            totals.append(found["generated_tokens_total"])
            assert found["engine_slots/inference-0"] == 8
    assert totals == [90, 90, 100]


async def test_names_follow_the_conventions_and_the_page_lists_them(setup: RunSetup) -> None:
    async with served(setup) as url:
        _, text = await get(url)
    families = list(text_string_to_metric_families(text))
    for family in families:
        assert re.fullmatch(r"stretto_[a-z_]+", family.name)
        assert family.documentation
        assert not re.search(r"(_ms|_s|_milliseconds|_count|_percent)$", family.name)
        for sample in family.samples:
            assert sample.name.endswith("_total") == (family.type == "counter")
            assert sample.labels["run"] == setup.run
    suffixes = {"counter": "_total", "info": "_info"}
    names = {
        family.name if family.name.endswith("_info") else f"{family.name}{suffixes.get(family.type, '')}"
        for family in families
    }
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    of_steps = {f"stretto_{gauge_of(key)}" for key in FIGURES if "evaluation/" not in key}
    assert of_steps <= names
    listed = page.partition("### Figures")[2].partition("### Dashboard")[0]
    assert set(re.findall(r"`(stretto_\w+)`", listed)) - of_steps == names - of_steps


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:9464", 200),
        ("127.0.0.1", 200),
        ("[::1]:9464", 200),
        ("10.1.2.3", 200),  # an address is no name that another machine could have
        (socket.gethostname(), 200),
        ("trainer.example:80", 200),
        ("TRAINER.example", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("[::1", 403),
        ("", 403),
    ],
)
async def test_only_names_of_this_machine_are_answered(setup: RunSetup, host: str, status: int) -> None:
    """A page in a browser may point its own name at this machine."""
    async with served(setup, hosts=("trainer.example",)) as url:
        found, text = await get(url, Host=host)
    assert found == status
    assert ("stretto_steps_total" in text) == (status == 200)


async def test_nothing_else_is_served_and_nothing_is_taken(setup: RunSetup) -> None:
    async with served(setup) as url, aiohttp.ClientSession() as session:
        async with session.get(url.removesuffix("metrics")) as answer:
            assert answer.status == 404
        async with session.post(url, data=b"x") as answer:
            assert answer.status == 405


async def test_the_port_is_free_again_afterwards(setup: RunSetup) -> None:
    async with served(setup) as url:
        port = int(url.removesuffix("/metrics").rpartition(":")[2])
    async with served(setup, port=port) as again:
        assert (await get(again))[0] == 200


async def test_a_port_in_use_is_named(setup: RunSetup) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ExceptionGroup) as raised:  # of the task group
            async with served(setup, port=port):
                pass
    [error] = leaves(raised.value)
    assert isinstance(error, RunError)
    assert f"cannot listen at 127.0.0.1, port {port}" in str(error)
    assert "metrics.port" in str(error)
