"""Runs on a real Ray cluster: three nodes on this machine (`make test-clusters`)."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
from tests.conftest import Run, Start, write_run_file

from cluster_page import Section, filled
from patience import patience
from processes import arguments_of
from stretto import Context
from stretto.bus.server import free_port
from stretto.component import Problem
from stretto.errors import LaunchError
from stretto.launcher import ROLES, Job
from stretto.testing import LauncherConformance
from stretto_ray import RayConfig
from waiting import until
from worker_jobs import job as worker_job

pytest.importorskip("ray", reason="needs `pip install 'stretto[ray]'`")
from stretto_ray.launcher import RayHandle, RayLauncher

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(patience(600))]

ROOT = Path(__file__).parent.parent.parent
CONTEXT = Context(run="r", name="n", seed=0)
RAY = str(Path(sys.executable).with_name("ray"))
PYTHONS = sum(1 << (number - 1) for number in (signal.SIGPIPE, signal.SIGXFSZ))
"""The signals that Python itself ignores."""
STATE = "import os; print(open('/proc/self/status').read()); print(dict(os.environ))"


class Nodes:
    """The nodes of a Ray cluster, each a `ray start` and its children."""

    def __init__(self, folder: Path, hidden: Path) -> None:
        self._folder = folder
        self._hidden = hidden
        """What node3 does not see: there, a private mount hides it."""
        self.ip = own_address()
        self._port = free_port(self.ip)
        self.address = f"{self.ip}:{self._port}"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        number = int(name.removeprefix("node"))
        shared = {"shared": 100, "seat": 1, **({"first": 100} if number == 1 else {})}
        resources = shared if number < 3 else {"hidden": 100}
        head = ["--head", f"--port={self._port}", "--include-dashboard=false"]
        where = head if number == 1 else [f"--address={self.address}"]
        options = [
            *("--num-cpus=8", f"--num-gpus={2 if number < 3 else 0}", f"--node-name={name}"),
            *("--disable-usage-stats", "--object-store-memory=100000000"),
            *("--block", f"--resources={json.dumps(resources)}", f"--node-ip-address={self.ip}"),
        ]
        command = [RAY, "start", *where, *options]
        if number == 3:
            hide = f'mount -t tmpfs none {self._hidden} && exec "$@"'
            command = ["unshare", "--mount", "bash", "-c", hide, "bash", *command]
        said = self._folder / f"{name}.out"
        with said.open("ab") as file:
            process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, stdin=subprocess.DEVNULL)
        self._processes[name] = process
        until(lambda: process.poll() is not None or name in self.living(), otherwise=said.read_text)
        assert process.poll() is None, said.read_text()

    def living(self) -> set[str]:
        """The names of the nodes that Ray takes for alive."""
        code = (
            f"import ray; ray.init({self.address!r}, configure_logging=False)\n"
            "print('living', *(node['NodeName'] for node in ray.nodes() if node['Alive']))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        found = re.search(r"^living (.*)$", done.stdout, re.MULTILINE)
        return set(found[1].split()) if found else set()

    def actors(self) -> list[psutil.Process]:
        heads = [psutil.Process(process.pid) for process in self._processes.values()]
        children = [child for head in heads for child in head.children(recursive=True)]
        return [child for child in children if "ray::WorkerActor" in " ".join(arguments_of(child))]

    def kill(self, name: str) -> None:
        process = self._processes.pop(name)
        parent = psutil.Process(process.pid)
        for each in [parent, *parent.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait()

    def stop(self) -> None:
        for name in sorted(self._processes, reverse=True):
            self.kill(name)


def own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return probe.getsockname()[0]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """`node1`, the head, and `node2` with two GPUs each, and `node3`, which does not see the tests' files."""
    nodes = Nodes(tmp_path_factory.mktemp("ray"), tmp_path_factory.getbasetemp())
    try:
        for number in (1, 2, 3):
            nodes.start(f"node{number}")
        yield nodes
    finally:
        import_module("ray").shutdown()  # or this process asks a head that is gone, again and again
        nodes.stop()


def places(run: Run) -> dict[str, list[tuple[str, int]]]:
    """The nodes on which each worker has run, and its process ids, in order."""
    found: dict[str, list[tuple[str, int]]] = {}
    for log in (run.folder / "logs").glob("*.out"):
        started = re.findall(r"^stretto: (\S+) on (\S+), pid (\d+)$", log.read_text(), re.MULTILINE)
        for worker, node, pid in started:
            found.setdefault(worker, []).append((node, int(pid)))
    return found


