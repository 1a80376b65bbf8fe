"""Shares the hottest prefixes of a fleet: depots list theirs in a shared tier, and a new depot promotes listed ones.

A list is an entry like any other, in a space of its own: tiers write it, check it and evict it. Its key names the space
of the listed chunks and a period of the clock. If several depots write in one period, one list stays: the first in
tiers that never overwrite entries, the last in others. So a reader takes the lists of several periods, which mostly
come from several depots.

A depot ranks prefixes by their uses, and counts each promotion as one more, also of a prefix that a small pool has
evicted since.
"""

import logging
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Generator
from functools import partial
from typing import Final, TypeAlias

import msgspec

from kvdepot.counting import depot_counter
from kvdepot.errors import KeyFormatError
from kvdepot.index.entries import NewRun, PartPlace
from kvdepot.index.tree import NO_NODE, Nodes, Space, digest_of
from kvdepot.keys import DIGEST_BYTES, digest_at, num_digests, slice_digests
from kvdepot.layout import THAT_CELL, GroupKind
from kvdepot.server.contexts import ContextTable
from kvdepot.server.state import DepotState
from kvdepot.server.turns import Steps, Wait, run
from kvdepot.tiers.reading import Prefix
from kvdepot.wire import messages as m

logger = logging.getLogger(__name__)

_LISTS_WRITTEN: Final = depot_counter("hottest_lists_written", "Lists of hot prefixes that were put into the tiers")
_CHUNKS_PROMOTED: Final = depot_counter(
    "hottest_chunks_promoted", "Chunks promoted before a request, because other depots list them"
)

LIST_BYTES: Final = 256 << 10  # 6,000 chunks: 12 GiB if a chunk has 2 MiB (an 8B model, 16 tokens)
PERIOD_SECONDS: Final = 300.0  # 288 lists a day take 72 MiB of a tier that evicts nothing
_MOST_SHARE: Final = 0.25  # promote listed prefixes until this share of the pool is in use: engines need the rest
_NUM_PERIODS: Final = 3  # periods whose lists a reader asks for: the present one and those before it
_LOOK_SECONDS: Final = 0.5  # between two looks for engines that attached; their first request is rarely sooner
_PATIENT_SECONDS: Final = 60.0  # longest time of a promotion: no request waits for it
_PREFIXES_A_STEP: Final = 8  # prefixes walked per step: 1 ms if they have 512 chunks each
_CHUNKS_A_STEP: Final = 2048  # counts of chunks read per step: half the chunks of eight prefixes of 512
_MOST_LABELS: Final = 64  # per list
_NO_PARENT: Final = 0xFFFF_FFFF  # above the number of chunks in any list

_PLACE: Final = PartPlace(0, THAT_CELL.number, LIST_BYTES, 0)
# So many tokens that no `--promote-min-tokens` keeps a list out.
_SPEC: Final = m.CacheSpec(1 << 20, (m.GroupShape(GroupKind.FULL_ATTENTION, 1 << 20),), "kvdepot's hottest prefixes")
LIST_OWNER: Final = "(kvdepot)", "(hottest prefixes)"  # tenant and model, in `status` and in keys of tiers

Chunk: TypeAlias = "int | tuple[int, bytes]"  # a node, or the space and key of a chunk that has left the pool


class _List(msgspec.Struct, array_like=True, frozen=True):
    """Chunks, the most used first, each after its parent. Numbers are little-endian, u16 and u32."""

    labels: list[tuple[m.Name, m.Text, m.Name]]  # tenant, model, weights
    label_of: bytes  # u16 for each chunk: the place of its label
    parents: bytes  # u32 for each chunk: the place of its parent, `_NO_PARENT` for the first chunk of a prompt
    digests: bytes


_decoder: Final = msgspec.msgpack.Decoder(_List)


