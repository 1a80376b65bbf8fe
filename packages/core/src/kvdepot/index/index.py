"""The index: which chunks are here, and where.

A **node** is a chunk of one space (one `CacheSpec`); it hangs below the chunk before it. An **entry** is one node x
layer group x shard: an extent of the pool and a record of the table. A node is **visible**, and can be found, when
every shard of every full-attention group of it and of all its ancestors is sealed. Only nodes without children, leases
and unfinished writes leave, so full attention stays prefix-closed: if a chunk is visible, so is everything before it.
That lets a lookup probe about ten chunks of 512, and a lease hold just the deepest. A lease yields where its share is
above its quota and one within its own needs room. An entry that is taken out of the middle as its bytes are wrong
**breaks** its node: what comes after it keeps its mark, and a lookup ends at the break.

A node whose entries are all gone stays as a hole while it has children; they are invisible and may be evicted.

Nothing here does I/O but for the table, and nothing knows of sessions; `server.depot` drives it.
"""

import logging
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import islice
from math import ceil
from typing import Final

import msgspec
from blake3 import blake3

from kvdepot.index.columns import Links, make_column
from kvdepot.index.eviction import ENDED, NO_NODE, NORMAL, POLICIES, ChunkTree, EvictionPolicy, GuardedPolicy
from kvdepot.index.prefix import usable_prefix
from kvdepot.index.quotas import MAXIMUM_QUOTAS, QuotaTable
from kvdepot.keys import DIGEST_BYTES
from kvdepot.layout import GroupKind, window_chunks
from kvdepot.pool.extents import ExtentAllocator, extent_size
from kvdepot.pool.spread import NUM_PARTS, SpreadMap
from kvdepot.pool.table import NO_RECORD, OWNER_BYTES, PARENT_BYTES, SEALED, WRITING, IndexTable, Record, Writer
from kvdepot.wire.histogram import Histogram
from kvdepot.wire.messages import EXTENT, CacheSpec

logger = logging.getLogger(__name__)

# Between two pauses of what takes long: at most half a millisecond, whatever the index holds.
_RESTORE_STEP: Final = 25  # records
_REMOVE_STEP: Final = 25  # chunks
_SCAN_STEP: Final = 500  # chunks that are only looked at
_RANK_STEP: Final = 40  # chunks
_REVEAL_STEP: Final = 64  # chunks
_HOLE_STEP: Final = 16
_LAST_USE_SHIFT: Final = 10  # of last uses in seconds: what is sorted in one go is bounded by that, not by the pool
_MOST_LEASED: Final = 1024  # leased chunks, in search of one without children
_SPARE_DEADLINES: Final = 1024
_DEADLINE_BITS: Final = 10  # of how far a deadline is: so there are some ten thousand different ones at most

_SPARE_NODES: Final = 1024  # more than twice as many as records, for holes

MOST_EVICTED: Final = 80  # chunks, to make room for one request: two milliseconds, with ARC four


def digest_of(value: object) -> bytes:
    """Return 32 bytes that name a plain value."""
    return blake3(msgspec.msgpack.encode(value)).digest()


class KeyMap(SpreadMap[bytes, int]):
    """Nodes by key. Spread by the first byte, as lookups ask for thousands and each call of `hash` would count."""

    __slots__ = ()

    def __getitem__(self, key: bytes) -> int:
        return self._parts[key[0] % NUM_PARTS][key]

    def __setitem__(self, key: bytes, number: int) -> None:
        self._parts[key[0] % NUM_PARTS][key] = number

    def __delitem__(self, key: bytes) -> None:
        del self._parts[key[0] % NUM_PARTS][key]

    def __contains__(self, key: bytes) -> bool:
        return key in self._parts[key[0] % NUM_PARTS]

    def get(self, key: bytes) -> int | None:
        """See `SpreadMap`."""
        return self._parts[key[0] % NUM_PARTS].get(key)

    def before(self, digests: bytes, limit: int, lowest: int) -> Iterator[tuple[int, int]]:
        """Yield place and node of each of the keys from `lowest` to `limit` that has one, the last first."""
        parts = self._parts
        for start in range((limit - 1) * DIGEST_BYTES, lowest * DIGEST_BYTES - 1, -DIGEST_BYTES):
            key = digests[start : start + DIGEST_BYTES]
            part = parts[digests[start] % NUM_PARTS]
            if key in part:
                yield start // DIGEST_BYTES, part[key]


@dataclass(slots=True)
class Space:
    """All chunks of one `CacheSpec`."""

    number: int
    spec: CacheSpec
    full_mask: int = 0  # bit g: group g is full attention
    windows: list[tuple[int, int]] = field(
        default_factory=list[tuple[int, int]]
    )  # (bit, chunks needed before a boundary)
    nodes: KeyMap = field(default_factory=KeyMap)
    digest: bytes = b""  # names the spec everywhere
    chunks_needed: list[int] = field(default_factory=list[int])  # by group: before a boundary; 0: all of them
    window_mask: int = 0  # bits of all windows

    def __post_init__(self) -> None:
        self.digest = digest_of(self.spec)
        for number, group in enumerate(self.spec.groups):
            if group.kind is GroupKind.FULL_ATTENTION:
                self.full_mask |= 1 << number
                self.chunks_needed.append(0)
                continue
            is_window = group.kind is GroupKind.SLIDING_WINDOW
            self.chunks_needed.append(window_chunks(group.window_tokens, self.spec.chunk_tokens) if is_window else 1)
            self.windows.append((1 << number, self.chunks_needed[-1]))
            self.window_mask |= 1 << number
        self.windows.sort(key=lambda window: window[1])


@dataclass(frozen=True, slots=True)
class EntryPlace:
    """What a new entry is: everything but where it goes."""

    space: Space
    key: bytes
    parent: int  # node, NO_NODE for a first chunk
    depth: int
    group: int
    shard: int
    num_bytes: int
    layout: int
    label: int  # number of the tenant and model that it belongs to
    writer: Writer
    owner: bytes = bytes(OWNER_BYTES)


