"""`stretto status`: what it says of kernels that live, hang and are gone."""

import os
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from statuses import make_status
from stretto.bus.server import lock_run
from stretto.cli.main import app
from stretto.cli.show.status import status_lines
from stretto.errors import ConfigError
from stretto.records.status import STATUS, WorkerStatus, read_status, standstill


def write(folder: Path, *, blocked_s: float = 0.0, **changes: Any) -> None:
    workers = [WorkerStatus("rollout-0", ready=True, silent_s=1.0, blocked_s=blocked_s)]
    usual = {"pid": os.getpid(), "version": 3, "steps": 10, "now": "now training", "workers": workers}
    status = make_status(**{**usual, "verdict": None, **changes})
    (folder / STATUS).write_bytes(msgspec.json.encode(status))


def test_it_says_who_waits_for_whom_and_who_stands_still(tmp_path: Path) -> None:
    with lock_run(tmp_path / "bus"):
        write(tmp_path)
        assert status_lines(tmp_path) == [
            "step 3 of 10, now training",
            "rollout-0: ready, heard 1 s ago",
            "rollout-0 waits for verifier-0 (score) since 94 s",
        ]
        write(tmp_path, written=time.time() - 40, connected=False, blocked_s=33.0)
        lines = status_lines(tmp_path)
        assert lines[1] == f"the kernel (pid {os.getpid()}) stands still: it wrote its status 40 s ago"
        assert lines[2] == "the kernel has no connection to nats-server"
        assert lines[3].endswith("its event loop stands still for 33 s")
        write(tmp_path, pid=1)
        assert "another one is starting" in status_lines(tmp_path)[-1]
        written = read_status(tmp_path)
        assert written is not None
        assert "another one is starting" in standstill(tmp_path, written)  # for `stretto watch` and the page
    assert "no kernel owns the run" in status_lines(tmp_path)[-1]


@pytest.mark.parametrize("command", ["status", "watch"])
def test_a_run_that_has_not_begun_has_no_folder(command: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [command, str(tmp_path / "first")])
    assert isinstance(result.exception, ConfigError)
    assert "does not exist: the run has not begun" in str(result.exception)


def test_a_folder_without_a_status_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        status_lines(tmp_path)
