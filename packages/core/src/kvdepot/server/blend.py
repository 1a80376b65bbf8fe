"""Blend: tells engines where text of their prompts lies in other prompts, and takes note of what chunks hold."""

from typing import Final

from kvdepot.errors import ErrorCode
from kvdepot.index.contents import ContentIndex
from kvdepot.keys import DIGEST_BYTES
from kvdepot.layout import GroupKind
from kvdepot.server.background import Kind
from kvdepot.server.contexts import Context
from kvdepot.server.replies import Refused, count_digests
from kvdepot.server.state import DepotState
from kvdepot.wire import messages as m

_MOST_RUNS: Final = 1024  # of one reply, the first ones


class BlendLookups:
    """Serves what schedulers of engines that blend ask and tell."""

    def __init__(self, state: DepotState) -> None:
        self.contents = ContentIndex(state.index)
        self._state = state
        self._index = state.index

    def note(self, context: Context, request: m.NoteContents) -> m.Done:
        """Take note of what chunks hold; the reply counts segments."""
        self._check(context, request.segments)
        count_digests(request.digests)
        num_chunks, _ = self._index.longest_prefix(context.space, request.digests)
        digests = request.digests[: num_chunks * DIGEST_BYTES]
        count = self.contents.note(context.space, digests, m.SEGMENT.iter_unpack(request.segments))
        return m.Done(self._state.epoch, count)

    def lookup(self, context: Context, request: m.BlendLookup) -> m.BlendReply:
        """Lease the runs that the depot has."""
        self._check(context, request.segments)
        state, counters, chunk_tokens = self._state, self._state.counters, context.space.spec.chunk_tokens
        runs, digests, nodes = bytearray(), bytearray(), list[int]()
        num_tokens = 0
        for run in self.contents.runs(context.space, m.SEGMENT.iter_unpack(request.segments)):
            if run.length < request.min_run_tokens:
                continue
            first = run.source_position // chunk_tokens
            count = (run.source_position + run.length - 1) // chunk_tokens - first + 1
            runs += m.BLEND_RUN.pack(
                run.position, run.length, run.source_position, first, count, len(digests) // DIGEST_BYTES
            )
            digests += self._keys(run.node, count)
            nodes.append(run.node)
            num_tokens += run.length
            if len(nodes) == _MOST_RUNS:
                break
        counters["blend_lookups"] += 1
        counters["blend_segments"] += len(request.segments) // m.SEGMENT.size
        counters["blend_runs"] += len(nodes)
        counters["blend_tokens"] += num_tokens
        if not nodes:
            return m.BlendReply(state.epoch, 0, 0.0, b"", b"")
        pinned = tuple(dict.fromkeys(nodes))
        lease = state.leases.grant(context.number, request.request_id, pinned, state.clock())
        for node in pinned:
            rest = self._index.used(node)
            if rest is not None and not state.background.add(rest, Kind.HINT):
                counters["hints_cut"] += 1
        return m.BlendReply(state.epoch, lease, state.leases.lease_seconds, bytes(runs), bytes(digests))

    def _keys(self, node: int, count: int) -> bytes:
        """Return the keys of the last `count` chunks up to a node, the first one first."""
        keys: list[bytes] = []
        for _ in range(count):
            keys.append(self._index.key_of(node))
            node = self._index.parent_of(node)
        return b"".join(reversed(keys))

    def _check(self, context: Context, segments: bytes) -> None:
        if any(group.kind is not GroupKind.FULL_ATTENTION for group in context.space.spec.groups):
            raise Refused(ErrorCode.BAD_LAYOUT, "blend needs a cache whose groups are all full attention")
        if len(segments) % m.SEGMENT.size:
            raise Refused(ErrorCode.BAD_KEY, f"{len(segments)} bytes of segments: each has {m.SEGMENT.size}")
