"""The shell lines of examples/cluster/skypilot.yaml, with a process for each of two machines."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tests.conftest import write_run_file

from patience import patience
from processes import spawning
from stretto.cli.audit.audit import audit_run
from stretto.records.run_folder import RunFolder

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parent.parent.parent


def test_a_machine_joins_the_run_of_the_first(tmp_path: Path) -> None:
    task = yaml.safe_load((ROOT / "examples/cluster/skypilot.yaml").read_text())
    lines = task["run"].replace("/invitations/", f"{tmp_path}/invitations/")
    assert lines != task["run"]
    file = write_run_file(tmp_path)
    file.write_text(file.read_text().replace("steps: 8", "steps: 60"))
    machines: list[subprocess.Popen[str]] = []
    with spawning() as spawn:
        for rank in range(task["num_nodes"]):
            home = tmp_path / f"home{rank}"
            home.mkdir()
            env = {
                **os.environ,
                **task["envs"],
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "HOME": str(home),
                "RUN_FILE": str(file),
                "SKYPILOT_TASK_ID": "first",
                "SKYPILOT_NODE_RANK": str(rank),
                "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
                "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1",
            }
            machines.append(spawn(["bash", "-c", lines], env=env))
        said = [machine.communicate(timeout=patience(240))[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], said
    run = tmp_path / "home0/runs/first"
    workers = {life.worker for life in RunFolder(run).history.lives}
    assert {"inference-h0", "rollout-h0"} <= workers
    assert audit_run(run).status == "clean"
    assert list((tmp_path / "invitations").iterdir()) == []
