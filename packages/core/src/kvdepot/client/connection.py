"""`Connection`: keeps a session with the depot and reconnects when it is lost.

Each connection has one thread, which owns the session's socket and blocks in a read. The server's death wakes it at
once. It then reconnects with growing pauses, registers, and publishes a new **session**. While the depot is away,
starting, hung or slow, there is no session, and callers answer "miss" without waiting.

A call that exceeds its deadline suspends the session. So do several calls that wait for an eighth of the deadline. The
thread then sends pings on its socket, and resumes the session when the server answers quickly. So a hung server costs
one deadline, a slow one a bounded wait, and a dead one less.

While the depot is away, the thread tries to connect once a second. A caller that calls `seek` makes it try at once if
the depot listens again. Callers may then wait for the session: in one outage, together for at most one deadline.

A process that is forked from a client's process gets a copy of each connection. Both processes would write to one
socket, and each would read the other's replies. So the copies in the child have no session and no socket; their end
changes nothing for the parent.
"""

import contextlib
import logging
import os
import random
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

from msgspec import structs

from kvdepot.client.session import Channel, Session
from kvdepot.config import CONTROL_SOCKET, DEADLINE_SECONDS, directory_of_url
from kvdepot.errors import DepotForeign, DepotUnavailable, ErrorCode, KVDepotError, RemoteError
from kvdepot.ownership import refuse_foreign_server
from kvdepot.pool.files import PoolMapping
from kvdepot.pool.inventory import name_others
from kvdepot.wire import frames
from kvdepot.wire import messages as m

logger = logging.getLogger(__name__)

FIRST_RETRY_SECONDS: Final = 0.05  # a depot starts in 0.3 s
_LAST_RETRY_SECONDS: Final = 1.0  # so engines notice a returning depot within this time
REFUSED_RETRY_SECONDS: Final = 10.0  # a refusal lasts until someone changes a setting
SLOW_WAITS_TO_SUSPEND: Final = 5  # in a row: a garbage collection or a slow disk delays only one or two
_QUICK_WEIGHT: Final = 0.25  # a short wait cancels this much of a long one
_SLOW_SHARE: Final = 1 / 8  # share of a deadline: longer waits count as slow
_FIRST_PROBE_SECONDS: Final = 0.05  # a depot that was stopped only briefly soon serves again
_LAST_PROBE_SECONDS: Final = 1.0  # one ping per second costs a hung depot nothing
_FIRST_REAP_SECONDS: Final = 0.005  # a mover that is told to exit mostly does so at once
_LAST_REAP_SECONDS: Final = 0.5  # a mover that hangs in its driver may take minutes


