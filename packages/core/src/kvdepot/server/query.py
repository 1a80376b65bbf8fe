"""A lookup under way."""

from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum

from kvdepot.index.index import ChunkIndex
from kvdepot.index.visibility import Match
from kvdepot.keys import num_digests, slice_digests
from kvdepot.server.contexts import Context
from kvdepot.wire import messages as m


class Rank(IntEnum):
    """The order in which a lookup asks the sources of further chunks."""

    COMPUTED_HERE = 1  # before tiers: what is being computed arrives without a read, and no tier has it yet
    PEERS = 2  # before tiers: another node's memory answers sooner than storage that nodes share
    TIERS = 3
    COMPUTED_ELSEWHERE = 4  # after tiers, as it comes through them


class Outcome(Enum):
    """The answer to a lookup."""

    HIT = "hit"  # the pool has all chunks
    PARTIAL = "partial hit"  # the pool has some leading chunks
    PENDING = "pending"  # others compute the next chunks: ask again
    MISS = "miss"


@dataclass(slots=True)
class Query:
    """The request of a lookup, and the leading chunks that are in the pool."""

    context: Context
    request: m.Lookup
    digests: bytes  # from chunk 0 on
    match: Match
    until: float = 0.0  # the deadline of all waits of the request
    brought: set[int] = field(default_factory=set[int])  # numbers of chunks that tiers bring meanwhile
    num_pending: int = 0  # of the chunks after `match`, how many others compute
    wants_tokens: bool = False  # whether the engine should report the tokens of the chunks that it gets
    waited_for: dict[Rank, str] = field(default_factory=dict[Rank, str])  # the sources that it waited for, with a name
    why: str = ""  # for the log: the reason why it did not find more

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
    def outcome(self) -> Outcome:
        """The answer as of now."""
        if self.is_whole:
            return Outcome.HIT
        if self.num_pending:
            return Outcome.PENDING
        return Outcome.PARTIAL if self.found else Outcome.MISS

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
