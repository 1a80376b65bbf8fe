"""Assembles a depot and its sockets, runs them, and closes them."""

import contextlib
import logging
import os
import secrets
import signal
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from types import MappingProxyType
from typing import Any, Final

from kvdepot.config import ServerConfig, format_size
from kvdepot.index.index import ChunkIndex
from kvdepot.index.quotas import QuotaTable
from kvdepot.movers.table import MoverTable
from kvdepot.pool.extents import ExtentAllocator
from kvdepot.pool.files import PoolFiles, allocate_first, is_locked, open_pool, open_with_lock
from kvdepot.pool.size import resolve_pool_size
from kvdepot.pool.table import Writer, table_size_bytes
from kvdepot.server.access import Access, make_room
from kvdepot.server.connections import ConnectionTable
from kvdepot.server.depot import Depot, Requests
from kvdepot.server.feature import installed_features
from kvdepot.server.loop import Loop, Sockets, ThreadResults, Waker
from kvdepot.server.restoring import Restoring
from kvdepot.server.run_folder import RunFolder
from kvdepot.server.sessions import Session, SessionTable
from kvdepot.tiers.opening import TierOpener
from kvdepot.tiers.queue import TierQueue
from kvdepot.tiers.tiering import Tiering, TieringSettings
from kvdepot.wire import frames
from kvdepot.wire import messages as m

logger = logging.getLogger(__name__)

_BYTES_PER_ENTRY: Final = 64 << 10  # the smallest entry that the default number of entries allows for
_MINIMUM_ENTRIES: Final = 65_536  # 8 MiB of records: a small pool may have small entries
_MAXIMUM_ENTRIES: Final = 4_194_304  # 512 MiB of records, in a pool of 256 GiB or more; --max-entries may give more
_DRAIN_SECONDS: Final = 2.0  # for writes to tiers: a container is killed ten seconds after its first signal