class Visits:
    """How often each chunk was used; a child comes before its parents."""

    def __init__(self, nodes: Nodes) -> None:
        self.counts = Counter[Chunk]()
        self._nodes = nodes
        self._absent: dict[Chunk, tuple[Chunk, Prefix]] = {}  # the parent of a chunk, and a prefix that contains it

    def add(self, node: int) -> None:
        """Count a use of the prefix that ends here."""
        tree = self._nodes.tree
        while node != NO_NODE and tree.keys[node] is not None:
            self.counts[node] += 1
            node = tree.parent[node]

    def add_promoted(self, prefix: Prefix) -> None:
        """Count a use of a prefix, also of its chunks that have left the pool."""
        node, gone = NO_NODE, list[Chunk]()
        for number in range(num_digests(prefix.digests)):
            key = digest_at(prefix.digests, number)
            if key in prefix.space.nodes:
                node = prefix.space.nodes[key]
                continue
            chunk = prefix.space.number, key
            self._absent[chunk] = gone[-1] if gone else node, prefix
            gone.append(chunk)
        for chunk in reversed(gone):
            self.counts[chunk] += 1
        self.add(node)

    def describe(self, chunk: Chunk) -> tuple[Space | None, bytes, Chunk, int]:
        """Return a chunk's space, key, parent and label. The space is None if the chunk has just left the pool."""
        if not isinstance(chunk, int):
            parent, prefix = self._absent[chunk]
            return prefix.space, chunk[1], parent, prefix.label
        nodes, key = self._nodes, self._nodes.tree.keys[chunk]
        if key is None:
            return None, b"", NO_NODE, 0
        return nodes.space_of(chunk), key, nodes.tree.parent[chunk], nodes.label[chunk]


