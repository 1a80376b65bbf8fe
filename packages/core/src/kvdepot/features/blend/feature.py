"""Blend: finds text of a prompt in chunks of other prompts, and notes the contents of chunks."""

from collections.abc import Iterator, Mapping
from typing import Final

from kvdepot.counting import depot_counter
from kvdepot.errors import ErrorCode
from kvdepot.features.blend.contents import ContentIndex
from kvdepot.features.blend.messages import BLEND_RUN, SEGMENT, BlendLookup, BlendReply, NoteContents, ReportBlend
from kvdepot.index.tree import Space
from kvdepot.keys import num_digests, slice_digests
from kvdepot.layout import GroupKind
from kvdepot.server.contexts import Context
from kvdepot.server.depot import Depot
from kvdepot.server.feature import Feature, Handler
from kvdepot.server.turns import Refused, Steps
from kvdepot.wire import messages as m
from kvdepot.wire.status import DepotStatus

_BLEND_LOOKUPS: Final = depot_counter("blend_lookups", "Lookups of segments by engines that blend")
_BLEND_SEGMENTS_ASKED: Final = depot_counter("blend_segments_asked", "Segments looked up")
_BLEND_SEGMENTS_FOUND: Final = depot_counter("blend_segments_found", "Segments found in chunks of any prompt")
_BLEND_NOTES_DROPPED: Final = depot_counter(
    "blend_notes_dropped", "Notes of many segments that were not kept because too many waited"
)
_BLEND_RUNS: Final = depot_counter("blend_runs", "Runs of neighbouring segments that were leased")
_BLEND_TOKENS_FOUND: Final = depot_counter("blend_tokens_found", "Tokens of these runs")

_BLENDS: Final = depot_counter("blends", "Prompts that were blended")
_BLEND_REUSED_TOKENS: Final = depot_counter("blend_reused_tokens", "Tokens of blends whose KV was reused as it was")
_BLEND_RECOMPUTED_TOKENS: Final = depot_counter(
    "blend_recomputed_tokens", "Tokens of blends that were reused and computed again"
)

_MOST_NOTES: Final = 16  # each holds the names of a prompt's segments, 192 KiB at most
_MOST_RUNS: Final = 1024  # per reply; further runs are left out
_MOST_CHUNKS: Final = 8192  # per reply: 0.8 us each, and 2 us for each run; 131,072 tokens in chunks of 16
_NOTED_AT_ONCE: Final = 64  # segments: 0.1 ms, and 0.5 ms if 256 tenants compete for a full index


