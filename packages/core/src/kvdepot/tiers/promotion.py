"""Brings prefixes up from tiers into the pool, for lookups that the pool answers only in part.

`Promotion.run` is one prefix's way from top to bottom: a generator that submits jobs and pauses until their parts are
there. `Promotions` resumes those that can go on. Entries that are on their way already are waited for, never read
twice. A read that overruns the tier's deadline is given up with everything behind it: only the extents that the tier
may still write to stay taken until it returns, and engines can store their chunks.

Records of entries that are being read name the process that writes them, so a depot that is killed leaves nothing
behind that could be found.
"""

import itertools
import os
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, TypeAlias

from kvdepot.index.columns import make_column
from kvdepot.index.eviction import NO_NODE
from kvdepot.index.index import MOST_EVICTED, ChunkIndex, EntryPlace, Space
from kvdepot.index.prefix import usable_prefix
from kvdepot.keys import DIGEST_BYTES
from kvdepot.layout import GroupKind
from kvdepot.pool.table import SEALED, Writer
from kvdepot.processes.identity import process_start_time
from kvdepot.tiers.jobs import Job, Operation, Part
from kvdepot.tiers.known import KnownTier
from kvdepot.tiers.names import EntryKeys, ShardPlace
from kvdepot.tiers.queue import TierQueue

MAXIMUM_QUESTIONS: Final = 4096  # keys of one lookup
MAXIMUM_PROMOTIONS: Final = 4096  # at a time: each turn looks at the deadline of each
# One step is at most about half a millisecond, then the loop looks at the time.
_ENTRIES_A_STEP: Final = 24  # that are given extents, or sealed
_LEAST_ENTRIES: Final = 8  # that are given extents however late it is, as tiers take several at a time
_QUESTIONS_A_STEP: Final = 128  # entries that are looked for

IsOver: TypeAlias = Callable[[], bool]
Entry: TypeAlias = tuple[int, ShardPlace]  # chunk and place


class Pause(Enum):
    """Why a promotion gives way."""

    STEP = 0  # others go first
    WAIT = 1  # it waits for a tier or for entries of another promotion


class _State(Enum):
    COMING = 0
    HERE = 1
    FAILED = 2
    LOST = 3  # its read is late: it has left the index, and its extent is free once the read returns


@dataclass(slots=True, eq=False)
class _Flight:
    """An entry that is being read into the pool."""

    record: int
    state: _State = _State.COMING
    checksum: bytes = b""


@dataclass(frozen=True, slots=True)
class Prefix:
    """The chunks that a lookup asked for.

    Attributes:
        space: of the chunks.
        digests: packed `(num_chunks, 32)`, from chunk 0 on.
        places: of every shard of every group of the model's cache.
        owner: number of tenant and model.
        token_seconds: what computing a token takes the engine, 0 for unknown.
    """

    space: Space
    digests: bytes
    places: Sequence[ShardPlace]
    owner: int
    token_seconds: float = 0.0

    @property
    def num_chunks(self) -> int:
        """Chunks of all of it."""
        return len(self.digests) // DIGEST_BYTES

    def digest(self, chunk: int) -> bytes:
        """Return the key of one chunk."""
        return self.digests[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES]


@dataclass(slots=True, eq=False)
class Waiter:
    """The lookup that waits for a promotion."""

    seconds: float  # that it waits at most
    deadline: float
    on_answer: Callable[[], None] | None  # None once it is answered

    def answer(self) -> None:
        """Answer the lookup, once."""
        on_answer, self.on_answer = self.on_answer, None
        if on_answer is not None:
            on_answer()


