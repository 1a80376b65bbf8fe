"""A session with one run of the server: `Session`, its movers, and `Channel`, the requests of one thread over it."""

import contextlib
import logging
import math
import os
import select
import signal
import socket
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvdepot.errors import DepotTimeout, DepotUnavailable, RemoteError
from kvdepot.ownership import refuse_foreign_server
from kvdepot.pool.files import PoolMapping
from kvdepot.wire import frames
from kvdepot.wire import messages as m

logger = logging.getLogger(__name__)

_MOVER_GRACE_SECONDS: Final = 10.0  # between two log lines about a mover that does not exit
_READ_BYTES: Final = 64 << 10  # per read: most replies fit; a plan of 4,096 extents takes three reads
_MOST_REPLY_BYTES: Final = 64 << 20  # far beyond any reply: a larger length means that the framing is lost
_MOST_UNSENT_BYTES: Final = 16 << 20  # kept per channel while the depot does not read requests


class Session:
    """One registered session. The connection changes `suspended` and `slowness`; the rest is fixed at registration."""

    def __init__(self, opened: frames.SessionOpened, control: Path, mapping: PoolMapping | None) -> None:
        self.epoch = opened.epoch
        self.token = opened.token
        self.server_version = opened.server_version
        self.control = control
        self.mapping = mapping
        self.context = 0  # the depot's id of the registration
        self.registration: m.RegisterKVCache | m.RegisterScheduler | None = None
        self.verify = m.Verify.OFF
        self.move_seconds = 0.0  # the longest time until the depot answers a `Move`
        self.wants_tokens = False  # whether the depot wants to know the tokens of this engine's chunks
        self._movers: list[_Process] = []  # replaced, never mutated: other threads read it
        self.suspended = False
        self.slowness = 0.0  # number of long waits, minus a part of the short waits since
        self.lost_fd, lost_writer = os.pipe()  # readable once the session is lost; open while it is referenced
        weakref.finalize(self, os.close, self.lost_fd)
        self.mark_lost = weakref.finalize(self, os.close, lost_writer)  # wakes all waits for a reply

    def add_mover(self, pidfd: int) -> None:
        """Take ownership of the pidfd of a mover that the depot started for this session."""
        self._movers = [mover for mover in self._movers if not mover.wait(0.0)] + [_Process(pidfd)]

    def has_movers(self) -> bool:
        """Return whether a mover of this session is alive."""
        return not all(mover.wait(0.0) for mover in self._movers)

    def can_kill_movers(self) -> bool:
        """Return whether this process may kill the movers of this session, or they are dead."""
        return all(mover.can_kill() for mover in self._movers)

    def wait_for_movers(self, *, kill: bool = False) -> None:
        """Wait until all movers of this session are dead, so that none copies any more.

        A driver can delay the end of a killed process. Call this once the session is lost, as movers die with the
        depot, or with `kill` if the depot does not answer.
        """
        for mover in self._movers:
            if kill:
                mover.kill()
            while not mover.wait(_MOVER_GRACE_SECONDS):
                logger.error("a mover of the depot did not exit: the blocks of its transfer stay allocated")

    def end_movers(self) -> None:
        """Kill the movers of this session, and wait a bounded time until they are dead."""
        for mover in self._movers:
            mover.kill()
        if not all(mover.wait(_MOVER_GRACE_SECONDS) for mover in self._movers):
            logger.error("a mover of the depot did not exit: it still has the device's memory open")


class _Process:
    """A process, known by its pidfd. Garbage collection closes the pidfd."""

    def __init__(self, pidfd: int) -> None:
        self._pidfd = pidfd
        weakref.finalize(self, os.close, pidfd)

    def wait(self, timeout_seconds: float) -> bool:
        """Return whether the process died within that time. A dead process holds no resources."""
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        return bool(poller.poll(timeout_seconds * 1000))

    def can_kill(self) -> bool:
        """Return whether the process is dead, or this one may kill it."""
        try:
            signal.pidfd_send_signal(self._pidfd, 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False
        return True

    def kill(self) -> None:
        """Kill the process, if that is allowed."""
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)