class BlendLookups(Feature):
    """Serves the lookups and notes of schedulers whose engines blend."""

    name = "blend"

    def __init__(self, depot: Depot) -> None:
        self.contents = ContentIndex(depot.index)
        self._state = depot.state
        self._index = depot.index
        self._turns = depot.background.queue(_MOST_NOTES)

    def handlers(self) -> Mapping[type[m.ContextRequest], Handler]:
        """See `Feature`."""
        return {NoteContents: self.note, BlendLookup: self.lookup, ReportBlend: self._report}

    def report(self, status: DepotStatus) -> None:
        """See `Feature`."""
        status.num_segments = len(self.contents)

    def _report(self, context: Context, request: ReportBlend) -> m.Done:
        counters = self._state.counters
        counters[_BLENDS] += 1
        counters[_BLEND_REUSED_TOKENS] += request.reused_tokens
        counters[_BLEND_RECOMPUTED_TOKENS] += request.recomputed_tokens
        return m.Done(self._state.epoch, 1)

    def note(self, context: Context, request: NoteContents) -> m.Done | Steps:
        """Note the segments that chunks hold. The reply counts segments.

        Many segments are noted later, in steps. They are dropped if too many such requests wait: the next request with
        the same prompt notes them again.
        """
        self._check(context, request.segments)
        match = self._index.visibility.match(context.space, request.digests)
        if not match.nodes:
            return m.Done(self._state.epoch, 0)
        digests = slice_digests(request.digests, 0, match.num_chunks)
        steps = self._noting(context.space, self._index.nodes.label[match.nodes[-1]], digests, request.segments)
        if len(request.segments) <= _NOTED_AT_ONCE * SEGMENT.size:
            return m.Done(self._state.epoch, sum(steps))
        return self._note_later(steps)

    def _noting(self, space: Space, label: int, digests: bytes, segments: bytes) -> Iterator[int]:
        step = _NOTED_AT_ONCE * SEGMENT.size
        for start in range(0, len(segments), step):
            yield self.contents.note(space, label, digests, SEGMENT.iter_unpack(segments[start : start + step]))

    def _note_later(self, steps: Iterator[int]) -> Steps:
        notes, epoch = self._turns, self._state.epoch
        if not (yield notes.enter):
            self._state.counters[_BLEND_NOTES_DROPPED] += 1
            return m.Done(epoch, 0)
        return m.Done(epoch, (yield from notes.total(steps)))

    def lookup(self, context: Context, request: BlendLookup) -> BlendReply:
        """Lease the runs of segments that the pool has."""
        self._check(context, request.segments)
        state, counters, chunk_tokens = self._state, self._state.counters, context.space.spec.chunk_tokens
        runs, digests, nodes = bytearray(), bytearray(), list[int]()
        num_found = num_tokens = 0
        for run in self.contents.runs(context.space, SEGMENT.iter_unpack(request.segments)):
            num_found += run.num_segments
            first = run.source_position // chunk_tokens
            count = (run.source_position + run.length - 1) // chunk_tokens - first + 1
            if len(nodes) == _MOST_RUNS or num_digests(digests) + count > _MOST_CHUNKS:
                break
            if run.length < request.min_run_tokens:
                continue
            keys = self._keys(context.space, run.node, first, count)
            if keys is None:
                continue
            start = num_digests(digests)
            runs += BLEND_RUN.pack(run.position, run.length, run.source_position, first, count, start)
            digests += keys
            nodes.append(run.node)
            num_tokens += run.length
        counters[_BLEND_LOOKUPS] += 1
        counters[_BLEND_SEGMENTS_ASKED] += len(request.segments) // SEGMENT.size
        counters[_BLEND_SEGMENTS_FOUND] += num_found
        counters[_BLEND_RUNS] += len(nodes)
        counters[_BLEND_TOKENS_FOUND] += num_tokens
        if not nodes:
            return BlendReply(state.epoch, 0, 0.0, b"", b"")
        pinned = tuple(dict.fromkeys(nodes))
        lease = state.leases.grant(context.number, request.request_id, pinned, state.clock())
        for node in pinned:
            rest = self._index.shares.used(node)
            if rest is not None:
                state.revoke_later(rest)
        return BlendReply(state.epoch, lease, state.leases.lease_seconds, bytes(runs), bytes(digests))

    def _keys(self, space: Space, node: int, first: int, count: int) -> bytes | None:
        """Return the keys of `count` chunks from `first` on, ending at `node`. None if a chunk was removed."""
        keys: list[bytes] = []
        for chunk in range(first + count - 1, first - 1, -1):
            key = self._index.nodes.key_of(node)
            if self._index.visibility.find(space, key, chunk) is None:
                return None
            keys.append(key)
            node = self._index.nodes.tree.parent[node]
        return b"".join(reversed(keys))

    def _check(self, context: Context, segments: bytes) -> None:
        if any(group.kind is not GroupKind.FULL_ATTENTION for group in context.space.spec.groups):
            raise Refused(ErrorCode.BAD_LAYOUT, "blend needs a cache whose groups are all full attention")
        if len(segments) % SEGMENT.size:
            raise Refused(ErrorCode.BAD_KEY, f"{len(segments)} bytes of segments: each has {SEGMENT.size}")
