"""Checks of an index that the state machine, the fuzzer and the simulation share."""

from kvdepot.index.index import ChunkIndex


def num_ended(index: ChunkIndex) -> int:
    """Return the number of nodes in use that have ended."""
    return sum(index.nodes.tree.ended[node] for node in nodes_of(index))


def nodes_of(index: ChunkIndex) -> list[int]:
    """Return every node in use."""
    return [node for space in index.spaces for node in space.nodes.values()]


def empty_by_eviction(index: ChunkIndex) -> None:
    """Evict everything. Fail if anything is left, as no client uses the index."""
    for share in range(index.quotas.num_shares):
        while index.evictor.make_room(1, 1, share):
            pass
    check_empty(index)


def check_empty(index: ChunkIndex) -> None:
    """Fail unless nothing is left."""
    index.check_integrity()
    assert (index.extents.used_bytes, index.entries.num_sealed, len(index.nodes)) == (0, 0, 0)
    assert index.extents.free_extents() == [(0, index.extents.ready_bytes)]
    assert not any(index.table.state(entry) for entry in index.table.entries)