class Channel:
    """Requests and replies over one session, for one thread at a time.

    The first request connects. After a lost connection, the channel is unusable, and so is its session.

    Args:
        session: the session that the connection joins.
        connection: a new Unix socket. The channel closes it.
    """

    def __init__(self, session: Session, connection: socket.socket) -> None:
        self.session = session
        self._socket = connection
        self._close = weakref.finalize(self, self._socket.close)
        self._is_connected = False
        self._poller = select.poll()
        self._poller.register(session.lost_fd, select.POLLIN)
        self._sequence = 0
        self._unsent = bytearray()
        self._received = bytearray()
        self._replies: dict[int, frames.Reply] = {}
        self._ignored: dict[int, Callable[[frames.Reply], None] | None] = {}
        self._num_owed = 0

    def submit(self, request: frames.Request) -> int:
        """Send a request. Return its sequence number for `poll` and `wait`.

        Raises:
            DepotUnavailable: the request cannot be sent.
        """
        frame = frames.encode_frame(self._sequence + 1, request)
        data = frames.LENGTH.pack(len(frame)) + frame
        if not self._is_connected:
            self._connect()
            data = frames.encode_greeting(frames.JoinSession(self.session.token)) + data
        if self._unsent:
            self._flush()
        if len(self._unsent) + len(data) > _MOST_UNSENT_BYTES:
            raise DepotUnavailable(f"the depot has not yet read {len(self._unsent)} bytes of earlier requests")
        num_sent = 0 if self._unsent else self._send(data)
        if num_sent < len(data):
            self._unsent += memoryview(data)[num_sent:]
            self._poller.modify(self._socket, select.POLLIN | select.POLLOUT)
        self._sequence += 1
        return self._sequence

    def post(self, request: frames.Request) -> None:
        """Send a request and ignore its reply."""
        self._ignored[self.submit(request)] = None
        if len(self._ignored) > 64:
            self.drain()

    def poll(self, sequence: int) -> frames.Reply | None:
        """Return the reply if it has arrived, else None. Never wait.

        Raises:
            RemoteError: the depot refused the request.
            DepotUnavailable: the connection was lost.
        """
        if sequence not in self._replies:
            self.drain()
        return self._take(sequence)

    def wait(self, sequence: int, deadline_seconds: float) -> frames.Reply:
        """Return the reply, waiting at most `deadline_seconds`.

        Raises:
            RemoteError: the depot refused the request.
            DepotTimeout: no reply arrived in time.
            DepotUnavailable: the connection was lost.
        """
        end = time.monotonic() + deadline_seconds
        while sequence not in self._replies:
            rest = end - time.monotonic()
            ready = self._poller.poll(max(0, int(rest * 1000)))
            if any(fd != self.session.lost_fd for fd, _ in ready):
                self.drain()
            elif ready:
                raise DepotUnavailable("the connection to the depot was lost")
            elif rest <= 0:
                self.abandon(sequence)
                raise DepotTimeout(f"no answer within {deadline_seconds} s")
        reply = self._take(sequence)
        assert reply is not None
        return reply

    def wait_for_any(self, timeout_seconds: float) -> None:
        """Wait at most `timeout_seconds` for data to receive."""
        self._poller.poll(max(0, math.ceil(timeout_seconds * 1000)))

    def call(self, request: frames.Request, deadline_seconds: float) -> frames.Reply:
        """Send a request and wait for its reply. Raises like `submit` and `wait`."""
        return self.wait(self.submit(request), deadline_seconds)

    def abandon(self, sequence: int, on_reply: Callable[[frames.Reply], None] | None = None) -> None:
        """Stop waiting for a request. If its reply arrives later, `on_reply` gets it."""
        reply = self._replies.pop(sequence, None)
        if reply is None:
            self._ignored[sequence] = on_reply
            self._num_owed += on_reply is not None
        elif on_reply is not None:
            on_reply(reply)

    @property
    def num_owed(self) -> int:
        """The replies to read with `drain`: one per request abandoned with `on_reply`, and one if requests are unsent.

        0 once the session is lost.
        """
        return self._num_owed + bool(self._unsent) if self.session.mark_lost.alive else 0

    @property
    def num_kept(self) -> int:
        """The replies that arrived and that neither `poll` nor `wait` has taken."""
        return len(self._replies)

    def drain(self) -> None:
        """Send unsent requests and read replies. Never wait.

        Raises:
            DepotUnavailable: the connection was lost, or the bytes received are not a reply.
        """
        if self._unsent:
            self._flush()
        while self._is_connected and self._receive():
            pass

    def _connect(self) -> None:
        try:
            self._socket.setblocking(False)
            self._socket.connect(str(self.session.control))
            refuse_foreign_server(self._socket, self.session.control)
        except OSError as error:
            raise DepotUnavailable(f"cannot connect to it: {error}") from error
        self._is_connected = True
        self._poller.register(self._socket, select.POLLIN)

    def _send(self, data: bytes | memoryview) -> int:
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise DepotUnavailable(f"the connection to the depot was lost: {error}") from error

    def _flush(self) -> None:
        with memoryview(self._unsent) as unsent:
            num_sent = self._send(unsent)
        del self._unsent[:num_sent]
        if not self._unsent:
            self._poller.modify(self._socket, select.POLLIN)

    def _receive(self) -> bool:
        """Read once. Return whether there may be more data."""
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:
            raise DepotUnavailable(f"the connection to the depot was lost: {error}") from error
        if not data:
            raise DepotUnavailable("the depot closed the connection")
        self._received += data
        while (frame := self._take_frame()) is not None:
            self._accept(frame)  # may itself send and receive
        return len(data) == _READ_BYTES

    def _take_frame(self) -> bytes | None:
        received = self._received
        if len(received) < frames.LENGTH.size:
            return None
        (length,) = frames.LENGTH.unpack_from(received)
        if length > _MOST_REPLY_BYTES:
            raise DepotUnavailable(f"the depot sent a malformed reply: {length} bytes")
        end = frames.LENGTH.size + length
        if len(received) < end:
            return None
        with memoryview(received) as view:
            frame = bytes(view[frames.LENGTH.size : end])
        del received[:end]
        return frame

    def _accept(self, frame: bytes) -> None:
        sequence = frames.sequence_of(frame)
        try:
            reply = frames.decode_reply(frame)
        except frames.FrameError as error:
            raise DepotUnavailable(f"the depot sent a malformed reply: {error}") from error
        if sequence in self._ignored:
            on_reply = self._ignored.pop(sequence)
            if on_reply is not None:
                self._num_owed -= 1
                on_reply(reply)
        else:
            self._replies[sequence] = reply

    def _take(self, sequence: int) -> frames.Reply | None:
        reply = self._replies.pop(sequence, None)
        if isinstance(reply, m.ErrorReply):
            raise RemoteError(reply.code, reply.message)
        return reply

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if self._is_connected and self._close.alive:
            self._poller.unregister(self._socket)
        self._close()
