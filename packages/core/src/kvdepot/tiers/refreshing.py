"""Asks tiers for the entries of prefixes in use, and writes missing ones again.

Tiers lose entries without notice: a server restarts, a node leaves its cluster, or a full server evicts unused entries,
above all those of prefixes that pools serve. So the depot's knowledge ages. When a prefix is used, the depot asks
about its entries that were neither written nor asked for within the last second, in questions of up to 512 keys. Tiers
that evict by use count the question as a use. Missing entries are written again, from the first one on: a write that is
cut short leaves a usable prefix then, and in the opposite order nothing (docs/architecture.md).

The walk from the prefix's end stops at the first fresh chunk, because the chunks before it were asked for with it.

A tier answers one question at a time. Meanwhile, the questions about other prefixes gather, and the next one asks for
all of them. Further stored prefixes wait, by the number of their last node.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias

from kvdepot.counting import Counts, depot_counter
from kvdepot.index.index import ChunkIndex
from kvdepot.index.tree import NO_NODE
from kvdepot.pool.table import Entry
from kvdepot.tiers.base import Extents
from kvdepot.tiers.jobs import Job, JobKind, JobPart
from kvdepot.tiers.keys import MOST_CHUNKS_A_RUN, run_of
from kvdepot.tiers.moves import Moves, Pause, Steps
from kvdepot.tiers.names import EntryKeys, by_run
from kvdepot.tiers.tier_state import TierState

PREFIXES_DROPPED: Final = depot_counter(
    "prefixes_dropped",
    "Stored prefixes not written to a tier, as chunks left the pool first or the tier did not answer",
)

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

Write: TypeAlias = Callable[[TierState, Sequence[Entry], Reason], bool]
_Asked: TypeAlias = tuple[Entry, int, bool]  # an entry, its header, whether the tier was believed to have it
_Key: TypeAlias = tuple[TierState, int]  # a tier, and the last node of a prefix


@dataclass(slots=True, eq=False)
class _Question:
    """The entries of one prefix that a tier is to be asked for."""

    prefix: _Key
    keys: Sequence[bytes]
    extents: Extents  # of which a tier uses the sizes
    there: Sequence[bool] | None = None  # the answer; None if the tier gives none
    is_over: bool = False
    is_alone: bool = False  # whether to ask for no other prefix with it


class Refresher:
    """Refreshes prefixes, each in one tier.

    Args:
        index: the index of the pool.
        keys: makes the keys of entries.
        write: writes entries in order to a tier. It returns False if one was dropped, as the entries after it are
            useless then.
        on_end: called with the last node of a prefix when its refresh in one tier ends.
        counters: the counters of tiering.
        writes_used: whether to write the missing entries of used prefixes.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        index: ChunkIndex,
        keys: EntryKeys,
        write: Write,
        on_end: Callable[[int], object],
        counters: Counts,
        clock: Callable[[], float],
        *,
        writes_used: bool,
    ) -> None:
        self._index = index
        self._keys = keys
        self._write = write
        self._on_end = on_end
        self._counters = counters
        self._clock = clock
        self._writes_used = writes_used
        self._moves = Moves[_Key](self._ended)
        self._again: dict[_Key, Reason] = {}  # prefixes of which another worker stored more meanwhile
        # Stored prefixes for which there is no room yet, with the digest of the last chunk, which may leave the pool.
        self._waiting = OrderedDict[_Key, tuple[bytes, Reason]]()
        self._unwritten: set[_Key] = set()  # prefixes with another reason than their use
        # Prefixes being refreshed of which chunks left the pool, or for which a tier gave no answer.
        self._cut: set[_Key] = set()
        self._questions: dict[TierState, deque[_Question]] = {}
        self._asked: dict[TierState, Job] = {}  # the question that a tier is to answer
        self._small: dict[tuple[TierState, Reason], list[_Asked]] = {}  # to write together when the turn ends

    def __len__(self) -> int:
        return len(self._moves) + len(self._waiting)

    @property
    def num_unwritten(self) -> int:
        """The number of prefixes with newly stored chunks."""
        return len(self._unwritten)

    @property
    def is_full(self) -> bool:
        """Whether `begin` refuses used prefixes, and lets stored ones wait."""
        return len(self._moves) >= MOST_PREFIXES

    @property
    def has_work(self) -> bool:
        """Whether `turn` has work to do now."""
        return bool(self._moves.ready) or (bool(self._waiting) and not self.is_full)

    def is_refreshing(self, tier: TierState, node: int) -> bool:
        """Return whether the prefix that ends with this chunk is being refreshed, or waits for that."""
        key = tier, node
        return any(key in keys for keys in (self._moves, self._again, self._waiting))

    def begin(self, tier: TierState, node: int, reason: Reason) -> None:
        """Refresh the prefix that ends with this chunk, unless it is fresh.

        If too many others are being refreshed, ignore a used prefix, and let a stored one wait. The number of prefixes
        that leave is not limited here.
        """
        key = tier, node
        if tier.queue.is_suspended or not self._is_stale(tier, node, reason):
            return
        is_going_on = key in self._moves
        if self.is_full and reason is Reason.USED and not is_going_on:
            return
        if reason is not Reason.USED:
            self._unwritten.add(key)
        if is_going_on:
            # Its walk may have passed the end, or begun before these entries were stored, and would leave them
            # unwritten.
            if reason is not Reason.USED:
                self._again[key] = reason
        elif self.is_full and reason not in LEAVES:
            self._await_room(key, reason)
        else:
            self._moves.ready[key] = self._refresh(key, reason)

    def _await_room(self, key: _Key, reason: Reason) -> None:
        digest = self._index.nodes.key_of(key[1])
        earlier, earlier_reason = self._waiting.get(key, (digest, Reason.STORED))
        if earlier != digest:  # its node was reused
            self._counters[PREFIXES_DROPPED] += 1
        elif earlier_reason is Reason.HANDED_OVER:
            return
        self._waiting[key] = digest, reason
        # Its engine waits a few seconds. Behind all others, the chunks would come after it has computed them.
        if reason is Reason.HANDED_OVER:
            self._waiting.move_to_end(key, last=False)

    def _end_waits(self) -> None:
        """Begin to refresh prefixes that waited for room. Examine a bounded number, as many may have left the pool."""
        for _ in range(MOST_PREFIXES):
            if not self._waiting or self.is_full:
                return
            key, (digest, reason) = self._waiting.popitem(last=False)
            tier, node = key
            if self._index.nodes.tree.keys[node] == digest and not tier.queue.is_suspended:
                if key in self._moves:
                    self._again[key] = reason
                else:
                    self._moves.ready[key] = self._refresh(key, reason)
                continue
            self._counters[PREFIXES_DROPPED] += 1
            self._unwritten.discard(key)
            self._on_end(node)

    def turn(self, is_over: Callable[[], bool]) -> None:
        """Do one step, then more until `is_over`. Then ask the tiers, and write small prefixes together."""
        self._end_waits()
        # A move that raises must not keep back the questions and writes of the others.
        try:
            self._moves.turn(is_over)
        finally:
            self._write_small()
            for tier in self._questions:
                self._ask_next(tier)

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

    def _refresh(self, key: _Key, reason: Reason) -> Steps[None]:
        try:
            yield from self._ask_and_write(key, reason)
        finally:
            if key in self._cut:
                self._cut.discard(key)
                # A used prefix is asked for again at its next use, and a demoted one stays in the pool.
                if reason not in (Reason.USED, Reason.DEMOTED):
                    self._counters[PREFIXES_DROPPED] += 1

    def _ended(self, key: _Key) -> None:
        if key in self._again:
            self._moves.ready[key] = self._refresh(key, self._again.pop(key))
        else:
            self._unwritten.discard(key)
        self._on_end(key[1])

    def _ask_and_write(self, key: _Key, reason: Reason) -> Steps[None]:
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
                    self._cut.add(key)
                    return  # it was evicted, after the chunks that follow it
            path.append((node, index.nodes.key_of(node)))
            node = index.nodes.tree.parent[node]
        path.reverse()
        asked = list[_Asked]()
        for start in range(0, len(path), _CHUNKS_A_STEP):
            yield Pause.STEP
            some = path[start : start + _CHUNKS_A_STEP]
            here = [node for node, digest in some if nodes.get(digest) == node]
            if len(here) < len(some):
                self._cut.add(key)
            entries = [entry for node in here for entry in index.entries.sealed(node)]
            asked += (
                (entry, index.table.header(entry), tier.has(entry, index.table.header(entry)))
                for entry in entries
                if tier.queue.keeps_runs or self._is_asked_for(tier, entry, reason)
            )
            end = start + _CHUNKS_A_STEP
            is_end = end >= len(path)
            # Between two cuts only: a run is found by a walk from its first chunk, so the second half of one would seem
            # to be lost, and be written again.
            if is_end or (len(asked) >= _KEYS_A_QUESTION and end % MOST_CHUNKS_A_RUN == 0):
                lost = yield from self._ask(key, asked)
                if lost is None or not (yield from self._write_again(key, lost, reason, is_end=is_end)):
                    return
                asked.clear()

    def _ask(self, key: _Key, asked: Sequence[_Asked]) -> Steps[list[_Asked] | None]:
        """Ask a tier for entries. Return the missing ones, None if it does not answer."""
        tier, table = key[0], self._index.table
        here = [each for each in asked if table.header(each[0]) == each[1]]  # others were evicted between the steps
        if len(here) < len(asked):
            self._cut.add(key)
        if not here:
            return []
        keys = self._keys.keys_of([entry for entry, _, _ in here])
        order = by_run(keys)
        asked = [here[number] for number in order]
        question = _Question(key, [keys[number] for number in order], [table.extent(entry) for entry, _, _ in asked])
        self._questions.setdefault(tier, deque()).append(question)
        while not question.is_over:
            yield Pause.WAIT
        if question.there is None:
            self._cut.add(key)
            return None
        lost, now = list[_Asked](), self._clock()
        for each, is_there in zip(asked, question.there, strict=True):
            entry, header, was_marked = each
            # The answer does not say anything about a later entry of the record: taken for its own, it would let that
            # entry leave the pool unwritten.
            if table.header(entry) != header and not is_there:
                self._cut.add(key)
            if table.header(entry) != header or tier.has(entry, header) != was_marked:
                continue  # it was evicted or written meanwhile
            if is_there:
                tier.mark(entry, header, now)
            # Others are on their way, or were asked for by another question.
            elif not was_marked or tier.is_stale(entry, header, now):
                tier.unmark(entry, header, now)
                lost.append(each)
        return lost

    def _ask_next(self, tier: TierState) -> None:
        """Ask a tier for the entries of the next prefixes, unless it is to answer a question."""
        questions = self._questions[tier]
        if tier in self._asked or not questions:
            return
        together = _take_together(questions, keeps_runs=tier.queue.keeps_runs)
        job = Job(
            JobKind.TOUCH,
            [key for question in together for key in question.keys],
            [extent for question in together for extent in question.extents],
        )
        there = [False] * len(job.keys)

        def on_part(part: JobPart) -> None:
            there[part.first : part.first + len(part.outcomes)] = part.outcomes
            if part.is_last:
                end(is_answered=not job.has_failed)

        def end(*, is_answered: bool) -> None:
            if self._asked.get(tier) is not job:
                return  # it was late
            del self._asked[tier]
            if not is_answered and len(together) > 1 and not tier.queue.is_suspended:
                # One entry may be the reason. Without this it would keep all other prefixes from being written.
                for question in together:
                    question.is_alone = True
                questions.extend(together)
                return
            first = 0
            for question in together:
                last = first + len(question.keys)
                question.there, question.is_over = there[first:last] if is_answered else None, True
                first = last
                self._moves.wake(question.prefix)

        job.on_part, job.on_late = on_part, lambda: end(is_answered=False)
        self._asked[tier] = job
        if not tier.queue.submit(job):
            end(is_answered=False)

    def _write_again(self, key: _Key, lost: Sequence[_Asked], reason: Reason, *, is_end: bool) -> Steps[bool]:
        """Write entries in steps. Return False when one is dropped, as the entries after it would be unusable.

        With `is_end`, no others of the prefix follow.
        """
        tier, table = key[0], self._index.table
        if reason is Reason.USED and not self._writes_used:
            return True
        jobs = list(self._jobs(tier, lost))
        for some in jobs:
            here = [each for each in some if table.header(each[0]) == each[1]]
            if len(here) < len(some):
                self._cut.add(key)
            if is_end and len(jobs) == 1 and not tier.queue.keeps_runs:
                self._small.setdefault((tier, reason), []).extend(here)
            else:
                self._write_small()  # first, as the queue drops what comes later
                if here and not self._write(tier, [entry for entry, _, _ in here], reason):
                    return False
            yield Pause.STEP
        return True

    def _write_small(self) -> None:
        """Write the entries of prefixes that fit into one job, several prefixes in each: a job costs a round trip."""
        while self._small:
            (tier, reason), lost = self._small.popitem()
            for some in self._jobs(tier, lost):
                self._write(tier, [entry for entry, _, _ in some], reason)

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


def _take_together(questions: deque[_Question], *, keeps_runs: bool) -> list[_Question]:
    """Remove the next questions that a tier can answer together, in order.

    A run is found by a walk along one prefix (`kvdepot.tiers.runs`). So two prefixes with chunks of one run are never
    asked for together.
    """
    taken, num_keys, runs = list[_Question](), 0, set[bytes]()
    while questions:
        question = questions[0]
        num_keys += len(question.keys)
        own = set(map(run_of, question.keys)) if keeps_runs else set[bytes]()
        is_alone = question.is_alone or (bool(taken) and taken[-1].is_alone)
        if taken and (is_alone or num_keys > _KEYS_A_QUESTION or runs & own):
            break
        taken.append(questions.popleft())
        runs |= own
    return taken
