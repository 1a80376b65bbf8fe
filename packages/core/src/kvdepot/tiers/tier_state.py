"""A tier with the entries that it is known to have, and its measured speed."""

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Final

from kvdepot.index.columns import make_column
from kvdepot.pool.table import Entry
from kvdepot.tiers.queue import TierQueue

_PACES: Final = 15  # promotions whose median is the pace of a tier
_LEAST_PACES: Final = 3  # their median tolerates one outlier, such as the first, which connects
_TRY_ANYWAY: Final = 16  # one in this many promotions reads from a slow tier anyway, to notice if it became faster
_TICKS: Final = 8  # per second
_FRESH_TICKS: Final = 8  # a prefix in use is asked for at most once in this time
_IN_FLIGHT: Final = 0xFFFFFFFF  # no tick: the clock reaches it after 17 years


class TierState:
    """One tier, with the depot's knowledge of it.

    Args:
        queue: drives the tier.
        num_records: the number of records in the pool's table.

    Raises:
        OSError: there is not enough memory for the table of its entries.
    """

    def __init__(self, queue: TierQueue, num_records: int) -> None:
        self.queue = queue
        self.knows_outdated = False  # whether it was, or is about to be, told which weights are outdated
        # By entry: its header at the last mark, 0 if unknown; whether it was in the tier or on its way there then; and
        # the time at which the tier last got it, failed to take it, or was asked for it.
        self._headers = make_column("Q", num_records)
        self._is_there = make_column("B", num_records)
        self._asked_at = make_column("I", num_records)
        self._paces = deque[float](maxlen=_PACES)  # seconds per byte
        self._num_skipped = 0

    @property
    def takes_writes(self) -> bool:
        """Whether the tier takes entries now."""
        return self.queue.write_bytes > 0 and not self.queue.is_suspended and not self.queue.tier.declines_writes

    def has(self, entry: Entry, header: int) -> bool:
        """Return whether the tier is known to have an entry, or the entry is on its way there."""
        return self._headers[entry] == header and self._is_there[entry] != 0

    def lacks(self, entries: Sequence[Entry], headers: Sequence[int]) -> list[Entry]:
        """Return the entries that the tier is not known to have and that are not on their way there."""
        known, is_there = self._headers, self._is_there
        return [e for e, header in zip(entries, headers, strict=True) if known[e] != header or not is_there[e]]

    def expect(self, entries: Sequence[Entry], headers: Sequence[int]) -> None:
        """Note that entries are on their way to the tier."""
        for entry, header in zip(entries, headers, strict=True):
            self._headers[entry], self._is_there[entry] = header, 1
            self._asked_at[entry] = _IN_FLIGHT

    def settle(self, entries: Sequence[Entry], headers: Sequence[int], outcomes: Sequence[bool], now: float) -> None:
        """Note which expected entries the tier has now."""
        for entry, header, ok in zip(entries, headers, outcomes, strict=True):
            if self._headers[entry] == header and self._is_there[entry]:
                self._is_there[entry], self._asked_at[entry] = ok, int(now * _TICKS)

    def mark(self, entry: Entry, header: int, now: float) -> None:
        """Note that the tier has an entry."""
        self._headers[entry], self._is_there[entry] = header, 1
        self._asked_at[entry] = int(now * _TICKS)

    def unmark(self, entry: Entry, header: int, now: float) -> None:
        """Note that the tier lacks an entry."""
        self.mark(entry, header, now)
        self._is_there[entry] = 0

    def is_stale(self, entry: Entry, header: int, now: float) -> bool:
        """Return whether the tier has neither got an entry nor been asked for it within the last second."""
        return self._headers[entry] != header or int(now * _TICKS) - self._asked_at[entry] >= _FRESH_TICKS

    def forget_entries(self) -> None:
        """Forget which entries the tier has."""
        self._headers = make_column("Q", len(self._headers))

    def was_read(self, num_bytes: int, seconds: float) -> None:
        """Record the duration of a promotion."""
        self._paces.append(seconds / num_bytes)

    def is_worth_reading(self, num_bytes: int, compute_seconds: float) -> bool:
        """Return whether reading is faster than computing. True if either is unknown (`compute_seconds` of 0)."""
        if not compute_seconds or len(self._paces) < _LEAST_PACES:
            return True
        if num_bytes * median(self._paces) <= compute_seconds:
            return True
        self._num_skipped += 1
        return self._num_skipped % _TRY_ANYWAY == 0