def nodes_of(run: Run) -> dict[str, list[str]]:
    return {worker: [node for node, _ in each] for worker, each in places(run).items()}


def on_cluster(nodes: Nodes, **resources: Mapping[str, float]) -> list[str]:
    """Overrides for a run on the nodes that see its dataset, and on others for roles with resources."""
    shared: dict[str, Mapping[str, float]] = {role: {"shared": 1} for role in ROLES}
    section = {"use": "ray", "address": nodes.address, "resources": shared | resources}
    return [f"launcher={json.dumps(section)}", "weights=bus"]


def assert_ended(run: Run) -> None:
    pids = {pid for each in places(run).values() for _, pid in each}
    assert pids
    until(lambda: not any(map(is_worker, pids)), lambda: f"left: {[*filter(is_worker, pids)]}")


def is_worker(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return "stretto.workers" in psutil.Process(pid).cmdline()
    return False


class TestRay(LauncherConformance):
    use = "ray"
    run = {"weights": "bus"}

    @pytest.fixture(scope="class")
    @classmethod
    def section(cls, nodes: Nodes) -> Mapping[str, Any]:
        # The jobs write into the tests' folders.
        return {"use": "ray", "address": nodes.address, "resources": {"rollout": {"shared": 1}}}


def job(folder: Path, worker: str, code: str = "import time; time.sleep(600)", **options: Any) -> Job:
    return worker_job(worker, code=code, folder=folder, **options)


@pytest.fixture
def launcher(nodes: Nodes) -> RayLauncher:
    config = RayConfig(address=nodes.address, resources={"rollout": {"shared": 1}}, start_s=patience(60))
    return RayLauncher(config, CONTEXT)


async def stop(handles: list[RayHandle]) -> None:
    async with anyio.create_task_group() as tasks:
        for handle in handles:
            tasks.start_soon(handle.stop, 0)


async def test_each_process_sees_gpus_of_its_own(launcher: RayLauncher, tmp_path: Path) -> None:
    code = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    jobs = [job(tmp_path, f"inference-{number}", code, gpus=1) for number in range(4)]
    jobs += [job(tmp_path, "inference-4", code)]
    handles = await launcher.launch(jobs)
    assert [await handle.wait() for handle in handles] == [0] * 5
    nodes_of_handles = [handle.place.split()[0] for handle in handles[:4]]
    seen = sorted(zip(nodes_of_handles, (each.tail(1) for each in jobs[:4]), strict=True))
    assert seen == [(node, gpu) for node in ("node1", "node2") for gpu in "01"]
    assert jobs[4].tail(1) == ""  # no GPU


async def test_processes_share_a_gpu(launcher: RayLauncher, tmp_path: Path) -> None:
    workers = [f"{role}-{number}" for role in ("trainer", "inference") for number in range(4)]
    await stop(await launcher.launch([job(tmp_path, worker, gpus=1, share=0.5) for worker in workers]))
    await stop(await launcher.launch([job(tmp_path, "trainer-0", gpus=2)]))  # nothing stays reserved


async def test_a_worker_without_room_is_an_error(nodes: Nodes, tmp_path: Path) -> None:
    launcher = RayLauncher(RayConfig(address=nodes.address, start_s=patience(5)), CONTEXT)
    handles = await launcher.launch([job(tmp_path, "trainer-0", gpus=2)])
    with pytest.raises(
        LaunchError, match=r"trainer-critic-0, .* within [0-9.]+ s .*unused in the Ray .*GPU 2"
    ) as error:
        await launcher.launch([job(tmp_path, f"trainer-critic-{rank}", gpus=2) for rank in range(2)])
    assert error.value.worker == "trainer-critic-0"
    more = await launcher.launch([job(tmp_path, "inference-0", gpus=2)])  # the failed launch keeps nothing
    await stop([*handles, *more])


async def test_ranks_are_packed_and_units_share_a_node(launcher: RayLauncher, tmp_path: Path) -> None:
    ranks = [job(tmp_path, f"trainer-{rank}", gpus=1, unit=f"training {rank // 2}") for rank in range(4)]
    others = [job(tmp_path, f"{role}-{n}") for role in ("rollout", "verifier") for n in range(2)]
    critic = [job(tmp_path, f"trainer-critic-{rank}") for rank in range(3)]
    jobs = [*ranks, *critic, *others]
    handles = await launcher.launch(jobs)
    found = {each.worker: handle.place.split()[0] for each, handle in zip(jobs, handles, strict=True)}
    await stop(handles)
    assert found["trainer-0"] == found["trainer-1"] != found["trainer-2"] == found["trainer-3"]
    assert len({found[f"trainer-critic-{rank}"] for rank in range(3)}) == 1
    assert {found["rollout-0"], found["rollout-1"]} == {"node1", "node2"}
    assert found["verifier-0"] != found["verifier-1"]


async def test_a_worker_gets_no_login_of_ray_and_its_signals(launcher: RayLauncher, tmp_path: Path) -> None:
    worker = job(tmp_path, "rollout-0", STATE, threads=3)
    [handle] = await launcher.launch([worker])
    assert await handle.wait() == 0
    said = worker.tail(200)
    assert "RAY_" not in said
    assert "'OMP_NUM_THREADS': '3'" in said
    signals = dict(re.findall(r"^(Sig(?:Blk|Ign)):\s+(\w+)$", said, re.MULTILINE))
    assert {name: int(mask, 16) & ~PYTHONS for name, mask in signals.items()} == {"SigBlk": 0, "SigIgn": 0}


async def test_check_says_what_the_cluster_lacks(launcher: RayLauncher, tmp_path: Path) -> None:
    [found] = launcher.check([job(tmp_path, "inference-0", gpus=3)])
    assert isinstance(found, Problem)
    assert found.severity == "environment"
    assert (
        "inference-0 needs 1 CPUs (`threads`) and 3 GPUs (`gpus`) on one node; the Ray clu" in found.message
    )
    assert "node2: 8 CPUs (`threads`) and 2 GPUs (`gpus`)" in found.message
    nowhere = RayLauncher(RayConfig(address="127.0.0.1:9"), CONTEXT)
    [found] = nowhere.check([job(tmp_path, "inference-0")])
    assert found.message.startswith("no connection to the Ray cluster at 127.0.0.1:9: ")


def test_the_quickstart_with_a_trainer_on_each_of_two_nodes(nodes: Nodes, tmp_path: Path) -> None:
    command = [
        *("run", str(ROOT / "examples/quickstart/run.yaml"), f"out={tmp_path}/out", "steps=6"),
        *("training.use=fsdp2", "training.processes=2", "training.threads=1", "training.shard=false"),
        *("inference.threads=1", "inference.replicas=2", "evaluation=null", "queue.batch_size=8"),
        *("samples.keep=none", *on_cluster(nodes, trainer={"seat": 1}, inference={"hidden": 1})),
    ]
    run = Run(tmp_path / "out", command)
    try:
        run.assert_completed(6, batch_size=8)
    finally:
        run.kill()
    run.assert_audit_is_clean()
    found = nodes_of(run)
    assert {*found["trainer-0"], *found["trainer-1"]} == {"node1", "node2"}
    assert found["inference-0"] == found["inference-1"] == ["node3"]
    logs = {path.name for path in (run.folder / "logs").iterdir()}
    assert "trainer-1.jsonl" in logs
    assert "inference-0.jsonl" not in logs  # it does not see the folder
    bootstrap = json.loads((run.folder / "bus" / "inference.json").read_text())
    assert bootstrap["url"].startswith(f"tls://{nodes.ip}:")
    assert_ended(run)


def test_the_commands_of_the_page(tmp_path: Path) -> None:
    port = free_port(own_address())
    page, file, out = Section("Ray"), tmp_path / "mine.yaml", tmp_path / "first"
    head, join, status, run, watch, resume, token, export = page.commands
    address = f"{own_address()}:{port}"
    local = {"launcher.address": address, "out": str(out), "steps": 100, "training.seconds_per_step": 0.3}
    page.write_run_file(write_run_file(tmp_path), file, local)
    values = {"FIRST:6379": address, "--port=6379": f"--port={port} --num-cpus=8 --num-gpus=0"}
    values |= {"run.yaml": file, "/shared/runs/first": out}
    lines = [shlex.join(filled(command, values)) for command in (head, join, status, run, watch, resume)]
    # `ray stop` ends every Ray that it sees: these processes have a space of their own.
    script = f"""\
        set -e
        {token} > /dev/null; {export}
        {lines[0]}; {lines[1]}; {lines[2]}
        {lines[3]} & run=$!
        until [ -e {out}/status.json ]; do kill -0 $run; sleep 0.2; done
        {lines[4]} | {{ grep -m 1 "^step [1-9][0-9]* of 100 "; kill -KILL $run; cat; }}
        {lines[5]}
        ray stop
    """
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:  # paths of sockets are short
        env = {**os.environ, "RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0", "HOME": folder}
        env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
        words = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "bash", "-c", script]
        done = subprocess.run(
            words, capture_output=True, text=True, cwd=ROOT, env=env, check=False, timeout=patience(300)
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Token authentication is disabled" not in done.stderr
    assert "to continue it: stretto resume" in done.stdout
    assert "Stopped all" in done.stdout, done.stdout
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["status"], summary["version"]) == ("completed", 100)


