"""The child process with Mooncake's SDK: `python -m kvdepot_mooncake.child`.

The SDK can block the interpreter for minutes and crash it, so the depot's process never loads it. This process maps the
pool, registers it once, and moves bytes directly between the pool's extents and the cluster. Messages contain trailers
and refer to extents. The process inherits the descriptors of the pool and of some sockets, the **channels**. A channel
carries one request at a time, served by its own thread. The first channel starts with `Join`. Calls of the SDK release
the interpreter, so the channels run concurrently.

An object of the cluster is a payload and its trailer, written and read as two parts of one object.

The process ends when any channel closes. It leaves the cluster properly if that takes at most a second. If the depot
dies, the kernel kills the process (`PR_SET_PDEATHSIG`), even inside a hung call. It ignores signals that a terminal or
a service manager sends to the whole group.
"""

import ctypes
import importlib
import mmap
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from kvdepot.processes import be_a_child, ignore_signals
from kvdepot.tiers.keys import NAME_HASH_BYTES, PLACE_BYTES
from kvdepot.tiers.trailer import TRAILER_BYTES
from kvdepot_mooncake import messages as m

_TRAILER_SLOT_BYTES: Final = 128  # a trailer, and as much as two lines of the cache
# Seconds before retries of a put: the master evicts in the background within some milliseconds.
_FULL_PAUSES: Final = (0.01, 0.02)
_LEAVE_SECONDS: Final = 0.5  # for calls under way, when the depot closes the connection

# Codes of the SDK (mooncake-store/include/types.h).
_OK: Final = 0
_NO_SPACE: Final = -200
_INVALID_SIZE: Final = -600
_TRANSFER_FAILED: Final = -800
_MISSES: Final = frozenset({-700, -701, -702, -703, -704, -705, -706})  # incomplete, missing, leased
_NAMES: Final = {-1: "internal error", -601: "unknown client", -900: "the master does not answer"}


class _ClusterAway(Exception):
    """The cluster does not work now."""


def object_name(prefix: str, key: bytes) -> str:
    """Return the name of an entry in the cluster, which contains the hashes of tenant and model."""
    model, place, chunk = NAME_HASH_BYTES, 2 * NAME_HASH_BYTES, 2 * NAME_HASH_BYTES + PLACE_BYTES
    return "/".join((prefix, *(part.hex() for part in (key[:model], key[model:place], key[place:chunk], key[chunk:]))))


def pattern_of(prefix: str, tenant: bytes | None, model: bytes | None) -> str:
    """Return a regular expression for the object names with these hashes (None: any)."""
    if model is None:
        return f"^{prefix}/" + ("" if tenant is None else f"{tenant.hex()}/")
    return f"^{prefix}/{'[0-9a-f]*' if tenant is None else tenant.hex()}/{model.hex()}/"


