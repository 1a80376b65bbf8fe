"""Compares a mover with the worker itself in mode `auto`, over a few real retrieves.

A retrieve only reads the pool, under the worker's lease, and the worker compares the headers at its end. So the worker
may copy a batch of a retrieve itself while the session has a mover. It may not copy stores, as their records name the
mover as the writer.

The comparison begins when the mover reports that its part of the pool is registered. The worker then registers the
piece of the pool that the last batch began in, and loads its kernel if it has one. The mover copies the next batch that
lies in registered memory, the worker the next one of about the same size: the two are a pair. Pairing by size keeps the
fixed cost of a copy from counting against the side that got smaller batches. Times are taken as the transfer sees them,
without the wait for the engine's stream. After `PAIRS` pairs the medians decide. The comparison ends without a verdict
after `MOST_SEEN` batches, after an error of the worker's copies, and with the session. At its end the worker has
nothing of the pool registered.
"""

import logging
import statistics
import time
from collections.abc import Callable
from typing import Final

import numpy as np

from kvdepot.backends import CopyBarrier, CopyBatch
from kvdepot.copying.runs import EXTENT_DTYPE
from kvdepot_cuda.copy import CopyEngine
from kvdepot_cuda.driver import DriverError

logger = logging.getLogger(__name__)

PAIRS: Final = 8
SLOWER: Final = 1.25  # times the worker's, in which noise and the cost of a change are lost
LEAST_BYTES: Final = 16 << 20  # of a batch: of a smaller one the round trips are all that is seen
ALIKE: Final = 1 / 8  # of the smaller one, by which the sizes of a pair may differ
MOST_SEEN: Final = 256  # batches of that size


class Probation:
    """Used by the thread of the retrieves alone, while no other retrieve runs.

    Args:
        engine: the worker's, with nothing attached.
        barrier: as in `CopyEngine.attach`.
        clock: seconds.
    """

    def __init__(
        self,
        engine: CopyEngine,
        barrier: CopyBarrier,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._engine = engine
        self._barrier = barrier
        self._clock = clock
        self._unpaired: list[tuple[int, float]] = []  # bytes and seconds of copies of the mover
        self._by_mover: list[float] = []  # seconds a byte, of pairs
        self._by_worker: list[float] = []
        self._is_settled = False  # the mover that copied last
        self._has_begun = False
        self._num_seen = 0  # since it has
        self.is_over = False
        self.why_slower = ""  # at the end: the reason for the worker to copy, "" for none

    def retrieve(self, batch: CopyBatch, move: Callable[[], bool]) -> None:
        """Have a batch copied by the mover, or copy it.

        Args:
            batch: of a retrieve.
            move: has the mover copy it, and returns whether the mover is settled; its errors propagate.

        Raises:
            DriverError: the worker's device is lost.
        """
        extents = np.frombuffer(batch.extents, EXTENT_DTYPE)
        num_bytes = int(extents["num_bytes"].sum())
        if self.is_over or num_bytes < LEAST_BYTES:
            move()
            return
        is_covered = self._engine.covers(batch)
        other = self._like(num_bytes) if is_covered else None
        if other is not None:
            seconds = self._time(lambda: self._copy(batch, move))
            if not self.is_over:
                self._unpaired.remove(other)
                self._by_mover.append(other[1] / other[0])
                self._by_worker.append(seconds / num_bytes)
        else:
            seconds = self._time(lambda: self._move(move))
            if is_covered and self._is_settled:  # another mover may have taken its place
                self._unpaired.append((num_bytes, seconds))
            elif self._is_settled and not self._has_begun:
                self._has_begun = True
                self._engine.attach(batch.mapping, self._barrier, only_at=int(extents["offset"][0]))
        self._num_seen += self._has_begun
        if len(self._by_worker) >= PAIRS:
            self.why_slower = slower(self._by_mover, self._by_worker)
        if len(self._by_worker) >= PAIRS or self._num_seen >= MOST_SEEN:
            self.end()

    def end(self) -> None:
        """Unregister the pool; from now on the mover copies. Twice is harmless."""
        if not self.is_over:
            self.is_over = True
            if self._has_begun:
                self._engine.attach(None, self._barrier)

    def _like(self, num_bytes: int) -> tuple[int, float] | None:
        """Return the copy of the mover that has waited longest for one of this size."""
        for found in self._unpaired:
            if abs(found[0] - num_bytes) <= ALIKE * min(found[0], num_bytes):
                return found
        return None

    def _time(self, work: Callable[[], None]) -> float:
        began = self._clock()
        work()
        return self._clock() - began

    def _move(self, move: Callable[[], bool]) -> None:
        self._is_settled = move()

    def _copy(self, batch: CopyBatch, move: Callable[[], bool]) -> None:
        try:
            self._engine.retrieve(batch)
        except DriverError as error:
            self.end()
            if error.is_permanent:
                raise
            logger.warning("the worker cannot copy by itself, so a mover does without being compared: %s", error)
            move()


def slower(by_mover: list[float], by_worker: list[float]) -> str:
    """Return in words by how much a mover is slower, "" if it is not or not by much.

    Args:
        by_mover: seconds a byte.
        by_worker: likewise.
    """
    mover, worker = (statistics.median(seconds) * 1e3 * (1 << 20) for seconds in (by_mover, by_worker))
    if mover <= SLOWER * worker:
        return ""
    return f"measured slower: a mover needs {mover:.3f} ms a MiB, the worker {worker:.3f}"
