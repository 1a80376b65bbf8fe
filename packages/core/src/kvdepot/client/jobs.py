"""The future of one transfer, and the job that the thread of a direction executes for it."""

import threading
from dataclasses import dataclass

from kvdepot.backends import BlockIds, ReadyEvent
from kvdepot.client.session import Session
from kvdepot.keys import KeyRun


class Transfer:
    """A `TransferFuture[bool]`."""

    __slots__ = ("_done", "_ok", "num_bytes", "num_chunks", "seconds")

    def __init__(self) -> None:
        self._done = threading.Event()
        self._ok = False
        self.num_chunks = 0
        self.num_bytes = 0  # moved by this transfer
        self.seconds = 0.0  # time to execute it, without the wait in the queue

    def query(self) -> bool:
        """See `TransferFuture`."""
        return self._done.is_set()

    def result(self, timeout_seconds: float | None = None) -> bool:
        """See `TransferFuture`."""
        if not self._done.wait(timeout_seconds):
            raise TimeoutError(f"the transfer is not done after {timeout_seconds} s")
        return self._ok

    def resolve(self, ok: bool) -> None:
        """Set the outcome."""
        self._ok = ok
        self._done.set()


@dataclass(frozen=True, slots=True)
class TransferJob:
    """One submitted store or retrieve. It is a miss if `session` is no longer the current session when it begins."""

    transfer: Transfer
    session: Session
    request_id: str
    key: KeyRun
    block_ids: BlockIds
    covered: tuple[int, ...]  # per group, the number of chunks at the end of the run that its block ids cover
    ready: ReadyEvent | None = None
    skip_tokens: int = 0

    @property
    def first_covered(self) -> int:
        """The first chunk that a group covers. Without full attention, the depot may have no chunk before it."""
        return self.key.num_chunks - max(self.covered)
