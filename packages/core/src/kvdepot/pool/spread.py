"""Mappings of a million keys without a pause: when one large dictionary grows, all other threads wait for 50 ms."""

import heapq
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from itertools import chain, islice
from typing import Final, Generic, TypeVar

NUM_PARTS: Final = 256
_DRAIN_STEP: Final = 500  # keys: half a millisecond
_SIZE_BITS: Final = 48

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class SpreadMap(Generic[K, V]):
    """A mapping in several dictionaries, of which one at a time grows; in no order."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: list[dict[K, V]] = [{} for _ in range(NUM_PARTS)]

    def __getitem__(self, key: K) -> V:
        return self._parts[hash(key) % NUM_PARTS][key]

    def __setitem__(self, key: K, value: V) -> None:
        self._parts[hash(key) % NUM_PARTS][key] = value

    def __delitem__(self, key: K) -> None:
        del self._parts[hash(key) % NUM_PARTS][key]

    def __contains__(self, key: K) -> bool:
        return key in self._parts[hash(key) % NUM_PARTS]

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def get(self, key: K) -> V | None:
        """Return the value of a key, None if there is none."""
        return self._parts[hash(key) % NUM_PARTS].get(key)

    def items(self) -> Iterable[tuple[K, V]]:
        """Return keys and their values."""
        return chain.from_iterable(part.items() for part in self._parts)

    def pop(self, key: K) -> V | None:
        """Forget a key; return its value, None if there was none."""
        return self._parts[hash(key) % NUM_PARTS].pop(key, None)

    def clear(self) -> None:
        """Forget everything; other threads run in between."""
        for part in self._parts:
            part.clear()

    def drain(self) -> Iterator[None]:
        """Forget everything, in steps: a million keys at once take 50 ms."""
        for part in self._parts:
            while part:
                for _ in range(min(len(part), _DRAIN_STEP)):
                    part.popitem()
                yield


class LruSizes:
    """Sizes by key, in the order of their last use. Several threads at a time may use `in`, `len` and `get`."""

    __slots__ = ("_num_uses", "_parts")

    def __init__(self) -> None:
        self._num_uses = 0
        # Number of the last use and size, in one number; each in that order.
        self._parts: list[OrderedDict[bytes, int]] = [OrderedDict() for _ in range(NUM_PARTS)]

    def __contains__(self, key: bytes) -> bool:
        return key in self._parts[hash(key) % NUM_PARTS]

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def get(self, key: bytes) -> int | None:
        """Return the size of a key, None if it is not there."""
        value = self._parts[hash(key) % NUM_PARTS].get(key)
        return None if value is None else value & (1 << _SIZE_BITS) - 1

    def put(self, key: bytes, size: int) -> None:
        """Set the size of a key, below 2^48, and use it."""
        self._num_uses += 1
        part = self._parts[hash(key) % NUM_PARTS]
        part[key] = self._num_uses << _SIZE_BITS | size
        part.move_to_end(key)

    def use(self, key: bytes) -> None:
        """Note that a key was used, if it is there."""
        size = self.get(key)
        if size is not None:
            self.put(key, size)

    def pop(self, key: bytes) -> int:
        """Forget a key; return its size, 0 if it was not there."""
        return self._parts[hash(key) % NUM_PARTS].pop(key, 0) & (1 << _SIZE_BITS) - 1

    def oldest(self, count: int) -> list[bytes]:
        """Return the keys that were used longest ago, that one first."""
        by_use = heapq.merge(*(((value, key) for key, value in part.items()) for part in self._parts))
        return [key for _, key in islice(by_use, count)]

    def newest(self) -> bytes | None:
        """Return the key that was used last, None if there is none."""
        last = ((part[key], key) for part in self._parts for key in islice(reversed(part), 1))
        return max(last, default=(0, None))[1]

    def __iter__(self) -> Iterator[bytes]:
        """Yield all keys, in no order; what is put or forgotten meanwhile may be among them or not."""
        for part in self._parts:
            yield from list(part)

    def clear(self) -> None:
        """Forget everything; other threads run in between."""
        for part in self._parts:
            part.clear()
