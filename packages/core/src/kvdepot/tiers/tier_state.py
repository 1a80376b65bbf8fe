"""A tier, the entries that it is known to hold, and its measured speed."""

from collections import deque
from statistics import median
from typing import Final

from kvdepot.index.columns import make_column
from kvdepot.tiers.base import EVICTED
from kvdepot.tiers.queue import TierQueue

_PACES: Final = 15  # promotions; their median is the pace of a tier
_LEAST_PACES: Final = 3
_TRY_ANYWAY: Final = 16  # one promotion in this many reads from a slow tier anyway, to notice that it has become faster
_TURNED_OVER: Final = 0.25  # share of its entries; after evicting so many, a tier may lack those of the pool


class TierState:
    """One tier, with the depot's knowledge of it.

    Args:
        queue: drives the tier.
        num_records: records of the pool's table.

    Raises:
        OSError: not enough memory for the table of its entries.
    """

    def __init__(self, queue: TierQueue, num_records: int) -> None:
        self.queue = queue
        # By record: the header of an entry that is in the tier or on its way there; 0 for unknown.
        self.headers = make_column("Q", num_records)
        self._paces = deque[float](maxlen=_PACES)  # seconds per byte
        self._num_skipped = 0
        self._num_evicted = 0  # entries that the tier had evicted when `headers` was last forgotten

    def forget_entries(self) -> None:
        """Forget which entries the tier holds."""
        self.headers = make_column("Q", len(self.headers))

    def forget_evicted(self) -> None:
        """Forget which entries the tier holds once it has evicted a good part of them.

        No lookup asks a tier for entries that the pool has, so they are the coldest there however hot they are.
        """
        usage = self.queue.usage()
        num_evicted = usage.counters.get(EVICTED, 0)
        if num_evicted - self._num_evicted > _TURNED_OVER * usage.num_entries:
            self._num_evicted = num_evicted
            self.forget_entries()

    def was_read(self, num_bytes: int, seconds: float) -> None:
        """Note how long a promotion took."""
        self._paces.append(seconds / num_bytes)

    def is_worth_reading(self, num_bytes: int, compute_seconds: float) -> bool:
        """Whether reading is faster than computing. True if one of them is unknown (`compute_seconds` of 0)."""
        if not compute_seconds or len(self._paces) < _LEAST_PACES:
            return True
        if num_bytes * median(self._paces) <= compute_seconds:
            return True
        self._num_skipped += 1
        return self._num_skipped % _TRY_ANYWAY == 0
