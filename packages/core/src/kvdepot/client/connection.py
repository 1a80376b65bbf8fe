"""A connection to the depot that comes back by itself.

One thread a connection owns the session socket. It sleeps in a read: the server's death wakes it at once, and then it
tries to connect again, waiting longer each time, registers, and publishes a new **link**. There is no link while the
depot is away, starting, hung or slow, and callers then answer "miss" without waiting. A call that runs into its
deadline, or several that wait for an eighth of it, make the link suspended: the thread pings on the session
socket, and when the server answers quickly the link is used again. So a hung server costs one deadline, a slow one a
bounded wait, a dead one less.

Requests go over **channels**, one connection to the control socket for each thread that calls.
"""

import contextlib
import logging
import math
import os
import random
import select
import signal
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

from kvdepot.config import CONTROL_SOCKET, SESSION_SOCKET, directory_of_url, is_tcp
from kvdepot.errors import ConfigError, DepotTimeout, DepotUnavailable, ErrorCode, KVDepotError, RemoteError
from kvdepot.pool.files import PoolMapping
from kvdepot.wire import frames
from kvdepot.wire import messages as m
from kvdepot.wire import operations as o
from kvdepot.wire.curve import ClientKeys

logger = logging.getLogger(__name__)

_FIRST_RETRY_SECONDS: Final = 0.05
_LAST_RETRY_SECONDS: Final = 1.0
_REFUSED_RETRY_SECONDS: Final = 10.0
SLOW_WAITS_TO_SUSPEND: Final = 5
_QUICK_WEIGHT: Final = 0.25  # of a short wait against a long one
_SLOW_SHARE: Final = 1 / 8  # of a deadline: longer waits are slow
_FIRST_PROBE_SECONDS: Final = 0.05
_LAST_PROBE_SECONDS: Final = 1.0
_FIRST_TIDY_SECONDS: Final = 0.005
_LAST_TIDY_SECONDS: Final = 0.5
_MOVER_GRACE_SECONDS: Final = 10.0
_READ_BYTES: Final = 64 << 10
_MOST_REPLY_BYTES: Final = 64 << 20
_MOST_UNSENT_BYTES: Final = 16 << 20  # that a channel keeps for a depot that does not take them now
_ZEROMQ: Final = b"\xff" + bytes(7)  # how a depot before protocol 2 begins; no reply does
_TIMEVAL: Final = struct.Struct("ll")


class Link:
    """One registered session with one life of the server. Immutable but for `suspended`."""

    def __init__(self, opened: frames.SessionOpened, control: Path, mapping: PoolMapping | None) -> None:
        self.epoch = opened.epoch
        self.token = opened.token
        self.server_version = opened.server_version
        self.control = control
        self.mapping = mapping
        self.context = 0  # as registered
        self.registration: m.RegisterKVCache | m.RegisterScheduler | None = None
        self.verify = m.Verify.OFF
        self.move_seconds = 0.0  # until a `Move` is answered
        self._movers: list[_Process] = []  # replaced, never changed
        self.suspended = False
        self.slowness = 0.0  # long waits, less a part of the short ones since
        self.lost_fd, lost_writer = os.pipe()  # readable once the link is lost; open as long as anybody has the link
        weakref.finalize(self, os.close, self.lost_fd)
        self.mark_lost = weakref.finalize(self, os.close, lost_writer)  # wakes everybody who waits for an answer

    def add_mover(self, pidfd: int) -> None:
        """The depot started a mover for this session; the descriptor is owned by the link from now on."""
        self._movers = [mover for mover in self._movers if not mover.wait(0.0)] + [_Process(pidfd)]

    def has_movers(self) -> bool:
        """Return whether a mover of this session lives."""
        return not all(mover.wait(0.0) for mover in self._movers)

    def can_kill_movers(self) -> bool:
        """Return whether the movers of this session are this user's processes, or dead."""
        return all(mover.can_kill() for mover in self._movers)

    def wait_for_movers(self, *, kill: bool = False) -> None:
        """Return when no mover of this session lives: then none copies any more.

        Takes as long as the kernel takes to end a process that was killed, which a driver can delay. To be called once
        the link is lost, as movers die with the depot, or with `kill`, if the depot itself does not answer.
        """
        for mover in self._movers:
            if kill:
                mover.kill()
            while not mover.wait(_MOVER_GRACE_SECONDS):
                logger.error("a mover of the depot does not die: the blocks of its transfer stay in use")

    def end_movers(self) -> None:
        """Kill the movers of this session, which nothing needs any more, and wait for their end. Bounded."""
        for mover in self._movers:
            mover.kill()
        if not all(mover.wait(_MOVER_GRACE_SECONDS) for mover in self._movers):
            logger.error("a mover of the depot does not die: it has the device's memory open")