@dataclass(slots=True)
class PromotionContext:
    """What all promotions of a depot use and share."""

    index: ChunkIndex
    tiers: Sequence[KnownTier]  # fastest first; may grow
    keys: EntryKeys
    counters: Counter[str]
    clock: Callable[[], float]
    patience_seconds: float  # the most that a lookup waits
    makes_checksums: bool
    wake: "Callable[[Promotion], object]" = field(init=False)  # called when a promotion that waits can go on
    own_writer: Writer | None = field(init=False, default=None)  # this process, once it is known
    awaited: "dict[int, list[Promotion]]" = field(init=False)  # by record
    is_coming: "memoryview[int]" = field(init=False)  # by record: 1 while a tier reads it into the pool
    num_coming: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.awaited = {}
        self.is_coming = make_column("B", self.index.table.num_records)

    def writer_of(self, queue: TierQueue) -> Writer:
        """Return the process that writes a tier's bytes into the pool.

        Raises:
            OSError: the time when that process began cannot be read.
        """
        pid = queue.tier.writer_pid
        if pid:
            return Writer(pid, process_start_time(pid))
        if self.own_writer is None:  # kept, as reading a file lets threads of tiers take the interpreter's lock
            self.own_writer = Writer(os.getpid(), process_start_time(os.getpid()))
        return self.own_writer

    def departs(self, record: int) -> None:
        """Note that a tier reads an entry into the pool."""
        self.is_coming[record] = 1
        self.num_coming += 1

    def arrived(self, record: int) -> None:
        """Let promotions go on that wait for an entry: it is in the pool, or will not come."""
        self.num_coming -= self.is_coming[record]
        self.is_coming[record] = 0
        for promotion in self.awaited.pop(record, ()):
            promotion.num_awaited -= 1
            self.wake(promotion)


