"""Reads entries of one prefix from a tier into the pool, many at a time. Seals them in the order of the prefix.

A promotion waits for an entry that another promotion is reading, instead of reading it again. If a read exceeds the
tier's deadline, it and all later reads are abandoned. Extents that the tier may still write to stay allocated until the
call returns, but engines can store those chunks again at once.

The record of an entry that is being read contains its writer, so after a killed depot no lookup finds it.
"""

import itertools
import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, TypeAlias

from kvdepot.counting import Counts, depot_counter
from kvdepot.index.columns import make_column
from kvdepot.index.entries import NewRun, PartPlace, Wanted
from kvdepot.index.evictor import EndStore
from kvdepot.index.index import ChunkIndex
from kvdepot.index.tree import NO_NODE, Space
from kvdepot.keys import digest_at, slice_digests
from kvdepot.pool.table import Entry, Writer
from kvdepot.processes import process_start_time
from kvdepot.tiers.jobs import Job, JobKind, JobPart
from kvdepot.tiers.moves import Pause, Steps
from kvdepot.tiers.names import EntryKeys, by_run, chunks_of_run
from kvdepot.tiers.queue import TierQueue
from kvdepot.tiers.tier_state import TierState

logger = logging.getLogger(__name__)

_PROMOTIONS_FAILED: Final = depot_counter("promotions_failed", "Entries that a tier had but did not deliver")
_PROMOTIONS_WITHOUT_DESCRIPTOR: Final = depot_counter(
    "promotions_without_descriptor", "Promotions ended because the server had no file descriptor left"
)
_PROMOTIONS_WITHOUT_ROOM: Final = depot_counter(
    "promotions_without_room", "Promotions cut short because the pool had no room"
)
_ENTRIES_PROMOTED: Final = depot_counter("entries_promoted", "Entries loaded from the tiers")

# A step takes at most about half a millisecond. Then the loop checks the time.
QUESTIONS_A_STEP: Final = 128  # entries looked up
_ENTRIES_A_STEP: Final = 24  # entries begun, or sealed
_LEAST_ENTRIES: Final = 8  # begun even if time is up, as tiers read several at a time


class _State(Enum):
    COMING = 0
    HERE = 1
    FAILED = 2
    LOST = 3  # its read is late: it was removed from the index, and its extent is freed when the read returns


@dataclass(slots=True, eq=False)
class _Arrival:
    entry: Entry
    state: _State = _State.COMING
    checksum: bytes = b""


@dataclass(frozen=True, slots=True)
class Prefix:
    """The chunks that a lookup asked for, and the entries in tiers that belong to them.

    Attributes:
        space: the space of the chunks.
        digests: packed `(num_chunks, 32)`, from chunk 0 on.
        places: parts that together have all cells of all groups of the model's cache.
        label: the number of the label.
        token_seconds: the engine's time to compute a token, 0 for unknown. Slower tiers are not read.
        request_id: the request id of the lookup, for the log; empty without a lookup.
        brought: gets the numbers of the chunks of which tiers bring entries, for this promotion or another one while it
            lasts. Some may fail to arrive.
    """

    space: Space
    digests: bytes
    places: tuple[PartPlace, ...]
    label: int
    token_seconds: float = 0.0
    request_id: str = ""
    brought: set[int] = field(default_factory=set[int], compare=False)


def log_decision(prefix: Prefix, queue: TierQueue | None, decision: str, *details: object) -> None:
    """Log a decision about the promotion of a prefix, for debugging. `queue`: the tier that it is about, if any."""
    tier = "no tier" if queue is None else f"tier {queue.name}"
    logger.debug("promotion for %s from %s: %s", prefix.request_id or "-", tier, decision % details)


OtherSplits: TypeAlias = Callable[[Space, tuple[PartPlace, ...]], Sequence[tuple[PartPlace, ...]]]


@dataclass(slots=True)
class PromotionContext:
    """The state that all promotions of a depot share, above all the entries that are being read."""

    index: ChunkIndex
    keys: EntryKeys
    counters: Counts
    clock: Callable[[], float]
    patience_seconds: float  # the longest wait of a lookup for tiers
    end_store: EndStore  # to make room for a share within its quota
    other_splits: OtherSplits
    is_over: Callable[[], bool] = field(init=False, default=lambda: False)  # whether the present turn has no time left
    own_writer: Writer | None = field(init=False, default=None)  # this process; cached
    awaited: "dict[Entry, list[Reading]]" = field(init=False)
    is_coming: "memoryview[int]" = field(init=False)  # by entry: 1 while a tier reads it into the pool
    promoted: "memoryview[int]" = field(init=False)  # by entry: header of the last one that a tier brought there
    num_coming: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.awaited = {}
        self.is_coming = make_column("B", self.index.table.num_records)
        self.promoted = make_column("Q", self.index.table.num_records)

    def writer_of(self, queue: TierQueue) -> Writer:
        """Return the process that writes the tier's bytes into the pool.

        Raises:
            OSError: the start time of that process cannot be read.
        """
        pid = queue.tier.writer_pid
        if pid:
            return Writer(pid, process_start_time(pid))
        if self.own_writer is None:  # cached: reading a file would pass the interpreter lock to the threads of tiers
            self.own_writer = Writer(os.getpid(), process_start_time(os.getpid()))
        return self.own_writer

    def departs(self, entry: Entry) -> None:
        """Note that a tier begins to read an entry into the pool."""
        self.is_coming[entry] = 1
        self.num_coming += 1

    def arrived(self, entry: Entry) -> None:
        """Wake the promotions that wait for an entry: it is in the pool, or will not arrive."""
        self.num_coming -= self.is_coming[entry]
        self.is_coming[entry] = 0
        for reading in self.awaited.pop(entry, ()):
            reading.num_awaited -= 1
            reading.wake()

    def is_sealed(self, entry: Entry) -> bool:
        """Return whether an entry is complete in the pool."""
        return self.index.table.is_sealed(entry)


