"""What moves between the pool and the tiers below it, and when.

Down (`demotion`): entries are written behind, out of the pool while they stay in it. Up (`promotion`): a lookup that
the pool answers only in part asks the tiers, in their order, for what is missing. The lookup is answered when all of it
is there or its time is over; what comes later stays in the pool for the next one. A tier is not read if it would bring
entries later than the engine computes them, going by what both took lately.

Everything here happens on the depot's loop and only submits; `TierQueue` waits for the storage.
"""

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

from kvdepot.config import Demotion
from kvdepot.index.index import ChunkIndex, Space
from kvdepot.keys import DIGEST_BYTES
from kvdepot.tiers.demotion import Demotions
from kvdepot.tiers.jobs import Job, Operation, Part
from kvdepot.tiers.known import KnownTier
from kvdepot.tiers.names import EntryKeys, ShardPlace, labels_to_match
from kvdepot.tiers.promotion import Promotions, Waiter
from kvdepot.tiers.queue import TierQueue
from kvdepot.tiers.reading import Prefix, PromotionContext
from kvdepot.wire.operations import TierStatus

logger = logging.getLogger(__name__)

__all__ = ["ShardPlace", "Tiering", "TieringSettings"]

T = TypeVar("T")

_LOOK_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class TieringSettings:
    """How tiers are used."""

    demotion: Demotion = Demotion.STORE
    least_tokens: int = 0  # shorter prefixes are not demoted
    promotion_seconds: float = 1.0  # the most that a lookup waits for tiers
    promotion_least_tokens: int = 0  # tiers are not asked for fewer


@dataclass(slots=True, eq=False)
class _Clearing:
    """A clear of all tiers."""

    on_done: Callable[[int, list[str]], None]
    num_left: int = 1  # tiers that are at it, and the caller
    num_removed: int = 0
    problems: list[str] = field(default_factory=list[str])

    def one_is_done(self) -> None:
        """Report to the caller if that was the last one."""
        self.num_left -= 1
        if not self.num_left:
            self.on_done(self.num_removed, self.problems)


