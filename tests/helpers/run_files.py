"""What a run leaves in its folder, for tests of real and of simulated runs."""

import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from stretto.bus.messages.events import Event
from stretto.cli.audit.audit import AuditReport, audit_run
from stretto.records.run_folder import RunFolder

T = TypeVar("T")


class TestedRun(ABC):
    __test__ = False
    process: Any
    """Its kernel."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @abstractmethod
    def until(self, condition: Callable[[], Any]) -> Any:
        """Let it run until a condition holds, and return its value."""

    @abstractmethod
    def worker(self, name: str) -> Any:
        """The process of a worker; None if it does not live."""

    @abstractmethod
    def end(self) -> int:
        """Its exit status, once it has ended by itself."""

    @abstractmethod
    def text(self) -> str:
        """What it said."""

    @abstractmethod
    def assert_nothing_is_left(self) -> None:
        """No process of the run is there any more."""

    @abstractmethod
    def call(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """The result of a coroutine, which finds the run's server where the run's processes do. The function
        is one of a module."""

    def audit(self) -> AuditReport:
        return audit_run(self.folder)

    def assert_audit_is_clean(self) -> None:
        report = self.audit()
        assert report.status == "clean", [check for check in report.checks if check.violations]

    @abstractmethod
    def clock(self) -> float:
        """Seconds, in the time of the run."""

    @abstractmethod
    def stop_server(self) -> None:
        """Let the nats-server stand still until the kernel has ended."""

    @abstractmethod
    def operate(self, verb: str, *arguments: str, status: int = 0) -> str:
        """What `stretto scale` or `stretto stop` prints, which ends with this status."""

    def kill(self, *workers: str) -> None:
        """Kill the kernel, and workers, which would go on under the next one."""
        found = [self.worker(name) for name in workers]
        for process in (self.process, *found):
            process.kill()
        self.process.wait()

    def journal(self) -> list[Event]:
        """The events of a run that no kernel owns, in order."""
        return [event for _, event in RunFolder(self.folder).events()]

    def log(self, process: str = "kernel") -> list[dict[str, Any]]:
        return _whole_lines(self.folder / "logs" / f"{process}.jsonl")

    def until_a_call(self) -> None:
        """Into the first train step."""
        self.until(lambda: any(line["event"] == "call" for line in self.log("trainer-0")))

    def until_step(self, step: int) -> None:
        self.until(lambda: len(self.metrics()) >= step)

    def metrics(self) -> list[dict[str, Any]]:
        return [line for line in _whole_lines(self.folder / "metrics.jsonl") if "ledger" in line]

    def evaluations(self) -> list[dict[str, Any]]:
        return [line for line in _whole_lines(self.folder / "metrics.jsonl") if "ledger" not in line]

    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    def assert_balanced(self) -> dict[str, Any]:
        """Its summary, whose ledger adds up."""
        summary = self.summary()
        ledger = summary["ledger"]
        assert ledger["issued"] == sum(count for name, count in ledger.items() if name != "issued")
        members = summary["members"]
        waiting = members["sampled"] - sum(count for name, count in members.items() if name != "sampled")
        assert waiting == 0 if ledger["in_flight"] == 0 else waiting >= 0
        return summary

    def assert_completed(self, steps: int, batch_size: int = 4, bound: int = 2) -> dict[str, Any]:
        """It ends by itself with all that a finished run must have; its summary."""
        assert self.end() == 0, self.text()
        summary = self.assert_balanced()
        assert summary["status"] == "completed"
        assert summary["version"] == steps
        assert summary["ledger"]["trained"] == steps * batch_size
        assert summary["ledger"]["in_flight"] == 0
        assert max(map(int, summary["staleness"])) <= bound
        assert [line["step"] for line in self.metrics()] == list(range(1, steps + 1))
        self.assert_nothing_is_left()
        return summary


def _whole_lines(file: Path) -> list[dict[str, Any]]:
    """The lines of a file of JSON lines that are written to their end."""
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]
