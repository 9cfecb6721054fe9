"""`stretto doctor`: import the installed plugins to find their faults, and examine this machine."""

import inspect
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import msgspec

from stretto.api import API_VERSION, mismatch
from stretto.assembly.plugins import Listing, Plugins, missing_extra
from stretto.bus.server import binary, free_port
from stretto.cli.make.schema import fields_of
from stretto.component import Component, ComponentParts
from stretto.errors import BusError, EngineError, PluginError, nearest
from stretto.machine.cores import available_cores, available_memory
from stretto.machine.gpus import Driver, nvidia_driver, visible_gpus
from stretto.models.version_files import SHARED_MEMORY
from stretto.serving.config import ServerEngineConfig
from stretto.serving.environment import environment_of
from stretto.user_code.sandbox import sandbox_problem

Level = Literal["ok", "note", "warning", "fault"]

_LIBRARIES = ("torch", "transformers", "msgspec", "nats-py", "pluggy", "pyarrow", "vllm", "sglang", "trl")
"""Libraries whose versions a bug report needs."""
_SHARED_MEMORY_GB = 1.0
"""Warn below this free shared memory, in GiB. It carries weights; a container often has 64 MiB of it."""


@dataclass(frozen=True)
class Observation:
    """One line of the report."""

    level: Level
    """`fault`: does not work. `warning`: may fail later. `note`: not installed, and nothing needs it."""
    subject: str
    text: str


def examine_plugins(name: str | None, plugins: Plugins) -> list[Observation]:
    """Examine all components of a distribution, or of all distributions."""
    listing = plugins.listing()
    names = sorted({line.distribution for line in listing})
    if name is not None and name not in names:
        raise PluginError(
            f"no distribution {name!r} offers a component{nearest(name, names)}; those that do: "
            f"{', '.join(names)}"
        )
    chosen = [line for line in listing if name in (None, line.distribution)]
    return [observation for line in chosen for observation in _examine(line, listing, plugins)]


def examine_machine(plugins: Plugins) -> list[Observation]:
    """Return the facts about this machine that runs depend on."""
    return [
        Observation(
            "ok", "python", f"{platform.python_version()} at {sys.executable}, {platform.platform()}"
        ),
        Observation("ok", "stretto", f"{version('stretto')}, API {API_VERSION}"),
        Observation("ok", "cores", f"{available_cores():g} of {os.cpu_count()}"),
        Observation("ok", "bfloat16", _bfloat16()),
        *_memory(),
        Observation("ok", "gpus", ", ".join(visible_gpus(os.environ)) or "none visible"),
        *_cuda(plugins),
        _server(),
        _loopback(),
        _sandbox(),
        Observation("ok", "libraries", ", ".join(_versions()) or "none of those that engines need"),
    ]


def _examine(line: Listing, listing: Iterable[Listing], plugins: Plugins) -> Iterator[Observation]:
    subject = f"{line.kind} {line.name}"
    rivals = [
        each.distribution
        for each in listing
        if (each.kind, each.name) == (line.kind, line.name) and each.distribution != line.distribution
    ]
    if rivals:
        yield Observation(
            "warning",
            subject,
            f"{', '.join(rivals)} offers it too, so a run file has to name one: "
            f"`use: {line.distribution}:{line.name}`",
        )
    try:
        component = plugins.get(line.kind, f"{line.distribution}:{line.name}")
    except PluginError as error:
        yield Observation("fault", subject, str(error))
        return
    faults = list(_faults_of(component))
    yield from (Observation("fault", subject, fault) for fault in faults)
    yield from (Observation("warning", subject, warning) for warning in _warnings_of(component))
    if missing := missing_extra(component):
        yield Observation("note", subject, missing)
    elif not faults:
        yield Observation("ok", subject, f"{line.distribution} {line.version}: {component.summary}")


def _faults_of(component: Component[Any]) -> Iterator[str]:
    has_parts = any(field.type is ComponentParts for field in msgspec.structs.fields(component.config))
    calls = {
        "factory": ("config", "context", *(("parts",) if has_parts else ())),
        "check": ("config", "run"),
        "check_row": ("config", "row"),
        "imports": ("config", "run"),
    }
    for name, arguments in calls.items():
        function = getattr(component, name)
        if name == "factory" and isinstance(function, str):  # a name, imported at the call
            if find_spec(function.partition(":")[0]) is None:
                yield f"{name} is {function!r}; there is no such module"
            continue
        if function is None:
            continue
        if not callable(function):
            yield f"{name} is {function!r}; expected a function"
            continue
        try:
            inspect.signature(function).bind(*arguments)
        except TypeError as error:
            yield f"{name} cannot be called as {name}({', '.join(arguments)}): {error}"
        except ValueError:
            continue  # a class of an extension module has no signature
    try:
        mismatch(component.api or API_VERSION)
    except (TypeError, ValueError) as error:
        yield f"api: {error}"
    config = component.config.__struct_config__
    if not config.frozen:
        yield f"the config {component.config.__name__} is not frozen: components must not change it"
    if not config.forbid_unknown_fields:
        yield f"the config {component.config.__name__} accepts unknown keys; add forbid_unknown_fields=True"


def _warnings_of(component: Component[Any]) -> Iterator[str]:
    with suppress(TypeError, ValueError):  # `_faults_of` yields this error
        if reason := mismatch(component.api or API_VERSION):
            yield reason
    if not component.summary:
        yield "has no summary; `stretto plugins` shows it"
    for field in fields_of(component.config):
        if not field.meaning and "." not in field.name:
            yield f"the key {field.name!r} has no meaning: write a docstring under the field"


