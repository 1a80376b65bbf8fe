"""Answers to lookups: the chunks found, and the lease that keeps them in the depot."""

from dataclasses import dataclass

from kvdepot.client.session import Session
from kvdepot.keys import DIGEST_BYTES, KeyRun, slice_digests
from kvdepot.wire import frames
from kvdepot.wire import messages as m


@dataclass(frozen=True, slots=True)
class Lease:
    """The answer to a lookup: `num_chunks` leading chunks are in the depot and stay there.

    They stay until the lease is released, its request or its scheduler ends, or `lease_seconds` have passed. With 0
    chunks, the answer is a miss and there is nothing to release.

    Another request is computing the next `num_pending` chunks. They are worth waiting for: ask again.
    """

    num_chunks: int
    number: int = 0
    lease_seconds: float = 0.0
    session: Session | None = None
    num_pending: int = 0
    num_promoted: int = 0  # number of the chunks that tiers brought for this lookup
    wants_tokens: bool = False  # whether the depot lacks a description of some chunks


MISS = Lease(0)


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


def lease_of(reply: frames.Reply, session: Session) -> Lease | None:
    """Return the answer in a reply to a lookup, None if the reply is of another kind."""
    if not isinstance(reply, m.LookupReply):
        return None
    if not reply.num_chunks:
        return Lease(0, num_pending=reply.num_pending) if reply.num_pending else MISS
    return Lease(
        reply.num_chunks,
        reply.lease,
        reply.lease_seconds,
        session,
        reply.num_pending,
        reply.num_promoted,
        reply.wants_tokens,
    )


def hit_of(reply: frames.Reply, session: Session) -> BlendHit | None:
    """Return the answer in a reply to a blend lookup, None if it has no run."""
    if not isinstance(reply, m.BlendReply) or not reply.lease:
        return None
    runs: list[BlendRun] = []
    for position, length, source, first, count, start in m.BLEND_RUN.iter_unpack(reply.runs):
        digests = slice_digests(reply.digests, start, start + count)
        runs.append(BlendRun(position, length, source, KeyRun(digests, first, bytes(DIGEST_BYTES))))
    return BlendHit(tuple(runs), Lease(0, reply.lease, reply.lease_seconds, session))
