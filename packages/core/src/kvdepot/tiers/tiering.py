"""What moves between the pool and the tiers below it, and when.

Down (**demotion**): entries are written behind, out of the pool while they stay in it, by one of three rules: when they
are stored, when they are used again, or when they are about to leave. The bytes that may wait are bounded for each
tier; as a queue fills up, ever less of the end of each prefix is taken.

Up (**promotion**): a lookup that the pool answers only in part asks the tiers, in their order, for what is missing;
what they have is given space as a store would be, and read straight into it, many reads at a time. The lookup is
answered when all of it is there or its time is over; what comes later stays in the pool for the next one. Entries that
are on their way already are waited for, never read twice. What a tier would bring later than the engine computes it, by
what both took lately, is not read. A read that overruns the tier's deadline is given up with all that comes after it:
only the bytes that it may still write to stay taken until it returns, and their chunks can be stored by engines.

Everything here happens on the depot's loop and only ever submits; `TierQueue` waits for the storage. Records of
promotions name the process that writes them, so a depot that is killed leaves nothing behind that could be found.
"""

import itertools
import logging
import os
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from statistics import median
from typing import Final

from kvdepot.config import Demotion
from kvdepot.index.columns import make_column
from kvdepot.index.eviction import NO_NODE
from kvdepot.index.index import MOST_EVICTED, ChunkIndex, EntryPlace, Space
from kvdepot.keys import DIGEST_BYTES
from kvdepot.layout import GroupKind
from kvdepot.pool.table import SEALED, Writer
from kvdepot.processes.identity import process_start_time
from kvdepot.tiers.jobs import Job, Operation, Part
from kvdepot.tiers.keys import LABEL_BYTES, label_of, place_of, tier_key
from kvdepot.tiers.queue import TierQueue
from kvdepot.wire.operations import TierStatus

logger = logging.getLogger(__name__)

MAXIMUM_QUESTIONS: Final = 4096  # keys of one lookup
MAXIMUM_PROMOTIONS: Final = 4096  # at a time: each turn looks through them
# What is done before the loop looks at the time again: at most about half a millisecond of it.
_ENTRIES_A_STEP: Final = 24  # that are given space, or sealed
_LEAST_ENTRIES: Final = 8  # that are given space however late it is, as tiers take several at a time
_QUESTIONS_A_STEP: Final = 128  # entries that are looked for
_CHUNKS_UP: Final = 32  # of a prefix that is used again, or leaves
_MOST_GOING_DOWN: Final = 256  # ends of prefixes that are looked at in steps
_LEAST_VICTIMS: Final = 2  # each with what is before it, to keep up with stores
_PRESSURE_BEGINS: Final = 0.5  # of what may wait to be written
_PACES: Final = 15  # promotions of a tier whose median says how fast it is
_LEAST_PACES: Final = 3
_TRY_ANYWAY: Final = 16  # every so often, to learn that a tier has become faster
_LOOK_SECONDS: Final = 1.0
_TURNED_OVER: Final = (
    0.25  # of a tier's entries that it evicted, until what is in the pool is thought to be missing there
)
_RESERVE_SHARE: Final = 0.05  # of the pool: free space that is kept where entries are written as they leave


@dataclass(frozen=True, slots=True)
class TieringSettings:
    """How tiers are used."""

    demotion: Demotion = Demotion.STORE
    least_tokens: int = 0  # prefixes that are shorter are not demoted
    promotion_seconds: float = 1.0  # the most that a lookup waits for tiers
    promotion_least_tokens: int = 0  # tiers are not asked for fewer
    makes_checksums: bool = False  # of what is promoted, for engines to compare


@dataclass(frozen=True, slots=True)
class ShardPlace:
    """Where the entries of one shard of one layer group of one model go."""

    group: int
    shard: int
    num_bytes: int
    layout: int


class _State(Enum):
    COMING = 0
    HERE = 1
    FAILED = 2
    LOST = 3  # its read overran the deadline: not of the index any more, and its space is taken until that returns


@dataclass(slots=True, eq=False)
class _Flight:
    """An entry that is being read into the pool."""

    record: int
    chunk: int
    node: int
    state: _State = _State.COMING
    checksum: bytes = b""


