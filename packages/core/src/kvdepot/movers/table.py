"""Starts, calls, watches and kills the movers of a depot: one per worker that offers its device memory.

Everything runs on the loop's thread, and nothing waits. That thread starts the processes, because the kernel kills a
mover when the thread that started it ends. Sockets and pidfds share one epoll set.

A mover is **lost** when it exits, reports that its device failed, or misses a deadline. It is killed, but its copies
fail only once the process is reaped, because until then it may still be copying. One replacement is started. If that is
lost, too, the worker's moves are `UNAVAILABLE`, and the worker must copy by itself. A lost mover that had lived for a
while does not count against its successors.
"""

import enum
import logging
import select
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from kvdepot.backends import mover_module
from kvdepot.counting import Counts, depot_counter
from kvdepot.installing import install_line
from kvdepot.movers.process import MoverProcess
from kvdepot.movers.protocol import Copied, Copy, Failed, FromMover, MoverError, NotCopied, Ready, Setup
from kvdepot.pool.table import Writer
from kvdepot.timers import Timers
from kvdepot.wire import messages as m
from kvdepot.wire.messages import MoveOutcome

logger = logging.getLogger(__name__)

_MOVES: Final = depot_counter("moves", "Copies by movers, the processes that copy for workers")
_MOVERS_STARTED: Final = depot_counter("movers_started", "Movers started")
_MOVES_REFUSED: Final = depot_counter(
    "moves_refused", "Copies that a mover refused because they left the worker's memory or the pool"
)
_MOVERS_LOST: Final = depot_counter("movers_lost", "Movers that died or hung")
_MOVES_FAILED: Final = depot_counter("moves_failed", "Copies that a mover did not finish")
_MOVERS_GIVEN_UP: Final = depot_counter("movers_given_up", "Workers whose mover was given up")

MAXIMUM_MOVERS: Final = 64  # per depot: four for each of 16 devices
START_SECONDS: Final = 30.0  # creating a driver's context takes seconds, and longer while other processes create theirs
MOVE_SECONDS: Final = 5.0  # in addition to the request's deadline; copying a batch takes milliseconds
_MOST_LOST: Final = 2  # consecutive movers: one may be lost by chance, the second shows that the device cannot have one
LONG_LIFE_SECONDS: Final = 60.0  # a mover that lived this long did not fail at its start
_MAXIMUM_WAITING: Final = 8  # a worker has one store and one retrieve at a time, and may have abandoned earlier ones
_CLOSE_SECONDS: Final = 5.0  # limit to wait for killed movers: half of a container's ten seconds between TERM and KILL

OnMoved = Callable[[MoveOutcome, str], None]


class MoverState(enum.StrEnum):
    """Whether a worker's mover accepts requests."""

    STARTING = "starting"
    READY = "ready"
    ENDING = "ending"  # killed, but not dead yet
    UNAVAILABLE = "unavailable"  # there is none, and there will be none


class MoveRefused(Exception):
    """A mover refused a copy that does not fit the cache."""


@dataclass(slots=True, eq=False)
class _Request:
    """A requested copy. If `copy` is None, the worker only waits for its mover."""

    copy: Copy | None
    on_end: OnMoved
    timer: int = 0  # ends it at its deadline


@dataclass(slots=True, eq=False)
class _Mover:
    """The mover of one context, and its replacements."""

    context: int
    session: int
    registration: m.RegisterKVCache
    module: str
    process: MoverProcess[_Request] | None = None
    waiting: list[_Request] = field(default_factory=list[_Request])
    num_lost: int = 0
    why: str = ""  # the reason for the last loss
    is_over: bool = False  # whether it is not replaced any more

    @property
    def state(self) -> MoverState:
        """The present state."""
        if self.process is None:
            return MoverState.UNAVAILABLE
        if self.process.is_lost:
            return MoverState.ENDING
        return MoverState.READY if self.process.is_ready else MoverState.STARTING


