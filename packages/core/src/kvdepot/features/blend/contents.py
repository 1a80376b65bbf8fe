"""Indexes the contents of chunks by segment, so that text is found at any position of any prompt.

It is a second index over the same entries and stores no KV. A place refers to the chunk in which a segment ends. Places
of evicted chunks are dropped when a lookup finds them, or with the oldest names. A new server starts empty, and engines
report segments again with later prompts.

All names of a depot share one bound in bytes. Each tenant has a part of it: in proportion to its quota of the pool or,
without a quota, an equal part of the rest. Beyond the bound, the tenant that exceeds its part most loses its oldest
names. So no tenant loses names within its part, however many names another tenant adds.
"""

import struct
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from kvdepot.features.blend.messages import MAXIMUM_SEGMENT_TOKENS
from kvdepot.index.index import ChunkIndex
from kvdepot.index.tree import Space
from kvdepot.keys import DIGEST_BYTES, digest_at, num_digests

MAXIMUM_BYTES: Final = 64 << 20  # in total: names for six million tokens
NAME_BYTES: Final = 256  # per name: 231 were measured with two places
_PLACE: Final = struct.Struct(f"{DIGEST_BYTES}sI")  # packed: tuples take twice the memory
_SPACE: Final = struct.Struct("<I")
_DICTS: Final = 256  # one per first byte of a name: a single dict of 200,000 names takes 20 ms to grow
_NEW, _AGAIN = b"\0", b"\1"  # whether a name was reported again since it was added or last spared
_SPARED: Final = 1000  # names per call: 0.3 ms
# Tenants without a quota are grouped by their number modulo this, so that a turn compares a bounded number of groups.
_TENANTS: Final = 256

Segment = tuple[bytes, int, int]  # name, first token in its prompt, number of tokens
Place = tuple[bytes, int]  # key of the chunk in which the segment ends, first token in that chunk's prompt


@dataclass(slots=True)
class SourceRun:
    """A run of tokens that an asking prompt shares with one prompt of the depot.

    Attributes:
        position: the first token in the asking prompt.
        length: the number of tokens.
        source_position: the first token in the source.
        node: the chunk with the last token.
        key: the key of that chunk.
        num_segments: the number of segments in the run.
    """

    position: int
    length: int
    source_position: int
    node: int
    key: bytes
    num_segments: int = 1


