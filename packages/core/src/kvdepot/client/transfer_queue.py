"""`TransferQueue`: executes the transfers of one direction in order, on its own thread or on the caller's.

Each `TransferJob` has a `Transfer`, the future of its outcome.
"""

import contextlib
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvdepot.backends import BlockIds, ReadyEvent
from kvdepot.client.session import Channel, Session
from kvdepot.errors import DepotUnavailable
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
    session: Session | None  # None: submitted while the depot is coming back
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


_LOOK_SECONDS: Final = 0.1  # between two checks for a hung job while stopping

RunJob = Callable[[Channel | None, TransferJob], Channel | None]
"""Executes a job over a channel (None: opens one), and returns the channel for the next job."""


class TransferQueue:
    """The queue, the thread and the channel of one direction.

    Args:
        run_job: executes one job.
        name: a part of the thread's name.
    """

    def __init__(self, run_job: RunJob, name: str) -> None:
        self._run_job = run_job
        self._jobs: queue.SimpleQueue[TransferJob | None] = queue.SimpleQueue()  # None wakes the thread
        self._channel: Channel | None = None
        self._lock = threading.Lock()
        self._stopping = False
        self._is_lost = False  # whether the device hangs, so that no further job is executed
        self._current: TransferJob | None = None
        self._thread = threading.Thread(target=self._loop, name=f"kvdepot-{name}", daemon=True)

    @property
    def is_busy(self) -> bool:
        """Whether a job is being executed."""
        return self._current is not None

    @property
    def num_owed(self) -> int:
        """See `Channel.num_owed`."""
        channel = self._channel
        return 0 if channel is None else channel.num_owed

    def start(self) -> None:
        """Start the thread. Without it, only `run` may be used."""
        self._thread.start()

    def put(self, job: TransferJob) -> None:
        """Queue a job for the thread. It is a miss if the thread has ended."""
        self._jobs.put(job)
        if self._is_lost or not self._thread.is_alive():
            self._drop()

    def run(self, job: TransferJob) -> None:
        """Execute a job on the calling thread."""
        with self._lock:
            self._current = job
            try:
                self._channel = self._run_job(self._channel, job)
            finally:
                self._current = None

    def lose(self) -> None:
        """Turn the queued and all later jobs into misses. The current one may never end."""
        self._is_lost = True
        self._drop()

    def give_up(self) -> None:
        """Resolve the current job as a miss although its copy has not returned."""
        if self._current is not None:
            self._current.transfer.resolve(False)

    def drain_soon(self) -> None:
        """Read replies to abandoned requests, on the thread if there is one. Release a lost session. Never wait."""
        if self._thread.is_alive():
            self._jobs.put(None)
        elif self._lock.acquire(blocking=False):
            try:
                self._drain()
            finally:
                self._lock.release()

    def stop(self) -> None:
        """Finish the queued jobs and close the channel. Do not wait for a hung job."""
        self._stopping = True
        self._jobs.put(None)
        while self._thread.is_alive():
            self._thread.join(_LOOK_SECONDS)
            if self._is_lost and self.is_busy:
                return
            if self._is_lost:
                self._jobs.put(None)  # `lose` may have dropped the first one
        self._drop()  # jobs queued while the thread ended
        if self._channel is not None:
            self._channel.close()

    def _drop(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                job = self._jobs.get_nowait()
                if job is not None:
                    job.transfer.resolve(False)

    def _loop(self) -> None:
        while True:
            job = self._jobs.get()
            if job is not None:
                self.run(job)
            elif not self._stopping:
                self._drain()
            if self._stopping and self._jobs.empty():  # also after a job that was queued behind the last wake-up
                return

    def _drain(self) -> None:
        channel = self._channel
        if channel is None:
            return
        # Otherwise an idle worker would keep the pool of the previous server mapped.
        if not channel.session.mark_lost.alive:
            channel.close()
            self._channel = None
            return
        with contextlib.suppress(DepotUnavailable):
            channel.drain()