class Node:
    """This process as a member of the cluster.

    Raises:
        ImportError: the SDK or a library that it needs is not installed.
        _ClusterAway: the cluster cannot be joined.
    """

    def __init__(self, setup: m.Join, pool_fd: int, num_channels: int) -> None:
        sdk: Any = importlib.import_module("mooncake.store")
        self._prefix = setup.prefix
        self._pool = mmap.mmap(pool_fd, setup.pool_bytes)
        self._view = memoryview(self._pool)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._pool))
        self._trailers = memoryview(mmap.mmap(-1, num_channels * m.KEYS_A_MESSAGE * _TRAILER_SLOT_BYTES))
        self._trailers_base = ctypes.addressof(ctypes.c_char.from_buffer(self._trailers))
        self._config: Any = sdk.ReplicateConfig()
        self._config.replica_num = setup.replicas
        self._store: Any = sdk.MooncakeDistributedStore()
        code = self._store.setup(
            setup.local,
            setup.metadata,
            setup.segment_bytes,
            setup.buffer_bytes,
            setup.protocol,
            setup.device,
            setup.master,
        )
        _check(code, f"joining the cluster of {setup.master}")
        _check(self._store.register_buffer(self._base, setup.pool_bytes), "registering the pool")
        _check(self._store.register_buffer(self._trailers_base, self._trailers.nbytes), "registering memory")

    def serve(self, request: m.Request, channel: int) -> m.Reply:
        """Serve one request."""
        match request:
            case m.Write(keys, trailers, extents):
                return m.Outcomes(self._write(keys, trailers, extents, channel))
            case m.Read(keys, extents):
                return m.Outcomes(*self._read(keys, extents, channel))
            case m.Contains(keys):
                codes: list[int] = self._store.batch_is_exist([object_name(self._prefix, key) for key in keys])
                known = {0: m.KeyOutcome.MISS, 1: m.KeyOutcome.HERE}
                return m.Outcomes([known[code] if code in known else _outcome(code) for code in codes])
            case m.Remove(keys):
                for key in keys:  # by force, as a read may just have leased them
                    self._store.remove(object_name(self._prefix, key), True)
                return m.Cleared(len(keys))
            case m.RemoveNamed(tenant, model):
                count: int = self._store.remove_by_regex(pattern_of(self._prefix, tenant, model), True)
                _check(min(count, 0), "removing by pattern")
                return m.Cleared(count)
            case m.Join():
                raise _ClusterAway("the process is set up already")

    def leave(self) -> None:
        """Leave the cluster. Other nodes then lose the entries of this node at once, not after the master's timeout."""
        self._store.close()

    def _write(
        self, keys: list[bytes], trailers: list[bytes], extents: list[tuple[int, int]], channel: int
    ) -> list[m.KeyOutcome]:
        pointers, sizes, slots = self._places(keys, extents, channel)
        for slot, trailer in zip(slots, trailers, strict=True):
            slot[:] = trailer
        names = [object_name(self._prefix, key) for key in keys]

        def put(places: Sequence[int]) -> list[int]:
            chosen = ([column[place] for place in places] for column in (names, pointers, sizes))
            return self._store.batch_put_from_multi_buffers(*chosen, self._config)

        codes = put(range(len(keys)))
        for pause in _FULL_PAUSES:
            full = [place for place, code in enumerate(codes) if code == _NO_SPACE]
            if not full:
                break
            time.sleep(pause)
            for place, code in zip(full, put(full), strict=True):
                codes[place] = code
        return [m.KeyOutcome.HERE if code == _OK else _outcome(code) for code in codes]

    def _read(
        self, keys: list[bytes], extents: list[tuple[int, int]], channel: int
    ) -> tuple[list[m.KeyOutcome], list[bytes]]:
        pointers, sizes, slots = self._places(keys, extents, channel)
        names = [object_name(self._prefix, key) for key in keys]
        codes: list[int] = self._store.batch_get_into_multi_buffers(names, pointers, sizes)
        outcomes: list[m.KeyOutcome] = []
        trailers: list[bytes] = []
        for name, size, slot, code in zip(names, map(sum, sizes), slots, codes, strict=True):
            outcome = m.KeyOutcome.HERE if code >= 0 else _outcome(code)
            if code in (_INVALID_SIZE, _TRANSFER_FAILED) and 0 <= self._store.get_size(name) != size:
                outcome = m.KeyOutcome.HERE  # the SDK reports a wrong size like a lost node
            outcomes.append(outcome)
            trailers.append(bytes(slot) if code == size else b"")
        return outcomes, trailers

    def _places(
        self, keys: Sequence[bytes], extents: Sequence[tuple[int, int]], channel: int
    ) -> tuple[list[list[int]], list[list[int]], list[memoryview]]:
        """Return pointers and sizes of the two parts of each object, and the slots of their trailers."""
        if len(keys) != len(extents) or any(offset + size > self._view.nbytes for offset, size in extents):
            raise _ClusterAway("the extents are not in the pool")
        first = channel * m.KEYS_A_MESSAGE * _TRAILER_SLOT_BYTES
        starts = [first + place * _TRAILER_SLOT_BYTES for place in range(len(keys))]
        return (
            [
                [self._base + offset, self._trailers_base + start]
                for (offset, _), start in zip(extents, starts, strict=True)
            ],
            [[size, TRAILER_BYTES] for _, size in extents],
            [self._trailers[start : start + TRAILER_BYTES] for start in starts],
        )


