"""Holds unfinished entries whose writer has left the depot but may still be writing."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvdepot.counting import depot_counter
from kvdepot.index.tree import NO_NODE
from kvdepot.pool.table import Entry, Writer
from kvdepot.server.background import CHORES_FAILED, Task
from kvdepot.server.contexts import WorkerKey
from kvdepot.server.state import DepotState
from kvdepot.wire import messages as m

logger = logging.getLogger(__name__)

_ENTRIES_ABORTED: Final = depot_counter("entries_aborted", "Entries abandoned before commit")


@dataclass(slots=True)
class Quarantine:
    """Entries of one worker of one process."""

    worker: WorkerKey
    entries: list[Entry]
    num_bytes: int
    num_abandoned: int = 0  # how many of the entries belong to no chunk any more


class QuarantineTable:
    """Holds entries until their worker registers again or its process is dead."""

    def __init__(self, state: DepotState) -> None:
        self.held: list[Quarantine] = []
        self._state = state

    @property
    def num_bytes(self) -> int:
        """Pool bytes held in quarantine."""
        return sum(each.num_bytes for each in self.held)

    def hold(self, worker: WorkerKey, entries: list[Entry], num_bytes: int) -> None:
        """Hold unfinished entries."""
        self.held.append(Quarantine(worker, entries, num_bytes))

    def end_worker(self, worker: WorkerKey) -> None:
        """Free the entries of a worker that has registered again."""
        self._free(lambda quarantine: quarantine.worker == worker)

    def end_process(self, writer: Writer) -> None:
        """Free the entries of a dead process."""
        self._free(lambda quarantine: quarantine.worker[0] == writer)

    def is_awaited(self, writer: Writer) -> bool:
        """Whether entries wait for the death of a process."""
        return any(quarantine.worker[0] == writer for quarantine in self.held)

    def _free(self, is_over: Callable[[Quarantine], bool]) -> None:
        entries = [entry for quarantine in self.held if is_over(quarantine) for entry in quarantine.entries]
        self.held[:] = [quarantine for quarantine in self.held if not is_over(quarantine)]
        self.discard(entries)

    def discard(self, entries: Sequence[Entry]) -> None:
        """Free unfinished entries without a writer: now, or in background steps if they are many."""
        self._state.background.add_urgent(self._discarding(entries), len(entries))

    def _discarding(self, entries: Sequence[Entry]) -> Task:
        index, counters = self._state.index, self._state.counters
        for entry in reversed(entries):  # mostly deepest first, so that no tombstones remain
            try:
                index.discard_entry(entry)
            except Exception:
                logger.exception("an unfinished entry could not be freed")
                counters[CHORES_FAILED] += 1
            counters[_ENTRIES_ABORTED] += 1
            yield

    def abandon_some(self) -> bool:
        """Detach some entries from their chunks, so that the chunks before can be evicted.

        Return False if none is left.
        """
        index = self._state.index
        for quarantine in self.held:
            if quarantine.num_abandoned < len(quarantine.entries):
                first = quarantine.num_abandoned
                quarantine.num_abandoned += m.MAXIMUM_STORE_ENTRIES
                for entry in quarantine.entries[first : quarantine.num_abandoned]:
                    if index.entries.node_of(entry) != NO_NODE:
                        index.abandon_entry(entry)
                return True
        return False
