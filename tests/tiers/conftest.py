from collections.abc import Iterator

import pytest

from kvdepot.testing.tier_traffic import EXTENT_BYTES
from kvdepot.tiers.base import TierPool
from kvdepot.tiers.url import TierUrl, open_tier
from support.tiers.shelf import AnyShelf, Shelf, Shelve


@pytest.fixture
def shelve() -> Iterator[Shelve]:
    """Opens tiers by their URLs and closes them after the test."""
    shelves: list[AnyShelf] = []

    def shelve(text: str, size: int = EXTENT_BYTES, pool: TierPool | None = None) -> AnyShelf:
        shelves.append(Shelf(lambda pool: open_tier(TierUrl.parse(text), pool), size, pool))
        return shelves[-1]

    yield shelve
    for shelf in shelves:
        shelf.close()
