"""Mistakes that are planted to see whether the simulation finds them.

Every mutation leaves a run without a fault as it is, and breaks a promise of the system under some fault.
They were written without a look at what judges the runs. The last ones are the reverse of real mends.
"""

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any


@dataclass(frozen=True)
class Mutation:
    name: str
    """What goes wrong, in a few words."""
    module: str
    """Dotted name of the module."""
    old: str
    """Source text that is found exactly once in the module's file."""
    new: str
    also: tuple["Mutation", ...] = ()
    """Mutations that are planted with this one. Only the reverse of a real mend needs them."""


_ENGINES = "stretto.kernel.calls.engines"
_KERNEL = "stretto.kernel.kernel"
_SCHEDULER = "stretto.kernel.schedule.scheduler"
_SUBJECTS = "stretto.bus.messages.subjects"

MUTATIONS: list[Mutation] = [
    # Checkpoints. Breaks exact recovery: the deadlines of tickets follow from other versions than before
    # (kernel killed after a checkpoint, bound on staleness of 1 or more).
    Mutation(
        "a checkpoint forgets how old the tokens of an attempt may be",
        _SCHEDULER,
        old="""            open=[msgspec.structs.replace(ticket) for""",
        new="""            open=[msgspec.structs.replace(ticket, bounds={}) for""",
    ),
    # Ledger of tickets. Breaks the bound on staleness: a ticket is issued again, its deadline moves, and then
    # the group of its first attempt arrives late (rollout worker lost while its outcome is on its way).
    Mutation(
        "a ticket that is issued again forgets how old its first attempt may be",
        "stretto.kernel.schedule.open_tickets",
        old="""        return min(self.bounds.values(), default""",
        new="""        return max(self.bounds.values(), default""",
    ),
    # Routes. Breaks "never stands still": one lost message with routes is not repeated, so a rollout worker
    # waits for an engine that it does not know, or calls one that is gone (lost message, broken connection).
    Mutation(
        "routes are repeated only if they have changed",
        "stretto.kernel.fleet.routes",
        old="""                await self._send(rollouts[part::parts])\n""",
        new="""                changed = [
                    rollout
                    for rollout in rollouts[part::parts]
                    if self._sent.get(rollout) != self._candidates.of(rollout)
                ]
                await self._send(changed)\n""",
    ),
    # Weight swap. Breaks "a run survives a slow engine": an engine that stood still while training went on
    # with others finds its version removed, refuses the swap, and the run fails (engine stopped for seconds).
    Mutation(
        "a refused swap is final, even if newer weights are there",
        _ENGINES,
        old="""                if failures == _TRIES:\n""",
        new="""                if failures == _TRIES or not isinstance(error, NoAnswer):\n""",
    ),
    # Publication. Breaks recovery: an older version that is still to be evaluated keeps the address of the
    # killed trainer, where no engine finds it (kernel killed after a checkpoint during an evaluation).
    Mutation(
        "a version from a checkpoint keeps its former address",
        "stretto.workers.training.publication",
        old="""                notes.append(msgspec.structs.replace(new_note, canary=note.canary))\n""",
        new="""                notes.append(msgspec.structs.replace(note, digest=new_note.digest))\n""",
    ),
    # Recovery. Breaks "digests are attested": a step that was trained, but not yet recorded, is repeated and
    # never gets its digest in the journal (kernel killed between the batch's start and its digest).
    Mutation(
        "a repeated step without a digest gets none",
        "stretto.kernel.durable.recovery",
        old="""        if recorded is None:
            self._writer.hear(events.VersionPublished(self._state.incarnation, note.version, note.digest))
        elif recorded != note.digest:\n""",
        new="""        if recorded is not None and recorded != note.digest:\n""",
    ),
    # Events. Breaks "state = fold(events)": the loss of a worker changes the schedule and is in no event.
    Mutation(
        "the loss of a worker is not written",
        _KERNEL,
        old="""        self._journal.hear(event)\n""",
        new="""        if not isinstance(event, WorkerGone):
            self._journal.hear(event)\n""",
    ),
    # Checkpoints. Breaks "one evaluation of each due version": that under way at a checkpoint is forgotten
    # (kernel killed after a checkpoint, before the evaluation is complete).
    Mutation(
        "a checkpoint has only the evaluations that wait, not that under way",
        "stretto.kernel.schedule.evaluation",
        old="""scores=list(under_way.scores)),
            open=[msgspec""",
        new="""scores=list(under_way.scores)) and None,
            open=[] and [msgspec""",
    ),
    # Adoption. Breaks "never stands still": a ticket of a worker that was lost with its kernel is not issued
    # again (kernel killed, and a rollout worker before the next one comes).
    Mutation(
        "the next kernel counts on workers that it has not heard of",
        "stretto.kernel.schedule.open_tickets",
        old="""                ticket.worker, ticket.tries = "", 0\n""",
        new="""                ticket.tries = 0\n""",
    ),
    # Heartbeats. Breaks "never stands still": a worker without heartbeats is lost, but its process lives on,
    # so nobody starts it again (worker stopped or cut off for more than 15 s; worst if it is alone).
    Mutation(
        "a silent worker is not stopped, only one that hangs",
        "stretto.kernel.fleet.fleet",
        old="""                    if handle := self._handles.get(member.worker):\n""",
        new="""                    handle = self._handles.get(member.worker)
                    if handle is not None and member.beat.blocked_s > _HUNG_S:\n""",
    ),
    # Redelivery. Breaks "never stands still": a ticket that arrives at a rollout worker that drains is taken
    # off the queue, and nobody has it (workers scaled down, or SIGINT at a rollout worker).
    Mutation(
        "a rollout worker that drains acknowledges a ticket that it does not run",
        "stretto.bus.store",
        old="""                    await msg.nak()\n""",
        new="""                    await msg.ack()\n""",
    ),
    # Outcome log. Breaks "no group is lost" and "never stands still": after an interruption the next message
    # of the log is skipped; it may be an outcome (outage, or broken connection of the kernel to the store).
    Mutation(
        "an interrupted reader of the log skips a message",
        "stretto.bus.store",
        old="""                log.warning("stream interrupted", stream=stream, following=following)\n""",
        new="""                following += 1  # it may be the cause
                log.warning("stream interrupted", stream=stream, following=following)\n""",
    ),
    # ------------------------------------------------------------------------ the reverse of real mends
    # Commit 41737ab. An engine is killed during a swap, its successor answers the former one's request, and
    # the kernel takes the id out of the routes. The successor hears it only if the subject names no process.
    Mutation(
        "known: a lost engine's swap is answered by its successor",
        _ENGINES,
        old="""            if not self._is_present(member):
                return  # the worker was lost before its answer came\n""",
        new="",
        also=(
            Mutation(
                "known: a swap names the engine, not its process",
                _SUBJECTS,
                old="""        return f"{self.root}.worker.{role}.{_checked(worker, nonce)}.{verb}"\n""",
                new="""        process = "0" if (role, verb) == ("inference", "swap") else nonce
        return f"{self.root}.worker.{role}.{_checked(worker, process)}.{verb}"\n""",
            ),
        ),
    ),
    # Commit 31bcb24, bug 1 of the findings. A trainer of the former kernel answers or refuses a request to
    # the new one (trainer stopped, kernel killed and resumed, trainer continues).
    Mutation(
        "known: a request names the worker, not its process",
        _SUBJECTS,
        old="""        return f"{self.root}.worker.{role}.{_checked(worker, nonce)}.{verb}"\n""",
        new="""        return f"{self.root}.worker.{role}.{_checked(worker, nonce and '0')}.{verb}"\n""",
    ),
    # The last three are by a hand that had not read the oracles.
    # Addresses. Breaks "never stands still": answers wait for an engine that is gone.
    Mutation(
        "a rollout worker calls the former process of a worker that was replaced",
        "stretto.workers.sampling.routing",
        old="""                or peer.nonce != replica.peer.nonce\n""",
        new="",
    ),
    # Publication. Breaks "no version is announced twice" (trainer lost after a checkpoint).
    Mutation(
        "versions that new trainers train again are published again",
        "stretto.kernel.replacement",
        old="""            note = await self._trainers.published(version)\n""",
        new="""            note = await self._trainers.published(version)
            await self._steps._note(note)\n""",
    ),
    # Leases. Breaks "only the owner writes": of two kernels both do.
    Mutation(
        "only the first message of a stream is fenced",
        "stretto.bus.store",
        old="""            if after is not None:
                headers[""",
        new="""            if after is not None and not after.sequence:
                headers[""",
    ),
]


