"""Movers of this depot: started, asked, watched and killed, one for each worker that offers its device memory.

Everything here is on the loop's thread, which is the one that starts the processes: the kernel kills a mover when the
thread ends that started it. Nothing waits: sockets and pidfds are in one epoll set, requests that the socket does not
take at once are kept, and there is at most one a direction.

A process that ends, says that its device failed, or overruns a deadline is **lost**: it is killed, and only when the
kernel has reaped it do its copies count as failed, because until then it may still be copying. Another is started in
its place, once; after that the worker's moves are `UNAVAILABLE` and it has to copy by itself. A mover that lived for a
while before it was lost does not count against those that follow.
"""

import enum
import logging
import os
import select
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kvdepot.backends import mover_module
from kvdepot.movers.protocol import (
    Copied,
    Copy,
    Failed,
    FromMover,
    MoverError,
    Ready,
    Refused,
    Setup,
    encode,
    take_answers,
)
from kvdepot.pool.table import Writer
from kvdepot.processes.identity import process_start_time
from kvdepot.wire import messages as m
from kvdepot.wire.messages import MoveOutcome

logger = logging.getLogger(__name__)

MAXIMUM_MOVERS: Final = 64
START_SECONDS: Final = 30.0
MOVE_SECONDS: Final = 5.0
_MOST_LOST: Final = 2  # in a row
_LONG_LIFE_SECONDS: Final = 60.0
_MAXIMUM_WAITING: Final = 8
_CLOSE_SECONDS: Final = 5.0

OnMoved = Callable[[MoveOutcome, str], None]


class MoverState(enum.StrEnum):
    """What can be asked of a worker's mover."""

    STARTING = "starting"
    READY = "ready"
    ENDING = "ending"  # it is being killed, and not dead yet
    UNAVAILABLE = "unavailable"  # there is none, and none will come


class MoveRefused(Exception):
    """A copy that the mover did not begin, because it does not fit the cache."""


@dataclass(slots=True, eq=False)
class _Move:
    """A request: a copy, or None for whoever only waits for the mover."""

    copy: Copy | None
    on_end: OnMoved
    deadline: float


@dataclass(slots=True, eq=False)
class _Child:
    """One process, from its start until it is reaped."""

    process: subprocess.Popen[bytes]
    socket: socket.socket
    pidfd: int
    writer: Writer
    started_at: float
    inbox: bytearray = field(default_factory=bytearray)
    outbox: bytearray = field(default_factory=bytearray)
    moves: dict[int, _Move] = field(default_factory=dict[int, _Move])  # by number
    is_ready: bool = False
    is_settled: bool = False
    is_lost: bool = False


@dataclass(slots=True, eq=False)
class _Mover:
    """The movers of one context, one after the other."""

    context: int
    session: int
    registration: m.RegisterKVCache
    module: str
    child: _Child | None = None
    waiting: list[_Move] = field(default_factory=list[_Move])
    num_lost: int = 0
    why: str = ""
    is_over: bool = False  # no further one is started

    @property
    def state(self) -> MoverState:
        """What can be asked now."""
        if self.child is None:
            return MoverState.UNAVAILABLE
        if self.child.is_lost:
            return MoverState.ENDING
        return MoverState.READY if self.child.is_ready else MoverState.STARTING