class ChunkIndex:
    """Nodes, entries, space and eviction."""

    def __init__(
        self, extents: ExtentAllocator, table: IndexTable, policy: str = "lru", quotas: QuotaTable | None = None
    ) -> None:
        self.extents = extents
        self.table = table
        self.spaces: list[Space] = []
        self.num_entries = 0  # sealed
        self.num_evicted = 0
        self.num_leased_evicted = 0  # of these, in spite of a lease
        self.num_room_steps = 0  # that were done to make room: evictions, and unfinished stores that were ended
        self.num_over_share = 0  # entries that were declined as their share has enough unfinished ones
        # Called for who must get room when nothing can leave: ends an unfinished store of a share above its quota.
        self.end_store: Callable[[], bool] = lambda: False
        self.on_shown: Callable[[int], object] | None = None  # called with each node that can be found from now on
        self.on_hidden: Callable[[int], object] | None = None  # and with each that cannot any more
        # Given what is left to do of something long; may do it later, in steps.
        self.go_on: Callable[[Iterator[int]], object] = sum
        self.is_restoring = False  # nothing leaves then
        self.num_restore_errors = 0
        self.now = 0  # seconds of the depot's clock, which sets it now and then
        self.eviction_ages = Histogram(1.0)  # seconds since the last use of what was evicted
        self._space_by_spec: dict[bytes, Space] = {}
        self.quotas = quotas or QuotaTable(extents.capacity_bytes)
        self._factory = POLICIES[policy]
        self._begin_empty()

    def _begin_empty(self) -> None:
        """Begin without a node or a record."""
        num_nodes, num_records = 2 * self.table.num_records + _SPARE_NODES, self.table.num_records
        self._tree = ChunkTree.with_room(num_nodes)
        # By share and rank: those that were ever needed, what leaves first before the others.
        self._policies = [{NORMAL: self._policy(number, NORMAL)} for number in range(self.quotas.num_shares)]
        self._num_leases = make_column("I", num_nodes)  # leases and pins, which are among its holds
        # Nodes that have some, by share; what was leased last at the end.
        self._leased = Links(num_nodes, max(MAXIMUM_QUOTAS + 1, self.quotas.num_shares))
        self._deadline = make_column("I", num_nodes)  # the second when what ends there is not worth keeping, or 0
        self._ending: dict[int, int] = {}  # by that second: the first of its nodes
        self._next_ending = make_column("I", num_nodes)
        self._previous_ending = make_column("I", num_nodes)
        self._next_seconds: list[int] = []  # heap of those seconds, and of some that no longer matter
        self._depth = make_column("I", num_nodes)
        # Seconds; of what is before a node at least as late, once that has left.
        self._last_use = make_column("Q", num_nodes)
        self._num_uses = 0
        self._used_at = make_column("Q", num_nodes)  # how many uses there had been by its last
        self._space_of = make_column("I", num_nodes)
        self._label_of = make_column("I", num_nodes)
        self._sealed_groups = make_column("Q", num_nodes)
        self._first_entry = make_column("I", num_nodes)
        self._visible = make_column("B", num_nodes)
        self._free_node = NO_NODE  # the first of those that were given back
        self._next_free_node = make_column("I", num_nodes)
        self._num_free_nodes = 0
        self._hidden: dict[int, set[int]] = {}  # by parent: complete nodes that wait until it is visible
        self._broken: set[int] = set()  # nodes that were visible and are not; those after them may be
        self._num_known_records = 0  # that were given out so far
        self._next_entry = make_column("I", num_records)  # of a free record: the next one
        self._node_of = make_column("I", num_records)
        self._free_record = NO_RECORD  # the first of those that were given back
        self._writing_share = make_column("I", num_records)  # plus one: what it counts against until it is sealed
        self._abandoned: dict[int, int] = {}  # records that belong to no node any more, and their labels
        self._readers: dict[int, int] = {}  # records whose bytes are being copied for a tier
        self._lingering: set[int] = set()  # those that were removed meanwhile: their extents are still in the table

    # --- spaces ---------------------------------------------------------------------------------------------------

    def space(self, spec: CacheSpec) -> Space:
        """Return the space of a spec, made if it is new."""
        digest = digest_of(spec)
        space = self._space_by_spec.get(digest)
        if space is None:
            space = Space(len(self.spaces), spec)
            self.spaces.append(space)
            self._space_by_spec[digest] = space
        return space

    @property
    def num_chunks(self) -> int:
        """Nodes, holes included."""
        return len(self._tree.keys) - self._num_free_nodes

    @property
    def num_policy_errors(self) -> int:
        """Calls of eviction policies that failed."""
        return sum(policy.num_errors for ranks in self._policies for policy in ranks.values())

    # --- finding --------------------------------------------------------------------------------------------------

    def node(self, space: Space, key: bytes, depth: int) -> int | None:
        """Return the node of a chunk, visible or not."""
        node = space.nodes.get(key)
        return node if node is not None and self._depth[node] == depth else None

    def visible(self, space: Space, key: bytes, depth: int) -> int | None:
        """Return the node of a chunk that can be found."""
        node = self.node(space, key, depth)
        return node if node is not None and self._visible[node] else None

    def longest_prefix(self, space: Space, digests: bytes) -> tuple[int, tuple[int, ...]]:
        """Find the longest usable prefix.

        Args:
            space: where.
            digests: packed `(num_chunks, 32)`, from chunk 0 on.

        Returns:
            its chunks, and the nodes to pin so that all of it stays.
        """
        limit = len(digests) // DIGEST_BYTES
        if self._broken and space.full_mask:
            limit = self._unbroken_prefix(space, digests, limit)

        def has(chunk: int, bits: int) -> bool:
            node = self._visible_node(space, digests, chunk)
            return node is not None and self._sealed_groups[node] & bits == bits

        def last_boundary(limit: int, lowest: int) -> int:
            return self._last_boundary(space, digests, limit, lowest)

        full = (space.full_mask,) if space.full_mask else ()
        limit = usable_prefix(limit, has, full, space.windows, is_closed=True, last_boundary=last_boundary)
        if not limit:
            return 0, ()
        if space.full_mask:
            node = space.nodes[digests[(limit - 1) * DIGEST_BYTES : limit * DIGEST_BYTES]]
            return limit, (node,)
        start = max(0, limit - max(chunks for _, chunks in space.windows))
        nodes = [self._visible_node(space, digests, place) for place in range(start, limit)]
        return limit, tuple(node for node in nodes if node is not None)

    def _visible_node(self, space: Space, digests: bytes, place: int) -> int | None:
        node = space.nodes.get(digests[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES])
        return node if node is not None and self._visible[node] and self._depth[node] == place else None

    def _unbroken_prefix(self, space: Space, digests: bytes, num_chunks: int) -> int:
        """Return where the first break is, at most `num_chunks`; in as many steps as there are chunks or breaks."""
        if len(self._broken) > num_chunks:
            for place in range(num_chunks):
                if space.nodes.get(digests[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES]) in self._broken:
                    return place
            return num_chunks
        for node in self._broken:
            place = self._depth[node]
            key = digests[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES]
            if place < num_chunks and self._space_of[node] == space.number and self._tree.keys[node] == key:
                num_chunks = place
        return num_chunks

    def _last_boundary(self, space: Space, digests: bytes, limit: int, lowest: int) -> int:
        """Return the longest prefix above `lowest`, at most `limit`, whose last chunk every window has; 0 for none."""
        sealed, mask = self._sealed_groups, space.window_mask
        for place, node in space.nodes.before(digests, limit, lowest):
            if sealed[node] & mask == mask and self._visible[node] and self._depth[node] == place:
                return place + 1
        return 0

    def extent_of(self, node: int, group: int, shard: int, layout: int) -> tuple[int, int, int, int] | None:
        """Return record, header, offset and bytes of a sealed entry with this layout; None if there is none."""
        record = self._entry(node, group, shard)
        if record == NO_RECORD or self.table.layout_of(record) != layout:
            return None
        header = self.table.header(record)
        if header & 0xFF != SEALED:
            return None
        return (record, header, *self.table.extent(record))

    def has_entry(self, node: int, group: int, shard: int) -> bool:
        """Whether an entry is here or being written."""
        return self._entry(node, group, shard) != NO_RECORD

    def _entry(self, node: int, group: int, shard: int) -> int:
        place = group, shard
        record = self._first_entry[node]
        while record != NO_RECORD and self.table.place_of(record) != place:
            record = self._next_entry[record]
        return record

    def entry(self, node: int, group: int, shard: int) -> int | None:
        """Return the record of an entry, sealed or being written; None if there is none."""
        record = self._entry(node, group, shard)
        return None if record == NO_RECORD else record

    def entries(self, node: int) -> list[int]:
        """Return the sealed records of a node."""
        return [record for record in self._entries(node) if self._is_sealed(record)]

    def node_of(self, record: int) -> int:
        """Return the node of a record in use."""
        return self._node_of[record]

    def key_of(self, node: int) -> bytes:
        """Return the key of a node in use."""
        key = self._tree.keys[node]
        assert key is not None
        return key

    def space_of(self, node: int) -> Space:
        """Return the space of a node."""
        return self.spaces[self._space_of[node]]

    def label_of(self, node: int) -> int:
        """Return the number of the tenant and model of a node."""
        return self._label_of[node]

    def share_of(self, node: int) -> int:
        """Return the share of the pool that a node counts against."""
        return self._tree.share[node]

    def depth_of(self, node: int) -> int:
        """Return how many chunks are before a node."""
        return self._depth[node]

    def parent_of(self, node: int) -> int:
        """Return the node before a node, `NO_NODE` before a first chunk."""
        return self._tree.parent[node]

    def idle_seconds(self, node: int) -> int:
        """Return how long ago a prefix that ends with this chunk was stored or used, as far as that is known."""
        return max(0, self.now - self._last_use[node])

    def num_children(self, node: int) -> int:
        """Return how many chunks follow a node."""
        return self._tree.num_children[node]

    def is_held(self, node: int) -> bool:
        """Whether a lease, a pin, a write or a copy keeps a node."""
        return bool(self._tree.holds[node])

    def is_chain(self, node: int) -> bool:
        """Whether a node has one child, and nothing else needs it."""
        return self._tree.num_children[node] == 1 and not self._tree.holds[node]

    # --- leases ---------------------------------------------------------------------------------------------------

    def pin(self, nodes: Iterable[int]) -> None:
        """Keep nodes, and so everything before them, until `unpin`.

        What their share has above its quota is not kept from others that are within theirs.
        """
        for node in nodes:
            self._tree.holds[node] += 1
            self._num_leases[node] += 1
            self._leased.append(node, self._tree.share[node])

    def unpin(self, nodes: Iterable[int]) -> None:
        """Undo one `pin`."""
        for node in nodes:
            self._num_leases[node] -= 1
            if not self._num_leases[node]:
                self._leased.remove(node)
            self._release_hold(node)

    def begin_reading(self, record: int) -> int:
        """Keep a sealed entry and its extent, which are being copied for a tier; return its node."""
        node = self._node_of[record]
        self._tree.holds[node] += 1
        self._readers[record] = self._readers.get(record, 0) + 1
        return node

    def end_reading(self, record: int, node: int) -> None:
        """Undo one `begin_reading`; what was removed meanwhile gives its space back now."""
        self._readers[record] -= 1
        if not self._readers[record]:
            del self._readers[record]
            if record in self._lingering:
                self._free_lingering(record)
        self._release_hold(node)

    def used(self, node: int) -> Iterator[int] | None:
        """Tell the policy that a prefix ending here was used. One that was said to have ended has not.

        Returns what is left to do of that for a long one, in steps as those of `set_priority`; None if nothing is.
        """
        self._forget_deadline(node)
        self._last_use[node] = self.now
        self._num_uses += 1
        self._used_at[node] = self._num_uses
        rank, rest = self._tree.rank, None
        if rank[node] == ENDED:
            rest = self._rank_from(node, lambda above, _count: rank[above] == ENDED, NORMAL)
            if next(rest) < _RANK_STEP:
                rest = None
        self._policy_of(node).used(node)
        return rest

    def _release_hold(self, node: int) -> None:
        self._tree.holds[node] -= 1
        if self._tree.keys[node] is None:  # it left although it was leased
            if not self._tree.holds[node]:
                self._give_node_back(node)
        elif self._tree.evictable(node):
            if self._first_entry[node] == NO_RECORD:
                self._drop_holes_later(self._drop_node(node))
            else:
                self._policy_of(node).unpinned(node)

    # --- hints ----------------------------------------------------------------------------------------------------

    def set_priority(self, node: int, is_own: Callable[[int], bool], priority: int) -> Iterator[int]:
        """Let what only this prefix needs leave after chunks of lower priority of its share.

        Only chunks whose label `is_own`, here and below. Yields how many since it last did, the end of the prefix with
        the first step, which comes at once; between two steps the index may be used for anything. What is said of the
        prefix meanwhile holds: if it is ranked otherwise, or used and was to end, the rest stays as it is.
        """
        self._end_hint(node, is_own)
        return self._rank_own_chunks(node, is_own, NORMAL + priority)

    def end_session(self, node: int, is_own: Callable[[int], bool]) -> Iterator[int]:
        """Let what only this prefix needs leave before all other chunks of its share; yields as `set_priority` does."""
        self._end_hint(node, is_own)
        return self._rank_own_chunks(node, is_own, ENDED)

    def end_session_at(self, node: int, is_own: Callable[[int], bool], deadline: float) -> None:
        """Do what `end_session` does at a later time, unless the prefix is used before.

        What is more than 17 minutes away may end later by a five-hundredth of that.
        """
        if not is_own(self._label_of[node]):
            return
        self._forget_deadline(node)
        second = max(1, ceil(deadline))
        step = 1 << max(0, max(0, second - self.now).bit_length() - _DEADLINE_BITS)
        second += -second % step
        self._deadline[node] = second
        first = self._ending.get(second, NO_NODE)
        if first == NO_NODE:
            heappush(self._next_seconds, second)
        else:
            self._previous_ending[first] = node
        self._next_ending[node], self._previous_ending[node] = first, NO_NODE
        self._ending[second] = node
        if len(self._next_seconds) > 2 * len(self._ending) + _SPARE_DEADLINES:
            self._next_seconds = sorted(self._ending)

    def _end_hint(self, node: int, is_own: Callable[[int], bool]) -> None:
        if is_own(self._label_of[node]):
            self._forget_deadline(node)

    def _forget_deadline(self, node: int) -> None:
        second, self._deadline[node] = self._deadline[node], 0
        if not second:
            return
        before, after = self._previous_ending[node], self._next_ending[node]
        if after != NO_NODE:
            self._previous_ending[after] = before
        if before != NO_NODE:
            self._next_ending[before] = after
        elif after != NO_NODE:
            self._ending[second] = after
        else:
            del self._ending[second]

    def has_ended(self, now: float) -> bool:
        """Whether `expire` has something to do."""
        return bool(self._next_seconds) and self._next_seconds[0] <= now

    def expire(self, now: float) -> Iterator[int]:
        """End the sessions whose time has come; yields as `set_priority` does."""
        while self.has_ended(now):
            second = heappop(self._next_seconds)
            while (node := self._ending.get(second, NO_NODE)) != NO_NODE:
                self._forget_deadline(node)
                yield from self.end_session(node, self._label_of[node].__eq__)

    def _rank_own_chunks(self, node: int, is_own: Callable[[int], bool], rank: int) -> Iterator[int]:
        """From the end of a prefix up to where another branches off or somebody else's chunks begin."""
        num_children, label_of = self._tree.num_children, self._label_of
        return self._rank_from(
            node, lambda above, count: num_children[above] <= (count > 0) and is_own(label_of[above]), rank
        )

    def _rank_from(self, start: int, is_wanted: Callable[[int, int], bool], rank: int) -> Iterator[int]:
        """Rank chunks towards the root while `is_wanted(node, how many were ranked)`."""
        tree, keys = self._tree, self._tree.keys
        node, count, began, start_key = start, 0, self._num_uses, keys[start]
        while node != NO_NODE and is_wanted(node, count) and (rank != ENDED or self._used_at[node] <= began):
            self._set_rank(node, rank)
            behind, node = node, tree.parent[node]
            count += 1
            if count % _RANK_STEP == 0 and node != NO_NODE:
                key, behind_key = keys[node], keys[behind]
                yield _RANK_STEP
                if keys[node] != key:
                    break  # it left meanwhile
                if keys[start] == start_key and tree.rank[start] != rank:
                    break
                # What was to end and has left was ended; of anything else nobody knows what was said of it last.
                if (tree.rank[behind] if keys[behind] == behind_key else ENDED) != rank:
                    break
        yield count % _RANK_STEP

    def _set_rank(self, node: int, rank: int) -> None:
        if self._tree.rank[node] == rank:
            return
        is_known = any(self._is_sealed(record) for record in self._entries(node))
        if is_known:
            self._policy_of(node).removed(node)
        self._tree.rank[node] = rank
        self._need_policy(self._tree.share[node], rank)
        if is_known:
            self._policy_of(node).added(node)

    def _need_policy(self, share: int, rank: int) -> None:
        while len(self._policies) <= share:
            self._policies.append({NORMAL: self._policy(len(self._policies), NORMAL)})
        if rank not in self._policies[share]:
            self._policies[share] = dict(sorted([*self._policies[share].items(), (rank, self._policy(share, rank))]))

    # --- quotas ---------------------------------------------------------------------------------------------------

    def set_quota(self, tenant: str, num_bytes: int) -> Iterator[int]:
        """Change a tenant's quota, 0 for none, and count what it has against it.

        Its chunks are ordered anew, as if they had been used in the order of their numbers. Yields how many were
        moved since it last did; between two steps the index may be used for anything but another `set_quota`.

        Raises:
            ConfigError: with the first step; there is no room for such a quota.
        """
        if num_bytes:
            self.quotas.set_quota(tenant, num_bytes)
        elif not self.quotas.end_quota(tenant):
            return
        self._need_policy(self.quotas.num_shares - 1, NORMAL)
        moved = 0
        for node in range(len(self._tree.keys)):
            share = self.quotas.share_of(self._label_of[node])
            if self._tree.keys[node] is not None and self._tree.share[node] != share:
                self._move(node, share)
                moved += 1
            if moved >= _RANK_STEP or node % _SCAN_STEP == 0:
                yield moved
                moved = 0
        if not num_bytes:
            self.quotas.forget_quota(tenant)
        yield moved

    def _move(self, node: int, share: int) -> None:
        is_known = any(self._is_sealed(record) for record in self._entries(node))
        if is_known:
            self._policy_of(node).removed(node)
        size = sum(extent_size(self.table.extent(record)[1]) for record in self._entries(node))
        self.quotas.move(size, self._tree.share[node], share)
        self._tree.share[node] = share
        for record in self._entries(node):
            if self._writing_share[record]:
                self._end_writing(record)
                self._begin_writing(record, share, extent_size(self.table.extent(record)[1]))
        if self._num_leases[node]:
            self._leased.append(node, share)
        self._need_policy(share, self._tree.rank[node])
        if is_known:
            self._policy_of(node).added(node)

    def _policy(self, share: int, rank: int) -> GuardedPolicy:
        tree = self._tree.of_share(share, rank)
        return GuardedPolicy(self._factory(tree), tree)

    # --- writing --------------------------------------------------------------------------------------------------

    def begin_entry(self, place: EntryPlace, most_evicted: int = MOST_EVICTED) -> int | None:
        """Make an entry that is being written, evicting what it needs.

        Its header once sealed is the present one with the state SEALED. The chunk before it must have a node.

        Returns:
            its record; None if there is no room and nothing more to evict, or `most_evicted` chunks did not make room:
            small chunks that leave are rarely neighbours. Those have left; who asks again goes on from there. Also
            None if its share has as many unfinished bytes as it may.
        """
        share, size, is_owed = self.quotas.share_of(place.label), extent_size(place.num_bytes), False
        if self.quotas.num_shares > 1:
            if not self.quotas.may_write(share, size):
                self.num_over_share += 1
                return None
            is_owed = self.quotas.is_owed(share, size)
        node = place.space.nodes.get(place.key)
        if node is None:
            node = self._take_node(place, share)
            if node is None:
                return None
        # Held from here on: neither it nor what is before it leaves to make room for it.
        self._tree.holds[node] += 1
        offset = self._allocate(place.num_bytes, share, is_owed, most_evicted)
        record = self._take_record(share, is_owed) if offset is not None else None
        if offset is None or record is None:
            if offset is not None:
                self.extents.free(offset, place.num_bytes)
            self._release_hold(node)
            return None
        parent_key = self._tree.keys[place.parent] if place.parent != NO_NODE else None
        self.table.write(
            record, space=place.space.number, group=place.group, shard=place.shard, offset=offset,
            num_bytes=place.num_bytes, key=place.key, parent=(parent_key or b"")[:PARENT_BYTES], depth=place.depth,
            layout=place.layout, label=place.label, writer=place.writer, owner=place.owner,
        )  # fmt: skip
        self._link(record, node)
        self._account(node, size)
        self._begin_writing(record, self._tree.share[node], size)
        return record

    def _begin_writing(self, record: int, share: int, size: int) -> None:
        """Count a record as unfinished until `_end_writing`."""
        self._writing_share[record] = share + 1
        self.quotas.writing_bytes[share] += size

    def _end_writing(self, record: int) -> None:
        share, self._writing_share[record] = self._writing_share[record], 0
        if share:
            self.quotas.writing_bytes[share - 1] -= extent_size(self.table.extent(record)[1])

    def seal_entries(self, records: Sequence[int], now: int = 0, checksums: bytes = b"") -> None:
        """Say that the bytes of entries are in place; `checksums` are packed, or none."""
        fresh: list[int] = []
        for place, record in enumerate(records):
            node = self._node_of[record]
            is_alone = self._first_entry[node] == record and self._next_entry[record] == NO_RECORD  # as most are
            if is_alone or not any(self._is_sealed(other) for other in self._entries(node)):
                fresh.append(node)
            checksum = checksums[place * OWNER_BYTES : (place + 1) * OWNER_BYTES]
            self.table.seal(record, now, checksum or bytes(OWNER_BYTES))
            self._last_use[node] = now
            self.num_entries += 1
            self._end_writing(record)
            self._update_group(node, record)
            self._tree.holds[node] -= 1
        for node in reversed(fresh):  # deepest first: what leaves first is added first
            self._policy_of(node).added(node)
        for record in records:
            node = self._node_of[record]
            self._reveal(node)
            if self._tree.evictable(node):
                self._policy_of(node).unpinned(node)

    def discard_entry(self, record: int) -> None:
        """Take back an entry that is not sealed; nothing writes to it any more."""
        node = self._node_of[record]
        if node == NO_NODE:  # it was abandoned, or is an earlier server's
            self.free_abandoned(record)
            return
        self._unlink(record, node)
        self._free_entry(record)
        self._release_hold(node)

    def abandon_entry(self, record: int) -> None:
        """Take an entry that is not sealed off its chunk, which can be stored again from now on.

        Something may still be writing to it: its space is taken, and counts against its tenant, until `free_abandoned`.
        """
        node = self._node_of[record]
        self._abandoned[record] = self._label_of[node]
        self._unlink(record, node)
        self._node_of[record] = NO_NODE
        self._release_hold(node)

    def free_abandoned(self, record: int) -> None:
        """Take back an abandoned entry that nothing writes to any more."""
        offset, num_bytes = self.table.extent(record)
        self.quotas.account(self._abandoned.pop(record), self._writing_share[record] - 1, -extent_size(num_bytes))
        self._end_writing(record)
        self.table.free(record)
        self.extents.free(offset, num_bytes)
        self._give_back(record)

    def remove_entry(self, record: int) -> None:
        """Take away a sealed entry, leased or not, because its bytes are wrong.

        Whoever copies it sees its header change. Its chunk and those after it cannot be found until it is stored again.
        Not while the index `is_restoring`.
        """
        assert not self.is_restoring
        node = self._node_of[record]
        group, _ = self.table.place_of(record)
        self._unlink(record, node)
        self._free_entry(record)
        self.num_entries -= 1
        self._sealed_groups[node] &= ~(1 << group)
        full_mask = self.spaces[self._space_of[node]].full_mask
        sealed = self._sealed_groups[node]
        if self._visible[node] and (not sealed or sealed & full_mask != full_mask):
            self._set_invisible(node)
            if full_mask:
                self._broken.add(node)
        if self._first_entry[node] != NO_RECORD:
            return
        if self._tree.evictable(node):
            self._drop_holes_later(self._drop_node(node))
        else:
            self._policy_of(node).removed(node)  # a hole: `added` again when it is stored again

    def _set_invisible(self, node: int) -> None:
        if self._visible[node] and self.on_hidden is not None:
            self.on_hidden(node)
        self._visible[node] = 0

    # --- leaving --------------------------------------------------------------------------------------------------

    def evict_one(self, share: int = 0, *, is_owed: bool = False) -> bool:
        """Evict the next chunk to make room for a share of the pool; False if none can leave.

        A share that `is_owed` room, as it asks within its quota, gets it of those above theirs: first what nothing
        needs, then what they lease. If they hold all of it by unfinished stores, one of those ends, and who asks again
        finds what that kept. Only then its own chunks leave.
        """
        if self.is_restoring:
            return False
        for number in self.quotas.victims(share):
            if number == share and is_owed:
                node = self._leased_victim()
                if node is not None or self.end_store():
                    self.num_room_steps += 1
                    if node is not None:
                        self.num_leased_evicted += 1
                        self._evict(node)
                    return True
            for policy in self._policies[number].values():
                node = policy.victim()
                if node is not None:
                    self.num_room_steps += 1
                    self._evict(node)
                    return True
        return False

    def _leased_victim(self) -> int | None:
        """Return a chunk of a share above its quota that only leases keep, None if none is found."""
        leased, tree = self._leased, self._tree
        for share in self.quotas.above():
            node = NO_NODE
            for node in islice(leased.numbers(share), _MOST_LEASED):
                if not tree.num_children[node] and tree.holds[node] == self._num_leases[node]:
                    return node
            if node != NO_NODE:
                leased.begin_with(node, share)  # the next search goes on there
        return None

    def next_victim(self) -> int | None:
        """Return the chunk that would leave next to make room for anybody, without removing it."""
        if self.is_restoring:
            return None
        for number in self.quotas.victims(0):
            for policy in self._policies[number].values():
                node = policy.victim()
                if node is not None:
                    return node
        return None

    def evict(self, node: int) -> bool:
        """Evict this very chunk; False if something needs it, or the index `is_restoring`."""
        if self.is_restoring or not self._tree.evictable(node):
            return False
        self._evict(node)
        return True

    def _evict(self, node: int) -> None:
        self.num_evicted += 1
        self.eviction_ages.add(self.idle_seconds(node))
        self._drop_holes_later(self._remove(node))

    def _policy_of(self, node: int) -> EvictionPolicy:
        return self._policies[self._tree.share[node]][self._tree.rank[node]]

    def clear(self, wanted: Callable[[int, Space], bool]) -> Iterator[int]:
        """Remove every chunk for which `wanted(label, space)` holds and that nobody uses.

        A chunk with a descendant that stays, stays too; all do while the index `is_restoring`. Yields how many
        entries were removed since it last did; between two steps the index may be used for anything.
        """

        def is_wanted(node: int) -> bool:
            return self._is_hole(node) or wanted(self._label_of[node], self.space_of(node))

        for number in range(len(self._tree.keys)):
            if self._tree.evictable(number) and is_wanted(number):
                yield from self._clear_up(number, is_wanted)
            if number % _SCAN_STEP == 0:
                yield 0

    def clear_end(self, node: int) -> Iterator[int]:
        """Remove a chunk and those before it, up to the first that something else needs; yields as `clear` does."""
        return self._clear_up(node, lambda _node: True)

    def _clear_up(self, node: int, is_wanted: Callable[[int], bool]) -> Iterator[int]:
        before, count = self.num_entries, 0
        while not self.is_restoring and node != NO_NODE and self._tree.evictable(node) and is_wanted(node):
            node = self._remove(node)
            count += 1
            if node != NO_NODE and (count % _REMOVE_STEP == 0 or self._is_hole(node)):
                key = self._tree.keys[node]
                yield before - self.num_entries
                before = self.num_entries
                if self._tree.keys[node] != key:
                    break  # it left meanwhile
        yield before - self.num_entries

    def _remove(self, node: int) -> int:
        """Remove an evictable chunk or hole; returns what `_drop_node` does."""
        record = self._first_entry[node]
        while record != NO_RECORD:
            following = self._next_entry[record]
            self.num_entries -= 1  # an evictable node has no unfinished entry
            self._free_entry(record)
            record = following
        self._first_entry[node] = NO_RECORD
        return self._drop_node(node)

    # --- rebuilding -----------------------------------------------------------------------------------------------

    def restore(self, spaces: Sequence[CacheSpec], num_labels: int = 1 << 32) -> Iterator[int | None]:
        """Rebuild everything from the table of an earlier server; call once, before any space or entry.

        `spaces` and labels are what its records refer to by number; a record with another number is freed.

        Returns an iterator that does the work. Between steps (None) its caller can do other things, as long as it
        begins no entry; nothing leaves until then (`is_restoring`). It yields the records of unfinished entries, whose
        writers may still be writing: they have an extent and belong to no chunk. `discard_entry` takes them back, once
        the iterator has ended. A sealed record that does not verify or fit is freed.

        A step that fails by a bug is logged and counted: before anything can be found, the index is then empty but for
        the space of unfinished entries; later, some are not found.
        """
        for spec in spaces:
            self.space(spec)
        self.is_restoring = True
        return self._restore(len(self.spaces), num_labels)

    def _restore(self, num_spaces: int, num_labels: int) -> Iterator[int | None]:
        nodes = array("I")
        unfinished: list[int] = []
        try:
            try:
                yield from self._rebuild(num_spaces, num_labels, nodes, unfinished)
            except Exception:
                self.num_restore_errors += 1
                logger.exception("reading back the table of an earlier server failed: its entries are gone")
                nodes, unfinished = array("I"), []
                yield from self._start_cold(unfinished)
            yield from self._reveal_restored(nodes)
            yield from unfinished
        finally:
            self.is_restoring = False

    def _reveal_restored(self, nodes: "array[int]") -> Iterator[None]:
        """Make nodes visible; parents come before their children."""
        for count, node in enumerate(nodes):
            try:
                self._reveal(node)
            except Exception:
                if not self.num_restore_errors:
                    logger.exception("an entry of an earlier server may never be found")
                self.num_restore_errors += 1
            if count % _RESTORE_STEP == 0:
                yield None

    def _start_cold(self, unfinished: list[int]) -> Iterator[None]:
        """Free all but the extents of `unfinished` entries."""
        self._begin_empty()
        self.extents = ExtentAllocator(self.extents.capacity_bytes, self.extents.ready_bytes)
        self.quotas.forget_usage()
        self.num_entries = 0
        for space in self.spaces:
            space.nodes = KeyMap()
        yield from self._rebuild(0, 0, array("I"), unfinished)

    def _rebuild(self, num_spaces: int, num_labels: int, nodes: "array[int]", unfinished: list[int]) -> Iterator[None]:
        """Make nodes of the table's sealed records, not visible yet; fill in `nodes`, parents first.

        `unfinished` gets the records that were being written. Each keeps its extent and nothing else, so that whatever
        became of the chunks around it cannot free what a living writer still fills.

        Each loop pauses now and then, and frees what it has used up: a million objects at once take long, too.
        """
        found: list[Record] = []
        spans: list[tuple[int, int]] = []
        for number in range(self.table.num_records):
            record = self.table.record(number)
            if record is not None and (
                record.state == WRITING or (record.space < num_spaces and record.label < num_labels)
            ):
                found.append(record)
                spans.append((record.offset, record.num_bytes))
            if number % _RESTORE_STEP == 0:
                yield None
        self._num_known_records = found[-1].number + 1 if found else 0
        by_depth: dict[int, list[Record]] = {}
        taken = make_column("B", len(found))
        for places in self.extents.restore(spans):
            for place in places:
                taken[place] = 1
            yield None
        used = make_column("B", self.table.num_records)
        while found:
            for _ in range(min(len(found), _RESTORE_STEP)):
                record = found.pop()
                spans.pop()
                if not taken[len(found)]:
                    continue
                if record.state == SEALED:
                    by_depth.setdefault(record.depth, []).append(record)
                else:
                    self._keep_extent(record)
                    used[record.number] = 1
                    unfinished.append(record.number)
            yield None
        by_last_use: dict[int, list[Record]] = {}
        level, level_depth = KeyMap(), -1
        for depth in sorted(by_depth):
            above, level = level, KeyMap()
            if level_depth != depth - 1:
                yield from above.drain()  # those are not one chunk up
            level_depth, records = depth, by_depth.pop(depth)
            while records:
                for record in reversed(records[-_RESTORE_STEP:]):
                    if not self._restore_entry(record, above, level, nodes):
                        self.extents.free(record.offset, record.num_bytes)
                        continue
                    used[record.number] = 1
                    by_last_use.setdefault(record.last_use >> _LAST_USE_SHIFT, []).append(record)
                del records[-_RESTORE_STEP:]
                yield None
            yield from above.drain()
        yield from level.drain()
        for number in range(self.table.num_records - 1, -1, -1):
            if not used[number]:
                if self.table.header(number) & 0xFF:
                    self.table.free(number)
                if number < self._num_known_records:
                    self._give_back(number)
            if number % _RESTORE_STEP == 0:
                yield None
        yield from self._tell_policies(by_last_use)

    def _keep_extent(self, record: Record) -> None:
        """Take over an unfinished entry as if it had been abandoned: its extent counts against its tenant."""
        share, size = self.quotas.share_of(record.label), extent_size(record.num_bytes)
        self._node_of[record.number] = NO_NODE
        self._abandoned[record.number] = record.label
        self.quotas.account(record.label, share, size)
        self._begin_writing(record.number, share, size)

    def _tell_policies(self, by_last_use: dict[int, list[Record]]) -> Iterator[None]:
        """Add the nodes of sealed records to their policies, what was used last at the end."""
        known = make_column("B", self._tree.capacity)
        for period in sorted(by_last_use):
            records = by_last_use.pop(period)
            by_second: dict[int, list[Record]] = {}
            while records:
                for record in records[-_RESTORE_STEP:]:
                    by_second.setdefault(record.last_use, []).append(record)
                del records[-_RESTORE_STEP:]
                yield None
            for second in sorted(by_second):
                by_depth: dict[int, list[Record]] = {}
                for count, record in enumerate(by_second.pop(second)):
                    by_depth.setdefault(record.depth, []).append(record)
                    if count % _RESTORE_STEP == 0:
                        yield None
                for depth in sorted(by_depth):
                    records = by_depth.pop(depth)
                    while records:
                        for record in records[-_RESTORE_STEP:]:
                            node = self._node_of[record.number]
                            if not known[node]:
                                known[node] = 1
                                self._last_use[node] = record.last_use
                                self._policy_of(node).added(node)
                        del records[-_RESTORE_STEP:]
                        yield None

    def _restore_entry(self, record: Record, above: KeyMap, level: KeyMap, nodes: "array[int]") -> bool:
        """Take an entry over; `level` has the nodes of its depth, `above` those before, one chunk up.

        Both by what records name a parent by: the start of its key, and here the space. A new node is added to `nodes`.
        """
        space = self.spaces[record.space]
        suffix = space.number.to_bytes(4, "little")
        place_in_level = record.key[:PARENT_BYTES] + suffix
        if record.group >= len(space.spec.groups) or record.shard >= space.spec.groups[record.group].num_shards:
            return False
        found = above.get(record.parent + suffix)
        parent = NO_NODE if found is None else found
        if space.full_mask and record.depth and parent == NO_NODE:
            return False
        node = space.nodes.get(record.key)
        if node is None:
            if place_in_level in level:
                return False  # two keys that begin alike: which of them is whose parent is not told
            place = EntryPlace(
                space, record.key, parent, record.depth, record.group, record.shard, record.num_bytes, record.layout,
                record.label, record.writer,
            )  # fmt: skip
            node = self._new_node(place)
            nodes.append(node)
        elif self._depth[node] != record.depth or self.has_entry(node, record.group, record.shard):
            return False
        self._link(record.number, node)
        level[place_in_level] = node
        self._account(node, extent_size(record.num_bytes))
        self.num_entries += 1
        self._update_group(node, record.number)
        return True

    # --- nodes and entries ----------------------------------------------------------------------------------------

    def _take_node(self, place: EntryPlace, share: int) -> int | None:
        """Make a node, evicting others if there are too many holes; None if nothing can leave."""
        tree = self._tree
        if self._free_node == NO_NODE and len(tree.keys) == tree.capacity:
            if place.parent != NO_NODE:
                tree.holds[place.parent] += 1
            while self._free_node == NO_NODE and self.evict_one(share):
                pass
            node = None if self._free_node == NO_NODE else self._new_node(place)
            if place.parent != NO_NODE:
                self._release_hold(place.parent)
            return node
        return self._new_node(place)

    def _new_node(self, place: EntryPlace) -> int:
        tree = self._tree
        node = self._free_node
        if node == NO_NODE:
            node = len(tree.keys)
            tree.keys.append(place.key)
        else:
            self._free_node = self._next_free_node[node]
            self._num_free_nodes -= 1
            tree.keys[node] = place.key
        tree.parent[node] = place.parent
        tree.num_children[node] = 0
        tree.holds[node] = 0
        self._depth[node] = place.depth
        self._last_use[node] = self.now
        self._used_at[node] = 0
        self._space_of[node] = place.space.number
        self._label_of[node] = place.label
        tree.share[node] = self.quotas.share_of(place.label)
        tree.rank[node] = NORMAL
        self._sealed_groups[node] = 0
        self._first_entry[node] = NO_RECORD
        self._visible[node] = 0
        place.space.nodes[place.key] = node
        if place.parent != NO_NODE:
            tree.num_children[place.parent] += 1
        return node

    def _drop_node(self, node: int) -> int:
        """Remove a node without entries and children, and some of the holes above it that nothing needs any more.

        Returns the node where that ended if it can leave now, a chunk or one more hole; else `NO_NODE`.
        """
        tree = self._tree
        for _ in range(_HOLE_STEP):
            self._policy_of(node).removed(node)
            key, parent = tree.keys[node], tree.parent[node]
            assert key is not None
            self._set_invisible(node)
            del self.spaces[self._space_of[node]].nodes[key]
            tree.keys[node] = None
            tree.parent[node] = NO_NODE
            self._hidden.get(parent, set()).discard(node)
            self._hidden.pop(node, None)
            self._broken.discard(node)
            self._forget_deadline(node)
            self._sealed_groups[node] = 0
            if tree.holds[node]:
                self._leased.remove(node)  # its number is given back with the last lease
            else:
                self._give_node_back(node)
            if parent == NO_NODE:
                return NO_NODE
            self._last_use[parent] = max(self._last_use[parent], self._last_use[node])
            tree.num_children[parent] -= 1
            if not tree.evictable(parent):
                return NO_NODE
            if self._first_entry[parent] != NO_RECORD:
                self._policy_of(parent).unpinned(parent)
                return parent
            node = parent
        return node

    def _give_node_back(self, node: int) -> None:
        self._next_free_node[node], self._free_node = self._free_node, node
        self._num_free_nodes += 1

    def _is_hole(self, node: int) -> bool:
        return self._first_entry[node] == NO_RECORD

    def _drop_holes_later(self, node: int) -> None:
        """Go on with what `_drop_node` returned, if it is a hole."""
        if node != NO_NODE and self._is_hole(node):
            self.go_on(self._drop_holes(node, self.key_of(node)))

    def _drop_holes(self, node: int, key: bytes | None) -> Iterator[int]:
        tree = self._tree
        while node != NO_NODE and tree.keys[node] == key and tree.evictable(node) and self._is_hole(node):
            node = self._drop_node(node)
            key = tree.keys[node] if node != NO_NODE else None
            yield 1

    def _entries(self, node: int) -> Iterator[int]:
        record = self._first_entry[node]
        while record != NO_RECORD:
            yield record
            record = self._next_entry[record]

    def _is_sealed(self, record: int) -> bool:
        return self.table.header(record) & 0xFF == SEALED

    def _update_group(self, node: int, record: int) -> None:
        """Note that a group of the node is whole if the last of its shards has just been sealed."""
        group, _ = self.table.place_of(record)
        num_shards = self.spaces[self._space_of[node]].spec.groups[group].num_shards
        if num_shards > 1:
            here = sum(self._is_sealed(r) and self.table.place_of(r)[0] == group for r in self._entries(node))
            if here < num_shards:
                return
        self._sealed_groups[node] |= 1 << group

    def _reveal(self, node: int) -> None:
        """Make a node visible if it is complete and what is before it is visible; then those that waited for it.

        Where these are many, they are found a little later.
        """
        waiting = [node]
        self._reveal_some(waiting)
        if waiting:
            self.go_on(self._reveal_all(waiting))

    def _reveal_all(self, waiting: list[int]) -> Iterator[int]:
        while waiting:
            self._reveal_some(waiting)
            yield 1

    def _reveal_some(self, waiting: list[int]) -> None:
        """Reveal some of the nodes, and put those that waited for them in their place."""
        for _ in range(_REVEAL_STEP):
            if not waiting:
                return
            node = waiting.pop()
            if self._tree.keys[node] is None:
                continue  # it left meanwhile
            space = self.spaces[self._space_of[node]]
            sealed = self._sealed_groups[node]
            if self._visible[node] or not sealed or sealed & space.full_mask != space.full_mask:
                continue
            parent = self._tree.parent[node]
            if space.full_mask and parent != NO_NODE and not self._visible[parent]:
                self._hidden.setdefault(parent, set()).add(node)
                continue
            self._visible[node] = 1
            if self.on_shown is not None:
                self.on_shown(node)
            self._broken.discard(node)
            if self._hidden:
                waiting += self._hidden.pop(node, ())

    def _link(self, record: int, node: int) -> None:
        self._node_of[record] = node
        self._next_entry[record] = self._first_entry[node]
        self._first_entry[node] = record

    def _unlink(self, record: int, node: int) -> None:
        following = self._next_entry[record]
        if self._first_entry[node] == record:
            self._first_entry[node] = following
            return
        before = self._first_entry[node]
        while self._next_entry[before] != record:
            before = self._next_entry[before]
        self._next_entry[before] = following

    def _free_entry(self, record: int) -> None:
        """The header changes first: only then may the extent go to somebody else."""
        offset, num_bytes = self.table.extent(record)
        self._account(self._node_of[record], -extent_size(num_bytes))
        self._end_writing(record)
        self.table.free(record)
        self._node_of[record] = NO_NODE
        if record in self._readers:
            self._lingering.add(record)
            return
        self.extents.free(offset, num_bytes)
        self._give_back(record)

    def _free_lingering(self, record: int) -> None:
        self._lingering.remove(record)
        self.extents.free(*self.table.extent(record))
        self._give_back(record)

    def _account(self, node: int, num_bytes: int) -> None:
        self.quotas.account(self._label_of[node], self._tree.share[node], num_bytes)

    def _take_record(self, share: int, is_owed: bool) -> int | None:
        while self._free_record == NO_RECORD:
            if self._num_known_records < self.table.num_records:
                self._num_known_records += 1
                return self._num_known_records - 1
            if not self.evict_one(share, is_owed=is_owed):
                return None
        record, self._free_record = self._free_record, self._next_entry[self._free_record]
        return record

    def _give_back(self, record: int) -> None:
        self._next_entry[record], self._free_record = self._free_record, record

    def _allocate(self, num_bytes: int, share: int, is_owed: bool, most_evicted: int) -> int | None:
        if extent_size(num_bytes) > self.extents.ready_bytes:
            return None
        offset = self.extents.allocate(num_bytes)
        for _ in range(most_evicted):
            if offset is not None or not self.evict_one(share, is_owed=is_owed):
                break
            offset = self.extents.allocate(num_bytes)
        return offset


def pack_extent(chunk: int, group: int, extent: tuple[int, int, int, int]) -> bytes:
    """Return the packed `EXTENT` of `(record, header, offset, bytes)`."""
    record, header, offset, num_bytes = extent
    return EXTENT.pack(chunk, group, 0, record, 0, header, offset, num_bytes)
