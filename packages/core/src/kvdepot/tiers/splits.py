"""Splits: the ways in which engines of other sizes may have divided the heads of a cache among their ranks.

A tier has entries under the parts of the engine that stored them, and nobody lists the tier. But engines split heads
evenly, so there are few parts to ask for.
"""

from collections.abc import Sequence
from dataclasses import replace

from kvdepot.index.entries import PartPlace
from kvdepot.index.space import Space
from kvdepot.layout import Part


def other_splits(space: Space, places: Sequence[PartPlace]) -> list[list[PartPlace]]:
    """Return the places of a cache under each even split of its heads but that of `places`, the coarsest first.

    Opaque groups keep their places: no engine of another size has this space.
    """
    most = max(space.heads)
    own = {(place.group, place.part) for place in places}
    splits = [_split(space, places, ranks) for ranks in range(1, most + 1) if not most % ranks]
    return [split for split in splits if {(place.group, place.part) for place in split} != own]


def _split(space: Space, places: Sequence[PartPlace], ranks: int) -> list[PartPlace]:
    found: dict[tuple[int, int], PartPlace] = {}
    for place in places:
        part, heads = Part.of(place.part), space.heads[place.group]
        held = max(1, heads // ranks)
        num_bytes = place.num_bytes // part.num_heads * held
        for first in range(0, heads, held):
            number = part._replace(first_head=first, num_heads=min(held, heads - first)).number
            found[place.group, number] = replace(place, part=number, num_bytes=num_bytes)
    return [place for _, place in sorted(found.items())]