@dataclass(slots=True, eq=False)
class Promotion:
    """One prefix on its way up."""

    space: Space
    digests: bytes
    places: Sequence[ShardPlace]
    label: int
    found: int  # leading chunks that the pool has
    pins: tuple[int, ...]
    wait_seconds: float
    deadline: float
    on_answer: Callable[[], None] | None  # None once it is answered
    tier: int = -1
    limit: int = 0  # chunks that are looked at
    asked: list[tuple[int, ShardPlace]] = field(default_factory=list[tuple[int, ShardPlace]])
    there: list[bool] = field(default_factory=list[bool])
    asks_first: bool = False  # for the first chunk that is missing, before all the others
    steps: Iterator[None] | None = None  # of what is to be found out next
    wanted: deque[tuple[int, ShardPlace]] = field(default_factory=deque[tuple[int, ShardPlace]])
    flights: deque[_Flight] = field(default_factory=deque[_Flight])
    num_awaited: int = 0  # entries on their way in other promotions
    is_broken: bool = False  # a chunk of it failed: what follows is of no use
    is_stopped: bool = False  # it was cleared
    is_asking: bool = False
    token_seconds: float = 0.0  # that the engine takes to compute a token
    reading_since: float = 0.0
    num_read_bytes: int = 0  # since then
    has_landed: bool = False  # something of it, from whichever tier

    @property
    def num_chunks(self) -> int:
        """Chunks of the whole run."""
        return len(self.digests) // DIGEST_BYTES

    @property
    def has_work(self) -> bool:
        """Whether something can be done without waiting for a tier."""
        if self.steps is not None or self.wanted:
            return True
        if self.flights:
            return self.flights[0].state is not _State.COMING
        return not self.num_awaited and not self.is_asking

    def digest(self, chunk: int) -> bytes:
        """Return the key of one chunk."""
        return self.digests[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES]


@dataclass(slots=True, eq=False)
class _Writing:
    """Entries that are being copied to one tier: record, header and node of each."""

    tier: int
    entries: list[tuple[int, int, int]]
    evicts: bool  # they leave the pool afterwards


