"""The contents of chunks: which segments lie where, so that text is found at any position of any prompt.

A second index over the same entries, without a byte of its own. A place names the chunk in which a segment ends. Places
of chunks that have left are dropped when they are asked for, or with the oldest names. A new server knows none: engines
tell it again as prompts pass.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final

from kvdepot.index.index import ChunkIndex, Space
from kvdepot.keys import DIGEST_BYTES
from kvdepot.wire.messages import MAXIMUM_SEGMENT_TOKENS

MAXIMUM_NAMES: Final = 1 << 18  # of one space: six million tokens; about 250 bytes each
_PLACES: Final = 2  # of one name, the newest ones

Segment = tuple[bytes, int, int]  # name, first token in its prompt, tokens
Place = tuple[bytes, int]  # key of the chunk in which the segment ends, first token in that chunk's prompt


@dataclass(slots=True)
class SourceRun:
    """Tokens of an asking prompt that lie, in the same order, in one prompt of the depot.

    Attributes:
        position: the first token in the asking prompt.
        length: tokens.
        source_position: the first token in the source.
        node: the chunk of the last token.
        key: of this chunk.
        num_segments: of these tokens.
    """

    position: int
    length: int
    source_position: int
    node: int
    key: bytes
    num_segments: int = 1


class ContentIndex:
    """Where segments lie, by name, for each space."""

    def __init__(self, index: ChunkIndex) -> None:
        self._index = index
        self._places: dict[int, dict[bytes, tuple[Place, ...]]] = {}  # the oldest name first

    def __len__(self) -> int:
        return sum(map(len, self._places.values()))

    def note(self, space: Space, digests: bytes, segments: Iterable[Segment]) -> int:
        """Add the places of the segments that lie in a run of chunks from chunk 0 on; return their number."""
        places, chunk_tokens = self._places.setdefault(space.number, {}), space.spec.chunk_tokens
        num_chunks, count = len(digests) // DIGEST_BYTES, 0
        last, key = -1, b""  # segments of one chunk share its key
        for name, position, length in segments:
            chunk = (position + length - 1) // chunk_tokens
            if not 0 < length <= MAXIMUM_SEGMENT_TOKENS or chunk >= num_chunks:
                continue
            if chunk != last:
                last, key = chunk, digests[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES]
            known = places.pop(name, None)
            if known is None:
                if len(places) >= MAXIMUM_NAMES:  # finding the oldest one takes a while: a `dict` keeps gaps
                    for oldest in list(islice(places, MAXIMUM_NAMES // 64 + 1)):
                        del places[oldest]
                places[name] = ((key, position),)
            else:
                places[name] = ((key, position), *(place for place in known if place != (key, position)))[:_PLACES]
            count += 1
        return count

    def runs(self, space: Space, segments: Iterable[Segment]) -> Iterator[SourceRun]:
        """Find segments, ascending, and yield the runs that neighbours form.

        A segment continues in the source of the one before it if it can, else it begins a run in the newest source.
        """
        places, run, end, following = self._places.get(space.number, {}), None, -1, 0
        find = places.get
        for name, position, length in segments:
            known = find(name, ())
            if run is not None and position == end:
                for key, source in known:
                    if source == following and (key == run.key or self._enters(space, run, key, source + length)):
                        break
                else:
                    end = -1
            if run is not None and position == end:
                run.length += length
                run.num_segments += 1
                end, following = end + length, following + length
                continue
            if run is not None:
                yield run
            run = self._begin(space, known, position, length)
            if run is None:
                places.pop(name, None)  # nothing, or chunks that have left
            else:
                end, following = position + length, run.source_position + length
        if run is not None:
            yield run

    def _begin(self, space: Space, known: Iterable[Place], position: int, length: int) -> SourceRun | None:
        for key, source in known:
            node = self._index.visible(space, key, (source + length - 1) // space.spec.chunk_tokens)
            if node is not None:
                return SourceRun(position, length, source, node, key)
        return None

    def _enters(self, space: Space, run: SourceRun, key: bytes, end: int) -> bool:
        """Extend a run to chunk `key`, which has the source's token before `end`, if it is below the run's chunk."""
        chunk_tokens = space.spec.chunk_tokens
        chunk = (end - 1) // chunk_tokens
        node = self._index.visible(space, key, chunk)
        if node is None:
            return False
        above = node
        for _ in range(chunk - (run.source_position + run.length - 1) // chunk_tokens):
            above = self._index.parent_of(above)
        if above != run.node:
            return False
        run.node, run.key = node, key
        return True