class DepotServer:
    """A depot with its sockets. `run` serves until `stop` or SIGTERM, then calls `close`."""

    def __init__(self, config: ServerConfig, further_settings: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Bind the sockets and open the pool; `further_settings`, the process's own, are only shown to operators.

        Raises:
            ConfigError: the settings are invalid.
            DepotBusy: another server has this directory.
            PoolError: the pool's files cannot be created.
        """
        self.config = config
        self.further_settings = further_settings
        self.epoch = secrets.randbits(62) | 1
        self.version = version("kvdepot")  # slow: importlib reads it from a file
        self.started_at = time.monotonic()
        self._stopping_at: float | None = None
        self._stopped_by = ""  # the name of a signal
        self.folder = RunFolder(config.directory, Access.of_group(config.socket_group))
        with contextlib.ExitStack() as undo:  # if the start fails, close and remove everything
            undo.callback(self.folder.close)
            self._files = self._open_files()
            undo.callback(self._files.close, remove=False)
            self.depot = self._make_depot()
            undo.callback(self.depot.close)
            self._waker = Waker()
            undo.callback(self._waker.close)
            self.opener = TierOpener(self._files.pool_fd, self._files.size_bytes, self._waker.wake)
            self.depot.operations[m.Hello] = self._hello
            self.sockets = self._open_sockets(undo)
            movers = self.depot.state.movers = self._make_movers(self.sockets.sessions)
            undo.callback(movers.close)
            self.depot.state.opener = self.opener
            if config.tiers or config.peer_token:
                self.depot.state.tiering = self.make_tiering(self.opener.open_all(config.tiers))
            extents = self.depot.index.extents
            self._results = ThreadResults(self._files, extents, self.opener, self._waker, str(config.pool_path))
            self.restoring = self._make_restoring()
            self.loop = Loop(self.sockets, self.depot, movers, self._results, self.restoring, self._files)
            undo.pop_all()

    def _open_files(self) -> PoolFiles:
        config = self.config
        size = resolve_pool_size(config)
        entries = config.max_entries or min(max(size // _BYTES_PER_ENTRY, _MINIMUM_ENTRIES), _MAXIMUM_ENTRIES)
        server = f"the depot of --dir {config.directory.absolute()} (pid {os.getpid()})"
        return open_pool(config.pool_path, size, entries, server=server, fresh=config.fresh)

    def _make_depot(self) -> Depot:
        config, files = self.config, self._files
        size = files.size_bytes
        quotas = QuotaTable(size, config.quotas)
        make_room(self.folder.control)  # no living depot uses it, as the lock is ours
        ready = allocate_first(files.pool_fd, size)
        index = ChunkIndex(ExtentAllocator(size, ready), files.table, config.policy, quotas)
        return Depot(
            index,
            epoch=self.epoch,
            lease_seconds=config.lease_seconds,
            clock=time.monotonic,
            verify=m.Verify(config.verify),
            save_names=files.names.add,
            config=config,
            files=files,
            features=installed_features(name for names in config.without for name in names.split(",")),
        )

    def _open_sockets(self, undo: contextlib.ExitStack) -> Sockets:
        depot = self.depot

        def end_session(session: Session) -> None:
            connections.close_owner(session.token)  # first, so that no request follows the end of its contexts
            depot.end_session(session.number)

        sessions = SessionTable(
            welcome=self._welcome,
            on_end=end_session,
            on_death=depot.end_process,
            is_awaited=depot.quarantine.is_awaited,
            is_mapping=lambda writer: is_locked(self._files.pool_fd, writer.start_time),
            epoch=self.epoch,
            counters=depot.counters,
        )
        undo.callback(sessions.close)
        self.requests = Requests(depot, sessions, partial(depot.operate, self))
        connections = ConnectionTable(
            self.folder.control,
            self.folder.access,
            is_owner=sessions.by_token.__contains__,
            end_owner=sessions.end,
            open_session=sessions.open,
            handle=self.requests.serve,
        )
        undo.callback(connections.close)
        self.folder.keep(self.folder.control, connections.listen_again)
        return Sockets(self.folder, connections, sessions)

    def _make_movers(self, sessions: SessionTable) -> MoverTable:
        return MoverTable(
            self._files.pool_fd,
            self._files.size_bytes,
            self.depot.state.timers,
            hand_over=sessions.hand_over,
            on_dead=self.depot.end_mover,
            start_seconds=self.config.mover_start_seconds,
            move_seconds=self.config.move_seconds,
        )

    def make_tiering(self, queues: list[TierQueue]) -> Tiering:
        """Return the mover of entries between the pool and tiers."""
        config, depot = self.config, self.depot
        settings = TieringSettings(
            config.demotion,
            config.demotion_least_tokens,
            config.promotion_seconds,
            config.promotion_least_tokens,
        )
        return Tiering(
            depot.index,
            queues,
            settings,
            names_of=depot.labels.names.__getitem__,
            end_store=depot.stores.end_one_above_quota,
            other_splits=depot.contexts.other_splits,
            on_corrupt=depot.remove_corrupt,
            timers=depot.state.timers,
            clock=time.monotonic,
        )

    def _make_restoring(self) -> Restoring | None:
        if self._files.is_new:
            return None
        return Restoring(
            self.depot,
            self._files.names.found,
            self.sockets.sessions.await_death,
            lambda: self._stopping_at is not None,
        )

    def _hello(self, _request: m.Hello) -> m.HelloReply:
        return m.HelloReply(self.epoch, m.PROTOCOL_VERSION, self.version, os.getpid())

    def run(self, on_ready: Callable[[], None] | None = None) -> None:
        """Serve until told to stop."""
        try:
            self._files.take_place()
            self._results.start()
            logger.info(
                "serving %s with a pool of %s in %s (epoch %d)",
                self.config.directory,
                format_size(self._files.size_bytes),
                self.config.pool_path,
                self.epoch,
            )
            if on_ready is not None:
                on_ready()
            self.loop.run(self._is_over)
            if self._stopped_by:
                logger.info("stopping on %s", self._stopped_by)
        finally:
            self.close()

    def stop(self) -> None:
        """Tell the loop to end: decline new stores, finish stores under way, and write them to the tiers.

        Any thread or signal handler may call this.
        """
        if self._stopping_at is None:
            self._stopping_at = time.monotonic() + _DRAIN_SECONDS
            self.depot.state.accepts_stores = False
            if self.depot.state.tiering is not None:
                self.depot.state.tiering.gather(waits=False)
            self.loop.end()
        self._waker.wake()

    def stop_on_signals(self) -> None:
        """Stop on SIGTERM, SIGINT, and SIGHUP unless it is ignored (nohup). Call this from the main thread."""

        def stop(number: int, _frame: object) -> None:
            self._stopped_by = signal.Signals(number).name  # logged by the loop, as a handler may interrupt a log line
            self.stop()

        # Without SIGHUP, a terminal that closes would end the depot without a word in its log.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, stop)

    def _is_over(self) -> bool:
        has_time = self._stopping_at is None or time.monotonic() < self._stopping_at
        tiering = self.depot.state.tiering
        is_writing = bool(self.depot.stores.tickets) or (tiering is not None and tiering.num_unwritten > 0)
        return not is_writing or not has_time

    def close(self) -> None:
        """Close sockets and files. Remove the pool if it is ephemeral; otherwise it stays for the next server."""
        state = self.depot.state
        if state.movers is not None:
            state.movers.close()  # first: they write to the pool until they are dead
        self.sockets.connections.close()
        self.sockets.sessions.close()
        if state.tiering is not None:
            state.tiering.close(_DRAIN_SECONDS)
        self.depot.close()
        is_removed = self.config.ephemeral or bool(self._files.unnamed)
        self._files.close(remove=is_removed)
        self._waker.close()
        self.folder.close()  # last: the next server of this directory may start now
        if is_removed:
            logger.info("stopped")
        else:
            path, size = self.config.pool_path, format_size(state.index.extents.ready_bytes)
            logger.info("stopped; %s keeps the cache, %s: 'kvdepot pools --remove %s' frees that", path, size, path)

    def _welcome(self, token: bytes, writer: Writer) -> tuple[frames.SessionOpened, list[int]]:
        files = self._files
        opened = frames.SessionOpened(
            self.epoch, token, files.size_bytes, table_size_bytes(files.table.num_records), self.version
        )
        pool_fd = os.dup(files.pool_fd) if writer.pid else open_with_lock(files.pool_fd, writer.start_time)
        try:
            return opened, [pool_fd, os.dup(files.table_fd)]
        except OSError:
            os.close(pool_fd)
            raise
