"""The test, at the start of a deterministic engine, that a row's bits do not depend on the other rows.

No library promises this; so far it held on the machines tested, for shapes padded as in `shapes.py`. If the
test fails, it is repeated with stricter shapes: separate prompts, then also the largest number of rows in
every step, then also the largest lengths. The test takes up to some minutes, so its result is cached.
"""

import dataclasses
import fcntl
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import msgspec
import structlog
import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.errors import EngineError
from stretto.machine import clock
from stretto.machine.private_file import cache_folder
from stretto.training.device import is_gpu
from stretto_torch.decoder import Decoder
from stretto_torch.shapes import Shapes, padded_prompt
from stretto_torch.size_classes import SizeClasses

log = structlog.get_logger(__name__)

_PROMPT = 21  # tokens of the tested prompt
_STEPS = 3  # decode steps of one test

Say = Callable[[str], None]


class _Found(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The cached result of an earlier test: the fields of `Shapes` that the test sets."""

    solo_prompts: bool
    fixed: bool
    trimmed: bool


def kept_shapes(decoder: Decoder, shapes: Shapes, values: Sequence[str], say: Say) -> Shapes:
    """Return the result of `stable_shapes`, from this user's cache if possible. `values`: the model and the
    engine's config, as a part of the cache key. `say` receives the progress of the test."""
    key_parts = (*values, *_machine(decoder), repr(shapes))
    name = sha256("\n".join(key_parts).encode()).hexdigest()[:32]
    file = cache_folder("deterministic") / f"{name}.json"
    with ExitStack() as stack:
        cached = None
        with suppress(OSError):  # a folder that cannot be written, or a file system without locks
            cached = _former(stack, file, say)
        if cached is not None:
            log.info("a former test of this model and processor holds", file=str(file))
            return dataclasses.replace(shapes, **msgspec.structs.asdict(cached))
        tested = stable_shapes(decoder, shapes, say)
        with suppress(OSError):
            file.write_bytes(msgspec.json.encode(_Found(tested.solo_prompts, tested.fixed, tested.trimmed)))
    return tested


def _former(stack: ExitStack, file: Path, say: Say) -> _Found | None:
    """Return the cached result, if any, and lock its file until the stack closes."""
    file.parent.mkdir(parents=True, exist_ok=True)
    locked_file = stack.enter_context(file.open("a+b"))
    say("waits for another engine that makes the same test")
    fcntl.flock(locked_file, fcntl.LOCK_EX)  # several engines of a run start at the same time
    locked_file.seek(0)
    try:
        return msgspec.json.decode(locked_file.read(), type=_Found)
    except msgspec.DecodeError:  # the file is new, or was cut short
        return None


def _machine(decoder: Decoder) -> tuple[str, ...]:
    device = decoder.cache.device
    if is_gpu(device):
        processor = torch.get_device_module(device).get_device_name(device)
    else:
        text = Path("/proc/cpuinfo").read_text()
        processor = next((line for line in text.splitlines() if line.startswith("model name")), "")
    libraries = (torch.__config__.show(), torch.backends.cpu.get_cpu_capability())
    return (processor, *libraries, str(torch.get_num_threads()), decoder.name, str(decoder.cache.tokens))


def what_was_found(shapes: Shapes) -> str:
    """Describe the limits of these shapes to the user; empty if all rows are independent."""
    if shapes.fixed:
        return "rows are not independent here, so steps have fixed shapes: bits depend on inference.slots"
    return "prompts are not independent here, so each is computed by itself" if shapes.solo_prompts else ""


def stable_shapes(decoder: Decoder, shapes: Shapes, say: Say = lambda text: None) -> Shapes:
    """Return shapes with which a row has the same bits alone, among other rows, and at another position."""
    for change in ({}, {"solo_prompts": True}, {"fixed": True, "trimmed": True}, {"trimmed": False}):
        shapes = dataclasses.replace(shapes, **change)
        max_tokens = shapes.most_rows * shapes.length
        if shapes.full and max_tokens > decoder.cache.tokens:
            raise EngineError(
                f"inference.deterministic: here all slots must be computed at full length,"
                f" {max_tokens} tokens; inference.cache_gb holds {decoder.cache.tokens}: raise it, or lower"
                " inference.slots"
            )
        if _same_bits(decoder, shapes, say):
            return shapes
    threads = torch.get_num_threads()
    hint = f" with inference.threads={threads}; try 1" if threads > 1 else ""
    raise EngineError(f"inference.deterministic: here a row's bits depend on the other rows{hint}")


def _same_bits(decoder: Decoder, shapes: Shapes, say: Say) -> bool:
    activity, started_at = "tries that answers do not depend on each other", clock.now()
    say(activity)
    longest = shapes.context - _STEPS
    prompt = min(_PROMPT, longest)
    expected = _logprobs(decoder, shapes, _Company(live=1, row=0, prompt=prompt, other_tokens=0))
    assert expected is not None, "the cache holds at least one sample"
    companies = [
        _Company(live, row, prompt, min(other_tokens, longest))
        for live in sorted({shapes.slots, min(shapes.slots, 9), min(shapes.slots, 17)})
        for row in sorted({0, live // 2, live - 1})
        for other_tokens in (5, 30, 140)  # rows with 30 tokens share prefills with the sample
    ]
    for number, company in enumerate(companies, 1):
        result = _logprobs(decoder, shapes, company)
        if result is not None and not torch.equal(expected, result):
            return False
        left_s = (clock.now() - started_at) / number * (len(companies) - number)
        say(f"{activity}: {number} of {len(companies)}, about {left_s:.0f} s left")
    return True


@dataclass(frozen=True, slots=True)
class _Company:
    live: int  # number of rows of the step
    row: int  # row of the sample
    prompt: int  # tokens of the sample before the first step
    other_tokens: int  # tokens of each other row before the first step


def _logprobs(decoder: Decoder, shapes: Shapes, company: _Company) -> Tensor | None:
    """Return the logprobs of the sample, (1 + steps, V); None if the cache has no room for all rows."""
    device = decoder.cache.device
    texts = torch.arange(company.live * shapes.length).mul(7919).remainder(decoder.vocabulary)
    texts = texts.view(company.live, shapes.length)
    texts[company.row] = torch.arange(shapes.length).mul(104_729).remainder(decoder.vocabulary)
    lengths = torch.full((company.live,), company.other_tokens)
    lengths[company.row] = company.prompt
    needs = (lengths + _STEPS).tolist()
    size_classes = SizeClasses(shapes, decoder.cache.tokens, one_size_class=decoder.one_size_class)
    if not size_classes.fits(needs):
        return None
    plan = size_classes.plan(needs, [None] * company.live)
    decoder.cache.place(plan.blocks)
    texts, lengths = texts[plan.order], lengths[plan.order]
    row = plan.order.index(company.row)
    logprobs: list[Tensor] = []
    for batch in shapes.prompt_batches(lengths.tolist()):
        indices = torch.tensor(batch)
        tokens = texts[indices, : padded_prompt(int(lengths[indices].max()))]
        logits = decoder.prefill(tokens.to(device), lengths[indices].to(device), indices.to(device))
        if row in batch:
            logprobs.append(logits.log_softmax(-1)[batch.index(row)])

    rows = shapes.rows(company.live)
    for step in range(_STEPS):
        positions = F.pad(lengths + step, (0, rows - company.live))
        tokens = F.pad(texts[torch.arange(company.live), lengths + step], (0, rows - company.live))
        spans = shapes.spans(positions[: company.live].numpy(), plan.size_classes)
        logits = decoder.decode(tokens.to(device), positions.to(device), spans)[: company.live]
        logprobs.append(logits.log_softmax(-1)[row])
    return torch.stack(logprobs)
