"""Config and checks of server engines: inference engines that are HTTP servers, started or attached to."""

import json
import math
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import msgspec

from stretto.component import Defaults, Known, LocalPath, NonNegativeInt, PositiveFloat, PositiveInt, Problem
from stretto.config import RunConfig
from stretto.engine import InferenceConfig, Memory, Sampling
from stretto.errors import EngineError
from stretto.models.files import cache_bytes, folder_of_model, parameters_in, positions_of, text_config
from stretto.serving.environment import environment_of

__all__ = ["Flag", "ServerEngineConfig", "check_server_engine", "context_of_model", "flags", "interpreter_of"]

Flag = bool | int | float | str | tuple[str, ...]

_MOST_CONTEXT = 4096  # tokens of a sample, unless `context_length` is set
_SLOTS_OF_CPUS, _SLOTS_UNKNOWN = 64, 256
_FEWEST_SLOTS, _MOST_SLOTS = 16, 512
_CACHE_SHARE = 0.8
"""Share of a server's memory for weights and cache; the rest is for activations, logits and graphs."""
_TRY_S = 30.0  # an interpreter that waits for input would hold `stretto check`


class ServerEngineConfig(InferenceConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the sections of server engines. `check_server_engine` refuses `deterministic`: servers do not
    offer it."""

    python: LocalPath | None = None
    """Interpreter of the environment in which the server is installed, `path/to/venv/bin/python`. Each worker
    starts its own server with it. The server's packages stay separate from the trainer's. null: the
    environment that `stretto engine install` made, for GPUs if `gpus` is not 0."""
    urls: tuple[
        Annotated[
            str, msgspec.Meta(pattern=r"^https?://[^/]+$", description="`http://host:port` without a path")
        ],
        ...,
    ] = ()
    """Addresses of running servers, `http://host:port`, instead of `python`: one for each replica. Worker
    `inference-i` uses entry i, counted from 0. No other program may swap the weights of these servers."""
    api_key: str | None = None
    """API key of the servers in `urls`. Write `${oc.env:NAME}`, so that no file stores the key itself."""
    tensor_parallel: PositiveInt = 1
    """Number of GPUs (without GPUs: processes) over which each server splits the model."""
    slots: PositiveInt | None = None
    """Maximum number of samples that a server decodes at the same time. Other samples wait in the worker.
    null: 64 without GPUs and for `urls`; with GPUs as many as the memory has room for, at most 512, or 256 if
    the memory is not known; never more than the run may have in flight."""
    context_length: PositiveInt | None = None
    """Maximum length of a sample in tokens, prompt and answer together. null: the model's
    `max_position_embeddings`, at most 4096; with GPUs, for `single_turn` and with
    `dataset.max_prompt_tokens`, the longest prompt and answer."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Data type of the weights and the KV cache. In float32, the logprobs agree with those of a float32
    trainer to about 1e-5. null: that of the trainer if it is set, else bfloat16 with GPUs and float32
    without; float32 for `urls`."""
    args: dict[str, Flag] = {}  # noqa: RUF012 - a Struct copies it
    """Flags for the server's command line, by name: `{block-size: 32, enable-metrics: true}`. `true` is a
    flag without a value, `false` removes a flag that the worker sets, a list repeats the flag."""
    env: dict[str, str] = {}  # noqa: RUF012
    """Environment variables for the server."""
    start_timeout_s: PositiveFloat = 600.0
    """Maximum time in seconds until a server answers, at the first start and at each restart."""
    silence_s: PositiveFloat = 120.0
    """The worker restarts a server that has samples to decode and sends nothing for this many seconds."""
    restarts: NonNegativeInt = 3
    """Maximum number of restarts of a lost server within ten minutes. After that the worker fails."""
    may_sleep: ClassVar[bool] = True
    requirements: ClassVar[Path | None] = None
    """Folder with what `stretto engine install` installs: `gpu.txt` pins the server alone, `name==version`,
    and pip resolves the rest; `cu129.txt` and the like are for older drivers. `# CUDA 13.0` in one names the
    CUDA of its build. `cpu.txt` pins all packages. None: there is no such command for this engine."""

    def default_values(self, known: Known) -> Defaults:
        """See `Resources.default_values`."""
        values: dict[str, tuple[object, str]] = {}
        is_here = bool(self.gpus) and not self.urls
        if self.dtype is None:
            values["dtype"] = ("float32", "") if self.urls else (known.dtype, known.why)
        if self.context_length is None and is_here:
            values |= default_context(known.run)
        if self.slots is None:
            values["slots"] = self._default_slots(known, values) if is_here else (_SLOTS_OF_CPUS, "")
        return values

    def _default_slots(self, known: Known, others: Defaults) -> tuple[int, str]:
        run, settings = known.run, {key: value for key, (value, _) in others.items()}
        section = msgspec.structs.replace(self, **settings)
        context, item = context_of_model(section, run.model), 4 if section.dtype == "float32" else 2
        folder, sample = folder_of_model(run.model), context * cache_bytes(run.model, item)
        weights = parameters_in(folder) * item // self.tensor_parallel if folder else 0
        slots, why = _SLOTS_UNKNOWN, "what its GPUs have, or the model needs, is not known here"
        if sample and weights and (memory := known.memory(self)) < math.inf:
            room = _CACHE_SHARE * memory - weights
            # An answer has on average half of its length while it is decoded.
            slots = min(_MOST_SLOTS, max(_FEWEST_SLOTS, int(2 * room / sample * self.tensor_parallel)))
            why = f"{max(room, 0) / 2**30:.2g} GiB of cache for samples of {context:,} tokens"
        if run.steps and 0 < (in_flight := known.samples_in_flight()) < slots:
            slots, why = in_flight, "the samples that the run may have in flight"
        return slots, why

    @property
    def compute_dtype(self) -> str:
        """`dtype`; its default without GPUs where no run has decided it."""
        return self.dtype or "float32"

    @property
    def most_running(self) -> int:
        """`slots`; its default without GPUs where no run has decided it."""
        return self.slots or _SLOTS_OF_CPUS

    def memory(self, model: str, parameters: int, samples_in_flight: int, available: float) -> Memory | None:
        """See `InferenceConfig`. A server takes the rest of its share of a GPU for the cache."""
        del samples_in_flight
        if not self.gpus or self.urls:
            return None
        item = 4 if self.compute_dtype == "float32" else 2
        context = context_of_model(self, model)
        weights, least = parameters * item // self.tensor_parallel, context * cache_bytes(model, item)
        rest = available - weights if available < math.inf else 0
        return Memory({"weights": weights, "cache": int(max(rest, least))}, f"samples of {context} tokens")

    def unfit(self, sampling: Sampling) -> str:
        """Return the reason why this kind of server does not support `sampling`; empty if it does."""
        del sampling
        return ""


def check_server_engine(
    config: ServerEngineConfig, run: RunConfig, module: str, reserved: Mapping[str, str]
) -> Iterator[Problem]:
    """Yield the problems of a section, without starting a server.

    `module`: a module that the server's interpreter must be able to import. `reserved`: flags that the
    worker sets itself, each with the config key to set instead, or "".
    """
    if config.deterministic:
        yield Problem(
            "inference.deterministic",
            f"engine {config.use!r} cannot repeat answers bit for bit; leave it out, or write use: torch",
        )
    if config.slots == 1 and run.steps:
        yield Problem("inference.slots", "is 1: answers are sampled one after another", "warning")
    yield from context_problems(config.context_length, run)
    for path, sampling in run.samplings():
        if fault := config.unfit(sampling):
            yield Problem(path, fault)
    if config.gpus and config.tensor_parallel > config.gpus:
        yield Problem(
            "inference.tensor_parallel",
            f"is {config.tensor_parallel}, and a worker has {config.gpus} GPU(s); set inference.gpus",
        )
    if config.urls:
        yield from _check_attached(config)
        if run.evaluation is not None and run.evaluation.own_engine:
            yield Problem(
                "evaluation.own_engine",
                "needs one more server, and `inference.urls` names those of the replicas; remove it, or let "
                "the workers start their servers (`inference.python`)",
            )
    elif config.api_key is not None:
        yield Problem(
            "inference.api_key", "is for the servers in urls; a server that the worker starts gets a new key"
        )
    if config.python is not None or not config.urls:
        try:
            yield from _check_interpreter(interpreter_of(config), module)
        except EngineError as error:
            yield Problem("inference.python", str(error), "environment")
    yield from _check_args(config, reserved)


def interpreter_of(config: ServerEngineConfig) -> str:
    """Return the interpreter that starts the server: `python`, or that of the environment which
    `stretto engine install` made on this machine. Raise EngineError if there is none."""
    if config.python is not None:
        return config.python
    command = ""
    if config.requirements is not None:
        environment = environment_of(config.requirements, cpu=not config.gpus)
        if environment.is_ready():
            return str(environment.python)
        command = f"run `stretto engine install {config.use}{'' if config.gpus else ' --cpu'}`, or "
    raise EngineError(
        f"is missing: {command}set it to the interpreter of an environment with the server "
        "(path/to/venv/bin/python), or set inference.urls to running servers"
    )


def _check_attached(config: ServerEngineConfig) -> Iterator[Problem]:
    if config.python is not None:
        yield Problem("inference.urls", "excludes inference.python: either attach to servers or start them")
    if len(config.urls) < config.replicas:
        yield Problem(
            "inference.urls",
            f"names {len(config.urls)} server(s) for {config.replicas} replicas; expected one for each",
        )
    if config.sleep:
        yield Problem("inference.sleep", "needs servers that the workers start: remove inference.urls")
    for key in ("args", "env"):
        if getattr(config, key):
            yield Problem(
                f"inference.{key}", "is for a server that the worker starts; the servers in urls are running"
            )


def _check_interpreter(python: str, module: str) -> Iterator[Problem]:
    if not Path(python).is_file() or not os.access(python, os.X_OK):
        kind = "a folder" if Path(python).is_dir() else "not an executable file"
        yield Problem("inference.python", f"{python!r} is {kind}; expected path/to/venv/bin/python")
        return
    probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    try:
        trial = subprocess.run([python, "-I", "-c", probe], capture_output=True, timeout=_TRY_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        yield Problem("inference.python", f"{python!r} does not run: {error}", "environment")
        return
    if trial.returncode == 1 and not trial.stderr:
        yield Problem(
            "inference.python", f"{python!r} has no module {module!r}; install it there", "environment"
        )
    elif trial.returncode:
        last = trial.stderr.decode(errors="replace").strip().splitlines()[-1:]
        yield Problem(
            "inference.python", f"{python!r} is not a Python interpreter: {' '.join(last)}", "environment"
        )


def _check_args(config: ServerEngineConfig, reserved: Mapping[str, str]) -> Iterator[Problem]:
    for name in config.args:
        flag = _flag(name)
        if flag in reserved:
            instead = f"; set {reserved[flag]} instead" if reserved[flag] else ""
            yield Problem(f"inference.args.{name}", f"the worker sets {flag} itself{instead}")


def flags(own: Mapping[str, Flag], given: Mapping[str, Flag]) -> list[str]:
    """Build a command line from the engine's own flags and `inference.args`, which take precedence."""
    line: list[str] = []
    for flag, value in (dict(own) | {_flag(name): value for name, value in given.items()}).items():
        for item in value if isinstance(value, tuple) else (value,):
            if item is True:
                line.append(flag)
            elif item is not False:
                line += [flag, str(item)]
    return line


def _flag(name: str) -> str:
    """Return the flag `--block-size` for `block_size`, `block-size` and `--block-size`."""
    return "--" + name.lstrip("-").replace("_", "-")


def context_problems(length: int | None, run: RunConfig) -> Iterator[Problem]:
    """Yield the problems of `context_length`: an answer needs more tokens, or the model has fewer positions:
    an engine that extends them would sample what the trainer does not compute."""
    written = text_config(run.model).get("max_position_embeddings", 0)
    positions = max(written, positions_of(run.model) or 0)  # `check` has its own words for longrope
    if length and positions and length > positions:
        yarn = {
            "rope_type": "yarn",
            "factor": float(-(-length // positions)),
            "original_max_position_embeddings": positions,
        }
        yield Problem(
            "inference.context_length",
            f"is {length}, but {run.model!r} has {positions} positions; set at most that, or give trainer "
            f'and engine more with YaRN, in config.json of the model: "rope_scaling": {json.dumps(yarn)}',
        )
    longest = run.sampling.max_tokens
    if longest >= (length or _MOST_CONTEXT):
        yield Problem(
            "inference.context_length",
            f"is {length or f'at most {_MOST_CONTEXT} by default'}; a prompt and sampling.max_tokens "
            f"({longest}) need more",
        )


def default_context(run: RunConfig) -> Defaults:
    """Return `context_length` where the longest prompt and answer are known; else nothing."""
    held_out = run.evaluation.dataset if run.evaluation else None
    prompts = [each.max_prompt_tokens for each in (run.dataset, held_out) if each is not None]
    if run.workflow.use != "single_turn" or run.dataset.max_prompt_tokens is None:
        return {}
    answer = max(each.max_tokens for _, each in run.samplings())
    return {"context_length": (max(filter(None, prompts)) + answer, "the longest prompt and answer")}


def context_of_model(config: ServerEngineConfig, model: str | None) -> int:
    """Return the token limit of a sample: `context_length`, or `max_position_embeddings` up to 4096."""
    max_positions = text_config(model).get("max_position_embeddings", _MOST_CONTEXT)
    return config.context_length or min(int(max_positions), _MOST_CONTEXT)
