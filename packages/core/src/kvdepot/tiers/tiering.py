"""Moves entries between the pool and the tiers below it.

Demotion (`demotion`) writes entries in the background. They stay in the pool meanwhile. Promotion (`promotion`): if the
pool can answer a lookup only in part, the tiers are asked in order for the missing entries. The lookup is answered when
all of them have arrived or its time is up. Entries that arrive later stay in the pool for the next lookup. A tier is
not read if, by the recent pace of both, the engine would compute the entries sooner.

Everything here runs on the depot's loop and only submits jobs. The threads of `TierQueue` wait for the storage. The
loop calls `turn` when a thread has woken it, or `has_work`. Deadlines are in the depot's timers.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

from kvdepot.config import Demotion
from kvdepot.counting import Counts, depot_counter
from kvdepot.index.evictor import EndStore
from kvdepot.index.index import ChunkIndex
from kvdepot.index.tree import Space
from kvdepot.index.visibility import Match
from kvdepot.keys import digest_at, num_digests
from kvdepot.pool.names import Label
from kvdepot.pool.table import Entry
from kvdepot.tiers.demotion import Demotions
from kvdepot.tiers.jobs import Job, JobKind, JobPart
from kvdepot.tiers.keys import has_names
from kvdepot.tiers.names import EntryKeys, name_hashes
from kvdepot.tiers.promotion import Promotions
from kvdepot.tiers.queue import TierQueue
from kvdepot.tiers.reading import OtherSplits, Prefix, PromotionContext
from kvdepot.tiers.tier_state import TierState
from kvdepot.timers import Timers
from kvdepot.wire.status import TierStatus

logger = logging.getLogger(__name__)

_DEMOTIONS_FAILED: Final = depot_counter(
    "demotions_failed", "Stores and lookups whose entries were not written to a tier because of a bug"
)
_PROMOTIONS_REFUSED: Final = depot_counter(
    "promotions_refused", "Lookups that did not ask the tiers because too many others were waiting for them"
)
_PROMOTIONS: Final = depot_counter("promotions", "Lookups that asked the tiers")
_TIER_JOBS_LATE: Final = depot_counter("tier_jobs_late", "Jobs of tiers that passed their deadline")


_OF_PROMOTIONS: Final = (JobKind.CONTAINS, JobKind.READ)

T = TypeVar("T")

_TICK_SECONDS: Final = 0.5  # the longest time between two looks for late calls, due probes, and used prefixes
MOST_USED: Final = 1024  # used prefixes between two ticks: 2,000 a second


@dataclass(frozen=True, slots=True)
class TieringSettings:
    """The settings for the use of tiers."""

    demotion: Demotion = Demotion.STORE
    least_tokens: int = 0  # shorter prefixes are not demoted
    promotion_seconds: float = 1.0  # the longest wait of a lookup for tiers
    promotion_least_tokens: int = 0  # tiers are not asked for fewer missing tokens


@dataclass(slots=True, eq=False)
class _Clearing:
    on_done: Callable[[int, list[str]], None]
    num_left: int = 1  # tiers that have not ended, plus one for the caller
    num_removed: int = 0
    problems: list[str] = field(default_factory=list[str])

    def one_is_done(self) -> None:
        """Note that one has ended. After the last one, report to the caller."""
        self.num_left -= 1
        if not self.num_left:
            self.on_done(self.num_removed, self.problems)


class Tiering:
    """Demotions and promotions of one depot.

    `used` has the last nodes of the prefixes that lookups found lately, at most `MOST_USED`. Lookups add them without a
    call. Soon, a turn asks the tiers for each of them once. A node that was evicted before has no entries; if its
    number was reused, the tiers are asked for another prefix.

    Args:
        index: the index of the pool.
        queues: the tiers, fastest first. This object takes ownership of them.
        settings: see `TieringSettings`.
        names_of: returns the label with a number.
        on_corrupt: called with an entry whose checksum does not match, and its header.
        end_store: ends an unfinished store, to make room for a promotion.
        other_splits: returns the ways other than `places` in which engines may divide a space: see `splits`.
        timers: the depot's.
        clock: returns monotonic seconds.

    Attributes:
        has_work: whether `turn` has work to do now.
    """

    def __init__(
        self,
        index: ChunkIndex,
        queues: Sequence[TierQueue],
        settings: TieringSettings,
        *,
        names_of: Callable[[int], Label],
        on_corrupt: Callable[[Entry, int], object],
        end_store: EndStore,
        other_splits: OtherSplits,
        timers: Timers,
        clock: Callable[[], float],
    ) -> None:
        self.counters = Counts()
        self.settings = settings
        self._index = index
        self._timers = timers
        self._clock = clock
        self._tiers = [TierState(queue, index.table.num_records) for queue in queues]
        self._guests: list[TierState] = []
        self._keys = EntryKeys(index, names_of)
        self._demotions = Demotions(
            index, self._tiers, self._keys, settings.demotion, settings.least_tokens, self.counters, on_corrupt, clock
        )
        self.promotion_context = PromotionContext(
            index, self._keys, self.counters, clock, settings.promotion_seconds, end_store, other_splits
        )
        self.promotions = Promotions(self.promotion_context, self._tiers, timers)
        self.used: set[int] = set()
        self._awaiting: list[tuple[Sequence[Job], Callable[[], None]]] = []  # see `stop`
        self.has_work = False
        self._demotes = False  # whether demotions have work, too
        self._ticker = timers.call_at(clock(), self._tick)
        self._gathered_at, self._gatherer = math.inf, 0  # when the next gathered store is over, and its timer

    @property
    def queues(self) -> list[TierQueue]:
        """All tiers, including removed ones."""
        return [tier.queue for tier in self._tiers]

    @property
    def _driven(self) -> list[TierQueue]:
        return [*self.queues, *(guest.queue for guest in self._guests)]

    @property
    def num_used(self) -> int:
        """The number of tiers, without removed ones."""
        return sum(not queue.is_retired for queue in self.queues)

    @property
    def num_refreshing(self) -> int:
        """The number of used prefixes that tiers are being asked for."""
        return len(self._demotions.refresher)

    @property
    def num_unwritten(self) -> int:
        """The number of stored prefixes whose writes are still to be submitted."""
        return self._demotions.num_unwritten

    def gather(self, *, waits: bool) -> None:
        """Let newly stored chunks wait for the chunks after them, or write them at once."""
        self._demotions.gather(waits=waits)
        self._wake()

    def status(self) -> list[TierStatus]:
        """Return the state of each tier for operators."""
        return [queue.status() for queue in self._driven if not queue.is_retired]

    # --- operators ------------------------------------------------------------------------------------------------

    def add(self, queue: TierQueue) -> None:
        """Add a tier below the others. Entries of the pool are written there when they are used.

        Like a tier that was suspended, it is told which weights are outdated.

        Raises:
            OSError: there is not enough memory for the table of its entries. The tier is not added.
        """
        self._tiers.append(TierState(queue, self._index.table.num_records))
        self._tick_at(self._clock())

    def invite(self, queue: TierQueue) -> TierState:
        """Drive a guest: a tier that only lookups which name it ask. It is read, never written, cleared or outdated.

        It leaves some time after its queue was retired.

        Raises:
            OSError: there is not enough memory for the table of its entries.
        """
        guest = TierState(queue, self._index.table.num_records)
        guest.knows_outdated = True
        self._guests.append(guest)
        self._tick_at(self._clock())
        return guest

    def remove(self, name: str) -> bool:
        """Stop using a tier: fail its waiting calls, and close it when no call runs.

        Return False for an unknown name.
        """
        for queue in self.queues:
            if queue.name == name and not queue.is_retired:
                queue.retire()
                self._wake()
                return True
        return False

    def stop(self, tenant: str | None, model: str | None, on_done: Callable[[], None]) -> Iterator[int]:
        """Stop the promotions of a tenant or a model, and drop its waiting writes, in steps like `drop_writes`.

        Call `on_done` once its running writes have ended, or are late.
        """
        hashes = name_hashes(tenant, model)

        def is_meant(label: int) -> bool:
            pairs = zip(hashes, self._keys.hashes(label), strict=True)
            return all(wanted in (None, own) for wanted, own in pairs)

        self.promotions.stop(is_meant)
        self._demotions.let_go(lambda node: is_meant(self._index.nodes.label[node]))
        self._wake()
        yield 0
        for queue in self.queues:
            yield from queue.drop_writes(*hashes)
        jobs = [job for job in self._demotions.writing if any(has_names(key, *hashes) for key in job.keys)]
        self._awaiting.append((jobs, on_done))
        self._wake()

    def clear(self, tenant: str | None, model: str | None, on_done: Callable[[int, list[str]], None]) -> None:
        """Remove a tenant's or a model's entries from all tiers.

        Call `on_done` once, with the number of removed entries and one text per failed tier.
        """
        clearing = _Clearing(on_done)
        self._wake()
        for tier in self._tiers:
            if tier.queue.is_retired:
                continue
            job = Job(JobKind.CLEAR, names=name_hashes(tenant, model))
            job.on_part = partial(_cleared, clearing, tier.queue.name)
            job.on_late = partial(_hangs, clearing, tier.queue.name, job)
            if tier.queue.submit(job):
                clearing.num_left += 1
                # Chunks that leases keep in the pool would pass for written, and leave it unwritten.
                tier.forget_entries()
            else:
                clearing.problems.append(f"{tier.queue.name} is suspended ({tier.queue.breaker.why_suspended})")
        clearing.one_is_done()

    def outdate(self) -> None:
        """Make tiers evict the entries of outdated weights (`Shares.outdated`) first."""
        for tier in self._tiers:
            tier.knows_outdated = False
        self._wake()

    # --- the depot ------------------------------------------------------------------------------------------------

    def stored(self, entries: Sequence[Entry], *, is_first: bool = False) -> None:
        """Note that entries were sealed, in the order of their chunks. `is_first`: write them before all others."""
        self._demote(partial(self._demotions.stored, is_first=is_first), entries)
        self._wake()  # with `--demote evict`, others must be evicted now

    @property
    def is_usable(self) -> bool:
        """Whether any tier works now."""
        return not all(tier.queue.breaker.why_suspended for tier in self._tiers)

    @property
    def takes_writes(self) -> bool:
        """Whether any tier takes entries now."""
        return any(tier.takes_writes for tier in self._tiers)

    def leave(self, node: int, is_own: Callable[[int], bool]) -> Iterator[int]:
        """Evict the chunks that only a prefix needs as soon as a tier has them: see `Demotions.leave`."""
        yield from self._demotions.leave(node, is_own)
        self._wake()

    def let_go(self, space: Space, digests: bytes) -> None:
        """Keep no chunks of a prefix in the pool only because they are still to be written."""
        nodes = self._index.nodes

        def is_meant(node: int) -> bool:
            return nodes.space_of(node) is space and nodes.key_of(node) == digest_at(digests, nodes.depth[node])

        self._demotions.let_go(is_meant)

    def holds(self, node: int) -> bool:
        """Return whether a working tier has all entries of a chunk, or they are on their way there."""
        return self._demotions.holds(node)

    def _demote(self, write: Callable[[T], None], subject: T) -> None:
        """Write entries. Only log a failure, because the store or lookup before has succeeded."""
        try:
            write(subject)
        except Exception:
            logger.exception("writing entries to the tiers failed")
            self.counters[_DEMOTIONS_FAILED] += 1

    def promote(
        self,
        prefix: Prefix,
        match: Match,
        on_answer: Callable[[], None],
        *,
        wait_seconds: float,
        is_awaited: bool = False,
        guests: Sequence[TierState] = (),
    ) -> bool:
        """Promote the part of a prefix that the pool lacks.

        Args:
            prefix: the chunks of the lookup.
            match: the chunks that the pool has. They stay pinned until the end.
            on_answer: called once, when no more entries can arrive or the time is up.
            wait_seconds: the longest wait of the lookup.
            is_awaited: whether another engine hands over missing chunks. Then tiers are asked however few they are.
            guests: ask only these, not the tiers.

        Returns:
            False if no tier can be asked, or too many lookups wait. Then `on_answer` is never called.
        """
        missing_tokens = (num_digests(prefix.digests) - match.num_chunks) * prefix.space.spec.chunk_tokens
        is_worth_it = is_awaited or missing_tokens >= self.settings.promotion_least_tokens
        is_usable = not all(guest.queue.is_suspended for guest in guests) if guests else self.is_usable
        if not prefix.places or not is_worth_it or not is_usable:
            return False
        if self.promotions.is_full:
            self.counters[_PROMOTIONS_REFUSED] += 1
            return False
        self.counters[_PROMOTIONS] += 1
        self.promotions.begin(prefix, match, wait_seconds, on_answer, guests)
        self.has_work |= self.promotions.has_work
        return True

    # --- the loop -------------------------------------------------------------------------------------------------

    def turn(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Handle outcomes of tiers, and continue pending work. Never wait.

        Do at least one step of each kind of work, then continue until `is_over`.
        """
        self.has_work = False
        for tier in (*self._tiers, *self._guests):
            while parts := tier.queue.poll(1):
                for part in parts:
                    # A promotion's results concern it alone. Otherwise each of them would wake demotion, refreshing and
                    # the reserve.
                    self._demotes |= part.job.operation not in _OF_PROMOTIONS
                    part.job.on_part(part)
                if is_over():
                    self.has_work = True
                    break
            if not (tier.knows_outdated or tier.queue.is_suspended):
                self._tell_outdated(tier)
        self.promotions.turn(is_over)
        if self._demotes or self.used:
            self._turn_demotions(is_over)
        self.has_work |= self._demotes or self.promotions.has_work

    def _turn_demotions(self, is_over: Callable[[], bool]) -> None:
        self._demotes = False
        awaiting, self._awaiting = self._awaiting, []
        for jobs, on_done in awaiting:
            if any(job.num_left and not job.is_late for job in jobs):
                self._awaiting.append((jobs, on_done))
            else:
                on_done()
        while self._can_refresh:
            self._demote(self._demotions.used, self.used.pop())
            if is_over():
                break
        self._demote(self._demotions.turn, is_over)
        # All chunks are in use. Looking for a victim in each turn would keep the loop busy.
        if self._demotions.lacks_victims:
            self._index.evictor.await_victim(self._wake)
        self._demotes |= self._demotions.has_work or self._can_refresh
        due = self._demotions.next_deadline
        if due != self._gathered_at:
            self._timers.cancel(self._gatherer)
            self._gathered_at, self._gatherer = due, self._timers.call_at(due, self._wake)

    def _tick(self) -> None:
        """Notice late calls and due probes, and let a turn ask for used prefixes.

        A thread that begins a call does not notify the loop. So ticks are no further apart than the shortest deadline.
        """
        try:
            for queue in self._driven:
                for job in queue.expire():
                    self.counters[_TIER_JOBS_LATE] += 1
                    job.on_late()
        # Whatever raised, the ticks go on: without them, no late call would ever be noticed again.
        finally:
            self._wake()
            self._guests = [each for each in self._guests if each.queue.num_calls or not each.queue.is_retired]
            now, queues = self._clock(), self._driven
            times = [due for queue in queues if (due := queue.next_deadline()) is not None]
            self._tick_at(min([now + _TICK_SECONDS, *(now + queue.deadline_seconds for queue in queues), *times]))

    def _tick_at(self, when: float) -> None:
        self._timers.cancel(self._ticker)
        self._ticker = self._timers.call_at(when, self._tick)

    @property
    def _can_refresh(self) -> bool:
        return bool(self.used) and not self._demotions.refresher.is_full

    def _tell_outdated(self, tier: TierState) -> None:
        """Tell a tier of all outdated weights: it may have missed some."""

        def on_part(part: JobPart) -> None:
            if part.job.has_failed and tier.queue.is_suspended:
                tier.knows_outdated = False  # once it is back; a tier that only raises is not asked again

        tier.knows_outdated = True
        generations = frozenset(map(self._keys.generation, self._index.shares.outdated)) - {b""}
        if generations:
            tier.queue.submit(Job(JobKind.OUTDATE, generations=generations, on_part=on_part))

    def _wake(self) -> None:
        self.has_work = self._demotes = True

    def close(self, drain_seconds: float = 0.0) -> None:
        """Stop all tiers, in a bounded time."""
        for queue in self._driven:
            queue.close(drain_seconds)


def _cleared(clearing: _Clearing, name: str, part: JobPart) -> None:
    # A late one was reported by `_hangs`. Reported twice, the clear would end before the other tiers have.
    if not part.job.is_late:
        clearing.num_removed += part.job.num_cleared or 0
        if part.job.num_cleared is None:
            clearing.problems.append(f"{name} failed")
        clearing.one_is_done()


def _hangs(clearing: _Clearing, name: str, job: Job) -> None:
    clearing.num_removed += job.num_cleared or 0
    clearing.problems.append(f"{name} hangs")
    clearing.one_is_done()