def test_a_lost_node_costs_its_workers_only(nodes: Nodes, start: Start) -> None:
    cluster = on_cluster(nodes, trainer={"first": 1})
    run = start("steps=250", "inference.replicas=2", "rollout.processes=2", *cluster)
    run.until_step(10)
    lost = {worker for worker, each in nodes_of(run).items() if each == ["node2"]}
    assert {"inference", "rollout"} <= {worker.partition("-")[0] for worker in lost}
    pids = [places(run)[worker][0][1] for worker in lost]
    try:
        nodes.kill("node2")
        until(lambda: not any(map(is_worker, pids)))  # also processes in a session of their own
        assert run.end() == 0, run.text()
    finally:
        nodes.start("node2")
    summary = run.assert_balanced()
    assert (summary["status"], summary["version"], summary["restarts"]) == ("completed", 250, len(lost))
    run.assert_audit_is_clean()
    for worker in lost:
        first, second = nodes_of(run)[worker]
        assert first == "node2" != second
        said = (run.folder / "logs" / f"{worker}.out").read_text()
        assert f"stretto: {worker} is lost with its node node2" in said
    assert_ended(run)


def test_a_lost_head_ends_the_run_with_a_reason(start: Start, tmp_path: Path) -> None:
    """Ray would end the kernel's process after a minute."""
    nodes = Nodes(tmp_path, tmp_path / "none")
    nodes.start("node1")
    nodes.start("node2")
    try:
        cluster = on_cluster(nodes, trainer={"first": 1})
        run = start("steps=1000", *cluster, f"launcher.start_s={patience(75)}")
        run.until_step(5)
        nodes.kill("node1")
        assert run.end() == 1, run.text()
        assert "did not start within" in run.summary()["reason"]
        assert_ended(run)
    finally:
        nodes.stop()


