"""Weight transport `bus`: sends versions over the run's bus, for machines that share no folder.

The publisher keeps the newest versions in a folder and answers requests for pieces of them. A subscriber
fetches pieces into a folder on its machine, and checks every tensor. Engines continue meanwhile.
"""

from collections.abc import Iterator

from stretto import Component, Context, WeightsConfig, hookimpl
from stretto.component import PositiveFloat, PositiveInt
from stretto.models.version_files import RunFolders
from stretto.weights import KeptVersions, Wire
from stretto_bus.fetching import BusSubscriber
from stretto_bus.serving import BusPublisher

__all__ = ["BusPublisher", "BusSubscriber", "BusTransport", "BusTransportConfig"]


class BusTransportConfig(WeightsConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the weight transport `bus`."""

    folder: str | None = None
    """Folder for versions, local to each machine. Default: shared memory where available, else the folder for
    temporary files."""
    keep: KeptVersions = 3
    """Number of newest versions that the trainer keeps. A slower fetch starts again with the newest."""
    deltas: bool = True
    """Send only the changes since the version before, if the weights are published with 16 bits
    (`training.dtype` or `training.publish_dtype`). For this the trainer keeps one version in memory, and each
    engine's machine keeps the newest version in `folder`."""
    piece_kb: PositiveInt = 512
    """Size of the piece in one message, in KiB; limited by the bus's largest message."""
    in_flight: PositiveInt = 8
    """Number of pieces that an engine requests at once. The bus buffers this number of pieces for each
    engine."""
    deadline_s: PositiveFloat = 30.0
    """Seconds to wait for a piece before the fetch fails. Pieces that have arrived are kept for the next
    attempt."""
    shard_gb: PositiveFloat = 0.5
    """Size of the largest file in GiB. Publishing needs at most this much memory besides the model."""


class BusTransport:
    """Makes both ends, for the processes of one run."""

    def __init__(self, config: BusTransportConfig, context: Context) -> None:
        self._config = config
        self._folders = RunFolders(context, config.folder)

    def publisher(self, wire: Wire) -> BusPublisher:
        """Return the trainer's end."""
        config = self._config
        return BusPublisher(self._folders.own(), config.keep, config.shard_gb, wire, deltas=config.deltas)

    def subscriber(self, wire: Wire) -> BusSubscriber:
        """Return an engine's end."""
        config = self._config
        return BusSubscriber(
            self._folders.own(),
            wire,
            piece=min(config.piece_kb * 2**10, wire.limit),
            in_flight=config.in_flight,
            deadline_s=config.deadline_s,
        )

    def clean(self) -> None:
        """Remove the run's folders on this machine. Workers on other machines remove the folders there."""
        self._folders.clean()


@hookimpl
def stretto_weights() -> Iterator[Component[BusTransportConfig]]:
    yield Component("bus", BusTransport, BusTransportConfig, "piece by piece over the bus, no shared folder")
