"""The engine's half: looks up segments of prompts, notes the contents of chunks, and reports blends."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvdepot.client.answers import MISS, Lease
from kvdepot.client.scheduler import Pending, SchedulerClient
from kvdepot.client.session import Session
from kvdepot.features.blend.messages import BLEND_RUN, BlendLookup, BlendReply, NoteContents, ReportBlend
from kvdepot.keys import DIGEST_BYTES, KeyRun, slice_digests
from kvdepot.wire import frames

if TYPE_CHECKING:
    from kvdepot.features.blend.segments import Segments  # loads numpy


@dataclass(frozen=True, slots=True)
class BlendRun:
    """A run of tokens that chunks of another prompt hold.

    Attributes:
        position: where the run begins in the prompt of the lookup.
        length: the number of tokens.
        source_position: where the run begins in the prompt that the chunks belong to.
        key: the chunks that hold the tokens. Its `parent` is zeros, as only stores need it.
    """

    position: int
    length: int
    source_position: int
    key: KeyRun

    def clip(self, begin: int, end: int, chunk_tokens: int) -> "BlendRun | None":
        """Return the part within tokens `begin` to `end` of the lookup's prompt, None if it is empty."""
        first, last = max(begin, self.position), min(end, self.position + self.length)
        if first >= last:
            return None
        source = self.source_position + first - self.position
        start = source // chunk_tokens - self.key.first_chunk
        stop = (source + last - first - 1) // chunk_tokens + 1 - self.key.first_chunk
        return BlendRun(first, last - first, source, self.key.slice(start, stop))


@dataclass(frozen=True, slots=True)
class BlendHit:
    """The answer to a blend lookup: ascending runs that do not overlap. `lease` keeps their chunks."""

    runs: tuple[BlendRun, ...]
    lease: Lease


NO_BLEND = BlendHit((), MISS)

PendingBlendLookup = Pending[BlendHit]


def submit_blend_lookup(
    client: SchedulerClient, request_id: str, segments: "Segments", *, min_run_tokens: int = 0
) -> PendingBlendLookup:
    """Look up segments of a prompt in chunks of any prompts, without waiting.

    A depot without this feature finds none. `end_request` releases the lease of the answer.
    """
    if not segments:
        return Pending(client, None, NO_BLEND, hit_of)
    return client.submit(
        lambda context: BlendLookup(context, request_id, segments.packed, min_run_tokens), NO_BLEND, hit_of
    )


def note_contents(client: SchedulerClient, key: KeyRun, segments: "Segments") -> None:
    """Tell the depot which segments the chunks of `key`, a run from chunk 0 on, hold.

    All of these chunks were computed exactly. There is no reply.
    """
    if key.digests and segments:
        client.post(lambda context: [NoteContents(context, key.digests, segments.packed)])


def report_blend(client: SchedulerClient, reused_tokens: int, recomputed_tokens: int) -> None:
    """Report how many tokens of a blended prompt were reused unchanged, and how many were recomputed."""
    client.post(lambda context: [ReportBlend(context, reused_tokens, recomputed_tokens)])


def hit_of(reply: frames.Reply, session: Session) -> BlendHit | None:
    """Return the answer in a reply to a blend lookup, None if it has no run."""
    if not isinstance(reply, BlendReply) or not reply.lease:
        return None
    runs: list[BlendRun] = []
    for position, length, source, first, count, start in BLEND_RUN.iter_unpack(reply.runs):
        digests = slice_digests(reply.digests, start, start + count)
        runs.append(BlendRun(position, length, source, KeyRun(digests, first, bytes(DIGEST_BYTES))))
    return BlendHit(tuple(runs), Lease(0, reply.lease, reply.lease_seconds, session))
