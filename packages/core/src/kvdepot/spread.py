"""Numbers by key, a million of them, without a pause: when one large dictionary grows, all else waits for 50 ms."""

from collections.abc import Hashable, Iterable, Iterator
from itertools import chain
from typing import Final, Generic, TypeVar

NUM_PARTS: Final = 256
_DRAIN_STEP: Final = 500  # keys: half a millisecond

K = TypeVar("K", bound=Hashable)


class SpreadMap(Generic[K]):
    """A mapping in several dictionaries, of which one at a time grows; in no order."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: list[dict[K, int]] = [{} for _ in range(NUM_PARTS)]

    def __getitem__(self, key: K) -> int:
        return self._parts[hash(key) % NUM_PARTS][key]

    def __setitem__(self, key: K, number: int) -> None:
        self._parts[hash(key) % NUM_PARTS][key] = number

    def __contains__(self, key: K) -> bool:
        return key in self._parts[hash(key) % NUM_PARTS]

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def get(self, key: K) -> int | None:
        """Return the number of a key, None if there is none."""
        return self._parts[hash(key) % NUM_PARTS].get(key)

    def items(self) -> Iterable[tuple[K, int]]:
        """Return keys and their numbers."""
        return chain.from_iterable(part.items() for part in self._parts)

    def clear(self) -> None:
        """Forget everything, at once."""
        for part in self._parts:
            part.clear()

    def drain(self) -> Iterator[None]:
        """Forget everything, in steps: a million keys at once take 50 ms."""
        for part in self._parts:
            while part:
                for _ in range(min(len(part), _DRAIN_STEP)):
                    part.popitem()
                yield