def _outcome(code: int) -> m.KeyOutcome:
    """Return the outcome of a key with an error code of the SDK.

    Raises:
        _ClusterAway: the code does not concern the key: the cluster does not work.
    """
    if code in _MISSES or code == _INVALID_SIZE:
        return m.KeyOutcome.MISS
    if code == _NO_SPACE:
        return m.KeyOutcome.NO_SPACE
    if code == _TRANSFER_FAILED:
        return m.KeyOutcome.TRANSFER_FAILED
    raise _ClusterAway(f"code {code}" + (f" ({_NAMES[code]})" if code in _NAMES else ""))


def _check(code: int, what: str) -> None:
    if code:
        raise _ClusterAway(f"{what} failed: code {code}" + (f" ({_NAMES[code]})" if code in _NAMES else ""))


class _Server:
    """The threads that serve one node."""

    def __init__(self, node: Node, sockets: Sequence[socket.socket]) -> None:
        self._node = node
        self._sockets = sockets
        self._busy = [threading.Lock() for _ in sockets]
        self._ending = threading.Lock()

    def run(self) -> None:
        """Serve until a channel closes. Does not return."""
        for channel in range(1, len(self._sockets)):
            threading.Thread(target=self._guard, args=(self._serve, channel), daemon=True).start()
        self._guard(self._serve, 0)

    def _guard(self, work: Callable[[int], None], channel: int) -> None:
        """Run a thread's work. When it ends, end the process, which without this thread would seem to hang."""
        try:
            work(channel)
        finally:
            os._exit(1)

    def _serve(self, channel: int) -> None:
        decoder = msgspec.msgpack.Decoder(m.Request)
        while message := self._sockets[channel].recv(m.MESSAGE_BYTES):
            with self._busy[channel]:
                try:
                    reply = self._node.serve(decoder.decode(message), channel)
                except Exception as error:
                    reply = m.NodeFailed(f"{error}" if isinstance(error, _ClusterAway) else f"{error!r}")
                self._sockets[channel].send(msgspec.msgpack.encode(reply))
        with self._ending:
            end = time.monotonic() + _LEAVE_SECONDS
            if all(busy.acquire(timeout=max(0.0, end - time.monotonic())) for busy in self._busy):
                self._node.leave()
            os._exit(0)


def main(arguments: Sequence[str]) -> None:
    """Serve one depot: `PARENT_PID POOL_FD CHANNEL_FD...`."""
    parent_pid, pool_fd, *channel_fds = map(int, arguments)
    be_a_child(parent_pid)
    is_quiet = (
        "MC_LOG_LEVEL" not in os.environ
    )  # without a master, the SDK logs a line per second; for a failed put, several
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    sockets = [socket.socket(fileno=fd) for fd in channel_fds]
    message = sockets[0].recv(m.MESSAGE_BYTES)
    if not message:
        return
    try:
        node = Node(msgspec.msgpack.decode(message, type=m.Join), pool_fd, len(sockets))
    except ImportError as error:
        sockets[0].send(msgspec.msgpack.encode(m.NodeFailed(str(error), is_final=True)))
    except _ClusterAway as error:
        sockets[0].send(msgspec.msgpack.encode(m.NodeFailed(str(error))))
    else:
        ignore_signals()  # again, as the SDK installs its own handlers
        if is_quiet:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        sockets[0].send(msgspec.msgpack.encode(m.Joined()))
        _Server(node, sockets).run()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