class Hottest:
    """Writes lists, and promotes prefixes that other depots listed. Its timer runs as long as the depot.

    Args:
        state: the depot's state.
        contexts: the depot's contexts.
        pool_fd: the pool's file.
        wall_clock: seconds, the same on all nodes, to within a period.
    """

    def __init__(
        self, state: DepotState, contexts: ContextTable, pool_fd: int, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._state = state
        self._contexts = contexts
        self._pool_fd = pool_fd
        self._wall_clock = wall_clock
        self._turns = state.background.hottest
        self._seen: set[int] = set()  # spaces whose engines were here before, by number
        self._period = self._period_now()
        self._write_at = self._moment_in_period()
        self._is_busy = False
        self._look()

    def _look(self) -> None:
        """Begin work that is due, and schedule the next look."""
        state = self._state
        state.timers.call_at(state.clock() + _LOOK_SECONDS, self._look)
        if self._is_busy or state.is_restoring or not state.accepts_stores:
            return
        if state.tiering is None or not state.tiering.is_usable:
            return
        new = [
            space for space in state.index.spaces if space.number not in self._seen and self._contexts.places(space)[0]
        ]
        if new:
            self._seen.update(space.number for space in new)
            run(self._doing(self._promote_all(new)), state.fail)
        elif state.tiering.takes_writes and self._wall_clock() >= self._write_at:
            self._period = self._period_now() + 1
            self._write_at = self._moment_in_period()
            run(self._doing(self._write_all()), state.fail)

    def _period_now(self) -> int:
        return int(self._wall_clock() // PERIOD_SECONDS)

    def _moment_in_period(self) -> float:
        """Return a random moment, so that the list of each depot of a fleet sometimes stays."""
        return (self._period + random.random()) * PERIOD_SECONDS

    def _doing(self, work: Generator[Wait, bool, int]) -> Steps:
        self._is_busy = True
        try:
            yield self._turns.again
            return m.Done(self._state.epoch, (yield from work))
        finally:
            self._is_busy = False

    # --- writing --------------------------------------------------------------------------------------------------

    def _write_all(self) -> Generator[Wait, bool, int]:
        """List the hottest prefixes of each space; return the number of lists."""
        promoted = self._state.promoted
        visits = yield from self._count_visits()
        count = 0
        for space in list(self._state.index.spaces):
            body = yield from self._list(space, visits)
            if self._state.promoted is not promoted:
                break  # prefixes were cleared meanwhile, which `visits` still has
            if body:
                count += yield from self._write(self._digest(space, self._period_now()), body)
        self._state.counters[_LISTS_WRITTEN] += count
        return count

    def _count_visits(self) -> Generator[Wait, bool, Visits]:
        """Return how often each chunk was used recently."""
        state, visits = self._state, Visits(self._state.index.nodes)
        for number, used in enumerate([*state.index.priorities.recent, *state.promoted]):
            if isinstance(used, Prefix):
                visits.add_promoted(used)
                yield self._turns.again  # after 0.5 ms
                continue
            visits.add(used)
            if number % _PREFIXES_A_STEP == 0:
                yield self._turns.again
        return visits

    def _list(self, space: Space, visits: Visits) -> Generator[Wait, bool, bytes]:
        """Return the list of a space, empty if none of its chunks was used recently."""
        by_visits: dict[int, list[Chunk]] = {}
        for number, (chunk, count) in enumerate(visits.counts.items(), 1):
            if visits.describe(chunk)[0] is space:
                by_visits.setdefault(count, []).append(chunk)
            if number % _CHUNKS_A_STEP == 0:
                yield self._turns.again
        # Reversed: a parent is counted after its child, or more often, and must be listed before it.
        hottest, most = list[Chunk](), LIST_BYTES // (DIGEST_BYTES + 6)
        for count in sorted(by_visits, reverse=True):
            hottest += by_visits[count][: -most - 1 : -1]
        while hottest:
            body = self.pack(hottest[:most], visits)
            if len(body) <= LIST_BYTES - 4:
                return body
            most -= most // 16  # the names are long
            yield self._turns.again
        return b""

    def pack(self, listed: list[Chunk], visits: Visits) -> bytes:
        """Encode a list of chunks, parents before their children."""
        names = self._state.labels.names
        places, labels = dict[Chunk, int](), dict[int, int]()
        label_of, parents, digests = bytearray(), bytearray(), bytearray()
        for chunk in listed:
            space, key, parent, label = visits.describe(chunk)
            if space is None or (parent != NO_NODE and parent not in places):
                continue  # it has left the pool, or its parent is not listed
            if label not in labels and len(labels) == _MOST_LABELS:
                continue
            label_of += labels.setdefault(label, len(labels)).to_bytes(2, "little")
            parents += places.get(parent, _NO_PARENT).to_bytes(4, "little")
            digests += key
            places[chunk] = len(places)
        listing = _List([names[label] for label in labels], bytes(label_of), bytes(parents), bytes(digests))
        return msgspec.msgpack.encode(listing) if places else b""

    def _write(self, digest: bytes, body: bytes) -> Generator[Wait, bool, int]:
        """Store a list, to be evicted from the pool once a tier has it; return 1, or 0 if there is no room."""
        state, index = self._state, self._state.index
        tiering, label = state.tiering, state.labels.number_of(*LIST_OWNER)
        begun, _ = index.reserve(NewRun(self._space, digest, label=label), [(0, _PLACE)])
        if not begun or tiering is None:
            return 0
        ((_, _, (entry, _, offset, size)),) = begun
        os.pwrite(self._pool_fd, (len(body).to_bytes(4, "little") + body).ljust(size, b"\0"), offset)
        (node,) = index.seal([entry], int(state.clock()))
        yield from self._turns.total(tiering.leave(node, label.__eq__))
        return 1

    # --- reading --------------------------------------------------------------------------------------------------

    def _promote_all(self, spaces: list[Space]) -> Generator[Wait, bool, int]:
        """Promote the prefixes in the last lists of some spaces; return the number of chunks."""
        before = self._state.counters[_CHUNKS_PROMOTED]
        for space in spaces:
            for back in range(_NUM_PERIODS):
                listing = yield from self._read(self._digest(space, self._period_now() - back))
                if listing is not None:
                    yield from self._promote_list(space, listing)
        count = self._state.counters[_CHUNKS_PROMOTED] - before
        if count:
            logger.info("promoted %d chunks that other depots use most, before a request asked for them", count)
        return count

    def _read(self, digest: bytes) -> Generator[Wait, bool, _List | None]:
        """Return a list from the tiers, None if they have no valid one."""
        index, label = self._state.index, self._state.labels.number_of(*LIST_OWNER)
        yield from self._bring_up(self._space, digest, [_PLACE], label)
        nodes = index.visibility.match(self._space, digest).nodes
        if not nodes:
            return None
        (entry,) = index.entries.sealed(nodes[-1])
        offset, size = index.table.extent(entry)
        data = os.pread(self._pool_fd, size, offset)
        yield from self._turns.total(index.priorities.end_session(nodes[-1], label.__eq__))
        index.evictor.evict(nodes[-1])
        index.evictor.log_evicted("as a list of hot prefixes was read")
        return parse_list(data)

    def _promote_list(self, space: Space, listing: _List) -> Generator[Wait, bool, None]:
        """Promote the prefixes of a list, the hottest first, until a quarter of the pool is in use."""
        digests, labels = listing.digests, listing.labels
        parents = [int.from_bytes(listing.parents[at : at + 4], "little") for at in range(0, len(listing.parents), 4)]
        inner = set(parents)
        for last in range(len(parents)):
            if last in inner:
                continue
            yield self._turns.again
            chain, chunk = list[bytes](), last
            while chunk != _NO_PARENT:
                chain.append(digest_at(digests, chunk))
                chunk = parents[chunk]
            label = int.from_bytes(listing.label_of[2 * last : 2 * last + 2], "little")
            if not (yield from self._promote_prefix(space, b"".join(reversed(chain)), labels[label])):
                return

    def _promote_prefix(self, space: Space, digests: bytes, owner: tuple[str, str, str]) -> Generator[Wait, bool, bool]:
        """Promote a prefix as far as there is room; return False if there is none."""
        index, (places, _) = self._state.index, self._contexts.places(space)
        extents, found = index.extents, index.visibility.match(space, digests).num_chunks
        chunk_bytes = max(1, self._contexts.chunk_bytes.get(space.number, 0))
        room = int(extents.capacity_bytes * _MOST_SHARE) - extents.used_bytes
        length = min(num_digests(digests), found + room // chunk_bytes)
        if not places or room < chunk_bytes:
            return False
        if length > found:
            wanted = slice_digests(digests, 0, length)
            yield from self._bring_up(space, wanted, places, self._state.labels.number_of(*owner))
            self._state.counters[_CHUNKS_PROMOTED] += max(0, index.visibility.match(space, wanted).num_chunks - found)
        return True

    def _bring_up(
        self, space: Space, digests: bytes, places: list[PartPlace], label: int
    ) -> Generator[Wait, bool, None]:
        tiering, match = self._state.tiering, self._state.index.visibility.match(space, digests)
        if tiering is not None:
            prefix = Prefix(space, digests, places, label, request_id="hottest prefixes")
            yield partial(tiering.promote, prefix, match, wait_seconds=_PATIENT_SECONDS)

    @property
    def _space(self) -> Space:
        return self._state.labels.space_of(_SPEC)

    def _digest(self, space: Space, period: int) -> bytes:
        return digest_of(("hottest", space.digest, period))


def parse_list(data: bytes) -> _List | None:
    """Return the list in an entry of a tier, None if it is invalid."""
    try:
        listing = _decoder.decode(data[4 : 4 + int.from_bytes(data[:4], "little")])
        _check(listing)
    except (msgspec.MsgspecError, RecursionError, ValueError, KeyFormatError) as error:
        logger.warning("ignoring a list of hot prefixes from a tier: %s", error)
        return None
    return listing


def _check(listing: _List) -> None:
    """Check that a list does not contradict itself: its bytes come from storage that others write.

    Raises:
        ValueError: the list contradicts itself.
        KeyFormatError: its digests are not whole.
    """
    count = num_digests(listing.digests)
    if (len(listing.label_of), len(listing.parents)) != (2 * count, 4 * count):
        raise ValueError(f"{len(listing.parents)} bytes of parents for {len(listing.digests)} of digests")
    for chunk in range(count):
        parent = int.from_bytes(listing.parents[4 * chunk : 4 * chunk + 4], "little")
        if parent != _NO_PARENT and parent >= chunk:
            raise ValueError(f"chunk {chunk} before its parent {parent}")
        label = int.from_bytes(listing.label_of[2 * chunk : 2 * chunk + 2], "little")
        if label >= len(listing.labels):
            raise ValueError(f"label {label} of {len(listing.labels)}")