class ContentIndex:
    """The places of segments, by space and name."""

    def __init__(self, index: ChunkIndex) -> None:
        self._index = index
        # By packed space and name: `_NEW` or `_AGAIN`, then the two newest places, packed, the newest first.
        self._places: tuple[dict[bytes, bytes], ...] = tuple({} for _ in range(_DICTS))
        # Names in the order in which they were added, by share of the pool and number of the tenant. Some were removed
        # since.
        self._tenants: dict[tuple[int, int], deque[bytes]] = {}
        self._num_names = 0  # in total

    def __len__(self) -> int:
        return sum(map(len, self._places))

    def note(self, space: Space, label: int, digests: bytes, segments: Iterable[Segment]) -> int:
        """Add the places of segments in a run of chunks from chunk 0 on. Return their number.

        Args:
            space: the space of the chunks.
            label: the label of the chunks. New names count against its tenant.
            digests: the digests of the chunks, which are all in the pool.
            segments: ascending. Each takes some microseconds, so the caller passes few.
        """
        quotas = self._index.quotas
        share = quotas.share_of(label)
        mine = self._tenants.setdefault((share, 0 if share else quotas.tenant_of(label) % _TENANTS), deque())
        prefix, chunk_tokens = _SPACE.pack(space.number), space.spec.chunk_tokens
        num_chunks, count = num_digests(digests), 0
        for name, position, length in segments:
            chunk = (position + length - 1) // chunk_tokens
            if not 0 < length <= MAXIMUM_SEGMENT_TOKENS or chunk >= num_chunks:
                continue
            place = _PLACE.pack(digest_at(digests, chunk), position)
            places, full_name = self._places[name[0]], prefix + name
            known = places.get(full_name)
            if known is None:
                mine.append(full_name)
                self._num_names += 1
                places[full_name] = _NEW + place
            else:
                newest = known[1 : 1 + _PLACE.size]
                places[full_name] = _AGAIN + place + (newest if newest != place else known[1 + _PLACE.size :])
            count += 1
        while self._num_names > MAXIMUM_BYTES // NAME_BYTES:
            self._make_room(self._num_names - MAXIMUM_BYTES // NAME_BYTES)
        return count

    def _make_room(self, num_names: int) -> None:
        """Drop up to `num_names` of the oldest names of the tenant that exceeds its part most.

        Names within its part stay. Names that were reported again are spared once, so that they outlast other names.
        """
        quotas, most = self._index.quotas.quota_bytes, MAXIMUM_BYTES // NAME_BYTES
        owed = {tenant: quotas[tenant[0]] if tenant[0] else 0 for tenant, names in self._tenants.items() if names}
        equal = quotas[0] / max(1, sum(not quota for quota in owed.values()))
        excess = {
            tenant: len(self._tenants[tenant]) - most * (quota or equal) / sum(quotas) for tenant, quota in owed.items()
        }
        tenant = max(excess, key=excess.__getitem__)
        names = self._tenants[tenant]
        left, spared = max(1, min(num_names, int(excess[tenant]))), 0
        while left:
            oldest = names.popleft()
            places = self._places[oldest[_SPACE.size]]
            known = places.get(oldest, _NEW)
            if known.startswith(_AGAIN) and spared < _SPARED:
                places[oldest] = _NEW + known[1:]
                names.append(oldest)
                spared += 1
            else:
                places.pop(oldest, None)
                self._num_names -= 1
                left -= 1

    def check_integrity(self) -> None:
        """Raise AssertionError if the bound is exceeded, or if a name counts against no tenant."""
        assert self._num_names <= MAXIMUM_BYTES // NAME_BYTES, self._num_names
        assert self._num_names == sum(map(len, self._tenants.values())), self._num_names
        assert set().union(*self._places) <= set().union(*self._tenants.values())

    def runs(self, space: Space, segments: Iterable[Segment]) -> Iterator[SourceRun]:
        """Look up ascending segments. Yield the runs that neighbouring segments form.

        A segment continues the run before it in the same source if possible. Otherwise it begins a run in the newest
        source.
        """
        prefix, run, end, following = _SPACE.pack(space.number), None, -1, 0
        for name, position, length in segments:
            places, full_name = self._places[name[0]], prefix + name
            known = [*_PLACE.iter_unpack(places.get(full_name, _NEW)[1:])]
            if run is not None and position == end:
                for key, source in known:
                    if source == following and (key == run.key or self.enters(space, run, key, source + length)):
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
                places.pop(full_name, None)  # no place, or only places of evicted chunks
            else:
                end, following = position + length, run.source_position + length
        if run is not None:
            yield run

    def _begin(self, space: Space, known: Iterable[Place], position: int, length: int) -> SourceRun | None:
        for key, source in known:
            node = self._index.visibility.find(space, key, (source + length - 1) // space.spec.chunk_tokens)
            if node is not None:
                return SourceRun(position, length, source, node, key)
        return None

    def enters(self, space: Space, run: SourceRun, key: bytes, end: int) -> bool:
        """Extend a run to chunk `key`, which holds the source's token before `end`, if it follows the run's chunk."""
        chunk_tokens = space.spec.chunk_tokens
        chunk = (end - 1) // chunk_tokens
        node = self._index.visibility.find(space, key, chunk)
        if node is None:
            return False
        above = node
        for _ in range(chunk - (run.source_position + run.length - 1) // chunk_tokens):
            above = self._index.nodes.tree.parent[above]
        if above != run.node:
            return False
        run.node, run.key = node, key
        return True
