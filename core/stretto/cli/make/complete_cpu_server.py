"""`complete_cpu_server.py NAME`: run in a server's new environment for CPUs, to make its packages work."""

import importlib
import importlib.metadata
import re
import shutil
import sys
import sysconfig
from pathlib import Path

_SITE = Path(sysconfig.get_paths()["purelib"])
# PyPI's torchvision is a build for CUDA: with a torch for CPUs its operators are missing, and its import then
# fails at an operator whose schema they would have brought. The processors of images need no operator.
_SCHEMAS = """

if not _has_ops():
    _schemas = torch.library.Library("torchvision", "DEF")
    _schemas.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _schemas.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def rename_distribution(name: str) -> None:
    """Add metadata of a distribution NAME, if the wheel's is called NAME-cpu: vLLM looks up the version of
    `vllm`, and takes its CPU platform if there is "cpu" in it."""
    for source in _SITE.glob(f"{name}_cpu-*.dist-info"):
        version = importlib.metadata.version(f"{name}-cpu") + "+cpu"
        target = _SITE / f"{name}-{version}.dist-info"
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("RECORD", "entry_points.txt"))
        metadata = (source / "METADATA").read_text()
        for key, value in (("Name", name), ("Version", version)):
            metadata = re.sub(rf"(?m)^{key}: .*$", f"{key}: {value}", metadata, count=1)
        (target / "METADATA").write_text(metadata)


if __name__ == "__main__":
    name = sys.argv[1]
    with (_SITE / "torchvision" / "extension.py").open("a") as module:
        module.write(_SCHEMAS)
    rename_distribution(name)
    torch, *_ = map(importlib.import_module, ("torch", "torchvision", name))
    if torch.version.cuda is not None:
        sys.exit(
            f"torch {torch.__version__} is a build for CUDA; PIP_EXTRA_INDEX_URL names an index with others"
        )
