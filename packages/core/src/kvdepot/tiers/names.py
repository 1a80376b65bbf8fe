"""Makes the tier keys of the pool's entries. Sections that many keys share are computed once."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final

from kvdepot.index.entries import PartPlace
from kvdepot.index.index import ChunkIndex
from kvdepot.index.tree import NO_NODE, Space
from kvdepot.keys import DIGEST_BYTES, digest_at
from kvdepot.pool.names import Label
from kvdepot.pool.table import Entry
from kvdepot.tiers import keys as k

_STARTS: Final = 1024  # of keys, cached: weights in training have new ones all the time


class EntryKeys:
    """Makes keys of entries.

    Args:
        index: the index of the pool.
        names_of: returns the label with a number of the index.
    """

    def __init__(self, index: ChunkIndex, names_of: Callable[[int], Label]) -> None:
        self._index = index
        self._names_of = names_of
        self._hashes: dict[int, tuple[bytes, bytes]] = {}
        self._marks: dict[int, bytes] = {}  # by label
        # Returns a key without the chunk's key, and the chunks per run and per section.
        self._start: Callable[[int, bytes, bool, PartPlace], tuple[bytes, int, int]] = lru_cache(_STARTS)(
            self._make_start
        )
        self._last_cuts: dict[int, tuple[int, bytes, bytes]] = {}  # (node, its digest, its cut), by chunks between cuts

    def hashes(self, label: int) -> tuple[bytes, bytes]:
        """Return the hashes of the names of a tenant and a model."""
        hashes = self._hashes.get(label)
        if hashes is None:
            tenant, model, weights = self._names_of(label)
            hashes = self._hashes[label] = k.name_hash(tenant), k.name_hash(model)
            self._marks[label] = k.mark_of(weights)
        return hashes

    def generation(self, label: int) -> bytes:
        """Return the result of `generation_of` for keys of this label. It is empty if its weights have no mark."""
        _, model = self.hashes(label)
        mark = self._marks[label]
        return model + mark if mark else b""

    def key(self, label: int, space: Space, place: PartPlace, digests: bytes, chunk: int) -> bytes:
        """Return the key of an entry, with its run and depth.

        The pool need not have the entry. `digests` are those of a prefix.
        """
        is_full = bool(space.full_mask & 1 << place.group)
        start, run_chunks, section_chunks = self._start(label, space.digest, is_full, place)
        run, section = (digest_at(digests, chunk - chunk % each) for each in (run_chunks, section_chunks))
        return k.with_run(start + digest_at(digests, chunk), run, section, chunk)

    def _make_start(self, label: int, space: bytes, is_full: bool, place: PartPlace) -> tuple[bytes, int, int]:
        (tenant, model), mark = self.hashes(label), self._marks[label]
        size = place.num_bytes
        start = tenant + model + k.place_of(space, place.group, place.part, place.check, size, mark)
        return (start, k.chunks_a_run(size), k.chunks_a_section(size)) if is_full else (start, 1, 1)

    def keys_of(self, entries: Sequence[Entry]) -> list[bytes]:
        """Return the keys of entries in the pool, with their runs and depths, in the same order."""
        nodes, table = self._index.nodes, self._index.table
        digests = [table.key_of(entry) for entry in entries]
        places = [PartPlace(*table.place_of(entry), table.extent(entry)[1], table.check_of(entry)) for entry in entries]
        keys = list[bytes]()
        for node, digest, place in zip(self._index.entries.nodes_of(entries), digests, places, strict=True):
            space = nodes.spaces[nodes.space_number[node]]
            is_full = bool(space.full_mask & 1 << place.group)
            start, run_chunks, section_chunks = self._start(nodes.label[node], space.digest, is_full, place)
            run, section = (self._cut_of(node, digest, each) for each in (run_chunks, section_chunks))
            keys.append(k.with_run(start + digest, run, section, nodes.depth[node]))
        return keys

    def _cut_of(self, node: int, digest: bytes, num_chunks: int) -> bytes:
        """Return the last chunk up to this one whose number is a multiple of `num_chunks`.

        The last one is cached, as keys are mostly made in the order of a prefix.
        """
        depth, tree = self._index.nodes.depth, self._index.nodes.tree
        last_node, last_digest, cut = self._last_cuts.get(num_chunks, (NO_NODE, b"", b""))
        here = node
        while depth[here] % num_chunks:
            if here == last_node and tree.keys[here] == last_digest:
                break
            here = tree.parent[here]
        else:
            cut = (digest if here == node else self._index.nodes.key_of(here))[: k.RUN_BYTES]
        self._last_cuts[num_chunks] = node, digest, cut
        return cut


def chunks_of_run(space: Space, group: int, num_bytes: int) -> int:
    """Return the chunks per run. Without full attention, where a prefix has gaps, it is one."""
    return k.chunks_a_run(num_bytes) if space.full_mask & 1 << group else 1


def by_run(keys: Sequence[bytes]) -> list[int]:
    """Return the positions of keys, grouped by run and in the order of the prefix."""
    return sorted(
        range(len(keys)),
        key=lambda number: (keys[number][: k.KEY_BYTES - DIGEST_BYTES], keys[number][-k.DEPTH_BYTES :]),
    )


def name_hashes(tenant: str | None, model: str | None) -> tuple[bytes | None, bytes | None]:
    """Return the hashes of the names of a tenant and a model. None stays None and means any."""
    return None if tenant is None else k.name_hash(tenant), None if model is None else k.name_hash(model)
