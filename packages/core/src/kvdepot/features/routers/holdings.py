"""`Holdings`: the blocks that are reported to routers, with their tokens and the engines' ids for them.

Engines describe their chunks (`DescribeChunks`) when they store them, and after a hit on undescribed chunks. A
described chunk appears as soon as lookups find it, and leaves when the index reports that they no longer do. If it is
evicted and a tier has it, it appears in that medium until it is promoted or described again, or a lookup misses it.
Each change is appended to the log of its model. Readers (the published streams and attached engines) follow the log. A
reader that is new or too far behind first scans all held chunks, in steps, and then follows the changes since the scan
began. Of these it leaves out those that the scan has seen: routers count how often a block was announced (llm-d,
Dynamo's publisher), and a block announced twice would never leave them.

Chunks are kept in runs of up to 32, as a thousand tokens in chunks of 16 would be 64 objects otherwise.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import islice
from typing import Final
from weakref import WeakValueDictionary

from kvdepot.features.routers.messages import DescribeChunks
from kvdepot.features.routers.shelves import ALL_NODES, ID_BYTES, POOL, TIER, TOKEN_BYTES, Family, Run, Shelf, spans
from kvdepot.index.tree import NO_NODE, Space
from kvdepot.index.visibility import Watcher
from kvdepot.keys import digest_at, num_digests

logger = logging.getLogger(__name__)

_MODEL: Final = "{model}"
_MOST_BYTES: Final = 320 << 20  # for tokens and ids: 64 million tokens in blocks of 16 or more
_MOST_IN_TIER: Final = 65_536  # chunks that are only in a tier
_TIER_SHARE: Final = 4  # 80 MiB: chunks that are only in a tier may take `_MOST_BYTES` divided by this in addition
MOST_TOPICS: Final = 1024  # a bound on the model names that engines can invent
SCANNED_AT_ONCE: Final = 1024  # nodes per step, in 0.4 ms if all are described
COUNTED_AT_ONCE: Final = 1024  # nodes per description, in 2 ms if all are described
LEFT_AT_ONCE: Final = 256  # chunks that leave tiers per step, in 0.5 ms


def nothing_in_tier(_nodes: Sequence[int]) -> Collection[int]:
    """Return no nodes, as there is no tier."""
    return ()


class Holdings(Watcher):
    """All described chunks that lookups find. The index reports which ones leave.

    Args:
        topic: the topic of events, in which {model} stands for the model's name. Without it, one model is published.
        in_tier: returns which of the nodes that are about to be evicted a tier has.
        most_bytes: the limit for tokens and ids. Further descriptions are declined.
        is_union: whether the pool and tiers count as one medium, for routers that look at none.

    Attributes:
        num_changes: the number of changes so far in all topics.
    """

    def __init__(
        self,
        topic: str = "",
        in_tier: Callable[[Sequence[int]], Collection[int]] = nothing_in_tier,
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
        self._find_in_tier = in_tier
        self._most_bytes = most_bytes
        self._by_node: list[Run | None] = []  # the runs of visible nodes
        self._in_tier: dict[tuple[int, bytes], Run] = {}  # chunks that are only in a tier, first evicted first
        self._num_tier_bytes = 0
        self._broken: set[int] = set()  # hidden nodes with children
        # As long as a chunk has them: engines invent namespaces and groups.
        self._families = WeakValueDictionary[tuple[object, ...], Family]()
        if _MODEL not in topic:
            self.shelf_of("")  # an empty depot says so before its first engine comes

    def shelf_of(self, model: str) -> Shelf | None:
        """Return the shelf of a model. Create it if it is new. None if there are too many."""
        shelf = self.shelves.get(model)
        if shelf is None and len(self.shelves) < MOST_TOPICS:
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

    def may_show(self, family: Family) -> bool:
        """Return whether chunks can be shown: no other owner has chunks on their shelf, or all are counted.

        If others are not counted, count more of them.
        """
        shelf, owner = family.shelf, (family.space, family.namespace)
        if shelf.owner in (None, owner) or shelf.num_counted == ALL_NODES:
            shelf.owner = shelf.owner or owner
            return True
        start, pool = shelf.num_counted, shelf.counts[POOL]
        # In pieces: counting a million chunks takes two seconds, in which nobody would be served.
        shelf.num_counted = start + COUNTED_AT_ONCE
        for node, run in enumerate(self._by_node[start : shelf.num_counted], start):
            if run is not None and run.family.shelf is shelf:
                chunk = run.nodes.index(node)
                pool.add(run.names(chunk, chunk + 1))
        if shelf.num_counted >= len(self._by_node):
            shelf.num_counted = ALL_NODES
        return shelf.num_counted == ALL_NODES

    def read(self, space: Space, model: str, request: DescribeChunks) -> Run | None:
        """Return the described chunks as a run without nodes, None if there are too many models.

        Args:
            space: the space of the chunks.
            model: the name under which engines serve the model.
            request: the description.

        Raises:
            ValueError: the description is inconsistent.
        """
        chunk_tokens = space.spec.chunk_tokens
        per_chunk = self._check(request, num_digests(request.digests), chunk_tokens)
        shelf = self.shelf_of(model)
        if shelf is None:
            return None
        names = request.namespace, per_chunk, chunk_tokens // per_chunk, request.groups, request.lora_name or None
        family = self._families.get((shelf, space.number, *names))
        if family is None:
            family = self._families[shelf, space.number, *names] = Family(shelf, space.number, *names)
        return Run(family, request.parent_id, request.block_ids, request.tokens, request.extra_keys)

    def describe(self, text: Run, digests: bytes, above: int, nodes: Sequence[int], offset: int = 0) -> int:
        """Show chunks that lookups find. Return the number of newly described ones.

        Args:
            text: the described chunks, as from `read`.
            digests: of the described chunks.
            above: the node before the first of the chunks to show, `NO_NODE` if there is none.
            nodes: the nodes of the chunks to show, as from `Visibility.find_run`.
            offset: the first of these chunks.
        """
        if not nodes or not (above == NO_NODE or self.is_described(above)):
            return 0  # without the chunk before it, a router could not place a chunk
        if not self.may_show(text.family):
            return 0  # the engine describes them again when it finds them
        by_node, num_new, most_chunks = self._by_node, 0, text.family.most_chunks
        self._make_room(nodes)
        for is_known, first, stop in spans([by_node[node] is not None for node in nodes]):
            if is_known:
                continue
            last = min(stop, first + (self._most_bytes - self.num_bytes) // text.family.chunk_bytes)
            for start in range(first, last, most_chunks):
                end = min(start + most_chunks, last)
                part = text.part(offset + start, offset + end)
                self._show(nodes[start - 1] if start else above, nodes[start:end], part)
                num_new += end - start
                if self._in_tier:
                    for chunk in range(offset + start, offset + end):
                        self._leave_tier((text.family.space, digest_at(digests, chunk)))
            if last < stop:
                self.num_declined += len(nodes) - last
                break
        if num_new:
            self._count()
        return num_new

    def _check(self, request: DescribeChunks, count: int, chunk_tokens: int) -> int:
        """Check a description. Return the number of blocks per chunk."""
        num_tokens, rest = divmod(len(request.tokens), TOKEN_BYTES)
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

    def _make_room(self, nodes: Sequence[int]) -> None:
        more = max(nodes, default=-1) + 1 - len(self._by_node)
        if more > 0:
            self._by_node += [None] * more

    def _show(self, above: int, nodes: Sequence[int], text: Run) -> None:
        """Show the chunks of a run without nodes, which follow the chunk of the node `above`."""
        by_node, self.num_bytes = self._by_node, self.num_bytes + text.num_bytes
        before = None if above == NO_NODE else by_node[above]
        if before is not None and before.takes(text, above):
            run, first = before, len(before.nodes)
            run.append(text)
        else:
            run, first = text, 0
            run.above = above
        run.nodes += nodes
        for node in nodes:
            by_node[node] = run
        shelf = run.family.shelf
        shelf.show(run, first, first + len(nodes), nodes)
        if self._broken and not self._broken.isdisjoint(nodes):
            self._broken.difference_update(nodes)
            shelf.forget()  # earlier scans skipped the chunks after it

    def hidden(self, nodes: Sequence[int], /, *, has_children: bool) -> None:
        """See `Watcher`."""
        by_node = self._by_node
        for run, first, stop, _ in self._pieces(nodes):
            left, rest = run.nodes[first:stop], run.nodes[stop:]
            for node in left:
                by_node[node] = None
            if has_children:
                self._broken.update(left)
            del run.nodes[first:]
            if not run.nodes:
                self.num_bytes -= run.num_bytes
            if rest:  # chunks after one that was removed as corrupt: from now on a run of their own
                after = run.part(stop, stop + len(rest))
                after.above, after.nodes = left[-1], rest
                self.num_bytes += after.num_bytes
                for node in rest:
                    by_node[node] = after
            run.family.shelf.hide(run, first, stop, left)
        self._count()

    def _pieces(self, nodes: Sequence[int]) -> Iterator[tuple[Run, int, int, int]]:
        """Yield the described ones among nodes, as pieces of runs.

        Of a run's chunks, the last one comes first, as they are evicted. Each piece has the run, the first chunk, the
        one after the last, and the place of the last chunk in `nodes`.
        """
        by_node, place = self._by_node, 0
        while place < len(nodes):
            node = nodes[place]
            run = by_node[node] if node < len(by_node) else None
            if run is None:
                place += 1
                continue
            start, own = place, run.nodes
            first = stop = own.index(node) + 1
            while first and place < len(nodes) and own[first - 1] == nodes[place]:
                first -= 1
                place += 1
            yield run, first, stop, start

    def evicted(self, nodes: Sequence[int], keys: Sequence[bytes], /) -> None:
        """Note that chunks are evicted from the pool. A tier may still have them."""
        in_tier = self._find_in_tier(nodes)
        if not in_tier:
            return
        for run, first, stop, place in self._pieces(nodes):
            for chunk in reversed(range(first, stop)):
                number = place + stop - 1 - chunk
                if nodes[number] in in_tier:
                    kept = self._in_tier[run.family.space, keys[number]] = run.part(chunk, chunk + 1)
                    self._num_tier_bytes += kept.num_bytes
                    run.family.shelf.show(kept, 0, 1)
        while len(self._in_tier) > _MOST_IN_TIER or self._num_tier_bytes > self._most_bytes // _TIER_SHARE:
            self._leave_tier(next(iter(self._in_tier)))
        self._count()

    @property
    def awaits_promoted(self) -> bool:
        """See `Watcher`."""
        return bool(self._in_tier)

    def promoted(self, space: Space, digests: bytes, above: int, nodes: Sequence[int], /) -> None:
        """Note that a tier brought chunks. Show chunks whose descriptions were kept at their eviction."""
        self._make_room(nodes)
        for chunk, node in enumerate(nodes):
            if not (above == NO_NODE or self.is_described(above)):
                return
            if not self.is_described(node):
                name = space.number, digest_at(digests, chunk)
                kept = self._in_tier.get(name)
                if kept is None or self.num_bytes + kept.num_bytes > self._most_bytes:
                    return  # the engine that finds it describes it
                self._show(above, [node], kept.part(0, 1))
                self._leave_tier(name)
            above = node

    def forget_tiers(self) -> bool:
        """See `Watcher`. Chunks of other tenants and models, which a tier may still have, appear again by their use."""
        for name in list(islice(self._in_tier, LEFT_AT_ONCE)):
            self._leave_tier(name)
        return bool(self._in_tier)

    def _leave_tier(self, name: tuple[int, bytes]) -> bool:
        chunk = self._in_tier.pop(name, None)
        if chunk is None:
            return False
        self._num_tier_bytes -= chunk.num_bytes
        chunk.family.shelf.hide(chunk, 0, 1)
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

    def scan(self, shelf: Shelf, is_wanted: Callable[[Run], bool]) -> Iterator[tuple[Run, int, str] | None]:
        """Yield the runs of a shelf with the number of their chunks and their medium. Yield None between steps.

        Each comes after the chunk before it. Chunks after a broken chunk are left out, as lookups end there.
        """
        by_node, end = self._by_node, len(self._by_node)
        told: dict[Run, int] = {}  # the number of told chunks; a node may become another run's between two steps
        for start in range(end):
            if start % SCANNED_AT_ONCE == 0:
                yield None
            chain, run = list[Run](), by_node[start]
            while run is not None and run not in told:
                chain.append(run)
                run = None if run.above == NO_NODE else by_node[run.above]
            for run in reversed(chain):
                before = None if run.above == NO_NODE else by_node[run.above]
                is_placed = run.above == NO_NODE or (
                    before is not None and run.above in before.nodes[: told.get(before, 0)]
                )
                told[run] = len(run.nodes) if is_placed else 0
                if told[run] and run.family.shelf is shelf and is_wanted(run):
                    yield run, told[run], POOL
        # Reversed: the last chunk of a prompt is evicted first.
        for number, run in enumerate(reversed(list(self._in_tier.values()))):
            if number % SCANNED_AT_ONCE == 0:
                yield None
            if run.family.shelf is shelf and is_wanted(run):
                yield run, 1, TIER

    def check_integrity(self, is_visible: Sequence[int]) -> None:
        """Check that lookups find all described chunks, and that they are counted.

        Raises:
            AssertionError: a lookup does not find a described chunk, or a count is wrong.
        """
        held = [(node, run) for node, run in enumerate(self._by_node) if run is not None]
        for node, run in held:
            assert is_visible[node], f"node {node} is not visible"
            assert run.nodes.count(node) == 1, f"node {node} is not in its run"
        runs = {run for _, run in held}
        assert sum(len(run.nodes) for run in runs) == len(held), "a run has nodes of others"
        assert self.num_bytes == sum(run.num_bytes for run in runs), "the bytes are miscounted"
        in_tier = self._in_tier.values()
        assert self._num_tier_bytes == sum(run.num_bytes for run in in_tier), "the bytes in tiers are miscounted"
        counted = [run for node, run in held if node < run.family.shelf.num_counted]
        counts = {each for shelf in self.shelves.values() for each in shelf.counts.values()}
        assert sum(map(len, counts)) == len(counted) + len(in_tier), "ids are miscounted"
