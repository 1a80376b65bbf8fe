"""Restores the table of an earlier server: its entries, and the extents that living writers may still fill.

The loop drives it in steps between messages. Stores are declined until it ends.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator

from kvdepot.index.restore import restore
from kvdepot.pool.names import Names
from kvdepot.pool.table import Entry, Writer
from kvdepot.server.contexts import WorkerKey
from kvdepot.server.depot import Depot
from kvdepot.server.turns import CHORES_FAILED

logger = logging.getLogger(__name__)


class Restoring:
    """Restores an earlier server's table in steps, then accepts stores unless the server is stopping.

    Args:
        depot: has an empty index over the table.
        names: the names that the records refer to.
        await_death: watches a process; returns False if it is dead.
        is_stopping: returns whether the server is stopping.
    """

    def __init__(
        self,
        depot: Depot,
        names: Names,
        await_death: Callable[[Writer], bool],
        is_stopping: Callable[[], bool],
    ) -> None:
        self._depot = depot
        self._is_stopping = is_stopping
        restored = restore(depot.index, names.spaces, len(names.labels))
        self._steps = take_over(depot, restored, await_death)
        depot.state.is_restoring, depot.state.accepts_stores = True, False
        depot.labels.restore(names.labels)

    def go_on(self, is_over: Callable[[], bool]) -> None:
        """Restore until `is_over`, but at least one step."""
        state, counters = self._depot.state, self._depot.counters
        try:
            for _ in self._steps:
                if is_over():
                    return
            counters[CHORES_FAILED] += self._depot.index.num_restore_errors
            state.accepts_stores = not self._is_stopping()
            state.note(f"found {self._depot.index.entries.num_sealed} entries of an earlier server")
        except Exception:
            # The writers of unfinished entries are unknown from here on: serve the entries restored so far, and add
            # none.
            logger.exception(
                "restoring an earlier server's table failed: stores are declined until a start with --fresh"
            )
            counters[CHORES_FAILED] += 1
            state.note("restoring an earlier server's table failed: stores are declined until a start with --fresh")
        state.is_restoring = False
        self._depot.contexts.restored()
        for restored in self._depot.features.restored:
            restored()


def take_over(depot: Depot, restored: Iterator[Entry | None], await_death: Callable[[Writer], bool]) -> Iterator[None]:
    """Restore an earlier server's table, then decide about each unfinished entry.

    An entry is freed if its worker has registered again or its process is dead. All others stay in quarantine.

    Args:
        depot: has the index that `restored` rebuilds.
        restored: see `kvdepot.index.restore.restore`.
        await_death: watches a process; returns False if it is dead.
    """
    table = depot.index.table
    by_worker: dict[WorkerKey, list[Entry]] = {}
    sizes: Counter[WorkerKey] = Counter()
    for entry in restored:
        if entry is not None:
            worker = table.writer_of(entry), table.owner_of(entry)
            by_worker.setdefault(worker, []).append(entry)
            sizes[worker] += table.extent(entry)[1]
        yield
    for worker, entries in by_worker.items():
        is_back = any(context.worker_key == worker for context in depot.contexts.by_number.values())
        if not is_back and await_death(worker[0]):
            depot.quarantine.hold(worker, entries, sizes[worker])
        else:
            depot.quarantine.discard(entries)
        yield
    logger.info(
        "restored %d entries of an earlier server; %d were unfinished",
        depot.index.entries.num_sealed,
        sum(map(len, by_worker.values())),
    )
