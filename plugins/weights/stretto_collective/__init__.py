"""Weight transport `collective`: sends versions from trainer to inference workers by torch.distributed.

It is faster than `bus`. Trainer and worker meet over the run's bus. Then they use gloo, or NCCL, over one
network interface, in a process group of two for each transfer. So engines may join and leave, and a failed
transfer has no effect on others. A worker whose engine is a separate server imports torch only for this.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Literal

from stretto import Component, Context, Problem, WeightsConfig, hookimpl
from stretto.component import PositiveFloat, PositiveInt
from stretto.config import RunConfig
from stretto.models.version_files import RunFolders
from stretto.nodes import interface_problems
from stretto.weights import KeptVersions, Wire

__all__ = ["CollectiveConfig", "CollectiveTransport"]


class CollectiveConfig(WeightsConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the weight transport `collective`."""

    interface: str = "lo"
    """Network interface over which trainer and engines reach each other, with the same name on all machines.
    The traffic is not encrypted. The default works on a single machine."""
    backend: Literal["gloo", "nccl", "auto"] = "gloo"
    """Library that sends the bytes. `nccl` needs a GPU at each end, not the same one. `auto` uses NCCL where
    it is possible, otherwise gloo. NCCL has not been tried on GPUs, so it is not the default."""
    folder: str | None = None
    """Folder for versions, local to each machine. Default: shared memory where available, else the folder for
    temporary files."""
    keep: KeptVersions = 3
    """Number of newest versions that the trainer keeps. A slower transfer starts again with the newest."""
    deltas: bool = True
    """Send only the changes since the version before; see `deltas` of `bus`."""
    bucket_mb: PositiveInt = 64
    """Size of the bucket that is sent at once, in MiB."""
    deadline_s: PositiveFloat = 60.0
    """Time limit in seconds for the meeting of both ends, and for each bucket; then the transfer fails."""
    shard_gb: PositiveFloat = 0.5
    """Size of the largest file in GiB. Publishing needs at most this much memory besides the model."""


class CollectiveTransport:
    """Makes both ends, for the processes of one run."""

    def __init__(self, config: CollectiveConfig, context: Context) -> None:
        self._config = config
        self._folders = RunFolders(context, config.folder)

    def publisher(self, wire: Wire) -> Any:
        """Return the trainer's end."""
        from stretto_collective.sending import CollectivePublisher

        return CollectivePublisher(self._folders.own(), wire, self._config)

    def subscriber(self, wire: Wire) -> Any:
        """Return an engine's end."""
        from stretto_collective.receiving import CollectiveSubscriber

        return CollectiveSubscriber(self._folders.own(), wire, self._config)

    def clean(self) -> None:
        """Remove the run's folders on this machine. Workers on other machines remove the folders there."""
        self._folders.clean()


def check(config: CollectiveConfig, run: RunConfig) -> Iterable[Problem]:
    """Check that this machine has the network interface."""
    del run
    yield from interface_problems("weights.interface", config.interface)


@hookimpl
def stretto_weights() -> Iterator[Component[CollectiveConfig]]:
    yield Component(
        "collective",
        CollectiveTransport,
        CollectiveConfig,
        "by torch.distributed, from the trainer to each engine's worker",
        check=check,
        requires={"torch": "stretto[torch]"},
    )