class _Process:
    """A process that is known by its pidfd, which is closed when nobody has this object any more."""

    def __init__(self, pidfd: int) -> None:
        self._pidfd = pidfd
        weakref.finalize(self, os.close, pidfd)

    def wait(self, timeout_seconds: float) -> bool:
        """Return whether it is dead within that time: all that it had is given back then."""
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        return bool(poller.poll(timeout_seconds * 1000))

    def can_kill(self) -> bool:
        """Whether it may be killed, or is dead."""
        try:
            signal.pidfd_send_signal(self._pidfd, 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False
        return True

    def kill(self) -> None:
        """Kill it, if that is allowed."""
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)


class Channel:
    """Requests and replies of one thread over one link. Not to be used by two threads at a time.

    It connects with the first request. A connection that is lost does not come back: its link will be lost, too.

    Args:
        link: with the depot.
        connect_seconds: how long connecting may wait for a depot with very many connections.
    """

    def __init__(self, link: Link, connect_seconds: float = 0.0) -> None:
        self.link = link
        self._connect_seconds = connect_seconds
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._close = weakref.finalize(self, self._socket.close)
        self._is_connected = False
        self._poller = select.poll()
        self._poller.register(link.lost_fd, select.POLLIN)
        self._sequence = 0
        self._unsent = bytearray()
        self._received = bytearray()
        self._replies: dict[int, frames.Reply] = {}
        self._ignored: dict[int, Callable[[frames.Reply], None] | None] = {}
        self._num_owed = 0

    def submit(self, request: frames.Request) -> int:
        """Send a request and return the number under which `poll` and `wait` know its reply.

        Raises:
            DepotUnavailable: it cannot be sent.
        """
        frame = frames.encode_frame(self._sequence + 1, request)
        data = frames.LENGTH.pack(len(frame)) + frame
        if not self._is_connected:
            self._connect()
            data = frames.encode_greeting(self.link.token) + data
        if self._unsent:
            self._flush()
        if len(self._unsent) + len(data) > _MOST_UNSENT_BYTES:
            raise DepotUnavailable(f"the depot has not taken {len(self._unsent)} bytes of requests yet")
        num_sent = 0 if self._unsent else self._send(data)
        if num_sent < len(data):
            self._unsent += memoryview(data)[num_sent:]
            self._poller.modify(self._socket, select.POLLIN | select.POLLOUT)
        self._sequence += 1
        return self._sequence

    def post(self, request: frames.Request) -> None:
        """Send a request whose reply does not matter."""
        self._ignored[self.submit(request)] = None
        if len(self._ignored) > 64:
            self.drain()

    def poll(self, sequence: int) -> frames.Reply | None:
        """Return the reply if it is here. Never waits.

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
            DepotTimeout: no reply in time.
            DepotUnavailable: the connection was lost.
        """
        end = time.monotonic() + deadline_seconds
        while sequence not in self._replies:
            rest = end - time.monotonic()
            ready = self._poller.poll(max(0, int(rest * 1000)))
            if any(fd != self.link.lost_fd for fd, _ in ready):
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
        """Wait until there is something to receive, at most `timeout_seconds`."""
        self._poller.poll(max(0, math.ceil(timeout_seconds * 1000)))

    def call(self, request: frames.Request, deadline_seconds: float) -> frames.Reply:
        """Send a request and wait for its reply; raises as `submit` and `wait` do."""
        return self.wait(self.submit(request), deadline_seconds)

    def abandon(self, sequence: int, on_reply: Callable[[frames.Reply], None] | None = None) -> None:
        """Forget a request; `on_reply` gets its reply should it still come."""
        reply = self._replies.pop(sequence, None)
        if reply is None:
            self._ignored[sequence] = on_reply
            self._num_owed += on_reply is not None
        elif on_reply is not None:
            on_reply(reply)

    @property
    def num_owed(self) -> int:
        """Abandoned requests whose reply will have to be given back when it comes, and one if requests are unsent."""
        return self._num_owed + bool(self._unsent) if self.link.mark_lost.alive else 0

    def drain(self) -> None:
        """Send what waits to be sent and take in what has come. Never waits.

        Raises:
            DepotUnavailable: the connection was lost, or what came is no reply.
        """
        if self._unsent:
            self._flush()
        while self._is_connected and self._receive():
            pass

    def _connect(self) -> None:
        try:
            if self._connect_seconds:
                seconds = math.floor(self._connect_seconds)
                microseconds = int((self._connect_seconds - seconds) * 1e6)
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(seconds, microseconds))
            else:
                self._socket.setblocking(False)
            self._socket.connect(str(self.link.control))
            self._socket.setblocking(False)
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
        """Take in what one reading gives; return whether there may be more."""
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:
            raise DepotUnavailable(f"the connection to the depot was lost: {error}") from error
        if not data:
            raise DepotUnavailable("the depot closed the connection")
        if data.startswith(_ZEROMQ):
            raise DepotUnavailable(
                f"it is of a release before protocol {m.PROTOCOL_VERSION}: install the same version of kvdepot on both"
                " sides"
            )
        self._received += data
        while (frame := self._take_frame()) is not None:
            self._accept(frame)  # which may send and receive, too
        return len(data) == _READ_BYTES

    def _take_frame(self) -> bytes | None:
        received = self._received
        if len(received) < frames.LENGTH.size:
            return None
        (length,) = frames.LENGTH.unpack_from(received)
        if length > _MOST_REPLY_BYTES:
            raise DepotUnavailable(f"the depot speaks another language: a reply of {length} bytes")
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
            raise DepotUnavailable(f"the depot speaks another language: {error}") from error
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
        """Close the connection. Twice is harmless."""
        if self._is_connected and self._close.alive:
            self._poller.unregister(self._socket)
        self._close()


