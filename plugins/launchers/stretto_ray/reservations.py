"""The placement groups that Ray has made for workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from stretto.launcher import Job
from stretto_ray import RayConfig
from stretto_ray.placement import RayGroup, group_of, groups_of, resources_of


@dataclass(eq=False)
class Reservation:
    """A placement group."""

    group: RayGroup
    handle: Any
    places: set[BundlePlace] = field(default_factory=set["BundlePlace"])
    """Those of workers that start or run."""

    def own_bundle(self, config: RayConfig, job: Job) -> int | None:
        """Return the bundle that was made for a worker, unless another worker uses it."""
        for number, bundle in enumerate(self.group.bundles):
            mine = job.worker in bundle.workers and bundle.each == resources_of(config, job)
            if mine and (job.unit or self._is_unused(number)):
                return number
        return None

    def unused_bundle(self, config: RayConfig, job: Job) -> int | None:
        """Return a bundle as large as a worker needs, of a worker that has ended."""
        for number, bundle in enumerate(self.group.bundles):
            fits = not job.unit and bundle.resources == resources_of(config, job)
            if fits and self._is_unused(number):
                return number
        return None

    def _is_unused(self, number: int) -> bool:
        return all(place.number != number for place in tuple(self.places))  # others leave meanwhile


@dataclass(eq=False)
class BundlePlace:
    """The bundle of one worker, from before its start until after its end."""

    reservation: Reservation
    number: int

    def leave(self) -> None:
        """The worker has ended. Its bundle stays reserved for it."""
        self.reservation.places.discard(self)


class Reservations:
    """The placement groups of one connection. They end with it."""

    def __init__(self) -> None:
        self._util: Any = import_module("ray.util")
        self._all: list[Reservation] = []

    def reserve(self, config: RayConfig, jobs: Sequence[Job]) -> list[BundlePlace]:
        """Return each job's bundle: its worker's former one, an unused one, or a new one, which Ray gives
        when there is room."""
        places: dict[str, BundlePlace] = {}
        for find in (Reservation.own_bundle, Reservation.unused_bundle):
            for job in jobs:
                if job.worker not in places and (place := self._find(find, config, job)):
                    places[job.worker] = place
        missing = [job for job in jobs if job.worker not in places]
        if missing:
            self.release_unused()
        for group in groups_of(config, missing):
            handle = self._util.placement_group(
                [dict(bundle.resources) for bundle in group.bundles], strategy=group.strategy
            )
            self._all.append(reservation := Reservation(group, handle))
            for number, bundle in enumerate(group.bundles):
                places |= {worker: _take(reservation, number) for worker in bundle.workers}
        return [places[job.worker] for job in jobs]

    def release_unused(self) -> None:
        """Give back the placement groups in which no worker starts or runs."""
        for unused in [each for each in self._all if not each.places]:
            self._all.remove(unused)
            self._util.remove_placement_group(unused.handle)

    def _find(
        self, find: Callable[[Reservation, RayConfig, Job], int | None], config: RayConfig, job: Job
    ) -> BundlePlace | None:
        for reservation in self._all:
            is_same = reservation.group.name == group_of(job)
            if is_same and (bundle := find(reservation, config, job)) is not None:
                return _take(reservation, bundle)
        return None


def _take(reservation: Reservation, bundle: int) -> BundlePlace:
    place = BundlePlace(reservation, bundle)
    reservation.places.add(place)
    return place
