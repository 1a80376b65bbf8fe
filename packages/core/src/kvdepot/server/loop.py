"""The server's loop: one thread, one poll, one reply for each request.

A plain loop over Unix sockets: neither asyncio nor ZeroMQ's thread of its own was as fast (`docs/performance.md`).
Whatever a handler raises becomes a typed error reply; nothing a peer sends ends the loop.
"""

import contextlib
import ctypes
import fcntl
import gc
import logging
import math
import os
import secrets
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Final

import zmq

from kvdepot.config import CONTROL_SOCKET, SESSION_SOCKET, ServerConfig, format_size
from kvdepot.errors import DepotBusy, ErrorCode
from kvdepot.index.index import ChunkIndex
from kvdepot.index.quotas import QuotaTable
from kvdepot.movers.table import MoverTable
from kvdepot.operators.events import EventPublisher, check_endpoint
from kvdepot.operators.remote import RemoteSocket
from kvdepot.operators.zeromq import LOOK_MILLISECONDS, Listeners
from kvdepot.pool.extents import ExtentAllocator
from kvdepot.pool.files import allocate_first, allocate_in_background, is_locked, open_pool, open_with_lock
from kvdepot.pool.names import Names
from kvdepot.pool.room import resolve_pool_size
from kvdepot.pool.table import Writer, table_size_bytes
from kvdepot.server import operations
from kvdepot.server.access import Access, make_room, open_lock
from kvdepot.server.connections import Connection, ConnectionTable
from kvdepot.server.depot import Chore, Deferred, Depot, Refused
from kvdepot.server.restoring import take_over
from kvdepot.server.sessions import Session, SessionTable
from kvdepot.server.watch import SHORTEST_SECONDS, CollectionWatch, TurnWatch
from kvdepot.tiers.opening import TierOpener
from kvdepot.tiers.queue import TierQueue
from kvdepot.tiers.tiering import Tiering, TieringSettings
from kvdepot.wire import frames
from kvdepot.wire import messages as m
from kvdepot.wire import operations as o
from kvdepot.wire.curve import ServerKeys, load_allowed, load_pair
from kvdepot.wire.histogram import Histogram

logger = logging.getLogger(__name__)

_BYTES_PER_ENTRY: Final = 64 << 10  # the smallest chunk that the default number of entries reckons with
_MINIMUM_ENTRIES: Final = 65_536
_MAXIMUM_ENTRIES: Final = 4_194_304
_TURN_MILLISECONDS: Final = 500
_DRAIN_SECONDS: Final = 2.0
# Of a turn: who has more to do then goes on in the next. What has begun is done, one request for example.
_MESSAGE_SECONDS: Final = 0.0008
_CHORE_SECONDS: Final = 0.0006  # of each kind, tiers and reading back for example
# Threads of tiers and of HTTP run Python, and the loop must not wait 5 ms for them. It gives the lock up itself that
# often while they want it: with 0.1 ms it spent more on getting it back than they needed it for.
_SWITCH_SECONDS: Final = 0.001
_FREEZE_GROWTH: Final = 1.25
_FREEZE_LEAST: Final = 2_500  # chunks
_M_MMAP_THRESHOLD: Final = -3  # of mallopt
_M_TRIM_THRESHOLD: Final = -1
_LARGE_BLOCK_BYTES: Final = 256 << 10
_KEPT_BYTES: Final = 1 << 20


