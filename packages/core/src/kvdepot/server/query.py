"""A lookup under way."""

from dataclasses import dataclass, replace

from kvdepot.index.index import ChunkIndex
from kvdepot.keys import DIGEST_BYTES, first_digests
from kvdepot.server.contexts import Context
from kvdepot.wire import messages as m


@dataclass(slots=True)
class Query:
    """The request of a lookup, and the leading chunks that are here."""

    context: Context
    request: m.Lookup
    digests: bytes  # from chunk 0 on
    found: int
    nodes: tuple[int, ...]
    until: float = 0.0  # the request's longest wait ends
    waited_for: str = ""  # what brought chunks, or was to
    num_promoted: int = 0  # chunks that tiers brought

    @property
    def is_whole(self) -> bool:
        """Whether the whole prefix is here."""
        return self.found * DIGEST_BYTES >= len(self.digests)

    @property
    def owner(self) -> tuple[int, str]:
        """The request, by context and name."""
        return self.context.number, self.request.request_id

    def refresh(self, index: ChunkIndex) -> int:
        """Count the chunks that are here now; return how many more they are."""
        before = self.found
        self.found, self.nodes = index.match(self.context.space, self.digests)
        return self.found - before

    def own_seconds(self, num_chunks: int) -> float:
        """Return how long the lookup's engine would compute this many chunks; 0.0 if that is unknown."""
        return num_chunks * self.context.space.spec.chunk_tokens * self.request.token_seconds

    def first(self, num_chunks: int) -> "Query":
        """Return the query for its first chunks alone."""
        return replace(self, digests=first_digests(self.digests, num_chunks))
