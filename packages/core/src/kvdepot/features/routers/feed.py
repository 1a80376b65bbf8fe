"""KV events on the engine's side: it describes its chunks to routers, and follows the chunks of all engines.

A `Description` goes to the depot, whose events report it. Engines that publish events themselves use a `NewsFeed` to
announce chunks that other engines stored, that tiers brought, or that were evicted.
"""

import logging
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from kvdepot.client.connection import Connection
from kvdepot.client.session import Session
from kvdepot.errors import DepotUnavailable, KVDepotError
from kvdepot.features.routers.messages import (
    MAXIMUM_DESCRIBED_CHUNKS,
    MAXIMUM_DESCRIBED_TOKENS,
    AwaitNews,
    DescribeChunks,
    DescribedGroup,
    ExtraKey,
    News,
)
from kvdepot.keys import KeyRun

logger = logging.getLogger(__name__)

_ID_BYTES = 8  # as `operators.holdings` keeps ids
_LARGEST_ID = (1 << 64) - 1
_WAIT_SECONDS: Final = 5.0  # per request, so that a new namespace is followed soon
PAUSE_SECONDS: Final = 0.5  # between two attempts: asking a depot without events twice a second is cheap
_AWAY_SECONDS: Final = 10.0  # a restarting depot keeps its chunks, but one that stays away counts as empty


@dataclass(frozen=True, slots=True)
class Description:
    """Describes the chunks of one run.

    Attributes:
        namespace: the digest of the namespace, equal for engines that share chunks.
        tokens: the token ids of whole chunks.
        block_ids: one id of 64 bits per block.
        parent_id: the id of the block before the run, None if the run begins with the first block.
        groups: the engine's KV cache groups that are reported to routers.
        lora_name: the name of the request's adapter, "" without one.
        extra_keys: one item per block, or empty if no block has any.
    """

    namespace: bytes
    tokens: Sequence[int]
    block_ids: Sequence[int]
    parent_id: int | None = None
    groups: tuple[DescribedGroup, ...] = ()
    lora_name: str = ""
    extra_keys: tuple[tuple[ExtraKey, ...] | None, ...] = ()

    def requests(self, context: int, key: KeyRun) -> Iterator[DescribeChunks]:
        """Yield the messages that describe a run, each with as many chunks as fit."""
        num_chunks = key.num_chunks
        if not num_chunks:
            return
        tokens, blocks = len(self.tokens) // num_chunks, len(self.block_ids) // num_chunks
        step = max(1, min(MAXIMUM_DESCRIBED_CHUNKS, MAXIMUM_DESCRIBED_TOKENS // max(1, tokens)))
        for start, stop in pairwise([*range(0, num_chunks, step), num_chunks]):
            ids = self.block_ids[start * blocks : stop * blocks]
            own = self.tokens[start * tokens : stop * tokens]
            before = self.block_ids[start * blocks - 1] if start else self.parent_id
            extra_keys = self.extra_keys[start * blocks : stop * blocks]
            yield DescribeChunks(
                context,
                self.namespace,
                key.slice(start, stop).digests,
                key.first_chunk + start,
                struct.pack(f"<{len(own)}I", *own),
                struct.pack(f"<{len(ids)}Q", *(each & _LARGEST_ID for each in ids)),
                b"" if before is None else (before & _LARGEST_ID).to_bytes(_ID_BYTES, "little"),
                self.groups,
                self.lora_name[:256],
                extra_keys if any(extra_keys) else (),
            )


class NewsFeed:
    """Follows a namespace until it is closed.

    Args:
        connection: the connection to the depot.
        namespace: the digest of the namespace.
        on_news: called on the thread with each reply. If `is_start`, the reply begins to list everything anew, as does
            the first reply after the depot was away.
        on_lost: called on the thread when the depot has been away for ten seconds, which voids all earlier news.
        wants_all: called on the thread before each request, at least every five seconds. If it returns True, the depot
            lists everything anew.
    """

    def __init__(
        self,
        connection: Connection,
        namespace: bytes,
        on_news: Callable[[News], None],
        on_lost: Callable[[], None],
        wants_all: Callable[[], bool],
    ) -> None:
        self.namespace = namespace  # assign another digest to follow that namespace from now on
        self._connection = connection
        self._on_news = on_news
        self._on_lost = on_lost
        self._wants_all = wants_all
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvdepot-news", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, within the wait of one request. Idempotent."""
        self._closing.set()

    def _run(self) -> None:
        lost_at: float | None = None  # when the depot went away; None while it is there, infinity after `on_lost`
        while not self._closing.is_set():
            try:
                session = self._connection.wait_until_open(PAUSE_SECONDS)
                if session.wants_tokens:
                    lost_at = None
                    self._follow(session)
            except KVDepotError as error:
                logger.debug("cannot get news from the depot: %s", error)
            except Exception:
                logger.exception("lost track of the depot's news: asking for everything again")
            if lost_at is None:
                lost_at = time.monotonic()
            elif time.monotonic() >= lost_at + _AWAY_SECONDS:
                lost_at = float("inf")
                self._on_lost()
            self._closing.wait(PAUSE_SECONDS)

    def _follow(self, session: Session) -> None:
        """Request news until the session is lost."""
        channel, position, namespace = self._connection.channel(session), 0, b""
        try:
            while not self._closing.is_set() and self._connection.session is session:
                if namespace != self.namespace or self._wants_all():
                    position, namespace = 0, self.namespace
                request = AwaitNews(session.context, namespace, position, _WAIT_SECONDS)
                reply = channel.call(request, _WAIT_SECONDS + self._connection.deadline_seconds)
                if not isinstance(reply, News):
                    raise DepotUnavailable(f"it answered with {type(reply).__name__}")
                position = reply.position
                if namespace == self.namespace:
                    self._on_news(reply)
        finally:
            channel.close()
