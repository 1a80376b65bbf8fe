"""The sizes of a tier's entries, in LRU order."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice


class LruSizes:
    """Sizes by key, in LRU order. `in`, `len` and `get` are thread-safe."""

    __slots__ = ("_sizes",)

    def __init__(self) -> None:
        self._sizes: OrderedDict[bytes, int] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[bytes]:
        """Yield the present keys."""
        return iter(list(self._sizes))

    def get(self, key: bytes) -> int | None:
        """Return the size of a key, None if it is missing."""
        return self._sizes.get(key)

    def put(self, key: bytes, size: int) -> None:
        """Set the size of a key, and mark it as used."""
        self._sizes[key] = size
        self._sizes.move_to_end(key)

    def use(self, key: bytes) -> None:
        """Mark a key as used, if it is present."""
        if key in self._sizes:
            self._sizes.move_to_end(key)

    def outdate(self, is_meant: Callable[[bytes], bool]) -> None:
        """Make the keys for which `is_meant` holds the least recently used, in their present order."""
        for key in reversed([key for key in self._sizes if is_meant(key)]):
            self._sizes.move_to_end(key, last=False)

    def pop(self, key: bytes) -> int:
        """Remove a key. Return its size, 0 if it was missing."""
        return self._sizes.pop(key, 0)

    def oldest(self, count: int) -> list[bytes]:
        """Return the least recently used keys, oldest first."""
        return list(islice(self._sizes, count))

    def newest(self) -> bytes | None:
        """Return the most recently used key, None if empty."""
        return next(reversed(self._sizes), None)

    def clear(self) -> None:
        """Remove all keys."""
        self._sizes.clear()
