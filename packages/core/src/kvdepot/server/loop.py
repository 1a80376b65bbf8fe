"""The server's loop: one thread, one poll, and one reply per request.

It is a plain loop over Unix sockets, which was faster than asyncio and than ZeroMQ's own thread
(`docs/performance.md`). No input of a peer can end it. Other threads wake it and leave it their results: allocated
memory of the pool, and opened tiers.
"""

import contextlib
import gc
import logging
import math
import select
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from kvdepot.config import format_size
from kvdepot.counting import CounterName, depot_counter
from kvdepot.movers.table import MoverTable
from kvdepot.pool.extents import ExtentAllocator
from kvdepot.pool.files import PoolFiles, allocate_in_background
from kvdepot.server.connections import ConnectionTable
from kvdepot.server.depot import Depot
from kvdepot.server.restoring import Restoring
from kvdepot.server.run_folder import RunFolder
from kvdepot.server.sessions import SessionTable
from kvdepot.server.turns import CHORES_FAILED
from kvdepot.tiers.opening import TierOpener
from kvdepot.wire.status import SHORTEST_SECONDS, WatchedHistogram

logger = logging.getLogger(__name__)

# Free space to allocate ahead of stores: the larger of both. The rest of a new pool is allocated slowly: zeroed at full
# speed, it made first requests take 2.7 times as long on two cores.
_AHEAD_BYTES: Final = 512 << 20
_AHEAD_SHARE: Final = 1 / 8

_TIERS_FAILED: Final = depot_counter("tiers_failed", "Turns of the tiers that failed because of a bug")

SLOW_TURN_SECONDS: Final = 0.020  # the bound that docs/architecture.md promises for engines' requests
_SWEEP_SECONDS: Final = 0.5  # between two checks for silent sockets and dead processes
_SWEEP_MILLISECONDS: Final = int(_SWEEP_SECONDS * 1000)  # an idle loop wakes for the sweep
# Shares of a turn. Work that is left continues in the next turn. A request that has begun is finished.
_MESSAGE_SECONDS: Final = 0.0008
_TASK_SECONDS: Final = 0.0006  # per kind of work, for example tiers and restoring
# Threads of tiers run Python. With the default interval, the loop would wait 5 ms for the interpreter lock. At 0.1 ms,
# the loop spent more time on reacquiring the lock than the threads needed it for.
_SWITCH_SECONDS: Final = 0.001


class Waker:
    """A socket pair that wakes the loop: `wake` makes `fileno` readable. Any thread or signal handler may call it."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._is_woken = False

    def fileno(self) -> int:
        """Return the descriptor that becomes readable."""
        return self._reader.fileno()

    def wake(self) -> None:
        """Wake the loop. Further calls do nothing until `clear`."""
        if self._is_woken:
            return
        self._is_woken = True
        with contextlib.suppress(OSError):  # full, so that the loop wakes anyway; or closed
            self._writer.send(b"w")

    def clear(self) -> None:
        """Arm the next `wake`. Call this before looking for work."""
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(4096)
        self._is_woken = False

    def close(self) -> None:
        """Close both sockets."""
        self._reader.close()
        self._writer.close()


class ThreadResults:
    """Receives the results of other threads."""

    def __init__(
        self, files: PoolFiles, extents: ExtentAllocator, opener: TierOpener, waker: Waker, pool_name: str
    ) -> None:
        self._files = files
        self._extents = extents
        self._opener = opener
        self._waker = waker
        self._pool_name = pool_name
        self._ready_bytes = extents.ready_bytes
        self._error: OSError | None = None

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when there are results."""
        return self._waker.fileno()

    def start(self) -> None:
        """Start the thread that allocates the rest of the pool."""
        size, extents = self._files.size_bytes, self._extents
        ahead = max(_AHEAD_BYTES, int(size * _AHEAD_SHARE))
        if self._ready_bytes < size:
            allocate_in_background(
                self._files.pool_fd,
                self._ready_bytes,
                size,
                self._on_allocated,
                self._on_failure,
                lambda: self._ready_bytes - extents.used_bytes < ahead,
            )

    def take(self) -> None:
        """Take the available results."""
        self._waker.clear()
        self._opener.deliver()
        self._extents.grow(self._ready_bytes)
        if self._error is not None:
            # Until then, stores are declined without an eviction, because there will be room soon: now there will not.
            self._extents.stop_growing()
            logger.error(
                "the pool stays at %s of %s: %s has no room left (%s); free memory there or lower --pool-size",
                format_size(self._ready_bytes),
                format_size(self._files.size_bytes),
                self._pool_name,
                self._error,
            )
            self._error = None

    def _on_allocated(self, ready_bytes: int) -> None:
        self._ready_bytes = ready_bytes
        self._waker.wake()

    def _on_failure(self, error: OSError) -> None:
        self._error = error
        self._waker.wake()


@dataclass(frozen=True, slots=True)
class Sockets:
    """The sockets that peers connect to."""

    folder: RunFolder
    connections: ConnectionTable
    sessions: SessionTable