class Connection:
    """Keeps a link to the depot for one scheduler or one worker.

    Args:
        url: the depot, None for the one in the default directory.
        name: who connects, for the server's log.
        registration: what to register, each time.
        maps_pool: whether the pool is mapped here (workers).
        deadline_seconds: of each call.
        fence: entered while registering; it holds off copies into the pool and waits for those that run.
        on_open: called on the connection's thread with a link that can be used now: new, or no longer suspended.
        on_tidy: called on the connection's thread again and again after `tidy_soon`, until it returns True: takes in
            replies to abandoned requests, which nobody else may come to read.
    """

    def __init__(
        self,
        url: str | None,
        name: str,
        registration: m.RegisterKVCache | m.RegisterScheduler,
        *,
        maps_pool: bool,
        deadline_seconds: float = 2.0,
        fence: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
        on_open: Callable[[Link], None] = lambda _link: None,
        on_tidy: Callable[[], bool] = lambda: True,
    ) -> None:
        if deadline_seconds <= 0:
            raise KVDepotError(f"a deadline of {deadline_seconds} s: above 0")
        self.directory = directory_of_url(url)
        self.deadline_seconds = deadline_seconds
        self.why_away = "not connected yet"
        self._slow_seconds = deadline_seconds * _SLOW_SHARE
        self._name = name
        self._registration = registration
        self._maps_pool = maps_pool
        self._fence = fence
        self._on_open = on_open
        self._on_tidy = on_tidy
        self._is_renewing = False
        self._tidy_seconds = 0.0  # until the next try, 0 if there is nothing to do
        self._link: Link | None = None
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="kvdepot-connection", daemon=True)
        self._thread.start()

    @property
    def link(self) -> Link | None:
        """The link to use now; None while the depot is away or hung: answer "miss"."""
        link = self._link
        return None if link is None or link.suspended or self._is_renewing or self._closing.is_set() else link

    def wait_until_open(self, timeout_seconds: float) -> Link:
        """Return the link, waiting for it at most `timeout_seconds`.

        Raises:
            DepotUnavailable: none by then; the text says why.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.link is not None, timeout_seconds):
                raise DepotUnavailable(f"no depot in {self.directory}: {self.why_away}")
            link = self.link
            assert link is not None
            return link

    def channel(self, link: Link) -> Channel:
        """Return a new channel over a link, for the calling thread."""
        return Channel(link)

    def suspend(self, link: Link) -> None:
        """A call over this link ran into its deadline: use it again only once the server answers a ping."""
        if not link.suspended:
            link.suspended = True
            self.why_away = f"it did not answer within {self.deadline_seconds} s"
            logger.warning("the depot in %s: %s; requests are misses until it does", self.directory, self.why_away)
            self._wake()

    def note_wait(self, link: Link, seconds: float) -> None:
        """A call over this link kept its caller waiting: many long waits among few short ones are enough."""
        if seconds <= self._slow_seconds:
            link.slowness = max(0.0, link.slowness - _QUICK_WEIGHT)
            return
        link.slowness += 1
        if link.slowness >= SLOW_WAITS_TO_SUSPEND and not link.suspended:
            link.suspended = True
            self.why_away = f"calls waited for more than {self._slow_seconds:g} s again and again"
            logger.warning("the depot in %s is slow (%s); requests are misses until it is not", self.directory,
                           self.why_away)  # fmt: skip
            self._wake()

    def register_as(self, registration: m.RegisterKVCache) -> None:
        """Be something else from now on: the session ends, calls under way are misses, and another one begins."""
        self._registration = registration
        self._is_renewing = True
        self._wake()

    def tidy_soon(self) -> None:
        """Something was abandoned: have its reply taken in even if nothing else happens here."""
        self._tidy_seconds = _FIRST_TIDY_SECONDS
        self._wake()

    def close(self) -> None:
        """Close the session. Twice is harmless; calls under way fail as misses."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._wake()
        self._thread.join(self.deadline_seconds + 1)
        self._wake_reader.close()
        self._wake_writer.close()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_writer.send(b"w")

    # --- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        retry = _FIRST_RETRY_SECONDS
        while not self._closing.is_set():
            try:
                connection, link = self._open()
            except (OSError, KVDepotError, frames.FrameError) as error:
                if isinstance(error, RemoteError) and error.code is not ErrorCode.UNKNOWN_SESSION:
                    self._say_why(f"it refused: {error}", logging.ERROR)
                    self._closing.wait(_REFUSED_RETRY_SECONDS)
                    continue
                self._say_why(str(error), logging.WARNING)  # an unknown session: it was restarted meanwhile
                self._closing.wait(retry * random.uniform(0.5, 1.0))
                retry = min(retry * 2, _LAST_RETRY_SECONDS)
                continue
            retry = _FIRST_RETRY_SECONDS
            with self._changed:
                self._link = link
                self._changed.notify_all()
            logger.info("connected to the depot in %s (epoch %d)", self.directory, link.epoch)
            self._on_open(link)
            try:
                self._watch(connection, link)
            finally:
                with self._changed:
                    self._link = None
                link.mark_lost()
                connection.close()
            if not self._closing.is_set():
                self._say_why("the connection was lost", logging.WARNING)

    def _say_why(self, why: str, level: int) -> None:
        if why != self.why_away:
            logger.log(level, "no depot in %s: %s", self.directory, why)
            self.why_away = why

    def _open(self) -> tuple[socket.socket, Link]:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        link: Link | None = None
        self._is_renewing = False  # before the registration is read
        try:
            connection.settimeout(self.deadline_seconds)
            opened, mapping = open_session(connection, self.directory / SESSION_SOCKET, self._name, self._maps_pool)
            link = Link(opened, self.directory / CONTROL_SOCKET, mapping)
            channel = self.channel(link)
            try:
                link.registration = self._registration
                with self._fence():
                    reply = channel.call(link.registration, self.deadline_seconds)
            finally:
                channel.close()
            if not isinstance(reply, m.Registered):
                raise DepotUnavailable(f"it answered a registration with {type(reply).__name__}")
            link.context = reply.context
            link.verify = reply.verify
            link.move_seconds = reply.move_seconds
            return connection, link
        except BaseException:
            connection.close()
            if link is not None:
                link.mark_lost()
            raise

    def _watch(self, connection: socket.socket, link: Link) -> None:
        """Return when the connection is over."""
        connection.setblocking(False)
        poller = select.poll()
        poller.register(connection, select.POLLIN)
        poller.register(self._wake_reader, select.POLLIN)
        pinged_at: float | None = None
        probe_at, pause = 0.0, _FIRST_PROBE_SECONDS  # when a suspended link is tried next, and how long after that
        while not (self._closing.is_set() or self._is_renewing):
            waits = [self._tidy_seconds] if self._tidy_seconds else []
            if link.suspended and pinged_at is None:
                waits.append(max(0.001, probe_at - time.monotonic()))
            ready = {fd for fd, _ in poller.poll(min(waits) * 1000 if waits else None)}
            if self._tidy_seconds and not ready:
                following = min(2 * self._tidy_seconds, _LAST_TIDY_SECONDS)
                self._tidy_seconds = 0.0  # others may set it while we tidy
                if not self._on_tidy():
                    self._tidy_seconds = self._tidy_seconds or following
            if self._wake_reader.fileno() in ready:
                self._wake_reader.recv(4096)
            if connection.fileno() in ready:
                try:
                    data, fds, flags, _ = socket.recv_fds(connection, 4096, 1)
                except OSError:
                    return
                for fd in fds:
                    link.add_mover(fd)
                if not data or flags & socket.MSG_CTRUNC:  # no descriptor is left for a mover's: it must not be used
                    return
                if not data.strip(frames.MOVER_NOTE):
                    continue
                seconds = 0.0 if pinged_at is None else time.monotonic() - pinged_at
                pinged_at = None
                if seconds > self._slow_seconds:
                    probe_at = time.monotonic() + pause
                    pause = min(2 * pause, _LAST_PROBE_SECONDS)
                elif link.suspended:
                    pause = _FIRST_PROBE_SECONDS
                    self._resume(link)
            if link.suspended and pinged_at is None and time.monotonic() >= probe_at:
                with contextlib.suppress(OSError):
                    connection.send(b"p")
                pinged_at = time.monotonic()

    def _resume(self, link: Link) -> None:
        with self._changed:
            link.slowness = 0.0
            link.suspended = False
            self._changed.notify_all()
        logger.info("the depot in %s answers again", self.directory)
        if self._tidy_seconds:
            self._tidy_seconds = _FIRST_TIDY_SECONDS
        self._on_open(link)


