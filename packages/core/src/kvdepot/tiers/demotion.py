"""Writes entries of the pool to tiers when they are stored, used again, or about to be evicted.

The entries stay in the pool meanwhile. Each tier has a bound of waiting bytes. As its queue fills up, the depot drops
more and more of the end of each prefix. Entries that are handed over to an engine of another node are written first,
whatever the rule, and are dropped only when the queue is full.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from kvdepot.config import Demotion
from kvdepot.counting import Counts, depot_counter
from kvdepot.index.index import ChunkIndex
from kvdepot.index.tree import NO_NODE
from kvdepot.pool.table import Entry
from kvdepot.tiers.gathering import Gathering
from kvdepot.tiers.jobs import Job, JobKind, JobPart
from kvdepot.tiers.keys import chunks_a_run
from kvdepot.tiers.names import EntryKeys, by_run
from kvdepot.tiers.queue import TierQueue
from kvdepot.tiers.refreshing import LEAVES, Reason, Refresher
from kvdepot.tiers.tier_state import TierState

_DEMOTIONS_DROPPED: Final = depot_counter(
    "demotions_dropped", "Entries not written to a tier because its queue was full"
)

_CHUNKS_A_STEP: Final = 32  # chunks of a prefix per step, as the evictor removes (`evictor._REMOVE_STEP`)
_LEAST_VICTIMS: Final = 2  # per turn, each with the chunks before it, to keep up with stores
_PRESSURE_BEGINS: Final = (
    0.5  # of the bytes that may wait: above, stores lose their ends first, so prefixes stay usable
)
_RESERVE_SHARE: Final = 0.05  # share of the pool that `--demote evict` keeps free, so that stores wait for no write
_GATHERED_SHARE: Final = 0.5  # of the bytes that may wait: more than these are written at once


@dataclass(frozen=True, slots=True)
class _Leaving:
    """The end of a prefix that is evicted once tiers have it."""

    key: bytes
    is_forced: bool  # whether to evict it even if no tier takes it; otherwise only if it has ended
    num_bytes: int = 0  # that its eviction makes free
    held: Sequence[Entry] = ()  # to hold until the tiers have been asked for the prefix
    may_ask: bool = False  # whether chunks were evicted since the tiers were asked


class Demotions:
    """Chooses the entries to write to tiers, and submits them.

    Args:
        index: the index of the pool.
        tiers: fastest first; the list may grow.
        keys: makes the keys of entries.
        rule: when entries are written.
        least_tokens: shorter prefixes are not written.
        counters: the counters of tiering.
        on_corrupt: called with an entry whose checksum does not match, and its header. It must compare the header, as
            the record may have been reused.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        index: ChunkIndex,
        tiers: Sequence[TierState],
        keys: EntryKeys,
        rule: Demotion,
        least_tokens: int,
        counters: Counts,
        on_corrupt: Callable[[Entry, int], object],
        clock: Callable[[], float],
    ) -> None:
        self._index = index
        self._tiers = tiers
        self._keys = keys
        self._rule = rule
        self._least_tokens = least_tokens
        self._counters = counters
        self._on_corrupt = on_corrupt
        self._clock = clock
        self.lacks_victims = False  # whether the reserve needs room but no chunk can be evicted
        self._is_cut = False  # whether the last turn ended before the reserve had enough room
        self._gathering = Gathering(index, counters)
        self._kept = index.kept  # gathered chunks, until tiers have been asked for them
        self.refresher = Refresher(
            index, keys, self._write_lost, self._go_on, counters, clock, writes_used=rule is not Demotion.EVICT
        )
        self.writing: set[Job] = set()  # jobs with outcomes to come
        self._leaving: dict[int, _Leaving] = {}  # by node
        self._going_on: dict[int, None] = {}  # nodes of `_leaving` that may be evictable now, in order

    @property
    def has_work(self) -> bool:
        """Whether `turn` has work to do now."""
        return self._is_cut or bool(self._going_on) or self.refresher.has_work

    @property
    def num_unwritten(self) -> int:
        """The number of stored prefixes whose writes are still to be submitted."""
        return len(self._gathering) + self.refresher.num_unwritten

    def gather(self, *, waits: bool) -> None:
        """Let newly stored chunks wait for the chunks after them, or write them at once."""
        self._gathering.waits = waits

    def stored(self, entries: Sequence[Entry], *, is_first: bool = False) -> None:
        """Write newly sealed entries, in the order of their chunks, if `is_first` or the rule demands it."""
        index = self._index
        if not entries:
            return
        if not is_first and (
            self._rule is not Demotion.STORE or not self._is_wanted(index.entries.node_of(entries[-1]))
        ):
            return
        first, last = index.entries.node_of(entries[0]), index.entries.node_of(entries[-1])
        before = index.nodes.tree.parent[first]
        gathering, others = self._by_kind()
        if gathering:
            run_chunks = chunks_a_run(index.table.extent(entries[-1])[1])
            is_held, now = self._hold(entries, before, gathering), self._clock()
            if not self._gathering.adds(before, last, run_chunks, now, is_first=is_first, may_wait=is_held):
                self._write_gathered(last, gathering, is_first=is_first)
        if before != NO_NODE and self._is_missing(before, others):
            # In a tier, they are useless without the chunks before them.
            self._refresh(last, others, _reason(is_first=is_first))
        else:
            self._write(entries, others, _reason(is_first=is_first))

    def _hold(self, entries: Sequence[Entry], before: int, gathering: Sequence[TierState]) -> bool:
        """Keep new chunks in the pool until they are written. Return False if too many bytes wait already."""
        index = self._index
        num_bytes = index.table.num_bytes_of(entries)
        entry, most_bytes = entries[-1], max(tier.queue.write_bytes for tier in gathering) * _GATHERED_SHARE
        for earlier in (before, index.entries.node_of(entry)):  # or the same chunks of another rank
            num_bytes += self._kept.let_go(earlier)
        if self._kept.num_bytes + num_bytes > most_bytes:
            return False
        self._kept.add(entry, num_bytes)
        return True

    def let_go(self, is_meant: Callable[[int], bool]) -> None:
        """Keep no gathered chunks that end at nodes for which `is_meant` holds. They are written if they stay."""
        for node in [*filter(is_meant, self._kept)]:
            self._kept.let_go(node)

    def _write_gathered(self, last: int, gathering: Sequence[TierState], *, is_first: bool) -> None:
        self._refresh(last, gathering, _reason(is_first=is_first))
        self._go_on(last)

    def used(self, node: int) -> None:
        """After a lookup found the prefix that ends here, ask the tiers for it and write the missing entries."""
        if self._is_wanted(node):
            self._refresh(node, self._tiers, Reason.USED)

    def leave(self, node: int, is_own: Callable[[int], bool]) -> Iterator[int]:
        """Evict the chunks that only this prefix needs and whose label `is_own`, from its end on.

        Evict chunks that a tier had within the last second at once: ending them first (`Shares.end_session`) would
        take a third more time. From the first other chunk on, end the chunks, ask the tiers for them, write those that
        are missing, and evict them once a tier has them. A chunk that no tier takes stays, and so do those before it.
        Yield the number of changed chunks after each step. Between steps, the index may be used freely.
        """
        index, nodes, keys, count = self._index, self._index.nodes, self._index.nodes.tree.keys, 0

        def may_leave(each: int) -> bool:
            return is_own(nodes.label[each]) and self.holds(each, is_fresh=True)

        while leaving := index.evictor.end_of(node, _CHUNKS_A_STEP, may_leave):
            node = nodes.tree.parent[leaving[-1]]
            for each in leaving:
                index.watchers.ended(nodes.key_of(each))
            index.evictor.evict_all(leaving)
            index.evictor.log_evicted("of an ended session, which a tier has")
            count += len(leaving)
            if len(leaving) < _CHUNKS_A_STEP:
                break
            key = keys[node] if node != NO_NODE else None
            yield count
            count = 0
            if key is None or keys[node] != key:
                return  # there is none, or it was evicted meanwhile
        key = keys[node] if node != NO_NODE else None
        if key is not None:
            yield from index.shares.end_session(node, is_own)
            # Ranking takes turns. Meanwhile a lookup may have used the prefix, which then stays, or a store may have
            # evicted the chunk and given its number to another one: asking for either would be in vain.
            if keys[node] == key and self._has_ended(node):
                self._let_leave(node, self._tiers)
        yield count

    def _has_ended(self, node: int) -> bool:
        return node != NO_NODE and bool(self._index.nodes.tree.ended[node])

    def _let_leave(self, node: int, tiers: Sequence[TierState], *, is_forced: bool = False, num_bytes: int = 0) -> None:
        """Write the prefix that ends here to the tiers that lack its end, then evict that end.

        All of the prefix that a tier lacks is written, as runs are found only by the chunks before them. Unless it
        `is_forced`, the tiers are also asked for chunks that they had more than a second ago.
        """
        index = self._index
        earlier = self._leaving.pop(node, None)
        # Without this hold, a store could evict the chunk before the tiers are asked for it, unwritten. Taken before
        # the earlier hold ends, so that there is no moment without one.
        held = index.entries.sealed(node)[:1]
        index.begin_reading(held)
        self._leaving[node] = _Leaving(index.nodes.key_of(node), is_forced, num_bytes, held)
        if earlier is not None:
            self._release(node, earlier)
        self._refresh(node, tiers, Reason.LEAVING if is_forced else Reason.DEMOTED)
        self._go_on(node)

    def _release(self, node: int, leaving: _Leaving) -> None:
        self._index.end_reading(leaving.held, [node] * len(leaving.held))

    def _go_on(self, node: int) -> None:
        """Let go of a prefix that has been written, or whose refresh has ended. If it leaves, `turn` evicts its end."""
        if node in self._kept and not self._gathering.has(node) and not self._is_refreshing(node):
            self._kept.let_go(node)
        if node in self._leaving:
            self._going_on[node] = None

    def _is_refreshing(self, node: int) -> bool:
        return any(self.refresher.is_refreshing(tier, node) for tier in self._tiers)

    def _evict_leaving(self, node: int) -> None:
        """Evict the end of a prefix that leaves: at most `_CHUNKS_A_STEP` chunks, up to the first that is in use."""
        if node not in self._leaving or self._is_refreshing(node):
            return  # the end of the refresh calls again
        index, leaving = self._index, self._leaving.pop(node)
        self._release(node, leaving)
        # A store may have evicted it and given its number to a new chunk, which would leave in its place, unwritten.
        if index.nodes.tree.keys[node] != leaving.key:
            return
        for number in range(_CHUNKS_A_STEP):
            if node == NO_NODE or not (leaving.is_forced or self._has_ended(node)):
                return
            if not (leaving.is_forced or self.holds(node, is_fresh=True)):
                # A gap: each question follows an eviction, so a tier that takes nothing is asked once.
                if number or leaving.may_ask:
                    self._let_leave(node, self._tiers)
                return
            above, key = index.nodes.tree.parent[node], index.nodes.key_of(node)
            if not index.evictor.evict(node, makes_room=leaving.is_forced):
                is_coming = any(map(index.entries.is_reading, index.entries.sealed(node)))
                if is_coming and not (leaving.is_forced and number):
                    self._leaving[node] = _Leaving(key, leaving.is_forced)  # the end of the write calls again
                return
            node = above
        if node != NO_NODE and not leaving.is_forced:
            self._leaving[node] = _Leaving(index.nodes.key_of(node), is_forced=False, may_ask=True)
            self._go_on(node)

    def turn(self, is_over: Callable[[], bool]) -> None:
        """Do at least one step of each kind of work, then continue until `is_over`."""
        # No tier takes them now. Kept until one does, they would make the pool smaller for nothing.
        if self._kept and not self._by_kind()[0]:
            self.let_go(lambda _: True)
        while (stored := self._gathering.next_over(self._clock())) is not None:
            self._write_gathered(stored.last, self._by_kind()[0], is_first=stored.is_first)
        self.refresher.turn(is_over)
        while self._going_on:
            node = next(iter(self._going_on))
            del self._going_on[node]
            self._evict_leaving(node)
            if is_over():
                break
        if self._rule is Demotion.EVICT:
            self._make_reserve(is_over)
        self._index.evictor.log_evicted("of ended sessions or for the reserve of --demote evict")

    @property
    def next_deadline(self) -> float:
        """The time by which `turn` must be called if it has no work now."""
        return self._gathering.next_deadline

    def _by_kind(self) -> tuple[list[TierState], list[TierState]]:
        """Return the tiers for which stores wait for more, and the others. Tiers that take no writes are left out."""
        tiers = [tier for tier in self._tiers if tier.takes_writes]
        gathering = [tier for tier in tiers if tier.queue.gathers_stores]
        return gathering, [tier for tier in tiers if not tier.queue.gathers_stores]

    def _refresh(self, node: int, tiers: Sequence[TierState], reason: Reason) -> None:
        """Ask tiers for the prefix that ends here, and write its missing chunks."""
        for tier in tiers:
            self.refresher.begin(tier, node, reason)

    def _is_missing(self, node: int, tiers: Sequence[TierState]) -> bool:
        return any(not self._is_written(entry, tiers) for entry in self._index.entries.sealed(node))

    def holds(self, node: int, *, is_fresh: bool = False) -> bool:
        """Return whether a working tier has all sealed entries of a chunk, or they are on their way there.

        False for a chunk without entries. With `is_fresh`, the depot must have learnt it within the last second.
        """
        entries, now = self._index.entries.sealed(node), self._clock()
        headers = list(map(self._index.table.header, entries))
        for tier in self._tiers:
            is_old = is_fresh and any(map(tier.is_stale, entries, headers, itertools.repeat(now)))
            if entries and all(map(tier.has, entries, headers)) and not is_old and not tier.queue.is_suspended:
                return True
        return False

    def _is_wanted(self, node: int) -> bool:
        """Return whether to write a prefix that ends here: it is long enough, and its weights are not outdated."""
        index = self._index
        if index.nodes.label[node] in index.shares.outdated:
            return False
        return (index.nodes.depth[node] + 1) * index.nodes.space_of(node).spec.chunk_tokens >= self._least_tokens

    def _is_written(self, entry: Entry, tiers: Sequence[TierState]) -> bool:
        header = self._index.table.header(entry)
        return all(not tier.takes_writes or tier.has(entry, header) for tier in tiers)

    def _write(
        self,
        entries: Sequence[Entry],
        tiers: Sequence[TierState],
        reason: Reason,
        *,
        leaves: bool = False,
    ) -> bool:
        """Write entries in order to each tier that lacks them. Return False if no tier takes any.

        With `leaves`, evict them afterwards.
        """
        index, table, is_taken = self._index, self._index.table, False
        for tier in tiers:
            if not tier.takes_writes:
                continue
            missing = tier.lacks(entries, table.headers_of(entries))
            # Another node waits for the first kind, and the pool evicts the second kind next: an end that is dropped
            # now would not be written later.
            takes_all = reason is Reason.HANDED_OVER or reason in LEAVES
            num_kept = len(missing) if takes_all else _num_taken(tier.queue, len(missing))
            self._counters[_DEMOTIONS_DROPPED] += len(missing) - num_kept
            missing = missing[:num_kept]
            if not missing:
                continue
            keys = self._keys.keys_of(missing)
            order = by_run(keys)
            missing = [missing[number] for number in order]
            job = Job(
                JobKind.WRITE,
                [keys[number] for number in order],
                [table.extent(entry) for entry in missing],
                [table.owner_of(entry) for entry in missing],
                is_first=reason is Reason.HANDED_OVER,
            )
            if not tier.queue.submit(job):
                self._counters[_DEMOTIONS_DROPPED] += len(missing)
                continue
            headers = table.headers_of(missing)
            job.on_part = partial(self._wrote, tier, missing, headers, index.begin_reading(missing), leaves)
            self.writing.add(job)
            is_taken = True
            tier.expect(missing, headers)
        return is_taken

    def _write_lost(self, tier: TierState, entries: Sequence[Entry], reason: Reason) -> bool:
        """Write entries that a tier lacks. Return False if one was dropped."""
        num_dropped = self._counters[_DEMOTIONS_DROPPED]
        self._write(entries, [tier], reason)
        return self._counters[_DEMOTIONS_DROPPED] == num_dropped

    def _wrote(
        self,
        tier: TierState,
        entries: Sequence[Entry],
        headers: Sequence[int],
        nodes: Sequence[int],
        leaves: bool,
        part: JobPart,
    ) -> None:
        """Settle one part of a write job. `entries`, `headers` and `nodes` describe the whole job."""
        if part.is_last:
            self.writing.discard(part.job)
        some = slice(part.first, part.first + len(part.outcomes))
        tier.settle(entries[some], headers[some], part.outcomes, self._clock())
        self._index.end_reading(entries[some], nodes[some])
        if leaves:
            for node in reversed(nodes[some]):  # a chunk can be evicted only after those that follow it
                self._index.evictor.evict(node)
            self._index.evictor.log_evicted("that a tier has now")
        if self._kept or self._leaving:
            for node in nodes[some]:
                self._go_on(node)
        for place in part.corrupt:
            self._on_corrupt(entries[place], headers[place])

    def _make_reserve(self, is_over: Callable[[], bool]) -> None:
        """Write and evict the entries that leave next, until the reserve is free or `is_over`."""
        index, tree = self._index, self._index.nodes.tree
        reserve = int(index.extents.ready_bytes * _RESERVE_SHARE)
        gathering, others = self._by_kind()
        # Bytes on their way out count as free. Otherwise each turn would send further chunks after them, until the pool
        # is empty.
        leaving = sum(tier.queue.queued_write_bytes for tier in self._tiers)
        leaving += sum(each.num_bytes for each in self._leaving.values())
        self.lacks_victims = self._is_cut = False
        for number in itertools.count():
            if index.extents.free_bytes + leaving >= reserve:
                return
            if number >= _LEAST_VICTIMS and is_over():
                self._is_cut = True
                return
            node = index.evictor.next_victim()
            if node is None:
                self.lacks_victims = True
                return
            # The chunks before a leaf are evicted right after it; write them in one job.
            nodes, entries = [node], index.entries.sealed(node)
            while (
                len(nodes) < _CHUNKS_A_STEP
                and (node := tree.parent[node]) != NO_NODE
                and tree.num_children[node] == 1
                and not tree.holds[node]
            ):
                nodes.append(node)
                entries += index.entries.sealed(node)
            missing = [entry for entry in entries if not self._is_written(entry, self._tiers)]
            num_bytes = index.table.num_bytes_of(missing)
            is_taken = False
            if missing and self._is_wanted(nodes[0]):
                if not all(self._is_written(entry, gathering) for entry in missing):
                    self._let_leave(nodes[0], gathering, is_forced=True, num_bytes=num_bytes)
                    is_taken = True
                is_taken |= self._write(missing, others, Reason.STORED, leaves=True)
            if is_taken:
                leaving += num_bytes
                continue
            for leaf in nodes:
                leaving += index.table.num_bytes_of(index.entries.sealed(leaf))
                if not index.evictor.evict(leaf):
                    break


def _reason(*, is_first: bool) -> Reason:
    return Reason.HANDED_OVER if is_first else Reason.STORED


def _num_taken(queue: TierQueue, num_entries: int) -> int:
    """Return how many of the entries to submit: all while the queue is less than half full, then fewer."""
    fullness = queue.queued_write_bytes / max(1, queue.write_bytes)
    pressure = min(1.0, (fullness - _PRESSURE_BEGINS) / (1 - _PRESSURE_BEGINS))
    return num_entries if pressure <= 0 else round(num_entries * (1 - pressure))
