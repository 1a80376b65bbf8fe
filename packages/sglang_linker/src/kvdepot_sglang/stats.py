# pyright: basic, reportMissingImports=false
"""The linker's figures: an occasional log line, and Prometheus counters if SGLang exports its own."""

import logging
import time
from collections.abc import Callable
from typing import Any, Final

from kvdepot.counting import CounterGroup, CounterName, Counts

logger = logging.getLogger(__name__)

linker_counter: Final = CounterGroup()  # `sglang:kvdepot_NAME_total`

LOOKUPS: Final = linker_counter("lookups", "Prefixes that were looked up, repeated answers included")
LOOKUP_MICROSECONDS: Final = linker_counter("lookup_microseconds", "Time for which the scheduler waited for lookups")
FOUND_PAGES: Final = linker_counter("found_pages", "Pages that the depot had and the device had not")
LOADS: Final = linker_counter("loads", "Loads that ended in place")
REFUSED_LOADS: Final = linker_counter("refused_loads", "Loads that failed: their tokens were computed")
LOAD_BYTES: Final = linker_counter("load_bytes", "Bytes copied out of the depot")
LOAD_MICROSECONDS: Final = linker_counter("load_microseconds", "Time for which the scheduler waited for loads")
STORES: Final = linker_counter("stores", "Store operations that ended")
STORE_BYTES: Final = linker_counter("store_bytes", "Bytes copied into the depot")

_LOG_SECONDS: Final = 60.0  # between two log lines, as between SGLang's own


class Stats:
    """The counts of one rank.

    Args:
        rank: a label of the exported counters; rank 0 logs.
        exports: whether SGLang exports metrics.
        clock: returns monotonic seconds.
    """

    def __init__(self, rank: int, *, exports: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts = Counts()
        self._logged = Counts()
        self._rank, self._clock, self._logged_at = rank, clock, clock()
        self._exported: dict[str, Any] = _exported(rank) if exports else {}

    def add(self, name: CounterName, amount: int = 1) -> None:
        """Add an amount to a count."""
        self.counts[name] += amount
        if name in self._exported and amount:
            self._exported[name].inc(amount)

    def log_now_and_then(self) -> None:
        """Log the counts since the last line, at most once a minute, if there are any."""
        now = self._clock()
        if now - self._logged_at < _LOG_SECONDS or self._rank:
            return
        self._logged_at = now
        new = Counts({name: amount - self._logged[name] for name, amount in self.counts.items()})
        self._logged = Counts(self.counts)
        if any(new.values()):
            logger.info(
                "in %.0f s: %d lookups in %.0f ms found %d pages; %d loads of %.1f MB in %.0f ms, %d refused;"
                " %d stores of %.1f MB",
                _LOG_SECONDS,
                new[LOOKUPS],
                new[LOOKUP_MICROSECONDS] / 1e3,
                new[FOUND_PAGES],
                new[LOADS],
                new[LOAD_BYTES] / 1e6,
                new[LOAD_MICROSECONDS] / 1e3,
                new[REFUSED_LOADS],
                new[STORES],
                new[STORE_BYTES] / 1e6,
            )


def _exported(rank: int) -> dict[str, Any]:
    from prometheus_client import Counter

    return {
        name: Counter(f"sglang:kvdepot_{name}", f"{text} (kvdepot).", labelnames=["tp_rank"]).labels(str(rank))
        for name, text in linker_counter.texts.items()
    }