class DepotServer:
    """A depot with its sockets. `run` serves until `stop` or SIGTERM; `close` is called by `run`."""

    def __init__(self, config: ServerConfig) -> None:
        """Bind the sockets and open the pool.

        Raises:
            ConfigError: the settings cannot work.
            DepotBusy: another server has this directory.
            PoolError: the pool's files cannot be made.
        """
        self.config = config
        self.epoch = secrets.randbits(62) | 1
        self._version = version("kvdepot")  # read from a file
        self._access = Access.of_group(config.socket_group)
        keys = _load_keys(config)
        self._access.prepare_directory(config.directory)
        self._lock = self._take_lock()
        with contextlib.ExitStack() as undo:  # a start that fails leaves nothing behind
            undo.callback(os.close, self._lock)
            size = resolve_pool_size(config)
            entries = config.max_entries or min(max(size // _BYTES_PER_ENTRY, _MINIMUM_ENTRIES), _MAXIMUM_ENTRIES)
            quotas = QuotaTable(size, config.quotas)
            server = f"the depot of --dir {config.directory.absolute()} (process {os.getpid()} of its PID namespace)"
            self._files = open_pool(config.pool_path, size, entries, server=server, fresh=config.fresh)
            undo.callback(self._files.close, remove=self._files.is_new)
            for path in (config.directory / SESSION_SOCKET, *self._control_paths()):
                make_room(path)  # now that no living depot has them
            ready = allocate_first(self._files.pool_fd, size) if self._files.is_new else size
            extents = ExtentAllocator(size, ready)
            self._depot = Depot(
                ChunkIndex(extents, self._files.table, config.policy, quotas),
                epoch=self.epoch,
                lease_seconds=config.lease_seconds,
                clock=time.monotonic,
                verify=m.Verify(config.verify),
            )
            self._started_at = time.monotonic()
            self._stopping_at: float | None = None
            self._wake_reader, self._wake_writer = socket.socketpair()
            self._wake_reader.setblocking(False)
            self._wake_writer.setblocking(False)
            self._is_woken = False
            undo.callback(self._wake_reader.close)
            undo.callback(self._wake_writer.close)
            self._ready_bytes = extents.ready_bytes
            self._allocation_error: OSError | None = None
            self._connections = ConnectionTable(
                self._control_paths(),
                self._access,
                is_owner=lambda token: self._sessions.find(token) is not None,
                end_owner=lambda token: self._sessions.end(token),
                handle=self._serve,
            )
            undo.callback(self._connections.close)
            self._context = zmq.Context()
            undo.callback(self._context.destroy, linger=0)
            self._remote = None if keys is None else RemoteSocket(self._context, config.tcp_endpoints, keys)
            self._events = self._open_events()
            remote = [] if self._remote is None else [(self._remote.router, each) for each in self._remote.endpoints]
            self._listeners = Listeners([*remote, *([] if self._events is None else self._events.bound)])
            self._sessions = SessionTable(
                config.directory / SESSION_SOCKET,
                self._access,
                welcome=self._welcome,
                on_end=self._end_session,
                on_death=self._depot.end_process,
                is_awaited=lambda writer: any(q.fence[0] == writer for q in self._depot.quarantines),
                is_mapping=lambda writer: is_locked(self._files.pool_fd, writer.start_time),
                epoch=self.epoch,
            )
            undo.callback(self._sessions.close)
            self._movers = self._depot.movers = MoverTable(
                self._files.pool_fd,
                size,
                hand_over=self._sessions.hand_over,
                on_dead=self._depot.end_mover,
                start_seconds=config.mover_start_seconds,
                move_seconds=config.move_seconds,
            )
            undo.callback(self._movers.close)
            self._opener = TierOpener(self._files.pool_fd, self._files.size_bytes, self._wake)
            if config.tiers:
                self._depot.tiering = self._make_tiering(self._opener.open_all(config.tiers))
            self._watch = TurnWatch()
            self._frozen_chunks = 0  # when the garbage collector was last told to leave everything alone
            self._latencies: dict[type, Histogram] = {
                kind: Histogram(SHORTEST_SECONDS) for kind in (*frames.Request.__args__, m.ErrorReply)
            }
            names = self._files.names.found
            self._restoring: Iterator[None] | None = None
            if not self._files.is_new:
                self._restoring = self._read_back(self._depot.index.restore(names.spaces, len(names.labels)))
                self._depot.accepts_stores = False
                self._depot.restore_labels(names.labels)
            self._depot.on_names_changed = self._save_names
            undo.pop_all()

    def _open_events(self) -> EventPublisher | None:
        config = self.config
        if config.events is None:
            return None
        events = EventPublisher(self._context, self._depot.index, config.events, config.events_replay)
        for endpoint, flag in ((config.events, "--events"), (config.events_replay, "--events-replay")):
            if endpoint is not None and not check_endpoint(endpoint, flag):
                logger.warning("%s %s: whoever can connect sees keys of chunks", flag, endpoint)
        return events

    def _make_tiering(self, queues: list[TierQueue]) -> Tiering:
        config, depot = self.config, self._depot
        settings = TieringSettings(
            config.demotion,
            config.demotion_least_tokens,
            config.promotion_seconds,
            config.promotion_least_tokens,
            makes_checksums=depot.verify is not m.Verify.OFF,
        )
        return Tiering(
            depot.index, queues, settings, names_of=depot.labels.__getitem__, on_corrupt=depot.remove_corrupt,
            clock=time.monotonic,
        )  # fmt: skip

    def _take_lock(self) -> int:
        fd = open_lock(self.config.directory / "lock")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            pid = os.pread(fd, 32, 0).decode(errors="replace").strip()
            os.close(fd)
            raise DepotBusy(
                f"process {pid} already serves {self.config.directory}: stop it, or choose another --dir"
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        return fd

    def _control_paths(self) -> list[Path]:
        config = self.config
        further = [endpoint for endpoint in config.listen if endpoint not in config.tcp_endpoints]
        return [config.directory / CONTROL_SOCKET, *(Path(endpoint.removeprefix("ipc://")) for endpoint in further)]

    def run(self, on_ready: Callable[[], None] | None = None) -> None:
        """Serve until told to stop."""
        poller = self._make_poller()
        if self._files.is_new:
            allocate_in_background(
                self._files.pool_fd, self._ready_bytes, self._files.size_bytes, self._on_allocated, self._on_failure
            )
        logger.info(
            "serving %s with a pool of %s in %s (epoch %d)",
            self.config.directory, format_size(self._files.size_bytes), self.config.pool_path, self.epoch,
        )  # fmt: skip
        if on_ready is not None:
            on_ready()
        next_sweep = 0.0
        collections, switch_seconds = CollectionWatch(), sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_SECONDS)
        self._watch.open()
        if self._restoring is not None:
            gc.disable()  # what is read back is no garbage, and looking through a million objects takes 0.1 s
        idle_milliseconds, any_fd = 0, self._wake_reader.fileno()
        try:
            while not self._is_over():
                events: Mapping[object, int] = dict(poller.poll(idle_milliseconds))
                began = self._watch.begin()
                if self._connections.fileno() in events or self._connections.has_work:
                    self._connections.serve(began + _MESSAGE_SECONDS)
                if self._remote is not None:
                    self._serve_remote(self._remote, events)
                if self._sessions.fileno() in events:
                    self._sessions.serve(_after(_CHORE_SECONDS))
                if self._movers.fileno() in events:
                    self._movers.serve()
                self._movers.expire()
                if self._wake_reader.fileno() in events:
                    self._on_wake()
                if self._restoring is not None:
                    self._restore_some(_after(_CHORE_SECONDS))
                if self._depot.has_work:
                    self._depot.work(_after(_CHORE_SECONDS))
                if began >= next_sweep:
                    next_sweep = began + _TURN_MILLISECONDS / 1000
                    self._depot.expire()
                    self._files.advance()
                    self._connections.sweep(_after(_CHORE_SECONDS))
                    self._sessions.expire_handshakes(_after(_CHORE_SECONDS))
                    self._sessions.find_dead(_after(_CHORE_SECONDS))
                    self._listeners.listen_again(any_fd)
                    self._spare_collections()
                self._listeners.leave_reserve(any_fd)
                self._serve_tiers()
                if self._events is not None:
                    self._serve_events(self._events, events)
                idle_milliseconds = self._idle_milliseconds()
                self._watch.end()
        finally:
            gc.enable()
            sys.setswitchinterval(switch_seconds)
            collections.close()
            self._watch.close()
            self.close()

    def _make_poller(self) -> "zmq.Poller | select.poll":
        """Return what the loop sleeps in: ZeroMQ's only where there are sockets of ZeroMQ, as it is slower."""
        sockets: list[zmq.Socket[bytes]] = []
        if self._remote is not None:
            sockets += [self._remote.router, self._remote.zap]
            logger.info("listening for listed keys on %s", ", ".join(self._remote.endpoints))
        if self._events is not None and self._events.replay is not None:
            sockets.append(self._events.replay)
        poller = zmq.Poller() if sockets else select.poll()
        for each in sockets:
            poller.register(each, select.POLLIN)
        for each in (self._connections, self._sessions, self._movers, self._wake_reader):
            poller.register(each.fileno(), select.POLLIN)
        return poller

    def _serve_events(self, publisher: EventPublisher, events: Mapping[object, int]) -> None:
        publisher.flush()
        if publisher.replay in events:
            replay = publisher.take_replay()
            if replay is not None:
                self._depot.do_later(replay, Chore.REPLAY)

    def _spare_collections(self) -> None:
        """As the index grows, have the garbage collector leave it alone: a million entries would take it 30 ms."""
        num_chunks = self._depot.index.num_chunks
        if num_chunks > _FREEZE_GROWTH * self._frozen_chunks + _FREEZE_LEAST:
            gc.freeze()
            self._frozen_chunks = num_chunks

    def _serve_tiers(self) -> None:
        if self._depot.tiering is None:
            return
        try:
            self._depot.tiering.turn(_after(_CHORE_SECONDS))
        except Exception:
            logger.exception("the tiers' turn failed")
            self._depot.counters["tiers_failed"] += 1

    def _idle_milliseconds(self) -> int:
        """Return how long the loop may sleep if nothing comes."""
        if self._restoring is not None or self._depot.has_work or self._connections.has_work:
            return 0
        tiers_due = None if self._depot.tiering is None else self._depot.tiering.next_deadline()
        due = [each for each in (tiers_due, self._movers.next_deadline()) if each is not None]
        longest = LOOK_MILLISECONDS if self._listeners else _TURN_MILLISECONDS
        if not due:
            return longest
        return max(0, min(longest, math.ceil((min(due) - time.monotonic()) * 1000)))

    def stop(self) -> None:
        """Ask the loop to end, from any thread or a signal handler: no new stores, those under way may finish."""
        if self._stopping_at is None:
            self._stopping_at = time.monotonic() + _DRAIN_SECONDS
            self._depot.accepts_stores = False
        self._wake()

    def stop_on_signals(self) -> None:
        """End on SIGTERM and SIGINT; call from the main thread."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda _number, _frame: self.stop())

    def close(self) -> None:
        """Close sockets and files; an ephemeral pool is removed, any other waits for the next server."""
        self._movers.close()
        self._connections.close()
        self._sessions.close()
        if self._depot.tiering is not None:
            self._depot.tiering.close(_DRAIN_SECONDS)
        self._context.destroy(linger=0)
        self._files.close(remove=self.config.ephemeral)
        self._wake_reader.close()
        self._wake_writer.close()
        os.close(self._lock)
        logger.info("stopped%s", "" if self.config.ephemeral else f"; the cache stays in {self.config.pool_path}")

    def _is_over(self) -> bool:
        if self._stopping_at is None:
            return False
        return not self._depot.tickets or time.monotonic() >= self._stopping_at

    # --- messages -------------------------------------------------------------------------------------------------

    def _serve(self, connection: Connection, frame: memoryview) -> None:
        """Answer a request that came over a Unix socket, now or later."""
        began = time.monotonic()
        sequence = frames.sequence_of(frame)
        session = self._sessions.find(connection.owner) if connection.owner else None
        kind, reply = self._answer(frame, session, _WHY_NO_SESSION)
        if isinstance(reply, Deferred):
            deferred, num_bytes = reply, len(frame)
            self._connections.hold(connection, num_bytes)

            def send(late: frames.Reply) -> None:
                deferred.on_reply = None  # one request, one reply
                self._connections.release(connection, num_bytes)
                self._connections.send(connection, frames.encode_frame(sequence, late))
                self._latencies[kind].add(time.monotonic() - began)

            deferred.on_reply = send
        else:
            self._connections.send(connection, frames.encode_frame(sequence, reply))
            self._latencies[kind].add(time.monotonic() - began)

    def _answer(
        self, frame: bytes | memoryview, session: Session | None, why_no_session: str
    ) -> tuple[type, frames.Reply | Deferred]:
        """Return the kind of a request, `ErrorReply` if it is none or refused, and its reply."""
        try:
            request = frames.decode_request(frame)
            if isinstance(request, _OPEN_TO_ALL):
                return type(request), self._answer_anybody(request)
            if session is None:
                raise Refused(ErrorCode.UNKNOWN_SESSION, why_no_session)
            return type(request), self._depot.handle(session.number, session.writer, request)
        except (Refused, frames.FrameError) as error:
            self._depot.counters["requests_refused"] += 1
            return m.ErrorReply, m.ErrorReply(self.epoch, error.code, str(error))
        except Exception as error:
            logger.exception("a request failed")
            self._depot.counters["requests_failed"] += 1
            return m.ErrorReply, m.ErrorReply(self.epoch, ErrorCode.INTERNAL, f"{type(error).__name__}: {error}")

    def _serve_remote(self, remote: RemoteSocket, events: Mapping[object, int]) -> None:
        if remote.zap in events:
            remote.answer_keys()
        if remote.router in events:
            self._serve_operators(remote, time.monotonic() + _MESSAGE_SECONDS)

    def _serve_operators(self, remote: RemoteSocket, until: float) -> None:
        """Answer requests that came over TCP, now or later, one at least, until the time `until`."""
        began = time.monotonic()
        while True:
            try:
                message = remote.take()
            except zmq.Again:
                return
            if message is not None:
                self._serve_operator(remote, message, began)
            began = time.monotonic()
            if began >= until:
                return

    def _serve_operator(self, remote: RemoteSocket, message: list[bytes], began: float) -> None:
        routing_id, *parts = message
        frame = parts[0] if len(parts) == 1 else b""  # which is malformed, as it has no sequence number
        sequence = frames.sequence_of(parts[0]) if parts else 0
        kind, reply = self._answer(frame, None, _WHY_NOT_OVER_TCP)

        def send(reply: frames.Reply) -> None:
            remote.send(routing_id, frames.encode_frame(sequence, reply))
            self._latencies[kind].add(time.monotonic() - began)

        if isinstance(reply, Deferred):
            reply.on_reply = send
        else:
            send(reply)

    def _end_session(self, session: Session) -> None:
        assert session.token is not None
        self._connections.close_owner(session.token)
        self._depot.end_session(session.number)

    def _answer_anybody(self, request: o.OperatorRequest) -> frames.Reply | Deferred:
        match request:
            case m.Hello():
                reason = m.check_protocol_version(request.protocol_version)
                if reason:
                    logger.warning("%s", reason)
                    raise Refused(ErrorCode.VERSION_MISMATCH, reason)
                return m.HelloReply(
                    self.epoch, m.PROTOCOL_VERSION, m.MINIMUM_PROTOCOL_VERSION, self._version, os.getpid()
                )
            case o.Status():
                return o.StatusReply(self.epoch, self._status())
            case o.Clear() | o.Warm() | o.SetQuota() if self._restoring is not None:
                raise Refused(ErrorCode.DRAINING, "the entries of an earlier server are being read: ask again")
            case o.Clear():
                if request.digests:
                    return operations.clear_prefix(self._depot, request)
                return self._depot.clear_everywhere(request.tenant, request.model)
            case o.Warm():
                return self._depot.warm(request)
            case o.Unpin():
                return operations.unpin(self._depot, request.tenant)
            case o.Find():
                return operations.find(self._depot, request.digests)
            case o.SetQuota():
                return operations.set_quota(self._depot, request.tenant, request.quota_bytes)
            case o.AddTier():
                return operations.add_tier(self._depot, self._opener, self._make_tiering, request.url)
            case o.RemoveTier():
                return operations.remove_tier(self._depot, request.name)
            case o.Drain():
                return operations.drain(self._depot, request.is_draining)
            case o.SetLogLevel():
                return operations.set_log_level(self._depot, request.level)
            case o.Configuration():
                return o.ConfigurationReply(self.epoch, operations.settings_of(self._depot, self.config))

    def _status(self) -> o.DepotStatus:
        fields = self._depot.status_fields()
        if self._remote is not None:
            fields["counters"]["keys_refused"] = self._remote.num_refused
        if self._events is not None:
            fields["counters"]["event_batches"] = self._events.num_batches
        return o.DepotStatus(
            server_version=self._version,
            protocol_version=m.PROTOCOL_VERSION,
            epoch=self.epoch,
            pid=os.getpid(),
            uptime_seconds=time.monotonic() - self._started_at,
            policy=self.config.policy,
            num_sessions=len(self._sessions),
            recovering=self._restoring is not None,
            verify=self._depot.verify,
            log_level=operations.log_level(),
            loop_longest_seconds=self._watch.longest_seconds,
            loop_longest_blocked_seconds=self._watch.longest_blocked_seconds,
            loop_slow_turns=self._watch.num_slow,
            latencies={
                **{
                    frames.operation_of(kind): histogram.status()
                    for kind, histogram in self._latencies.items()
                    if any(histogram.counts)
                },
                "store": self._depot.store_seconds.status(),
                "loop_turn": self._watch.turns.status(),
            },
            endpoints=[
                *(f"ipc://{path}" for path in self._control_paths()),
                *(self._remote.endpoints if self._remote is not None else ()),
            ],
            event_endpoints=[] if self._events is None else [self._events.endpoint, self._events.replay_endpoint],
            **fields,
        )

    def _welcome(self, token: bytes, writer: Writer) -> tuple[frames.SessionOpened, list[int]]:
        files = self._files
        opened = frames.SessionOpened(
            self.epoch, token, files.size_bytes, table_size_bytes(files.table.num_records), self._version
        )
        pool_fd = os.dup(files.pool_fd) if writer.pid else open_with_lock(files.pool_fd, writer.start_time)
        try:
            return opened, [pool_fd, os.dup(files.table_fd)]
        except OSError:
            os.close(pool_fd)
            raise

    # --- pool -----------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        if self._is_woken:
            return  # what there is, it finds in the turn that is to come
        self._is_woken = True
        try:
            self._wake_writer.send(b"w")
        except OSError:
            return  # full, so the loop wakes anyway, or closed

    def _on_allocated(self, ready_bytes: int) -> None:
        self._ready_bytes = ready_bytes
        self._wake()

    def _on_failure(self, error: OSError) -> None:
        self._allocation_error = error
        self._wake()

    def _on_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_reader.recv(4096)
        self._is_woken = False  # what came before is seen below, and for what comes now there will be a byte
        self._opener.deliver()
        self._depot.index.extents.grow(self._ready_bytes)
        if self._allocation_error is not None:
            logger.error(
                "the pool stays at %s of %s: %s has no more room (%s); free some or lower --pool-size",
                format_size(self._ready_bytes), format_size(self._files.size_bytes), self.config.pool_path,
                self._allocation_error,
            )  # fmt: skip
            self._allocation_error = None

    def _save_names(self) -> None:
        file, depot = self._files.names, self._depot
        new_spaces = [space.spec for space in depot.index.spaces[file.num_spaces :]]
        file.add(Names(new_spaces, depot.labels[file.num_labels :]))

    def _restore_some(self, is_over: Callable[[], bool]) -> None:
        assert self._restoring is not None
        try:
            for _ in self._restoring:
                if is_over():
                    return
        except Exception:
            # Nobody knows any more whose writes have not ended: what is here is found, nothing is added.
            logger.exception("reading back an earlier server's table failed: no stores until a start with --fresh")
            self._depot.counters["chores_failed"] += 1
            self._depot.note("reading back an earlier server's table failed: no stores until a start with --fresh")
            gc.enable()
        self._restoring = None

    def _read_back(self, restored: Iterator[int | None]) -> Iterator[None]:
        """Take over an earlier server's table, in steps; then stores are taken again."""
        depot = self._depot
        yield from take_over(depot, restored, self._sessions.await_death)
        gc.freeze()  # what was read back is no garbage, now or later
        gc.enable()
        depot.counters["chores_failed"] += depot.index.num_restore_errors
        depot.accepts_stores = self._stopping_at is None
        depot.note(f"found {depot.index.num_entries} entries of an earlier server")


def map_large_blocks() -> None:
    """Let what is large grow by moving pages: copying the columns of a million entries takes the loop up to 10 ms.

    glibc raises the size from which it maps blocks with each one that is freed; told a size, it keeps to that. Then it
    has to be told as well not to give memory back after each large message.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def _load_keys(config: ServerConfig) -> ServerKeys | None:
    if config.curve_secret is None or config.curve_clients is None:
        return None
    return ServerKeys(
        load_pair(config.curve_secret, "--curve-secret"), load_allowed(config.curve_clients, "--curve-clients")
    )


def _after(seconds: float) -> Callable[[], bool]:
    """Return what says whether so much time has passed."""
    until = time.monotonic() + seconds
    return lambda: time.monotonic() >= until


_WHY_NO_SESSION: Final = "no open session: connect to the session socket first"
_WHY_NOT_OVER_TCP: Final = (
    "over TCP only operators' requests (status, clear, warm and the like) are served: a session hands over the pool's"
    " memory, so engines attach on the depot's machine, by its directory"
)
_OPEN_TO_ALL: Final = (
    m.Hello, o.Status, o.Clear, o.Warm, o.Unpin, o.Find, o.SetQuota, o.AddTier, o.RemoveTier, o.Drain, o.SetLogLevel,
    o.Configuration,
)  # fmt: skip
