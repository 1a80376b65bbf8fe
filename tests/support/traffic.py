"""Lookups of single chunks, of which one eviction policy finds clearly more than the other."""

import random
from collections.abc import Callable, Iterator
from typing import Final

POOL: Final = 2000  # chunks
CHUNK: Final = 4096  # bytes


def popular(rng: random.Random) -> Iterator[int]:
    """Half of the lookups are for popular chunks, the others for chunks that never return. ARC keeps the former."""
    weights = [1 / (rank + 1) ** 0.6 for rank in range(2 * POOL)]
    for number, again in enumerate(rng.choices(range(2 * POOL), weights, k=10_000)):
        yield again
        yield 10**6 + number


def soon_again(rng: random.Random) -> Iterator[int]:
    """Each chunk is looked up twice, and LRU keeps it long enough."""
    upcoming: list[int] = []
    for number in range(10_000):
        yield number
        upcoming.append(number)
        if len(upcoming) > POOL * 0.45:
            yield upcoming.pop(rng.randrange(20))


Traffic = Callable[[random.Random], Iterator[int]]
