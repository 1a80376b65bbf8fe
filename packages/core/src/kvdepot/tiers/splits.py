"""Splits: the ways in which engines of other sizes may divide the layers and heads of a cache among their ranks.

A tier has entries under the parts of the engine that stored them, and cannot be searched. But attached engines have
told their parts, and others mostly split evenly, so there are few parts to ask for. Without the even splits, a decode
engine of two ranks would wait in vain for the chunks that a prefill engine of one rank on another node hands over.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from kvdepot.index.entries import PartPlace
from kvdepot.index.tree import Space
from kvdepot.layout import Part

Layers = list[tuple[int, int]]  # (first layer, number of layers) of each pipeline stage

_MOST_ATTACHED: Final = 8  # splits of attached engines to ask for; a question has one key for each split
_STAGES: Final = (1, 2, 4)  # numbers of pipeline stages to ask for; each adds keys to the question of a new prompt


def other_splits(
    space: Space, places: tuple[PartPlace, ...], attached: Sequence[tuple[PartPlace, ...]]
) -> list[tuple[PartPlace, ...]]:
    """Return the places of a cache in other splits than that of `places`.

    The splits of `attached` engines come first, then even splits of the heads with the stages of `places`, coarsest
    first, then those with other stages. Opaque groups keep their places, as no engine of another size has this space.
    """
    most, parts = max(space.heads), [Part.of(place.part) for place in places]
    own_stages = sorted({(part.first_layer, part.num_layers) for part in parts})
    stages: list[Layers | None] = [None]
    if len(space.heads) == 1 and (most > 1 or max(part.num_layers for part in parts) > 1):
        num_layers = space.spec.groups[0].layers
        even = (_even(num_layers, count) for count in _STAGES if not num_layers % count)
        stages += [each for each in even if each != own_stages]
    splits = list(attached[:_MOST_ATTACHED])
    splits += [
        _split(space, places, each, ranks) for each in stages for ranks in range(1, most + 1) if not most % ranks
    ]
    found: dict[frozenset[tuple[int, int]], tuple[PartPlace, ...]] = {}
    for split in splits:
        found.setdefault(_cut_of(split), split)
    found.pop(_cut_of(places), None)
    return [*found.values()]


def _cut_of(places: Sequence[PartPlace]) -> frozenset[tuple[int, int]]:
    return frozenset((place.group, place.part) for place in places)


def _even(num_layers: int, count: int) -> Layers:
    held = num_layers // count
    return [(first, held) for first in range(0, num_layers, held)]


def _split(space: Space, places: Sequence[PartPlace], stages: Layers | None, ranks: int) -> tuple[PartPlace, ...]:
    found: dict[tuple[int, int], PartPlace] = {}
    for place in places:
        part, heads = Part.of(place.part), space.heads[place.group]
        held = max(1, heads // ranks)
        for first_layer, num_layers in stages or [(part.first_layer, part.num_layers)]:
            num_bytes = place.num_bytes // part.num_cells * num_layers * held
            for first in range(0, heads, held):
                number = Part(first_layer, num_layers, first, min(held, heads - first)).number
                found[place.group, number] = replace(place, part=number, num_bytes=num_bytes)
    return tuple(place for _, place in sorted(found.items()))
