"""Reads entries from the pool of a peer, a depot on another node. The depot drives this as it drives a tier.

So the depot verifies each entry by its trailer, waits for a peer no longer than a lookup may, joins a read under way,
reads nothing that its engine computes sooner, and leaves a peer alone that fails (`kvdepot.tiers.breaker`).

The peer keeps an entry pinned until `Done`, until the connection closes, or for a limited time. If either side dies,
the other one's call fails at once. A peer that hangs costs one call its `timeout`.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Final

from kvdepot.features.peers import protocol as p
from kvdepot.tiers.base import Extents, Tier, TierPool, TierUsage

# A failed exchange is followed by this pause: otherwise a peer that answers questions, but not reads, would cost every
# lookup its wait, as the breaker suspends only for calls that fail in a row.
_PAUSE_SECONDS: Final = 2.0
_DISTRUST_SECONDS: Final = 60.0  # after damaged bytes: a broken memory or network is not mended sooner


class PeerTier(Tier):
    """The pool of a peer. It is only read. See `Tier`.

    Args:
        address: host and port of the peer's listener.
        token: both sides prove that they know it.
        pool: this depot's pool.
        timeout_seconds: the limit of a call.
    """

    batch_entries = 16
    wants_places = True

    def __init__(self, address: tuple[str, int], token: bytes, pool: TierPool, timeout_seconds: float) -> None:
        self._address = address
        self._token = token
        self._pool = pool
        self._timeout_seconds = timeout_seconds
        self._idle: list[p.Stream] = []
        self._lock = threading.Lock()
        self._is_closed = False
        self._alone_until = 0.0

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Tier`."""
        with self._connection() as peer:
            peer.send_frame(p.Ask(list(keys)))
            reply = p.decode_from_peer(peer.receive_frame())
            if not isinstance(reply, p.Have) or len(reply.there) != len(keys):
                raise p.PeerError("the peer did not answer the question")
        return [there == 1 for there in reply.there]

    def read(self, keys: Sequence[bytes], extents: Extents) -> list[bytes | None]:
        """See `Tier`."""
        with self._connection() as peer:
            peer.send_frame(p.Read(list(keys)))
            reply = p.decode_from_peer(peer.receive_frame())
            if not isinstance(reply, p.Coming) or not len(reply.sizes) == len(reply.trailers) == len(keys):
                raise p.PeerError("the peer did not announce the entries")
            places = [place for place, size in zip(extents, reply.sizes, strict=True) if size]
            if [num_bytes for _, num_bytes in places] != [size for size in reply.sizes if size]:
                raise p.PeerError("the peer's entries have other sizes")
            peer.receive_into([self._pool.view[offset : offset + num_bytes] for offset, num_bytes in places])
            peer.send_frame(p.Done())
        return [trailer if size else None for size, trailer in zip(reply.sizes, reply.trailers, strict=True)]

    def write(self, keys: Sequence[bytes], trailers: Sequence[bytes], extents: Extents) -> list[bool]:
        """See `Tier`. A depot writes nothing into the pool of another."""
        del trailers, extents
        return [False] * len(keys)

    def remove(self, keys: Sequence[bytes]) -> None:
        """See `Tier`. Called for damaged entries: leaves the peer alone for a while, as it keeps its entries."""
        del keys
        self._leave_alone(_DISTRUST_SECONDS)

    def clear(self, tenant: bytes | None, model: bytes | None) -> Iterator[int]:
        """See `Tier`. The entries belong to the peer."""
        del tenant, model
        yield 0

    def probe(self) -> None:
        """See `Tier`."""
        self.contains([])

    def usage(self) -> TierUsage:
        """See `Tier`."""
        return TierUsage()

    def close(self) -> None:
        """See `Tier`."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for stream in idle:
            stream.close()

    @contextlib.contextmanager
    def _connection(self) -> Generator[p.Stream]:
        """Lend a connection for one exchange. Close it if that fails, as later answers would be taken for others."""
        now = time.monotonic()
        if now < self._alone_until:
            raise p.PeerError("the peer failed, or sent damaged entries: it is left alone for a while")
        peer = None
        try:
            peer = self._idle_connection() or self._connect(now + self._timeout_seconds)
            peer.until = now + self._timeout_seconds
            yield peer
        except BaseException:
            self._leave_alone(_PAUSE_SECONDS)
            if peer is not None:
                peer.close()
            raise
        with self._lock:
            if not self._is_closed:
                self._idle.append(peer)
                return
        peer.close()

    def _leave_alone(self, seconds: float) -> None:
        self._alone_until = max(self._alone_until, time.monotonic() + seconds)

    def _idle_connection(self) -> p.Stream | None:
        while True:
            with self._lock:
                if not self._idle:
                    return None
                peer = self._idle.pop()
            if peer.is_quiet:
                return peer
            peer.close()  # the peer has ended since

    def _connect(self, until: float) -> p.Stream:
        connection = socket.create_connection(self._address, self._timeout_seconds)
        connection.settimeout(None)  # `Stream` has its own deadlines
        peer = p.Stream(connection)
        peer.until = until
        try:
            peer.greet_as_reader(self._token)
        except BaseException:
            peer.close()
            raise
        return peer