def _bfloat16(cpu_info: Path = Path("/proc/cpuinfo")) -> str:
    flags = set(cpu_info.read_text().split()) if cpu_info.is_file() else set[str]()
    found = sorted(flags & {"amx_bf16", "avx512_bf16"})
    if not found:
        return "no instructions for it: float32 is as fast on these processors"
    return f"fast on these processors ({', '.join(found)}): `dtype: bfloat16` for training and inference"


def _memory() -> Iterator[Observation]:
    yield Observation("ok", "memory", f"{available_memory() / 2**30:.1f} GiB")
    if SHARED_MEMORY.is_dir():
        free = shutil.disk_usage(SHARED_MEMORY).free / 2**30
        is_low = free < _SHARED_MEMORY_GB
        advice = "; a container gets more with `--shm-size`, or use `weights: file`" if is_low else ""
        yield Observation("warning" if is_low else "ok", "shared memory", f"{free:.1f} GiB free{advice}")


def _cuda(plugins: Plugins) -> Iterator[Observation]:
    """Compare with NVIDIA's driver: torch, the servers' environments, and what servers build kernels with."""
    if (driver := nvidia_driver()) is None:
        return
    newest = int(driver.cuda)
    yield Observation("ok", "driver", f"NVIDIA {driver.version}, CUDA {driver.cuda}")
    if (torch := find_spec("torch")) and torch.origin:
        index = f"https://download.pytorch.org/whl/{'cu130' if newest >= 13 else 'cu129'}"  # both have 2.13
        remedy = f"`pip install --force-reinstall 'torch==2.13.*' --index-url {index}`"
        yield _fit("torch", Path(torch.origin).parent, driver, remedy)
    for line in plugins.listing():
        if line.kind == "inference" and not line.error:
            config = plugins.get("inference", f"{line.distribution}:{line.name}").config
            if issubclass(config, ServerEngineConfig) and config.requirements is not None:
                yield _fit_of_server(line.name, config.requirements, driver)
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    path = f"{home}/bin" if home else f"{os.environ.get('PATH', os.defpath)}:/usr/local/cuda/bin"
    tools = {"nvcc": shutil.which("nvcc", path=path), "ninja": shutil.which("ninja")}
    for tool in (tool for tool, found in tools.items() if found is None):
        yield Observation(
            "note", tool, "missing; SGLang's server and FlashInfer in vLLM's build kernels with it"
        )
    if nvcc := tools["nvcc"]:
        said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
        cuda = (re.findall(r"release ([\d.]+)", said) or ["0"])[0]
        fits = int(float(cuda)) <= newest
        advice = (
            "" if fits else f": set CUDA_HOME to a toolkit of CUDA {newest} for kernels that servers build"
        )
        yield Observation("ok" if fits else "warning", "nvcc", f"{nvcc}, CUDA {cuda}{advice}")


def _fit_of_server(name: str, requirements: Path, driver: Driver) -> Observation:
    try:
        build = environment_of(requirements, cpu=False, cuda=driver.cuda)
        remedy = ", of ".join([f"the build for CUDA {build.cuda}", *build.indexes[:1]])
        remedy = f"`stretto engine install {name}` takes {remedy}"
    except EngineError as error:
        remedy = str(error)
    environment = environment_of(requirements, cpu=False)
    if not environment.is_ready():
        return Observation("note", f"server {name}", f"not installed for GPUs: {remedy}")
    torch = next(environment.folder.glob("lib/python*/site-packages/torch"), environment.folder)
    return _fit(f"server {name}", torch, driver, remedy)


def _fit(subject: str, torch: Path, driver: Driver, remedy: str) -> Observation:
    """Say whether the driver runs this torch. It is not imported: that takes seconds."""
    file = torch / "version.py"
    cuda = re.search(r"(?m)^cuda\b.*= '([\d.]+)'", file.read_text() if file.is_file() else "")
    text = f"built for CUDA {cuda[1]}" if cuda else "built without CUDA"
    if cuda and int(float(cuda[1])) <= int(driver.cuda):
        return Observation("ok", subject, text)
    text = f"{torch}: {text}, so it cannot use GPUs with driver {driver.version}: {remedy}"
    return Observation("fault" if cuda else "warning", subject, text)


def _server() -> Observation:
    try:
        path = binary()
        reply = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=True)
    except (BusError, OSError, subprocess.SubprocessError) as error:
        return Observation("fault", "nats-server", str(error))
    return Observation("ok", "nats-server", f"{reply.stdout.strip().removeprefix('nats-server: ')} at {path}")


def _loopback() -> Observation:
    try:
        free_port()
    except OSError as error:
        return Observation("fault", "loopback", f"no port of 127.0.0.1 can be used: {error}")
    return Observation("ok", "loopback", "ports of 127.0.0.1 can be used")


def _sandbox() -> Observation:
    if problem := sandbox_problem():
        return Observation("warning", "sandbox", f"{problem}; tools and agents need it, or `sandbox: unsafe`")
    return Observation("ok", "sandbox", "bubblewrap works")


def _versions() -> Iterator[str]:
    for name in _LIBRARIES:
        try:
            yield f"{distribution(name).metadata['Name']} {version(name)}"
        except PackageNotFoundError:
            continue
