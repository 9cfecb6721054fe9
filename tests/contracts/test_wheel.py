"""The wheel in a clean environment with what it declares alone: without extras, then with `torch`.

Every command of the README works there, or names the extra to install.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import pytest

from commands import output_of

ROOT = Path(__file__).parents[2]
FILE = "quickstart/run.yaml"
SMALL = "evaluation=null queue.batch_size=4"
WITHOUT_EXTRAS = (
    *("--help", "doctor", "plugins", "plugins algorithm grpo", "schema", "new reward brevity"),
    *("status RUN", "runs", "samples RUN --step 1", "compare RUN RUN", "report RUN", "audit RUN", "logs RUN"),
    *("watch RUN", "export RUN", "export RUN --samples rows.jsonl", "engine install --help"),
)
WITH_TORCH = (
    *(f"check {FILE}", f"check {FILE} --graph", f"sweep {FILE} steps=1 {SMALL} --seeds 1,2"),
    f"run {FILE} steps=1 {SMALL} inference=mock training=mock out=mock",
    *("evaluate RUN", "replay RUN", "resume RUN steps=3"),
)
LIVING = ("scale living rollout=2", "worker --help", "stop living", "watch living")
"""Commands about a run in the background; the last one waits for its end."""
OF_EXTRAS = {"plot RUN": "plot", "trace RUN": "trace"}
VALUES = {
    "hf": "dataset.use=hf",
    "lora": "training.lora.rank=4",
    "math": "reward=math",
    "mcp": "workflow='{use: tool_use, mcp: [{command: [server]}]}'",
    "mlflow": "trackers=[mlflow]",
    "prometheus": "metrics.port=0",
    "ray": "launcher=ray",
    "s3": "checkpoint.store=s3://bucket/folder",
}
"""Extra -> a value of a run file that needs it."""

slow, nightly = pytest.mark.slow, pytest.mark.nightly


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel, and a folder with the quickstart and a run of it."""

    programs: Path
    where: Path

    def install(self, requirement: str) -> None:
        versions = ["-c", str(ROOT / "constraints.txt"), *shlex.split(os.environ.get("PIP_ARGS", ""))]
        pip = [str(self.programs / "pip"), "install", "--quiet", "--no-compile", *versions, requirement]
        done = subprocess.run(pip, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def command(self, line: str) -> list[str]:
        (run,) = self.where.glob("runs/quickstart-*-1") if "RUN" in line else [""]
        words = [str(run) if word == "RUN" else word for word in shlex.split(line)]
        return [str(self.programs / "stretto"), *words]

    def run(self, line: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(line), capture_output=True, text=True, cwd=self.where, env=_clean_variables()
        )

    def works(self, line: str) -> None:
        done = self.run(line)
        assert done.returncode == 0, f"{line}: {done.stderr}"

    def names(self, extra: str, line: str) -> None:
        done = self.run(line)
        assert done.returncode == 2, f"{line}: {done.stderr}"
        assert f"pip install 'stretto[{extra}]'" in done.stderr, f"{line}: {done.stderr}"


def _clean_variables() -> dict[str, str]:
    """Environment variables that lead to no library or program of the environment that runs this test."""
    return {**{name: value for name, value in os.environ.items() if name != "PYTHONPATH"}, "PATH": os.defpath}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def base(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel without extras, and a quickstart of the environment that runs this test."""
    folder = tmp_path_factory.mktemp("base")
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    installed = Installed(folder / "venv" / "bin", folder)
    installed.install(str(wheel))
    output_of("quickstart", "quickstart", "steps=2", "queue.batch_size=4", "evaluation.rows=16", cwd=folder)
    return installed


@pytest.fixture(scope="module")
def with_torch(base: Installed, wheel: Path) -> Installed:
    """The same environment, later, with the extra `torch` and a quickstart of its own."""
    base.install(f"{wheel}[torch]")
    shutil.rmtree(base.where / "runs")
    shutil.rmtree(base.where / "quickstart")
    base.works("quickstart quickstart steps=2 queue.batch_size=4 evaluation.rows=16")
    return base


@slow
def test_without_extras_commands_work_or_name_the_extra(base: Installed) -> None:
    for line in WITHOUT_EXTRAS:
        base.works(line)
    for line in WITH_TORCH:
        base.names("torch", line)
    for line, extra in OF_EXTRAS.items():
        base.names(extra, line)


@slow
def test_without_extras_the_page_shows_runs(base: Installed) -> None:
    command = base.command("ui --port 0")
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=base.where, env=_clean_variables()
    ) as page:
        assert page.stdout is not None
        try:
            with urlopen(page.stdout.readline().split()[-1]) as answer:
                assert answer.status == 200
        finally:
            page.terminate()


@nightly
def test_with_torch_all_commands_work(with_torch: Installed) -> None:
    for line in WITH_TORCH:
        with_torch.works(line)
    with_torch.works(f"run --detach {FILE} steps=1000 {SMALL} out=living")
    for line in LIVING:
        with_torch.works(line)


@nightly
def test_each_extra_that_a_run_file_needs_is_named(with_torch: Installed) -> None:
    said = with_torch.run(f"check {FILE} {' '.join(VALUES.values())}").stderr
    assert [extra for extra in VALUES if f"stretto[{extra}]" not in said] == [], said


def test_every_command_of_the_readme_is_tried() -> None:
    tried = {line.split()[0] for line in (*WITHOUT_EXTRAS, *WITH_TORCH, *LIVING, *OF_EXTRAS)}
    named = re.findall(r"^stretto ([a-z]+) .*#", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert set(named) - tried <= {"quickstart", "ui"}  # tried above too
