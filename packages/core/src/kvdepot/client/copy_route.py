"""`CopyRoute`: decides for `WorkerTransfers` which process copies a batch."""

from collections.abc import Callable
from typing import Final

from kvdepot.backends import Copier, CopyBatch
from kvdepot.client.channel import Channel
from kvdepot.client.link import Link


class CopyRoute:
    """Has every batch copied by the copier of this process.

    A backend whose copies can also be made by a mover of the depot overrides these methods.
    """

    def __init__(self, copier: Copier) -> None:
        self.copier: Final = copier

    def copies_here(self, link: Link) -> bool:
        """Return whether this process copies in this session, and so needs the pool mapped and attached."""
        del link
        return True

    def opened(self, link: Link) -> None:
        """Note a link that has become usable: new, or no longer suspended. Called before `attach`."""

    def prepare(self, channel: Channel) -> None:
        """Get ready for a transfer, before it asks the depot for anything. An exception makes it a miss."""

    def store(self, channel: Channel, batch: CopyBatch) -> bytes | None:
        """Copy a batch of a store. See `Copier.store`."""
        del channel
        return self.copier.store(batch)

    def begin_retrieve(self, channel: Channel, batch: CopyBatch) -> Callable[[], None] | None:
        """Begin to copy a batch of a retrieve. See `Copier.begin_retrieve`."""
        del channel
        return self.copier.begin_retrieve(batch)