class Loop:
    """Serves sockets, movers, tiers and the background in turns.

    Args:
        sockets: the sockets that peers connect to.
        depot: answers the peers.
        movers: the depot's movers.
        results: results of other threads.
        restoring: restores an earlier server's table; None without one.
        files: the files of the pool. The loop advances their generation now and then.

    Attributes:
        turns: the seconds of each turn by wall clock, including waits for a core or for another thread.
    """

    def __init__(
        self,
        sockets: Sockets,
        depot: Depot,
        movers: MoverTable,
        results: ThreadResults,
        restoring: Restoring | None,
        files: PoolFiles,
    ) -> None:
        self.turns = WatchedHistogram(SHORTEST_SECONDS, SLOW_TURN_SECONDS)
        self._sockets = sockets
        self._depot = depot
        self._movers = movers
        self._results = results
        self._restoring = restoring
        self._files = files
        self._fds = sockets.connections.fileno(), sockets.sessions.fileno(), movers.fileno(), results.fileno()
        self._next_sweep = 0.0
        self._is_ending = False

    def run(self, is_over: Callable[[], bool]) -> None:
        """Serve until `end` was called and `is_over` returns True.

        The garbage collector examines only new objects, twice a second. Examining a million entries took 0.1 s.
        """
        poller = select.poll()  # ZeroMQ's slower poller is not needed, as all are descriptors
        for fd in (*self._fds, *self._depot.state.watched):
            poller.register(fd, select.POLLIN)
        switch_seconds, collects = sys.getswitchinterval(), gc.isenabled()
        sys.setswitchinterval(_SWITCH_SECONDS)
        gc.freeze()
        gc.disable()
        idle_milliseconds = 0
        try:
            while not self._is_ending or not is_over():
                events: Mapping[object, int] = dict(poller.poll(idle_milliseconds))
                began = time.monotonic()
                self._serve(events, began)
                self.turns.add(time.monotonic() - began)
                idle_milliseconds = self._idle_milliseconds()
        finally:
            if collects:
                gc.enable()
            sys.setswitchinterval(switch_seconds)

    def end(self) -> None:
        """Make `run` return as soon as its `is_over` allows."""
        self._is_ending = True

    def _serve(self, events: Mapping[object, int], began: float) -> None:
        """Do one turn: requests first, then due timers, then unfinished work."""
        sockets, depot, state = self._sockets, self._depot, self._depot.state
        of_connections, of_sessions, of_movers, of_threads = self._fds
        if of_connections in events or sockets.connections.has_work:
            sockets.connections.serve(began + _MESSAGE_SECONDS)
        if of_sessions in events:
            sockets.sessions.serve(_after(_TASK_SECONDS))
        if of_movers in events:
            self._movers.serve()
        if state.timers.due <= began:
            self._guard(lambda: state.timers.expire(time.monotonic(), _after(_TASK_SECONDS)), CHORES_FAILED)
        if of_threads in events:
            self._results.take()
        if self._restoring is not None and state.is_restoring:
            self._restoring.go_on(_after(_TASK_SECONDS))
        if depot.background.num_waiting:
            depot.background.work(_after(_TASK_SECONDS))
        if began >= self._next_sweep:
            self._next_sweep = began + _SWEEP_SECONDS
            self._sweep()
        tiering = state.tiering
        if tiering is not None and (of_threads in events or tiering.has_work):
            self._guard(lambda: tiering.turn(_after(_TASK_SECONDS)), _TIERS_FAILED)
        for fd in state.watched:
            if fd in events:
                self._guard(state.watched[fd], CHORES_FAILED)

    def _sweep(self) -> None:
        sockets = self._sockets
        # One by one: a bug in one of them would end the depot, or leave the others undone for good.
        for part in (
            self._depot.expire,
            self._files.advance,
            lambda: sockets.connections.sweep(_after(_TASK_SECONDS)),
            lambda: sockets.sessions.find_dead(_after(_TASK_SECONDS)),
            sockets.folder.restore,
        ):
            self._guard(part, CHORES_FAILED)
        gc.collect(1)

    def _guard(self, work: Callable[[], object], counter: CounterName) -> None:
        """Do a part of the turn. Log and count an exception, which must not end the loop."""
        try:
            work()
        except Exception:
            logger.exception("a part of the loop's turn failed")
            self._depot.counters[counter] += 1

    def _idle_milliseconds(self) -> int:
        """Return how long the loop may sleep without an event."""
        state = self._depot.state
        if state.is_restoring or state.background.num_waiting or self._sockets.connections.has_work:
            return 0
        if state.tiering is not None and state.tiering.has_work:
            return 0
        due = state.timers.due
        now = time.monotonic()
        longest = _SWEEP_MILLISECONDS
        # Rounded up: rounded down to 0, the loop would spin for the last millisecond before each deadline.
        return longest if due > now + _SWEEP_SECONDS else max(0, min(longest, math.ceil((due - now) * 1000)))


def _after(seconds: float) -> Callable[[], bool]:
    """Return a function that tells whether this much time has passed."""
    until = time.monotonic() + seconds
    return lambda: time.monotonic() >= until
