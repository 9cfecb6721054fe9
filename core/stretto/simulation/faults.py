"""The faults of a universe, as data: a tape can be drawn, shortened, stored and replayed."""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Mapping
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec

from stretto.launcher import LauncherConfig
from stretto.simulation.loop import SimulatedProcess

if TYPE_CHECKING:
    from stretto.simulation.universe import Universe

_CALM_S = 4.0
"""Seconds that bad weather lasts."""
_LONGEST_S = 8.0
"""Longest absence of the server, in seconds; workers wait longer than this for the server."""
_REPLACED_S = 25.0
"""Seconds after which a silent worker has been killed and replaced."""
_AFTER_S = 0.3
"""Longest time between a named point and its fault, in seconds."""

POINTS: dict[str, Callable[[str, bytes], bool]] = {
    "a swap is asked": lambda subject, data: subject.endswith(".swap"),
    "a group is stored": lambda subject, data: subject.endswith(".log.groups"),
    "a batch is in the journal": lambda subject, data: b"BatchStarted" in data,
    "a step is in the journal": lambda subject, data: b"VersionPublished" in data,
    "a version is published": lambda subject, data: subject.endswith(".published"),
    "a call is asked": lambda subject, data: subject.endswith(".call"),
    "a checkpoint is asked": lambda subject, data: subject.endswith(".save"),
    "a checkpoint is copied": lambda subject, data: subject.endswith(".saved"),
    "a worker joins": lambda subject, data: subject.endswith(".join"),
    "a kernel takes the run": lambda subject, data: subject.endswith(".leases"),
    "before a checkpoint is renamed": lambda subject, data: subject.startswith("file.rename.step-"),
    "before a file is renamed": lambda subject, data: subject.startswith("file.rename."),
}
"""Name of a critical moment -> whether a message, or the rename of a file, shows this moment."""


