"""Mooncake Store as a tier, `mooncake://MASTER:PORT?segment=4GiB&...`: memory of many nodes, over TCP or RDMA.

The SDK lives in a child process (`mooncake_child`); here is who starts it, asks it, and kills it. A **lane** is a
socket of the child that carries one request at a time, so that calls of several threads run side by side; one is kept
for `probe`. The master is looked for by TCP before a child is started, and by every probe: with a master that does
not answer, the SDK takes seconds for a call and more than a minute to begin.

What ends a child: a call that takes longer than `timeout`, a lane that breaks, `close`. A call whose child is lost
returns, by an exception, only when the kernel says that the child is dead: then nothing touches its extents any more,
neither the process nor a network adapter on its behalf. The next probe starts another child. The cluster's memory that
lay in the child is lost with it.

A miss are also: an entry on a node that has died (its reads fail until the master forgets the node, 10 s by default),
and everything after a master was started anew without high availability. Those say something about entries, not about
the cluster, and so they are no errors; a node that makes calls slow opens the breaker by the queue's deadline.
"""

import contextlib
import importlib.util
import logging
import os
import re
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec

from kvdepot.config import parse_size
from kvdepot.errors import ConfigError, KVDepotError
from kvdepot.tiers.base import Extents, TierPool, TierUsage
from kvdepot.tiers.keys import KEY_BYTES
from kvdepot.tiers.mooncake import child as m
from kvdepot.tiers.url import TierUrl

logger = logging.getLogger(__name__)

DEFAULT_PORT: Final = 50051
_LOOK_SECONDS: Final = 0.5  # for the master, by TCP
_OPEN_SECONDS: Final = 0.8  # what `open_tier` waits for the child
_WAIT_SECONDS: Final = 1.0  # what a call waits for a child that is starting
_LEAVE_SECONDS: Final = 1.5  # what a child may take to leave the cluster
_DIE_SECONDS: Final = 1.0

T = TypeVar("T")


class MooncakeUnavailable(KVDepotError):
    """The cluster, its master or our child process does not answer."""


@dataclass(frozen=True, slots=True)
class MooncakeOptions:
    """What the URL says."""

    masters: tuple[tuple[str, int], ...]  # or those of etcd, which know the master
    ha: str  # "" or "etcd"
    prefix: str  # of all names
    local: str  # under which others reach this node; "": the address from which the master is reached
    metadata: str
    segment_bytes: int  # given to the cluster
    buffer_bytes: int  # of the SDK's own; our bytes never go through it
    protocol: str
    device: str
    replicas: int
    timeout_seconds: float  # beyond it a call's child is killed
    start_seconds: float
    num_threads: int  # calls at a time, beside probes

    @property
    def master(self) -> str:
        """The master as the SDK wants it."""
        text = ";".join(f"{host}:{port}" for host, port in self.masters)
        return f"{self.ha}://{text}" if self.ha else text

    def setup(self, pool_bytes: int, reached_from: str) -> m.Setup:
        """Return what the child has to know; `reached_from` is our address, as the master sees it."""
        return m.Setup(
            pool_bytes=pool_bytes,
            prefix=self.prefix,
            local=self.local or (f"[{reached_from}]" if ":" in reached_from else reached_from),
            metadata=self.metadata,
            segment_bytes=self.segment_bytes,
            buffer_bytes=self.buffer_bytes,
            protocol=self.protocol,
            device=self.device,
            master=self.master,
            replicas=self.replicas,
        )

    def look_for_master(self) -> str:
        """Return the address from which it is reached.

        Raises:
            MooncakeUnavailable: it is not.
        """
        errors: list[str] = []
        for address in self.masters:
            try:
                with socket.create_connection(address, _LOOK_SECONDS) as connection:
                    return str(connection.getsockname()[0])
            except OSError as error:
                errors.append(f"{address[0]}:{address[1]}: {error}")
        raise MooncakeUnavailable(f"no master at {', '.join(errors)}")


