"""The server's loop: one thread, one poll, one reply for each request.

A plain loop over Unix sockets: neither asyncio nor ZeroMQ's thread of its own was as fast (`docs/performance.md`).
Nothing a peer sends ends the loop.
"""

import gc
import logging
import math
import select
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from kvdepot.counting import CounterName, depot_counter
from kvdepot.movers.table import MoverTable
from kvdepot.operators.events import EventPublisher
from kvdepot.operators.zeromq import LOOK_MILLISECONDS, Listeners
from kvdepot.pool.files import PoolFiles
from kvdepot.server.background import CHORES_FAILED
from kvdepot.server.connections import ConnectionTable
from kvdepot.server.depot import Depot
from kvdepot.server.restoring import Restoring
from kvdepot.server.sessions import SessionTable
from kvdepot.server.wakeup import ThreadResults
from kvdepot.wire.histogram import SHORTEST_SECONDS, Histogram

logger = logging.getLogger(__name__)

_TIERS_FAILED: Final = depot_counter("tiers_failed", "Turns of the tiers that failed because of a bug")

SLOW_TURN_SECONDS: Final = 0.020  # the promise of docs/architecture.md for requests of engines
_SWEEP_SECONDS: Final = 0.5  # between two looks at sockets that say nothing and at processes that left
_SWEEP_MILLISECONDS: Final = 500
# Of a turn. Work that is left then continues in the next turn; a request that has begun is served.
_MESSAGE_SECONDS: Final = 0.0008
_TASK_SECONDS: Final = 0.0006  # of each kind, tiers and restoring for example
# Threads of tiers run Python, and the loop must not wait 5 ms for them. It gives the lock up itself that often while
# they want it: with 0.1 ms it spent more on getting it back than they needed it for.
_SWITCH_SECONDS: Final = 0.001


@dataclass(frozen=True, slots=True)
class Sockets:
    """Everything that peers connect to."""

    connections: ConnectionTable
    sessions: SessionTable
    events: EventPublisher | None
    listeners: Listeners


class TurnWatch:
    """The turns of one loop, by wall clock: waiting for a core or for a thread counts."""

    def __init__(self) -> None:
        self.longest_seconds = 0.0
        self.num_slow = 0  # longer than `SLOW_TURN_SECONDS`
        self.turns = Histogram(SHORTEST_SECONDS)

    def add(self, seconds: float) -> None:
        """Count a turn that took this long."""
        self.turns.add(seconds)
        self.longest_seconds = max(self.longest_seconds, seconds)
        if seconds > SLOW_TURN_SECONDS:
            self.num_slow += 1


class Loop:
    """Serves sockets, movers, tiers and the background in turns.

    Args:
        sockets: of peers.
        depot: that they ask.
        movers: of the depot.
        results: of threads.
        restoring: of an earlier server's table; None without one.
        files: the pool's; the loop removes spare ones now and then.
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
        self.watch = TurnWatch()
        self._sockets = sockets
        self._depot = depot
        self._movers = movers
        self._results = results
        self._restoring = restoring
        self._files = files
        self._has_listeners = bool(sockets.listeners)
        self._event_fds = () if sockets.events is None else tuple(sockets.events.filenos())
        self._fds = sockets.connections.fileno(), sockets.sessions.fileno(), movers.fileno(), results.fileno()
        self._next_sweep = 0.0
        self._is_ending = False

    def run(self, is_over: Callable[[], bool]) -> None:
        """Serve until `end` was called and `is_over`.

        The garbage collector looks at new objects only, twice a second: looking through a million entries took 0.1 s.
        """
        poller = self._make_poller()
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
                idle_milliseconds = self._idle_milliseconds()
                self.watch.add(time.monotonic() - began)
        finally:
            if collects:
                gc.enable()
            sys.setswitchinterval(switch_seconds)

    def end(self) -> None:
        """Have `run` return as soon as it may."""
        self._is_ending = True

    def _make_poller(self) -> select.poll:
        """Return the poller that the loop sleeps in. ZeroMQ's own, which is slower, is not needed for descriptors."""
        poller = select.poll()
        for fd in (*self._fds, *self._event_fds):
            poller.register(fd, select.POLLIN)
        return poller

    def _serve(self, events: Mapping[object, int], began: float) -> None:
        """Do one turn: requests first, then what became due, then work that was left."""
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
        if self._has_listeners:
            sockets.listeners.look(of_threads)
        tiering = state.tiering
        if tiering is not None and (of_threads in events or tiering.due <= time.monotonic()):
            self._guard(lambda: tiering.turn(_after(_TASK_SECONDS)), _TIERS_FAILED)
        if sockets.events is not None:
            self._serve_events(sockets.events, events)

    def _serve_events(self, publisher: EventPublisher, events: Mapping[object, int]) -> None:
        if publisher.has_news or any(fd in events for fd in self._event_fds):
            replay = publisher.serve()
            if replay is not None:
                self._depot.background.replays.add(replay)

    def _sweep(self) -> None:
        sockets = self._sockets
        self._depot.expire()
        self._files.advance()
        sockets.connections.sweep(_after(_TASK_SECONDS))
        sockets.sessions.find_dead(_after(_TASK_SECONDS))
        if sockets.events is not None:
            sockets.events.has_work = True  # a descriptor of ZeroMQ tells once, and another call may have heard it
        gc.collect(1)

    def _guard(self, work: Callable[[], None], counter: CounterName) -> None:
        """Do a part of the turn whose failure must not end the loop."""
        try:
            work()
        except Exception:
            logger.exception("a part of the loop's turn failed")
            self._depot.counters[counter] += 1

    def _idle_milliseconds(self) -> int:
        """Return how long the loop may sleep if nothing comes."""
        state = self._depot.state
        events = self._sockets.events
        if state.is_restoring or state.background.num_waiting or self._sockets.connections.has_work:
            return 0
        if events is not None and events.has_work:
            return 0
        due = state.timers.due
        if state.tiering is not None and state.tiering.due < due:
            due = state.tiering.due
        if events is not None:
            due = min(due, events.due)
        now = time.monotonic()
        longest = LOOK_MILLISECONDS if self._has_listeners else _SWEEP_MILLISECONDS
        return longest if due > now + _SWEEP_SECONDS else max(0, min(longest, math.ceil((due - now) * 1000)))


def _after(seconds: float) -> Callable[[], bool]:
    """Return a function that tells whether this much time has passed."""
    until = time.monotonic() + seconds
    return lambda: time.monotonic() >= until
