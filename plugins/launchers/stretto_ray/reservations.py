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
    """The places of workers that start or run."""

    def own_bundle(self, config: RayConfig, job: Job) -> int | None:
        """Return the bundle that was made for a worker, unless another worker uses it."""
        for number, bundle in enumerate(self.group.bundles):
            is_own = job.worker in bundle.workers and bundle.each == resources_of(config, job)
            if is_own and (job.unit or self._is_unused(number)):
                return number
        return None

    def unused_bundle(self, config: RayConfig, job: Job) -> int | None:
        """Return a bundle of an ended worker that has exactly the resources which this worker needs."""
        for number, bundle in enumerate(self.group.bundles):
            fits = not job.unit and bundle.resources == resources_of(config, job)
            if fits and self._is_unused(number):
                return number
        return None

    def _is_unused(self, number: int) -> bool:
        return all(place.number != number for place in tuple(self.places))  # other workers leave meanwhile


@dataclass(eq=False)
class BundlePlace:
    """The bundle of one worker, from before its start until after its end."""

    reservation: Reservation
    number: int

    def leave(self) -> None:
        """Record that the worker has ended. The bundle stays reserved for a next start."""
        self.reservation.places.discard(self)


class Reservations:
    """The placement groups of one connection. They end with the connection."""

    def __init__(self) -> None:
        self._util: Any = import_module("ray.util")
        self._all: list[Reservation] = []

    def reserve(self, config: RayConfig, jobs: Sequence[Job]) -> list[BundlePlace]:
        """Return a bundle for each job: its worker's former bundle, an unused bundle, or a new one, for which
        Ray may still wait for room."""
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
        """Remove the placement groups in which no worker starts or runs."""
        for unused in [reservation for reservation in self._all if not reservation.places]:
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