class MoverTable:
    """All movers of a depot.

    Args:
        pool_fd: the pool's file, which each mover inherits.
        pool_size_bytes: the size of the pool.
        timers: the loop's timers, for deadlines.
        hand_over: sends a session a mover's pidfd. It returns False if that is impossible.
        on_dead: called with the context and identity of each mover that has died.
        start_seconds: the time for a mover to become ready.
        move_seconds: the time for one copy.
    """

    def __init__(
        self,
        pool_fd: int,
        pool_size_bytes: int,
        timers: Timers,
        *,
        hand_over: Callable[[int, int], bool],
        on_dead: Callable[[int, Writer], None],
        start_seconds: float = START_SECONDS,
        move_seconds: float = MOVE_SECONDS,
    ) -> None:
        self.start_seconds = start_seconds
        self.move_seconds = move_seconds
        self.counters = Counts()
        self._pool_fd = pool_fd
        self._pool_size_bytes = pool_size_bytes
        self._timers = timers
        self._hand_over = hand_over
        self._on_dead = on_dead
        self._movers: dict[int, _Mover] = {}  # by context
        self._by_fd: dict[int, tuple[_Mover, MoverProcess[_Request]]] = {}  # sockets and pidfds until reaped
        self._next = 1
        self._epoll = select.epoll()

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when `serve` has work."""
        return self._epoll.fileno()

    @property
    def num_processes(self) -> int:
        """The number of processes that are not reaped yet."""
        return len(self._by_fd) // 2

    # --- contexts -------------------------------------------------------------------------------------------------

    def start(self, context: int, session: int, registration: m.RegisterKVCache) -> None:
        """Start a mover for a worker that registered with an offer. It may become ready later."""
        offer = registration.offer
        assert offer is not None
        module = mover_module(offer.mover)
        mover = self._movers[context] = _Mover(context, session, registration, module or "")
        if module is None:
            self._give_up(
                mover,
                f"no mover {offer.mover!r} is installed where the depot runs: {install_line(offer.mover)} there",
            )
        else:
            self._start(mover)

    def end(self, context: int) -> Writer | None:
        """Kill the mover of an ended context. Return the process if it is not dead yet."""
        mover = self._movers.pop(context, None)
        if mover is None:
            return None
        mover.is_over = True
        self._answer_all(mover.waiting, MoveOutcome.FAILED, "the worker left")
        if mover.process is None:
            return None
        self._lose(mover, mover.process, "its worker left")
        return mover.process.writer

    def writer_of(self, context: int) -> Writer | None:
        """Return the process that copies for a context now, None if none can."""
        mover = self._movers.get(context)
        return mover.process.writer if mover and mover.process and mover.state is MoverState.READY else None

    def is_warm(self, context: int) -> bool:
        """Return whether a context's mover has warmed up, so that later copies will not be faster."""
        mover = self._movers.get(context)
        return mover is not None and mover.process is not None and mover.process.is_warm

    def status(self, context: int) -> tuple[str, int, str]:
        """Return the state, the process id, and the reason for the last loss; empty without a mover."""
        mover = self._movers.get(context)
        if mover is None:
            return "", 0, ""
        return mover.state, mover.process.pid if mover.process else 0, mover.why

    # --- moves ----------------------------------------------------------------------------------------------------

    def move(self, context: int, copy: Copy | None, wait_seconds: float, on_end: OnMoved) -> None:
        """Make a mover copy; if `copy` is None, only wait until it is ready.

        Args:
            context: the context of the mover.
            copy: the request. Its number is ignored.
            wait_seconds: the longest wait for a mover that is starting.
            on_end: called once, perhaps immediately, when the copy is no longer running.

        Raises:
            MoveRefused: a copy in this direction is running.
        """
        mover = self._movers.get(context)
        request = _Request(copy, on_end)
        if mover is None or mover.state is MoverState.UNAVAILABLE:
            on_end(MoveOutcome.UNAVAILABLE, mover.why if mover else "this worker was registered without a mover")
        elif mover.state is MoverState.READY:
            assert mover.process is not None
            self._send(mover, mover.process, request)
        # Its extents were granted to the mover that was lost, and are freed when that one is dead. A successor that
        # writes there would overwrite other entries.
        elif copy is not None and copy.is_store:
            on_end(MoveOutcome.FAILED, "the mover that was to write is lost")
        elif len(mover.waiting) >= _MAXIMUM_WAITING:
            on_end(MoveOutcome.FAILED, f"{_MAXIMUM_WAITING} requests wait for the mover")
        else:
            mover.waiting.append(request)
            request.timer = self._timers.call_at(
                time.monotonic() + wait_seconds, partial(self._give_up_waiting, mover, request)
            )

    def _send(self, mover: _Mover, process: MoverProcess[_Request], request: _Request) -> None:
        copy = request.copy
        self._timers.cancel(request.timer)
        if copy is None:
            request.on_end(MoveOutcome.DONE, "")
            return
        if any(other.copy is not None and other.copy.is_store is copy.is_store for other in process.copies.values()):
            raise MoveRefused("a copy in this direction is running already")
        number = self._next
        self._next += 1
        why = f"a copy took more than {self.move_seconds:g} s"
        request.timer = self._timers.call_at(
            time.monotonic() + self.move_seconds, partial(self._lose, mover, process, why)
        )
        process.copies[number] = request
        self.counters[_MOVES] += 1
        process.send(Copy(number, copy.is_store, copy.extents, copy.block_ids, copy.first_covered, copy.skip_blocks))
        self._flush(mover, process)

    def _flush(self, mover: _Mover, process: MoverProcess[_Request]) -> None:
        try:
            process.flush()
        except MoverError as error:
            self._lose(mover, process, str(error))
        else:
            self._epoll.modify(process.socket_fd, select.EPOLLIN | (select.EPOLLOUT if process.has_output else 0))

    # --- the loop -------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Handle all events of movers. Never wait."""
        for fd, events in self._epoll.poll(0):
            found = self._by_fd.get(fd)
            if found is None:
                continue
            mover, process = found
            if fd == process.pidfd:
                self._bury(mover, process)
            else:
                if events & select.EPOLLOUT:
                    self._flush(mover, process)
                if not process.is_lost and events & ~select.EPOLLOUT:
                    self._read(mover, process)

    def close(self) -> None:
        """Kill all movers, and wait a bounded time until they are dead."""
        for context in list(self._movers):
            self.end(context)
        for _, process in list(self._by_fd.values()):
            process.kill()
        end = time.monotonic() + _CLOSE_SECONDS
        while self._by_fd and time.monotonic() < end:
            if self._epoll.poll(0.1):
                self.serve()
        for mover, process in self._by_fd.values():
            logger.error("mover %d of %s did not exit", process.pid, mover.registration.instance)
        self._epoll.close()

    # --- processes ------------------------------------------------------------------------------------------------

    def _start(self, mover: _Mover) -> None:
        if self.num_processes >= MAXIMUM_MOVERS:
            self._give_up(mover, f"there are {MAXIMUM_MOVERS} movers")
            return
        try:
            process = mover.process = MoverProcess[_Request].start(mover.module, self._pool_fd)
        except MoverError as error:
            self._give_up(mover, str(error))
            return
        self.counters[_MOVERS_STARTED] += 1
        for fd in (process.socket_fd, process.pidfd):
            self._by_fd[fd] = mover, process
            self._epoll.register(fd, select.EPOLLIN)
        if not self._hand_over(mover.session, process.pidfd):
            mover.is_over = True  # without it, the worker could not tell when its blocks are free
            self._lose(mover, process, "its worker does not listen")
            return
        due = process.started_at + self.start_seconds
        process.start_timer = self._timers.call_at(
            due, partial(self._lose, mover, process, f"it was not ready within {self.start_seconds:g} s")
        )
        process.send(Setup(self._pool_size_bytes, mover.registration))
        self._flush(mover, process)

    def _read(self, mover: _Mover, process: MoverProcess[_Request]) -> None:
        try:
            for answer in process.receive():
                self._take(mover, process, answer)
        except MoverError as error:
            self._lose(mover, process, str(error))

    def _take(self, mover: _Mover, process: MoverProcess[_Request], answer: FromMover) -> None:
        if process.is_lost:
            return
        match answer:
            case Ready() if not process.is_ready:
                process.is_ready = True
                self._timers.cancel(process.start_timer)
                waiting, mover.waiting = mover.waiting, []
                for request in waiting:
                    try:
                        self._send(mover, process, request)
                    except MoveRefused as error:
                        request.on_end(MoveOutcome.FAILED, str(error))
            case Copied(number, is_warm) if number in process.copies:
                process.is_warm = is_warm
                self._answer(process.copies.pop(number), MoveOutcome.DONE, "")
            case NotCopied(number, text) if number in process.copies:
                self.counters[_MOVES_REFUSED] += 1
                self._answer(process.copies.pop(number), MoveOutcome.FAILED, text)
            case Failed(text, is_final):
                mover.is_over |= is_final
                self._lose(mover, process, text)
            case _:
                self._lose(mover, process, f"it answered {type(answer).__name__} to nothing")

    def _lose(self, mover: _Mover, process: MoverProcess[_Request], why: str) -> None:
        """Kill a process. `_bury` fails its copies once it is dead."""
        if process.is_lost:
            return
        process.is_lost = True
        self._timers.cancel(process.start_timer)
        for request in process.copies.values():
            self._timers.cancel(request.timer)
        if mover.context in self._movers:  # its worker is still registered
            mover.why = why
            self.counters[_MOVERS_LOST] += 1
        self._epoll.unregister(process.socket_fd)
        process.kill()

    def _bury(self, mover: _Mover, process: MoverProcess[_Request]) -> None:
        """Clean up after a dead process. Replace it if its worker is still registered."""
        status = process.reap()
        if status is None:
            return  # an event of an earlier descriptor with this number
        if not process.is_lost:
            self._read(mover, process)  # for its last answers
        self._lose(mover, process, "it exited")
        for fd in (process.socket_fd, process.pidfd):
            del self._by_fd[fd]
        self._epoll.unregister(process.pidfd)
        process.close()
        mover.process = None
        self.counters[_MOVES_FAILED] += len(process.copies)
        self._answer_all(list(process.copies.values()), MoveOutcome.FAILED, f"the mover was lost: {mover.why}")
        self._on_dead(mover.context, process.writer)
        if mover.context not in self._movers:
            return
        is_long_life = process.is_ready and time.monotonic() >= process.started_at + LONG_LIFE_SECONDS
        mover.num_lost = 1 if is_long_life else mover.num_lost + 1
        is_last = mover.is_over or mover.num_lost >= _MOST_LOST
        logger.warning(
            "mover %d of %s (context %d) exited with %d: %s; %s",
            process.pid,
            mover.registration.instance,
            mover.context,
            status,
            mover.why,
            "it is not replaced" if is_last else "starting another",
        )
        if is_last:
            self._give_up(mover, mover.why)
        else:
            self._start(mover)

    def _give_up(self, mover: _Mover, why: str) -> None:
        mover.why = why
        mover.is_over = True
        self.counters[_MOVERS_GIVEN_UP] += 1
        waiting, mover.waiting = mover.waiting, []
        self._answer_all(waiting, MoveOutcome.UNAVAILABLE, why)

    def _give_up_waiting(self, mover: _Mover, request: _Request) -> None:
        mover.waiting.remove(request)
        request.on_end(MoveOutcome.FAILED, "the mover is not ready yet")

    def _answer(self, request: _Request, outcome: MoveOutcome, why: str) -> None:
        self._timers.cancel(request.timer)
        request.on_end(outcome, why)

    def _answer_all(self, requests: list[_Request], outcome: MoveOutcome, why: str) -> None:
        for request in requests:
            self._answer(request, outcome, why)