def test_nothing_is_left_of_a_run_whose_kernel_was_killed(nodes: Nodes, start: Start) -> None:
    run = start("steps=1000", f"bus.grace_s={patience(3)}", *on_cluster(nodes, trainer={"first": 1}))
    run.until_step(3)
    assert nodes.actors()
    run.process.kill()
    assert_ended(run)
    run.assert_nothing_is_left()
    until(lambda: not nodes.actors())
    again = start("steps=20", resume=run)
    assert again.end() == 0, again.text()
    again.assert_audit_is_clean()


@pytest.mark.parametrize("has_own_cluster", [False, True])
def test_the_workers_of_a_killed_kernel_end_before_others_start(
    nodes: Nodes, start: Start, has_own_cluster: bool
) -> None:
    cluster = ["launcher=ray"] if has_own_cluster else on_cluster(nodes, trainer={"first": 1})
    run = start("--supervise", "steps=60", "checkpoint.every=5", *cluster)

    def have_started(times: int) -> bool:
        found = places(run)
        for each in found.values():
            assert sum(is_worker(pid) for _, pid in each) < 2, "a worker runs twice"
        return all(len(each) == times for each in found.values())

    for times, step in ((2, 3), (3, 12)):
        run.until_step(step)
        kernel_of(run).kill()
        run.until(lambda times=times: have_started(times))
    run.assert_completed(60)
    said = "all workers start again: the launcher takes over none of a former kernel"
    assert run.text().count(said) == 2
    run.assert_audit_is_clean()
    assert_ended(run)


def kernel_of(run: Run) -> psutil.Process:
    return run.until(lambda: next(iter(psutil.Process(run.process.pid).children()), None))