class Reading:
    """Entries of one prefix that one tier reads into the pool.

    Args:
        context: shared by all promotions.
        prefix: the prefix of the entries.
        tier: reads the entries.
        wanted: the chunk and place of each entry, in the order of the prefix.
        wake: called when `run` can continue.
    """

    def __init__(
        self,
        context: PromotionContext,
        prefix: Prefix,
        tier: TierState,
        wanted: deque[Wanted],
        wake: Callable[[], object],
    ) -> None:
        self.wake = wake
        self.is_stopped = False  # whether to seal no more entries
        self.num_awaited = 0  # entries that other promotions read
        self.num_bytes = 0  # sealed bytes
        self._context = context
        self._index = context.index
        self._prefix = prefix
        self._tier = tier
        self._wanted = wanted
        self._arrivals: deque[_Arrival] = deque()
        self._begun: list[tuple[_Arrival, bytes]] = []  # entries whose run is not complete yet, with their keys
        self._begun_run = 0
        space = prefix.space
        self._run_chunks = max(chunks_of_run(space, place.group, place.num_bytes) for place in prefix.places)

    @property
    def waits_for(self) -> TierQueue | None:
        """The tier, while reads are under way."""
        return self._tier.queue if self._arrivals else None

    def run(self) -> Steps[None]:
        """Read and seal the wanted entries, up to the first one that fails."""
        try:
            yield from self._read()
        except Exception:  # a bug, for example in an eviction policy
            self._abandon()
            raise

    def _read(self) -> Steps[None]:
        wanted, arrivals, context, is_broken = self._wanted, self._arrivals, self._context, False
        while wanted or arrivals or self.num_awaited:
            can_go_on = wanted or (arrivals and arrivals[0].state is not _State.COMING)
            yield Pause.STEP if can_go_on else Pause.WAIT
            is_broken |= self.is_stopped
            if wanted and not is_broken:
                self._begun += self._begin_entries()
            # Whole runs only: cut into several jobs, a run of an object tier would cost a walk and a request for each.
            if self._begun and (is_broken or not wanted or wanted[0][0] // self._run_chunks > self._begun_run):
                self._submit(is_broken=is_broken)
            landed: list[_Arrival] = []
            for _ in range(_ENTRIES_A_STEP):
                if not arrivals or arrivals[0].state is _State.COMING:
                    break
                arrival = arrivals.popleft()
                is_broken |= arrival.state is not _State.HERE
                if not is_broken:
                    landed.append(arrival)
                # The storage may still write to a lost one. Its extent is freed when the read returns (`on_part`).
                elif arrival.state is not _State.LOST:
                    self._index.discard_entry(arrival.entry)
                    context.counters[_PROMOTIONS_FAILED] += 1
                    context.arrived(arrival.entry)
            self._seal(landed)
            if is_broken:
                wanted.clear()

    def _abandon(self) -> None:
        """Abandon the entries on their way. The tier may still write to entries that it was asked for."""
        for arrival, _ in self._begun:
            arrival.state = _State.FAILED
        for arrival in self._arrivals:
            if arrival.state is _State.COMING:
                self._lose(arrival)
            elif arrival.state is not _State.LOST:
                self._index.discard_entry(arrival.entry)
                self._context.arrived(arrival.entry)
        self._arrivals.clear()

    def _lose(self, arrival: _Arrival) -> None:
        """Detach a late entry from its chunk. Its extent is freed when the read returns."""
        arrival.state = _State.LOST
        self._index.abandon_entry(arrival.entry)
        self._context.counters[_PROMOTIONS_FAILED] += 1
        self._context.arrived(arrival.entry)

    def _begin_entries(self) -> list[tuple[_Arrival, bytes]]:
        """Begin the next wanted entries, at least a few. Return them with their keys.

        Skip entries that are in the pool by now, or that an engine has begun to write since the tier was asked. Wait
        for entries that other promotions read. If no more can be read, clear `wanted`.
        """
        index, context, prefix, wanted = self._index, self._context, self._prefix, self._wanted
        space = prefix.space
        arrivals: list[tuple[_Arrival, bytes]] = []
        # Otherwise chunks would be evicted for reads that fail at once.
        if self._tier.queue.is_suspended:
            self._end("it is suspended now")
            return arrivals
        try:
            writer = context.writer_of(self._tier.queue)
        except OSError:  # without a descriptor, it would be unknown later whether the tier's process is alive
            context.counters[_PROMOTIONS_WITHOUT_DESCRIPTOR] += 1
            self._end("cut, as no file descriptor is left")
            return arrivals
        batch: list[Wanted] = []
        for _ in range(QUESTIONS_A_STEP):
            if not wanted or len(batch) == _ENTRIES_A_STEP or (len(batch) >= _LEAST_ENTRIES and context.is_over()):
                break
            chunk, place = wanted.popleft()
            node = index.nodes.find(space, digest_at(prefix.digests, chunk), chunk)
            entry = None if node is None else index.entries.find(node, place.group, place.part)
            if entry is None:
                if node is None or not index.entries.has(node, place.group, place.part):
                    batch.append((chunk, place))
            elif context.is_coming[entry]:
                context.awaited.setdefault(entry, []).append(self)
                self.num_awaited += 1
                prefix.brought.add(chunk)
            # It was not here when the lookup came, and a tier has brought it, although for another lookup.
            elif context.promoted[entry] == index.table.header(entry):
                prefix.brought.add(chunk)
        if not batch:
            return arrivals
        first, last = batch[0][0], batch[-1][0]
        parent = index.nodes.find(space, digest_at(prefix.digests, first - 1), first - 1) if first else None
        # No lookup would find chunks behind a gap. They would fill the pool until they are evicted.
        if first and parent is None and space.full_mask:
            self._end("cut, as the chunk before chunk %d was evicted", first)
            return arrivals
        run = NewRun(
            space,
            slice_digests(prefix.digests, first, last + 1),
            first,
            NO_NODE if parent is None else parent,
            prefix.label,
            writer,
            request_id=prefix.request_id,
        )
        begun, _ = index.reserve(run, [(chunk - first, place) for chunk, place in batch], context.end_store)
        if len(begun) < len(batch):
            context.counters[_PROMOTIONS_WITHOUT_ROOM] += 1
            self._end("cut, no room from chunk %d on: %s", batch[len(begun)][0], index.why_cut)
        for chunk, place, (entry, *_) in begun:
            arrival = _Arrival(entry)
            context.departs(entry)
            prefix.brought.add(first + chunk)
            self._arrivals.append(arrival)
            key = context.keys.key(prefix.label, space, place, prefix.digests, first + chunk)
            arrivals.append((arrival, key))
        self._begun_run = last // self._run_chunks
        return arrivals

    def _end(self, why: str, *details: object) -> None:
        """Read none of the entries that are still wanted."""
        log_decision(self._prefix, self._tier.queue, why, *details)
        self._wanted.clear()

    def _submit(self, *, is_broken: bool) -> None:
        """Submit reads for the begun entries, or abandon them if `is_broken`."""
        begun, self._begun = self._begun, []
        order = by_run([key for _, key in begun])
        arrivals = [begun[number][0] for number in order]
        keys = [begun[number][1] for number in order]
        extents = [self._index.table.extent(arrival.entry) for arrival in arrivals]

        def on_part(part: JobPart) -> None:
            checksums = part.checksums or itertools.repeat(b"")
            for arrival, ok, checksum in zip(arrivals[part.first :], part.outcomes, checksums, strict=False):
                arrival.checksum = checksum
                if arrival.state is _State.LOST:
                    self._index.entries.free_abandoned(arrival.entry)
                else:
                    arrival.state = _State.HERE if ok else _State.FAILED
            self.wake()

        def on_late() -> None:
            for arrival in arrivals:
                if arrival.state is _State.COMING:
                    self._lose(arrival)
            self.wake()

        job = Job(JobKind.READ, keys, extents, on_part=on_part, on_late=on_late)
        if is_broken or not self._tier.queue.submit(job):
            for arrival in arrivals:
                arrival.state = _State.FAILED

    def _seal(self, arrivals: Sequence[_Arrival]) -> None:
        if not arrivals:
            return
        index, table, context = self._index, self._index.table, self._context
        checksums = b"".join(arrival.checksum for arrival in arrivals)
        index.seal([arrival.entry for arrival in arrivals], int(context.clock()), checksums)
        context.counters[_ENTRIES_PROMOTED] += len(arrivals)
        for arrival in arrivals:
            self.num_bytes += table.extent(arrival.entry)[1]
            context.promoted[arrival.entry] = header = table.header(arrival.entry)
            self._tier.mark(arrival.entry, header, context.clock())
            context.arrived(arrival.entry)