class Fault(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One fault to inject."""

    kind: str
    at: float
    """Virtual seconds after the start of the universe, or after the named point."""
    point: str = ""
    """Key of `POINTS`; empty for a moment in time."""
    nth: int = 1
    """Which occurrence of the point, from 1 on."""
    who: str = ""
    """Role of the process that the fault hits."""
    pick: float = 0.0
    """Which process of the role, as a share of their number; for `scale`, it draws the new number."""
    seconds: float = 0.0
    share: float = 0.0
    """Share of messages that the fault hits."""

    @property
    def changes_model(self) -> bool:
        """Whether a run without staleness may end with another model: because other tickets are trained, or
        because several trainers of `mock` have no checksum."""
        return self.kind in ("fail", "full store") or self.who == "training"


class Tape(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a universe: seed, run file and faults. The same tape gives the same universe."""

    seed: int
    run: dict[str, Any]
    """The run file. The universe sets its folders."""
    faults: tuple[Fault, ...]
    patience_s: float = 60.0
    """A run is stuck after this many virtual seconds without a new batch, version or evaluation in the
    journal, counted from the end of the last fault at the earliest."""
    model: str = ""
    """Digest of the version that the run must end with; empty if unknown."""
    may_fail: bool = False
    """Whether tickets may fail even without faults."""
    limit_s: float = 60.0
    """A universe is ended after this many processor seconds without a new batch, version or evaluation."""


KINDS = {
    "kill": 8,
    "stop": 3,
    "block": 2,
    "term": 1,
    "int": 1,
    "break": 2,
    "outage": 3,
    "hang": 1,
    "late": 2,
    "lose": 2,
    "double": 1,
    "late ack": 1,
    "unconfirmed": 2,
    "busy store": 1,
    "full store": 1,
    "cut": 2,
    "slow": 1,
    "fail": 1,
    "scale": 3,
    "takeover": 2,
    "rival": 0,  # only if it is named: a replaced kernel without a connection removes weights of the next one
    "clock": 1,
    "tear": 1,
    "full disk": 1,
}
"""Kind of fault -> its weight in a draw from all kinds."""
_VICTIMS = {"inference": 4, "rollout": 3, "verifier": 2, "trainer": 2, "kernel": 4}
_OF_THE_SERVER = ("outage", "hang", "full store", "full disk")
_SILENCING = ("stop", "cut")
_DRAINING = ("int", "scale")
_SECONDS = (0.1, 0.3, 1.0, 2.5, 6.0, 18.0, 100.0)  # below and above the deadlines of workers
_TAKEN_OVER_S = 3.0
"""Longest time from the lease of a kernel that replaces a killed one to the second fault of `takeover`."""


def draw(rng: Random, number: int, until_s: float, kinds: Collection[str] = ()) -> tuple[Fault, ...]:
    """Draw faults of `kinds`, or of all kinds: about half at named points, the others before `until_s`."""
    weights = {kind: max(1, KINDS[kind]) for kind in KINDS if kind in kinds} or KINDS
    return tuple(sorted((_draw(rng, until_s, weights) for _ in range(number)), key=lambda fault: fault.at))


def _draw(rng: Random, until_s: float, weights: Mapping[str, int]) -> Fault:
    kind = rng.choices([*weights], [*weights.values()])[0]
    seconds = round(rng.choice(_SECONDS) * rng.uniform(0.7, 1.3), 3)
    who = rng.choices([*_VICTIMS], [*_VICTIMS.values()])[0]
    if kind == "scale":
        who = rng.choice(["inference", "rollout", "verifier", "training"])
    if kind == "rival":  # stopped for so long that the next kernel owns the run
        who, seconds = "kernel", max(1.0, seconds)
    if kind == "takeover":  # from the next kernel's lease to the second fault
        seconds = round(rng.random() ** 2 * _TAKEN_OVER_S, 6)
    if kind == "tear":
        who = rng.choice(["kernel", "kernel", "trainer"])
    place: dict[str, Any] = {"at": round(rng.uniform(0.2, until_s), 3)}
    if rng.random() < 0.5:
        after = round(rng.random() ** 3 * _AFTER_S, 6)
        place = {"at": after, "point": rng.choice([*POINTS]), "nth": rng.randint(1, 8)}
        if place["point"].startswith("before"):
            place["at"] = 0.0
            who = "kernel"
    if who == "kernel" or kind in _OF_THE_SERVER:
        seconds = min(seconds, _LONGEST_S)
    elif kind not in _SILENCING:
        seconds = min(seconds, _REPLACED_S)
    return Fault(
        kind=kind,
        **place,
        who=who,
        pick=round(rng.random(), 3),
        seconds=seconds,
        share=rng.choice([0.01, 0.05, 0.2, 0.5]),
    )


def inject(universe: Universe, faults: tuple[Fault, ...]) -> None:
    """Schedule faults: each at its time, or at its named point."""
    by_point: dict[str, list[Fault]] = {}
    for fault in faults:
        if fault.point:
            by_point.setdefault(fault.point, []).append(fault)
        else:
            universe.server.later(fault.at, happen, universe, fault)
    num_seen = dict.fromkeys(by_point, 0)

    def watch(sender: str, subject: str, data: bytes, head: bytes) -> None:
        for point, point_faults in by_point.items():
            if POINTS[point](subject, data):
                num_seen[point] += 1
                for fault in point_faults:
                    if fault.nth != num_seen[point]:
                        continue
                    if fault.at:
                        universe.server.later(fault.at, happen, universe, fault)
                    else:
                        happen(universe, fault)

    universe.server.observers.append(watch)
    universe.world.files.observers.append(watch)


def happen(universe: Universe, fault: Fault) -> None:
    """Inject a fault now. Raises ValueError for an unknown kind."""
    if fault.kind not in KINDS:
        raise ValueError(f"no such kind of fault: {fault.kind}")
    effect = _HITS.get(fault.kind)
    candidates = universe.machine.alive("kernel" if fault.kind == "takeover" else fault.who) if effect else []
    victim = candidates[min(int(fault.pick * len(candidates)), len(candidates) - 1)] if candidates else None
    universe.report("fault", fault.kind, victim.name if victim else "", f"{fault.seconds:g} s")
    universe.be_patient(max(_lasts_s(fault, victim), _CALM_S))
    if effect is None:
        _change_world(universe, fault)
    elif victim is not None:
        effect(universe, victim, fault)


def _lasts_s(fault: Fault, victim: SimulatedProcess | None) -> float:
    """Return for how long a fault may stop progress. A silent worker is replaced if it has joined; the kernel
    waits for one that has not. A draining worker may hold tickets that no engine can serve."""
    if fault.kind in _DRAINING:
        return LauncherConfig().drain_s
    is_replaced = fault.kind in _SILENCING and victim is not None and victim.joined
    return min(fault.seconds, _REPLACED_S) if is_replaced else fault.seconds


def _change_world(universe: Universe, fault: Fault) -> None:
    server, machine, seconds = universe.server, universe.machine, fault.seconds
    now = universe.loop.time()
    for name in _SHARES.get(fault.kind, ()):
        server.weather.worsen(name, fault.share, _CALM_S)
    match fault.kind:
        case "outage":
            server.go_down(seconds)
        case "hang":
            server.answer_pings_only(seconds)
        case "late":
            server.weather.worsen("late_s", min(seconds, 5.0), _CALM_S)
        case "full store":
            server.weather.worsen("store_fails", 1.0, seconds)
        case "slow":
            machine.busy_until = max(machine.busy_until, now + seconds)
        case "scale":
            universe.scale(fault.who, 1 + int(3 * fault.pick))
        case "full disk":
            universe.world.files.full_until = max(universe.world.files.full_until, now + seconds)
        case "clock":
            universe.world.wall_offset_s += seconds * (60 if fault.pick < 0.5 else -60)
        case _:
            pass  # a kind of `_SHARES`, handled above


def _take_over(universe: Universe, kernel: SimulatedProcess, fault: Fault) -> None:
    """Kill a kernel. While the next one begins, set the clock, and kill a worker or interrupt the kernel."""
    kernel.end(-signal.SIGKILL)

    def begun() -> None:
        happen(universe, msgspec.structs.replace(fault, kind="clock", seconds=60.0))
        kind = "term" if fault.who == "kernel" else "kill"
        universe.server.later(fault.seconds, happen, universe, msgspec.structs.replace(fault, kind=kind))

    universe.at_next_lease.append(begun)


_SHARES = {
    "late": ("late",),
    "lose": ("lost", "untaken"),
    "double": ("doubled",),
    "late ack": ("taken_late",),
    "unconfirmed": ("unconfirmed",),
    "busy store": ("store_fails",),
    "fail": ("failing",),
}
"""Kind of fault -> the shares of `Weather` that it sets."""
_HITS: dict[str, Callable[[Universe, SimulatedProcess, Fault], None]] = {
    "kill": lambda universe, victim, fault: victim.end(-signal.SIGKILL),
    "term": lambda universe, victim, fault: victim.signal(signal.SIGTERM),
    "int": lambda universe, victim, fault: victim.signal(signal.SIGINT),
    "stop": lambda universe, victim, fault: victim.stop(fault.seconds),
    "block": lambda universe, victim, fault: victim.block(fault.seconds),
    "takeover": _take_over,
    "rival": lambda universe, victim, fault: universe.replace(victim, fault.seconds),
    "tear": lambda universe, victim, fault: universe.world.files.tear(victim),
    "break": lambda universe, victim, fault: universe.server.break_connections(victim.name),
    "cut": lambda universe, victim, fault: universe.server.cut_off(victim, fault.seconds),
}
"""Kind of fault -> its effect on a process."""
