"""Every package that `stretto new` writes: installed, examined, tested by its own tests, and run."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import msgspec
import pytest

from stretto.assembly.plugins import KINDS, Plugins
from stretto.cli.make.new import new_package
from stretto.component import Kind

_ENGINES = ("inference", "training")
_MARKS = {kind: pytest.mark.nightly if kind in _ENGINES else pytest.mark.slow for kind in KINDS}


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=_MARKS[kind]) for kind in KINDS])
def test_a_new_package_works_as_it_is(kind: Kind, tmp_path: Path) -> None:
    package = new_package(kind, "acme", tmp_path / "package", Plugins())
    python, env = _environment(tmp_path)
    _run([sys.executable, "-m", "pip", "--python", python, *_OFFLINE, str(package)], env, tmp_path)

    examined = _run([python, "-m", "stretto", "doctor", "stretto-acme"], env, tmp_path)
    assert examined.startswith(f"ok  {kind} acme  stretto-acme 0.1.0")
    _run([python, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(package)], env, tmp_path)

    named = "trackers=[acme]" if kind == "tracker" else f"{kind}=acme"
    small = ["steps=2", "queue.batch_size=4", "evaluation=null", "out=run"]
    if kind not in ("algorithm", "inference", "training"):  # the others do not need a real model
        small += ["inference=mock", "training=mock"]
    _run([python, "-m", "stretto", "quickstart", "trial", named, *small], env, tmp_path)
    summary = msgspec.json.decode((tmp_path / "run" / "summary.json").read_bytes())
    assert (summary["status"], summary["version"]) == ("completed", 2)
    assert not summary.get("plugin_errors")


_OFFLINE = ("install", "-q", "--no-deps", "--no-build-isolation", "--disable-pip-version-check")


def _environment(folder: Path) -> tuple[str, dict[str, str]]:
    """Make a virtual environment that also sees the packages of this one, and return its Python."""
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    [site] = venv.glob("lib/python*/site-packages")
    # `addsitedir` follows the .pth files there, so it finds an editable stretto too.
    (site / "outer.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return str(venv / "bin" / "python"), {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}


def _run(command: list[str], env: dict[str, str], folder: Path) -> str:
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-4000:]}"
    return done.stdout