class Promotion:
    """One prefix on its way up.

    Args:
        context: what it shares with others.
        prefix: its chunks.
        found: leading chunks that the pool has.
        waiter: the lookup; it is answered when `run` ends or its time is over.
    """

    def __init__(self, context: PromotionContext, prefix: Prefix, found: int, waiter: Waiter) -> None:
        self.prefix = prefix
        self.waiter = waiter
        self.is_stopped = False  # nothing more of it is to come up
        self.num_awaited = 0  # entries on their way in other promotions
        self.asked: TierQueue | None = None  # has a question of it
        self.has_landed = False  # something of it, from whichever tier
        self.steps = self.run()
        self._context = context
        self._index = context.index
        self._found = found
        self._flights: deque[_Flight] = deque()
        self._reads_from: TierQueue | None = None

    @property
    def waits_for(self) -> TierQueue | None:
        """The tier that has a question or a read of it."""
        return self.asked or (self._reads_from if self._flights else None)

    def run(self) -> Generator[Pause, IsOver, None]:
        """Ask one tier after the other, until all is here, nobody waits any more, or no tier is left.

        A tier that had all that it was asked for is asked again for what follows.
        """
        tiers, num_chunks, number = self._context.tiers, self.prefix.num_chunks, 0
        while number < len(tiers) and not self.is_stopped:
            before = self._found
            limit = yield from self._bring_from(tiers[number])
            if limit and (self._found == num_chunks or self.waiter.on_answer is None):
                return
            if not limit or self._found == before or limit == num_chunks:
                number += 1

    def _bring_from(self, tier: KnownTier) -> Generator[Pause, IsOver, int]:
        """Have one tier read what it has; return how many leading chunks it was asked for, 0 if nothing was read.

        The first chunk that is missing is asked for by itself: a prompt that nobody has seen costs one small question,
        however long it is.
        """
        prefix, space = self.prefix, self.prefix.space
        if tier.queue.is_open:
            return 0
        entries = self._missing_of(self._found) if space.full_mask else []
        entries = [(chunk, place) for chunk, place in entries if space.full_mask & 1 << place.group]
        limit, is_first, there = self._found + 1, bool(entries), list[bool]()
        if is_first:
            there = yield from self._ask(tier, entries)
            if not there or not all(there):
                return 0
        if not is_first or space.windows or limit < prefix.num_chunks:
            limit = min(prefix.num_chunks, self._found + max(1, MAXIMUM_QUESTIONS // len(prefix.places)))
            entries = yield from self._missing_before(limit)
            there = yield from self._ask(tier, entries)
            if not there:
                return 0
        length = yield from self._usable_prefix(limit, entries, there)
        if length <= self._found or self.is_stopped:
            return 0
        wanted, num_bytes = yield from self._wanted(length)
        num_tokens = (length - self._found) * space.spec.chunk_tokens
        if not tier.is_worth_reading(num_bytes, num_tokens * prefix.token_seconds):
            self._context.counters["promotions_not_worth_it"] += 1
            return 0
        began = self._context.clock()
        num_bytes = yield from self._read(tier, wanted)
        self._after_read(tier, num_bytes, began)
        return limit

    def _ask(self, tier: KnownTier, entries: Sequence[Entry]) -> Generator[Pause, IsOver, list[bool]]:
        """Return which entries the tier says it has; nothing if it is not asked or is late."""
        prefix, there = self.prefix, [False] * len(entries)

        def on_part(part: Part) -> None:
            there[part.first : part.first + len(part.outcomes)] = part.outcomes
            if part.is_last:
                self._context.wake(self)

        keys: list[bytes] = []
        for number, (chunk, place) in enumerate(entries, 1):
            keys.append(self._context.keys.key(prefix.owner, prefix.space, place, prefix.digest(chunk)))
            if number % _QUESTIONS_A_STEP == 0:
                yield Pause.STEP
        job = Job(Operation.CONTAINS, keys, on_part=on_part, on_late=lambda: self._context.wake(self))
        if not entries or not tier.queue.submit(job):
            return []
        self.asked = tier.queue
        while job.num_left and not job.is_late:
            yield Pause.WAIT
        self.asked = None
        if job.is_late:
            self.is_stopped |= self.waiter.on_answer is None
            return []
        return there

    # --- the choice -----------------------------------------------------------------------------------------------

    def _missing_of(self, chunk: int) -> list[Entry]:
        """Return the entries of a chunk that the pool lacks and that a longer prefix may need."""
        index, space = self._index, self.prefix.space
        node = index.node(space, self.prefix.digest(chunk), chunk)
        known = space.full_mask if chunk < self._found else 0
        return [
            (chunk, place)
            for place in self.prefix.places
            if not known & 1 << place.group and (node is None or index.entry(node, place.group, place.shard) is None)
        ]

    def _missing_before(self, limit: int) -> Generator[Pause, IsOver, list[Entry]]:
        windows = max((chunks for _, chunks in self.prefix.space.windows), default=0)
        first = max(0, self._found + 1 - windows) if windows else self._found
        chunks_a_step = max(1, _QUESTIONS_A_STEP // len(self.prefix.places))
        entries: list[Entry] = []
        for start in range(first, limit, chunks_a_step):
            yield Pause.STEP
            for chunk in range(start, min(start + chunks_a_step, limit)):
                entries += self._missing_of(chunk)
        return entries

    def _usable_prefix(
        self, limit: int, entries: Sequence[Entry], there: Sequence[bool]
    ) -> Generator[Pause, IsOver, int]:
        """Return how many leading chunks could be used if everything that is there, here or coming were in the pool."""
        index, prefix, space = self._index, self.prefix, self.prefix.space
        in_tier: set[tuple[int, int, int]] = set()
        for number, ((chunk, place), is_there) in enumerate(zip(entries, there, strict=True)):
            if number % _QUESTIONS_A_STEP == 0:
                yield Pause.STEP
            if is_there:
                in_tier.add((chunk, place.group, place.shard))
        by_group: dict[int, list[ShardPlace]] = {}
        for place in prefix.places:
            by_group.setdefault(place.group, []).append(place)

        def has(chunk: int, group: int) -> bool:
            node = index.node(space, prefix.digest(chunk), chunk)
            for place in by_group[group]:
                if (chunk, group, place.shard) in in_tier:
                    continue
                record = None if node is None else index.entry(node, group, place.shard)
                if record is None or not (self._is_sealed(record) or self._context.is_coming[record]):
                    return False
            return True

        full = [group for group in by_group if space.full_mask & 1 << group]
        windows = [(group, space.chunks_needed[group]) for group in by_group if not space.full_mask & 1 << group]
        length = self._found if full else limit
        while length < limit:
            end = min(limit, length + _QUESTIONS_A_STEP)
            length = usable_prefix(end, has, full, start=length)
            if length < end:
                break
            yield Pause.STEP
        return usable_prefix(length, has, windows=windows, start=self._found)

    def _wanted(self, length: int) -> Generator[Pause, IsOver, tuple[deque[Entry], int]]:
        """Return the entries that a prefix of this length needs behind what the pool has, and their payload bytes."""
        space, places = self.prefix.space, self.prefix.places
        first_of = [
            self._found if group.kind is GroupKind.FULL_ATTENTION else max(0, length - chunks)
            for group, chunks in zip(space.spec.groups, space.chunks_needed, strict=True)
        ]
        wanted: deque[Entry] = deque()
        for chunk in range(min(first_of), length):
            if chunk % _QUESTIONS_A_STEP == 0:
                yield Pause.STEP
            wanted.extend((chunk, place) for place in places if chunk >= first_of[place.group])
        return wanted, sum((length - first_of[place.group]) * place.num_bytes for place in places)

    # --- reading --------------------------------------------------------------------------------------------------

    def _read(self, tier: KnownTier, wanted: deque[Entry]) -> Generator[Pause, IsOver, int]:
        """Read entries, many at a time; seal them in the order of the prefix, and none after one that failed.

        Returns:
            the bytes that were sealed.
        """
        flights, context, is_broken, num_bytes = self._flights, self._context, False, 0
        self._reads_from = tier.queue
        while wanted or flights or self.num_awaited:
            can_go_on = wanted or (flights and flights[0].state is not _State.COMING)
            is_over = yield Pause.STEP if can_go_on else Pause.WAIT
            is_broken |= self.is_stopped
            if wanted and not is_broken:
                self._submit_reads(tier, self._make_flights(tier, wanted, is_over))
            landed: list[_Flight] = []
            for _ in range(_ENTRIES_A_STEP):
                if not flights or flights[0].state is _State.COMING:
                    break
                flight = flights.popleft()
                is_broken |= flight.state is not _State.HERE
                if not is_broken:
                    landed.append(flight)
                elif flight.state is not _State.LOST:
                    self._index.discard_entry(flight.record)
                    context.counters["promotions_failed"] += 1
                    context.arrived(flight.record)
            num_bytes += self._seal(tier, landed)
            if is_broken:
                wanted.clear()
        return num_bytes

    def _make_flights(self, tier: KnownTier, wanted: deque[Entry], is_over: IsOver) -> list[tuple[_Flight, bytes]]:
        """Give extents to the next entries that are wanted, to a few at least; return them with their keys.

        What is in the pool by now is left out, and what is on its way is waited for. Where nothing can be read any
        more, nothing is wanted any more.
        """
        index, context, prefix, space = self._index, self._context, self.prefix, self.prefix.space
        flights: list[tuple[_Flight, bytes]] = []
        if tier.queue.is_open:
            wanted.clear()
            return flights
        try:
            writer = context.writer_of(tier.queue)
        except OSError:  # no descriptor is left: nobody could tell later whether it still writes
            context.counters["promotions_without_descriptor"] += 1
            wanted.clear()
            return flights
        most_steps = index.num_room_steps + MOST_EVICTED
        for _ in range(_QUESTIONS_A_STEP):
            if not wanted or len(flights) == _ENTRIES_A_STEP or (len(flights) >= _LEAST_ENTRIES and is_over()):
                break
            chunk, place = wanted.popleft()
            digest = prefix.digest(chunk)
            node = index.node(space, digest, chunk)
            record = None if node is None else index.entry(node, place.group, place.shard)
            if record is not None:
                if context.is_coming[record]:
                    context.awaited.setdefault(record, []).append(self)
                    self.num_awaited += 1
                elif not self._is_sealed(record):
                    wanted.clear()  # an engine is writing it, or a tier that hangs
                continue
            parent = index.node(space, prefix.digest(chunk - 1), chunk - 1) if chunk else None
            if (chunk and parent is None and space.full_mask) or (node is None and digest in space.nodes):
                wanted.clear()
                break
            record = index.begin_entry(
                EntryPlace(
                    space, digest, NO_NODE if parent is None else parent, chunk, place.group, place.shard,
                    place.num_bytes, place.layout, prefix.owner, writer,
                ),
                most_steps - index.num_room_steps,
            )  # fmt: skip
            if record is None:
                context.counters["promotions_without_room"] += 1
                wanted.clear()
                break
            flights.append((_Flight(record), context.keys.key(prefix.owner, space, place, digest)))
        return flights

    def _submit_reads(self, tier: KnownTier, begun: Sequence[tuple[_Flight, bytes]]) -> None:
        if not begun:
            return
        flights = [flight for flight, _ in begun]
        extents = [self._index.table.extent(flight.record) for flight in flights]

        def on_part(part: Part) -> None:
            checksums = part.checksums or itertools.repeat(b"")
            for flight, ok, checksum in zip(flights[part.first :], part.outcomes, checksums, strict=False):
                flight.checksum = checksum
                if flight.state is _State.LOST:
                    self._index.free_abandoned(flight.record)
                else:
                    flight.state = _State.HERE if ok else _State.FAILED
            self._context.wake(self)

        def on_late() -> None:
            for flight in flights:
                if flight.state is _State.COMING:
                    flight.state = _State.LOST
                    self._index.abandon_entry(flight.record)
                    self._context.counters["promotions_failed"] += 1
                    self._context.arrived(flight.record)
            self._context.wake(self)

        for flight in flights:
            self._context.departs(flight.record)
        self._flights += flights
        job = Job(
            Operation.READ, [key for _, key in begun], extents,
            makes_checksums=self._context.makes_checksums, on_part=on_part, on_late=on_late,
        )  # fmt: skip
        if not tier.queue.submit(job):
            for flight in flights:
                flight.state = _State.FAILED

    def _seal(self, tier: KnownTier, flights: Sequence[_Flight]) -> int:
        """Make entries visible; return their bytes."""
        if not flights:
            return 0
        index, table, context = self._index, self._index.table, self._context
        checksums = b"".join(flight.checksum for flight in flights)
        index.seal_entries([flight.record for flight in flights], int(context.clock()), checksums)
        context.counters["entries_promoted"] += len(flights)
        self.has_landed = True
        for flight in flights:
            tier.headers[flight.record] = table.header(flight.record)
            context.arrived(flight.record)
        return sum(table.extent(flight.record)[1] for flight in flights)

    def _after_read(self, tier: KnownTier, num_bytes: int, began: float) -> None:
        """Learn how far the pool's prefix reaches now, and how quick the tier was."""
        context, waiter, now = self._context, self.waiter, self._context.clock()
        if num_bytes:
            tier.was_read(num_bytes, now - began)
            has_waited = now - waiter.deadline + waiter.seconds
            if waiter.on_answer is not None and has_waited <= context.patience_seconds:
                tier.queue.was_in_time()
        found, _ = self._index.longest_prefix(self.prefix.space, self.prefix.digests)
        self._found = max(self._found, found)

    def _is_sealed(self, record: int) -> bool:
        return self._index.table.header(record) & 0xFF == SEALED


class Promotions:
    """All prefixes on their way up.

    Args:
        context: what they share; its `wake` is set.
    """

    def __init__(self, context: PromotionContext) -> None:
        self._context = context
        context.wake = self._wake
        self._pins: dict[Promotion, tuple[int, ...]] = {}  # of all that have not ended
        self._ready: dict[Promotion, None] = {}  # those that can go on, the next one first

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def num_coming(self) -> int:
        """Entries that are being read."""
        return self._context.num_coming

    @property
    def is_full(self) -> bool:
        """Whether no further prefix is taken."""
        return len(self._pins) >= MAXIMUM_PROMOTIONS

    def begin(self, prefix: Prefix, found: int, pins: tuple[int, ...], waiter: Waiter) -> None:
        """Bring up what the pool lacks behind `found` chunks, whose nodes stay pinned until the end."""
        self._context.index.pin(pins)
        promotion = Promotion(self._context, prefix, found, waiter)
        self._pins[promotion] = pins
        self._resume(promotion, None)

    def stop(self, is_meant: Callable[[int], bool]) -> None:
        """Let nothing more come up for the owners that are meant."""
        for promotion in self._pins:
            promotion.is_stopped |= is_meant(promotion.prefix.owner)

    def turn(self, is_over: IsOver) -> None:
        """Answer lookups whose time is over, then resume what can go on: one at least, more until `is_over`."""
        for promotion, waiter in self._late(self._context.clock()):
            self._context.counters["promotions_late"] += 1
            queue = promotion.waits_for
            if queue is not None and not promotion.has_landed and waiter.seconds >= self._context.patience_seconds:
                queue.was_too_late(self._context.patience_seconds)
            waiter.answer()
            if is_over():
                break
        while self._ready:
            promotion = next(iter(self._ready))
            del self._ready[promotion]
            self._resume(promotion, is_over)
            if is_over():
                break

    def _late(self, now: float) -> list[tuple[Promotion, Waiter]]:
        return [(p, p.waiter) for p in self._pins if p.waiter.on_answer is not None and p.waiter.deadline <= now]

    def next_deadline(self) -> float | None:
        """Return when `turn` has something to do at the latest; None for never."""
        if self._ready:
            return self._context.clock()
        waiters = [promotion.waiter for promotion in self._pins]
        return min((waiter.deadline for waiter in waiters if waiter.on_answer is not None), default=None)

    def _wake(self, promotion: Promotion) -> None:
        if promotion in self._pins:
            self._ready[promotion] = None

    def _resume(self, promotion: Promotion, is_over: IsOver | None) -> None:
        try:
            pause = next(promotion.steps) if is_over is None else promotion.steps.send(is_over)
        except StopIteration:
            self._ready.pop(promotion, None)
            pins = self._pins.pop(promotion)
            promotion.waiter.answer()
            self._context.index.unpin(pins)
        else:
            if pause is Pause.STEP:
                self._ready[promotion] = None