class Connection:
    """Keeps a session with the depot for one scheduler or one worker.

    Args:
        url: the depot's URL, None for the depot in the default directory.
        name: the client's name in the server's log.
        registration: sent in each new session.
        maps_pool: whether this process maps the pool, as workers do.
        deadline_seconds: the limit of each call.
        barrier: entered while registering. It waits for running copies and holds off new ones.
        on_open: called on the connection's thread with a session that became usable: new, or no longer suspended.
        reap_late_replies: reads replies to abandoned requests. After `reap_soon`, the connection's thread calls it
            until it returns True.
        on_fork: called in a child that was forked from this process. It must not wait for a lock.

    Attributes:
        is_inherited: whether this process was forked from the one that made the connection.
    """

    def __init__(
        self,
        url: str | None,
        name: str,
        registration: m.RegisterKVCache | m.RegisterScheduler,
        *,
        maps_pool: bool,
        deadline_seconds: float = DEADLINE_SECONDS,
        barrier: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
        on_open: Callable[[Session], None] = lambda _session: None,
        reap_late_replies: Callable[[], bool] = lambda: True,
        on_fork: Callable[[], None] = lambda: None,
    ) -> None:
        if deadline_seconds <= 0:
            raise KVDepotError(f"the deadline is {deadline_seconds} s: give a number above 0")
        self.directory = directory_of_url(url)
        self.deadline_seconds = deadline_seconds
        self.why_away: str = "not connected yet"
        self.is_inherited = False
        self._is_away = False  # whether the log has reported that the depot is away
        self._slow_seconds = deadline_seconds * _SLOW_SHARE
        self._name = name
        self._registration = registration
        self._maps_pool = maps_pool
        self._barrier = barrier
        self._on_open = on_open
        self._reap_late_replies = reap_late_replies
        self._on_fork = on_fork
        self._is_renewing = False
        self._has_connected = False
        self._is_refused = False  # whether the thread pauses because the depot has refused the registration
        self._is_sought = False  # whether callers wait for the thread's next try to connect
        self._sought_until = 0.0  # the end of all such waits in this outage; 0: none so far
        self._reap_seconds = 0.0  # pause until late replies are read; 0: do not read them
        self._session: Session | None = None
        self._changed = threading.Condition()
        self._random = random.Random()  # its own: a thread that draws from the module's changes what others draw
        self._closing = threading.Event()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._sockets: Final = weakref.WeakSet((self._wake_reader, self._wake_writer))  # which a forked child closes
        _connections.add(self)
        self._thread = threading.Thread(target=self._run, name="kvdepot-connection", daemon=True)
        self._thread.start()

    @property
    def session(self) -> Session | None:
        """The usable session. None while the depot is away, hung or slow; callers then answer "miss"."""
        session = self._session
        if session is None or session.suspended or self._is_renewing or self._closing.is_set():
            if self.is_inherited and not self._is_away:
                self._is_away = True
                logger.warning("no depot in %s: %s", self.directory, self.why_away)
            return None
        return session

    def wait_until_open(self, timeout_seconds: float) -> Session:
        """Return the session. Wait for it at most `timeout_seconds`.

        Raises:
            DepotUnavailable: there was no usable session in time; the text gives the reason.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.is_inherited or self.session is not None, timeout_seconds)
            session = self.session
            if session is None:
                raise DepotUnavailable(f"no depot in {self.directory}: {self.why_away}")
            return session

    def seek(self) -> bool:
        """Let the thread connect now if the depot listens again. Never wait.

        Return whether there is a session, or one `is_coming`.
        """
        with self._changed:
            # While a session is suspended or registers again, the depot is there and does not answer.
            if self._session is not None or self._is_refused or self._closing.is_set():
                return self.session is not None
            if not self._is_sought and self._listens():
                self._is_sought = True
                self._sought_until = self._sought_until or time.monotonic() + self.deadline_seconds
                self._wake()
            return self.is_coming

    @property
    def is_coming(self) -> bool:
        """Whether a caller that has sought the depot may wait for its session: the try to connect has not failed."""
        return self._is_sought and time.monotonic() < self._sought_until

    def wait_while_coming(self, timeout_seconds: float) -> Session | None:
        """Return the session. Wait for it at most `timeout_seconds`, and only while it `is_coming`."""
        rest = min(timeout_seconds, self._sought_until - time.monotonic())
        with self._changed:
            self._changed.wait_for(lambda: not self._is_sought, max(0.0, rest))
        return self.session

    def channel(self, session: Session) -> Channel:
        """Return a new channel over a session for the calling thread."""
        return Channel(session, self._make_socket())

    def suspend(self, session: Session) -> None:
        """Suspend a session after a call exceeded its deadline, until the server answers a ping."""
        if not session.suspended:
            session.suspended = True
            self.why_away = f"it did not answer within {self.deadline_seconds} s"
            logger.warning(
                "suspended the depot in %s until it answers: %s; the engine runs without it",
                self.directory,
                self.why_away,
            )
            self._wake()

    def note_wait(self, session: Session, seconds: float) -> None:
        """Record the wait of a call over this session. Many long waits with few short ones between them suspend it."""
        if seconds <= self._slow_seconds:
            session.slowness = max(0.0, session.slowness - _QUICK_WEIGHT)
            return
        session.slowness += 1
        if session.slowness >= SLOW_WAITS_TO_SUSPEND and not session.suspended:
            session.suspended = True
            self.why_away = f"many calls waited for more than {self._slow_seconds:g} s"
            logger.warning(
                "the depot in %s is slow (%s): the engine runs without it until it recovers",
                self.directory,
                self.why_away,
            )
            self._wake()

    def note_registration(self, registration: m.RegisterScheduler) -> None:
        """Use another registration in later sessions. The caller reports the change to the connected depot itself."""
        self._registration = registration

    def register_as(self, registration: m.RegisterKVCache) -> None:
        """Register again with other parameters. This closes the session, and its calls under way become misses."""
        self._registration = registration
        self._is_renewing = True
        self._wake()

    def reap_soon(self) -> None:
        """Read the reply to an abandoned request soon, even if there is no other activity."""
        self._reap_seconds = _FIRST_REAP_SECONDS
        self._wake()

    def close(self) -> None:
        """Close the session. Calls under way become misses. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._wake()
        self._thread.join(self.deadline_seconds + 1)
        self._wake_reader.close()
        self._wake_writer.close()

    def become_inert(self) -> None:
        """Give up the session in a forked child, which has no thread of the connection, without touching the parent's.

        Another thread of the parent may have held any lock at the fork, so take none and make new ones.
        """
        self.is_inherited, self._is_away = True, False
        self.why_away = (
            "this process was forked from the one that made this client, so every lookup, store and retrieve is a miss;"
            " make another client in this process"
        )
        self._changed, self._closing = threading.Condition(), threading.Event()
        self._closing.set()
        for each in list(self._sockets):
            each.close()  # never `shutdown`, which would end the parent's connection
        session, self._session = self._session, None
        if session is not None:
            session.mark_lost()
        self._on_fork()

    def _make_socket(self) -> socket.socket:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sockets.add(made)
        return made

    def _listens(self) -> bool:
        """Return whether a server accepts connections, which takes microseconds."""
        # Without a descriptor left, or with too long a path, a lookup is a miss and not an error.
        with contextlib.suppress(OSError), self._make_socket() as probe:
            probe.setblocking(False)
            probe.connect(str(self.directory / CONTROL_SOCKET))
            return True
        return False

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_writer.send(b"w")

    # --- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        retry = FIRST_RETRY_SECONDS
        while not self._closing.is_set():
            try:
                connection, session = self._open()
            except (OSError, KVDepotError, frames.FrameError) as error:
                self._is_refused = isinstance(error, RemoteError) and error.code is not ErrorCode.UNKNOWN_SESSION
                with self._changed:
                    self._is_sought = False
                    self._changed.notify_all()
                if self._is_refused:
                    self._say_why(f"it refused: {error}", logging.ERROR)
                    self._closing.wait(REFUSED_RETRY_SECONDS)
                    continue
                # An unknown session means that the depot was restarted meanwhile. A stranger in its place must show in
                # the log, even if the log has already reported that the depot is away.
                self._say_why(str(error), logging.ERROR if isinstance(error, DepotForeign) else logging.WARNING)
                self._pause(retry * self._random.uniform(0.5, 1.0))
                retry = min(retry * 2, _LAST_RETRY_SECONDS)
                continue
            retry = FIRST_RETRY_SECONDS
            self._is_away, self._has_connected = False, True
            with self._changed:
                self._session, self._is_sought, self._sought_until = session, False, 0.0
                self._changed.notify_all()
            logger.info("connected to the depot in %s (epoch %d)", self.directory, session.epoch)
            why, pause = "the connection was lost", 0.0
            try:
                self._on_open(session)
                self._watch(connection, session)
            except Exception:  # `_on_open` starts a thread, which fails while the machine has none left
                logger.exception("the session with the depot in %s cannot be used", self.directory)
                why, pause = "the session could not be used", REFUSED_RETRY_SECONDS
            finally:
                with self._changed:
                    self._session = None
                session.mark_lost()
                connection.close()
            if not self._closing.is_set():
                self._say_why(why, logging.WARNING)
                self._closing.wait(pause)

    def _pause(self, seconds: float) -> None:
        """Wait until the next try to connect is due, or a caller has woken the thread."""
        poller = select.poll()
        poller.register(self._wake_reader, select.POLLIN)
        if poller.poll(seconds * 1000):
            self._wake_reader.recv(4096)

    def _say_why(self, why: str, level: int) -> None:
        """Log one line per outage, and one per reason of a refusal."""
        if not self._is_away or (level == logging.ERROR and why != self.why_away):
            text = "no depot in %s (%s): the engine runs without it until it is back%s"
            # An engine that has had its depot knows the right folder, so that others would only distract.
            others = "" if self._has_connected else name_others(self.directory)
            logger.log(level, text, self.directory, why, others)
        self._is_away, self.why_away = True, why

    def _open(self) -> tuple[socket.socket, Session]:
        try:
            return self._open_as(m.PROTOCOL_VERSION)
        except RemoteError as error:
            if error.code is not ErrorCode.VERSION_MISMATCH or m.PROTOCOL_VERSION == m.OLDEST_PROTOCOL_VERSION:
                raise
            # An upgrade may reach engines before their depot, which knows only the release before.
            try:
                return self._open_as(m.OLDEST_PROTOCOL_VERSION)
            except RemoteError as second:
                raise error if second.code is ErrorCode.VERSION_MISMATCH else second from None

    def _open_as(self, version: int) -> tuple[socket.socket, Session]:
        connection = self._make_socket()
        session: Session | None = None
        self._is_renewing = False  # before reading the registration: a later change sets it again
        try:
            connection.settimeout(self.deadline_seconds)
            path = self.directory / CONTROL_SOCKET
            opened, mapping = open_session(connection, path, self._name, self._maps_pool, version)
            session = Session(opened, path, mapping)
            channel = self.channel(session)
            try:
                session.registration = self._registration
                with self._barrier():
                    registration = structs.replace(session.registration, protocol_version=version)
                    reply = channel.call(registration, self.deadline_seconds)
            finally:
                channel.close()
            if not isinstance(reply, m.Registered):
                raise DepotUnavailable(f"it answered a registration with {type(reply).__name__}")
            session.context = reply.context
            session.verify = reply.verify
            session.move_seconds = reply.move_seconds
            session.wants_tokens = reply.wants_tokens
            if version < m.PROTOCOL_VERSION:
                text = "the depot in %s is of an earlier release (%s): both speak its protocol until it is upgraded"
                logger.warning(text, self.directory, opened.server_version)
            return connection, session
        except BaseException:
            connection.close()
            if session is not None:
                session.mark_lost()
            raise

    def _watch(self, connection: socket.socket, session: Session) -> None:
        """Read the session's socket until the session ends."""
        connection.setblocking(False)
        poller = select.poll()
        poller.register(connection, select.POLLIN)
        poller.register(self._wake_reader, select.POLLIN)
        pinged_at: float | None = None
        # Time of the next ping on a suspended session, and the pause after it.
        probe_at, pause = 0.0, _FIRST_PROBE_SECONDS
        while not (self._closing.is_set() or self._is_renewing):
            waits = [self._reap_seconds] if self._reap_seconds else []
            if session.suspended and pinged_at is None:
                waits.append(max(0.001, probe_at - time.monotonic()))
            ready = {fd for fd, _ in poller.poll(min(waits) * 1000 if waits else None)}
            if self._reap_seconds and not ready:
                following = min(2 * self._reap_seconds, _LAST_REAP_SECONDS)
                self._reap_seconds = 0.0  # before reaping: another thread may set it meanwhile
                if not self._reap_late_replies():
                    self._reap_seconds = self._reap_seconds or following
            if self._wake_reader.fileno() in ready:
                self._wake_reader.recv(4096)
            if connection.fileno() in ready:
                try:
                    data, fds, flags, _ = socket.recv_fds(connection, 4096, 1)
                except OSError:
                    return
                for fd in fds:
                    session.add_mover(fd)
                if not data or flags & socket.MSG_CTRUNC:  # MSG_CTRUNC: no descriptor was left for a mover's pidfd
                    return
                if not data.strip(frames.MOVER_NOTE):
                    continue
                seconds = 0.0 if pinged_at is None else time.monotonic() - pinged_at
                pinged_at = None
                if seconds > self._slow_seconds:
                    probe_at = time.monotonic() + pause
                    pause = min(2 * pause, _LAST_PROBE_SECONDS)
                elif session.suspended:
                    pause = _FIRST_PROBE_SECONDS
                    self._resume(session)
            if session.suspended and pinged_at is None and time.monotonic() >= probe_at:
                with contextlib.suppress(OSError):
                    connection.send(b"p")
                pinged_at = time.monotonic()

    def _resume(self, session: Session) -> None:
        with self._changed:
            session.slowness = 0.0
            session.suspended = False
            self._changed.notify_all()
        logger.info("the depot in %s answers again", self.directory)
        if self._reap_seconds:
            self._reap_seconds = _FIRST_REAP_SECONDS
        self._on_open(session)


# Python keeps a hook of `register_at_fork` for ever, so there is one for all connections.
_connections: Final = weakref.WeakSet[Connection]()


def _leave_to_parent() -> None:
    for connection in list(_connections):
        connection.become_inert()


os.register_at_fork(after_in_child=_leave_to_parent)


def open_session(
    connection: socket.socket, path: Path, name: str, maps_pool: bool, version: int
) -> tuple[frames.SessionOpened, PoolMapping | None]:
    """Open a session over an unconnected socket, in a version of the protocol. Map the pool if `maps_pool`.

    Raises:
        RemoteError: the server refused.
        DepotForeign: another user listens there.
        DepotUnavailable: the server closed the connection or sent an invalid answer.
        OSError: no server answers within the socket's timeout.
    """
    connection.connect(str(path))
    refuse_foreign_server(connection, path)
    connection.sendall(frames.encode_greeting(frames.OpenSession(version, name)))
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
