"""Asks tiers for the entries of prefixes in use, and writes missing ones again.

Tiers lose entries without notice: a server restarts, a node leaves its cluster, or a full server evicts unused entries,
above all those of prefixes that pools serve. So the depot's knowledge ages. When a prefix is used, the depot asks
about its entries that were neither written nor asked for within the last second, in questions of up to 512 keys. Tiers
that evict by use count the question as a use. Missing entries are written again, from the first one on: a write that is
cut short leaves a usable prefix then, and in the opposite order nothing (docs/tiers.md).

The walk from the prefix's end stops at the first fresh chunk, because the chunks before it were asked for with it.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from enum import Enum
from typing import Final, TypeAlias

from kvdepot.index.index import ChunkIndex
from kvdepot.index.tree import NO_NODE
from kvdepot.pool.table import Entry
from kvdepot.tiers.jobs import Job, JobKind, JobPart
from kvdepot.tiers.keys import MOST_CHUNKS_A_RUN
from kvdepot.tiers.names import EntryKeys, by_run
from kvdepot.tiers.reading import Pause
from kvdepot.tiers.tier_state import TierState

_CHUNKS_A_STEP: Final = 32  # chunks of a prefix per step
_KEYS_A_QUESTION: Final = 512  # a multiple of the longest run
_JOBS_A_QUEUE: Final = 4  # jobs with which a queue is full: others write meanwhile, and few large jobs would not fit
MOST_PREFIXES: Final = 256  # being refreshed at one time


class Reason(Enum):
    """The reason to refresh a prefix."""

    USED = 0  # a lookup found it
    STORED = 1  # its end is new: ask only for entries that the tier was never known to have
    HANDED_OVER = 2  # like STORED, and an engine of another node waits for it
    LEAVING = 3  # like STORED, and the pool evicts its end afterwards
    DEMOTED = 4  # like LEAVING, and the pool may evict all of it: ask for every entry, as for a used prefix


LEAVES: Final = (Reason.LEAVING, Reason.DEMOTED)

Steps: TypeAlias = Generator[Pause, None, None]
Write: TypeAlias = Callable[[TierState, Sequence[Entry], Reason], bool]
_Asked: TypeAlias = tuple[Entry, int, bool]  # an entry, its header, whether the tier was believed to have it


class Refresher:
    """Refreshes prefixes, each in one tier.

    Args:
        index: the index of the pool.
        keys: makes the keys of entries.
        write: writes entries in order to a tier. It returns False if one was dropped, as the entries after it are
            useless then.
        on_end: called with the last node of a prefix when its refresh in one tier ends.
        writes_used: whether to write the missing entries of used prefixes.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        index: ChunkIndex,
        keys: EntryKeys,
        write: Write,
        on_end: Callable[[int], object],
        clock: Callable[[], float],
        *,
        writes_used: bool,
    ) -> None:
        self._index = index
        self._keys = keys
        self._write = write
        self._on_end = on_end
        self._clock = clock
        self._writes_used = writes_used
        self._ready: dict[tuple[TierState, int], Steps] = {}  # by tier and last node, in order
        self._asking: dict[tuple[TierState, int], Steps] = {}  # steps that wait for a tier
        self._again: dict[tuple[TierState, int], Reason] = {}  # prefixes of which another worker stored more meanwhile
        self._unwritten: set[tuple[TierState, int]] = set()  # prefixes with another reason than their use

    def __len__(self) -> int:
        return len(self._ready) + len(self._asking)

    @property
    def num_unwritten(self) -> int:
        """The number of prefixes with newly stored chunks."""
        return len(self._unwritten)

    @property
    def is_full(self) -> bool:
        """Whether `begin` refuses prefixes, unless they leave."""
        return len(self) >= MOST_PREFIXES

    @property
    def has_work(self) -> bool:
        """Whether `turn` has work to do now."""
        return bool(self._ready)

    def is_refreshing(self, tier: TierState, node: int) -> bool:
        """Return whether the prefix that ends with this chunk is being refreshed."""
        return any((tier, node) in keys for keys in (self._ready, self._asking, self._again))

    def begin(self, tier: TierState, node: int, reason: Reason) -> None:
        """Refresh the prefix that ends with this chunk, unless it is fresh or too many others wait.

        The number of prefixes that leave is not limited here.
        """
        key, is_refused = (tier, node), self.is_full and reason not in LEAVES
        if tier.queue.is_suspended or is_refused or not self._is_stale(tier, node, reason):
            return
        if reason is not Reason.USED:
            self._unwritten.add(key)
        if key in self._ready or key in self._asking:
            if reason is not Reason.USED:
                self._again[key] = reason
            return
        self._ready[key] = self._steps(key, reason)

    def turn(self, is_over: Callable[[], bool]) -> None:
        """Do one step, then more until `is_over`."""
        while self._ready:
            key = next(iter(self._ready))
            steps = self._ready.pop(key)
            pause = next(steps, None)
            if pause is Pause.STEP:
                self._ready[key] = steps
            elif pause is Pause.WAIT:
                self._asking[key] = steps
            elif key in self._again:
                self._ready[key] = self._steps(key, self._again.pop(key))
            if is_over():
                break

    def _wake(self, key: tuple[TierState, int]) -> None:
        steps = self._asking.pop(key, None)
        if steps is not None:
            self._ready[key] = steps

    def _is_stale(self, tier: TierState, node: int, reason: Reason) -> bool:
        return any(self._is_asked_for(tier, entry, reason) for entry in self._index.entries.sealed(node))

    def _is_asked_for(self, tier: TierState, entry: Entry, reason: Reason) -> bool:
        header = self._index.table.header(entry)
        is_there = tier.has(entry, header)
        if reason is Reason.USED:
            return (is_there or self._writes_used) and tier.is_stale(entry, header, self._clock())
        if reason is Reason.DEMOTED and is_there:  # the tier may have lost it since
            return tier.is_stale(entry, header, self._clock())
        return not is_there and tier.takes_writes

    def _steps(self, key: tuple[TierState, int], reason: Reason) -> Steps:
        try:
            yield from self._refresh(key, reason)
        finally:
            if key not in self._again:
                self._unwritten.discard(key)
            self._on_end(key[1])

    def _refresh(self, key: tuple[TierState, int], reason: Reason) -> Steps:
        tier, node = key
        index, path = self._index, list[tuple[int, bytes]]()
        nodes = index.nodes.space_of(node).nodes
        while node != NO_NODE and (
            self._is_stale(tier, node, reason)
            # A run's entries can be found only with the entries before them.
            or (path and tier.queue.keeps_runs and (index.nodes.depth[node] + 1) % MOST_CHUNKS_A_RUN)
        ):
            if path and len(path) % _CHUNKS_A_STEP == 0:
                digest = index.nodes.key_of(node)
                yield Pause.STEP
                if nodes.get(digest) != node:
                    return  # it was evicted, after the chunks that follow it
            path.append((node, index.nodes.key_of(node)))
            node = index.nodes.tree.parent[node]
        path.reverse()
        asked = list[_Asked]()
        for start in range(0, len(path), _CHUNKS_A_STEP):
            yield Pause.STEP
            here = [node for node, digest in path[start : start + _CHUNKS_A_STEP] if nodes.get(digest) == node]
            entries = [entry for node in here for entry in index.entries.sealed(node)]
            asked += (
                (entry, index.table.header(entry), tier.has(entry, index.table.header(entry)))
                for entry in entries
                if tier.queue.keeps_runs or self._is_asked_for(tier, entry, reason)
            )
            end = start + _CHUNKS_A_STEP
            if end >= len(path) or (len(asked) >= _KEYS_A_QUESTION and end % MOST_CHUNKS_A_RUN == 0):
                lost = yield from self._ask(key, asked)
                if lost is None or not (yield from self._write_again(tier, lost, reason)):
                    return
                asked.clear()

    def _ask(self, key: tuple[TierState, int], asked: Sequence[_Asked]) -> Generator[Pause, None, list[_Asked] | None]:
        """Ask a tier for entries. Return the missing ones, None if it does not answer."""
        tier, table = key[0], self._index.table
        asked = [each for each in asked if table.header(each[0]) == each[1]]  # others were evicted between the steps
        if not asked:
            return []
        there = [False] * len(asked)

        def on_part(part: JobPart) -> None:
            there[part.first : part.first + len(part.outcomes)] = part.outcomes
            if part.is_last:
                self._wake(key)

        keys = self._keys.keys_of([entry for entry, _, _ in asked])
        order = by_run(keys)
        asked = [asked[number] for number in order]
        job = Job(
            JobKind.TOUCH,
            [keys[number] for number in order],
            [table.extent(entry) for entry, _, _ in asked],
            on_part=on_part,
            on_late=lambda: self._wake(key),
        )
        if not tier.queue.submit(job):
            return None
        while job.num_left and not job.is_late:
            yield Pause.WAIT
        if job.is_late or job.has_failed:
            return None
        lost, now = list[_Asked](), self._clock()
        for each, is_there in zip(asked, there, strict=True):
            entry, header, was_marked = each
            if table.header(entry) != header or tier.has(entry, header) != was_marked:
                continue  # it was evicted or written meanwhile
            if is_there:
                tier.mark(entry, header, now)
            # Others are on their way, or were asked for by another question.
            elif not was_marked or tier.is_stale(entry, header, now):
                tier.unmark(entry, header, now)
                lost.append(each)
        return lost

    def _write_again(self, tier: TierState, lost: Sequence[_Asked], reason: Reason) -> Generator[Pause, None, bool]:
        """Write entries in steps. Return False when one is dropped, as those after it would be unusable."""
        table = self._index.table
        if reason is Reason.USED and not self._writes_used:
            return True
        for some in self._jobs(tier, lost):
            entries = [entry for entry, header, _ in some if table.header(entry) == header]
            if entries and not self._write(tier, entries, reason):
                return False
            yield Pause.STEP
        return True

    def _jobs(self, tier: TierState, lost: Sequence[_Asked]) -> Iterator[list[_Asked]]:
        """Divide entries into the parts of jobs. The queue refuses a job that exceeds its room, as a whole."""
        some, num_bytes = list[_Asked](), 0
        for each in lost:
            size = self._index.table.extent(each[0])[1]
            if some and (len(some) == MOST_CHUNKS_A_RUN or num_bytes + size > tier.queue.write_bytes // _JOBS_A_QUEUE):
                yield some
                some, num_bytes = list[_Asked](), 0
            some.append(each)
            num_bytes += size
        if some:
            yield some
