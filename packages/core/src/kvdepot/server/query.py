"""A lookup under way."""

from dataclasses import dataclass, field, replace

from kvdepot.index.index import ChunkIndex
from kvdepot.index.visibility import Match
from kvdepot.keys import num_digests, slice_digests
from kvdepot.server.contexts import Context
from kvdepot.wire import messages as m


@dataclass(slots=True)
class Query:
    """The request of a lookup, and the leading chunks that are in the pool."""

    context: Context
    request: m.Lookup
    digests: bytes  # from chunk 0 on
    match: Match
    until: float = 0.0  # the deadline of all waits of the request
    waited_for: str = ""  # for the log: the source of further chunks, with `{joined}` and `{tiers}`
    joined: str = ""  # for the log: the request that computes the chunks that it waited for
    why_not_promoted: str = "for so few tokens or by so many lookups"  # for the log, if no other reason is found
    brought: set[int] = field(default_factory=set[int])  # numbers of chunks that tiers bring meanwhile
    num_promoted: int = 0  # chunks of this answer that a tier brought

    @property
    def num_chunks(self) -> int:
        """The number of chunks that it asks for."""
        return num_digests(self.digests)

    @property
    def found(self) -> int:
        """The number of leading chunks that are in the pool."""
        return self.match.num_chunks

    @property
    def is_whole(self) -> bool:
        """Whether the whole prefix is in the pool. Of a query for `first` chunks, even more may be."""
        return self.found >= self.num_chunks

    @property
    def owner(self) -> tuple[int, str]:
        """The request's context and id."""
        return self.context.number, self.request.request_id

    def refresh(self, index: ChunkIndex) -> None:
        """Match the prefix again."""
        self.match = index.visibility.match(self.context.space, self.digests)

    def own_seconds(self, num_chunks: int) -> float:
        """Return the seconds that the lookup's engine needs to compute this many chunks, 0.0 if unknown."""
        return num_chunks * self.context.space.spec.chunk_tokens * self.request.token_seconds

    def first(self, num_chunks: int) -> "Query":
        """Return a query for the first chunks only."""
        return replace(self, digests=slice_digests(self.digests, 0, num_chunks))
