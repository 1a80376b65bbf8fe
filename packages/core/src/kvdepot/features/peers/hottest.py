"""The prefixes of a pool that were used last, which `kvdepot drain --to` hands over (`offering`)."""

import heapq
from collections.abc import Generator
from typing import Annotated, Final

from msgspec import Meta, Struct

from kvdepot.features.peers import protocol as p
from kvdepot.index.index import ChunkIndex
from kvdepot.index.tree import NO_NODE
from kvdepot.server.state import LabelTable
from kvdepot.server.turns import Turns, Wait
from kvdepot.wire.operation import PATIENT_SECONDS, Operation, Reply

_MOST_PREFIXES: Final = 4096
MOST_CHUNKS: Final = 1 << 17  # of all prefixes: 4 MiB of keys
_NODES_A_STEP: Final = 1024


class HotPrefix(Struct, frozen=True, array_like=True):
    """A prefix of the pool."""

    tenant: str
    digests: bytes


class HottestPrefixes(Reply, tag="hottest_prefixes", frozen=True):
    """The result of `Hottest`."""

    address: str  # of this depot's listener
    prefixes: list[HotPrefix]


class Hottest(Operation[HottestPrefixes], tag="hottest", frozen=True):
    """List the prefixes that were used last, the last one first, until their chunks have `most_bytes`."""

    seconds = PATIENT_SECONDS
    needs_entries = True

    most_bytes: Annotated[int, Meta(ge=0)]


def hottest_of(
    index: ChunkIndex, labels: LabelTable, most_bytes: int, turns: Turns
) -> Generator[Wait, bool, list[HotPrefix]]:
    """Return the prefixes that end with the last chunks in use, within a handler."""
    nodes, tree = index.nodes, index.nodes.tree
    ends = list[tuple[int, int, bytes]]()  # a heap: the longest unused first
    for node in range(len(tree.keys)):
        key = tree.keys[node]
        if key is not None and not tree.num_children[node]:
            (heapq.heappush if len(ends) < _MOST_PREFIXES else heapq.heappushpop)(
                ends, (nodes.last_use[node], node, key)
            )
        if node % _NODES_A_STEP == 0:
            yield turns.again
    prefixes, counted, num_bytes, num_chunks = list[HotPrefix](), set[int](), 0, 0
    for _, end, key in sorted(ends, reverse=True):
        yield turns.again
        if tree.keys[end] != key:
            continue  # it was evicted
        path, node = list[bytes](), end
        while node != NO_NODE:
            path.append(nodes.key_of(node))
            if node not in counted:
                counted.add(node)
                num_bytes += sum(index.table.extent(entry)[1] for entry in index.entries.sealed(node))
            node = tree.parent[node]
        num_chunks += len(path)
        if num_bytes > most_bytes or num_chunks > MOST_CHUNKS:
            break
        prefixes.append(HotPrefix(labels.names[nodes.label[end]].tenant, b"".join(reversed(path[-p.MOST_TAKEN :]))))
    return prefixes
