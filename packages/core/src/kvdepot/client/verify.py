"""Checks a retrieve after its copy: for entries that were evicted meanwhile, and for checksum mismatches."""

import contextlib
import importlib
import logging
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

from kvdepot.client.session import Channel, Session
from kvdepot.errors import DepotUnavailable
from kvdepot.keys import digest_at
from kvdepot.pool.table import Entry, TableReader
from kvdepot.wire import messages as m

logger = logging.getLogger(__name__)


class Verifier:
    """Computes the checksums of stored entries, and compares retrieved entries with theirs as the depot demands.

    Without xxhash, it computes and compares none.

    Args:
        num_threads: the most threads that compute checksums of a store.
    """

    def __init__(self, num_threads: int = 1) -> None:
        self._checksum = _xxh3_128()
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads - 1, "kvdepot-checksum") if num_threads > 1 else None

    def warn_if_impossible(self, session: Session) -> None:
        """Log a warning if the depot wants checksums and xxhash is missing."""
        if session.verify is not m.Verify.OFF and self._checksum is None:
            logger.warning(
                "the depot verifies checksums, but xxhash is missing, so this worker has none: pip install xxhash"
            )

    def needs_all_checksums(self, session: Session, *, is_store: bool) -> bool:
        """Return whether every extent of a store, or of a retrieve, needs its checksum in this session."""
        wanted = session.verify is not m.Verify.OFF if is_store else session.verify is m.Verify.ALL
        return wanted and self._checksum is not None

    def checksums(self, session: Session, extents: bytes) -> bytes:
        """Return the packed checksums of newly filled extents; empty if stores carry none."""
        if session.verify is m.Verify.OFF or self._checksum is None:
            return b""
        assert session.mapping is not None
        pool, checksum = memoryview(session.mapping.pool), self._checksum
        bounds = [(offset, offset + size) for *_, offset, size in m.EXTENT.iter_unpack(extents)]

        def packed(first: int, last: int) -> bytes:
            return b"".join([checksum(pool[start:stop]) for start, stop in bounds[first:last]])

        if self._threads is None:
            return packed(0, len(bounds))
        cuts = [len(bounds) * thread // self._num_threads for thread in range(self._num_threads + 1)]
        others = [self._threads.submit(packed, *cut) for cut in pairwise(cuts[1:])]
        return b"".join([packed(0, cuts[1]), *(other.result() for other in others)])

    def close(self) -> None:
        """End the threads. Idempotent."""
        if self._threads is not None:
            self._threads.shutdown()

    def valid_chunks(self, channel: Channel, plan: m.RetrievePlan, digests: bytes, checksums: bytes | None) -> int:
        """Return how many leading chunks of a copied plan are valid, by the table and the checksums.

        `checksums` are those of the plan's extents, packed, if the copy has computed them.
        """
        assert channel.session.mapping is not None
        valid = count_valid_chunks(plan, digests, channel.session.mapping.table)
        if valid < plan.num_chunks:
            logger.warning("chunk %d was evicted while it was retrieved, so it is a miss", valid)
        return min(valid, self._intact_chunks(channel, plan, checksums))

    def _intact_chunks(self, channel: Channel, plan: m.RetrievePlan, checksums: bytes | None) -> int:
        """Compare the checksums that are due, and report corrupt entries. Return how many leading chunks are intact."""
        session = channel.session
        if session.verify is m.Verify.OFF or self._checksum is None:
            return plan.num_chunks
        assert session.mapping is not None
        table, pool = session.mapping.table, memoryview(session.mapping.pool)
        wrong: list[tuple[Entry, int]] = []
        intact = plan.num_chunks
        sample = random.randrange(m.VERIFY_ONE_IN)
        extents = m.EXTENT.iter_unpack(plan.extents)
        for number, (chunk, _, _, entry, _, header, offset, num_bytes) in enumerate(extents):
            if session.verify is m.Verify.SAMPLE and chunk % m.VERIFY_ONE_IN != sample:
                continue
            expected = table.checksum_of(entry)
            if not any(expected):
                continue
            if checksums is None:
                found = self._checksum(pool[offset : offset + num_bytes])
            else:
                found = checksums[number * m.CHECKSUM_BYTES : (number + 1) * m.CHECKSUM_BYTES]
            if found == expected:
                continue
            if table.is_same(entry, header):
                wrong.append((entry, header))
            intact = min(intact, chunk)
        if wrong:
            logger.error(
                "%d entries of the pool failed their checksum: reported to the depot, and treated as misses", len(wrong)
            )
            with contextlib.suppress(DepotUnavailable):
                channel.post(m.ReportCorrupt(session.context, tuple(wrong[: m.MAXIMUM_RETRIEVE_ENTRIES])))
        return intact


def count_valid_chunks(plan: m.RetrievePlan, digests: bytes, table: TableReader) -> int:
    """Return how many leading chunks of a plan were still unchanged after the copy, like the reader of a seqlock.

    It also compares the key of each record, so that an error in the depot's index is a miss and never wrong bytes.
    """
    for chunk, _, _, entry, _, header, _, _ in m.EXTENT.iter_unpack(plan.extents):
        if not table.holds(entry, header, digest_at(digests, chunk)):
            return chunk
    return plan.num_chunks


def _xxh3_128() -> Callable[[memoryview], bytes] | None:
    try:
        xxhash = importlib.import_module("xxhash")
    except ImportError:
        return None
    return xxhash.xxh3_128_digest
