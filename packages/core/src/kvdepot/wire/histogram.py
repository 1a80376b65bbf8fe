"""Histograms by powers of two: cheap enough for every request, fine enough for quantiles on a dashboard."""

from typing import Final

from kvdepot.wire.status import HistogramStatus

NUM_BUCKETS: Final = 24  # each twice as long as the one before: from 16 microseconds to two minutes
SHORTEST_SECONDS: Final = 0.000016  # bound of the first bucket for requests and for turns of the server's loop


class Histogram:
    """Bucket `i` counts values from `base * 2**(i-1)` to below `base * 2**i`; bucket 0 counts values below `base`.

    The last bucket also counts all larger values.
    """

    __slots__ = ("_per_base", "base", "counts", "total")

    def __init__(self, base: float) -> None:
        self.base = base
        self._per_base = 1 / base
        self.counts = [0] * NUM_BUCKETS
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count one value, which must not be negative."""
        self.total += value
        try:
            self.counts[int(value * self._per_base).bit_length()] += 1
        except IndexError:
            self.counts[-1] += 1

    def status(self) -> HistogramStatus:
        """Return the present counts."""
        return HistogramStatus(base=self.base, counts=list(self.counts), total=self.total)


class WatchedHistogram(Histogram):
    """A histogram that also keeps the largest value, and counts the values above a bound."""

    __slots__ = ("bound", "longest", "num_above")

    def __init__(self, base: float, bound: float) -> None:
        super().__init__(base)
        self.bound = bound
        self.longest = 0.0
        self.num_above = 0

    def add(self, value: float) -> None:
        """See `Histogram`."""
        super().add(value)
        self.longest = max(self.longest, value)
        if value > self.bound:
            self.num_above += 1