class _Child:
    """One run of the child process, from the look for the master until it is dead. Its thread lives exactly as long.

    That is more than tidy: the kernel kills the child when the *thread* ends that started it.
    """

    def __init__(self, options: MooncakeOptions, pool: TierPool) -> None:
        self.pid = 0  # while it lives
        self.why = "the child process is still starting"  # it cannot be asked; "" if it can
        self.is_final = False  # why will not change
        self.settled = threading.Event()  # it can be asked, or it is dead
        self.dead = threading.Event()  # no such process
        self._options = options
        self._pool = pool
        self._is_leaving = False
        self._process: subprocess.Popen[bytes] | None = None
        self._changed = threading.Condition()
        self._lanes: list[socket.socket] = []
        self._idle: list[socket.socket] = []
        self._idle_probe: list[socket.socket] = []
        threading.Thread(target=self._keep, name="kvdepot-mooncake", daemon=True).start()

    def ask(self, request: m.Request, expected: type[T], *, is_probe: bool = False) -> T:
        """Have one request served.

        Raises:
            MooncakeUnavailable: the child is starting, or lost and dead, or says that it could not.
        """
        idle = self._idle_probe if is_probe else self._idle
        self.settled.wait(_WAIT_SECONDS)
        with self._changed:
            self._changed.wait_for(lambda: idle or self.why, self._options.timeout_seconds)
            if self.why or not idle:
                raise MooncakeUnavailable(self.why or "all lanes are in use")
            lane = idle.pop()
        try:
            reply = _exchange(lane, request, self._options.timeout_seconds)
        except (OSError, msgspec.MsgspecError) as error:
            self._lose(f"the child process was lost: {error}")
            self.dead.wait()
            raise MooncakeUnavailable(self.why) from error
        finally:
            with self._changed:
                idle.append(lane)
                self._close_lanes()
                self._changed.notify()
        if isinstance(reply, expected):
            return reply
        raise MooncakeUnavailable(
            reply.text if isinstance(reply, m.Failed) else f"an answer that does not fit: {reply}"
        )

    def leave(self) -> None:
        """Have it leave the cluster and end, or kill it. Bounded."""
        with self._changed:
            self._is_leaving = True
            self.why = self.why or "the tier is closed"
            for lane in self._lanes:
                with contextlib.suppress(OSError):
                    lane.shutdown(socket.SHUT_WR)  # the answers that are under way still arrive
            self._changed.notify_all()
        if not self.dead.wait(_LEAVE_SECONDS):
            self._kill()
            self.dead.wait(_DIE_SECONDS)

    def _lose(self, why: str) -> None:
        with self._changed:
            self.why = self.why or why
            self._changed.notify_all()
        if not (self._is_leaving and self.dead.wait(_LEAVE_SECONDS)):
            self._kill()

    def _kill(self) -> None:
        with self._changed:
            if self._process is not None:
                self._process.kill()

    def _keep(self) -> None:
        try:
            self._start()
            logger.info("mooncake: child process %s has joined the cluster of %s", self.pid, self._options.master)
        except Exception as error:
            if not isinstance(error, MooncakeUnavailable):
                logger.exception("mooncake: the child process could not be started")
            self.why = f"{error}"
            self._kill()
        has_joined = not self.why
        self.settled.set()
        if self._process is not None:
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        with self._changed:
            self.why = self.why or "the child process has ended"
            if self._process is not None:
                status = self._process.wait()  # from here on its pid may be another's
                if has_joined and not self._is_leaving:
                    logger.error("mooncake: child process %s ended with %s: %s", self.pid, status, self.why)
            self._process, self.pid = None, 0
            self.dead.set()
            self._close_lanes()
            self._changed.notify_all()

    def _start(self) -> None:
        reached_from = self._options.look_for_master()
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(self._options.num_threads + 1)]
        lanes = [ours for ours, _ in pairs]
        try:
            fds = [self._pool.fd, *(theirs.fileno() for _, theirs in pairs)]
            command = [sys.executable, "-P", "-m", m.__name__, str(os.getpid()), *map(str, fds)]
            with self._changed:
                self._lanes += lanes
                self._idle_probe += lanes[:1]
                self._idle += lanes[1:]
                if self._is_leaving:
                    raise MooncakeUnavailable("the tier is closed")
                self._process = subprocess.Popen(
                    command, pass_fds=fds, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
                )
                self.pid = self._process.pid
        finally:
            for _, theirs in pairs:
                theirs.close()
        try:
            setup = self._options.setup(self._pool.view.nbytes, reached_from)
            reply = _exchange(lanes[0], setup, self._options.start_seconds)
        except (OSError, msgspec.MsgspecError) as error:
            raise MooncakeUnavailable(f"the child process did not start: {error}") from error
        if isinstance(reply, m.Failed):
            self.is_final = reply.is_final
            raise MooncakeUnavailable(reply.text)
        with self._changed:
            self.why = "the tier is closed" if self._is_leaving else ""

    def _close_lanes(self) -> None:
        """After its death close the lanes that nobody uses."""
        if self.dead.is_set():
            for lane in (*self._idle, *self._idle_probe):
                lane.close()


