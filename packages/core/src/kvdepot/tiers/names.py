"""Makes the tier keys of the pool's entries. Sections that many keys share are computed once."""

from collections.abc import Callable, Sequence

from kvdepot.index.entries import PartPlace
from kvdepot.index.index import ChunkIndex
from kvdepot.index.tree import NO_NODE, Space
from kvdepot.keys import DIGEST_BYTES, digest_at
from kvdepot.pool.names import Label
from kvdepot.pool.table import Entry
from kvdepot.tiers import keys as k


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
        self._last_runs: dict[int, tuple[int, bytes, bytes]] = {}  # (node, its key, its run), by chunks per run

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
        first = chunk - chunk % chunks_of_run(space, place.group, place.num_bytes)
        run = digest_at(digests, first)[: k.RUN_BYTES]
        return self._key(label, space, place, digest_at(digests, chunk)) + run + chunk.to_bytes(k.DEPTH_BYTES, "big")

    def _key(self, label: int, space: Space, place: PartPlace, digest: bytes) -> bytes:
        hashes, mark = self.hashes(label), self._marks[label]
        packed = k.place_of(space.digest, place.group, place.part, place.check, place.num_bytes, mark)
        return k.tier_key(*hashes, packed, digest)

    def key_of(self, entry: Entry) -> bytes:
        """Return the key of an entry in the pool, with its run and depth."""
        index, table = self._index, self._index.table
        node = index.entries.node_of(entry)
        group, part = table.place_of(entry)
        place = PartPlace(group, part, table.extent(entry)[1], table.check_of(entry))
        space = index.nodes.space_of(node)
        key = self._key(index.nodes.label[node], space, place, table.key_of(entry))
        run = self._run_of(node, chunks_of_run(space, group, place.num_bytes))
        return key + run + index.nodes.depth[node].to_bytes(k.DEPTH_BYTES, "big")

    def _run_of(self, node: int, num_chunks: int) -> bytes:
        """Return the run of a chunk. The last run is cached, as keys are mostly made in the order of a prefix."""
        nodes = self._index.nodes
        last_node, last_key, run = self._last_runs.get(num_chunks, (NO_NODE, b"", b""))
        here, key = node, nodes.key_of(node)
        while nodes.depth[here] % num_chunks:
            if here == last_node and nodes.key_of(here) == last_key:
                break
            here = nodes.tree.parent[here]
        else:
            run = nodes.key_of(here)[: k.RUN_BYTES]
        self._last_runs[num_chunks] = node, key, run
        return run


def chunks_of_run(space: Space, group: int, num_bytes: int) -> int:
    """Return the chunks per run. Without full attention, where a prefix has gaps, it is one."""
    return k.chunks_a_run(num_bytes) if space.full_mask & 1 << group else 1


def by_run(keys: Sequence[bytes]) -> list[int]:
    """Return the positions of keys, grouped by run and in the order of the prefix."""
    return sorted(
        range(len(keys)), key=lambda number: (keys[number][: k.KEY_BYTES - DIGEST_BYTES], k.depth_of(keys[number]))
    )


def name_hashes(tenant: str | None, model: str | None) -> tuple[bytes | None, bytes | None]:
    """Return the hashes of the names of a tenant and a model. None stays None and means any."""
    return None if tenant is None else k.name_hash(tenant), None if model is None else k.name_hash(model)