class MoverTable:
    """All movers of a depot.

    Args:
        pool_fd: the pool's file, inherited by each.
        pool_size_bytes: of the pool.
        hand_over: gives a session the descriptor by which it sees a mover's death; False if it cannot.
        on_dead: called with a process that is dead now, and what it was for.
        start_seconds: a mover has to be ready.
        move_seconds: a copy has to be done.
    """

    def __init__(
        self,
        pool_fd: int,
        pool_size_bytes: int,
        *,
        hand_over: Callable[[int, int], bool],
        on_dead: Callable[[int, Writer], None],
        start_seconds: float = START_SECONDS,
        move_seconds: float = MOVE_SECONDS,
    ) -> None:
        self.move_seconds = move_seconds
        self.counters: Counter[str] = Counter()
        self._pool_fd = pool_fd
        self._pool_size_bytes = pool_size_bytes
        self._hand_over = hand_over
        self._on_dead = on_dead
        self._start_seconds = start_seconds
        self._movers: dict[int, _Mover] = {}  # by context
        self._by_fd: dict[int, tuple[_Mover, _Child]] = {}  # sockets and pidfds of all that are not reaped
        self._num_children = 0
        self._next = 1
        self._epoll = select.epoll()

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when there is something to do."""
        return self._epoll.fileno()

    # --- contexts -------------------------------------------------------------------------------------------------

    def start(self, context: int, session: int, registration: m.RegisterKVCache) -> None:
        """Start a mover for a worker that has just been registered with an offer; it is ready later, or never."""
        offer = registration.offer
        assert offer is not None
        module = mover_module(offer.mover)
        mover = self._movers[context] = _Mover(context, session, registration, module or "")
        if module is None:
            self._give_up(mover, f"no mover {offer.mover!r} is installed where the depot runs:"
                          f" pip install 'kvdepot[{offer.mover}]' there")  # fmt: skip
        else:
            self._start(mover)

    def end(self, context: int) -> Writer | None:
        """A context is over: kill its mover. Return the process if it is not dead yet."""
        mover = self._movers.pop(context, None)
        if mover is None:
            return None
        mover.is_over = True
        self._answer_all(mover.waiting, MoveOutcome.FAILED, "the worker left")
        if mover.child is None:
            return None
        self._lose(mover, mover.child, "its worker left")
        return mover.child.writer

    def writer_of(self, context: int) -> Writer | None:
        """Return the process that copies for a context now, None if none can."""
        mover = self._movers.get(context)
        return mover.child.writer if mover is not None and mover.child and mover.state is MoverState.READY else None

    def is_settled(self, context: int) -> bool:
        """Return whether a context's mover makes nothing ready any more, as far as it has said so."""
        mover = self._movers.get(context)
        return mover is not None and mover.child is not None and mover.child.is_settled

    def status(self, context: int) -> tuple[str, int, str]:
        """Return state, process and what ended the one before; nothing for who has no mover."""
        mover = self._movers.get(context)
        if mover is None:
            return "", 0, ""
        return mover.state, mover.child.process.pid if mover.child else 0, mover.why

    # --- moves ----------------------------------------------------------------------------------------------------

    def move(self, context: int, copy: Copy | None, wait_seconds: float, on_end: OnMoved) -> None:
        """Have a copy made, or None: be told when a mover can be asked.

        Args:
            context: whose mover.
            copy: its number does not matter.
            wait_seconds: how long the mover may still be starting.
            on_end: called once, maybe at once; then nothing of the copy is under way.

        Raises:
            MoveRefused: one in this direction is under way.
        """
        mover = self._movers.get(context)
        move = _Move(copy, on_end, time.monotonic() + wait_seconds)
        if mover is None or mover.state is MoverState.UNAVAILABLE:
            on_end(MoveOutcome.UNAVAILABLE, mover.why if mover else "this worker was registered without a mover")
        elif mover.state is MoverState.READY:
            assert mover.child is not None
            self._send(mover, mover.child, move)
        elif copy is not None and copy.is_store:
            on_end(MoveOutcome.FAILED, "the mover that was to write is lost")
        elif len(mover.waiting) >= _MAXIMUM_WAITING:
            on_end(MoveOutcome.FAILED, f"{_MAXIMUM_WAITING} requests wait for the mover")
        else:
            mover.waiting.append(move)

    def _send(self, mover: _Mover, child: _Child, move: _Move) -> None:
        copy = move.copy
        if copy is None:
            move.on_end(MoveOutcome.DONE, "")
            return
        if any(other.copy is not None and other.copy.is_store is copy.is_store for other in child.moves.values()):
            raise MoveRefused("a copy in this direction is under way")
        number = self._next
        self._next += 1
        move.deadline = time.monotonic() + self.move_seconds
        child.moves[number] = move
        self.counters["moves"] += 1
        child.outbox += encode(
            Copy(number, copy.is_store, copy.extents, copy.block_ids, copy.first_covered, copy.skip_blocks)
        )
        self._flush(mover, child)

    def _flush(self, mover: _Mover, child: _Child) -> None:
        try:
            while child.outbox:
                del child.outbox[: child.socket.send(child.outbox)]
        except BlockingIOError:
            pass
        except OSError as error:
            self._lose(mover, child, f"it was lost: {error}")
            return
        events = select.EPOLLIN | (select.EPOLLOUT if child.outbox else 0)
        self._epoll.modify(child.socket.fileno(), events)

    # --- the loop -------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Do what there is to do; never waits."""
        for fd, events in self._epoll.poll(0):
            found = self._by_fd.get(fd)
            if found is None:
                continue
            mover, child = found
            if fd == child.pidfd:
                self._bury(mover, child)
            else:
                if events & select.EPOLLOUT:
                    self._flush(mover, child)
                if not child.is_lost and events & ~select.EPOLLOUT:
                    self._read(mover, child)

    def expire(self) -> None:
        """End what has overrun its deadline."""
        now = time.monotonic()
        for mover in list(self._movers.values()):
            late = [move for move in mover.waiting if move.deadline <= now]
            mover.waiting = [move for move in mover.waiting if move.deadline > now]
            self._answer_all(late, MoveOutcome.FAILED, "the mover is not ready yet")
            child = mover.child
            if child is None or child.is_lost:
                continue
            if not child.is_ready and child.started_at + self._start_seconds <= now:
                self._lose(mover, child, f"it was not ready within {self._start_seconds:g} s")
            elif any(move.deadline <= now for move in child.moves.values()):
                self._lose(mover, child, f"a copy took more than {self.move_seconds:g} s")

    def next_deadline(self) -> float | None:
        """Return when `expire` has something to do, None if never."""
        due = [move.deadline for mover in self._movers.values() for move in mover.waiting]
        for mover in self._movers.values():
            child = mover.child
            if child is not None and not child.is_lost:
                due += [move.deadline for move in child.moves.values()]
                due += [] if child.is_ready else [child.started_at + self._start_seconds]
        return min(due, default=None)

    def close(self) -> None:
        """Kill all and wait until they are dead, within a bounded time."""
        for context in list(self._movers):
            self.end(context)
        for _, child in list(self._by_fd.values()):
            child.process.kill()
        end = time.monotonic() + _CLOSE_SECONDS
        while self._by_fd and time.monotonic() < end:
            if self._epoll.poll(0.1):
                self.serve()
        for mover, child in self._by_fd.values():
            logger.error("mover %d of %s does not die", child.process.pid, mover.registration.instance)
        self._epoll.close()

    # --- processes ------------------------------------------------------------------------------------------------

    def _start(self, mover: _Mover) -> None:
        if self._num_children >= MAXIMUM_MOVERS:
            self._give_up(mover, f"there are {MAXIMUM_MOVERS} movers")
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            fds = (self._pool_fd, theirs.fileno())
            command = [sys.executable, "-P", "-m", mover.module, str(os.getpid()), *map(str, fds)]
            process = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        except OSError as error:
            ours.close()
            self._give_up(mover, f"no mover can be started: {error}")
            return
        finally:
            theirs.close()
        try:
            pidfd = os.pidfd_open(process.pid)
        except OSError as error:  # no descriptor is left
            ours.close()
            process.kill()
            process.wait()
            self._give_up(mover, f"no mover can be watched: {error}")
            return
        ours.setblocking(False)
        writer = Writer(process.pid, process_start_time(process.pid))
        child = mover.child = _Child(process, ours, pidfd, writer, time.monotonic())
        self._num_children += 1
        self.counters["movers_started"] += 1
        for fd in (ours.fileno(), pidfd):
            self._by_fd[fd] = mover, child
            self._epoll.register(fd, select.EPOLLIN)
        if not self._hand_over(mover.session, pidfd):
            mover.is_over = True  # its worker could not see when its blocks are free
            self._lose(mover, child, "its worker does not listen")
            return
        child.outbox += encode(Setup(self._pool_size_bytes, mover.registration))
        self._flush(mover, child)

    def _read(self, mover: _Mover, child: _Child) -> None:
        try:
            data = child.socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lose(mover, child, "it ended")
            return
        child.inbox += data
        try:
            for answer in take_answers(child.inbox):
                self._take(mover, child, answer)
        except MoverError as error:
            self._lose(mover, child, str(error))

    def _take(self, mover: _Mover, child: _Child, answer: FromMover) -> None:
        if child.is_lost:
            return
        match answer:
            case Ready() if not child.is_ready:
                child.is_ready = True
                waiting, mover.waiting = mover.waiting, []
                for move in waiting:
                    try:
                        self._send(mover, child, move)
                    except MoveRefused as error:
                        move.on_end(MoveOutcome.FAILED, str(error))
            case Copied(number, is_settled) if number in child.moves:
                child.is_settled = is_settled
                child.moves.pop(number).on_end(MoveOutcome.DONE, "")
            case Refused(number, text) if number in child.moves:
                self.counters["moves_refused"] += 1
                child.moves.pop(number).on_end(MoveOutcome.FAILED, text)
            case Failed(text, is_final):
                mover.is_over |= is_final
                self._lose(mover, child, text)
            case _:
                self._lose(mover, child, f"it answered {type(answer).__name__} to nothing")

    def _lose(self, mover: _Mover, child: _Child, why: str) -> None:
        """Kill a process; what it was doing ends when it is reaped."""
        if child.is_lost:
            return
        child.is_lost = True
        if mover.context in self._movers:  # its worker is there
            mover.why = why
            self.counters["movers_lost"] += 1
        self._epoll.unregister(child.socket.fileno())
        child.process.kill()

    def _bury(self, mover: _Mover, child: _Child) -> None:
        status = child.process.poll()
        if status is None:
            return  # an event of a descriptor that had this number before
        if not child.is_lost:
            self._read(mover, child)  # its last words
        self._lose(mover, child, "it ended")
        for fd in (child.socket.fileno(), child.pidfd):
            del self._by_fd[fd]
        self._epoll.unregister(child.pidfd)
        child.socket.close()
        os.close(child.pidfd)
        mover.child = None
        self._num_children -= 1
        self.counters["moves_failed"] += len(child.moves)
        self._answer_all(list(child.moves.values()), MoveOutcome.FAILED, f"the mover was lost: {mover.why}")
        self._on_dead(mover.context, child.writer)
        if mover.context not in self._movers:
            return
        is_long_life = child.is_ready and time.monotonic() >= child.started_at + _LONG_LIFE_SECONDS
        mover.num_lost = 1 if is_long_life else mover.num_lost + 1
        is_last = mover.is_over or mover.num_lost >= _MOST_LOST
        logger.warning(
            "mover %d of %s (context %d) ended with %d: %s; %s", child.process.pid, mover.registration.instance,
            mover.context, status, mover.why, "no other is started" if is_last else "another is started",
        )  # fmt: skip
        if is_last:
            self._give_up(mover, mover.why)
        else:
            self._start(mover)

    def _give_up(self, mover: _Mover, why: str) -> None:
        mover.why = why
        mover.is_over = True
        self.counters["movers_given_up"] += 1
        waiting, mover.waiting = mover.waiting, []
        self._answer_all(waiting, MoveOutcome.UNAVAILABLE, why)

    def _answer_all(self, moves: list[_Move], outcome: MoveOutcome, why: str) -> None:
        for move in moves:
            move.on_end(outcome, why)
