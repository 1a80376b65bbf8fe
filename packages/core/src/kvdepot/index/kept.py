"""Keeps stored chunks in the pool until a tier is asked for them. Unlike leases, they give way to every store."""

from collections.abc import Callable, Iterator, Sequence

from kvdepot.pool.table import Entry


class KeptChunks:
    """The last entries of consecutive stored chunks, oldest first. Holding one keeps all chunks before it, too.

    Args:
        hold: holds entries and returns their nodes.
        release: undoes one `hold`.
    """

    def __init__(
        self,
        hold: Callable[[Sequence[Entry]], Sequence[int]],
        release: Callable[[Sequence[Entry], Sequence[int]], None],
    ) -> None:
        self.num_bytes = 0
        self._hold = hold
        self._release = release
        self._kept: dict[int, tuple[Entry, int]] = {}  # by node: the entry, and the bytes of the chunks

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[int]:
        return iter(self._kept)

    def __contains__(self, node: int) -> bool:
        return node in self._kept

    def add(self, entry: Entry, num_bytes: int) -> None:
        """Keep chunks of `num_bytes` that end with an entry. None may end at its node already."""
        (node,) = self._hold([entry])
        self._kept[node] = entry, num_bytes
        self.num_bytes += num_bytes

    def let_go(self, node: int) -> int:
        """Keep the chunks that end at a node no longer. Return their bytes, 0 if they were not kept."""
        if node not in self._kept:
            return 0
        entry, num_bytes = self._kept.pop(node)
        self.num_bytes -= num_bytes
        self._release([entry], [node])
        return num_bytes

    def let_go_of_oldest(self) -> bool:
        """Make a little room. Return False if no chunks are kept."""
        if not self._kept:
            return False
        self.let_go(next(iter(self._kept)))
        return True
