"""The contents of chunks: which segments lie where, so that text is found at any position of any prompt.

A second index over the same entries, without a byte of its own. A place names the chunk in which a segment ends. Places
of chunks that have left are dropped when they are asked for, or with the oldest names.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kvdepot.index.index import ChunkIndex, Space
from kvdepot.index.tree import NO_NODE

MAXIMUM_NAMES: Final = 1 << 18  # of one space: six million tokens; about 250 bytes each
_PLACES: Final = 2  # of one name, the newest ones

Place = tuple[bytes, int]  # key of the chunk in which the segment ends, first token in that chunk's prompt


@dataclass(slots=True)
class SourceRun:
    """Tokens of an asking prompt that lie, in the same order, in one prompt of the depot.

    Attributes:
        position: the first token in the asking prompt.
        length: tokens.
        source_position: the first token in the source.
        node: the chunk of the last token.
    """

    position: int
    length: int
    source_position: int
    node: int


class ContentIndex:
    """Where segments lie, by name, for each space."""

    def __init__(self, index: ChunkIndex) -> None:
        self._index = index
        self._places: dict[int, dict[bytes, tuple[Place, ...]]] = {}  # the oldest name first

    def __len__(self) -> int:
        return sum(map(len, self._places.values()))

    def note(self, space: Space, name: bytes, key: bytes, position: int) -> None:
        """Add the place of a segment: `position` of its first token, and the chunk in which it ends."""
        places = self._places.setdefault(space.number, {})
        known = places.pop(name, ())
        if not known and len(places) >= MAXIMUM_NAMES:
            del places[next(iter(places))]
        place = (key, position)
        places[name] = (place, *(other for other in known if other != place))[:_PLACES]

    def runs(self, space: Space, segments: Iterator[tuple[bytes, int, int]]) -> Iterator[SourceRun]:
        """Find segments `(name, position, tokens)`, ascending, and yield the runs that neighbours form.

        A segment goes on in the source of the one before it if it can, else it begins a run in the newest source.
        """
        places, chunk_tokens, run = self._places.get(space.number, {}), space.spec.chunk_tokens, None
        for name, position, length in segments:
            found = [
                (node, source)
                for key, source in places.get(name, ())
                if (node := self._index.visible(space, key, (source + length - 1) // chunk_tokens)) is not None
            ]
            if run is not None and run.position + run.length == position:
                following = run.source_position + run.length
                node = next((n for n, source in found if source == following and self._is_below(n, run.node)), None)
                if node is not None:
                    run.length += length
                    run.node = node
                    continue
            if run is not None:
                yield run
            run = SourceRun(position, length, found[0][1], found[0][0]) if found else None
            if not found:
                places.pop(name, None)  # nothing, or chunks that have left
        if run is not None:
            yield run

    def _is_below(self, node: int, ancestor: int) -> bool:
        index, depth = self._index, self._index.depth_of(ancestor)
        while node != NO_NODE and index.depth_of(node) > depth:
            node = index.parent_of(node)
        return node == ancestor
