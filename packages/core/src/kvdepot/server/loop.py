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

import zmq

from kvdepot.counting import CounterName, depot_counter
from kvdepot.movers.table import MoverTable
from kvdepot.operators.events import EventPublisher
from kvdepot.operators.zeromq import LOOK_MILLISECONDS, Listeners
from kvdepot.pool.files import PoolFiles
from kvdepot.server.background import CHORES_FAILED, Kind
from kvdepot.server.connections import ConnectionTable
from kvdepot.server.depot import Depot
from kvdepot.server.restoring import Restoring
from kvdepot.server.sessions import SessionTable
from kvdepot.server.waking import ThreadResults
from kvdepot.server.watch import TurnWatch

logger = logging.getLogger(__name__)

_TIERS_FAILED: Final = depot_counter("tiers_failed", "Turns of the tiers that failed because of a bug")

_SWEEP_SECONDS: Final = 0.5
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

    def run(self, is_over: Callable[[], bool]) -> None:
        """Serve until `is_over`.

        The garbage collector looks at new objects only, twice a second: looking through a million entries took 0.1 s.
        """
        poller = self._make_poller()
        switch_seconds, collects = sys.getswitchinterval(), gc.isenabled()
        sys.setswitchinterval(_SWITCH_SECONDS)
        gc.freeze()
        gc.disable()
        next_sweep, idle_milliseconds = 0.0, 0
        try:
            while not is_over():
                events: Mapping[object, int] = dict(poller.poll(idle_milliseconds))
                began = self.watch.begin()
                self._serve(events, began)
                if began >= next_sweep:
                    next_sweep = began + _SWEEP_SECONDS
                    self._sweep()
                self._sockets.listeners.look(self._results.fileno())
                self._serve_tiers()
                if self._sockets.events is not None:
                    self._serve_events(self._sockets.events, events)
                idle_milliseconds = self._idle_milliseconds()
                self.watch.end()
        finally:
            if collects:
                gc.enable()
            sys.setswitchinterval(switch_seconds)

    def _make_poller(self) -> "zmq.Poller | select.poll":
        """Return the poller that the loop sleeps in: ZeroMQ's, which is slower, only with replays."""
        publisher = self._sockets.events
        poller: zmq.Poller | select.poll = select.poll()
        if publisher is not None and publisher.replay is not None:
            poller = zmq.Poller()
            poller.register(publisher.replay, select.POLLIN)
        for each in (self._sockets.connections, self._sockets.sessions, self._movers, self._results):
            poller.register(each.fileno(), select.POLLIN)
        return poller

    def _serve(self, events: Mapping[object, int], began: float) -> None:
        sockets, depot = self._sockets, self._depot
        connections = sockets.connections
        if connections.fileno() in events or connections.has_work:
            connections.serve(began + _MESSAGE_SECONDS)
        if sockets.sessions.fileno() in events:
            sockets.sessions.serve(_after(_TASK_SECONDS))
        if self._movers.fileno() in events:
            self._movers.serve()
        self._movers.expire()
        if depot.flights.next_deadline() is not None:
            self._guard(lambda: depot.flights.expire(time.monotonic(), _after(_TASK_SECONDS)), CHORES_FAILED)
        if self._results.fileno() in events:
            self._results.take()
        if self._restoring is not None and depot.state.is_restoring:
            self._restoring.go_on(_after(_TASK_SECONDS))
        if depot.background.has_work:
            depot.background.work(_after(_TASK_SECONDS))

    def _sweep(self) -> None:
        sockets = self._sockets
        self._depot.expire()
        self._files.advance()
        sockets.connections.sweep(_after(_TASK_SECONDS))
        sockets.sessions.find_dead(_after(_TASK_SECONDS))
        gc.collect(1)

    def _serve_events(self, publisher: EventPublisher, events: Mapping[object, int]) -> None:
        publisher.flush()
        if publisher.replay in events:
            replay = publisher.take_replay()
            if replay is not None:
                self._depot.background.add(replay, Kind.REPLAY)

    def _serve_tiers(self) -> None:
        tiering = self._depot.state.tiering
        if tiering is None:
            return
        self._guard(lambda: tiering.turn(_after(_TASK_SECONDS)), _TIERS_FAILED)

    def _guard(self, work: Callable[[], None], counter: CounterName) -> None:
        """Do a part of the turn whose failure must not end the loop."""
        try:
            work()
        except Exception:
            logger.exception("a part of the loop's turn failed")
            self._depot.counters[counter] += 1

    def _idle_milliseconds(self) -> int:
        """Return how long the loop may sleep if nothing comes."""
        depot = self._depot
        if depot.state.is_restoring or depot.background.has_work or self._sockets.connections.has_work:
            return 0
        longest = LOOK_MILLISECONDS if self._sockets.listeners else math.ceil(_SWEEP_SECONDS * 1000)
        tiering = depot.state.tiering
        of_tiers = None if tiering is None else tiering.next_deadline()
        deadlines = self._movers.next_deadline(), depot.flights.next_deadline(), of_tiers
        due = min((each for each in deadlines if each is not None), default=None)
        if due is None:
            return longest
        return max(0, min(longest, math.ceil((due - time.monotonic()) * 1000)))


def _after(seconds: float) -> Callable[[], bool]:
    """Return a function that tells whether this much time has passed."""
    until = time.monotonic() + seconds
    return lambda: time.monotonic() >= until
