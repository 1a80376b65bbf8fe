"""A tier in this process's memory, `memory://?capacity=SIZE`: for tests, and as the smallest example of a tier."""

import threading
from collections import OrderedDict
from collections.abc import Container, Iterator, Sequence

from kvdepot.config import parse_size
from kvdepot.tiers.base import EVICTED, Extents, Tier, TierPool, TierUsage
from kvdepot.tiers.keys import generation_of, has_names
from kvdepot.tiers.url import TierUrl


class MemoryTier(Tier):
    """Keeps copies of entries, and evicts the least recently used."""

    def __init__(self, pool: TierPool, capacity_bytes: int) -> None:
        self._pool = pool
        self._capacity_bytes = capacity_bytes
        self._used_bytes = 0
        self._num_evicted = 0
        # Trailer and payload, the least recently used first.
        self._entries = OrderedDict[bytes, tuple[bytes, bytes]]()
        self._lock = threading.Lock()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Tier`."""
        return [key in self._entries for key in keys]

    def touch(self, keys: Sequence[bytes], sizes: Sequence[int]) -> list[bool]:
        """See `Tier`."""
        with self._lock:
            for key in reversed(keys):  # so that the first chunk is the most recently used
                self._use(key)
        return self.contains(keys)

    def write(self, keys: Sequence[bytes], trailers: Sequence[bytes], extents: Extents) -> list[bool]:
        """See `Tier`."""
        for key, trailer, (offset, num_bytes) in zip(keys, trailers, extents, strict=True):
            payload = bytes(self._pool.view[offset : offset + num_bytes])
            with self._lock:
                self._forget(key)
                self._entries[key] = trailer, payload
                self._used_bytes += len(payload)
                while self._used_bytes > self._capacity_bytes:
                    self._forget(next(iter(self._entries)))
                    self._num_evicted += 1
        return self.contains(keys)

    def read(self, keys: Sequence[bytes], extents: Extents) -> list[bytes | None]:
        """See `Tier`."""
        trailers: list[bytes | None] = []
        for key, (offset, num_bytes) in zip(keys, extents, strict=True):
            with self._lock:
                trailer, payload = self._entries.get(key, (None, b""))
                self._use(key)
            trailers.append(trailer)
            self._pool.view[offset : offset + min(num_bytes, len(payload))] = payload[:num_bytes]
        return trailers

    def remove(self, keys: Sequence[bytes]) -> None:
        """See `Tier`."""
        with self._lock:
            for key in keys:
                self._forget(key)

    def clear(self, tenant: bytes | None, model: bytes | None) -> Iterator[int]:
        """See `Tier`."""
        with self._lock:
            wanted = [key for key in self._entries if has_names(key, tenant, model)]
            for key in wanted:
                self._forget(key)
        yield len(wanted)

    def outdate(self, generations: Container[bytes]) -> None:
        """See `Tier`."""
        with self._lock:
            for key in [key for key in reversed(self._entries) if generation_of(key) in generations]:
                self._entries.move_to_end(key, last=False)

    def _use(self, key: bytes) -> None:
        if key in self._entries:
            self._entries.move_to_end(key)

    def _forget(self, key: bytes) -> None:
        _, payload = self._entries.pop(key, (b"", b""))
        self._used_bytes -= len(payload)

    def probe(self) -> None:
        """See `Tier`."""

    def usage(self) -> TierUsage:
        """See `Tier`."""
        return TierUsage(len(self._entries), self._used_bytes, self._capacity_bytes, {EVICTED: self._num_evicted})

    def close(self) -> None:
        """See `Tier`."""
        with self._lock:
            self._entries.clear()
            self._used_bytes = 0


def open_tier(url: TierUrl, pool: TierPool) -> MemoryTier:
    """Open `memory://?capacity=SIZE` (default 1 GiB)."""
    return MemoryTier(pool, url.take_size("capacity", parse_size("1GiB")))