def open_session(
    connection: socket.socket, path: Path, name: str, maps_pool: bool
) -> tuple[frames.SessionOpened, PoolMapping | None]:
    """Do the handshake on a session socket and map the pool if asked to.

    Raises:
        RemoteError: the server refused.
        DepotUnavailable: it broke off.
        OSError: there is no server, or no answer within the socket's timeout.
    """
    connection.connect(str(path))
    connection.sendall(frames.encode_session(frames.OpenSession(m.PROTOCOL_VERSION, name)))
    descriptors: list[int] = []
    received = bytearray()
    try:
        while len(received) < 4 or len(received) < 4 + int.from_bytes(received[:4], "little"):
            data, fds, _, _ = socket.recv_fds(connection, 4096, 2)
            descriptors += fds
            if not data:
                raise DepotUnavailable("it closed the connection during the handshake")
            received += data
        opened = frames.decode_session_reply(bytes(received[4:]))
        if isinstance(opened, m.ErrorReply):
            raise RemoteError(opened.code, opened.message)
        if not maps_pool:
            return opened, None
        if len(descriptors) != 2:
            raise DepotUnavailable("it did not hand over its pool")
        mapping = PoolMapping(descriptors[0], opened.pool_size_bytes, descriptors[1], opened.table_size_bytes)
        return opened, mapping
    finally:
        for fd in descriptors:
            os.close(fd)