def plant(mutation: Mutation) -> None:
    """Replace the code of a module's functions by that of the mutated source text.

    Objects that exist already run the new code at their next call of such a function; a coroutine under way
    and a nested function that exists already keep the former one.
    """
    for each in (mutation, *mutation.also):
        file = str(import_module(each.module).__file__)
        source = Path(file).read_text()
        assert source.count(each.old) == 1, f"{each.name!r}: not once in {file}"
        former, mutated = (
            [*_functions_in(compile(text, file, "exec", dont_inherit=True))]
            for text in (source, source.replace(each.old, each.new))
        )
        assert any(_content(one) != _content(two) for one, two in zip(former, mutated, strict=True)), (
            each.name
        )
        codes = dict(zip(map(_place, former), mutated, strict=True))
        for function in gc.get_objects():
            if type(function) is FunctionType and function.__module__ == each.module:  # no proxy
                function.__code__ = codes.get(_place(function.__code__), function.__code__)


def _functions_in(code: CodeType) -> Iterator[CodeType]:
    """Yield the codes of the functions and methods of a module, without those inside of others."""
    for each in code.co_consts:
        if isinstance(each, CodeType) and each.co_flags & CO_OPTIMIZED:
            yield each
        elif isinstance(each, CodeType):  # the body of a class
            yield from _functions_in(each)


def _place(code: CodeType) -> tuple[str, int]:
    return code.co_qualname, code.co_firstlineno


def _content(code: CodeType) -> tuple[Any, ...]:
    """What a code does, wherever it is in its file."""
    constants = tuple(_content(each) if isinstance(each, CodeType) else each for each in code.co_consts)
    return code.co_code, constants, code.co_names
