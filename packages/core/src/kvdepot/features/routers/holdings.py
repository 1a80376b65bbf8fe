"""`Holdings`: the blocks that are reported to routers, with their tokens and the engines' ids for them.

Engines describe their chunks (`DescribeChunks`) after a store, and after a hit on undescribed chunks. A described
chunk appears as soon as lookups find it, and leaves when the index reports that they no longer do. If it is evicted and
a tier has it, it appears in that medium until it is promoted or described again, or a lookup misses it. Each change is
appended to the log of its model. Readers (the published streams and attached engines) follow the log. A reader that is
new or too far behind first scans all held chunks, in steps, and then follows the changes since the scan began. Of these
it leaves out those that the scan has seen: routers count how often a block was announced (llm-d, Dynamo's publisher),
and a block announced twice would never leave them.
"""

import logging
import struct
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, TypeAlias
from weakref import WeakValueDictionary

import msgspec

from kvdepot.features.routers.messages import DescribeChunks, DescribedGroup
from kvdepot.index.tree import NO_NODE, Space
from kvdepot.index.visibility import Watcher
from kvdepot.keys import digest_at, num_digests

logger = logging.getLogger(__name__)

POOL: Final = "CPU"  # vLLM's names: routers score other names wrongly, or not at all
TIER: Final = "STORAGE"
LOCAL: Final = "LOCAL"

_MODEL: Final = "{model}"
ID_BYTES: Final = 8  # engines' ids of blocks have 64 bits
_TOKEN_BYTES: Final = 4  # no vocabulary needs more than 32 bits
_MOST_BYTES: Final = 320 << 20  # for tokens and ids: 64 million tokens in blocks of 16 or more
_MOST_IN_TIER: Final = 65_536  # chunks that are only in a tier: 72 MiB if each has 256 tokens in 16 blocks
_TIER_SHARE: Final = 4  # 80 MiB: chunks that are only in a tier may take `_MOST_BYTES` divided by this in addition
_MOST_TOPICS: Final = 1024  # a bound on the model names that engines can invent
LONGEST_LOG: Final = 65_536  # changes; a reader that is further behind scans. Up to twice as many are kept: 11 MiB
SCANNED_AT_ONCE: Final = 1024  # nodes per step, in 0.4 ms if all are described
LEFT_AT_ONCE: Final = 256  # chunks that leave tiers per step, in 0.5 ms
TAKEN_AT_ONCE: Final = 1024  # changes per step, in 0.7 ms if all are removals of four blocks


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True):
    """A run of blocks can be loaded."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int  # tokens
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None  # one item per block
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True):
    """Blocks can no longer be loaded from a medium."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """All earlier events are void."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Family:
    """Engines that share chunks, and their division of chunks into blocks."""

    space: int
    namespace: bytes
    blocks_per_chunk: int
    block_tokens: int
    groups: tuple[DescribedGroup, ...]
    ids: struct.Struct = field(init=False, compare=False)  # of the blocks of a chunk
    tokens: struct.Struct = field(init=False, compare=False)  # of a chunk

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", struct.Struct(f"<{self.blocks_per_chunk}Q"))
        object.__setattr__(self, "tokens", struct.Struct(f"<{self.blocks_per_chunk * self.block_tokens}I"))


class Described(msgspec.Struct, gc=False):
    """A chunk with its tokens."""

    above: int  # node of the chunk before it, `NO_NODE` for a first chunk
    family: Family
    shelf: "Shelf"
    content: bytes  # packed: id of the block before, ids of its own blocks, its tokens
    name: int  # twice the id of its last block, which identifies all tokens up to there
    is_first: bool  # whether no block is before it
    lora_name: str | None
    extra_keys: tuple[Any, ...]  # one item per block; empty for none

    @property
    def parent_id(self) -> int | None:
        """The id of the block before."""
        return None if self.is_first else int.from_bytes(self.content[:ID_BYTES], "little")

    @property
    def block_ids(self) -> tuple[int, ...]:
        """The ids of its blocks."""
        return self.family.ids.unpack_from(self.content, ID_BYTES)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Its tokens."""
        return self.family.tokens.unpack_from(self.content, ID_BYTES + self.family.ids.size)


Change: TypeAlias = tuple[Described, str, bool, bool]
"""A chunk appeared in a medium, or left it.

