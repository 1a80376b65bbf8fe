"""`Reader`: follows the chunks of one model, and returns them as events in vLLM's form."""

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from kvdepot.features.routers.holdings import Holdings
from kvdepot.features.routers.messages import DescribedGroup
from kvdepot.features.routers.shelves import ID_BYTES, POOL, TIER, TOKEN_BYTES, Family, Run, Shelf, spans

LOCAL: Final = "LOCAL"
_UNSIGNED: Final = {4: b"\xce", 8: b"\xcf"}  # msgpack's markers, by size in bytes
TAKEN_AT_ONCE: Final = 1024  # changes per step, in 0.7 ms if all are removals of four blocks


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True):
    """A run of blocks can be loaded."""

    block_hashes: list[int] | msgspec.Raw
    parent_block_hash: int | None
    token_ids: list[int] | msgspec.Raw
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
        self._scan: Iterator[tuple[Run, int, str] | None] | None = None
        # The names that routers know, from the start of a scan until the log has no change that the scan may have seen.
        self._told: set[tuple[bool, int]] | None = None
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
                run, num_chunks, medium = found
                self._tell(told, run, 0, num_chunks, medium, is_stored=True)
                if told.num_tokens >= most_tokens:
                    break
            else:
                self._scan, self._settled_at = None, self.shelf.end
                if self.position == self._settled_at:
                    self._told = None
            return told.events
        start = self.position - self.shelf.first
        stop = start + TAKEN_AT_ONCE if until is None else min(start + TAKEN_AT_ONCE, until - self.shelf.first)
        for run, first, last, medium, is_stored, is_public in self.shelf.log[start:stop]:
            if self._told is not None and self.position >= self._settled_at:
                self._told = None
            self.position += 1
            if is_public if self.namespace is None else self._is_wanted(run):
                self._tell(told, run, first, last, medium, is_stored=is_stored)
                if told.num_tokens >= most_tokens:
                    break
        return told.events

    def _tell(self, told: "_Telling", run: Run, first: int, stop: int, medium: str, *, is_stored: bool) -> None:
        """Tell the chunks of a change that were not told yet. Engines compare their news themselves."""
        names = self._told
        if names is None or self.namespace is not None:
            told.add(run, first, stop, medium, is_stored=is_stored)
            return
        in_tier = medium == TIER and not self.shelf.is_union
        own = [(in_tier, name) for name in run.names(first, stop)]
        for is_news, start, end in spans([(name in names) is not is_stored for name in own]):
            if is_news:
                names.symmetric_difference_update(own[start:end])
                told.add(run, first + start, first + end, medium, is_stored=is_stored)

    def _is_wanted(self, run: Run) -> bool:
        return self.namespace is None or run.family.namespace == self.namespace


class _Telling:
    """Builds events from changes, and joins neighbours."""

    def __init__(self) -> None:
        self.num_tokens = 0  # tokens plus removed blocks
        self._events: list[Event] = []
        self._open: list[Any] = []
        self._about: tuple[object, ...] = ()  # the facts that changes in the open events share
        self._end = b""  # the last id in them
        self._ids, self._tokens = bytearray(), bytearray()  # of the blocks in them that are stored

    @property
    def events(self) -> list[Event]:
        """The events."""
        self._close()
        return self._events

    def _close(self) -> None:
        if self._ids:
            ids, tokens = packed(self._ids, ID_BYTES), packed(self._tokens, TOKEN_BYTES)
            for event in self._open:
                event.block_hashes, event.token_ids = ids, tokens
            self._ids.clear()
            self._tokens.clear()
        self._open, self._about = [], ()

    def add(self, run: Run, first: int, stop: int, medium: str, *, is_stored: bool) -> None:
        """Add a change of chunks in a medium."""
        family, parent = run.family, run.parent_of(first)
        if family.shelf.is_union:
            medium = POOL
        about = (family, medium, is_stored, is_stored and bool(run.extra_keys))
        if about != self._about or (is_stored and parent != self._end):
            self._close()
            make = _stored if is_stored else _removed
            self._open = [make(family, parent, medium, group) for group in family.groups or (None,)]
            self._events += self._open
            self._about = about
        start, end = first * family.blocks_per_chunk, stop * family.blocks_per_chunk
        if is_stored:
            size = family.block_tokens * TOKEN_BYTES
            self._ids += run.ids[start * ID_BYTES : end * ID_BYTES]
            self._tokens += run.tokens[start * size : end * size]
            if extra_keys := run.extra_keys[start:end]:
                for event in self._open:
                    event.extra_keys = [*(event.extra_keys or ()), *extra_keys]
            self._end = run.parent_of(stop)
            self.num_tokens += (end - start) * family.block_tokens
        else:
            ids = run.block_ids(first, stop)
            for event in self._open:
                event.block_hashes.extend(reversed(ids))  # the last one first, as chunks leave
            self.num_tokens += len(ids)


def packed(values: bytes | bytearray, size: int) -> msgspec.Raw:
    """Return unsigned integers of `size` bytes, little-endian, as a msgpack array of integers of that size.

    A list of Python integers, encoded in the fewest bytes, takes four to ten times as long.
    """
    count, each = len(values) // size, 1 + size
    array = bytearray(5 + each * count)
    array[:5] = b"\xdd" + count.to_bytes(4, "big")
    array[5::each] = _UNSIGNED[size] * count
    for byte in range(size):
        array[5 + size - byte :: each] = values[byte::size]
    return msgspec.Raw(array)


def _stored(family: Family, parent: bytes, medium: str, group: DescribedGroup | None) -> BlockStored:
    before = int.from_bytes(parent, "little") if parent else None
    event = BlockStored([], before, [], family.block_tokens, None, medium, family.lora_name, locality=LOCAL)
    if group is not None:
        event.group_idx = group.number
        event.kv_cache_spec_kind = group.kind or None
        event.kv_cache_spec_sliding_window = group.window_tokens or None
    return event


def _removed(_family: Family, _parent: bytes, medium: str, group: DescribedGroup | None) -> BlockRemoved:
    return BlockRemoved([], medium, None if group is None else group.number, LOCAL)
