"""`CopyRoute`: decides for `WorkerTransfers` which process copies a batch."""

from collections.abc import Callable
from typing import Final

from kvdepot.backends import Copier, CopyBatch
from kvdepot.client.channel import Channel
from kvdepot.client.session import Session


class CopyRoute:
    """Copies every batch with the copier of this process.

    A backend that also supports copies by a mover of the depot overrides these methods.
    """

    def __init__(self, copier: Copier) -> None:
        self.copier: Final = copier

    def copies_here(self, session: Session) -> bool:
        """Return whether this process copies in this session. If so, the pool must be mapped and attached."""
        del session
        return True

    def opened(self, session: Session) -> None:
        """Note a session that became usable: new, or no longer suspended. Called before `attach`."""

    def prepare(self, channel: Channel) -> None:
        """Prepare for a transfer, before it sends requests to the depot. An exception makes it a miss."""

    def store(self, channel: Channel, batch: CopyBatch) -> bytes | None:
        """Copy a batch of a store: see `Copier.store`."""
        del channel
        return self.copier.store(batch)

    def begin_retrieve(self, channel: Channel, batch: CopyBatch) -> Callable[[], None] | None:
        """Begin to copy a batch of a retrieve: see `Copier.begin_retrieve`."""
        del channel
        return self.copier.begin_retrieve(batch)