class MooncakeTier:
    """Entries in a Mooncake cluster. See `Tier`."""

    batch_entries = 8

    def __init__(self, options: MooncakeOptions, pool: TierPool) -> None:
        self._options = options
        self._pool = pool
        self._counters: Counter[str] = Counter(corrupt=0)
        self._lock = threading.Lock()
        self._is_closed = False
        self._child = self._new_child()

    @property
    def writer_pid(self) -> int:
        """The child's pid; changes when it is started again, and is 0 while there is none."""
        return self._child.pid

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Tier`. Asks the master alone: an entry of a node that has just died is still said to be there."""
        outcomes: list[m.Outcome] = []
        for first in range(0, len(keys), m.KEYS_A_MESSAGE):
            outcomes += self._outcomes(m.Contains(list(keys[first : first + m.KEYS_A_MESSAGE])))
        return [outcome is m.Outcome.HERE for outcome in outcomes]

    def write(self, keys: Sequence[bytes], extents: Extents) -> list[bool]:
        """See `Tier`. An entry that finds no room, or whose node does not answer, is not written."""
        return self._move(m.Write, keys, extents)

    def read(self, keys: Sequence[bytes], extents: Extents) -> list[bool]:
        """See `Tier`."""
        return self._move(m.Read, keys, extents)

    def clear(self, tenant: bytes | None, model: bytes | None) -> Iterator[int]:
        """See `Tier`. For all nodes that use the same prefix."""
        yield self._child.ask(m.Clear(tenant, model), m.Cleared).count

    def probe(self) -> None:
        """See `Tier`. Starts the child if there is none."""
        with self._lock:
            if self._child.dead.is_set() and not self._is_closed:
                self._child = self._new_child()
            child = self._child
        if not child.why:
            self._options.look_for_master()
        child.ask(m.Contains([bytes(KEY_BYTES)]), m.Outcomes, is_probe=True)

    def wait(self, timeout_seconds: float) -> None:
        """Wait until the first child has joined the cluster or has failed.

        Raises:
            ConfigError: it cannot ever.
        """
        self._child.settled.wait(timeout_seconds)
        if self._child.is_final:
            raise ConfigError(f"Mooncake's SDK cannot be used: {self._child.why}")
        if self._child.why:
            logger.warning("mooncake: goes on without the cluster of %s: %s", self._options.master, self._child.why)

    def usage(self) -> TierUsage:
        """See `Tier`. What the cluster holds, only its master knows."""
        with self._lock:
            return TierUsage(counters=dict(self._counters))

    def close(self) -> None:
        """See `Tier`. The entries that lie in this node's part of the cluster are gone with it."""
        with self._lock:
            self._is_closed = True
        self._child.leave()

    def _new_child(self) -> _Child:
        self._counters["child_starts"] += 1
        return _Child(self._options, self._pool)

    def _move(self, kind: type[m.Write] | type[m.Read], keys: Sequence[bytes], extents: Extents) -> list[bool]:
        outcomes: list[m.Outcome] = []
        for first in range(0, len(keys), m.KEYS_A_MESSAGE):
            last = first + m.KEYS_A_MESSAGE
            outcomes += self._outcomes(kind(list(keys[first:last]), list(extents[first:last])))
        return [outcome is m.Outcome.HERE for outcome in outcomes]

    def _outcomes(self, request: m.Write | m.Read | m.Contains) -> list[m.Outcome]:
        outcomes = self._child.ask(request, m.Outcomes).values
        if len(outcomes) != len(request.keys):
            raise MooncakeUnavailable(f"{len(outcomes)} outcomes for {len(request.keys)} keys")
        counts = Counter(_COUNTERS[outcome] for outcome in outcomes if outcome in _COUNTERS)
        if counts:
            with self._lock:
                self._counters.update(counts)
        return outcomes


def open_tier(url: TierUrl, pool: TierPool) -> MooncakeTier:
    """Open `mooncake://MASTER:PORT`; the options are in `docs/mooncake.md`."""
    options = parse_options(url)
    if importlib.util.find_spec("mooncake") is None:
        raise ConfigError(
            f"--tier {url.name} needs Mooncake's SDK: pip install mooncake-transfer-engine-non-cuda, or the variant for"
            " your accelerator (mooncake-transfer-engine for CUDA)"
        )
    url.check_done()  # before anything is started
    tier = MooncakeTier(options, pool)
    try:
        tier.wait(_OPEN_SECONDS)
    except ConfigError:
        tier.close()
        raise
    return tier