class Tiering:
    """Demotions and promotions of one depot.

    Args:
        index: of the pool.
        queues: the tiers, fastest first; owned by this object.
        settings: how they are used.
        names_of: tenant and model by number.
        on_corrupt: called with record and header of an entry whose bytes do not match their checksum.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        index: ChunkIndex,
        queues: Sequence[TierQueue],
        settings: TieringSettings,
        *,
        names_of: Callable[[int], tuple[str, str]],
        on_corrupt: Callable[[int, int], object],
        clock: Callable[[], float],
    ) -> None:
        self.counters: Counter[str] = Counter()
        self.settings = settings
        self._index = index
        self._clock = clock
        self._tiers = [KnownTier(queue, index.table.num_records) for queue in queues]
        self._keys = EntryKeys(index, names_of)
        self._demotions = Demotions(
            index, self._tiers, self._keys, settings.demotion, settings.least_tokens, self.counters, on_corrupt
        )
        self.promotion_context = PromotionContext(index, self._keys, self.counters, clock, settings.promotion_seconds)
        self._promotions = Promotions(self.promotion_context, self._tiers)
        self._next_look = 0.0

    @property
    def queues(self) -> list[TierQueue]:
        """All tiers, those that were removed included."""
        return [tier.queue for tier in self._tiers]

    @property
    def num_used(self) -> int:
        """Tiers that were not removed."""
        return sum(not queue.is_retired for queue in self.queues)

    @property
    def num_promotions(self) -> int:
        """Prefixes on their way up."""
        return len(self._promotions)

    @property
    def num_under_way(self) -> int:
        """Calls of tiers, and entries on their way up."""
        return sum(queue.num_calls for queue in self.queues) + self._promotions.num_coming

    def status(self) -> list[TierStatus]:
        """Return what an operator wants to see of each tier."""
        return [queue.status() for queue in self.queues if not queue.is_retired]

    # --- operators ------------------------------------------------------------------------------------------------

    def add(self, queue: TierQueue) -> None:
        """Use one more tier, below the others; entries of the pool go there as they are used.

        Raises:
            OSError: there is no memory for what is known of its entries; it is not used.
        """
        self._tiers.append(KnownTier(queue, self._index.table.num_records))

    def remove(self, name: str) -> bool:
        """Stop using a tier: what waits for it fails now, what runs may end. Returns False if none has that name.

        It is closed once none of its calls runs.
        """
        for queue in self.queues:
            if queue.name == name and not queue.is_retired:
                queue.retire()
                return True
        return False

    def stop(self, tenant: str | None, model: str | None) -> Iterator[int]:
        """Let nothing more of a tenant or a model come up, and do not begin writes of it that wait.

        Yields as `TierQueue.drop_writes` does.
        """
        labels = labels_to_match(tenant, model)

        def is_meant(owner: int) -> bool:
            pairs = zip(labels, self._keys.labels(owner), strict=True)
            return all(wanted in (None, label) for wanted, label in pairs)

        self._promotions.stop(is_meant)
        yield 0
        for queue in self.queues:
            yield from queue.drop_writes(*labels)

    def clear(self, tenant: str | None, model: str | None, on_done: Callable[[int, list[str]], None]) -> None:
        """Remove a tenant's or a model's entries from every tier.

        `on_done` is called once with how many were removed, and a text for each tier in which that was not done.
        """
        clearing = _Clearing(on_done)
        for tier in self._tiers:
            if tier.queue.is_retired:
                continue
            job = Job(Operation.CLEAR, labels=labels_to_match(tenant, model))
            job.on_part = partial(_cleared, clearing, tier.queue.name)
            job.on_late = partial(_hangs, clearing, tier.queue.name, job)
            if tier.queue.submit(job):
                clearing.num_left += 1
                tier.forget_entries()
            else:
                clearing.problems.append(f"{tier.queue.name} is suspended ({tier.queue.breaker.why_suspended})")
        clearing.one_is_done()

    # --- the depot ------------------------------------------------------------------------------------------------

    def stored(self, records: Sequence[int]) -> None:
        """Hear that entries were sealed, in the order of their chunks."""
        self._demote(self._demotions.stored, records)

    def used(self, node: int) -> None:
        """Hear that a prefix that ends with this chunk was found."""
        self._demote(self._demotions.used, node)

    def _demote(self, begin: Callable[[T], None], subject: T) -> None:
        """Begin to write entries. A failure is logged: the store or lookup that came before has succeeded."""
        try:
            begin(subject)
        except Exception:
            logger.exception("entries are not written to the tiers")
            self.counters["demotions_failed"] += 1

    def promote(
        self,
        space: Space,
        digests: bytes,
        places: Sequence[ShardPlace],
        label: int,
        *,
        found: int,
        pins: tuple[int, ...],
        wait_seconds: float,
        on_answer: Callable[[], None],
        token_seconds: float = 0.0,
    ) -> bool:
        """Ask the tiers for what the pool lacks of a prefix.

        Args:
            space: of the chunks.
            digests: packed `(num_chunks, 32)`, from chunk 0 on.
            places: of every shard of every group of the model's cache.
            label: number of tenant and model.
            found: leading chunks that the pool has.
            pins: their nodes, kept until the end.
            wait_seconds: how long the lookup may wait.
            on_answer: called once, when everything that can come is here or the time is over.
            token_seconds: what computing a token takes the engine, 0 for unknown: slower tiers are not read.

        Returns:
            False if no tier can be asked, or very many lookups wait; then `on_answer` is never called.
        """
        missing_tokens = (len(digests) // DIGEST_BYTES - found) * space.spec.chunk_tokens
        is_worth_it = missing_tokens >= self.settings.promotion_least_tokens
        if not places or not is_worth_it or all(tier.queue.is_suspended for tier in self._tiers):
            return False
        if self._promotions.is_full:
            self.counters["promotions_refused"] += 1
            return False
        self.counters["promotions"] += 1
        waiter = Waiter(wait_seconds, self._clock() + wait_seconds, on_answer)
        self._promotions.begin(Prefix(space, digests, places, label, token_seconds), found, pins, waiter)
        return True

    # --- the loop -------------------------------------------------------------------------------------------------

    def turn(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Take in what tiers have done, look at deadlines, and go on with what is under way. Never waits.

        Does at least one step of each kind of pending work, then continues until `is_over`.
        """
        now = self._clock()
        if now >= self._next_look:
            self._next_look = now + _LOOK_SECONDS
            for tier in self._tiers:
                tier.forget_evicted()
        for queue in self.queues:
            for job in queue.expire():
                self.counters["tier_jobs_late"] += 1
                job.on_late()
            while parts := queue.poll(1):
                for part in parts:
                    part.job.on_part(part)
                if is_over():
                    break
        self._promotions.turn(is_over)
        self._demotions.turn(is_over)

    def next_deadline(self) -> float | None:
        """Return when `turn` has something to do at the latest, of the clock; None for never."""
        queues = self.queues
        if self._demotions.has_work or any(queue.has_results for queue in queues):
            return self._clock()
        times = itertools.chain([self._promotions.next_deadline()], (queue.next_deadline() for queue in queues))
        return min((due for due in times if due is not None), default=None)

    def close(self, drain_seconds: float = 0.0) -> None:
        """Stop every tier, in a bounded time."""
        for queue in self.queues:
            queue.close(drain_seconds)


def _cleared(clearing: _Clearing, name: str, part: Part) -> None:
    if not part.job.is_late:
        clearing.num_removed += part.job.num_cleared or 0
        if part.job.num_cleared is None:
            clearing.problems.append(f"{name} failed")
        clearing.one_is_done()


def _hangs(clearing: _Clearing, name: str, job: Job) -> None:
    clearing.num_removed += job.num_cleared or 0
    clearing.problems.append(f"{name} hangs")
    clearing.one_is_done()