The chunk, the medium, whether it appeared, and whether that is public: not if another tenant's chunk with the same ids
is still there, or was there before. A plain tuple, as a named one takes three times as long to make.
"""


@dataclass(slots=True, eq=False)
class Shelf:
    """The state of one model: the log of changes, and the number of chunks with the same ids.

    With `is_union`, a chunk has one medium, the pool's, as long as the pool or a tier has it.
    """

    topic: str
    is_union: bool = False
    log: list[Change] = field(default_factory=list[Change])
    first: int = 1  # position of `log[0]`
    # number of chunks by (id of the last block, whether in a tier)
    counts: dict[int, int] = field(default_factory=dict[int, int])

    def name_of(self, chunk: Described, medium: str) -> int:
        """Return a number that stands for the ids of a chunk in a medium."""
        return chunk.name | 1 if medium == TIER and not self.is_union else chunk.name

    @property
    def end(self) -> int:
        """The position of the next change."""
        return self.first + len(self.log)

    def show(self, chunk: Described, medium: str) -> None:
        """Note that a chunk appeared in a medium."""
        name, counts = self.name_of(chunk, medium), self.counts
        count = counts.get(name, 0)
        counts[name] = count + 1
        self.log.append((chunk, medium, True, not count))

    def hide(self, chunk: Described, medium: str) -> None:
        """Note that a chunk left a medium."""
        name, counts = self.name_of(chunk, medium), self.counts
        count = counts.pop(name) - 1
        if count:
            counts[name] = count
        self.log.append((chunk, medium, False, not count))

    def forget(self) -> None:
        """Make all readers scan again."""
        self.first = self.end
        self.log.clear()

    def cut(self) -> None:
        """Drop the oldest changes of a log that is too long."""
        if len(self.log) > 2 * LONGEST_LOG:
            num_dropped = len(self.log) - LONGEST_LOG
            del self.log[:num_dropped]
            self.first += num_dropped


class Holdings(Watcher):
    """All described chunks that lookups find. The index reports which ones leave.

    Args:
        topic: the topic of events, in which {model} stands for the model's name. Without it, one model is published.
        is_in_tier: returns whether a tier has a node that is about to be evicted.
        most_bytes: the limit for tokens and ids. Further descriptions are declined.
        is_union: whether the pool and tiers count as one medium, for routers that look at none.

    Attributes:
        num_changes: the number of changes so far in all topics.
    """

    def __init__(
        self,
        topic: str = "",
        is_in_tier: Callable[[int], bool] = lambda _node: False,
        most_bytes: int = _MOST_BYTES,
        *,
        is_union: bool = False,
    ) -> None:
        self.shelves: dict[str, Shelf] = {}  # by model
        self.num_changes = 0
        self.num_bytes = 0
        self.num_declined = 0  # chunks declined for lack of room
        self._on_change = list[Callable[[], None]]()  # called at the next change
        self.topic = topic
        self._is_union = is_union
        self._is_in_tier = is_in_tier
        self._most_bytes = most_bytes
        self._by_node: list[Described | None] = []  # descriptions of visible nodes
        self._in_tier: dict[tuple[int, bytes], Described] = {}  # chunks that are only in a tier, first evicted first
        self._num_tier_bytes = 0
        self._broken: set[int] = set()  # hidden nodes with children
        # By hash, as long as a chunk has them: engines invent namespaces and groups.
        self._families = WeakValueDictionary[int, Family]()
        if _MODEL not in topic:
            self.shelf_of("")  # an empty depot says so before its first engine comes

    def shelf_of(self, model: str) -> Shelf | None:
        """Return the shelf of a model. Create it if it is new. None if there are too many."""
        shelf = self.shelves.get(model)
        if shelf is None and len(self.shelves) < _MOST_TOPICS:
            shelf = self.shelves.pop("", None) or Shelf(self.topic.replace(_MODEL, model), self._is_union)
            self.shelves[model] = shelf
        return shelf

    def is_described(self, node: int) -> bool:
        """Return whether a node is described, and so reported to routers."""
        return node < len(self._by_node) and self._by_node[node] is not None

    @property
    def broken(self) -> Collection[int]:
        """The nodes whose description was removed although others follow, and was not given again."""
        return self._broken

    def await_change(self, on_change: Callable[[], None]) -> None:
        """Have a function called once, at the next change."""
        if on_change not in self._on_change:
            self._on_change.append(on_change)

    def describe(self, space: Space, model: str, request: DescribeChunks, nodes: Sequence[tuple[int, int]]) -> int:
        """Take the description of chunks that lookups find. Return the number of newly described ones.

        Args:
            space: the space of the chunks.
            model: the name under which engines serve the model.
            request: the description.
            nodes: the nodes of the chunks, as from `Visibility.find_run`.

        Raises:
            ValueError: the description is inconsistent.
        """
        count, chunk_tokens = num_digests(request.digests), space.spec.chunk_tokens
        per_chunk = self._check(request, count, chunk_tokens)
        shelf = self.shelf_of(model)
        if shelf is None or not count:
            return 0
        family = Family(space.number, request.namespace, per_chunk, chunk_tokens // per_chunk, request.groups)
        known = self._families.get(hash(family))
        if known is not None and known == family:
            family = known
        else:
            self._families[hash(family)] = family
        parent, num_new, size, token_size = request.parent_id, 0, family.ids.size, family.tokens.size
        lora_name = request.lora_name or None
        for chunk, (node, above) in enumerate(nodes):
            ids = request.block_ids[chunk * size : (chunk + 1) * size]
            if node == NO_NODE or not (above == NO_NODE or self.is_described(above)):
                break  # without the chunk before it, a router could not place it
            if not self.is_described(node):
                tokens = request.tokens[chunk * token_size : (chunk + 1) * token_size]
                content = (parent or bytes(ID_BYTES)) + ids + tokens
                if self.num_bytes + len(content) > self._most_bytes:
                    self.num_declined += count - chunk
                    break
                extra = request.extra_keys[chunk * per_chunk : (chunk + 1) * per_chunk]
                name = int.from_bytes(ids[-ID_BYTES:], "little") << 1
                described = Described(above, family, shelf, content, name, not parent, lora_name, extra)
                self._show(node, described)
                if self._in_tier:
                    self._leave_tier((space.number, digest_at(request.digests, chunk)))
                num_new += 1
            parent = ids[-ID_BYTES:]
        if num_new:
            self._count()
        return num_new

    def _check(self, request: DescribeChunks, count: int, chunk_tokens: int) -> int:
        """Check a description. Return the number of blocks per chunk."""
        num_tokens, rest = divmod(len(request.tokens), _TOKEN_BYTES)
        num_blocks, more = divmod(len(request.block_ids), ID_BYTES)
        if rest or more or num_tokens != count * chunk_tokens:
            raise ValueError(f"{len(request.tokens)} bytes of tokens for {count} chunks of {chunk_tokens}")
        per_chunk = num_blocks // count if count else 1
        if not per_chunk or num_blocks != per_chunk * count or chunk_tokens % per_chunk:
            raise ValueError(f"{num_blocks} ids of blocks for {count} chunks of {chunk_tokens} tokens")
        if len(request.extra_keys) not in (0, num_blocks):
            raise ValueError(f"extra keys of {len(request.extra_keys)} blocks, of {num_blocks}")
        if len(request.parent_id) != (ID_BYTES if request.first_chunk else 0):
            raise ValueError(f"a parent of {len(request.parent_id)} bytes before chunk {request.first_chunk}")
        return per_chunk

    def _show(self, node: int, chunk: Described) -> None:
        if node >= len(self._by_node):
            self._by_node.extend([None] * (node + 1 - len(self._by_node)))
        self._by_node[node] = chunk
        self.num_bytes += len(chunk.content)
        chunk.shelf.show(chunk, POOL)
        if node in self._broken:
            self._broken.remove(node)
            chunk.shelf.forget()  # earlier scans skipped the chunks after it

    def hidden(self, nodes: Sequence[int], /, *, has_children: bool) -> None:
        """See `Watcher`."""
        for node in nodes:
            chunk = self._by_node[node] if node < len(self._by_node) else None
            if chunk is None:
                continue
            self._by_node[node] = None
            self.num_bytes -= len(chunk.content)
            if has_children:
                self._broken.add(node)
            chunk.shelf.hide(chunk, POOL)
        self._count()

    def evicted(self, nodes: Sequence[int], keys: Sequence[bytes], /) -> None:
        """Note that chunks are evicted from the pool. A tier may still have them."""
        for node, key in zip(nodes, keys, strict=True):
            chunk = self._by_node[node] if node < len(self._by_node) else None
            if chunk is not None and self._is_in_tier(node):
                self._in_tier[chunk.family.space, key] = chunk
                self._num_tier_bytes += len(chunk.content)
                chunk.shelf.show(chunk, TIER)
        while len(self._in_tier) > _MOST_IN_TIER or self._num_tier_bytes > self._most_bytes // _TIER_SHARE:
            self._leave_tier(next(iter(self._in_tier)))
        self._count()

    @property
    def awaits_promoted(self) -> bool:
        """See `Watcher`."""
        return bool(self._in_tier)

    def promoted(self, space: Space, digests: bytes, nodes: Sequence[tuple[int, int]], /) -> None:
        """Note that a tier brought chunks. Show chunks whose descriptions were kept at their eviction."""
        for chunk, (node, above) in enumerate(nodes):
            if node == NO_NODE or not (above == NO_NODE or self.is_described(above)):
                return
            if self.is_described(node):
                continue
            key = digest_at(digests, chunk)
            described = self._in_tier.get((space.number, key))
            if described is None or self.num_bytes + len(described.content) > self._most_bytes:
                return  # the engine that finds it describes it
            described.above = above
            self._show(node, described)
            self._leave_tier((space.number, key))
            self._count()

    def forget_tiers(self) -> bool:
        """See `Watcher`. Chunks of other tenants and models, which a tier may still have, appear again by their use."""
        for name in list(islice(self._in_tier, LEFT_AT_ONCE)):
            self._leave_tier(name)
        return bool(self._in_tier)

    def _leave_tier(self, name: tuple[int, bytes]) -> bool:
        chunk = self._in_tier.pop(name, None)
        if chunk is None:
            return False
        self._num_tier_bytes -= len(chunk.content)
        chunk.shelf.hide(chunk, TIER)
        self._count()
        return True

    def missed(self, space: Space, digests: bytes, first: int) -> None:
        """Note that no tier delivered the chunks from `first` on for a lookup. Report them as removed."""
        if self._in_tier:
            for chunk in range(first, num_digests(digests)):
                if not self._leave_tier((space.number, digest_at(digests, chunk))):
                    return

    def _count(self) -> None:
        self.num_changes += 1
        for shelf in self.shelves.values():
            shelf.cut()
        waiting, self._on_change = self._on_change, []
        for on_change in waiting:
            on_change()

    def scan(self, shelf: Shelf, is_wanted: Callable[[Described], bool]) -> Iterator[tuple[Described, str] | None]:
        """Yield the chunks of a shelf with their medium, each after the chunk before it. Yield None between steps.

        Chunks after a broken chunk are left out, as lookups end there.
        """
        by_node = self._by_node
        seen = bytearray(len(by_node))
        told: list[Described | None] = [None] * len(by_node)  # a node may become another chunk's between two steps
        for start in range(len(seen)):
            if start % SCANNED_AT_ONCE == 0:
                yield None
            if seen[start] or by_node[start] is None:
                continue
            chain, node = list[int](), start
            while node < len(seen) and not seen[node] and (chunk := by_node[node]) is not None:
                chain.append(node)
                node = chunk.above
            for node in reversed(chain):
                seen[node] = 1
                chunk = by_node[node]
                if chunk is None:
                    continue
                above = chunk.above
                if above == NO_NODE or (
                    above < len(told) and told[above] is not None and told[above] is by_node[above]
                ):
                    told[node] = chunk
                    if chunk.shelf is shelf and is_wanted(chunk):
                        yield chunk, POOL
        # Reversed: the last chunk of a prompt is evicted first.
        for number, chunk in enumerate(reversed(list(self._in_tier.values()))):
            if number % SCANNED_AT_ONCE == 0:
                yield None
            if chunk.shelf is shelf and is_wanted(chunk):
                yield chunk, TIER

    def check_integrity(self, is_visible: Sequence[int]) -> None:
        """Check that lookups find all described chunks.

        Raises:
            AssertionError: a lookup does not find a described chunk.
        """
        for node, chunk in enumerate(self._by_node):
            assert chunk is None or is_visible[node], f"node {node} is not visible"
        held = [chunk for chunk in self._by_node if chunk is not None]
        assert self.num_bytes == sum(len(chunk.content) for chunk in held), "the bytes are miscounted"
        in_tier = self._in_tier.values()
        assert self._num_tier_bytes == sum(len(chunk.content) for chunk in in_tier), "the bytes in tiers are miscounted"
        assert sum(sum(shelf.counts.values()) for shelf in self.shelves.values()) == len(held) + len(in_tier)


class Reader:
    """Follows one shelf: first all of its chunks, then all changes. `take` returns the next events.

    Args:
        holdings: the holdings of the shelf.
        shelf: the shelf to follow.
        namespace: report only chunks of this namespace. None: report all, but equal ids of several tenants only once.

    Attributes:
        is_starting: whether the next events begin to list everything.
    """

    def __init__(self, holdings: Holdings, shelf: Shelf, namespace: bytes | None = None) -> None:
        self.shelf = shelf
        self.namespace = namespace
        self.position = 0
        self.is_starting = True
        self.holdings = holdings
        self._scan: Iterator[tuple[Described, str] | None] | None = None
        # The names that routers know, from the start of a scan until the log has no change that the scan may have seen.
        self._told: set[int] | None = None
        self._settled_at = 0  # the position from which on it has none

    def restart(self) -> None:
        """Begin to list everything again."""
        self.is_starting, self._scan = True, None

    def skip(self, position: int | None) -> None:
        """Report only the changes from a position of the log on. None: from the first change of the shelf on."""
        self.is_starting, self._scan, self._told = False, None, None
        self.position = 1 if position is None else position

    @property
    def is_scanning(self) -> bool:
        """Whether it is listing everything."""
        return self._scan is not None

    @property
    def is_behind(self) -> bool:
        """Whether the log lacks changes that it needs, so that it must list everything again."""
        return self._scan is None and not self.is_starting and self.position < self.shelf.first

    @property
    def has_more(self) -> bool:
        """Whether `take` has events."""
        return self.is_starting or self._scan is not None or self.position < self.shelf.end

    def take(self, most_tokens: int, until: int | None = None) -> list[Event]:
        """Return the next events, with about `most_tokens` tokens or removed blocks at most. The result may be empty.

        The first event, which voids all earlier ones, comes alone. Changes from the position `until` on are left.
        """
        told = _Telling()
        if self.is_starting or self.is_behind:
            self.is_starting = False
            self.position = self.shelf.end
            self._scan, self._told = self.holdings.scan(self.shelf, self._is_wanted), set()
            return [AllBlocksCleared()]
        if self._scan is not None:
            for found in self._scan:
                if found is None:
                    break
                if self._is_news(*found, is_stored=True):
                    told.add(*found, is_stored=True)
                if told.num_tokens >= most_tokens:
                    break
            else:
                self._scan, self._settled_at = None, self.shelf.end
                if self.position == self._settled_at:
                    self._told = None
            return told.events
        start = self.position - self.shelf.first
        stop = start + TAKEN_AT_ONCE if until is None else min(start + TAKEN_AT_ONCE, until - self.shelf.first)
        for chunk, medium, is_stored, is_public in self.shelf.log[start:stop]:
            if self._told is not None and self.position >= self._settled_at:
                self._told = None
            self.position += 1
            if is_public if self.namespace is None else self._is_wanted(chunk):
                if self._is_news(chunk, medium, is_stored=is_stored):
                    told.add(chunk, medium, is_stored=is_stored)
                if told.num_tokens >= most_tokens:
                    break
        return told.events

    def _is_news(self, chunk: Described, medium: str, *, is_stored: bool) -> bool:
        """Return whether a change was not told yet, and note it. Engines compare their news themselves."""
        told = self._told
        if told is None or self.namespace is not None:
            return True
        name = self.shelf.name_of(chunk, medium)
        if (name in told) is is_stored:
            return False
        told.symmetric_difference_update((name,))
        return True

    def _is_wanted(self, chunk: Described) -> bool:
        return self.namespace is None or chunk.family.namespace == self.namespace


class _Telling:
    """Builds events from changes, and joins neighbours."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.num_tokens = 0  # tokens plus removed blocks
        self._last: Described | None = None  # the last chunk of the open event
        self._open: list[Any] = []
        self._is_stored = False
        self._medium = ""

    def add(self, chunk: Described, medium: str, *, is_stored: bool) -> None:
        """Add the change of a chunk in a medium."""
        last = self._last
        if chunk.shelf.is_union:
            medium = POOL
        is_next = (
            last is not None
            and self._is_stored is is_stored
            and self._medium == medium
            and last.family is chunk.family
            and (
                not is_stored
                or (
                    chunk.parent_id == last.name >> 1
                    and chunk.lora_name == last.lora_name
                    and bool(chunk.extra_keys) is bool(last.extra_keys)
                )
            )
        )
        ids = chunk.block_ids
        if not is_next:
            groups = chunk.family.groups or (None,)
            self._open = [(_stored if is_stored else _removed)(chunk, medium, group) for group in groups]
            self.events += self._open
        tokens = chunk.tokens if is_stored else ()
        for event in self._open:
            event.block_hashes.extend(ids)
            if is_stored:
                event.token_ids.extend(tokens)
                if chunk.extra_keys:
                    event.extra_keys.extend(chunk.extra_keys)
        self._last, self._is_stored, self._medium = chunk, is_stored, medium
        self.num_tokens += len(tokens) or len(ids)


def _stored(chunk: Described, medium: str, group: DescribedGroup | None) -> BlockStored:
    event = BlockStored(
        [],
        chunk.parent_id,
        [],
        chunk.family.block_tokens,
        None,
        medium,
        chunk.lora_name,
        [] if chunk.extra_keys else None,
        locality=LOCAL,
    )
    if group is not None:
        event.group_idx = group.number
        event.kv_cache_spec_kind = group.kind or None
        event.kv_cache_spec_sliding_window = group.window_tokens or None
    return event


def _removed(_chunk: Described, medium: str, group: DescribedGroup | None) -> BlockRemoved:
    return BlockRemoved([], medium, None if group is None else group.number, LOCAL)