def ask_depot(
    request: o.OperatorRequest,
    url: str | None = None,
    deadline_seconds: float = 2.0,
    keys: ClientKeys | None = None,
) -> frames.Reply:
    """Send one request that needs no session, for operators' tools; over TCP it takes `keys`.

    Raises:
        ConfigError: the URL and the keys do not go together, or the URL is none.
        DepotUnavailable: there is no depot or it does not answer; the text says which.
        RemoteError: it refused.
    """
    if is_tcp(url) != (keys is not None):
        raise ConfigError(
            f"{url} needs --curve-secret (this side's keys) and --curve-server (the depot's public key):"
            " make keys with 'kvdepot keys generate DIR'"
            if keys is None
            else "keys are for a depot at tcp://HOST:PORT: leave --curve-secret and --curve-server out, or give --url"
        )
    if url is not None and keys is not None:
        from kvdepot.client.remote import ask_remote  # with ZeroMQ, which only this needs

        return ask_remote(request, url, deadline_seconds, keys)
    link = Link(frames.SessionOpened(0, b"", 0, 0, ""), _control_socket(url), None)
    channel = Channel(link, connect_seconds=deadline_seconds)
    try:
        return channel.call(request, deadline_seconds)
    except DepotUnavailable as error:
        raise DepotUnavailable(f"the depot in {directory_of_url(url)} does not answer: {error}") from error
    finally:
        channel.close()


def _control_socket(url: str | None) -> Path:
    directory = directory_of_url(url)
    control = directory / CONTROL_SOCKET
    if os.access(control, os.W_OK):
        return control
    try:
        control.stat()
    except PermissionError:
        pass
    except OSError as error:
        raise DepotUnavailable(
            f"no depot in {directory}: start one with 'kvdepot serve', or name its directory by --url"
        ) from error
    raise DepotUnavailable(
        f"the depot in {directory} is not for this user: ask as its user, or serve with --socket-group GROUP and be a"
        " member of it"
    )