@dataclass(slots=True, eq=False)
class _Clearing:
    """A clear of all tiers."""

    on_done: Callable[[int, list[str]], None]
    num_left: int = 1  # tiers that are at it, and who asks them
    num_removed: int = 0
    problems: list[str] = field(default_factory=list[str])

    def tier_is_done(self) -> None:
        """One of those that are left is not any more."""
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
        on_corrupt: called with record and header of an entry whose bytes lack their checksum.
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
        self.queues = list(queues)
        self.counters: Counter[str] = Counter()
        self._index = index
        self.settings = settings
        self._names_of = names_of
        self._on_corrupt = on_corrupt
        self._clock = clock
        self._labels: dict[int, bytes] = {}  # of tenant and model; no tuples: `server.watch`
        self._places: dict[tuple[int, int, int, int, int], bytes] = {}
        # by tier, then by record: the header under which it is known to be in that tier, or on its way there
        self._written = [self._no_headers() for _ in queues]
        self._writings: dict[int, _Writing] = {}  # by id of the job, as the next ones
        self._questions: dict[int, Promotion] = {}
        self._readings: dict[int, list[_Flight]] = {}
        self._clears: dict[int, tuple[_Clearing, str]] = {}  # and the tier's name
        self._going_down: dict[int, Iterator[None]] = {}  # by the last node of a prefix
        self._jobs: dict[int, Job] = {}
        self._promotions: dict[Promotion, None] = {}  # who was served last at the end
        self._awaited: dict[int, list[Promotion]] = {}  # by record
        self._is_coming = make_column("B", index.table.num_records)
        self._num_coming = 0  # records
        self._own_writer: Writer | None = None  # this process
        self._paces = [deque[float](maxlen=_PACES) for _ in queues]  # seconds a byte
        self._num_skipped = [0] * len(queues)
        self._num_evicted = [0] * len(queues)  # by the tier, when its headers were last forgotten
        self._next_look = 0.0

    # --- tiers ----------------------------------------------------------------------------------------------------

    def add(self, queue: TierQueue) -> None:
        """Use one more tier, below those that are here; what is in the pool goes there as it is used.

        Raises:
            OSError: there is no memory for what is known of its entries; it is not used.
        """
        self._written.append(self._no_headers())
        self.queues.append(queue)
        self._paces.append(deque[float](maxlen=_PACES))
        self._num_skipped.append(0)
        self._num_evicted.append(0)

    def remove(self, name: str) -> bool:
        """Stop using a tier: what waits for it fails now, what runs may end; False if there is none of that name.

        Its place stays, as numbers of tiers are in promotions and records; it is closed once nothing of it runs.
        """
        for queue in self.queues:
            if queue.name == name and not queue.is_retired:
                queue.retire()
                return True
        return False

    def _no_headers(self) -> "memoryview[int]":
        return make_column("Q", self._index.table.num_records)

    @property
    def num_used(self) -> int:
        """Tiers that were not removed."""
        return sum(not queue.is_retired for queue in self.queues)

    # --- down -----------------------------------------------------------------------------------------------------

    def stored(self, records: Sequence[int]) -> None:
        """Entries were sealed, in the order of their chunks."""
        index = self._index
        if self.settings.demotion is not Demotion.STORE or not records or not self._is_long(index.node_of(records[-1])):
            return
        before = index.parent_of(index.node_of(records[0]))
        if before != NO_NODE and self._is_missing(before):
            self._go_down(index.node_of(records[-1]))  # without what is before them they are of no use there
        else:
            self._demote(records)

    def _forget_evicted(self) -> None:
        """Where a tier has evicted a good part of what it held, write anew what is used or leaves.

        What the pool has is asked of no tier, so it is the coldest there, however hot it is.
        """
        for tier, queue in enumerate(self.queues):
            usage = queue.tier.usage()
            num_evicted = usage.counters.get("evicted", 0)
            if num_evicted - self._num_evicted[tier] > _TURNED_OVER * usage.num_entries:
                self._num_evicted[tier] = num_evicted
                self._written[tier] = self._no_headers()

    def used(self, node: int) -> None:
        """A prefix that ends with this chunk was found."""
        if self.settings.demotion is not Demotion.EVICT and self._is_long(node):
            self._go_down(node)

    def _go_down(self, node: int) -> None:
        """Have the end of a prefix written that tiers lack: a short one now, the rest of a long one in steps."""
        if node not in self._going_down and len(self._going_down) < _MOST_GOING_DOWN:
            steps = self._missing_end(node)
            if next(steps, False) is None:
                self._going_down[node] = steps

    def _missing_end(self, node: int) -> Iterator[None]:
        """Look for what tiers lack from a chunk towards the root, then have it written, what is first of it first.

        Once something is dropped, nothing of what follows is written: nobody could use it. The next use tries again.
        """
        index, path = self._index, list[tuple[int, bytes]]()
        nodes = index.space_of(node).nodes
        while node != NO_NODE and self._is_missing(node):
            if path and len(path) % _CHUNKS_UP == 0:
                key = index.key_of(node)
                yield
                if nodes.get(key) != node:
                    return  # it left, and with it what comes after it
            path.append((node, index.key_of(node)))
            node = index.parent_of(node)
        num_dropped = self.counters["demotions_dropped"]
        while path:
            here = [node for node, key in path[: -_CHUNKS_UP - 1 : -1] if nodes.get(key) == node]
            del path[-_CHUNKS_UP:]
            records = [record for node in here for record in index.entries(node) if not self._is_written(record)]
            if records:
                self._demote(records, asks_first=True)
            if self.counters["demotions_dropped"] != num_dropped:
                return
            if path:
                yield
                num_dropped = self.counters["demotions_dropped"]

    def _is_missing(self, node: int) -> bool:
        return any(not self._is_written(record) for record in self._index.entries(node))

    def _is_long(self, node: int) -> bool:
        index = self._index
        return (index.depth_of(node) + 1) * index.space_of(node).spec.chunk_tokens >= self.settings.least_tokens

    def _is_written(self, record: int) -> bool:
        header = self._index.table.header(record)
        return all(
            queue.is_open or written[record] == header
            for queue, written in zip(self.queues, self._written, strict=True)
        )

    def _demote(self, records: Sequence[int], *, evicts: bool = False, asks_first: bool = False) -> bool:
        """Have entries written to every tier that lacks them, the first of them first; False if no tier takes any.

        Those of an earlier server may be there: a tier is asked then, as writing may be dear.
        """
        index, table, taken = self._index, self._index.table, False
        for tier, queue in enumerate(self.queues):
            if queue.is_open:
                continue
            written = self._written[tier]
            missing = [record for record in records if written[record] != table.header(record)]
            pressure = (queue.queued_write_bytes / max(1, queue.write_bytes) - _PRESSURE_BEGINS) / (
                1 - _PRESSURE_BEGINS
            )
            num_kept = len(missing) if pressure <= 0 else round(len(missing) * (1 - min(1.0, pressure)))
            self.counters["demotions_dropped"] += len(missing) - num_kept
            missing = missing[:num_kept]
            if not missing:
                continue
            job = Job(
                Operation.WRITE,
                [self._key_of(record) for record in missing],
                [table.extent(record) for record in missing],
                [table.owner_of(record) for record in missing],
                asks_first=asks_first,
            )
            if not queue.submit(job):
                self.counters["demotions_dropped"] += len(missing)
                continue
            entries = [(record, table.header(record), index.begin_reading(record)) for record in missing]
            self._writings[id(job)] = _Writing(tier, entries, evicts)
            self._jobs[id(job)] = job
            taken = True
            for record, header, _ in entries:
                written[record] = header
        return taken

    def _wrote(self, part: Part) -> None:
        writing = self._writings[id(part.job)]
        written, table = self._written[writing.tier], self._index.table
        entries = writing.entries[part.first : part.first + len(part.outcomes)]
        for (record, header, node), ok in zip(entries, part.outcomes, strict=True):
            if not ok and written[record] == header:
                written[record] = 0
            self._index.end_reading(record, node)
            if writing.evicts:
                self._index.evict(node)
        for place in part.corrupt:
            record, header, _ = writing.entries[place]
            if table.header(record) == header:
                self._on_corrupt(record, header)

    def _make_reserve(self, is_over: Callable[[], bool]) -> None:
        """Write what is about to leave, and let it go, some at least, until a part of the pool is free or `is_over`."""
        index = self._index
        reserve = int(index.extents.ready_bytes * _RESERVE_SHARE)
        leaving = sum(queue.queued_write_bytes for queue in self.queues)
        for number in itertools.count():
            if index.extents.free_bytes + leaving >= reserve or (number >= _LEAST_VICTIMS and is_over()):
                return
            node = index.next_victim()
            if node is None:
                return
            # What is before a leaf that leaves is next to leave: it is written in the same breath.
            nodes, records = [node], index.entries(node)
            while len(nodes) < _CHUNKS_UP and (node := index.parent_of(node)) != NO_NODE and index.is_chain(node):
                nodes.append(node)
                records += index.entries(node)
            records = [record for record in records if not self._is_written(record)]
            if not self._is_long(nodes[0]) or not records or not self._demote(records, evicts=True):
                for leaf in nodes:
                    leaving += sum(index.table.extent(record)[1] for record in index.entries(leaf))
                    if not index.evict(leaf):
                        break
                continue
            leaving += sum(index.table.extent(record)[1] for record in records)

    # --- up -------------------------------------------------------------------------------------------------------

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
            token_seconds: what computing a token takes there, 0 for unknown: tiers that are slower are not read.

        Returns:
            False if there is nobody to ask, or very many wait; then `on_answer` is never called.
        """
        missing_tokens = (len(digests) // DIGEST_BYTES - found) * space.spec.chunk_tokens
        is_worth_it = missing_tokens >= self.settings.promotion_least_tokens
        if not places or not is_worth_it or all(queue.is_open for queue in self.queues):
            return False
        if len(self._promotions) >= MAXIMUM_PROMOTIONS:
            self.counters["promotions_refused"] += 1
            return False
        self._index.pin(pins)
        deadline = self._clock() + wait_seconds
        promotion = Promotion(
            space, digests, places, label, found, pins, wait_seconds, deadline, on_answer, token_seconds=token_seconds
        )
        self._promotions[promotion] = None
        self.counters["promotions"] += 1
        self._ask_next(promotion)
        return True

    def _ask_next(self, promotion: Promotion) -> None:
        """Ask the next tier that answers, or end.

        The first chunk that is missing is asked for by itself: a prompt that nobody has seen costs one small question,
        however long it is.
        """
        while promotion.tier + 1 < len(self.queues) and not promotion.is_stopped:
            promotion.tier += 1
            if self.queues[promotion.tier].is_open:
                continue
            first = self._missing_of(promotion, promotion.found) if promotion.space.full_mask else []
            first = [(chunk, place) for chunk, place in first if promotion.space.full_mask & 1 << place.group]
            promotion.asks_first = bool(first)
            if not first:
                promotion.steps = self._asking(promotion)
                return
            if self._ask(promotion, first):
                return
        self._end(promotion)

    def _ask(self, promotion: Promotion, entries: list[tuple[int, ShardPlace]]) -> bool:
        job = Job(Operation.CONTAINS, [self._key_in_tiers(promotion, *entry) for entry in entries])
        return self._submit_question(promotion, entries, job)

    def _submit_question(self, promotion: Promotion, entries: list[tuple[int, ShardPlace]], job: Job) -> bool:
        if not self.queues[promotion.tier].submit(job):
            return False
        promotion.asked, promotion.there = entries, [False] * len(entries)
        promotion.is_asking = True
        self._questions[id(job)] = promotion
        self._jobs[id(job)] = job
        return True

    def _key_in_tiers(self, promotion: Promotion, chunk: int, place: ShardPlace) -> bytes:
        tenant, model = self._labels_of(promotion.label)
        return tier_key(tenant, model, self._place(promotion.space, place), promotion.digest(chunk))

    def _missing_of(self, promotion: Promotion, chunk: int) -> list[tuple[int, ShardPlace]]:
        """Return the entries of a chunk that the pool lacks and that a longer prefix may need."""
        index, space = self._index, promotion.space
        node = index.node(space, promotion.digest(chunk), chunk)
        known = space.full_mask if chunk < promotion.found else 0
        return [
            (chunk, place)
            for place in promotion.places
            if not known & 1 << place.group and (node is None or index.entry(node, place.group, place.shard) is None)
        ]

    def _asking(self, promotion: Promotion) -> Iterator[None]:
        """Ask for all that is missing, or the next tier if nothing is."""
        windows = max((chunks for _, chunks in promotion.space.windows), default=0)
        first = max(0, promotion.found + 1 - windows) if windows else promotion.found
        promotion.limit = min(
            promotion.num_chunks, promotion.found + max(1, MAXIMUM_QUESTIONS // len(promotion.places))
        )
        entries: list[tuple[int, ShardPlace]] = []
        keys: list[bytes] = []
        chunks_a_step = max(1, _QUESTIONS_A_STEP // len(promotion.places))
        for chunk in range(first, promotion.limit):
            missing = self._missing_of(promotion, chunk)
            entries += missing
            keys += [self._key_in_tiers(promotion, *entry) for entry in missing]
            if chunk % chunks_a_step == 0:
                yield
        promotion.steps = None
        if not entries or not self._submit_question(promotion, entries, Job(Operation.CONTAINS, keys)):
            self._ask_next(promotion)

    def _answered(self, part: Part) -> None:
        promotion = self._questions.get(id(part.job))
        if promotion is None:
            return  # it was given up
        promotion.there[part.first : part.first + len(part.outcomes)] = part.outcomes
        if not part.is_last:
            return
        promotion.is_asking = False
        if promotion.asks_first and not all(promotion.there):
            self._ask_next(promotion)
        elif promotion.asks_first and (promotion.space.windows or promotion.found + 1 < promotion.num_chunks):
            promotion.asks_first = False
            promotion.steps = self._asking(promotion)
        else:
            promotion.limit = max(promotion.limit, promotion.found + 1)
            promotion.steps = self._choosing(promotion)

    def _choosing(self, promotion: Promotion) -> Iterator[None]:
        """Find out what of the tier's entries is of use, and have it read; the next tier is asked if nothing is."""
        there: set[tuple[int, int, int]] = set()
        for start in range(0, len(promotion.asked), _QUESTIONS_A_STEP):
            stop = start + _QUESTIONS_A_STEP
            there.update(
                (chunk, place.group, place.shard)
                for (chunk, place), is_there in zip(
                    promotion.asked[start:stop], promotion.there[start:stop], strict=True
                )
                if is_there
            )
            yield
        length = yield from self._usable_prefix(promotion, there)
        if length <= promotion.found or promotion.is_stopped:
            promotion.steps = None
            self._ask_next(promotion)
            return
        space = promotion.space
        first_of = [
            promotion.found if group.kind is GroupKind.FULL_ATTENTION else max(0, length - chunks)
            for group, chunks in zip(space.spec.groups, space.chunks_needed, strict=True)
        ]
        num_bytes = sum((length - first_of[place.group]) * place.num_bytes for place in promotion.places)
        if not self._is_worth_it(promotion, (length - promotion.found) * space.spec.chunk_tokens, num_bytes):
            self.counters["promotions_not_worth_it"] += 1
            promotion.steps = None
            self._ask_next(promotion)
            return
        for chunk in range(min(first_of), length):
            promotion.wanted.extend((chunk, place) for place in promotion.places if chunk >= first_of[place.group])
            if chunk % _QUESTIONS_A_STEP == 0:
                yield
        promotion.steps = None
        promotion.is_broken = promotion.is_stopped
        promotion.reading_since, promotion.num_read_bytes = self._clock(), 0

    def _is_worth_it(self, promotion: Promotion, num_tokens: int, num_bytes: int) -> bool:
        """Whether reading what is wanted is quicker than computing it, as far as both are known."""
        tier = promotion.tier
        if not promotion.token_seconds or len(self._paces[tier]) < _LEAST_PACES:
            return True
        if num_bytes * median(self._paces[tier]) <= num_tokens * promotion.token_seconds:
            return True
        self._num_skipped[tier] += 1
        return self._num_skipped[tier] % _TRY_ANYWAY == 0

    def _usable_prefix(self, promotion: Promotion, there: set[tuple[int, int, int]]) -> Generator[None, None, int]:
        """Return how many leading chunks could be used if everything that is there, here or coming were in the pool."""
        index, space = self._index, promotion.space
        by_group: dict[int, list[ShardPlace]] = {}
        for place in promotion.places:
            by_group.setdefault(place.group, []).append(place)

        def has(chunk: int, group: int) -> bool:
            node = index.node(space, promotion.digest(chunk), chunk)
            for place in by_group[group]:
                if (chunk, group, place.shard) in there:
                    continue
                record = None if node is None else index.entry(node, group, place.shard)
                if record is None or not (index.table.header(record) & 0xFF == SEALED or self._is_coming[record]):
                    return False
            return True

        full = [group for group in by_group if space.full_mask & 1 << group]
        length = promotion.limit
        if full:
            for length in range(promotion.found, promotion.limit + 1):
                if length == promotion.limit or not all(has(length, group) for group in full):
                    break
                if length % _QUESTIONS_A_STEP == 0:
                    yield
        windows = [(group, space.chunks_needed[group]) for group in by_group if not space.full_mask & 1 << group]
        while length > promotion.found:
            blocked: list[int] = []
            for group, chunks in windows:
                blocked += [
                    chunk for chunk in range(length - 1, max(0, length - chunks) - 1, -1) if not has(chunk, group)
                ]
            if not blocked:
                break
            length = min(blocked) if full else max(blocked)
            yield
        return length

    def _fetch(self, promotion: Promotion, is_over: Callable[[], bool]) -> None:
        """Make room for the next entries that are wanted, some at least, and have them read."""
        index, space, queue = self._index, promotion.space, self.queues[promotion.tier]
        if queue.is_open:
            promotion.wanted.clear()
            return
        try:
            writer = self._writer_of(queue)
        except OSError:  # no descriptor is left: nobody could tell later whether it still writes
            self.counters["promotions_without_descriptor"] += 1
            promotion.wanted.clear()
            return
        flights: list[_Flight] = []
        keys: list[bytes] = []
        tenant, model = self._labels_of(promotion.label)
        most_steps = index.num_room_steps + MOST_EVICTED
        for _ in range(_QUESTIONS_A_STEP):
            if not promotion.wanted or len(flights) == _ENTRIES_A_STEP:
                break
            if len(flights) >= _LEAST_ENTRIES and is_over():
                break
            chunk, place = promotion.wanted.popleft()
            digest = promotion.digest(chunk)
            node = index.node(space, digest, chunk)
            record = None if node is None else index.entry(node, place.group, place.shard)
            if record is not None:
                if self._is_coming[record]:
                    self._awaited.setdefault(record, []).append(promotion)
                    promotion.num_awaited += 1
                elif index.table.header(record) & 0xFF != SEALED:
                    promotion.wanted.clear()  # a worker is writing it, or a tier that hangs
                continue
            parent = index.node(space, promotion.digest(chunk - 1), chunk - 1) if chunk else None
            if (chunk and parent is None and space.full_mask) or (node is None and digest in space.nodes):
                promotion.wanted.clear()
                break
            begun = index.begin_entry(
                EntryPlace(
                    space, digest, NO_NODE if parent is None else parent, chunk, place.group, place.shard,
                    place.num_bytes, place.layout, promotion.label, writer,
                ),
                most_steps - index.num_room_steps,
            )  # fmt: skip
            if begun is None:
                self.counters["promotions_without_room"] += 1
                promotion.wanted.clear()
                break
            flights.append(_Flight(begun, chunk, index.node_of(begun)))
            keys.append(tier_key(tenant, model, self._place(space, place), digest))
        if flights:
            extents = [index.table.extent(flight.record) for flight in flights]
            job = Job(Operation.READ, keys, extents, makes_checksums=self.settings.makes_checksums)
            for flight in flights:
                self._is_coming[flight.record] = 1
            self._num_coming += len(flights)
            promotion.flights += flights
            if queue.submit(job):
                self._readings[id(job)] = flights
                self._jobs[id(job)] = job
            else:
                for flight in flights:
                    flight.state = _State.FAILED

    def _writer_of(self, queue: TierQueue) -> Writer:
        """Return who writes what a tier reads into the pool.

        Raises:
            OSError: it cannot be told when its process began.
        """
        pid = queue.tier.writer_pid
        if pid:
            return Writer(pid, process_start_time(pid))
        if self._own_writer is None:  # to read a file gives the interpreter's lock to threads of tiers, time and again
            self._own_writer = Writer(os.getpid(), process_start_time(os.getpid()))
        return self._own_writer

    def _read(self, part: Part) -> None:
        flights = self._readings[id(part.job)]
        checksums = part.checksums or itertools.repeat(b"")
        for flight, ok, checksum in zip(flights[part.first :], part.outcomes, checksums, strict=False):
            flight.checksum = checksum
            if flight.state is _State.LOST:
                self._index.free_abandoned(flight.record)
            else:
                flight.state = _State.HERE if ok else _State.FAILED

    def _give_up(self, job: Job) -> None:
        """A call of a job hangs: nobody waits for what it would bring."""
        promotion = self._questions.pop(id(job), None)
        if promotion is not None:
            promotion.is_asking = False
            if promotion.on_answer is None:
                self._end(promotion)
            else:
                self._ask_next(promotion)
        self._cleared(job, "hangs")
        for flight in self._readings.get(id(job), ()):
            if flight.state is _State.COMING:
                flight.state = _State.LOST
                self._index.abandon_entry(flight.record)
                self.counters["promotions_failed"] += 1
                self._arrived(flight.record)

    def _land(self, promotion: Promotion) -> None:
        """Seal what has come, in the order of the prefix; after a failure nothing more."""
        landed: list[_Flight] = []
        for _ in range(_ENTRIES_A_STEP):  # what is left, the next turn lands
            if not promotion.flights or promotion.flights[0].state is _State.COMING:
                break
            flight = promotion.flights.popleft()
            if flight.state is not _State.HERE:
                promotion.is_broken = True
            if not promotion.is_broken:
                landed.append(flight)
            elif flight.state is not _State.LOST:
                self._drop(flight)
        if landed:
            self._seal(promotion, landed)
        if promotion.is_broken:
            promotion.wanted.clear()
        if not (promotion.flights or promotion.wanted or promotion.num_awaited):
            self._after_tier(promotion)

    def _seal(self, promotion: Promotion, flights: Sequence[_Flight]) -> None:
        index, written = self._index, self._written[promotion.tier]
        checksums = b"".join(flight.checksum for flight in flights)
        index.seal_entries([flight.record for flight in flights], int(self._clock()), checksums)
        self.counters["entries_promoted"] += len(flights)
        promotion.has_landed = True
        promotion.num_read_bytes += sum(index.table.extent(flight.record)[1] for flight in flights)
        for flight in flights:
            written[flight.record] = index.table.header(flight.record)
            self._arrived(flight.record)

    def _drop(self, flight: _Flight) -> None:
        self._index.discard_entry(flight.record)
        self.counters["promotions_failed"] += 1
        self._arrived(flight.record)

    def _arrived(self, record: int) -> None:
        """An entry is here, or will not come: those who wait for it go on."""
        self._num_coming -= self._is_coming[record]
        self._is_coming[record] = 0
        for promotion in self._awaited.pop(record, ()):
            promotion.num_awaited -= 1

    def _after_tier(self, promotion: Promotion) -> None:
        found, _ = self._index.longest_prefix(promotion.space, promotion.digests)
        if promotion.num_read_bytes:
            seconds = self._clock() - promotion.reading_since
            self._paces[promotion.tier].append(seconds / promotion.num_read_bytes)
            waited_seconds = self._clock() - promotion.deadline + promotion.wait_seconds
            if promotion.on_answer is not None and waited_seconds <= self.settings.promotion_seconds:
                self.queues[promotion.tier].was_in_time()
        has_advanced, promotion.found = found > promotion.found, max(promotion.found, found)
        if found >= promotion.num_chunks or promotion.on_answer is None:
            self._end(promotion)
            return
        if has_advanced and promotion.limit < promotion.num_chunks:
            promotion.tier -= 1  # it was not asked for all of it yet
        self._ask_next(promotion)

    def _end(self, promotion: Promotion) -> None:
        del self._promotions[promotion]
        self._answer(promotion)
        self._index.unpin(promotion.pins)

    def _answer(self, promotion: Promotion) -> None:
        on_answer, promotion.on_answer = promotion.on_answer, None
        if on_answer is not None:
            on_answer()

    # --- operators ------------------------------------------------------------------------------------------------

    def clear(self, tenant: str | None, model: str | None, on_done: Callable[[int, list[str]], None]) -> None:
        """Remove a tenant's or a model's entries from every tier.

        `on_done` is called once with how many were removed, and with a text for each tier in which that was not done.
        """
        clearing = _Clearing(on_done)
        labels = None if tenant is None else label_of(tenant), None if model is None else label_of(model)
        for number, queue in enumerate(self.queues):
            if queue.is_retired:
                continue
            job = Job(Operation.CLEAR, labels=labels)
            if queue.submit(job):
                self._clears[id(job)] = clearing, queue.name
                self._jobs[id(job)] = job
                clearing.num_left += 1
                self._written[number] = self._no_headers()
            else:
                clearing.problems.append(f"{queue.name} is left alone ({queue.why_open})")
        clearing.tier_is_done()

    def _cleared(self, job: Job, problem: str) -> None:
        clearing, name = self._clears.pop(id(job), (None, ""))
        if clearing is None:
            return
        clearing.num_removed += job.num_cleared or 0
        if problem:
            clearing.problems.append(f"{name} {problem}")
        clearing.tier_is_done()

    @property
    def num_promotions(self) -> int:
        """Prefixes on their way up."""
        return len(self._promotions)

    @property
    def num_under_way(self) -> int:
        """Jobs of tiers, and entries on their way up."""
        return len(self._jobs) + self._num_coming

    def stop(self, tenant: str | None, model: str | None) -> Iterator[int]:
        """Let nothing more of a tenant or a model come up, and do not begin what waits to be written of it.

        Yields as `TierQueue.drop_writes` does.
        """
        labels = None if tenant is None else label_of(tenant), None if model is None else label_of(model)
        for promotion in self._promotions:
            if all(
                wanted in (None, label) for wanted, label in zip(labels, self._labels_of(promotion.label), strict=True)
            ):
                promotion.is_stopped = promotion.is_broken = True
                promotion.wanted.clear()
        yield 0
        for queue in list(self.queues):
            yield from queue.drop_writes(*labels)

    def status(self) -> list[TierStatus]:
        """Return what an operator wants to see of each tier."""
        return [queue.status() for queue in self.queues if not queue.is_retired]

    # --- the loop -------------------------------------------------------------------------------------------------

    def turn(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Take in what tiers have done, look at deadlines, go on with what is under way. Never waits.

        Of everything that there is, a step is done, and more until `is_over`.
        """
        now = self._clock()
        if now >= self._next_look:
            self._next_look = now + _LOOK_SECONDS
            self._forget_evicted()
        for tier, queue in enumerate(self.queues):
            for job in queue.expire():
                self.counters["tier_jobs_late"] += 1
                self._give_up(job)
            while parts := queue.poll(1):
                self._take(tier, *parts)
                if is_over():
                    break
        for promotion in [p for p in self._promotions if p.on_answer is not None and p.deadline <= now]:
            self.counters["promotions_late"] += 1
            is_slow = not promotion.has_landed and bool(promotion.is_asking or promotion.flights)
            if is_slow and promotion.wait_seconds >= self.settings.promotion_seconds:
                self.queues[promotion.tier].was_too_late(self.settings.promotion_seconds)
            self._answer(promotion)
            if is_over():
                break
        while (promotion := next((p for p in self._promotions if p.has_work), None)) is not None:
            self._go_on(promotion, is_over)
            if is_over():
                break
        while self._going_down:
            node = next(iter(self._going_down))
            steps = self._going_down.pop(node)
            if next(steps, False) is None:
                self._going_down[node] = steps
            if is_over():
                break
        if self.settings.demotion is Demotion.EVICT:
            self._make_reserve(is_over)

    def _go_on(self, promotion: Promotion, is_over: Callable[[], bool]) -> None:
        """Do a step for a promotion that has work."""
        del self._promotions[promotion]
        self._promotions[promotion] = None
        if promotion.steps is not None:
            next(promotion.steps, None)
            return
        if promotion.wanted:
            self._fetch(promotion, is_over)
        self._land(promotion)

    def _take(self, tier: int, part: Part) -> None:
        job, number = part.job, id(part.job)
        match job.operation:
            case Operation.WRITE:
                self._wrote(part)
            case Operation.CONTAINS:
                self._answered(part)
            case Operation.READ:
                self._read(part)
            case Operation.CLEAR:
                self._cleared(job, "failed" if job.num_cleared is None else "")
        if part.is_last:
            del self._jobs[number]
            for jobs in (self._writings, self._questions, self._readings):
                jobs.pop(number, None)

    def next_deadline(self) -> float | None:
        """Return when `turn` has something to do at the latest, of the clock; None for never."""
        has_results = any(queue.has_results for queue in self.queues)
        if has_results or self._going_down or any(p.has_work for p in self._promotions):
            return self._clock()
        times = [promotion.deadline for promotion in self._promotions if promotion.on_answer is not None]
        times += [due for queue in self.queues if (due := queue.next_deadline()) is not None]
        return min(times, default=None)

    def close(self, drain_seconds: float = 0.0) -> None:
        """Stop every tier, in a bounded time."""
        for queue in self.queues:
            queue.close(drain_seconds)

    # --- names ----------------------------------------------------------------------------------------------------

    def _labels_of(self, label: int) -> tuple[bytes, bytes]:
        labels = self._labels.get(label)
        if labels is None:
            tenant, model = self._names_of(label)
            labels = self._labels[label] = label_of(tenant) + label_of(model)
        return labels[:LABEL_BYTES], labels[LABEL_BYTES:]

    def _place(self, space: Space, place: ShardPlace) -> bytes:
        number = space.number, place.group, place.shard, place.layout, place.num_bytes
        found = self._places.get(number)
        if found is None:
            found = self._places[number] = place_of(
                space.digest, place.group, place.shard, place.layout, place.num_bytes
            )
        return found

    def _key_of(self, record: int) -> bytes:
        index, table = self._index, self._index.table
        node = index.node_of(record)
        group, shard = table.place_of(record)
        place = ShardPlace(group, shard, table.extent(record)[1], table.layout_of(record))
        tenant, model = self._labels_of(index.label_of(node))
        return tier_key(tenant, model, self._place(index.space_of(node), place), table.key_of(record))
