"""The answer to a lookup: the chunks found, and the lease that keeps them in the depot."""

from dataclasses import dataclass

from kvdepot.client.session import Session
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
    wants_tokens: bool = False  # whether the depot does not know the tokens of some chunks


MISS = Lease(0)


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
