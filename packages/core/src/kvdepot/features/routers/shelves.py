"""Runs of described chunks, and a shelf of them for each model, with the log of changes."""

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import msgspec

from kvdepot.features.routers.ids import IdCounts
from kvdepot.features.routers.messages import DescribedGroup
from kvdepot.index.tree import NO_NODE

POOL: Final = "CPU"  # vLLM's names: routers score other names wrongly, or not at all
TIER: Final = "STORAGE"

ID_BYTES: Final = 8  # engines' ids of blocks have 64 bits
TOKEN_BYTES: Final = 4  # no vocabulary needs more than 32 bits
_RUN_CHUNKS: Final = 32  # as one store has: longer runs would save less than 10 bytes a chunk
_RUN_TOKENS: Final = 8192  # 0.2 ms to encode
ALL_NODES: Final = 1 << 62
LONGEST_LOG: Final = 65_536  # changed chunks; a reader that is further behind scans. Up to twice as many are kept


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Family:
    """Engines that share chunks under a model's name and an adapter, and their division of chunks into blocks.

    Attributes:
        chunk_bytes: the bytes of the ids and tokens of a chunk.
        most_chunks: the chunks in a whole run.
    """

    shelf: "Shelf"
    space: int
    namespace: bytes
    blocks_per_chunk: int
    block_tokens: int
    groups: tuple[DescribedGroup, ...]
    lora_name: str | None

    chunk_bytes: int = field(init=False)  # not properties, which each store would call several times
    most_chunks: int = field(init=False)

    def __post_init__(self) -> None:
        blocks, tokens = self.blocks_per_chunk, self.block_tokens
        object.__setattr__(self, "chunk_bytes", blocks * (ID_BYTES + TOKEN_BYTES * tokens))
        object.__setattr__(self, "most_chunks", max(1, min(_RUN_CHUNKS, _RUN_TOKENS // (blocks * tokens))))


class Run(msgspec.Struct, gc=False, eq=False):
    """Consecutive chunks of a prompt, packed, and the nodes of the chunks that are still here: the first ones.

    Chunks may be appended, so their places remain the same.
    """

    family: Family
    parent: bytes  # id of the block before, empty for none
    ids: bytes  # of its blocks
    tokens: bytes
    extra_keys: tuple[Any, ...] = ()  # one item per block; empty for none
    above: int = NO_NODE  # the node of the chunk before
    nodes: list[int] = []

    @property
    def num_chunks(self) -> int:
        """The number of its chunks, with chunks that have left."""
        return len(self.ids) // (ID_BYTES * self.family.blocks_per_chunk)

    @property
    def num_bytes(self) -> int:
        """The bytes of its ids and tokens."""
        return len(self.ids) + len(self.tokens)

    def block_ids(self, first: int, stop: int) -> tuple[int, ...]:
        """Return the ids of the blocks of some chunks."""
        blocks = self.family.blocks_per_chunk
        return struct.unpack_from(f"<{(stop - first) * blocks}Q", self.ids, first * blocks * ID_BYTES)

    def names(self, first: int, stop: int) -> tuple[int, ...]:
        """Return the id of the last block of some chunks, which identifies all tokens up to there."""
        blocks = self.family.blocks_per_chunk
        return self.block_ids(first, stop)[blocks - 1 :: blocks]

    def parent_of(self, chunk: int) -> bytes:
        """Return the id of the block before a chunk, empty for none."""
        end = chunk * self.family.blocks_per_chunk * ID_BYTES
        return self.ids[end - ID_BYTES : end] if chunk else self.parent

    def part(self, first: int, stop: int) -> "Run":
        """Return some of its chunks as a run without nodes."""
        family, blocks = self.family, slice(first * self.family.blocks_per_chunk, stop * self.family.blocks_per_chunk)
        size = family.block_tokens * TOKEN_BYTES
        ids = self.ids[blocks.start * ID_BYTES : blocks.stop * ID_BYTES]
        tokens = self.tokens[blocks.start * size : blocks.stop * size]
        return Run(family, self.parent_of(first), ids, tokens, self.extra_keys[blocks])

    def takes(self, text: "Run", above: int) -> bool:
        """Return whether chunks that follow the node `above` can be appended."""
        count = self.num_chunks
        return (
            self.family is text.family
            and self.nodes[-1] == above
            and count == len(self.nodes)  # otherwise a change may name the place of one that has left
            and count + text.num_chunks <= self.family.most_chunks
            and bool(self.extra_keys) is bool(text.extra_keys)
            and self.ids[-ID_BYTES:] == text.parent
        )

    def append(self, text: "Run") -> None:
        """Append the chunks of a run that it `takes`, but not their nodes."""
        self.ids += text.ids
        self.tokens += text.tokens
        self.extra_keys += text.extra_keys


Change: TypeAlias = tuple[Run, int, int, str, bool, bool]
"""Chunks of a run appeared in a medium, or left it.

The run, the first chunk and the one after the last, the medium, whether they appeared, and whether that is public: not
if another tenant's chunks with the same ids are still there, or were there before.
"""


@dataclass(slots=True, eq=False)
class Shelf:
    """The state of one model: the log of changes, and the number of chunks with the same ids.

    With `is_union`, a chunk has one medium, the pool's, as long as the pool or a tier has it.

    Chunks of one space and namespace have different ids. So the chunks in the pool are counted only once there are
    others: counting takes a third of the time of their events.
    """

    topic: str
    is_union: bool = False
    owner: tuple[int, bytes] | None = None  # the space and namespace of the first chunk
    num_counted: int = 0  # nodes below this number are counted
    log: list[Change] = field(default_factory=list[Change])
    first: int = 1  # position of `log[0]`
    counts: dict[str, IdCounts] = field(init=False)  # by medium: the chunks, by the id of their last block
    _num_logged: int = 0  # chunks in the log

    def __post_init__(self) -> None:
        pool = IdCounts()
        self.counts = {POOL: pool, TIER: pool if self.is_union else IdCounts()}
        if self.is_union:
            self.num_counted = ALL_NODES

    @property
    def end(self) -> int:
        """The position of the next change."""
        return self.first + len(self.log)

    def show(self, run: Run, first: int, stop: int, nodes: Sequence[int] = ()) -> None:
        """Note that chunks of a run appeared at nodes of the pool, or without nodes in a tier."""
        count = self.counts[POOL if nodes else TIER].add
        self._note(run, first, stop, nodes, count, is_stored=True)

    def hide(self, run: Run, first: int, stop: int, nodes: Sequence[int] = ()) -> None:
        """Note that chunks of a run left nodes of the pool, or without nodes a tier."""
        count = self.counts[POOL if nodes else TIER].remove
        self._note(run, first, stop, nodes, count, is_stored=False)

    def _note(
        self,
        run: Run,
        first: int,
        stop: int,
        nodes: Sequence[int],
        count: Callable[[Sequence[int]], list[bool]],
        *,
        is_stored: bool,
    ) -> None:
        num_counted = self.num_counted if nodes else ALL_NODES
        pieces = [(True, 0, stop - first)]
        if num_counted == ALL_NODES:
            pieces = [*spans(count(run.names(first, stop)))]
        elif num_counted:
            names = zip(run.names(first, stop), nodes, strict=True)
            count([name for name, node in names if node < num_counted])
        medium = POOL if nodes else TIER
        for public, start, end in pieces if is_stored else reversed(pieces):
            self.log.append((run, first + start, first + end, medium, is_stored, public))
        self._num_logged += stop - first

    def forget(self) -> None:
        """Make all readers scan again."""
        self.first, self._num_logged = self.end, 0
        self.log.clear()

    def cut(self) -> None:
        """Drop the oldest changes of a log that is too long."""
        if self._num_logged > 2 * LONGEST_LOG:
            num_dropped = 0
            while self._num_logged > LONGEST_LOG:
                _, first, stop, *_ = self.log[num_dropped]
                self._num_logged -= stop - first
                num_dropped += 1
            del self.log[:num_dropped]
            self.first += num_dropped


def spans(flags: Sequence[bool]) -> Iterator[tuple[bool, int, int]]:
    """Yield each span of equal flags: the flag, its first place, and the place after its last."""
    start = 0
    while start < len(flags):
        flag = flags[start]
        try:
            stop = flags.index(not flag, start)
        except ValueError:
            stop = len(flags)
        yield flag, start, stop
        start = stop