def parse_options(url: TierUrl) -> MooncakeOptions:
    """Take the options out of a URL.

    Raises:
        ConfigError: they cannot work.
    """
    ha, prefix = url.take("ha", ""), url.take("prefix", "kvdepot")
    if ha not in ("", "etcd"):
        raise ConfigError(f"--tier {url.name}: ha={ha}: only etcd, or leave it out")
    if not re.fullmatch("[A-Za-z0-9_]{1,64}", prefix):
        raise ConfigError(f"--tier {url.name}: prefix={prefix}: letters, digits and _, 64 at most")
    hosts = url.location.partition("://")[2].partition("/")[0].split(",")
    if len(hosts) > 1 and not ha:
        raise ConfigError(f"--tier {url.name}: several hosts are those of etcd: add ha=etcd")
    default_port = 2379 if ha else DEFAULT_PORT
    return MooncakeOptions(
        masters=tuple(_host_and_port(host, default_port, url) for host in hosts),
        ha=ha,
        prefix=prefix,
        local=url.take("local", ""),
        metadata=url.take("metadata", "P2PHANDSHAKE"),
        segment_bytes=url.take_size("segment", parse_size("4GiB")),
        buffer_bytes=url.take_size("buffer", parse_size("16MiB")),
        protocol=url.take("protocol", "tcp"),
        device=url.take("device", ""),
        replicas=int(url.take_number("replicas", 1, 1)),
        timeout_seconds=url.take_number("timeout", 10.0, 0.1),
        start_seconds=url.take_number("start", 60.0, 0.1),
        num_threads=url.num_threads,
    )


def _host_and_port(text: str, default_port: int, url: TierUrl) -> tuple[str, int]:
    match = re.fullmatch(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::(\d{1,5}))?", text)
    if match is None:
        raise ConfigError(f"--tier {url.name}: write mooncake://HOST:PORT, the master's")
    return match[1].strip("[]"), int(match[2] or default_port)


def _exchange(lane: socket.socket, request: m.Request, timeout_seconds: float) -> m.Reply:
    lane.settimeout(timeout_seconds)
    lane.send(msgspec.msgpack.encode(request))
    try:
        message = lane.recv(m.MESSAGE_BYTES)
    except TimeoutError as error:
        raise TimeoutError(f"no answer within {timeout_seconds:g} s") from error
    if not message:
        raise ConnectionError("it has ended")
    return _REPLY.decode(message)


_REPLY: Final = msgspec.msgpack.Decoder[m.Reply](m.Reply)
_COUNTERS: Final = {
    m.Outcome.CORRUPT: "corrupt", m.Outcome.NO_SPACE: "no_space", m.Outcome.TRANSFER_FAILED: "transfer_failed"
}  # fmt: skip
